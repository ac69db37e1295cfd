"""Engines in virtual time behind a whole Conductor: what it decides happens, and comes back as events and reports.

Responsibility: `VirtualCluster` replays a trace: each arrival is judged and routed, prefilled by the engine that was
named, one prompt at a time, decoded there or by another, and reported; what engines store and evict is published in
messages, as over the sockets. `Oracle` keeps the same in plain Python, from what was answered and published alone, and
decides beside it.

Concurrency: one thread, and a clock that jumps from event to event.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from kvfs._native.cluster.index import ClusterIndex
from kvfs.events.kv_events import (
    CPU,
    Batch,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KVEvent,
    encode_batch,
    sequence_frame,
)
from kvfs.limits import CONDUCTOR_TICK_S, EXPECTED_BLOCKS_S, MAX_INDEXED_BLOCKS, OVERDUE_S
from scheduler.conductor.conductor import Conductor
from scheduler.conductor.feeds.feed import Feed
from scheduler.conductor.planning.planner import Role
from scheduler.conductor.pool import NOT_SENT_BYTES_S
from scheduler.conductor.pool import Options as Deciding
from scheduler.conductor.values import Instance, Refused, RouteRequest, Usage
from scheduler.routing.admission import Admission, Verdict, admit
from scheduler.routing.cluster import uniform_cluster
from scheduler.routing.commitments import Ledger
from scheduler.routing.decisions import Decision, Prompt
from scheduler.routing.prefix_index import PrefixIndex
from scheduler.routing.queues import Job
from scheduler.routing.route import route
from scheduler.simulation.event_queue import Events
from scheduler.simulation.nodes import BlockLru
from scheduler.simulation.options import Options
from scheduler.simulation.traces import BLOCK_TOKENS, Request
from tests.support.conductors import NAMESPACE


def key(block: int) -> bytes:
    """The prefix hash that a trace's block stands for."""
    return block.to_bytes(16, "big")


def tokens(blocks: Iterable[int]) -> list[int]:
    """Tokens that stand for a trace's blocks: an id is that of the whole prefix, so equal tokens after others do not
    matter."""
    return [token for block in blocks for token in [block % 50_000] * BLOCK_TOKENS]


