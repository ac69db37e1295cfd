"""Requests that were routed and are not over.

Responsibility: the life of a reservation: prefilling, decoding, over; what each step changes with its pool's planner
and in the index; and deadlines, since a client may die without a word.

Invariants:
- A reservation ends once: by `done`, `cancel`, or its deadline. Then no queue and no batch counts it, and what it was
  expected to make is expected no more.
- Ids are compared whole. They begin with a random part of this process, so that ids from before a restart are unknown,
  never another request's.
- A request whose answer comes whole counts in its batch from the end of its prefill on, which is predicted where no leg
  of its own reports it.
- Each reservation has one entry in the heap of deadlines; entries of ended ones are at most as many as live ones.

Concurrency: one thread; the caller says what time it is.
"""

from __future__ import annotations

import heapq
import secrets
from collections import deque
from collections.abc import Iterator

import msgspec

from kvfs._native.cluster.index import ClusterIndex
from kvfs.keys import HASH_BYTES
from kvfs.limits import (
    DECODE_DEADLINE_S,
    EXPECTED_BLOCKS_S,
    MAX_FADING,
    MAX_RESERVATIONS,
    OVERDUE_S,
    PREFILL_DEADLINE_S,
)
from scheduler.conductor.planning.planner import Plan
from scheduler.conductor.pool import Member, Pool


class Reservation(msgspec.Struct, eq=False):
    """One request on its instances."""

    id: str
    number: int
    pool: Pool
    prefill: Member
    decode: Member
    tokens: int
    made: bytes
    """Hashes of the blocks that its prefill makes; none once it has failed."""
    cached_tokens: int
    """Tokens that its prefill reuses, as predicted."""
    prefill_predicted_tokens: int
    decode_predicted_tokens: int
    """Cached tokens that each instance's engine should find; one number where one instance does both."""
    deadline_s: float
    made_s: float
    service_s: float
    """How long its prefill was predicted to take."""
    is_streamed: bool = True
    """Whether its first token will be reported."""
    is_measured: bool = True
    """Whether its tokens are known, so that its times can be compared with others; else its length is an estimate."""
    started_s: float | None = None
    """When its prefill started: no other was before it. None: not yet, or nobody saw the one before it end."""
    prefilled_s: float | None = None
    prefill_s: float | None = None
    """How long its prefill took, where its end was seen."""
    first_token_s: float | None = None
    """Since when it is in its batch."""

    @property
    def has_leg(self) -> bool:
        """Return whether prefill and decode are on two instances."""
        return self.prefill is not self.decode

    def seen_by(self, *, prefill_leg: bool) -> tuple[Member, int]:
        """Return the instance whose engine says what it had cached, and what it was predicted to have."""
        if prefill_leg:
            return self.prefill, self.prefill_predicted_tokens
        return self.decode, self.decode_predicted_tokens


