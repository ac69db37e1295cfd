"""Decisions by the policies of `scheduler.routing`, in Python.

Responsibility: a pool's planner for the policies that are compared with `default`; and of `default`, what tests compare
the native one with. State is that of `scheduler.routing`: `Cluster`, `Ledger`, `PrefillQueue`.

Concurrency: one thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from kvfs._native.cluster.index import ClusterIndex
from kvfs.limits import MAX_REMEMBERED_FOLDS
from scheduler.conductor.planning import legs
from scheduler.conductor.planning.planner import Load, Plan, PrefillFigures, Question, Role
from scheduler.routing.cluster import Cluster, DecodeInstance, PrefillInstance, Source
from scheduler.routing.commitments import Ledger
from scheduler.routing.cost import CostModel
from scheduler.routing.decisions import Decision, DecodeCandidate, Prompt
from scheduler.routing.prefix_index import Run
from scheduler.routing.queues import Discipline, Job, PrefillQueue
from scheduler.routing.route import route


class PythonPlan(NamedTuple):
    """Implements `Plan` by a decision with all its candidates, and the prompt that it is for."""

    prompt: Prompt
    decision: Decision

    @property
    def held_blocks(self) -> int:
        return sum(run.blocks for run in self.prompt.runs)

    def considered(self) -> tuple[PrefillFigures, ...]:
        return tuple(
            PrefillFigures(
                each.instance,
                each.queue_s,
                each.ready_s,
                each.prefill_s,
                each.reused_blocks,
                sum(load.blocks for load in each.loads),
                each.delay_s,
                each.score,
            )
            for each in self.decision.considered
        )

    def considered_decode(self) -> tuple[DecodeCandidate, ...]:
        return self.decision.considered_decode


class PythonPlanner:
    """Implements `Planner`; see the module's header."""

    def __init__(
        self, index: ClusterIndex, costs: CostModel, discipline: Discipline, policy: str = "default"
    ) -> None:
        self._index, self._costs, self._discipline, self._policy = index, costs, discipline, policy
        self._cluster = Cluster([], [], [])
        self._ledger = Ledger(self._cluster)
        self._jobs: dict[int, Job] = {}
        """Of requests in no batch yet."""
        self._roles: list[Role] = []
        self._places: dict[int, int] = {}
        self._folds: dict[int, int] = {}
        self._turn = 0

    def __len__(self) -> int:
        return len(self._ledger)

    # --- the pool -----------------------------------------------------------------------------------------
    def join(self, slot: int) -> None:
        cluster = self._cluster
        if slot == len(cluster.prefill):
            cluster.prefill.append(PrefillInstance(""))
            cluster.decode.append(DecodeInstance(""))
            self._roles.append("both")
        cluster.prefill[slot] = PrefillInstance("", PrefillQueue(self._discipline))
        cluster.decode[slot] = DecodeInstance("")

    def take_work(self, slot: int, *, takes: bool) -> None:
        self._cluster.prefill[slot].draining = self._cluster.decode[slot].draining = not takes

    def set_role(self, slot: int, role: Role) -> None:
        self._roles[slot] = role

    def keep(self, slot: int | None) -> None:
        self._cluster.reserved_decode = slot

    def set_source(self, source: int, bytes_s: float) -> None:
        sources = self._cluster.sources
        sources += [Source(None, "", bytes_s) for _ in range(len(sources), source + 1)]
        sources[source] = Source(None, "", bytes_s)

    def map_sources(self, places: Mapping[int, Collection[int]]) -> None:
        self._places = {source: sum(1 << place for place in {*found}) for source, found in places.items()}
        self._folds = {}

    def set_costs(self, costs: CostModel) -> None:
        self._costs = costs

    def add_active(self, slot: int, requests: int, tokens: int) -> None:
        instance = self._cluster.decode[slot]
        instance.active_requests += requests
        instance.active_tokens += tokens

    def answered(self, output_tokens: int) -> None:
        self._cluster.answered(output_tokens)

    @property
    def growth_tokens(self) -> float:
        return self._cluster.growth_tokens

    def load(self, slot: int, now_s: float) -> Load:
        prefill, decode = self._cluster.prefill[slot], self._cluster.decode[slot]
        queue_s = 0.0 if prefill.running is None else max(prefill.running.finish_s - now_s, 0.0)
        for job in prefill.queue.jobs():
            queue_s += job.service_s
        return Load(
            len(prefill.queue),
            prefill.running is not None,
            queue_s,
            decode.active_requests,
            decode.active_tokens,
            decode.committed_requests,
            decode.committed_tokens,
        )

    # --- decisions ----------------------------------------------------------------------------------------
    def plan(self, question: Question) -> PythonPlan:
        prompt = Prompt(
            question.arrival_s,
            question.tokens,
            self._runs(question.hashes),
            question.block_tokens,
            question.holds_kept,
        )
        decision = self._route(prompt, question.excluded, question.now_s)
        chosen = legs.choose(
            decision, self._roles, prompt, self._costs, question.slo, both_legs=question.both_legs
        )
        return PythonPlan(prompt, chosen)

    def _route(self, prompt: Prompt, excluded: Iterable[int], now_s: float) -> Decision:
        """Ask the policy, with the excluded instances out of its sight."""
        before = [(slot, self._cluster.prefill[slot].draining) for slot in {*excluded}]
        for slot, _ in before:
            self.take_work(slot, takes=False)
        try:
            return route(prompt, self._cluster, self._costs, now_s, policy=self._policy, turn=self._turn)
        finally:
            self._turn += 1
            for slot, draining in before:
                self.take_work(slot, takes=not draining)

    def _runs(self, hashes: bytes) -> tuple[Run, ...]:
        """Return the prefix that is in place, or is being made, somewhere in the pool."""
        found: list[Run] = []
        for holders, blocks, number in self._index.runs(hashes):
            folded = self._fold(holders)
            if not folded:
                break
            job = None if number is None else self._jobs.get(number)
            producer = None if job is None or job.done else job
            if found and found[-1].holders == folded and found[-1].producer is producer:
                found[-1] = Run(folded, found[-1].blocks + blocks, producer)
            else:
                found.append(Run(folded, blocks, producer))
        return tuple(found)

    def _fold(self, holders: int) -> int:
        """Return the mask of the cluster's sources for a mask of the index."""
        folded = self._folds.get(holders)
        if folded is None:
            folded, left = 0, holders
            while left:
                bit = left & -left
                left ^= bit
                folded |= self._places.get(bit.bit_length() - 1, 0)
            if len(self._folds) >= MAX_REMEMBERED_FOLDS:
                self._folds.clear()
            self._folds[holders] = folded
        return folded

    # --- commitments --------------------------------------------------------------------------------------
    def commit(self, number: int, plan: Plan, now_s: float, *, promised_s: float) -> None:
        assert isinstance(plan, PythonPlan)
        self._jobs[number] = self._ledger.commit(
            number, plan.prompt, plan.decision, now_s, promised_s=promised_s
        )

    def start(self, slot: int, now_s: float) -> int | None:
        job = self._ledger.start(slot, now_s)
        return None if job is None else job.number

    def start_idle(self, now_s: float) -> list[int]:
        started = [
            self._ledger.start(slot, now_s)
            for slot, instance in enumerate(self._cluster.prefill)
            if instance.running is None and len(instance.queue)
        ]
        return [job.number for job in started if job is not None]

    def overdue(self, now_s: float, late_s: float) -> list[int]:
        running = [each.running for each in self._cluster.prefill if len(each.queue)]
        return [
            job.number for job in running if job is not None and now_s > job.finish_s + job.service_s + late_s
        ]

    def prefilled(self, number: int) -> None:
        job = self._jobs[number]
        instance = self._cluster.prefill[job.instance]
        if instance.running is job:
            self._ledger.prefilled(job)
        else:  # the engine took another order, or lacked a queue
            instance.queue.remove(job)
            job.finished()

    def joined(self, number: int) -> None:
        del self._jobs[number]
        self._ledger.joined(number)

    def dropped(self, number: int) -> None:
        del self._jobs[number]
        self._ledger.dropped(number)
