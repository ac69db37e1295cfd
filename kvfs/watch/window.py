"""Counters over the last seconds.

Responsibility: what a counter has grown by within limits.WATCH_WINDOW_S, and quantiles of a histogram's growth.

Invariants: as many samples are kept as fit the window. Before there is a second sample everything counts from the
counters' start. A counter that went back began anew.

Concurrency: one owner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from kvfs.limits import WATCH_WINDOW_S
from kvfs.system.latencies import LABELS


class Window:
    """Follow the counters of one process. Call `begin`, then ask for each counter once."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[str, float]]] = deque()

    def begin(self, now_s: float) -> None:
        """Begin a sample."""
        while len(self._samples) > 1 and self._samples[1][0] <= now_s - WATCH_WINDOW_S:
            self._samples.popleft()
        self._samples.append((now_s, {}))

    def clear(self) -> None:
        """Drop all samples: the next one is the first."""
        self._samples.clear()

    @property
    def seconds(self) -> float:
        """Return the time between the first sample and this one."""
        return self._samples[-1][0] - self._samples[0][0]

    def growth(self, key: str, value: float) -> float:
        """Note a counter; return what it has grown by."""
        self._samples[-1][1][key] = value
        before = self._samples[0][1].get(key, 0.0) if len(self._samples) > 1 else 0.0
        return value - before if value >= before else value

    def rate(self, key: str, value: float) -> float | None:
        """Note a counter; return its growth in a second, None before there are two samples."""
        growth = self.growth(key, value)
        return growth / self.seconds if self.seconds else None

    def share(self, key: str, part: float, rest: float) -> float | None:
        """Note two counters; return the first one's share of both, None while neither grows."""
        grown, other = self.growth(f"{key} part", part), self.growth(f"{key} rest", rest)
        return grown / (grown + other) if grown + other > 0 else None

    def histogram(self, key: str, found: Mapping[str, Any]) -> tuple[float, float | None, float | None]:
        """Note a histogram in the form of `Latencies.status`; return its growth's count, median and 99th percentile.

        A quantile is the bound of its bucket: above by a factor of 2.5 at most."""
        counts = [self.growth(f"{key} {label}", found["buckets"].get(label, 0)) for label in LABELS]
        total = sum(counts)
        return total, _quantile(counts, total * 0.5), _quantile(counts, total * 0.99)


def _quantile(counts: list[float], rank: float) -> float | None:
    """Return the bound of the bucket with the value of a rank; None without values, and above all bounds."""
    seen = 0.0
    for label, count in zip(LABELS[:-1], counts, strict=False):
        seen += count
        if count and seen >= rank:
            return float(label)
    return None