class Oracle:
    """The cluster in plain Python: who was told to make what, who said that it holds what."""

    def __init__(self, options: Options) -> None:
        self._options, self._count = options, options.prefill
        self._cluster = uniform_cluster(
            self._count,
            options.decode or self._count,
            network_bytes_s=NOT_SENT_BYTES_S,
            discipline=options.discipline,
        )
        self._ledger = Ledger(self._cluster)
        self._index = PrefixIndex()
        self._said: list[set[int]] = [set() for _ in range(self._count)]
        self._expected: list[set[int]] = [set() for _ in range(self._count)]
        self._fading: list[tuple[float, int, tuple[int, ...]]] = []
        self._jobs: dict[int, tuple[Job, tuple[int, ...]]] = {}
        self._decodes: dict[int, tuple[int, int]] = {}
        """By request: its decode instance and the tokens that count there."""
        self._turn = 0

    def decide(self, request: Request, now_s: float) -> Decision:
        runs = self._index.runs(request.blocks[: (request.input_tokens - 1) // BLOCK_TOKENS])
        prompt = Prompt(now_s, request.input_tokens, runs, BLOCK_TOKENS)
        self._turn += 1
        policy, costs = self._options.policy, self._options.costs
        decision = route(prompt, self._cluster, costs, now_s, policy=policy, turn=self._turn - 1)
        if self._options.decode or decision.prefill is None:
            return decision
        own = decision.prefill.instance
        decode = next(each for each in decision.considered_decode if each.instance == own)
        return decision._replace(decode=decode)

    def judge(self, decision: Decision) -> Admission:
        return admit(decision, self._options.costs, self._options.slo, self._options.admission)

    def commit(self, number: int, request: Request, decision: Decision, now_s: float) -> None:
        chosen, decode = decision.prefill, decision.decode
        assert chosen is not None
        assert decode is not None
        n = chosen.instance
        prompt = Prompt(now_s, request.input_tokens, (), BLOCK_TOKENS)
        job = self._ledger.commit(number, prompt, decision, now_s, promised_s=self._options.slo.ttft_s)
        self._decodes[number] = decode.instance, request.input_tokens
        made = request.blocks[chosen.reused_blocks : request.input_tokens // BLOCK_TOKENS]
        for block in made:
            self._index.add(block, n, job)
        self._expected[n].update(made)
        self._jobs[number] = job, made
        self._ledger.start(n, now_s)

    def prefilled(self, number: int, now_s: float) -> None:
        if number in self._jobs:  # else it was overdue
            self._end(number, now_s)
        self._ledger.joined(number)
        self._count_active(number, 1)

    def done(self, number: int, output_tokens: int) -> None:
        self._cluster.answered(output_tokens)
        self._count_active(number, -1)
        del self._decodes[number]

    def _count_active(self, number: int, by: int) -> None:
        n, tokens = self._decodes[number]
        self._cluster.decode[n].active_requests += by
        self._cluster.decode[n].active_tokens += by * tokens

    def _end(self, number: int, now_s: float) -> None:
        job, made = self._jobs.pop(number)
        n = job.instance
        if self._cluster.prefill[n].running is job:
            self._ledger.prefilled(job)
        else:
            self._cluster.prefill[n].queue.remove(job)
            job.finished()
        self._index.produced(made, job)
        self._fading.append((now_s + EXPECTED_BLOCKS_S, n, made))
        self._fade(now_s)
        self._ledger.start(n, now_s)

    def stored(self, n: int, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._said[n].add(block)
            self._expected[n].discard(block)
            self._index.stored(block, n)

    def evicted(self, n: int, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._said[n].discard(block)
            if block not in self._expected[n]:
                self._index.invalidate(block, n)

    def tick(self, now_s: float) -> None:
        self._fade(now_s)
        for n, instance in enumerate(self._cluster.prefill):
            job = instance.running
            if job is None:
                self._ledger.start(n, now_s)
            elif len(instance.queue) and now_s > job.finish_s + job.service_s + OVERDUE_S:
                self._end(job.number, now_s)

    def _fade(self, now_s: float) -> None:
        while self._fading and self._fading[0][0] <= now_s:
            _, n, made = self._fading.pop(0)
            for block in made:
                self._expected[n].discard(block)
                if block not in self._said[n]:
                    self._index.invalidate(block, n)


@dataclass(eq=False)
class _Prefill:
    number: int
    request: Request
    id: str
    arrived_s: float
    predicted_s: float = 0.0
    reused: int = 0


@dataclass(eq=False)
class _Engine:
    """One engine: a cache, and one prompt at a time in the order of arrival."""

    slot: int
    cache: BlockLru
    waiting: list[_Prefill] = field(default_factory=list)
    running: _Prefill | None = None
    sequence: int = 0


class VirtualCluster:
    """See the module's header. With `options.decode` engines that prefill come first, and then those that decode.

    `report_s`: how long events and reports take from an engine to the Conductor. `engines`: whether events are those of
    engines, with tokens, and prompts are asked for by tokens; else keys of stores.
    """

    def __init__(self, options: Options, *, report_s: float = 0.0, engines: bool = False) -> None:
        self.options, self._report_s, self._by_tokens = options, report_s, engines
        self._first_decode = options.prefill if options.decode else 0
        self.events = Events()
        deciding = Deciding(
            costs=options.costs,
            policy=options.policy,
            discipline=options.discipline,
            admission=options.admission,
            slo=options.slo,
            fitted=False,
        )
        self.conductor = Conductor(ClusterIndex(MAX_INDEXED_BLOCKS), deciding, lambda: self.events.now_s)
        self.feed = Feed(self.conductor.registry, lambda: self.events.now_s)
        namespace = replace(NAMESPACE, block_tokens=BLOCK_TOKENS).as_mapping()
        for n in range(options.prefill + options.decode):
            role: Role = "both" if not options.decode else "prefill" if n < options.prefill else "decode"
            made = Instance(name=f"i{n}", url="http://x", model="m", namespace=namespace, role=role)
            topic = {"engine_topic" if engines else "store_topic": f"node-{n}"}
            self.conductor.registry.add(msgspec.structs.replace(made, **topic))
        self._engines = [_Engine(n, BlockLru(options.cache_blocks)) for n in range(options.prefill)]
        self.oracle = Oracle(options)
        self.ttft_s: list[float] = []
        self.errors_s: list[float] = []
        """By how much each first token came later than predicted."""
        self.differing: list[str] = []
        self.places: dict[int, tuple[int, int]] = {}
        """By request, its engine and how many blocks that had of it."""
        self.evicted = 0
        self.refused = 0
        self._live = 0

    @property
    def mean_ttft_s(self) -> float:
        return sum(self.ttft_s) / len(self.ttft_s)

    def replay(self, requests: Sequence[Request]) -> None:
        """Replay a trace to its end."""
        for number, request in enumerate(requests):
            self.events.at(request.arrival_s / self.options.speed, self._arrive, number, request)
        self._live = len(requests)
        self.events.at(CONDUCTOR_TICK_S, self._tick)
        while self._live:
            self.events.step()

    def _tick(self) -> None:
        self.conductor.tick()
        self.oracle.tick(self.events.now_s)
        self.events.at(self.events.now_s + CONDUCTOR_TICK_S, self._tick)

    # --- requests -----------------------------------------------------------------------------------------
    def _arrive(self, number: int, request: Request) -> None:
        now_s = self.events.now_s
        decision = self.oracle.decide(request, now_s)
        admission = self.oracle.judge(decision)
        found = self.conductor.route(self._asked(request))
        wanted: tuple[object, ...] = admission.reason.value, admission.retry_after_s
        if admission.verdict is Verdict.ADMIT:
            assert decision.prefill is not None
            assert decision.decode is not None
            first, decode = decision.prefill, decision.decode.instance + self._first_decode
            wanted = f"i{first.instance}", f"i{decode}", first.reused_blocks * BLOCK_TOKENS, decision.ttft_s
        if isinstance(found, Refused):
            got: tuple[object, ...] = found.reason, found.retry_after_s
        else:
            got = found.prefill or found.decode, found.decode, found.cached_tokens, found.ttft_s
        if got != wanted:
            self.differing.append(f"{number}: {got} is not {wanted}")
        if isinstance(found, Refused):
            self.refused += 1
            self._live -= 1
            return
        self.oracle.commit(number, request, decision, now_s)
        engine = self._engines[int((found.prefill or found.decode)[1:])]
        engine.waiting.append(_Prefill(number, request, found.id, now_s, now_s + found.ttft_s))
        self._start(engine)

    def _asked(self, request: Request) -> RouteRequest:
        blocks, apart = request.blocks[: request.input_tokens // BLOCK_TOKENS], bool(self.options.decode)
        if self._by_tokens:
            tail = [0] * (request.input_tokens % BLOCK_TOKENS)
            return RouteRequest(model="m", tokens=tokens(blocks) + tail, both_legs=apart)
        hashes = [key(block).hex() for block in blocks]
        return RouteRequest(model="m", hashes=hashes, length=request.input_tokens, both_legs=apart)

    def _start(self, engine: _Engine) -> None:
        if engine.running is not None or not engine.waiting:
            return
        job = engine.running = engine.waiting.pop(0)
        tokens = job.request.input_tokens
        for block in job.request.blocks[: (tokens - 1) // BLOCK_TOKENS]:
            if block not in engine.cache:
                break
            job.reused += 1
        took_s = self.options.costs.prefill_s(tokens, job.reused * BLOCK_TOKENS)
        self.events.at(self.events.now_s + took_s, self._prefilled, engine, job)

    def _prefilled(self, engine: _Engine, job: _Prefill) -> None:
        self.places[job.number] = engine.slot, job.reused
        self.ttft_s.append(self.events.now_s - job.arrived_s)
        self.errors_s.append(self.events.now_s - job.predicted_s)
        blocks = job.request.blocks[: job.request.input_tokens // BLOCK_TOKENS]
        new = [block for block in blocks if block not in engine.cache]
        for block in reversed(blocks):
            engine.cache.use(block)
        gone = [block for block, _ in engine.cache.evict()]
        self.evicted += len(gone)
        batch = self._said(blocks, new, gone)
        engine.running = None
        self.events.at(self.events.now_s + self._report_s, self._report, engine, job, batch, new, gone)
        self._start(engine)

    # --- reports ------------------------------------------------------------------------------------------
    def _said(self, blocks: Sequence[int], new: Sequence[int], gone: Sequence[int]) -> list[KVEvent]:
        said: list[KVEvent] = []
        if new:
            first = blocks.index(new[0])
            before = blocks[first - 1] if first else None
            said.append(
                BlockStored(
                    block_hashes=[self._name(block) for block in new],
                    parent_block_hash=None if before is None else self._name(before),
                    token_ids=tokens(new) if self._by_tokens else [],
                    block_size=BLOCK_TOKENS,
                    lora_id=None,
                    medium=CPU,
                    lora_name=None,
                )
            )
        if gone:
            said.append(BlockRemoved([self._name(block) for block in gone], CPU))
        return said

    def _name(self, block: int) -> BlockHash:
        return block if self._by_tokens else key(block)

    def _report(
        self, engine: _Engine, job: _Prefill, batch: list[KVEvent], new: list[int], gone: list[int]
    ) -> None:
        now_s = self.events.now_s
        if batch:
            frames = [
                b"node-%d" % engine.slot,
                sequence_frame(engine.sequence),
                encode_batch(Batch(now_s, batch, 0)),
            ]
            assert self.feed.receive(frames) is None
            engine.sequence += 1
            self.oracle.stored(engine.slot, new)
            self.oracle.evicted(engine.slot, gone)
        if self.options.decode:
            self.conductor.prefilled(job.id)
        self.conductor.first_token(job.id)
        self.oracle.prefilled(job.number, now_s)
        step_s = self.options.costs.step_s(job.request.input_tokens, 1)
        self.events.at(now_s + step_s * job.request.output_tokens, self._done, job)

    def _done(self, job: _Prefill) -> None:
        cached, output_tokens = job.reused * BLOCK_TOKENS, job.request.output_tokens
        self.conductor.done(job.id, Usage(cached, output_tokens, prefill_leg=bool(self.options.decode)))
        self.oracle.done(job.number, output_tokens)
        self._live -= 1
