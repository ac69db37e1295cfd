"""The length-aware queue against first come, first served: `python -m tests.support.queue_runs --seed SEED`.

Four instances of 1,500 blocks, 400 requests of each family after 200 that warm the caches up, loads of 70, 100 and
115 % of what one pooled cache would leave to prefill. A line for each family: for each load the mean TTFT of the one
as a multiple of the other's over all seeds, and that of the worst seed.
"""

from __future__ import annotations

import argparse
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from statistics import fmean

from scheduler.routing.queues import Discipline
from scheduler.simulation.options import Options
from scheduler.simulation.simulate import simulate
from tests.support.routing_runs import Pooled
from tests.support.trace_families import FAMILIES

INSTANCES, BLOCKS = 4, 1500
REQUESTS, WARM_UP = 600, 200
LOADS = (0.7, 1.0, 1.15)


def mean_ttfts_s(case: tuple[str, float, int]) -> tuple[float, ...]:
    """Return the mean TTFT of each discipline for a family, load and seed."""
    family, load, seed = case
    pooled = Pooled(FAMILIES[family](seed, REQUESTS), BLOCKS, INSTANCES, warm_up=WARM_UP)
    base = Options(prefill=INSTANCES, cache_blocks=BLOCKS, speed=pooled.speed(load))
    return tuple(
        fmean(record.ttft_s for record in simulate(pooled.trace, options).records[WARM_UP:])
        for options in (replace(base, discipline=discipline) for discipline in Discipline)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    print(f"--seed {options.seed} --seeds {options.seeds}")
    seeds = range(options.seed, options.seed + options.seeds)
    with ProcessPoolExecutor() as pool:
        for family in FAMILIES:
            cells = []
            for load in LOADS:
                found = list(pool.map(mean_ttfts_s, [(family, load, seed) for seed in seeds]))
                fcfs_s, length_aware_s = (sum(column) for column in zip(*found, strict=True))
                worst = max(each[1] / each[0] for each in found)
                cells.append(f"{length_aware_s / fcfs_s:.2f}, {worst:.2f}")
            print(f"{family}: {' | '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
