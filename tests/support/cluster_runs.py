"""The tables of docs/scheduling.md: `KVFS_TRACE_DIR=DIR python -m tests.support.cluster_runs NAME` prints one.

They take minutes on the public conversation trace, which DIR holds; generated traffic has fixed seeds.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from scheduler.routing.admission import Mode, Slo
from scheduler.routing.cost import table_costs
from scheduler.routing.queues import Discipline
from scheduler.routing.roles import Rules
from scheduler.simulation.options import Failure, LowerTier, Options
from scheduler.simulation.results import Result
from scheduler.simulation.simulate import simulate
from scheduler.simulation.traces import Request, read_trace
from tests.support.trace_families import diurnal, one_system_prompt

TRACE = "mooncake_conversation_trace.jsonl.zst"
TTFT_SLO_S = 30.0
TBT_SLO_S = (0.1, 0.2, 0.3)
SPEEDS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0, 3.5, 4.0)
ATTAINED = 0.9
"""The share of requests in time that a capacity takes."""
HBM_BLOCKS = 1_300
"""Half of what one instance's device memory has for KV cache."""


def conversation() -> list[Request]:
    return read_trace(Path(os.environ["KVFS_TRACE_DIR"]) / TRACE)


def _shares(result: Result) -> list[float]:
    return [len(result.within(TTFT_SLO_S, tbt_s)) / len(result.records) for tbt_s in TBT_SLO_S]


def coupled() -> Iterator[str]:
    """Yield for 16 instances the share of requests in time at x1, and the highest speed that keeps ATTAINED."""
    trace = conversation()
    base = Options(prefill=16, coupled=True, decode_factor=2.0)
    hbm = replace(base, policy="local", cache_blocks=HBM_BLOCKS)
    apart = Options(decode_factor=2.0)
    cases = {
        "8P+8D": replace(apart, prefill=8, decode=8),
        "12P+4D": replace(apart, prefill=12, decode=4),
        "coupled, no cache, whole prompts": replace(base, policy="least-queued", cache_blocks=0),
        "coupled, cache in HBM, whole prompts": hbm,
        "coupled, cache in HBM, chunks of 2048": replace(hbm, chunk_tokens=2048),
        "coupled, cache in HBM, chunks of 512": replace(hbm, chunk_tokens=512),
        "coupled, pooled DRAM, chunks of 512": replace(base, chunk_tokens=512),
        "coupled, pooled DRAM, chunks of 256": replace(base, chunk_tokens=256),
    }
    for name, options in cases.items():
        at_1: list[float] = []
        capacity = [0.0] * len(TBT_SLO_S)
        for speed in SPEEDS:
            shares = _shares(simulate(trace, replace(options, speed=speed)))
            at_1 = at_1 or shares
            capacity = [
                speed if share >= ATTAINED else was for share, was in zip(shares, capacity, strict=True)
            ]
            if max(capacity) < speed:
                break
        yield f"{name:40} {_row(at_1, '.3f')}   {_row(capacity, '.2f')}"


def tiers() -> Iterator[str]:
    """Yield mean and P90 of the TTFT and the share of blocks reused, by what is below DRAM of 1,500 blocks."""
    trace = conversation()
    nvme = LowerTier("nvme", 12_000, 12e9, 0.0001)
    cold = LowerTier("cold", 1 << 20, 10e9, 0.03, depth=64, shared=True)
    cases: dict[str, tuple[LowerTier, ...]] = {
        "DRAM alone": (),
        "NVMe, 12 GB/s, 32 blocks at once": (nvme,),
        "NVMe, 3 GB/s": (replace(nvme, bytes_s=3e9),),
        "cold, 10 GB/s, 64 blocks at once": (cold,),
        "cold, 10 GB/s, 1 block at once": (replace(cold, depth=1),),
        "NVMe 12 GB/s and cold": (nvme, cold),
    }
    for name, below in cases.items():
        for speed in (1.0, 1.8):
            found = simulate(trace, Options(cache_blocks=1_500, tiers=below, speed=speed)).figures()
            yield f"{name:40} x{speed} {_ttft(found)} reused {found['reused_share']:.3f}"


def handovers() -> Iterator[str]:
    """Yield the TTFT by how a prompt's KV cache gets to its decode instance."""
    trace = conversation()
    for name, bytes_s, extra_s in (
        ("while it is made", float("inf"), 0.0),
        ("87 GB/s", 87e9, 0.02),
        ("10 GB/s", 10e9, 0.02),
        ("3 GB/s", 3e9, 0.02),
    ):
        options = Options(prefill=8, decode=8, handover_bytes_s=bytes_s, handover_s=extra_s)
        yield f"{name:40} {_ttft(simulate(trace, options).figures())}"


