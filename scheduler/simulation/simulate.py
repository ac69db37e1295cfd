"""Replay a request trace over simulated instances, with the scheduler's own policies deciding.

Responsibility: discrete events around `routing.route`, `admission.admit`, `commitments.Ledger` and `replication`,
the code that a Conductor calls. Arrivals are an open loop: nothing that happens slows them down.

Model: a prefill instance runs one prompt at a time; its DRAM holds blocks, least recently used first out; nodes
send one transfer after the other; KV cache streams to the decode instance while it is made. Blocks are entered
into the index when their prefill is committed, with that prefill as producer, and so are loaded blocks. The blocks
that a plan reuses are leased: they are there when the prefill starts. `simulation.options` says what a run may have
beside that; each part has its module.

Invariants: equal arguments give equal results. Every request ends as exactly one Outcome.

Concurrency: one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvfs.limits import MAX_DEFERRED_REQUESTS
from scheduler.routing.admission import (
    DEFER_S,
    RESERVE_AFTER_S,
    Mode,
    Verdict,
    admit,
    decodable,
    reserve,
)
from scheduler.routing.cluster import uniform_cluster
from scheduler.routing.commitments import Ledger
from scheduler.routing.cost_fit import CostFitter
from scheduler.routing.decisions import Decision, Prompt
from scheduler.routing.pipelines import chunks_s
from scheduler.routing.prefix_index import Run
from scheduler.routing.queues import Job
from scheduler.routing.roles import Contexts
from scheduler.routing.route import route
from scheduler.simulation.caches import Caches
from scheduler.simulation.coupled import run_prefill
from scheduler.simulation.event_queue import Events
from scheduler.simulation.groups import Groups, Spread, spread
from scheduler.simulation.nodes import DecodeNode
from scheduler.simulation.options import Options
from scheduler.simulation.outages import Outages, Running
from scheduler.simulation.relabels import Roles, instances
from scheduler.simulation.results import Outcome, Record, Result, Sample
from scheduler.simulation.traces import BLOCK_TOKENS, Progress, Request

SAMPLE_S = 10.0
"""Between two samples of queues and caches."""
MAX_PERIODS = 10_000
"""The most samples, fits and sweeps of each kind: a longer trace has longer periods between them."""
LEARN_S = 1.0
"""Between two fits of the cost model."""
SWEEP_S = 30.0
"""Between two sweeps for hot blocks and cold copies."""


def simulate(requests: Sequence[Request], options: Options, *, progress: Progress | None = None) -> Result:
    """Replay `requests`; `progress` is called with how many have arrived, and of how many.

    Raises InvalidRequest for options out of range.
    """
    options.check()
    return Simulation(requests, options).run(progress)


class _Resumed(NamedTuple):
    """A request that goes on after its decode instance failed."""

    at_s: float
    tokens_out: int


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
            *instances(options),
            network_bytes_s=options.costs.network_bytes_s,
            discipline=options.discipline,
        )
        self._ledger = Ledger(self._cluster)
        self._caches = Caches(self._cluster.sources, self._costs, options, self._events)
        self._decodes = [
            DecodeNode(self._costs, options.slo.tbt_s, self._decoded) for _ in self._cluster.decode
        ]
        self._records = [Record(request.input_tokens, request.output_tokens) for request in requests]
        self._deferred: list[int] = []
        self._reserved_for: int | None = None
        self._give_up_s: dict[int, float] = {}
        self._running: dict[int, Running] = {}
        self._resumed: dict[int, _Resumed] = {}
        self._samples: list[Sample] = []
        self._turn = 0
        self._looking = False
        self._roles = Roles(self._events, self._cluster, self._decodes, self._waiting, options)
        self._groups = Groups(self._events, self._records, self._prefilled)
        self._outages = Outages(
            self._events,
            self._cluster,
            self._ledger,
            self._caches,
            self._decodes,
            self._running,
            self._interrupted,
        )

    def run(self, progress: Progress | None = None) -> Result:
        """Run the whole trace; return the results. `progress` is told how far it is."""
        events, speed = self._events, self._options.speed
        total = len(self._requests)
        if total:
            events.at(0.0, self._sample)
            events.at(SWEEP_S, self._sweep)
        if self._fitter is not None:
            events.at(LEARN_S, self._learn)
        self._outages.schedule(self._options.failures)
        self._roles.begin()
        for number, request in enumerate(self._requests):
            arrival_s = request.arrival_s / speed
            while events.next_s <= arrival_s:
                events.step()
            events.now_s = arrival_s
            self._arrive(number)
            if progress is not None and number % 256 == 0:
                progress(number, total)
        while self._ledger or self._deferred or self._outages.pending:
            events.step()
        for node in self._decodes:
            node.advance(float("inf"))
        if progress is not None:
            progress(total, total)
        counts = self._caches.counts(self._groups.count)
        return Result(self._options, self._records, self._samples, counts, self._roles.changes)

    # --- arrivals ----------------------------------------------------------------------------------------
    def _arrive(self, number: int) -> None:
        self._roles.wake()
        if self._try(number) is not Verdict.DEFER:
            return
        if len(self._deferred) < MAX_DEFERRED_REQUESTS:
            self._deferred.append(number)
            self._look_again()
        else:
            self._records[number].outcome = Outcome.REJECTED

    def _try(self, number: int) -> Verdict:
        """Route a request and judge it; commit or reject it as the verdict says, and return that."""
        now_s = self._events.now_s
        prompt = self._prompt(number, self._caches.runs(self._requests[number].blocks))
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
        if self._options.coupled:
            decision = _coupled(decision)
        wide = spread(decision, prompt, self._cluster, self._predicted, now_s, self._options)
        if wide is not None:
            decision = decision._replace(prefill=wide.last)
        admission = admit(
            decision, self._predicted, self._options.slo, self._options.admission, decodes=bool(self._decodes)
        )
        if admission.verdict is Verdict.ADMIT:
            self._turn += 1
            self._groups.count += wide is not None
            self._commit(number, prompt, decision, wide)
        elif admission.verdict is Verdict.REJECT:
            self._records[number].outcome = Outcome.REJECTED
        self._give_up_s[number] = now_s + self._options.slo.ttft_s - admission.ttft_s
        return admission.verdict

    def _arrival_s(self, number: int) -> float:
        resumed = self._resumed.get(number)
        return self._requests[number].arrival_s / self._options.speed if resumed is None else resumed.at_s

    def _lengths(self, number: int) -> tuple[int, int]:
        """Return the tokens of a request's prompt, with those of its answer that are out, and of the rest."""
        request, resumed = self._requests[number], self._resumed.get(number)
        tokens_out = 0 if resumed is None else resumed.tokens_out
        return request.input_tokens + tokens_out, request.output_tokens - tokens_out

    def _prompt(self, number: int, runs: tuple[Run, ...]) -> Prompt:
        tokens = self._lengths(number)[0]
        return Prompt(self._arrival_s(number), tokens, runs, BLOCK_TOKENS, number == self._reserved_for)

    def _interrupted(self, number: int, tokens_out: int) -> None:
        """Route a request again whose instance failed."""
        self._running.pop(number, None)
        before = self._resumed.get(number)
        if tokens_out:
            tokens_out += 0 if before is None else before.tokens_out
            self._resumed[number] = _Resumed(self._events.now_s, tokens_out)
        self._records[number].retries += 1
        self._arrive(number)

    def _report_decodes(self) -> None:
        for node, instance in zip(self._decodes, self._cluster.decode, strict=True):
            node.advance(self._events.now_s)
            if self._fitter is not None and node.requests:
                shape = node.context_tokens, node.requests
                self._fitter.observe_step(*shape, self._costs.step_s(*shape))
            instance.active_requests = node.requests
            instance.active_tokens = node.context_tokens

    def _waiting(self) -> Contexts:
        """Return what waits for a decode instance before its prefill."""
        tokens = [self._lengths(number)[0] for number in self._deferred]
        return Contexts(sum(tokens), len(tokens))

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
        """Return whether a request stays deferred; route it again when a decode instance has room, or time is up."""
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
    def _commit(self, number: int, prompt: Prompt, decision: Decision, wide: Spread | None) -> None:
        now_s = self._events.now_s
        helpers, relayed = [] if wide is None else self._commit_helpers(number, prompt, decision, wide), 0
        if wide is not None and wide.blocks:
            decision = decision._replace(prefill=wide.last._replace(after=tuple(helpers)))
            relayed = wide.blocks
        promised_s = float("inf") if self._options.admission is Mode.NONE else self._options.slo.ttft_s
        job = self._ledger.commit(number, prompt, decision, now_s, promised_s=promised_s)
        chosen, blocks = decision.prefill, self._requests[number].blocks
        assert chosen is not None
        self._roles.arrived(chosen.prefill_s)
        self._caches.insert(blocks, chosen, job, self._predicted, relayed)
        lengths = prompt.tokens, min(chosen.reused_blocks * BLOCK_TOKENS, prompt.tokens)
        self._running[number] = Running(blocks, lengths, chosen.loads)
        if helpers and not relayed:
            self._groups.add([*helpers, job], chunks_s(self._costs, *lengths))
        for each in (job, *helpers):
            if each.loaded_s > now_s:
                self._events.at(each.loaded_s, self._start, each.instance)
            due_s = each.finish_s + each.slack_s
            if each.after and now_s < due_s < float("inf"):
                self._events.at(due_s, self._start, each.instance)  # it holds others up no longer
            self._start(each.instance)

    def _commit_helpers(self, number: int, prompt: Prompt, decision: Decision, wide: Spread) -> list[Job]:
        """Commit the jobs of a spread prompt but the last one."""
        jobs = []
        for chosen in wide.helpers:
            blocks = self._requests[number].blocks[: wide.blocks]
            tokens = len(blocks) * BLOCK_TOKENS or prompt.tokens
            helper, part = self._groups.helper(number), decision._replace(prefill=chosen, decode=None)
            job = self._ledger.commit(helper, prompt._replace(tokens=tokens), part, self._events.now_s)
            lengths = tokens, min(chosen.reused_blocks * BLOCK_TOKENS, tokens)
            self._running[helper] = Running(blocks, lengths, chosen.loads)
            if blocks:
                self._caches.insert(blocks, chosen, job, self._predicted)
            jobs.append(job)
        return jobs

    def _start(self, instance: int) -> None:
        job = self._ledger.start(instance, self._events.now_s)
        if job is None:
            return
        if self._groups.started(job):
            return
        lengths, now_s = self._running[job.number].lengths, self._events.now_s
        if self._options.coupled:
            node, chunk_tokens = self._decodes[instance], self._options.chunk_tokens
            job.finish_s = run_prefill(node, self._costs, lengths, chunk_tokens, now_s)
            took_s = job.finish_s - now_s
        else:
            took_s = self._costs.prefill_s(*lengths)
        self._records[self._groups.helped(job.number)].prefill_s += took_s
        self._events.at(now_s + took_s, self._prefilled, job)

    def _prefilled(self, job: Job) -> None:
        if job.done:
            return  # its instance failed
        followers = self._ledger.prefilled(job)
        running = self._running.pop(job.number)
        self._caches.index.produced(running.blocks, job)
        if self._fitter is not None and not self._groups.is_stage(job):
            self._fitter.observe_prefill(*running.lengths, self._took_s(job, running.lengths))
        if self._groups.helped(job.number) == job.number:
            self._hand_over(job)
        else:
            self._ledger.joined(job.number)
        for instance in {job.instance, *(follower.instance for follower in followers)}:
            self._start(instance)

    def _took_s(self, job: Job, lengths: tuple[int, int]) -> float:
        """Return the time of a prefill that is done."""
        if self._options.coupled and job.started_s is not None:
            return job.finish_s - job.started_s
        return self._costs.prefill_s(*lengths)

    def _hand_over(self, job: Job) -> None:
        """Send a prompt's KV cache to its decode instance, which reads it from the node that made it."""
        options, now_s = self._options, self._events.now_s
        size_bytes = self._lengths(job.number)[0] * self._costs.kv_token_bytes
        took_s = options.handover_s + size_bytes / options.handover_bytes_s
        if not took_s or self._ledger.decode_of(job.number) is None:
            self._join(job.number)
            return
        source = self._cluster.sources[job.instance]
        source.free_at_s = max(source.free_at_s, now_s) + took_s
        self._events.at(source.free_at_s, self._join, job.number)

    def _join(self, number: int) -> None:
        """Have a request join its decode instance, which may refuse."""
        record, now_s = self._records[number], self._events.now_s
        decode, resumed = self._ledger.decode_of(number), self._resumed.get(number)
        if resumed is None:
            record.ttft_s = now_s - self._arrival_s(number)
        if decode is None:
            self._ledger.joined(number)
            record.outcome = Outcome.DONE
            return
        node, (tokens, output_tokens) = self._decodes[decode], self._lengths(number)
        node.advance(now_s)
        failed = decode in self._outages.down_decodes
        if not failed and (self._options.coupled or node.takes(tokens)):
            self._ledger.joined(number)
            paused_s = 0.0 if resumed is None else now_s - resumed.at_s
            node.join(number, tokens, output_tokens, now_s, paused_s=paused_s)
            return
        self._ledger.dropped(number)
        if failed:
            self._interrupted(number, 0)
        else:
            record.outcome = Outcome.REFUSED

    def _decoded(self, number: int, now_s: float, tbt_s: float) -> None:
        record = self._records[number]
        record.outcome = Outcome.DONE
        record.tbt_s = tbt_s
        self._cluster.answered(record.output_tokens)

    # --- what recurs -------------------------------------------------------------------------------------
    def _learn(self) -> None:
        if self._fitter is not None:
            self._predicted = self._fitter.costs()
            self._again(LEARN_S, self._learn)

    def _sweep(self) -> None:
        self._caches.sweep(self._predicted, SWEEP_S)
        self._again(SWEEP_S, self._sweep)

    def _sample(self) -> None:
        self._samples.append(
            Sample(
                self._events.now_s,
                sum(len(instance.queue) for instance in self._cluster.prefill) + len(self._deferred),
                sum(len(cache) for cache in self._caches.dram),
                len(self._caches.index),
                self._caches.reused_blocks,
                self._caches.references,
            )
        )
        self._again(SAMPLE_S, self._sample)

    def _again(self, period_s: float, call: Callable[[], None]) -> None:
        span_s = self._arrival_s(len(self._requests) - 1)
        self._events.at(self._events.now_s + max(period_s, span_s / MAX_PERIODS), call)


def _coupled(decision: Decision) -> Decision:
    """Return the decision with the prefill's own instance to decode."""
    chosen = decision.prefill
    own = (each for each in decision.considered_decode if chosen and each.instance == chosen.instance)
    return decision._replace(decode=next(own, None))
