"""The Conductor: instances, what their caches hold, what is under way, and the policies over all that.

Responsibility: routing with a reservation, the reports of clients, costs fitted while it runs: state around the pools'
planners. It implements `values.Router`. No I/O: the edge is `scheduler.conductor.door`.

Invariants:
- A decision is the policy's on the state of that moment; roles alone (`planning.legs`) change which of its candidates
  are taken.
- A distrusted instance's blocks do not count. Where nothing is known of any cache, load decides; the answer says so.

Concurrency: one thread. Time is that of the clock it is given.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from kvfs._native.cluster.index import ClusterIndex
from kvfs.errors import InvalidRequest
from kvfs.keys import HASH_BYTES
from kvfs.limits import MAX_RESERVATIONS
from scheduler.conductor.copy_orders import CopyOrders
from scheduler.conductor.decision_log import DecisionLog, Logged, by_medium
from scheduler.conductor.explanations import Explanations, Weighed, ranges
from scheduler.conductor.planning.planner import Plan, Question
from scheduler.conductor.pool import Member, Options, Pool
from scheduler.conductor.registry import Registry
from scheduler.conductor.reservations import Reservation, Reservations
from scheduler.conductor.role_orders import RoleOrders
from scheduler.conductor.sources import ALL_BLOCKS, Stream
from scheduler.conductor.values import NOTHING_SAID, Refused, Routed, RouteRequest, Usage, peer_between
from scheduler.conductor.waiters import Waiters, turned_down
from scheduler.routing.admission import MAX_RETRY_AFTER_S, Admission, Slo, Verdict, admit
from scheduler.routing.decisions import Decision

log = logging.getLogger("kvfs.conductor")

FULL = f"{MAX_RESERVATIONS} requests are routed and not over, which is the limit"
DEGRADED = "nothing is known of the instances' caches, so load alone decided"
WITHOUT_TOKENS = "the prompt came without tokens and hashes, so load alone decided"


class Conductor:
    """Implement `Router`; see the module's header."""

    def __init__(self, index: ClusterIndex, options: Options, clock: Callable[[], float]) -> None:
        self.counts: Counter[str] = Counter()
        self.registry = Registry(index, options, clock, self.counts)
        self._index, self._options, self._clock = index, options, clock
        self._reservations = Reservations(index)
        self._explanations = Explanations()
        self._waiters = Waiters()
        self.log = DecisionLog()
        self.copies: CopyOrders | None = None
        if options.copies:
            self.copies = CopyOrders(self.registry, index, self._reservations.pass_over)
        self._roles: RoleOrders | None = None
        if options.relabels is not None:
            self._roles = RoleOrders(
                self.registry,
                self.log,
                options.relabels,
                self._reservations.pass_over,
                self._waiters.contexts,
            )

    # --- instances ----------------------------------------------------------------------------------------
    def remove(self, name: str) -> None:
        """Remove an instance; its requests end. Raises NotFound."""
        _, member = self.registry.member(name)
        now_s = self._clock()
        for reservation in self._reservations:
            if member in (reservation.prefill, reservation.decode):
                self._reservations.end(reservation, now_s)
                self.log.ended(reservation.id, "orphaned")
                self.counts["orphaned"] += 1
        self.registry.remove(name)

    def unreachable(self, instance: str) -> None:
        self.registry.unreachable(instance)

    def heard(self, instances: Iterable[str], waiting: Iterable[str]) -> None:
        """Note of which instances bytes came to a proxy, and which requests, by their ids, wait there."""
        self.registry.heard(instances)
        self._waiters.heard(waiting, self._clock())

    # --- routing ------------------------------------------------------------------------------------------
    def route(self, request: RouteRequest) -> Routed | Refused:
        """Choose instances and reserve them; see `values.Router`."""
        now_s = self._clock()
        pool = self.registry.pool(request.model)
        hashes, tokens = pool.question(request)
        slo = _slo(request, self._options.slo)
        logged = Logged("", now_s, pool.model, tokens, slo, waited_s=request.waited_s)
        if self._reservations.is_full:
            return self._refuse(Refused(reason=FULL, retry_after_s=MAX_RETRY_AFTER_S), logged)
        reusable = (tokens - 1) // pool.namespace.block_tokens
        question = Question(
            hashes[: reusable * HASH_BYTES],
            tokens,
            pool.namespace.block_tokens,
            now_s - request.waited_s,
            now_s,
            slo,
            pool.slots_of(request.exclude) if request.exclude else (),
            request.both_legs,
            self._waiters.holds(request.deferred_id, pool),
        )
        plan = pool.planner.plan(question)
        decision = plan.decision
        admission = admit(decision, pool.costs, slo, self._options.admission)
        weighed = self._weighed(pool, request, question, plan, admission)
        if admission.verdict is not Verdict.ADMIT or decision.prefill is None or decision.decode is None:
            return self._turn_down(pool, request, question, weighed, logged)
        self._waiters.end(request.deferred_id, pool)
        self._explanations.keep(weighed)
        self.counts["routed"] += 1
        self.counts["degraded"] += bool(weighed.degraded)
        self.counts["without_tokens"] += weighed.degraded == WITHOUT_TOKENS
        return self._reserve(pool, request, plan, weighed, hashes, reusable, logged)

    def _turn_down(
        self, pool: Pool, request: RouteRequest, question: Question, weighed: Weighed, logged: Logged
    ) -> Refused:
        """Let a request wait where that helps, and where there is room; else refuse it."""
        admission, now_s = weighed.admission, question.now_s
        waits = admission.verdict is Verdict.DEFER
        if waits and self._waiters.ask_again(request.deferred_id, pool, now_s):
            return turned_down(request.deferred_id, admission, question.slo, deferred=True)
        self._waiters.end(request.deferred_id, pool)
        self._explanations.keep(weighed)
        self._reservations.pass_over()
        waits = waits and self._waiters.add(weighed.id, pool, question.tokens, question.arrival_s, now_s)
        self.counts["deferred" if waits else "refused"] += 1
        return self._refuse(turned_down(weighed.id, admission, question.slo, deferred=waits), logged)

    def _refuse(self, refused: Refused, logged: Logged) -> Refused:
        self.log.refused(refused, logged)
        return refused

    def _reserve(
        self,
        pool: Pool,
        request: RouteRequest,
        plan: Plan,
        weighed: Weighed,
        hashes: bytes,
        reusable: int,
        logged: Logged,
    ) -> Routed:
        decision, block_tokens = plan.decision, pool.namespace.block_tokens
        chosen = decision.prefill
        assert chosen is not None
        cached = chosen.reused_blocks * block_tokens
        before_last = hashes[: reusable * HASH_BYTES]
        depths, predicted = self._predict(pool, decision, before_last)
        made = hashes[chosen.reused_blocks * HASH_BYTES :]
        found = self._reservations.reserve(
            pool,
            plan,
            weighed.tokens,
            made,
            (cached, *predicted),
            weighed.at_s,
            promised_s=logged.slo.ttft_s,
            is_streamed=request.streamed,
            is_measured=request.tokens is not None or bool(hashes),
        )
        if self._roles is not None:
            self._roles.committed(pool, weighed.tokens, cached, chosen.prefill_s, weighed.at_s)
        if self.copies is not None and before_last:
            self.copies.routed(pool, chosen.instance, before_last)
        routed = _routed(found, decision, weighed, cached, before_last[(reusable - 1) * HASH_BYTES :])
        reused = by_medium(depths, chosen.reused_blocks) if cached else ()
        self.log.routed(routed, logged, predicted[0], [(medium, n * block_tokens) for medium, n in reused])
        return routed

    def _predict(
        self, pool: Pool, decision: Decision, hashes: bytes
    ) -> tuple[list[tuple[str, int]], tuple[int, int]]:
        """Return how many blocks the prefill instance's media hold, each with those before it, and the cached tokens
        that its engine and that of the decode instance should find."""
        assert decision.prefill is not None
        assert decision.decode is not None
        prefill, decode = pool.slots[decision.prefill.instance], pool.slots[decision.decode.instance]
        assert prefill is not None
        assert decode is not None
        media, masks = pool.media_of(prefill)
        # What the index says without the judgement of trust, so that a distrusted instance can earn it back.
        *depths, decode_depth = self._index.depths(hashes, [*masks, pool.mask_of(decode)])
        depth = max(decision.prefill.reused_blocks, depths[-1])
        tokens = pool.namespace.block_tokens
        decode_tokens = (depth if prefill is decode else decode_depth) * tokens
        return list(zip(media, depths, strict=True)), (depth * tokens, decode_tokens)

    def _weighed(
        self, pool: Pool, request: RouteRequest, question: Question, plan: Plan, admission: Admission
    ) -> Weighed:
        return Weighed(
            self._reservations.next_id(),
            pool.model,
            question.now_s,
            question.tokens,
            question.block_tokens,
            plan,
            admission,
            pool.names,
            pool.source_names,
            tuple(request.exclude),
            _degraded(pool, request),
        )

    def explain(self, id: str) -> dict[str, Any]:
        """Return why a request went where it went. Raises NotFound."""
        order = None if self._roles is None else self._roles.explain(id)
        return self._explanations.explain(id) if order is None else order

    def match(self, request: RouteRequest) -> dict[str, int]:
        """Return how many tokens of a prompt each instance holds, from the first on. Raises as `route`."""
        pool = self.registry.pool(request.model)
        hashes, _ = pool.question(request)
        members = list(pool.members.values())
        depths = self._index.depths(hashes, [pool.mask_of(member) for member in members])
        tokens = pool.namespace.block_tokens
        return {member.instance.name: depth * tokens for member, depth in zip(members, depths, strict=True)}

    def depths(self, hashes: bytes, masks: Sequence[int]) -> list[int]:
        """Return how many blocks of a prompt, from the first on, the sources of each mask of the index hold."""
        return self._index.depths(hashes, masks)

    def count_blocks(self, sources: Iterable[int]) -> int:
        """Count the blocks that sources of the index hold; one of several sources counts once for each."""
        return sum(map(self._index.source_blocks, sources))

    # --- reports of clients -------------------------------------------------------------------------------
    def prefilled(self, id: str) -> None:
        found = self._report(id)
        if found is not None:
            self._reservations.prefilled(found, self._clock())

    def prefill_failed(self, id: str) -> None:
        found = self._report(id)
        if found is not None and found.has_leg:
            self._reservations.prefill_failed(found, self._clock())

    def first_token(self, id: str) -> None:
        found = self._report(id)
        if found is not None:
            now_s = self._clock()
            self._reservations.first_token(found, now_s)
            self.log.first_token(id, now_s)

    def done(self, id: str, usage: Usage = NOTHING_SAID) -> None:
        found = self._report(id)
        if found is None:
            return
        now_s, pool = self._clock(), found.pool
        member, predicted = found.seen_by(prefill_leg=usage.prefill_leg)
        self.log.done(id, predicted, usage, now_s)
        self._observe_prefill(found, usage)
        cached_tokens, output_tokens = usage.cached_tokens, usage.output_tokens
        if found.is_streamed and found.first_token_s is not None and output_tokens is not None:
            self._observe_steps(found, output_tokens, now_s - found.first_token_s, now_s)
        self._reservations.first_token(found, now_s, seen=False)
        self._reservations.owe(found, cached_tokens if member is found.prefill else None, now_s)
        if cached_tokens is not None:
            self.counts["predicted_tokens"] += predicted
            self.counts["cached_tokens"] += cached_tokens
            if member.trust.compare(predicted, cached_tokens):
                self.registry.judged(pool, member)
        if output_tokens is not None and output_tokens > 0:
            pool.planner.answered(output_tokens)
        self._reservations.end(found, now_s)
        self.counts["done"] += 1

    def cancel(self, id: str) -> None:
        if self._waiters.end(id):
            self.counts["left"] += 1
            return
        found = self._report(id)
        if found is not None:
            self._reservations.end(found, self._clock())
            self.log.ended(id, "cancelled")
            self.counts["cancelled"] += 1

    def is_live(self, id: str) -> bool:
        """Return whether a reservation of this id is not over."""
        return self._reservations.get(id) is not None

    def waits(self, id: str) -> bool:
        """Return whether a request that was deferred with this id waits."""
        return id in self._waiters

    def _report(self, id: str) -> Reservation | None:
        found = self._reservations.get(id)
        if found is None:
            self.counts["unknown_ids"] += 1
        return found

    def _observe_steps(self, found: Reservation, output_tokens: int, took_s: float, now_s: float) -> None:
        """Fit the costs to the steps of one answer, from its first token on."""
        if output_tokens > 1 and took_s > 0:
            load = found.pool.planner.load(found.decode.slot, now_s)
            found.pool.fitter.observe_step(
                load.active_tokens, load.active_requests, took_s / (output_tokens - 1)
            )

    def _observe_prefill(self, found: Reservation, usage: Usage) -> None:
        """Fit the costs to a prefill that somebody saw end, by the cached tokens that its own engine found."""
        is_other_leg = found.has_leg and not usage.prefill_leg
        cached_tokens = found.cached_tokens if is_other_leg else usage.cached_tokens
        if cached_tokens is not None and found.prefill_s and found.is_measured:
            with suppress(InvalidRequest):
                found.pool.fitter.observe_prefill(
                    found.tokens, min(cached_tokens, found.tokens), found.prefill_s
                )

    # --- time and status ----------------------------------------------------------------------------------
    def tick(self) -> None:
        """Do what time brings: deadlines, queues, instances tried again, costs, sweeping. To be called often."""
        now_s = self._clock()
        self.registry.sweep()
        for reservation in self._reservations.expire(now_s):
            self.log.ended(reservation.id, "expired")
            log.debug("reservation %s ended by its deadline", reservation.id)
        for pool in self.registry.pools():
            pool.refresh(now_s)
            self._reservations.advance(pool, now_s)
            if self._options.fitted:
                pool.fit()
        self._waiters.look(now_s)
        if self._roles is not None:
            self._roles.tick(now_s)
        if self.copies is not None:
            self.copies.tick(now_s)

    def now_s(self) -> float:
        """Return the time of the Conductor's clock."""
        return self._clock()

    def status(self) -> dict[str, Any]:
        """Return counters, instances and streams as JSON values."""
        now_s = self._clock()
        return {
            "blocks": len(self._index),
            "reservations": len(self._reservations),
            "waiting": len(self._waiters),
            "expired": self._reservations.expired,
            "awaited": sorted(self.registry.awaited),
            "unregistered": dict(self.registry.unregistered),
            "counts": dict(self.counts),
            "decisions": self.log.status(),
            "copies": None if self.copies is None else self.copies.status(),
            "roles": None if self._roles is None else self._roles.status(),
            "instances": [
                self._instance_status(pool, member, now_s) for pool, member in self.registry.members()
            ],
            "streams": [
                {
                    "stream": str(stream.name),
                    "knowledge": stream.knowledge.value,
                    "epoch": stream.epoch,
                    "events": stream.events,
                    "silent_s": None if stream.heard_s == float("-inf") else now_s - stream.heard_s,
                    **self._blocks_of(stream),
                }
                for stream in self.registry.streams()
            ],
        }

    def _blocks_of(self, stream: Stream) -> dict[str, Any]:
        """Return how many blocks of full attention a stream has in each medium, and how many of windows and chunks of
        each length, in blocks of full attention; of its further groups as windows without a length."""
        full: Counter[str] = Counter()
        windows: Counter[tuple[str, int | None]] = Counter()
        chunks: Counter[tuple[str, int | None]] = Counter()
        for (medium, window, _), source in stream.sources.items():
            count = self._index.source_blocks(source)
            length = None if window.blocks == ALL_BLOCKS else window.blocks * window.stride
            if window.blocks:
                (chunks if window.is_chunked else windows)[medium, length] += count
            else:
                full[medium] += count
        return {
            "blocks": dict(full),
            "windows": [[*kind, count] for kind, count in windows.items()],
            "chunks": [[*kind, count] for kind, count in chunks.items()],
        }

    def _instance_status(self, pool: Pool, member: Member, now_s: float) -> dict[str, Any]:
        load = pool.planner.load(member.slot, now_s)
        return {
            "name": member.instance.name,
            "model": pool.model,
            "url": member.instance.url,
            "data_parallel_rank": member.instance.data_parallel_rank,
            "role": member.role,
            "routable": member.instance.routable,
            "draining": member.draining or member.relabels_to is not None,
            "reachable": member.is_reachable(now_s),
            "down": member.down,
            "distrusted": member.trust.distrusted,
            "shortfalls": member.trust.shortfalls,
            "requests": member.requests,
            "queued": load.queued,
            "queue_s": load.queue_s,
            "active_requests": load.active_requests,
            "active_tokens": load.active_tokens,
            "kept": pool.kept == member.slot,
            "streams": [str(stream.name) for stream in member.streams],
        }


