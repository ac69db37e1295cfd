"""Admission: nothing in flight is lost from the count, verdicts follow from their figures; and replication."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvfs.errors import Exists, InvalidRequest, NotFound
from scheduler.routing.admission import (
    DEFER_S,
    MAX_RETRY_AFTER_S,
    Mode,
    Reason,
    Slo,
    Verdict,
    admit,
    decodable,
    reserve,
)
from scheduler.routing.cluster import uniform_cluster
from scheduler.routing.commitments import Ledger
from scheduler.routing.decisions import Decision, Prompt
from scheduler.routing.queues import Job
from scheduler.routing.replication import (
    HALF_LIFE_S,
    LEAST_COPY_HEAT,
    MISS_WEIGHT,
    BlockHeat,
    Copy,
    Demotion,
    Heat,
    Misses,
    keeps_copy,
    replicate,
)
from scheduler.routing.route import route
from tests.support.clusters import COSTS, Scene, scenes


# --- the ledger ------------------------------------------------------------------------------------------
@dataclass
class Flown:
    decode: int | None
    tokens: int
    job: Job


class LedgerAgainstModel(RuleBasedStateMachine):
    """Requests begin, prefill, join, are refused and are given up in any order; the sums always agree."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = uniform_cluster(3, 2, network_bytes_s=87e9)
        self.ledger = Ledger(self.cluster)
        self.flights: dict[int, Flown] = {}
        self.running: dict[int, Job] = {}
        self.now_s = 0.0
        self.count = 0

    @rule(tokens=st.integers(1, 100_000), draining=st.sampled_from([None, 0, 1]))
    def commit(self, tokens: int, draining: int | None) -> None:
        for n, decode in enumerate(self.cluster.decode):
            decode.draining = n == draining
        prompt = Prompt(self.now_s, tokens, (), 512)
        decision = route(prompt, self.cluster, COSTS, self.now_s)
        job = self.ledger.commit(self.count, prompt, decision, self.now_s)
        assert decision.decode is not None
        self.flights[self.count] = Flown(decision.decode.instance, tokens, job)
        with pytest.raises(Exists):
            self.ledger.commit(self.count, prompt, decision, self.now_s)
        self.count += 1

    @rule(instance=st.integers(0, 2))
    def start(self, instance: int) -> None:
        busy = instance in self.running
        job = self.ledger.start(instance, self.now_s)
        assert not (busy and job is not None)
        if job is not None:
            self.running[instance] = job

    @rule(data=st.data())
    def finish_prefill(self, data: st.DataObject) -> None:
        if self.running:
            instance = data.draw(st.sampled_from(sorted(self.running)))
            job = self.running.pop(instance)
            self.now_s = max(self.now_s, job.finish_s)
            self.ledger.prefilled(job)
            assert self.cluster.prefill[instance].running is None

    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        done = [number for number, flown in self.flights.items() if flown.job.done]
        if done:
            number = data.draw(st.sampled_from(done))
            self.ledger.joined(number)
            del self.flights[number]

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if self.flights:
            number = data.draw(st.sampled_from(sorted(self.flights)))
            job = self.flights.pop(number).job
            self.ledger.dropped(number)
            assert job.done
            for instance, running in list(self.running.items()):
                if running is job:
                    del self.running[instance]
            with pytest.raises(NotFound):
                self.ledger.joined(number)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert len(self.ledger) == len(self.flights)
        for n, decode in enumerate(self.cluster.decode):
            here = [flown for flown in self.flights.values() if flown.decode == n]
            assert decode.committed_requests == len(here)
            assert decode.committed_tokens == sum(flown.tokens for flown in here)
        queued = {job.number for instance in self.cluster.prefill for job in instance.queue.jobs()}
        assert queued == {n for n, f in self.flights.items() if f.job.started_s is None}
        for n, instance in enumerate(self.cluster.prefill):
            assert instance.running is self.running.get(n)


LedgerAgainstModel.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestLedgerAgainstModel = LedgerAgainstModel.TestCase


def test_a_decision_without_an_instance_cannot_be_committed() -> None:
    cluster = uniform_cluster(1, 0, network_bytes_s=87e9)
    cluster.prefill[0].draining = True
    prompt = Prompt(0.0, 100, (), 512)
    with pytest.raises(InvalidRequest, match="no instance"):
        Ledger(cluster).commit(1, prompt, route(prompt, cluster, COSTS, 0.0), 0.0)


# --- verdicts --------------------------------------------------------------------------------------------
slos = st.builds(
    Slo, st.sampled_from([0.5, 5.0, 30.0, float("inf")]), st.sampled_from([0.025, 0.06, float("inf")])
)