def failures() -> Iterator[str]:
    """Yield figures with an instance failing every five minutes for two, in turn."""
    trace = conversation()
    for name, kinds in (("none", ()), ("prefill", (False,)), ("decode", (True,)), ("both", (False, True))):
        failing = tuple(Failure(n % 8, 300.0 * (n + 1), 120.0, decode) for n in range(11) for decode in kinds)
        options = Options(
            prefill=8, decode=8, speed=1.0, slo=Slo(30.0, 0.1), admission=Mode.DEFAULT, failures=failing
        )
        found = simulate(trace, options).figures()
        yield (
            f"{name:12} {_ttft(found)} max {found['ttft_max_s']:.1f} retries {found['retries']} "
            f"rejected {found['rejected']} in time {found['slo_attainment']:.4f}"
        )


def roles() -> Iterator[str]:
    """Yield figures of eight instances under diurnal load, for each static split and with relabelling."""
    base = Options(prefill=4, decode=4, decode_factor=2.0, slo=Slo(20.0, 0.1), admission=Mode.DEFAULT)
    never = Rules(looks=1 << 30)
    for seed in (2, 3):
        for rate in (2.2, 2.8, 3.2):
            trace = diurnal(seed, int(rate * 2_400), rate=rate)
            for count, rules in (*((count, never) for count in (3, 4, 5, 6)), (4, Rules())):
                options = replace(base, prefill=count, decode=8 - count, relabels=rules)
                found = simulate(trace, options).figures()
                name = f"{count}P+{8 - count}D" if rules is never else "relabelled"
                yield (
                    f"seed {seed} {rate}/s {name:10} in time {found['slo_attainment']:.3f} {_ttft(found)} "
                    f"goodput {found['goodput_tokens'] / 1e6:.1f} M changes {found['changed_roles']}"
                )


def pipelines() -> Iterator[str]:
    """Yield figures with prompts on several instances."""
    trace = conversation()
    for speed in (1.0, 1.8):
        for discipline in Discipline:
            for group, relay in ((1, False), (1, True), (2, False), (4, False), (8, False)):
                options = Options(speed=speed, discipline=discipline, group=group, relay=relay)
                result = simulate(trace, options)
                found = result.figures()
                yield (
                    f"x{speed} {discipline.value:12} {'relay' if relay else f'group {group}':8} {_ttft(found)} "
                    f"P99 {found['ttft_p99_s']:.2f} max {found['ttft_max_s']:.1f} spread {found['spread']} "
                    f"prefill {found['prefill_s']:.0f} s"
                )


def copies() -> Iterator[str]:
    """Yield the mean TTFT with copies ahead of demand as a multiple of that without, and how many there were."""
    traces = {
        "system prompt, 6/s": [one_system_prompt(seed, 1_500, rate=6.0) for seed in (5, 6, 7)],
        "conversation": [conversation()[:4_000]],
    }
    for network_bytes_s in (87e9, 5e9):
        costs = table_costs(network_bytes_s=network_bytes_s)
        for cache_blocks in (600, 1_500, 5_859):
            for name, some in traces.items():
                base = Options(cache_blocks=cache_blocks, costs=costs)
                ratios, made = [], 0
                for trace in some:
                    without, with_copies = (
                        simulate(trace, replace(base, replicates=replicates)).figures()
                        for replicates in (False, True)
                    )
                    ratios.append(with_copies["ttft_mean_s"] / without["ttft_mean_s"])
                    made += with_copies["copied_blocks"]
                yield f"{network_bytes_s / 1e9:.0f} GB/s {cache_blocks:5} {name:20} {_row(ratios, '.3f')}  {made}"


def _row(values: Sequence[float], form: str) -> str:
    return " / ".join(format(value, form) for value in values)


def _ttft(figures: dict[str, float]) -> str:
    return f"TTFT {figures['ttft_mean_s']:.2f} / {figures['ttft_p90_s']:.2f}"


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    table.__name__: table for table in (coupled, tiers, handovers, failures, roles, pipelines, copies)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=TABLES)
    for line in TABLES[parser.parse_args().name]():
        print(line, flush=True)


if __name__ == "__main__":
    main()