def _degraded(pool: Pool, request: RouteRequest) -> str:
    """Return why load alone decides; empty: it does not."""
    if not pool.knows_blocks:
        return DEGRADED
    return WITHOUT_TOKENS if request.tokens is None and request.hashes is None else ""


def _slo(request: RouteRequest, default: Slo) -> Slo:
    if request.ttft_slo_s is None and request.tbt_slo_s is None:
        return default
    return Slo(
        default.ttft_s if request.ttft_slo_s is None else request.ttft_slo_s,
        default.tbt_s if request.tbt_slo_s is None else request.tbt_slo_s,
    )


def _routed(
    found: Reservation, decision: Decision, weighed: Weighed, cached_tokens: int, last_block: bytes
) -> Routed:
    """Make the answer; `last_block`: the hash, empty where it is not known."""
    decode, has_leg = decision.decode, found.has_leg
    assert decode is not None
    return Routed(
        id=found.id,
        decode=found.decode.instance.name,
        decode_url=found.decode.instance.url,
        prefill=found.prefill.instance.name if has_leg else None,
        prefill_url=found.prefill.instance.url if has_leg else None,
        decode_rank=found.decode.instance.data_parallel_rank,
        prefill_rank=found.prefill.instance.data_parallel_rank if has_leg else None,
        prefill_peer=peer_between(found.prefill.instance, found.decode.instance) if has_leg else "",
        cached_tokens=cached_tokens,
        ranges=ranges(weighed),
        last_block=last_block.hex() or None,
        ttft_s=decision.ttft_s,
        tbt_s=decode.tbt_s,
        deadline_s=found.deadline_s - weighed.at_s,
        degraded=weighed.degraded,
    )
