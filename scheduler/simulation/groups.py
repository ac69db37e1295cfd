"""Prompts that several simulated instances prefill: pipelines and relays of `routing.pipelines`.

Responsibility: the jobs of a spread prompt beside its own one, and when each stage of a pipeline ends. A stage holds
its instance from its start on; it computes a chunk once the stage ahead has handed it on.

Invariants: stages end as the recurrence says from the moments at which they started. Helping jobs have negative
numbers, and no decode instance.

Concurrency: one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scheduler.routing.cluster import Cluster
from scheduler.routing.cost import CostModel
from scheduler.routing.decisions import Decision, PrefillCandidate, Prompt
from scheduler.routing.pipelines import plan_group, plan_relay, stage_ends_s
from scheduler.routing.queues import Job
from scheduler.simulation.event_queue import Events
from scheduler.simulation.options import Options
from scheduler.simulation.results import Record


class Spread(NamedTuple):
    """A prompt on several instances."""

    helpers: tuple[PrefillCandidate, ...]
    """All but that of the last stage or piece, in order."""
    last: PrefillCandidate
    blocks: int
    """How many blocks the helper of a relay hands over; 0 for a pipeline."""


def spread(
    decision: Decision, prompt: Prompt, cluster: Cluster, costs: CostModel, now_s: float, options: Options
) -> Spread | None:
    """Return how a prompt is spread where that pays; None for a single instance."""
    limit_s = options.slo.ttft_s
    if options.group > 1:
        group = plan_group(decision, prompt, cluster, costs, now_s, most=options.group, ttft_slo_s=limit_s)
        if group is not None:
            stages = [stage.candidate for stage in group.stages]
            return Spread(tuple(stages[:-1]), stages[-1], 0)
    if options.relay:
        relay = plan_relay(decision, prompt, cluster, costs, now_s, ttft_slo_s=limit_s)
        if relay is not None:
            return Spread((relay.first,), relay.rest, relay.blocks)
    return None


@dataclass(slots=True)
class _Pipeline:
    jobs: Sequence[Job]
    chunks_s: Sequence[float]
    starts_s: list[float | None]
    ends_s: list[tuple[float, ...]]


class Groups:
    """The pipelines of a run. `ended(job)` is called when a stage is over."""

    def __init__(self, events: Events, records: Sequence[Record], ended: Callable[[Job], None]) -> None:
        self._events = events
        self._records = records
        self._ended = ended
        self._stages: dict[int, tuple[_Pipeline, int]] = {}
        self._pipelined: set[int] = set()
        self._helps: dict[int, int] = {}
        self.count = 0
        """Prompts that were spread."""

    def helper(self, number: int) -> int:
        """Return the number of another job that helps with a request."""
        helper = -1 - len(self._helps)
        self._helps[helper] = number
        return helper

    def helped(self, number: int) -> int:
        """Return the request that a job is for."""
        return self._helps.get(number, number)

    def add(self, jobs: Sequence[Job], chunks_s: Sequence[float]) -> None:
        """Add the stages of a pipeline, in order."""
        pipeline = _Pipeline(jobs, chunks_s, [None] * len(jobs), [])
        for place, job in enumerate(jobs):
            self._stages[job.number] = pipeline, place
            self._pipelined.add(job.number)

    def is_stage(self, job: Job) -> bool:
        """Return whether a job is a stage of a pipeline."""
        return job.number in self._pipelined

    def started(self, job: Job) -> bool:
        """Note that an instance has turned to a job, and return whether that is a stage of a pipeline."""
        pipeline, place = self._stages.pop(job.number, (None, 0))
        if pipeline is None:
            return False
        pipeline.starts_s[place] = self._events.now_s
        while len(pipeline.ends_s) < len(pipeline.jobs):
            place = len(pipeline.ends_s)
            start_s = pipeline.starts_s[place]
            if start_s is None:
                break
            before = pipeline.ends_s[-1] if place else None
            ends_s = stage_ends_s(pipeline.chunks_s, len(pipeline.jobs), start_s, before)
            pipeline.ends_s.append(ends_s)
            stage = pipeline.jobs[place]
            stage.finish_s = ends_s[-1]
            self._records[self.helped(stage.number)].prefill_s += ends_s[-1] - start_s
            self._events.at(stage.finish_s, self._ended, stage)
        return True
