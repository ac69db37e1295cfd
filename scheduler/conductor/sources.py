"""Streams of events and the sources that they speak of.

Responsibility: a number for each medium of a stream and for what each instance is expected to have; what is known of a
stream: nothing yet, all, or not all (after a gap).

Invariants: a stream that is not current has no blocks in the index. The number of a source is used again only after its
blocks are cleared.

Concurrency: one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvfs._native.cluster.index import SPARE_SOURCES, ClusterIndex
from kvfs.errors import LimitExceeded
from kvfs.limits import MAX_BLOCK_SOURCES, MAX_SWEPT_SEGMENTS, SWEEP_STEP_S


class StreamName(NamedTuple):
    """A topic, and the data-parallel rank in it."""

    topic: str
    rank: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.rank}" if self.rank else self.topic


class Knowledge(Enum):
    """Says how much is known of what a stream's publisher holds."""

    UNKNOWN = "unknown"
    """Nothing was heard yet."""
    CURRENT = "current"
    PARTIAL = "partial"
    """Batches were lost: what was known is cleared, what came since counts."""
    MUTE = "mute"
    """It said nothing of blocks that were made: what was known is cleared, until it speaks."""


@dataclass(slots=True)
class Stream:
    """What is known of one stream of events."""

    name: StreamName
    is_store: bool = False
    """Whether a kvfs service publishes it, with its keys, rather than an engine."""
    knowledge: Knowledge = Knowledge.UNKNOWN
    epoch: int = 0
    """How often its blocks were cleared."""
    began_s: float = float("-inf")
    """When its events last began anew."""
    heard_s: float = float("-inf")
    event_s: float = float("-inf")
    """When its last event came."""
    owed_s: float = float("inf")
    """Since when an answer needed blocks of which no event has come, nor any other."""
    group: int | None = None
    """The engine's group of layers whose blocks count, once it has said what they are."""
    sources: dict[str, int] = field(default_factory=dict)
    """By medium."""
    expecting: set[int] = field(default_factory=set)
    """The sources of what its instances are expected to have."""


class Sources:
    """Assign numbers to sources, and clear them, SPARE_SOURCES in one pass of sweeping.

    Of further ones the number is retired: nobody has it, so that its blocks count nowhere, and it is cleared once those
    before it are swept.
    """

    def __init__(self, index: ClusterIndex) -> None:
        self._index = index
        self._free = list(range(MAX_BLOCK_SOURCES - 1, -1, -1))
        self._retired: deque[int] = deque()

    def take(self) -> int:
        """Take a number. Raises LimitExceeded."""
        if not self._free:
            raise LimitExceeded(f"{MAX_BLOCK_SOURCES} sources of blocks are in use, which is the limit")
        return self._free.pop()

    def release(self, source: int) -> None:
        """Take a number back, once nothing maps it any more."""
        if self._may_clear:
            self._index.clear(source)
            self._free.append(source)
        else:
            self._retired.append(source)

    def clear(self, stream: Stream, knowledge: Knowledge) -> bool:
        """Clear all blocks of a stream: they were cleared there, or batches were lost.

        An engine whose caches are empty will not have what it was expected to have either. Return whether the stream
        has lost numbers, so that what maps them is to be derived anew.
        """
        before = len(stream.sources)
        for medium, source in list(stream.sources.items()):
            if self._may_clear:
                self._index.clear(source)
            else:
                self._retired.append(stream.sources.pop(medium))
        if knowledge is Knowledge.CURRENT and not stream.is_store:
            for expected in stream.expecting:
                if self._may_clear:  # else it fades
                    self._index.clear(expected)
        stream.owed_s = float("inf")
        stream.epoch += 1
        stream.knowledge = knowledge
        return len(stream.sources) < before

    @property
    def _may_clear(self) -> bool:
        return not self._retired and self._index.unswept_sources < SPARE_SOURCES

    def sweep(self, clock: Callable[[], float]) -> None:
        """Sweep for limits.SWEEP_STEP_S at most, and clear retired numbers where there is room for them."""
        until_s = clock() + SWEEP_STEP_S
        for _ in range(MAX_SWEPT_SEGMENTS):
            if not self._index.sweep() or clock() >= until_s:
                break
        while self._retired and self._index.unswept_sources < SPARE_SOURCES:
            source = self._retired.popleft()
            self._index.clear(source)
            self._free.append(source)
