"""A plot of hit ratios over capacity, one curve for each policy.

Responsibility: a picture file from points; matplotlib does the rest and is imported only here. Concurrency: none;
draws with a canvas of its own, so no display and no global state are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvfs.errors import InvalidRequest
from scheduler.replay import Point

FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Raises InvalidRequest for a name that says no known format, or without matplotlib."""
    if path.suffix not in FORMATS:
        raise InvalidRequest(f"plot {path}: must end in {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise InvalidRequest(
            f"plot {path}: plots need the module matplotlib: pip install 'kvfs[plot]'"
        ) from None


def plot(points: Sequence[Point], path: Path, title: str) -> None:
    """Draw the curve of each policy in `points`. Raises InvalidRequest (see `check_plot`), OSError."""
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for policy in dict.fromkeys(point.policy for point in points):
        curve = sorted((point.capacity_blocks, point.hit_ratio) for point in points if point.policy == policy)
        axes.plot(*zip(*curve, strict=True), marker=".", label=policy)
    axes.set(xscale="log", xlabel="capacity (blocks)", ylabel="hit ratio (contiguous prefix)", title=title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
