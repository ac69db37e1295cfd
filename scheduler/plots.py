"""Plots of simulations and plans, with matplotlib where it is installed.

Responsibility: figures to files, whose type their name says. Concurrency: none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scheduler.plan import Plan
from scheduler.replay_plot import check_plot
from scheduler.results import Result


def _figure(rows: int, columns: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * columns, 3.6 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def plot_result(result: Result, path: Path) -> None:
    """TTFT and TBT distributions, queue and cache over time. Raises InvalidRequest (see `check_plot`), OSError."""
    check_plot(path)
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
    """Hit ratio and prefill saved over capacity, and goodput over splits. Raises like `plot_result`."""
    check_plot(path)
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
