"""Runs of the default routing against the other policies and a pooled cache, on traffic that is drawn from a seed.

`python -m tests.support.routing_runs --runs 200` draws and prints a seed, and `--seed` repeats it. Each run draws its
family, trace, caches, instances and load from seed + its number alone, so `--only` repeats single ones.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from statistics import fmean
from typing import NamedTuple

from scheduler.routing.cost import table_costs
from scheduler.simulation.nodes import BlockLru
from scheduler.simulation.options import Options
from scheduler.simulation.simulate import simulate
from scheduler.simulation.traces import BLOCK_TOKENS, Request
from tests.support.trace_families import FAMILIES

COSTS = table_costs()
RIVALS = ("kvcache-centric", "local")
LOADS = (0.3, 0.5, 0.7, 0.85, 1.0)
"""Of the prefill time that a pooled cache leaves to do."""

REQUESTS = 600


class Run(NamedTuple):
    """One run, as drawn."""

    seed: int
    family: str
    prefill: int
    cache_blocks: int
    load: float


class Found(NamedTuple):
    """Mean TTFT by policy; `pooled` has one cache together and one queue, first come first served."""

    run: Run
    ttft_s: dict[str, float]

    @property
    def against_rivals(self) -> float:
        return self.ttft_s["default"] / min(self.ttft_s[rival] for rival in RIVALS)

    @property
    def against_pooled(self) -> float:
        return self.ttft_s["default"] / self.ttft_s["pooled"]


def drawn(seed: int) -> Run:
    rng, families = random.Random(seed), list(FAMILIES)
    family, prefill = families[seed % len(families)], rng.choice((4, 8))
    return Run(seed, family, prefill, rng.choice((400, 1500, 5859)), rng.choice(LOADS))


class Pooled:
    """A trace over instances with one cache together and one queue, first come first served; the first `warm_up`
    requests are in no figure."""

    def __init__(self, trace: list[Request], cache_blocks: int, prefill: int, *, warm_up: int = 0) -> None:
        cache = BlockLru(cache_blocks * prefill)
        self._arrivals_s = [request.arrival_s for request in trace]
        self._took_s: list[float] = []
        self._prefill, self._warm_up = prefill, warm_up
        for request in trace:
            blocks = request.blocks
            hits = next((n for n, block in enumerate(blocks) if block not in cache), len(blocks))
            for block in reversed(blocks):
                cache.use(block)
            list(cache.evict())
            cached = min(hits * BLOCK_TOKENS, request.input_tokens)
            self._took_s.append(COSTS.prefill_s(request.input_tokens, cached))

    def speed(self, load: float) -> float:
        """Return the factor on the rate of arrivals that makes this load."""
        span_s = self._arrivals_s[-1] - (self._arrivals_s[self._warm_up] if self._warm_up else 0.0)
        return load * self._prefill * span_s / sum(self._took_s[self._warm_up :])

    def ttft_s(self, speed: float) -> float:
        """Return the mean TTFT."""
        free_at_s, ttft_s = [0.0] * self._prefill, []
        for at_s, took_s in zip(self._arrivals_s, self._took_s, strict=True):
            done_s = max(at_s / speed, heapq.heappop(free_at_s)) + took_s
            heapq.heappush(free_at_s, done_s)
            ttft_s.append(done_s - at_s / speed)
        return fmean(ttft_s[self._warm_up :])


def mean_ttft_s(
    trace: list[Request], policy: str, *, prefill: int, cache_blocks: int, speed: float, warm_up: int = 0
) -> float:
    options = Options(policy=policy, prefill=prefill, cache_blocks=cache_blocks, speed=speed)
    return fmean(record.ttft_s for record in simulate(trace, options).records[warm_up:])


def measure(run: Run, requests: int = REQUESTS) -> Found:
    trace = FAMILIES[run.family](run.seed, requests)
    pooled = Pooled(trace, run.cache_blocks, run.prefill)
    speed = pooled.speed(run.load)
    found = {"pooled": pooled.ttft_s(speed)}
    for policy in ("default", *RIVALS):
        found[policy] = mean_ttft_s(
            trace, policy, prefill=run.prefill, cache_blocks=run.cache_blocks, speed=speed
        )
    return Found(run, found)


def summary(found: list[Found]) -> Iterator[str]:
    """Yield the worst runs, and a line for each family."""
    found = sorted(found, key=lambda each: -each.against_rivals)
    for each in found[:12]:
        ttft = ", ".join(f"{policy} {ttft_s:.3f}" for policy, ttft_s in each.ttft_s.items())
        yield f"{each.against_rivals:.3f}  {each.against_pooled:.3f} of pooled  {each.run}  {ttft}"
    yield "family, runs; of the better rival: mean, worst, runs above 1, 1.02; of pooled, load <= .7: mean, worst"
    for family in [*FAMILIES, ""]:
        some = [each for each in found if family in ("", each.run.family)]
        if some:
            ratios = [each.against_rivals for each in some]
            calm = [each.against_pooled for each in some if each.run.load <= 0.7] or [0.0]
            beyond = f"{sum(ratio > 1.0001 for ratio in ratios)} {sum(ratio > 1.02 for ratio in ratios)}"
            yield (
                f"{family or 'all':12} {len(some):4} {fmean(ratios):.3f} {max(ratios):.3f} {beyond:>6}"
                f" {fmean(calm):.3f} {max(calm):.3f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--only", type=int, nargs="*", help="seeds of single runs")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    print(f"--seed {options.seed} --runs {options.runs}")
    seeds = options.only or range(options.seed, options.seed + options.runs)
    found: list[Found] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for each in pool.map(measure, map(drawn, seeds)):
            found.append(each)
            print(f"\r{len(found)} of {len(seeds)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print("\n".join(summary(found)))


if __name__ == "__main__":
    main()
