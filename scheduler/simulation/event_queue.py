"""Discrete events in order of time; equal times in order of scheduling, so that a run is repeatable.

Concurrency: none.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Events:
    """A clock that jumps from event to event."""

    __slots__ = ("_heap", "_scheduled", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, when_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Schedule a call at `when_s`, or at once if that is past."""
        self._scheduled += 1
        heappush(self._heap, (max(when_s, self.now_s), self._scheduled, call, arguments))

    @property
    def next_s(self) -> float:
        """Return when the next event is; infinity without one."""
        return self._heap[0][0] if self._heap else float("inf")

    def step(self) -> None:
        """Run the next event."""
        self.now_s, _, call, arguments = heappop(self._heap)
        call(*arguments)
