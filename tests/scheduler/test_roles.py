"""Roles: instances change sides when the load asks for it, never back and forth, and it pays."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.errors import InvalidRequest
from scheduler.routing.admission import Mode, Slo
from scheduler.routing.cost import table_costs
from scheduler.routing.roles import (
    Balance,
    Contexts,
    Demand,
    Member,
    Relabel,
    Role,
    Rules,
    Side,
    decode_side,
    prefill_side,
    rebalance,
)
from scheduler.simulation import relabels
from scheduler.simulation.options import Failure, Options
from scheduler.simulation.simulate import Simulation, simulate
from scheduler.simulation.traces import Request
from tests.support.trace_families import diurnal

COSTS = table_costs()
RULES = Rules()
loads = st.floats(0, 20)


class Machines:
    """Instances that are looked at every `look_s`, and drain for so many looks when they change."""

    def __init__(self, roles: list[Role], drains: int) -> None:
        self.roles = roles
        self._drains = drains
        self._draining: dict[int, int] = {}
        self._balance = Balance()
        self.now_s = 0.0
        self.orders: list[tuple[float, Relabel]] = []

    def look(self, prefill: float, decode: float) -> None:
        """Look once, while the sides carry so many instances' worth of work."""
        self.now_s += RULES.look_s
        self._draining = {n: left - 1 for n, left in self._draining.items() if left > 1}
        members = {n: Member(role, float(n), n in self._draining) for n, role in enumerate(self.roles)}
        sides = {}
        for role, load in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            count = self.roles.count(role)
            less = load / (count - 1) if count > 1 else float("inf")
            sides[role] = Side(count, load / count, less)
        self._balance, order = rebalance(self._balance, members, sides, RULES, self.now_s)
        if order is not None:
            assert not self._draining
            assert self.roles[order.instance] is order.role.other
            self.roles[order.instance] = order.role
            self._draining[order.instance] = self._drains
            self.orders.append((self.now_s, order))


splits = st.tuples(st.integers(1, 8), st.integers(1, 8)).map(
    lambda split: [Role.PREFILL] * split[0] + [Role.DECODE] * split[1]
)


@given(splits, st.lists(st.tuples(loads, loads, st.integers(1, 12)), max_size=40), st.integers(1, 10))
def test_orders_keep_their_distance_and_a_side_keeps_one(
    roles: list[Role], seen: list[tuple[float, float, int]], drains: int
) -> None:
    machines = Machines(list(roles), drains)
    for prefill, decode, looks in seen:
        for _ in range(looks):
            machines.look(prefill, decode)
            assert {*machines.roles} == {*Role}
    at_s = defaultdict(list)
    for when_s, order in machines.orders:
        at_s["all"].append(when_s)
        at_s[str(order.instance)].append(when_s)
    for name, times in at_s.items():
        least_s = RULES.pause_s if name == "all" else RULES.window_s
        assert all(after - before >= least_s for before, after in pairwise(times))


