"""Plots of replays, simulations and plans, with matplotlib where it is installed.

Responsibility: figures to files, whose type their name says; matplotlib is imported only here. Concurrency: none;
figures have canvases of their own, so no display and no global state are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvfs.errors import InvalidRequest
from scheduler.simulation.cache_replay import Point
from scheduler.simulation.plan import Plan
from scheduler.simulation.results import Result

FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path | None) -> None:
    """Check a plot's name before the work. Raises InvalidRequest for an unknown format, or without matplotlib."""
    if path is None:
        return
    if path.suffix not in FORMATS:
        raise InvalidRequest(f"plot {path}: must end in {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise InvalidRequest(
            f"plot {path}: plots need the module matplotlib: pip install 'kvfs[plot]'"
        ) from None


def _figure(rows: int, columns: int, *, width: float = 5.5, height: float = 3.6) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def plot_result(result: Result, path: Path) -> None:
    """Plot TTFT and TBT distributions, queue and cache over time. Raises OSError."""
    figure, axes = _figure(2, 2)
    options = result.options
    figure.suptitle(
        f"{options.policy}, {options.discipline.value}, admission {options.admission.value}, "
        f"{options.prefill}P+{options.decode}D, x{options.speed:g}"
    )
    _distribution(axes[0][0], result.ttft_s, "TTFT (s)", options.slo.ttft_s)
    _distribution(axes[0][1], [tbt_s * 1000 for tbt_s in result.tbt_s], "TBT (ms)", options.slo.tbt_s * 1000)
    times = [sample.time_s for sample in result.samples]
    axes[1][0].plot(times, [sample.queued for sample in result.samples])
    axes[1][0].set(xlabel="time (s)", ylabel="prompts queued or deferred")
    axes[1][1].plot(times, [sample.cached_blocks for sample in result.samples], label="blocks cached")
    axes[1][1].plot(times, [sample.distinct_blocks for sample in result.samples], label="distinct")
    axes[1][1].set(xlabel="time (s)", ylabel="blocks")
    axes[1][1].legend()
    figure.savefig(path, dpi=120)


def _distribution(axis: Any, ascending: list[float], label: str, limit: float) -> None:
    count = len(ascending)
    axis.plot(ascending, [(n + 1) / count for n in range(count)])
    if ascending and ascending[0] > 0:
        axis.set_xscale("log")
    if limit < float("inf"):
        axis.axvline(limit, linestyle="--", color="gray")
    axis.set(xlabel=label, ylabel="share of requests", ylim=(0, 1.02))


def plot_plan(plan: Plan, block_bytes: int, path: Path) -> None:
    """Plot hit ratio and prefill saved over capacity, and goodput over splits. Raises OSError."""
    figure, axes = _figure(1, 3)
    sizes = [reuse.capacity_blocks * block_bytes / 1e9 for reuse in plan.curve]
    axes[0][0].plot(sizes, [reuse.hit_ratio for reuse in plan.curve], marker="o")
    axes[0][0].set(xlabel="capacity (GB)", ylabel="hit ratio of blocks", xscale="log")
    axes[0][1].plot(sizes, [reuse.saved_s / plan.prefill_s for reuse in plan.curve], marker="o")
    axes[0][1].set(xlabel="capacity (GB)", ylabel="share of prefill saved", xscale="log")
    names = [f"{split.prefill}P+{split.decode}D" for split in plan.splits]
    axes[0][2].bar(names, [split.figures["goodput_tokens"] / 1e6 for split in plan.splits])
    axes[0][2].set(ylabel="goodput (million tokens)")
    axes[0][2].tick_params(axis="x", rotation=45)
    figure.savefig(path, dpi=120)


def plot_replay(points: Sequence[Point], path: Path, title: str) -> None:
    """Plot hit ratios over capacity, a curve for each policy. Raises OSError."""
    figure, [[axes]] = _figure(1, 1, width=7, height=4.5)
    for policy in dict.fromkeys(point.policy for point in points):
        curve = sorted((point.capacity_blocks, point.hit_ratio) for point in points if point.policy == policy)
        axes.plot(*zip(*curve, strict=True), marker=".", label=policy)
    axes.set(xscale="log", xlabel="capacity (blocks)", ylabel="hit ratio (contiguous prefix)", title=title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