class Reservations:
    """See the module's header."""

    def __init__(self, index: ClusterIndex) -> None:
        self._index = index
        self._epoch = secrets.token_hex(4)
        self._by_id: dict[str, Reservation] = {}
        self._by_number: dict[int, Reservation] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._unseen: dict[int, float] = {}
        """When prefills that run, and whose end nobody sees, were predicted to end: one for each instance."""
        self._fading: deque[tuple[float, int, bytes]] = deque()
        self._next = 0
        self.expired = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Reservation]:
        return iter(tuple(self._by_id.values()))

    def next_id(self) -> str:
        """Return the id of the next decision, which is a reservation's if it makes one."""
        return f"{self._epoch}-{self._next}"

    def pass_over(self) -> str:
        """Use up an id, for a decision without a reservation, and return it."""
        self._next += 1
        return f"{self._epoch}-{self._next - 1}"

    def get(self, id: str) -> Reservation | None:
        """Return the reservation of this id, or None."""
        return self._by_id.get(id)

    # --- steps --------------------------------------------------------------------------------------------
    @property
    def is_full(self) -> bool:
        """Return whether no request more may be reserved."""
        return len(self._by_id) >= MAX_RESERVATIONS

    def reserve(
        self,
        pool: Pool,
        plan: Plan,
        tokens: int,
        made: bytes,
        predictions: tuple[int, int, int],
        now_s: float,
        *,
        promised_s: float = float("inf"),
        is_streamed: bool = True,
        is_measured: bool = True,
    ) -> Reservation:
        """Commit a plan. REQUIRES both instances, and that it is not full.

        `predictions`: cached tokens that the decision counts on, and that each engine should find.
        """
        decision = plan.decision
        assert decision.prefill is not None
        assert decision.decode is not None
        prefill, decode = pool.slots[decision.prefill.instance], pool.slots[decision.decode.instance]
        assert prefill is not None
        assert decode is not None
        deadline_s = now_s + decision.prefill.ttft_s + PREFILL_DEADLINE_S
        found = Reservation(
            self.next_id(),
            self._next,
            pool,
            prefill,
            decode,
            tokens,
            made,
            *predictions,
            deadline_s,
            now_s,
            decision.prefill.prefill_s,
            is_streamed,
            is_measured,
        )
        self._next += 1
        pool.planner.commit(found.number, plan, now_s, promised_s=promised_s)
        self._index.produce(prefill.expected, found.number, now_s + decision.prefill.ttft_s, made)
        self._by_id[found.id] = self._by_number[found.number] = found
        for member in {prefill, decode}:
            member.requests += 1
        heapq.heappush(self._deadlines, (deadline_s, found.number))
        self._start(pool, prefill.slot, now_s)
        return found

    def prefilled(self, found: Reservation, now_s: float, *, seen: bool = True) -> None:
        """End the prefill; doing so twice is harmless. `seen`: whether it ended just then, else at some time before."""
        if found.prefilled_s is not None:
            return
        found.prefilled_s = now_s
        self._unseen.pop(found.number, None)
        if seen and found.started_s is not None:
            found.prefill_s = now_s - found.started_s
        found.pool.planner.prefilled(found.number)
        self._index.produced(found.number, found.made)
        if found.made:
            self._fading.append((now_s + EXPECTED_BLOCKS_S, found.prefill.expected, found.made))
            self._fade(now_s)
        self._start(found.pool, found.prefill.slot, now_s, seen=seen)
        if not found.is_streamed:
            self._join(found, now_s)

    def prefill_failed(self, found: Reservation, now_s: float) -> None:
        """End a prefill that made nothing, if it has not ended."""
        if found.prefilled_s is not None:
            return
        found.prefilled_s = now_s
        found.pool.planner.prefilled(found.number)
        self._unmake(found, now_s)
        found.made = b""
        if not found.is_streamed:
            self._join(found, now_s)

    def _unmake(self, found: Reservation, now_s: float) -> None:
        """Expect nothing of a prefill that ends without its blocks, and start the next."""
        self._index.produced(found.number, found.made)
        self._index.remove(found.prefill.expected, found.made)
        self._start(found.pool, found.prefill.slot, now_s, seen=False)

    def _start(self, pool: Pool, slot: int, now_s: float, *, seen: bool = True) -> None:
        """Start the next prefill; `seen`: whether its engine has begun with it just then."""
        number = pool.planner.start(slot, now_s)
        if number is not None:
            self._started(self._by_number[number], now_s, seen=seen)

    def _started(self, found: Reservation, now_s: float, *, seen: bool = True) -> None:
        """Note that a prefill has started, and when it ends if nobody will say so."""
        if seen:
            found.started_s = now_s
        if not found.is_streamed and not found.has_leg:
            self._unseen[found.number] = now_s + found.service_s

    def first_token(self, found: Reservation, now_s: float, *, seen: bool = True) -> None:
        """Note that the answer has begun; doing so twice is harmless. `seen`: see `prefilled`."""
        self.prefilled(found, now_s, seen=seen)
        self._join(found, now_s)

    def _join(self, found: Reservation, now_s: float) -> None:
        """Count the request in its batch, once."""
        if found.first_token_s is not None:
            return
        found.first_token_s = now_s
        found.deadline_s = now_s + DECODE_DEADLINE_S
        found.pool.planner.joined(found.number)
        found.pool.planner.add_active(found.decode.slot, 1, found.tokens)

    def owe(self, found: Reservation, cached_tokens: int | None, now_s: float) -> None:
        """Note that an engine is to announce the blocks of an answered prompt, if it has said nothing since the request
        came, and has not announced them before. `cached_tokens`: that it says it had; None: it did not say."""
        block_tokens = found.pool.namespace.block_tokens
        if cached_tokens is not None and cached_tokens >= (found.tokens - 1) // block_tokens * block_tokens:
            return
        for stream in found.prefill.streams:
            if stream.is_store or not found.made or stream.event_s >= found.made_s:
                continue
            mask = stream.mask_of(found.pool.cache_model)
            if self._index.depths(found.made, [mask])[0] * HASH_BYTES < len(found.made):
                stream.owed_s = min(stream.owed_s, now_s)

    def end(self, found: Reservation, now_s: float) -> None:
        """End a reservation, wherever it is."""
        del self._by_id[found.id], self._by_number[found.number]
        self._unseen.pop(found.number, None)
        self._compact()
        for member in {found.prefill, found.decode}:
            member.requests -= 1
        if found.first_token_s is not None:
            found.pool.planner.add_active(found.decode.slot, -1, -found.tokens)
            return
        found.pool.planner.dropped(found.number)
        if found.prefilled_s is None:
            self._unmake(found, now_s)

    # --- time ---------------------------------------------------------------------------------------------
    def expire(self, now_s: float) -> list[Reservation]:
        """End reservations past their deadline, and return them."""
        over = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            number = heapq.heappop(self._deadlines)[1]
            found = self._by_number.get(number)
            if found is None:
                continue
            if found.deadline_s > now_s:
                heapq.heappush(self._deadlines, (found.deadline_s, number))
            else:
                self.end(found, now_s)
                over.append(found)
        self.expired += len(over)
        return over

    def advance(self, pool: Pool, now_s: float) -> None:
        """Start prefills that may, and take those as done whose end nobody sees, or whose report is overdue, so that
        queues go on."""
        self._fade(now_s)
        # Each starts the next at its own end, whose end may be due as well.
        while due := [(ends_s, number) for number, ends_s in self._unseen.items() if ends_s <= now_s]:
            for ends_s, number in sorted(due):
                self.prefilled(self._by_number[number], ends_s, seen=False)
        for number in pool.planner.overdue(now_s, OVERDUE_S):
            self.prefilled(self._by_number[number], now_s, seen=False)
        for number in pool.planner.start_idle(now_s):
            self._started(self._by_number[number], now_s)

    def _fade(self, now_s: float) -> None:
        """Expect finished prefills' blocks no more: their events have come, or never will."""
        while self._fading and (self._fading[0][0] <= now_s or len(self._fading) > MAX_FADING):
            _, source, made = self._fading.popleft()
            self._index.remove(source, made)

    def _compact(self) -> None:
        if len(self._deadlines) > 2 * len(self._by_number) + 1:
            self._deadlines = [(found.deadline_s, n) for n, found in self._by_number.items()]
            heapq.heapify(self._deadlines)