def test_a_load_that_swings_changes_an_instance_once_in_a_window() -> None:
    machines = Machines([Role.PREFILL, Role.DECODE, Role.DECODE], 1)
    for n in range(400):
        machines.look(*((1.9, 0.1) if n // 5 % 2 else (0.1, 1.9)))
    at_s = [when_s for when_s, order in machines.orders if order.instance == 1]
    assert len(at_s) > 5
    assert all(after - before >= RULES.window_s for before, after in pairwise(at_s))


@given(splits, loads, loads)
def test_at_constant_load_changes_go_one_way_and_end(
    roles: list[Role], prefill: float, decode: float
) -> None:
    machines = Machines(list(roles), 2)
    for _ in range(len(roles) * int(RULES.window_s / RULES.look_s)):
        machines.look(prefill, decode)
    assert len({order.role for _, order in machines.orders}) <= 1
    settled = len(machines.orders)
    for _ in range(100):
        machines.look(prefill, decode)
    assert len(machines.orders) == settled < len(roles)


def test_one_change_that_is_enough_is_the_last() -> None:
    machines = Machines([Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE], 1)
    for _ in range(1000):
        machines.look(1.9, 0.5)
    assert [(at_s, order) for at_s, order in machines.orders] == [
        (RULES.looks * RULES.look_s, Relabel(2, Role.PREFILL))
    ]


def test_a_short_peak_changes_nothing() -> None:
    machines = Machines([Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE], 1)
    for n in range(1000):
        machines.look(1.9 if n % RULES.looks else 0.5, 0.5)
    assert machines.orders == []


@given(st.integers(2, 64), loads, loads, st.floats(0, 1e6))
def test_pressure_falls_with_each_instance(count: int, demand: float, queued_s: float, tokens: float) -> None:
    for side in (
        prefill_side(count, demand, queued_s, 30.0),
        decode_side(count, Contexts(int(tokens), int(tokens / 1000)), Contexts(), 0.0, COSTS, Slo(30.0, 0.1)),
    ):
        assert side.without_one == pytest.approx(side.pressure * count / (count - 1))
    one, nobody = Contexts(1, 1), Contexts()
    assert decode_side(2, one, nobody, 0.0, COSTS, Slo(tbt_s=0.01)).pressure == float("inf")
    assert decode_side(2, Contexts(100_000, 10), nobody, 0.0, COSTS, Slo()).pressure < 1


contexts = st.builds(Contexts, st.integers(0, 10**7), st.integers(0, 4_096))


@given(st.integers(1, 64), contexts, contexts, contexts, st.floats(0, 2_000))
def test_who_waits_is_load_as_who_is_in_a_batch(
    count: int, held: Contexts, waiting: Contexts, more: Contexts, growth_tokens: float
) -> None:
    def side(held: Contexts, waiting: Contexts) -> Side:
        return decode_side(count, held, waiting, growth_tokens, COSTS, Slo(30.0, 0.1))

    def both(one: Contexts, other: Contexts) -> Contexts:
        return Contexts(one.tokens + other.tokens, one.requests + other.requests)

    assert side(held, waiting) == side(waiting, held) == side(both(held, waiting), Contexts())
    assert side(held, both(waiting, more)).pressure >= side(held, waiting).pressure
    assert side(held, both(waiting, Contexts(1, 1))).pressure > side(held, waiting).pressure


def test_demand_follows_what_arrives() -> None:
    demand = Demand()
    for n in range(1, 2000):
        demand = demand.added((0.5,), n * 0.2)
    assert demand.instances(400.0) == pytest.approx(2.5, rel=0.02)
    assert demand.instances(430.0) == pytest.approx(1.25, rel=0.02)


def test_relabelling_serves_more_of_a_diurnal_load_than_every_static_split() -> None:
    rate = 3.0
    trace = diurnal(5, int(rate * 1800), rate=rate)
    base = Options(prefill=4, decode=4, decode_factor=2.0, slo=Slo(20.0, 0.1), admission=Mode.DEFAULT)
    never = Rules(looks=1 << 30)
    static = [
        simulate(trace, replace(base, prefill=count, decode=8 - count, relabels=never)).figures()
        for count in (3, 4, 5, 6)
    ]
    simulation = Simulation(trace, replace(base, relabels=RULES))
    result = simulation.run()
    found = result.figures()
    assert found["slo_attainment"] > max(each["slo_attainment"] for each in static)
    assert found["goodput_tokens"] > max(each["goodput_tokens"] for each in static)
    assert [each["changed_roles"] for each in static] == [0] * 4
    times = [change.at_s for change in result.changes]
    assert 2 <= len(times) <= 2 * 8
    for prefill, decode in zip(simulation._cluster.prefill, simulation._cluster.decode, strict=True):
        assert prefill.draining or decode.draining


def test_a_steady_load_changes_no_instance_twice() -> None:
    trace = diurnal(6, 2400, period_s=1e9, rate=4.0)
    options = Options(
        prefill=4, decode=4, decode_factor=2.0, slo=Slo(20.0, 0.1), admission=Mode.DEFAULT, relabels=RULES
    )
    changes = simulate(trace, options).changes
    assert {change.role for change in changes} == {Role.DECODE}
    assert len({change.instance for change in changes}) == len(changes)


def test_nobody_looks_at_instances_that_have_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the days of a trace, or before a trace whose times count from 1970, are hundreds of millions of looks."""
    looks = itertools.count(1)

    def counted(*arguments: Any) -> Any:
        assert next(looks) < 10_000
        return rebalance(*arguments)

    monkeypatch.setattr(relabels, "rebalance", counted)
    day = diurnal(5, 300, rate=3.0)
    trace = [
        replace(request, arrival_s=request.arrival_s + begin_s)
        for begin_s in (1.7e9, 1.8e9)
        for request in day
    ]
    options = Options(
        prefill=2, decode=2, decode_factor=2.0, slo=Slo(20.0, 0.1), admission=Mode.DEFAULT, relabels=RULES
    )
    result = simulate(trace, options)
    assert result.figures()["requests"] == 600
    assert next(looks) > 2


def test_looks_go_on_in_time_with_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[float] = []

    def noted(state: Any, members: Any, sides: Any, rules: Rules, now_s: float) -> Any:
        times.append(now_s)
        return rebalance(state, members, sides, rules, now_s)

    monkeypatch.setattr(relabels, "rebalance", noted)
    trace = [Request(at_s, 1000, 10, (1, 2)) for at_s in (0.0, 1000.0, 1002.5, 1007.5)]
    simulate(trace, Options(prefill=2, decode=2, relabels=Rules(look_s=5.0)))
    assert times[0] == 5.0
    assert all(at_s % 5.0 == 0 for at_s in times)
    assert len(times) < 20
    assert 1005.0 in times


@pytest.mark.parametrize(
    "change",
    [
        {"relabels": Rules(), "decode": 0},
        {"relabels": Rules(low=0.9), "decode": 2},
        {"relabels": Rules(), "decode": 2, "failures": (Failure(0, 1.0, 1.0),)},
    ],
)
def test_options_that_do_not_go_together_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        simulate([], replace(Options(), **change))