@settings(max_examples=300)
@given(scenes, slos, st.sampled_from(Mode))
def test_a_verdict_follows_from_its_figures(question: Scene, slo: Slo, mode: Mode) -> None:
    decision = route(*question)
    found = admit(decision, COSTS, slo, mode, decodes=bool(question.cluster.decode))
    assert found.ttft_s == decision.ttft_s
    expected = Reason.FITS
    if decision.prefill is None or (question.cluster.decode and decision.decode is None):
        expected = Reason.NO_INSTANCE
    elif mode is not Mode.NONE:
        if found.ttft_s > slo.ttft_s:
            expected = Reason.TTFT
        elif decision.decode is not None and decision.decode.reserved:
            expected = Reason.RESERVED
        elif found.tbt_s > slo.tbt_s:
            expected = Reason.TBT
        elif mode is Mode.DEFAULT and found.context_tokens > COSTS.kv_capacity_tokens:
            expected = Reason.MEMORY
    assert found.reason is expected
    assert (found.verdict is Verdict.ADMIT) == (found.reason is Reason.FITS)
    assert (found.retry_after_s > 0) == (found.verdict is not Verdict.ADMIT)
    assert found.retry_after_s <= MAX_RETRY_AFTER_S
    if found.verdict is Verdict.DEFER:
        assert mode is Mode.DEFAULT
        assert decision.decode is not None
        assert decision.decode.alone_s <= slo.tbt_s
        assert found.ttft_s + found.retry_after_s <= slo.ttft_s
        assert not decodable(question.cluster, question.prompt, COSTS, slo)


@settings(max_examples=200)
@given(scenes, slos)
def test_default_sees_at_least_the_load_that_early_sees(question: Scene, slo: Slo) -> None:
    decision = route(*question)
    early = admit(decision, COSTS, slo, Mode.EARLY, decodes=bool(question.cluster.decode))
    default = admit(decision, COSTS, slo, Mode.DEFAULT, decodes=bool(question.cluster.decode))
    assert default.tbt_s >= early.tbt_s
    assert not (default.verdict is Verdict.ADMIT and early.verdict is not Verdict.ADMIT)


def test_what_is_committed_counts_before_it_arrives() -> None:
    """Ten prompts at once, room for a few: the batches are empty all the while."""
    cluster = uniform_cluster(8, 1, network_bytes_s=87e9)
    ledger, slo = Ledger(cluster), Slo(30.0, 0.025)
    verdicts: dict[Mode, list[Verdict]] = {Mode.EARLY: [], Mode.DEFAULT: []}
    for number in range(10):
        prompt = Prompt(0.0, 20_000, (), 512)
        decision = route(prompt, cluster, COSTS, 0.0)
        for mode, found in verdicts.items():
            found.append(admit(decision, COSTS, slo, mode).verdict)
        if verdicts[Mode.DEFAULT][-1] is Verdict.ADMIT:
            ledger.commit(number, prompt, decision, 0.0)
    assert verdicts[Mode.EARLY] == [Verdict.ADMIT] * 10
    admitted = verdicts[Mode.DEFAULT].count(Verdict.ADMIT)
    assert 0 < admitted < 10
    assert verdicts[Mode.DEFAULT] == [Verdict.ADMIT] * admitted + [Verdict.DEFER] * (10 - admitted)


def test_a_request_is_deferred_until_its_budget_is_spent() -> None:
    cluster = uniform_cluster(1, 1, network_bytes_s=87e9)
    cluster.decode[0].active_requests, cluster.decode[0].active_tokens = 30, 600_000
    slo = Slo(5.0, 0.025)

    def at(now_s: float) -> Verdict:
        return admit(
            route(Prompt(0.0, 1000, (), 512), cluster, COSTS, now_s), COSTS, slo, Mode.DEFAULT
        ).verdict

    assert [at(0.0), at(4.0), at(5.0 - DEFER_S), at(6.0)] == [
        Verdict.DEFER,
        Verdict.DEFER,
        Verdict.REJECT,
        Verdict.REJECT,
    ]


def test_what_fits_no_empty_batch_is_refused_at_once() -> None:
    cluster = uniform_cluster(1, 1, network_bytes_s=87e9)
    for tokens, slo in ((1000, Slo(tbt_s=0.001)), (2_000_000, Slo())):
        found = admit(route(Prompt(0.0, tokens, (), 512), cluster, COSTS, 0.0), COSTS, slo, Mode.DEFAULT)
        assert found.verdict is Verdict.REJECT


