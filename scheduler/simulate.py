"""Replay a request trace over simulated instances, with the scheduler's own policies deciding.

Responsibility: discrete events around `routing.route`, `admission.admit`, `commitments.Ledger` and `replication`,
the code that a Conductor calls. Arrivals are an open loop: nothing that happens slows them down.

Model: a prefill instance runs one prompt at a time; its DRAM holds blocks, least recently used first out; nodes
send one transfer after the other; KV cache streams to the decode instance while it is made. Blocks are entered
into the index when their prefill is committed, with that prefill as producer. Loaded blocks are entered with the
commitment too. What a plan reuses is leased: it is there when the prefill starts.

Invariants: equal arguments give equal results. Every request ends as exactly one Outcome.

Concurrency: one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvfs.errors import InvalidRequest
from kvfs.limits import MAX_DEFERRED_REQUESTS
from scheduler import replication
from scheduler.admission import DEFER_S, RESERVE_AFTER_S, Mode, Slo, Verdict, admit, decodable, reserve
from scheduler.commitments import Ledger
from scheduler.cost import CostModel, table_costs
from scheduler.cost_fit import CostFitter
from scheduler.decisions import Decision, Prompt
from scheduler.events import Events
from scheduler.instances import uniform_cluster
from scheduler.planners import POLICIES
from scheduler.prefixes import PrefixIndex, Run
from scheduler.queues import Discipline, Job
from scheduler.results import Outcome, Record, Result, Sample
from scheduler.routing import route
from scheduler.simulated import BlockLru, DecodeNode
from scheduler.traces import BLOCK_TOKENS, Request

SAMPLE_S = 10.0
"""Between two looks at queues and caches."""
MAX_PERIODS = 10_000
"""The periods above and below are stretched for a trace that would have more of them."""
LEARN_S = 1.0
"""Between two fits of the cost model."""
SWEEP_S = 30.0
"""Between two sweeps for cold copies."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What is simulated. Times in seconds, capacities per instance."""

    policy: str = "default"
    discipline: Discipline = Discipline.FCFS
    admission: Mode = Mode.NONE
    prefill: int = 8
    decode: int = 0
    speed: float = 1.0
    slo: Slo = field(default_factory=Slo)
    decode_factor: float = 1.0
    cache_blocks: int = 5859
    seed: int = 0
    costs: CostModel = field(default_factory=table_costs)
    """The table, before `decode_factor`."""
    fitted: bool = False
    """Policies predict with a model that starts as the table and learns; else they know the true one."""

    def check(self) -> None:
        """Raises InvalidRequest."""
        if self.policy not in POLICIES:
            raise InvalidRequest(f"policy {self.policy!r}: there are {', '.join(POLICIES)}")
        for name, low, high in (("prefill", 1, 1024), ("decode", 0, 1024), ("cache_blocks", 0, 1 << 32)):
            if not low <= getattr(self, name) <= high:
                raise InvalidRequest(f"{name} = {getattr(self, name)}: must be from {low} to {high}")
        for name in ("speed", "decode_factor"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidRequest(f"{name} = {getattr(self, name)}: must be above 0")


def simulate(requests: Sequence[Request], options: Options, *, progress: Progress | None = None) -> Result:
    """Replay `requests`; `progress` is told how many have arrived, and of how many.

    Raises InvalidRequest for options out of range.
    """
    options.check()
    return Simulation(requests, options).run(progress)


class _Running(NamedTuple):
    """A prefill that was committed."""

    blocks: tuple[int, ...]
    lengths: tuple[int, int]
    """Tokens, and those that it reuses."""


class Simulation:
    """One run."""

    def __init__(self, requests: Sequence[Request], options: Options) -> None:
        self._requests = requests
        self._options = options
        self._costs = options.costs.slowed_decode(options.decode_factor)
        self._fitter = CostFitter(options.costs) if options.fitted else None
        self._predicted = self._costs if self._fitter is None else options.costs
        self._events = Events()
        self._cluster = uniform_cluster(
            options.prefill,
            options.decode,
            network_bytes_s=options.costs.network_bytes_s,
            discipline=options.discipline,
        )
        self._ledger = Ledger(self._cluster)
        self._index = PrefixIndex()
        self._heat = replication.Heat()
        self._caches = [BlockLru(options.cache_blocks) for _ in range(options.prefill)]
        self._decodes = [
            DecodeNode(self._costs, options.slo.tbt_s, self._decoded) for _ in range(options.decode)
        ]
        self._records = [Record(request.input_tokens, request.output_tokens) for request in requests]
        self._deferred: list[int] = []
        self._reserved_for: int | None = None
        self._give_up_s: dict[int, float] = {}
        self._running: dict[int, _Running] = {}
        self._samples: list[Sample] = []
        self._turn = 0
        self._looking = False
        self._reused_blocks = 0
        self._references = 0

    def run(self, progress: Progress | None = None) -> Result:
        events, speed = self._events, self._options.speed
        total = len(self._requests)
        if total:
            events.at(0.0, self._sample)
            events.at(SWEEP_S, self._sweep)
        if self._fitter is not None:
            events.at(LEARN_S, self._learn)
        for number, request in enumerate(self._requests):
            arrival_s = request.arrival_s / speed
            while events.next_s <= arrival_s:
                events.step()
            events.now_s = arrival_s
            self._arrive(number)
            if progress is not None and number % 256 == 0:
                progress(number, total)
        while self._ledger or self._deferred:
            events.step()
        for node in self._decodes:
            node.advance(float("inf"))
        if progress is not None:
            progress(total, total)
        return Result(self._options, self._records, self._samples, self._reused_blocks, self._references)

    # --- arrivals ----------------------------------------------------------------------------------------
    def _arrive(self, number: int) -> None:
        if self._try(number) is not Verdict.DEFER:
            return
        if len(self._deferred) < MAX_DEFERRED_REQUESTS:
            self._deferred.append(number)
            self._look_again()
        else:
            self._records[number].outcome = Outcome.REJECTED

    def _try(self, number: int) -> Verdict:
        """Route and admit; whatever the verdict says is done but deferring."""
        now_s = self._events.now_s
        prompt = self._prompt(number, self._index.runs(self._requests[number].blocks))
        self._report_decodes()
        decision = route(
            prompt,
            self._cluster,
            self._predicted,
            now_s,
            policy=self._options.policy,
            turn=self._turn,
            seed=self._options.seed,
        )
        admission = admit(
            decision, self._predicted, self._options.slo, self._options.admission, decodes=bool(self._decodes)
        )
        if admission.verdict is Verdict.ADMIT:
            self._turn += 1
            self._commit(number, prompt, decision)
        elif admission.verdict is Verdict.REJECT:
            self._records[number].outcome = Outcome.REJECTED
        self._give_up_s[number] = now_s + self._options.slo.ttft_s - admission.ttft_s
        return admission.verdict

    def _arrival_s(self, number: int) -> float:
        return self._requests[number].arrival_s / self._options.speed

    def _prompt(self, number: int, runs: tuple[Run, ...]) -> Prompt:
        tokens = self._requests[number].input_tokens
        return Prompt(self._arrival_s(number), tokens, runs, BLOCK_TOKENS, number == self._reserved_for)

    def _report_decodes(self) -> None:
        for node, instance in zip(self._decodes, self._cluster.decode, strict=True):
            node.advance(self._events.now_s)
            if self._fitter is not None and node.requests:
                shape = node.context_tokens, node.requests
                self._fitter.observe_step(*shape, self._costs.step_s(*shape))
            instance.active_requests = node.requests
            instance.active_tokens = node.context_tokens

    def _look_again(self) -> None:
        if self._deferred and not self._looking:
            self._looking = True
            self._events.at(self._events.now_s + DEFER_S, self._retry)

    def _retry(self) -> None:
        self._looking = False
        self._report_decodes()
        self._deferred = [number for number in self._deferred if self._still_deferred(number)]
        self._reserve()
        self._look_again()

    def _still_deferred(self, number: int) -> bool:
        """Route again where that may lead to another verdict: when a decode instance has room, or time is up."""
        prompt = self._prompt(number, ())
        if self._events.now_s + DEFER_S < self._give_up_s[number] and not decodable(
            self._cluster, prompt, self._predicted, self._options.slo
        ):
            return True
        return self._try(number) is Verdict.DEFER

    def _reserve(self) -> None:
        """Keep a decode instance for the request that was deferred first, once it has waited."""
        if self._reserved_for not in self._deferred:
            self._reserved_for, self._cluster.reserved_decode = None, None
        if self._reserved_for is None and self._deferred:
            oldest = self._deferred[0]
            if self._events.now_s - self._arrival_s(oldest) >= RESERVE_AFTER_S:
                self._reserved_for, self._cluster.reserved_decode = oldest, reserve(self._cluster)

    # --- prefill -----------------------------------------------------------------------------------------
    def _commit(self, number: int, prompt: Prompt, decision: Decision) -> None:
        now_s = self._events.now_s
        job = self._ledger.commit(number, prompt, decision, now_s)
        request = self._requests[number]
        self._cache(request.blocks, decision, job)
        assert decision.prefill is not None
        reused = decision.prefill.reused_blocks * BLOCK_TOKENS
        lengths = request.input_tokens, min(reused, request.input_tokens)
        self._running[number] = _Running(request.blocks, lengths)
        if job.loaded_s > now_s:
            self._events.at(job.loaded_s, self._start, job.instance)
        self._start(job.instance)

    def _start(self, instance: int) -> None:
        job = self._ledger.start(instance, self._events.now_s)
        if job is not None:
            took_s = self._costs.prefill_s(*self._running[job.number].lengths)
            self._records[job.number].prefill_s = took_s
            self._events.at(self._events.now_s + took_s, self._prefilled, job)

    def _prefilled(self, job: Job) -> None:
        now_s = self._events.now_s
        followers = self._ledger.prefilled(job)
        running = self._running.pop(job.number)
        self._index.produced(running.blocks, job)
        record = self._records[job.number]
        if self._fitter is not None:
            self._fitter.observe_prefill(*running.lengths, record.prefill_s)
        self._hand_over(job.number, now_s, record)
        for instance in {job.instance, *(follower.instance for follower in followers)}:
            self._start(instance)

    def _hand_over(self, number: int, now_s: float, record: Record) -> None:
        """To the decode instance, which may refuse."""
        decode = self._ledger.decode_of(number)
        request = self._requests[number]
        record.ttft_s = now_s - self._arrival_s(number)
        if decode is None:
            self._ledger.joined(number)
            record.outcome = Outcome.DONE
            return
        node = self._decodes[decode]
        node.advance(now_s)
        if node.takes(request.input_tokens):
            self._ledger.joined(number)
            node.join(number, request.input_tokens, request.output_tokens, now_s)
        else:
            self._ledger.dropped(number)
            record.outcome = Outcome.REFUSED

    def _decoded(self, number: int, now_s: float, tbt_s: float) -> None:
        record = self._records[number]
        record.outcome = Outcome.DONE
        record.tbt_s = tbt_s
        self._cluster.answered(record.output_tokens)

    # --- caches ------------------------------------------------------------------------------------------
    def _cache(self, blocks: tuple[int, ...], decision: Decision, job: Job) -> None:
        """Use and insert the prompt's blocks, last to first, which keeps a block younger than its descendants."""
        chosen = decision.prefill
        assert chosen is not None
        local, now_s = job.instance, self._events.now_s
        sources = [local] * len(blocks)
        for load in chosen.loads:
            sources[load.first_block : load.first_block + load.blocks] = [load.source] * load.blocks
        index, cache = self._index, self._caches[local]
        room = POLICIES[self._options.policy].keeps_copies or len(cache) + len(blocks) <= cache.capacity
        self._references += len(blocks)
        self._reused_blocks += chosen.reused_blocks
        for place in range(len(blocks) - 1, -1, -1):
            block, source = blocks[place], sources[place]
            if place >= chosen.reused_blocks:
                index.add(block, local, job)
            elif source != local:
                heat = self._heat.loaded(block, now_s)
                if not replication.keeps_copy(heat, index.holders(block).bit_count(), room=room):
                    self._caches[source].use(block)
                    continue
                index.add(block, local)
            cache.use(block)
        self._evict(local)

    def _evict(self, source: int) -> None:
        for block in self._caches[source].evict():
            self._index.discard(block, source)
            if not self._index.holders(block):
                self._heat.forget(block)

    def _learn(self) -> None:
        if self._fitter is not None:
            self._predicted = self._fitter.costs()
            self._again(LEARN_S, self._learn)

    def _sweep(self) -> None:
        """Demote cold copies."""
        if POLICIES[self._options.policy].keeps_copies:
            return
        now_s = self._events.now_s
        found = (
            replication.BlockHeat(block, self._index.holders(block), self._heat.of(block, now_s))
            for block in self._heat.blocks()
            if self._index.holders(block).bit_count() > 1
        )
        for order in replication.replicate(found, ()):
            if isinstance(order, replication.Demotion):
                self._caches[order.source].cool(order.block)
        self._again(SWEEP_S, self._sweep)

    def _sample(self) -> None:
        self._samples.append(
            Sample(
                self._events.now_s,
                sum(len(instance.queue) for instance in self._cluster.prefill) + len(self._deferred),
                sum(len(cache) for cache in self._caches),
                len(self._index),
                self._reused_blocks,
                self._references,
            )
        )
        self._again(SAMPLE_S, self._sample)

    def _again(self, period_s: float, call: Callable[[], None]) -> None:
        span_s = self._arrival_s(len(self._requests) - 1)
        self._events.at(self._events.now_s + max(period_s, span_s / MAX_PERIODS), call)
