"""The default routing on traffic drawn anew by each run: long sessions against a pooled cache, and all families against
the other policies, a sample of what `make routing-runs` runs.

KVFS_TEST_SEED repeats a run, KVFS_TEST_TRACES says how many traces there are of each kind.
"""

from __future__ import annotations

import os
import random
from typing import Final

import pytest

from scheduler.routing.queues import Discipline
from scheduler.routing.replication import taker
from scheduler.simulation.options import Options
from scheduler.simulation.simulate import simulate
from tests.support.routing_runs import Pooled, drawn, mean_ttft_s, measure, summary
from tests.support.seeds import SEED, rounds
from tests.support.trace_families import FAMILIES, long_agents, long_chats

TRACES: Final = int(os.environ.get("KVFS_TEST_TRACES", rounds(1, 2)))
NODES: Final = 4


@pytest.mark.seeded
@pytest.mark.parametrize("load", [0.5, 0.7])
def test_long_sessions_come_close_to_one_pooled_cache(load: float) -> None:
    worst = 0.0
    for seed in range(SEED, SEED + TRACES):
        trace = long_agents(seed, 500, sessions=random.Random(seed).choice((20, 24, 32)))
        for cache_blocks in (1200, 1500):
            pooled = Pooled(trace, cache_blocks, NODES)
            speed = pooled.speed(load)
            found_s = mean_ttft_s(trace, "default", prefill=NODES, cache_blocks=cache_blocks, speed=speed)
            worst = max(worst, found_s / pooled.ttft_s(speed))
            assert found_s <= 1.5 * pooled.ttft_s(speed), f"KVFS_TEST_SEED={seed}, {cache_blocks} blocks"
    print(f"load {load}: at most {worst:.3f} of the pooled cache")


@pytest.mark.seeded
@pytest.mark.parametrize("load", [0.5, 0.7])
def test_stationary_chats_come_close_to_one_pooled_cache(load: float) -> None:
    """Once all chats have begun; a chat that goes elsewhere has to be loaded, which the pooled cache need not."""
    for seed in range(SEED, SEED + TRACES):
        pooled = Pooled(long_chats(seed, 1200), 1500, NODES, warm_up=600)
        speed = pooled.speed(load)
        found_s = mean_ttft_s(
            pooled.trace, "default", prefill=NODES, cache_blocks=1500, speed=speed, warm_up=600
        )
        of_pooled, of_loading = found_s / pooled.ttft_s(speed), found_s / pooled.loading_ttft_s(speed)
        print(
            f"seed {seed}, load {load}: {of_pooled:.3f} of the pooled cache, {of_loading:.3f} with its loads"
        )
        assert of_pooled <= 1.5
        assert of_loading <= 1.25


@pytest.mark.seeded
def test_the_length_aware_queue_makes_no_context_again_and_again() -> None:
    """Prompts that wait for a producer in a long queue are passed, and cost those behind them little."""
    for seed in range(SEED, SEED + TRACES):
        pooled = Pooled(long_agents(seed, 600), 1500, NODES, warm_up=200)
        took_s: list[float] = []
        for discipline in (Discipline.FCFS, Discipline.LENGTH_AWARE):
            options = Options(
                prefill=NODES, cache_blocks=1500, speed=pooled.speed(1.0), discipline=discipline
            )
            took_s.append(sum(record.prefill_s for record in simulate(pooled.trace, options).records))
        print(f"seed {seed}: {took_s[1] / took_s[0]:.3f} of the prefill of first come, first served")
        assert took_s[1] <= 1.15 * took_s[0]


@pytest.mark.seeded
def test_the_default_loses_little_in_any_run() -> None:
    found = [measure(drawn(seed), 400) for seed in range(SEED, SEED + TRACES * len(FAMILIES))]
    print("\n".join(summary(found)))
    worst = max(found, key=lambda each: each.against_rivals)
    assert worst.against_rivals <= 1.15, worst


def test_an_evicted_last_copy_goes_where_the_oldest_block_is() -> None:
    assert taker([7, 3, 9], used=5) == 1
    assert taker([7, 3, 9], used=2) is None
    assert taker([7, -1, 9], used=1) == 1
