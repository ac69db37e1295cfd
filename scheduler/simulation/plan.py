"""Whether sharing and keeping KV cache pays for a workload, and what it takes.

Responsibility: figures of a trace for a model, a device and a cluster: hit ratio over capacity, prefill seconds saved,
bandwidth needed, the network speed below which recomputing is faster, and the split of instances into prefill and
decode that serves most. The first four follow from stack distances (`scheduler.simulation.reuse`); the split is
simulated.

Concurrency: none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvfs.errors import InvalidRequest
from scheduler.routing.admission import Mode, Slo
from scheduler.routing.cost import CostModel
from scheduler.simulation.options import Options
from scheduler.simulation.results import quantile
from scheduler.simulation.reuse import NEVER, reused_blocks, stack_distances
from scheduler.simulation.simulate import simulate
from scheduler.simulation.traces import BLOCK_TOKENS, Progress, Request, Steps, counted, untold_steps

WINDOW_S = 10.0
"""The length of the windows over which bandwidth is taken."""
MAX_WINDOWS = 100_000
"""The most windows: those of a longer trace are longer."""
SPLITS = 7
"""The most splits that are simulated."""


@dataclass(frozen=True, slots=True)
class Site:
    """The instances to plan with. Capacities are per instance."""

    costs: CostModel
    instances: int
    dram_bytes: int
    nvme_bytes: int
    slo: Slo
    speed: float = 1.0

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block."""
        return BLOCK_TOKENS * self.costs.kv_token_bytes

    def check(self) -> None:
        """Check the bounds. Raises InvalidRequest."""
        if not 1 <= self.instances <= 1024:
            raise InvalidRequest(f"instances = {self.instances}: must be from 1 to 1024")
        if not 0 < self.speed < float("inf"):
            raise InvalidRequest(f"speed = {self.speed}: must be above 0")


@dataclass(frozen=True, slots=True)
class Reuse:
    """The figures of the trace with a pool of so many blocks."""

    capacity_blocks: int
    hit_ratio: float
    """The share of blocks, in contiguous prefixes."""
    saved_s: float
    """Prefill time that reuse saves."""
    reused_bytes: int
    mean_bytes_s: float
    peak_bytes_s: float
    """The 99th percentile of windows of WINDOW_S."""


@dataclass(frozen=True, slots=True)
class Split:
    """Figures of one division of the instances into prefill and decode."""

    prefill: int
    decode: int
    figures: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """All figures of a trace at a site."""

    requests: int
    duration_s: float
    prefill_s: float
    """All prefill without reuse."""
    curve: list[Reuse]
    """Over capacity, ascending."""
    dram: Reuse
    both: Reuse
    """DRAM and NVMe."""
    unlimited: Reuse
    break_even_bytes_s: float
    """Below it, loading all that is reused takes longer than computing it."""
    break_even_first_bytes_s: float
    """The same for the first block of a prompt, the cheapest to compute."""
    splits: list[Split]

    @property
    def best(self) -> Split | None:
        """Return the split with the most goodput, the shorter TTFT among equals."""
        return max(
            self.splits,
            key=lambda split: (split.figures["goodput_tokens"], -split.figures["ttft_mean_s"]),
            default=None,
        )


def plan(requests: Sequence[Request], site: Site, *, start: Steps = untold_steps) -> Plan:
    """Make a plan of `requests` at `site`; `start` is called as each of its steps begins. Raises InvalidRequest."""
    site.check()
    if not requests:
        raise InvalidRequest("the trace is empty: there is nothing to plan")
    distances = stack_distances(requests, start("find what is used again"))
    costs = site.costs
    dram_blocks = site.instances * (site.dram_bytes // site.block_bytes)
    both_blocks = dram_blocks + site.instances * (site.nvme_bytes // site.block_bytes)
    sizes = [*_capacities(distances), dram_blocks, both_blocks, NEVER]
    *curve, dram, both, unlimited = [
        _reuse(requests, distances, size, site)
        for size in counted(sizes, start("measure pools of blocks"), every=1)
    ]
    return Plan(
        requests=len(requests),
        duration_s=requests[-1].arrival_s / site.speed,
        prefill_s=sum(costs.prefill_s(request.input_tokens, 0) for request in requests),
        curve=curve,
        dram=dram,
        both=both,
        unlimited=unlimited,
        break_even_bytes_s=unlimited.reused_bytes / unlimited.saved_s
        if unlimited.saved_s > 0
        else float("inf"),
        break_even_first_bytes_s=site.block_bytes / (BLOCK_TOKENS * costs.prefill_token_s),
        splits=_splits(requests, site, start("simulate splits of the instances")),
    )


def _capacities(distances: Sequence[Sequence[int]]) -> list[int]:
    """Return powers of two, up to the capacity past which no more blocks are hit."""
    most = max((row[-1] for row in distances if row), default=0) + 1
    found = [1 << power for power in range(8, most.bit_length())]
    return [*found, max(most, 1)]


def _reuse(
    requests: Sequence[Request], distances: Sequence[Sequence[int]], capacity: int, site: Site
) -> Reuse:
    costs = site.costs
    blocks, saved_s, tokens = 0, 0.0, 0
    windows: Counter[int] = Counter()
    duration_s = max(requests[-1].arrival_s / site.speed, WINDOW_S)
    window_s = max(WINDOW_S, duration_s / MAX_WINDOWS)
    for request, row in zip(requests, distances, strict=True):
        reused = reused_blocks(row, capacity)
        if not reused:
            continue
        cached = min(reused * BLOCK_TOKENS, request.input_tokens)
        saved_s += costs.prefill_s(request.input_tokens, 0) - costs.prefill_s(request.input_tokens, cached)
        blocks += reused
        tokens += cached
        windows[int(request.arrival_s / site.speed / window_s)] += reused
    rates = sorted(windows[n] for n in range(int(duration_s / window_s) + 1))
    return Reuse(
        capacity_blocks=capacity,
        hit_ratio=blocks / max(sum(len(request.blocks) for request in requests), 1),
        saved_s=saved_s,
        reused_bytes=tokens * costs.kv_token_bytes,
        mean_bytes_s=blocks * site.block_bytes / duration_s,
        peak_bytes_s=quantile(rates, 0.99) * site.block_bytes / window_s,
    )


def _splits(requests: Sequence[Request], site: Site, progress: Progress) -> list[Split]:
    """Simulate the default policies over splits of the instances, evenly spread."""
    counts = sorted({round(site.instances * n / (SPLITS + 1)) for n in range(1, SPLITS + 1)})
    counts = [count for count in counts if 0 < count < site.instances]
    # The DRAM of all instances is one pool, whoever computes beside it.
    pool_blocks = site.instances * (site.dram_bytes // site.block_bytes)
    found = []
    for place, prefill in enumerate(counts):
        options = Options(
            admission=Mode.DEFAULT,
            prefill=prefill,
            decode=site.instances - prefill,
            speed=site.speed,
            slo=site.slo,
            cache_blocks=pool_blocks // prefill,
            costs=site.costs,
        )
        result = simulate(requests, options, progress=_part(progress, place, len(counts)))
        found.append(Split(prefill, site.instances - prefill, result.figures()))
    return found


def _part(progress: Progress, place: int, parts: int) -> Progress:
    return lambda done, total: progress(place * total + done, parts * total)
