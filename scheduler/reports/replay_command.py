"""`kvfs replay`: hit ratios of a trace for some policies and capacities, as a table, JSON and a plot.

Responsibility: from the command's arguments to what it prints. Concurrency: none.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvfs._native.evict.policy import POLICIES
from kvfs.errors import InvalidRequest
from scheduler.reports.plots import check_plot, plot_replay
from scheduler.reports.progress import progress_bar
from scheduler.simulation.cache_replay import PackedTrace, Point, capacity_blocks, hit_ratio, pack
from scheduler.simulation.traces import Steps, read_trace

DEFAULT_CAPACITIES = ("1%", "2%", "5%", "10%", "20%", "50%")
MAX_POINTS = 1000
"""The most replays of one command: a slip such as a range of capacities in blocks fails at once, not after a day."""

PIPED_COLUMNS = 120
"""Width of the table where there is no terminal: room for all policies."""


def run(
    trace: Path,
    *,
    policies: Sequence[str],
    capacities: Sequence[str],
    measure_from: float,
    as_json: bool,
    plot_file: Path | None,
) -> None:
    """Replay `trace` and print hit ratios. Raises InvalidRequest, OSError."""
    chosen = list(dict.fromkeys(policies or POLICIES))
    for name in chosen:
        if name not in POLICIES:
            raise InvalidRequest(f"no policy is called {name!r}; there are {', '.join(POLICIES)}")
    if not 0 <= measure_from < 1:
        raise InvalidRequest(f"--measure-from {measure_from}: must be in [0, 1)")
    check_plot(plot_file)
    with progress_bar() as start:
        requests = read_trace(trace, progress=start(f"read {trace.name}"))
        packed = pack(requests, start("number the blocks"))
        sizes = [
            capacity_blocks(part, packed.unique)
            for text in capacities or DEFAULT_CAPACITIES
            for part in text.split(",")
        ]
        if len(sizes) * len(chosen) > MAX_POINTS:
            raise InvalidRequest(
                f"{len(sizes)} capacities of {len(chosen)} policies: at most {MAX_POINTS} replays"
            )
        sizes = sorted(set(sizes))
        began = time.perf_counter()
        points = _replay_all(packed, chosen, sizes, measure_from, start)
        speed = len(packed.ids) * len(points) / (time.perf_counter() - began)
    if as_json:
        print(json.dumps([asdict(point) for point in points], indent=2))
    else:
        _print_table(trace, packed, points, measure_from, speed)
    if plot_file is not None:
        plot_replay(points, plot_file, f"{trace.name}: {packed.requests} requests, {packed.unique} blocks")


def _replay_all(
    packed: PackedTrace,
    policies: Sequence[str],
    capacities: Sequence[int],
    measure_from: float,
    start: Steps,
) -> list[Point]:
    return [
        hit_ratio(packed, policy, capacity, measure_from=measure_from, progress=start(f"{policy} {capacity}"))
        for policy in policies
        for capacity in capacities
    ]


def _print_table(
    trace: Path, packed: PackedTrace, points: Sequence[Point], measure_from: float, speed: float
) -> None:
    ratio = {(point.policy, point.capacity_blocks): point.hit_ratio for point in points}
    policies = list(dict.fromkeys(point.policy for point in points))
    since = f", measured from {measure_from:g} of the requests on" if measure_from else ""
    table = Table()
    for heading in ("capacity (blocks)", "of footprint", *policies):
        table.add_column(heading, justify="right", no_wrap=True)
    for capacity in dict.fromkeys(point.capacity_blocks for point in points):
        share = f"{100 * capacity / packed.unique:.2f} %"
        table.add_row(f"{capacity:,}", share, *(f"{ratio[policy, capacity]:.4f}" for policy in policies))
    print(
        f"{trace.name}: {packed.requests} requests, {len(packed.ids)} blocks, {packed.unique} unique{since}"
    )
    Console(width=None if sys.stdout.isatty() else PIPED_COLUMNS).print(table)
    print(f"hit ratio of blocks, contiguous prefix; {speed / 1e6:.2f} million references a second")
