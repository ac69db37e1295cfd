"""Two sides of a comparison, timed in turns.

Responsibility: the timing loop and the medians. The sides alternate in short batches, each going first in
every other one, so that a neighbour's load, a clock that changes and a cache that fills hit both alike; the
figure is the median of single operations, which a few stalls do not move.

Concurrency: one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter_ns
from typing import Any

Operation = Callable[[int], object]
"""Does the n-th operation; n counts on from one batch to the next."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side: the timed operation, and an untimed step after each batch."""

    operation: Operation
    after_batch: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A median, and its baseline's in the same unit; `ratio` is how many times as fast as the baseline. `p99` and
    `baseline_p99` are what one operation in a hundred took longer than."""

    name: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None
    p99: float | None = None
    baseline_p99: float | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to measure. `inner` operations make one sample: for those as short as reading the clock."""

    seconds: float
    batch: int
    inner: int = 1


def compare(name: str, subject: Side, baseline: Side | None, plan: Plan) -> Result:
    """Time both sides alternately for about `plan.seconds`; return the medians in microseconds per operation."""
    sides = [subject] if baseline is None else [subject, baseline]
    samples: list[list[float]] = [[] for _ in sides]
    for warm_up in sides:
        _batch(warm_up, 0, plan)
    deadline = perf_counter_ns() + int(plan.seconds * 1e9)
    turn = 1
    while perf_counter_ns() < deadline or turn < 4:
        order = range(len(sides)) if turn % 2 else reversed(range(len(sides)))
        for index in order:
            samples[index] += _batch(sides[index], turn * plan.batch * plan.inner, plan)
        turn += 1
    value, p99 = median(samples[0]), _p99(samples[0])
    if baseline is None:
        return Result(name, value, "us", p99=p99)
    other = median(samples[1])
    return Result(name, value, "us", other, other / value, p99, _p99(samples[1]))


def _p99(samples: list[float]) -> float:
    return sorted(samples)[len(samples) * 99 // 100]


def _batch(side: Side, first: int, plan: Plan) -> list[float]:
    """Run a batch; return the microseconds per operation, one figure for every `inner` operations."""
    operation, clock, inner = side.operation, perf_counter_ns, plan.inner
    times = []
    for sample in range(plan.batch):
        n = first + sample * inner
        start = clock()
        for i in range(n, n + inner):
            operation(i)
        times.append((clock() - start) / (1000 * inner))
    if side.after_batch is not None:
        side.after_batch()
    return times
