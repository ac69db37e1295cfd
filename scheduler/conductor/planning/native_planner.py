"""Decisions of the policy `default` by the native router.

Responsibility: a pool's planner over `kvfs._native.cluster.route`, which walks the index, weighs all instances and
keeps what is committed. What it decides equals `python_planner` to the bit.

Concurrency: one thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from kvfs._native.cluster.index import ClusterIndex
from kvfs._native.cluster.route import Choice, Router
from kvfs.limits import MAX_RESERVATIONS, PREFILL_LEG_TOKENS
from scheduler.conductor.planning.planner import Load, Plan, PrefillFigures, Question, Role
from scheduler.routing.cluster import ANSWERS_REMEMBERED
from scheduler.routing.cost import CostModel
from scheduler.routing.decisions import Decision, DecodeCandidate, PrefillCandidate
from scheduler.routing.decisions import Load as BlockLoad
from scheduler.routing.queues import Discipline


class NativePlan(msgspec.Struct, frozen=True):
    """Implements `Plan` by a choice of the router, which has the figures of all candidates packed."""

    choice: Choice
    decision: Decision

    @property
    def held_blocks(self) -> int:
        return self.choice.held_blocks

    def considered(self) -> tuple[PrefillFigures, ...]:
        return tuple(PrefillFigures(*each) for each in self.choice.considered)

    def considered_decode(self) -> tuple[DecodeCandidate, ...]:
        return tuple(DecodeCandidate(*each) for each in self.choice.considered_decode)


class NativePlanner:
    """Implements `Planner`; see the module's header."""

    def __init__(self, index: ClusterIndex, costs: CostModel, discipline: Discipline) -> None:
        self._router = Router(index, costs, MAX_RESERVATIONS)
        self._router.map_sources({})
        self._aware = discipline is Discipline.LENGTH_AWARE

    def __len__(self) -> int:
        return len(self._router)

    # --- the pool -----------------------------------------------------------------------------------------
    def join(self, slot: int) -> None:
        self._router.set_prefill(slot, length_aware=self._aware)
        self._router.set_decode(slot, active_requests=0, active_tokens=0)

    def take_work(self, slot: int, *, takes: bool) -> None:
        requests, tokens, _, _ = self._router.decode_load(slot)
        self._router.set_prefill(slot, length_aware=self._aware, draining=not takes)
        self._router.set_decode(slot, active_requests=requests, active_tokens=tokens, draining=not takes)

    def set_role(self, slot: int, role: Role) -> None:
        self._router.set_role(slot, prefills=role != "decode", decodes=role != "prefill")

    def keep(self, slot: int | None) -> None:
        self._router.reserved_decode = slot

    def set_source(self, source: int, bytes_s: float) -> None:
        self._router.set_source(source, bytes_s=bytes_s, free_at_s=0.0)

    def map_sources(self, places: Mapping[int, Collection[int]]) -> None:
        self._router.map_sources(places)

    def set_costs(self, costs: CostModel) -> None:
        self._router.set_costs(costs)

    def add_active(self, slot: int, requests: int, tokens: int) -> None:
        self._router.add_active(slot, requests, tokens)

    def answered(self, output_tokens: int) -> None:
        router = self._router
        router.answer_tokens += (output_tokens - router.answer_tokens) / ANSWERS_REMEMBERED

    @property
    def growth_tokens(self) -> float:
        return self._router.answer_tokens / 2

    def load(self, slot: int, now_s: float) -> Load:
        return Load(*self._router.prefill_load(slot, now_s), *self._router.decode_load(slot))

    # --- decisions ----------------------------------------------------------------------------------------
    def plan(self, question: Question) -> NativePlan:
        choice = self._router.choose(
            question.hashes,
            arrival_s=question.arrival_s,
            tokens=question.tokens,
            block_tokens=question.block_tokens,
            now_s=question.now_s,
            tbt_slo_s=question.slo.tbt_s,
            leg_tokens=PREFILL_LEG_TOKENS,
            excluded=question.excluded,
            both_legs=question.both_legs,
            holds_reservation=question.holds_kept,
        )
        return NativePlan(choice, _decision(choice))

    # --- commitments --------------------------------------------------------------------------------------
    def commit(self, number: int, plan: Plan, now_s: float, *, promised_s: float) -> None:
        assert isinstance(plan, NativePlan)
        self._router.commit(number, plan.choice, now_s, promised_s=promised_s)

    def start(self, slot: int, now_s: float) -> int | None:
        return self._router.start(slot, now_s)

    def start_idle(self, now_s: float) -> list[int]:
        return self._router.start_idle(now_s)

    def overdue(self, now_s: float, late_s: float) -> list[int]:
        return self._router.overdue(now_s, late_s)

    def prefilled(self, number: int) -> None:
        self._router.prefilled(number)

    def joined(self, number: int) -> None:
        self._router.joined(number)

    def dropped(self, number: int) -> None:
        self._router.dropped(number)


def _decision(choice: Choice) -> Decision:
    """Return a choice as the policies' value; it leaves out the producers, which are no jobs here."""
    prefill, decode = choice.prefill, choice.decode
    candidate = None
    if prefill is not None:
        instance, queue_s, ready_s, prefill_s, blocks, loads, _, rank, delay_s, score = prefill
        loaded = tuple([BlockLoad(*load) for load in loads])
        candidate = PrefillCandidate(
            instance, queue_s, ready_s, prefill_s, blocks, loaded, (), rank, delay_s, score
        )
    return Decision(
        "default",
        choice.waited_s,
        candidate,
        None if decode is None else DecodeCandidate(*decode),
        (),
        (),
    )
