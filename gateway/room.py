"""The room that bodies under way have in the tier, in one process: it grows with what has come of them.

Responsibility: who holds how much, whether one more may be let in or have more, and who is to end when others wait.
What is announced counts only to see that all can be finished; what is held is a little at first, and doubles as it
fills.

Invariants:
- All that is held fits into the process's part of the quota, and an owner's into limits.OWNER_ROOM_PERCENT of that.
- What is held stays finishable (the banker's algorithm, of one resource): in some order everybody can have what he
  claims out of what is free and what those before him give back. So bodies that wait for more never all wait.
- While somebody waits, a body must move at the rate that its room asks for (`Holding.is_slow`), else it ends, the one
  with the most room first. While nobody does, the limits of every connection are the only ones.

Concurrency: one trio thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

import trio

from gateway.session import Session
from kvfs import limits
from kvfs.errors import QuotaExceeded


class Arriving(Protocol):
    """A body that a client is sending."""

    @property
    def received_bytes(self) -> int: ...

    @property
    def body_done(self) -> bool: ...

    def give_up(self) -> None:
        """End it as if it had stalled."""
        ...


class Granted(Protocol):
    """A draft of a session."""

    session: Session
    slot: int
    generation: int


class Holding:
    """The room of one body, or of what is copied, which has no body and all of its room at once."""

    __slots__ = (
        "_began_s",
        "_more",
        "_room",
        "_waits_s",
        "body",
        "claim_bytes",
        "draft",
        "held_bytes",
        "owner",
    )

    def __init__(
        self,
        room: Room,
        owner: str,
        claim_bytes: int,
        held_bytes: int,
        body: Arriving | None,
        more: Callable[[Holding], Awaitable[None]],
    ) -> None:
        self.owner = owner
        self.claim_bytes = claim_bytes
        """All that the body will have."""
        self.held_bytes = held_bytes
        self.body = body
        self.draft: Granted | None = None
        """What the room is for; it lets go of its holding, and so of this, when it is closed."""
        self._room = room
        self._more = more
        self._began_s = trio.current_time()
        self._waits_s: float | None = None

    async def grow(self) -> None:
        """Have as much again, or all that is claimed. Raises S3Error SlowDown, NoSpace, SessionClosed."""
        self._waits_s = trio.current_time()
        try:
            await self._more(self)
        finally:
            self._began_s += trio.current_time() - self._waits_s
            self._waits_s = None

    @property
    def next_bytes(self) -> int:
        return min(self.claim_bytes, 2 * self.held_bytes)

    def is_slow(self, now_s: float) -> bool:
        """Whether it takes longer over its room than limits.ROOM_TURN_S, and comes slower than limits.ENOUGH_RATE."""
        age_s = now_s - self._began_s
        if self.body is None or self._waits_s is not None or age_s < limits.ROOM_GRACE_S:
            return False
        rate = min(self.held_bytes / limits.ROOM_TURN_S, limits.ENOUGH_RATE_BYTES_S)
        return not self.body.body_done and self.body.received_bytes < rate * age_s

    def release(self) -> None:
        """Twice is harmless."""
        self._room.release(self)


class Room:
    """See the module's header."""

    def __init__(self, more: Callable[[Holding], Awaitable[None]]) -> None:
        """`more`: gets a holding `next_bytes` of the tier."""
        self._more = more
        self._capacity = 0
        self._share = 0
        self._held = 0
        self._owners: Counter[str] = Counter()
        self._transfers: Counter[str] = Counter()
        self._bodies: set[Holding] = set()
        self._growing: set[Holding] = set()
        """Those that hold less than they claim."""
        self._hurried_s = -1.0
        self.given_up = 0
        """Bodies that ended because others waited."""

    def resize(self, capacity_bytes: int, largest_bytes: int) -> None:
        """A share is never less than one object of the largest size."""
        self._capacity = capacity_bytes
        share = max(capacity_bytes * limits.OWNER_ROOM_PERCENT // 100, largest_bytes)
        self._share = min(share, capacity_bytes)

    def admit(
        self, owner: str, claim_bytes: int, body: Arriving | None = None, *, whole: bool = False
    ) -> Holding:
        """The room of a body, or of what has none; `whole`: all of it at once. Raises QuotaExceeded."""
        first = claim_bytes if body is None or whole else min(claim_bytes, limits.FIRST_ROOM_BYTES)
        holding = Holding(self, owner, claim_bytes, 0, body, self._more)
        self.set(holding, first)
        if body is not None:
            self._bodies.add(holding)
        return holding

    def set(self, holding: Holding, held_bytes: int) -> None:
        """Let a holding have so much. Raises QuotaExceeded, and leaves all as it is."""
        before = holding.held_bytes
        self._put(holding, held_bytes)
        if held_bytes > before and not self._is_safe(holding):
            self._put(holding, before)
            raise QuotaExceeded(f"{holding.owner}: no room for {held_bytes} bytes of a body")

    def _put(self, holding: Holding, held_bytes: int) -> None:
        self._held += held_bytes - holding.held_bytes
        self._owners[holding.owner] += held_bytes - holding.held_bytes
        holding.held_bytes = held_bytes
        if 0 < held_bytes < holding.claim_bytes:
            self._growing.add(holding)
        else:
            self._growing.discard(holding)

    def _is_safe(self, holding: Holding) -> bool:
        own_bytes = self._owners[holding.owner]
        if self._held > self._capacity or own_bytes > self._share:
            return False
        if holding not in self._growing:  # it ends by itself, and then all is as before
            return True
        own = [each for each in self._growing if each.owner == holding.owner]
        return _can_end(self._growing, self._capacity) and _can_end(own, self._share)

    def release(self, holding: Holding) -> None:
        self._put(holding, 0)
        self._bodies.discard(holding)
        if not self._owners[holding.owner]:
            del self._owners[holding.owner]

    # --- transfers -----------------------------------------------------------------------------------------
    def enter(self, owner: str) -> None:
        """Begin to move an object larger than DRAM takes. Raises QuotaExceeded."""
        most = limits.MAX_TRANSFERS
        if (
            self._transfers.total() >= most
            or self._transfers[owner] >= most * limits.OWNER_ROOM_PERCENT // 100
        ):
            raise QuotaExceeded(f"{owner}: {most} large objects are on their way, which is the limit")
        self._transfers[owner] += 1

    def leave(self, owner: str) -> None:
        self._transfers[owner] -= 1
        if not self._transfers[owner]:
            del self._transfers[owner]

    # --- pressure ------------------------------------------------------------------------------------------
    def hurry(self, owner: str) -> None:
        """Somebody of this owner waits: end the slow body with the most room, of his own if it is his share that is
        used up."""
        now_s = trio.current_time()
        if now_s - self._hurried_s < limits.ROOM_HURRY_S:
            return
        self._hurried_s = now_s
        used_up = self._owners[owner] + limits.FIRST_ROOM_BYTES > self._share
        slow = [each for each in self._bodies if each.is_slow(now_s) and (not used_up or each.owner == owner)]
        if slow:
            worst = max(slow, key=lambda each: each.held_bytes)
            self._bodies.discard(worst)
            self.given_up += 1
            assert worst.body is not None
            worst.body.give_up()


def _can_end(growing: Iterable[Holding], limit_bytes: int) -> bool:
    """Whether each can have what it claims, one after the other, once those that claim no more have ended."""
    waiting = sorted(growing, key=lambda each: each.claim_bytes - each.held_bytes)
    free = limit_bytes - sum(each.held_bytes for each in waiting)
    for each in waiting:
        if min(each.claim_bytes, limit_bytes) - each.held_bytes > free:
            return False
        free += each.held_bytes
    return True