def test_a_decode_instance_is_kept_for_who_waited_longest() -> None:
    cluster = uniform_cluster(1, 2, network_bytes_s=87e9)
    cluster.decode[0].active_requests, cluster.decode[0].active_tokens = 10, 100_000
    assert reserve(cluster) == 1
    cluster.reserved_decode = 1
    others, holder = Prompt(0.0, 1000, (), 512), Prompt(0.0, 1000, (), 512, holds_reservation=True)
    for prompt, instance in ((others, 0), (holder, 1)):
        decode = route(prompt, cluster, COSTS, 0.0).decode
        assert decode is not None
        assert decode.instance == instance
    cluster.decode[0].draining = True
    verdict = admit(route(others, cluster, COSTS, 0.0), COSTS, Slo(30.0, 0.06), Mode.DEFAULT)
    assert (verdict.verdict, verdict.reason) == (Verdict.DEFER, Reason.RESERVED)
    cluster.decode[1].draining = True
    assert reserve(cluster) is None


def test_a_client_is_told_when_the_queue_will_be_short_enough() -> None:
    cluster = uniform_cluster(1, 0, network_bytes_s=87e9)
    ledger, prompt = Ledger(cluster), Prompt(0.0, 60_000, (), 512)
    found: list[Decision] = []
    for number in range(4):
        found.append(route(prompt, cluster, COSTS, 0.0))
        ledger.commit(number, prompt, found[-1], 0.0)
    last = found[-1]
    refused = admit(last, COSTS, Slo(ttft_s=10.0), Mode.EARLY, decodes=False)
    assert (refused.verdict, refused.reason) == (Verdict.REJECT, Reason.TTFT)
    assert refused.retry_after_s == pytest.approx(last.ttft_s - 10.0)


# --- replication -----------------------------------------------------------------------------------------
def test_heat_halves() -> None:
    heat = Heat()
    for _ in range(4):
        heat.loaded(1, 10.0)
    assert heat.of(1, 10.0 + HALF_LIFE_S) == pytest.approx(2.0)
    heat.remove(1)
    assert (heat.of(1, 10.0), len(heat)) == (0.0, 0)


heats = st.lists(
    st.builds(BlockHeat, st.integers(0, 99), st.integers(0, 255), st.floats(0, 100)),
    unique_by=lambda block: block.block,
    max_size=20,
)


@given(heats, st.permutations(range(8)))
def test_orders_leave_a_copy_and_go_where_none_is(blocks: list[BlockHeat], targets: list[int]) -> None:
    holders_of = {block.block: block.holders for block in blocks}
    for order in replicate(blocks, targets, 40.0):
        holders = holders_of.pop(order.block)
        assert holders >> order.source & 1
        if isinstance(order, Demotion):
            assert holders.bit_count() > 1
        else:
            assert not holders >> order.target & 1


def test_hot_blocks_spread_and_cold_copies_go() -> None:
    orders = replicate(
        [
            BlockHeat(1, 0b001, 40),
            BlockHeat(2, 0b001, 39),
            BlockHeat(3, 0b011, 39),
            BlockHeat(4, 0b011, 19),
            BlockHeat(5, 0b111, 4000),
        ],
        targets=(2, 1, 0),
        copy_heat=40,
    )
    assert orders == [Copy(1, 0, 2), Demotion(4, 1)]


@given(st.floats(0, 1000), st.integers(1, 20), st.floats(1, 100))
def test_a_steady_heat_is_not_copied_and_demoted_in_turns(heat: float, copies: int, copy_heat: float) -> None:
    if keeps_copy(heat, copies, copy_heat):
        grown = BlockHeat(1, (1 << copies + 1) - 1, heat)
        assert not any(isinstance(order, Demotion) for order in replicate([grown], (), copy_heat))


def test_a_copy_takes_as_many_loads_as_the_misses_that_its_room_would_save() -> None:
    misses = Misses(10)
    for block in range(11):
        misses.evicted(block)
    for block in (0, 99):
        misses.made(block, 5.0, 0.0)
    assert misses.copy_heat(0.1, 0.0) == LEAST_COPY_HEAT, "evicted too long ago, or never"
    for block in (1, 2, 1):
        misses.made(block, 5.0, 0.0)
    assert misses.copy_heat(0.1, 0.0) == pytest.approx(MISS_WEIGHT * (5.0 + 5.0) / 10 / 0.1)
    assert misses.copy_heat(0.1, HALF_LIFE_S) == pytest.approx(MISS_WEIGHT * 5.0 / 10 / 0.1)


def test_a_pool_without_room_for_a_block_counts_nothing() -> None:
    misses = Misses(0)
    misses.evicted(1)
    misses.made(1, 5.0, 0.0)
    assert misses.copy_heat(0.1, 0.0) == LEAST_COPY_HEAT
