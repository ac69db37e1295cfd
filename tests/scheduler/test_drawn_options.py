"""Simulations with options that each run draws: all requests end, and the index is what the caches hold.

KVFS_TEST_SEED repeats a run.
"""

from __future__ import annotations

import pytest

from scheduler.routing.queues import Discipline
from scheduler.simulation.options import Options
from scheduler.simulation.simulate import Simulation
from tests.support.routing_runs import Pooled
from tests.support.seeds import SEED, rounds
from tests.support.simulated_runs import check_end, drawn_run
from tests.support.trace_families import long_agents


@pytest.mark.seeded
def test_a_run_with_any_options_comes_to_an_end() -> None:
    for seed in range(SEED, SEED + rounds(30, 60)):
        simulation, said = drawn_run(seed)
        print(f"KVFS_TEST_SEED={seed}: {said}")
        simulation.run()
        check_end(simulation)


@pytest.mark.parametrize("seed", [8, 11])
def test_a_relay_passes_on_blocks_of_which_its_first_instance_kept_no_copy(seed: int) -> None:
    pooled = Pooled(long_agents(seed, 600), 1500, 4, warm_up=200)
    options = Options(
        prefill=4, cache_blocks=1500, speed=pooled.speed(1.0), discipline=Discipline.LENGTH_AWARE, relay=True
    )
    simulation = Simulation(pooled.trace, options)
    assert simulation.run().figures()["spread"] > 0
    check_end(simulation)
