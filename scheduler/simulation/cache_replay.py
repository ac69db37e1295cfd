"""Replay of a request trace through an eviction policy: how much of it a cache of some size would have hit.

Responsibility: traces as flat arrays, capacities in blocks or as a share of the footprint, hit ratios. The replay
itself is native and drives the very policies of the store (`kvfs._native.evict.policy`).

The rule of scoring: a block counts as hit only while all blocks before it in its request are there too; a request
scores against the cache as it stands, then its blocks are used, then the cache is brought down to its capacity.

Concurrency: plain functions; nothing is kept.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from kvfs._native.evict.policy import POLICIES, replay
from kvfs.errors import InvalidRequest
from scheduler.simulation.traces import Progress, Request, counted, untold

__all__ = ["POLICIES", "PackedTrace", "Point", "capacity_blocks", "hit_ratio", "pack"]


@dataclass(frozen=True, slots=True)
class PackedTrace:
    """Request r is the blocks ids[start[r]:start[r + 1]], renumbered from 0 in order of appearance."""

    start: array[int]
    ids: array[int]
    unique: int
    """The footprint in blocks."""

    @classmethod
    def of(cls, requests: Iterable[Sequence[int]]) -> Self:
        """Pack requests, each given as the prefix hashes of its blocks."""
        start, ids = array("Q", [0]), array("I")
        number: dict[int, int] = {}
        for blocks in requests:
            ids.extend([number.setdefault(block, len(number)) for block in blocks])
            start.append(len(ids))
        return cls(start, ids, len(number))

    @property
    def requests(self) -> int:
        """Return the number of requests."""
        return len(self.start) - 1

    def blocks(self, request: int) -> array[int]:
        """Return the blocks of a request, in their order."""
        return self.ids[self.start[request] : self.start[request + 1]]


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a policy's curve: hits as a share of all blocks of the measured requests."""

    policy: str
    capacity_blocks: int
    hit_ratio: float


def pack(requests: Sequence[Request], progress: Progress = untold) -> PackedTrace:
    """Pack the blocks of requests; `progress` counts requests."""
    return PackedTrace.of(request.blocks for request in counted(requests, progress))


def capacity_blocks(text: str, footprint: int) -> int:
    """Read `5000` blocks, or `5%` of the footprint, rounded down. Raises InvalidRequest outside of 1 to 2^32 - 2
    blocks."""
    try:
        share = text.endswith("%")
        value = float(text[:-1]) * footprint / 100 if share else int(text.replace(",", "").replace("_", ""))
        blocks = int(value)
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"capacity {text!r}: must be blocks, such as 5000, or a share of the footprint, such as 5%"
        ) from None
    if not 1 <= blocks < (1 << 32) - 1:
        raise InvalidRequest(f"capacity {text!r} is {blocks} blocks: at least 1, below 2^32 - 1")
    return blocks


def hit_ratio(
    trace: PackedTrace,
    policy: str,
    capacity: int,
    *,
    measure_from: float = 0.0,
    progress: Progress | None = None,
) -> Point:
    """Replay `trace` through a cache of `capacity` blocks, and return its hit ratio.

    Hits count from the share `measure_from` of the requests on.

    Raises InvalidRequest (no such policy, a share outside of [0, 1), a trace without blocks to measure).
    """
    if not 0 <= measure_from < 1:
        raise InvalidRequest(f"measured from {measure_from} of the requests on: must be in [0, 1)")
    first = int(trace.requests * measure_from)
    measured = len(trace.ids) - trace.start[first]
    if not measured:
        raise InvalidRequest(f"no blocks in the requests from {measure_from} of the trace on")
    hits = array("I", bytes(4 * trace.requests))
    replay(policy, trace.start, trace.ids, trace.unique, capacity, hits, None, progress)
    return Point(policy, capacity, sum(hits[first:]) / measured)
