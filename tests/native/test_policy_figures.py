"""Hit ratios on the public conversation trace: the reference figures, and what the default must reach."""

from __future__ import annotations

import os
from array import array
from pathlib import Path

import pytest

from kvfs._native.evict.policy import replay
from scheduler.simulation.cache_replay import PackedTrace, hit_ratio, pack
from scheduler.simulation.traces import read_trace

TRACE = "mooncake_conversation_trace.jsonl.zst"
CAPACITIES = (1_000, 3_655, 5_000, 9_139, 10_000, 18_279, 30_000, 36_558, 50_000, 100_000)
EXACT = {
    "lru-leaf": "0.0445 0.0793 0.1118 0.1958 0.2116 0.2789 0.3257 0.3453 0.3546 0.3637",
    "min": "0.191 0.314 0.341 0.366 0.366 0.366 0.366 0.366 0.366 0.366",
}
CLOSE = {
    "s3-fifo": (0.056, 0.107, 0.138, 0.187, 0.195, 0.245, 0.304, 0.328, 0.349, 0.362),
    "arc": (0.053, 0.090, 0.113, 0.210, 0.223, 0.284, 0.311, 0.320, 0.344, 0.363),
}


@pytest.fixture(scope="module")
def trace() -> PackedTrace:
    folder = os.environ.get("KVFS_TRACE_DIR")
    if not folder:
        pytest.skip(f"set KVFS_TRACE_DIR to the folder that holds {TRACE}")
    return pack(read_trace(Path(folder) / TRACE))


def curve(trace: PackedTrace, policy: str) -> list[float]:
    return [hit_ratio(trace, policy, capacity).hit_ratio for capacity in CAPACITIES]


@pytest.mark.parametrize("policy", EXACT)
def test_to_every_digit(trace: PackedTrace, policy: str) -> None:
    figures = EXACT[policy].split()
    digits = len(figures[0]) - 2
    assert [f"{ratio:.{digits}f}" for ratio in curve(trace, policy)] == figures


@pytest.mark.parametrize("policy", CLOSE)
def test_within_a_hundredth(trace: PackedTrace, policy: str) -> None:
    assert curve(trace, policy) == pytest.approx(CLOSE[policy], abs=0.01)


def test_the_default_is_never_far_below_last_use(trace: PackedTrace) -> None:
    for capacity in (*CAPACITIES, 1_827, 91_395):
        learned, last_use = (hits(trace, policy, capacity) for policy in ("default", "lru-leaf"))
        for since in (0, trace.requests // 2):
            lost = sum(last_use[since:]) - sum(learned[since:])
            assert lost < 0.005 * (len(trace.ids) - trace.start[since]), (
                f"{capacity} blocks, from request {since} on"
            )


def hits(trace: PackedTrace, policy: str, capacity: int) -> array[int]:
    """Replay the trace, and return how many blocks each request finds."""
    found = array("I", bytes(4 * trace.requests))
    replay(policy, trace.start, trace.ids, trace.unique, capacity, found, None)
    return found


@pytest.mark.parametrize(("capacity", "bar"), [(3_655, 0.147), (9_139, 0.238), (18_279, 0.302)])
def test_the_default_where_capacity_is_small(trace: PackedTrace, capacity: int, bar: float) -> None:
    """The bars: classes learned from the first half, used on the second; the default learns as it goes."""
    assert hit_ratio(trace, "default", capacity, measure_from=0.5).hit_ratio > bar
