"""Runs of the default routing against the other policies and a pooled cache, on traffic that is drawn from a seed.

`python -m tests.support.routing_runs --runs 200` draws and prints a seed, and `--seed` repeats it. Each run draws its
family, trace, caches, instances and load from seed + its number alone, so `--only` repeats single ones.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from scheduler.routing.cost import table_costs
from scheduler.simulation.nodes import BlockLru
from scheduler.simulation.options import Options
from scheduler.simulation.simulate import simulate
from scheduler.simulation.traces import BLOCK_TOKENS, Request
from tests.support.trace_families import FAMILIES

COSTS = table_costs()
RIVALS = ("kvcache-centric", "local", "longest-prefix")
IDEALS = ("pooled", "loading")
LOADS = (0.3, 0.5, 0.7, 0.85, 1.0)
"""Of the prefill time that a pooled cache leaves to do."""

REQUESTS = 600

_LOAD_S = BLOCK_TOKENS * COSTS.kv_token_bytes / COSTS.network_bytes_s
"""Of one block."""


class Run(NamedTuple):
    """One run, as drawn."""

    seed: int
    family: str
    prefill: int
    cache_blocks: int
    load: float


class Found(NamedTuple):
    """Mean TTFT by policy; `pooled` has one cache together and one queue, first come first served, and `loading` pays
    for its loads (`Pooled`)."""

    run: Run
    ttft_s: dict[str, float]

    @property
    def against_rivals(self) -> float:
        return self.ttft_s["default"] / min(self.ttft_s[rival] for rival in RIVALS)

    def against(self, ideal: str) -> float:
        return self.ttft_s["default"] / self.ttft_s[ideal]


def drawn(seed: int) -> Run:
    rng, families = random.Random(seed), list(FAMILIES)
    family, prefill = families[seed % len(families)], rng.choice((4, 8))
    return Run(seed, family, prefill, rng.choice((400, 1500, 5859)), rng.choice(LOADS))


class Pooled:
    """A trace over instances with one cache together and one queue, first come first served.

    The first `warm_up` requests are in no figure. In `trace` they come as much more slowly as their load is greater:
    caches are empty at first, and what follows would wait for their backlog.
    """

    def __init__(self, trace: list[Request], cache_blocks: int, prefill: int, *, warm_up: int = 0) -> None:
        cache = BlockLru(cache_blocks * prefill)
        self._prefill, self._warm_up = prefill, warm_up
        self._cached: list[int] = []
        """How many blocks of each prompt are."""
        for request in trace:
            blocks = request.blocks
            self._cached.append(
                next((n for n, block in enumerate(blocks) if block not in cache), len(blocks))
            )
            for block in reversed(blocks):
                cache.use(block)
            list(cache.evict())
        self._took_s = [_prefill_s(*each) for each in zip(trace, self._cached, strict=True)]
        share = sum(self._took_s[:warm_up]) / sum(self._took_s[warm_up:])
        self.trace = _retimed(trace, warm_up, share) if warm_up else trace

    def speed(self, load: float) -> float:
        """Return the factor on the rate of arrivals that makes this load."""
        begin_s = self.trace[self._warm_up].arrival_s if self._warm_up else 0.0
        return (
            load * self._prefill * (self.trace[-1].arrival_s - begin_s) / sum(self._took_s[self._warm_up :])
        )

    def ttft_s(self, speed: float) -> float:
        """Return the mean TTFT."""
        free_at_s, ttft_s = [0.0] * self._prefill, []
        for request, took_s in zip(self.trace, self._took_s, strict=True):
            at_s = request.arrival_s / speed
            done_s = max(at_s, heapq.heappop(free_at_s)) + took_s
            heapq.heappush(free_at_s, done_s)
            ttft_s.append(done_s - at_s)
        return fmean(ttft_s[self._warm_up :])

    def loading_ttft_s(self, speed: float) -> float:
        """Return the mean TTFT where a block is there once it is made, in the instance that used it last, and others
        load it, from a source that is never busy. Each prompt goes where it ends first, with all that is cached or is
        being made, or with what is made."""
        free_at_s, ttft_s = [0.0] * self._prefill, list[float]()
        places, made_s = dict[int, int](), dict[int, float]()
        for request, most in zip(self.trace, self._cached, strict=True):
            at_s, blocks = request.arrival_s / speed, request.blocks
            made = next((n for n, block in enumerate(blocks[:most]) if made_s[block] > at_s), most)
            ends: list[tuple[float, int, int]] = []
            for cached in {most, made}:
                there_s = max([at_s, *(made_s[each] for each in blocks[:cached])])
                took_s = _prefill_s(request, cached)
                in_place = Counter(places[each] for each in blocks[:cached])
                for n, free_s in enumerate(free_at_s):
                    ready_s = there_s + _LOAD_S * (cached - in_place[n])
                    ends.append((max(ready_s, free_s) + took_s, n, cached))
            end_s, chosen, cached = min(ends)
            free_at_s[chosen] = end_s
            places.update(dict.fromkeys(blocks, chosen))
            made_s.update((each, min(made_s[each], end_s)) for each in blocks[cached:most])
            made_s.update(dict.fromkeys(blocks[most:], end_s))
            ttft_s.append(end_s - at_s)
        return fmean(ttft_s[self._warm_up :])


def _retimed(trace: list[Request], warm_up: int, share: float) -> list[Request]:
    """Return a trace whose first requests take this share of the time that the others take."""
    begin_s = trace[warm_up].arrival_s
    first_s = share * (trace[-1].arrival_s - begin_s)
    return [
        replace(
            each,
            arrival_s=first_s
            + (each.arrival_s - begin_s) * (first_s / begin_s if each.arrival_s < begin_s else 1.0),
        )
        for each in trace
    ]


def _prefill_s(request: Request, cached_blocks: int) -> float:
    return COSTS.prefill_s(request.input_tokens, min(cached_blocks * BLOCK_TOKENS, request.input_tokens))


def mean_ttft_s(
    trace: list[Request], policy: str, *, prefill: int, cache_blocks: int, speed: float, warm_up: int = 0
) -> float:
    options = Options(policy=policy, prefill=prefill, cache_blocks=cache_blocks, speed=speed)
    return fmean(record.ttft_s for record in simulate(trace, options).records[warm_up:])


def measure(run: Run, requests: int = REQUESTS) -> Found:
    trace = FAMILIES[run.family](run.seed, requests)
    pooled = Pooled(trace, run.cache_blocks, run.prefill)
    speed = pooled.speed(run.load)
    found = {"pooled": pooled.ttft_s(speed), "loading": pooled.loading_ttft_s(speed)}
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
        ideals = ", ".join(f"{each.against(ideal):.3f} of {ideal}" for ideal in IDEALS)
        yield f"{each.against_rivals:.3f}  {ideals}  {each.run}  {ttft}"
    yield "family, runs; of the best rival: mean, worst, runs above 1, 1.02; load <= .7: mean, worst of pooled, loading"
    for family in [*FAMILIES, ""]:
        some = [each for each in found if family in ("", each.run.family)]
        if some:
            ratios = [each.against_rivals for each in some]
            calm = [each for each in some if each.run.load <= 0.7]
            beyond = f"{sum(ratio > 1.0001 for ratio in ratios)} {sum(ratio > 1.02 for ratio in ratios)}"
            yield (
                f"{family or 'all':12} {len(some):4} {fmean(ratios):.3f} {max(ratios):.3f} {beyond:>6}"
                + "".join(_figures([each.against(ideal) for each in calm]) for ideal in IDEALS)
            )


def _figures(ratios: list[float]) -> str:
    return f"  {fmean(ratios):.3f} {max(ratios):.3f}" if ratios else "  - -"


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
