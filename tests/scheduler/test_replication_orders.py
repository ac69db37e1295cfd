"""Copies ahead of demand: orders that a store can carry out, spread where blocks are hot, and no flapping."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.routing.cost import CostModel, table_costs
from scheduler.routing.replication import HALF_LIFE_S, BlockHeat, Copy, Demotion, Heat, replicate, transfers
from scheduler.simulation.options import Options
from scheduler.simulation.simulate import Simulation, simulate
from scheduler.simulation.traces import Request
from tests.support.trace_families import one_system_prompt

orders = st.lists(
    st.one_of(
        st.builds(Copy, st.integers(0, 999), st.integers(0, 3), st.integers(4, 7)),
        st.builds(Demotion, st.integers(0, 999), st.integers(0, 7)),
    )
)


@given(orders, st.integers(0, 50))
def test_transfers_are_the_first_copies_by_source_and_target(
    given_orders: list[Copy | Demotion], most: int
) -> None:
    found = transfers(given_orders, most)
    copies = [order for order in given_orders if isinstance(order, Copy)][:most]
    assert len({(each.source, each.target) for each in found}) == len(found)
    for each in found:
        assert [*each.blocks] == [
            copy.block for copy in copies if (copy.source, copy.target) == (each.source, each.target)
        ]
    assert sum(len(each.blocks) for each in found) == len(copies)


def test_the_least_busy_holder_sends() -> None:
    block = BlockHeat(1, 0b0111, 400.0)
    assert replicate([block], (3, 2, 0, 1), 4.0) == [Copy(1, 2, 3)]


def test_uses_of_copies_keep_them_warm() -> None:
    heat = Heat()
    heat.used(1, 1, 0.0)
    assert len(heat) == 0
    heat.used(1, 4, 0.0)
    assert heat.of(1, 0.0) == 0.75
    assert heat.loaded(1, HALF_LIFE_S) == pytest.approx(1.375)
    assert heat.touched_s(1) == HALF_LIFE_S
    assert heat.touched_s(2) == float("-inf")


def copies_over_time(trace: list[Request], options: Options, block: int) -> tuple[list[int], list[int]]:
    """Return how many instances hold a block, and how many copies were made in all, at each sweep."""
    simulation, seen, made = Simulation(trace, options), list[int](), list[int]()
    caches = simulation._caches
    sweep = caches.sweep

    def counted(predicted: CostModel, period_s: float) -> None:
        seen.append(caches._copies(block))
        made.append(caches.copied_blocks)
        sweep(predicted, period_s)

    caches.sweep = counted  # type: ignore[method-assign]
    simulation.run()
    return seen, made


@pytest.mark.parametrize("network_bytes_s", [87e9, 5e9])
def test_one_system_prompt_spreads_stays_and_goes(network_bytes_s: float) -> None:
    trace = one_system_prompt(1, 4000, rate=6.0, until=0.6)
    options = Options(cache_blocks=1500, replicates=True, costs=table_costs(network_bytes_s=network_bytes_s))
    seen, made = copies_over_time(trace, options, -1)
    hot, cold = seen[: int(0.6 * len(seen))], seen[int(0.9 * len(seen)) :]
    assert max(hot) == 8
    spread = hot.index(max(hot))
    assert spread <= 10, "sweeps"
    assert all(after >= before for before, after in pairwise(hot[: spread + 1]))
    assert min(hot[spread:]) >= 7, "a copy of a hot block is not taken back"
    assert max(cold) == 0, "what nobody wants goes, and is not copied again"
    assert made[int(0.64 * len(made))] == made[-1] <= 2 * 8 * 60


@pytest.mark.parametrize(("network_bytes_s", "most"), [(87e9, 1.05), (5e9, 0.97)])
def test_copies_ahead_pay_where_loads_take_long_and_cost_little_elsewhere(
    network_bytes_s: float, most: float
) -> None:
    trace = one_system_prompt(4, 1500, rate=6.0)
    base = Options(cache_blocks=1500, costs=table_costs(network_bytes_s=network_bytes_s))
    on_demand, ahead = (
        simulate(trace, replace(base, replicates=replicates)).figures() for replicates in (False, True)
    )
    assert ahead["ttft_mean_s"] < most * on_demand["ttft_mean_s"]
    assert on_demand["copied_blocks"] == 0 < ahead["copied_blocks"]


@pytest.mark.parametrize(("fails", "holders"), [(None, 0b11), (1, 0b01), (0, 0)])
def test_a_copy_that_comes_to_or_from_a_failed_instance_is_none(fails: int | None, holders: int) -> None:
    caches = Simulation([], Options(prefill=2, replicates=True))._caches
    caches.of_source[0].use(7)
    caches.index.add(7, 0)
    if fails is not None:
        caches.fail(fails)
    caches._copied(7, 0, 1)
    assert caches.index.holders(7) == holders
    assert caches.copied_blocks == (fails is None)
