"""Which sources of the cluster hold which blocks: the index that routing reads.

Responsibility: from the prefix hashes of a prompt to its runs. A *source* is one tier of one node, a bit in a
mask; a *run* is a stretch of blocks that the same sources hold. Blocks are found in any source of the cluster,
so a prefix may be made of runs that lie on different nodes.

Invariants: a block without a holder has no entry. A block that a committed prefill will make is listed from the
commitment on, with that prefill as its producer until it is done, or until a holder says that it has the block. Of
several that make one block its producer is the one that was predicted to end first: a long prompt keeps nobody waiting
for the system prompt that it begins with, where others have made that meanwhile.

Costs: `runs` is one look-up per block of the prefix, whatever the number of nodes.

Concurrency: one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from scheduler.routing.queues import Job

_NOBODY: Final = (None, float("-inf"))


class Run(NamedTuple):
    """Consecutive blocks of a prompt that the same sources hold."""

    holders: int
    """A mask: bit i is set where source i holds them."""
    blocks: int
    producer: Job | None
    """The prefill that is to make them, while it is not done."""


class PrefixIndex:
    """Blocks by prefix hash; sources are numbered from 0."""

    __slots__ = ("_holders", "_producers")

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._producers: dict[int, tuple[Job, float]] = {}
        """Each with the end that was predicted when it was committed."""

    def __len__(self) -> int:
        return len(self._holders)

    def runs(self, blocks: Sequence[int]) -> tuple[Run, ...]:
        """Return the longest prefix of `blocks` that the cluster holds, in runs."""
        holders_of, producer_of = self._holders.get, self._producers.get
        runs: list[Run] = []
        count, last_holders, last_producer = 0, 0, None
        for block in blocks:
            holders = holders_of(block, 0)
            if not holders:
                break
            producer = producer_of(block, _NOBODY)[0]
            if count and (holders != last_holders or producer is not last_producer):
                runs.append(Run(last_holders, count, last_producer))
                count = 0
            count += 1
            last_holders, last_producer = holders, producer
        if count:
            runs.append(Run(last_holders, count, last_producer))
        return tuple(runs)

    def holders(self, block: int) -> int:
        """Return the mask of the sources that hold it; 0 for none."""
        return self._holders.get(block, 0)

    def producer(self, block: int) -> Job | None:
        """Return the prefill that is to make it, while it is not done."""
        return self._producers.get(block, _NOBODY)[0]

    def add(self, block: int, source: int, producer: Job | None = None) -> None:
        """Add a holder of a block, or one that will hold it once `producer` is done: of several the one that ends first
        is its producer, and none where it is held already. Without one whoever makes it stays its producer, as for a
        copy that is on its way."""
        held = self._holders.get(block, 0)
        self._holders[block] = held | 1 << source
        if producer is not None and (not held or producer.finish_s < self._producers.get(block, _NOBODY)[1]):
            self._producers[block] = producer, producer.finish_s

    def stored(self, block: int, source: int) -> None:
        """Add a holder that says it has the block: whoever was to make it, it is there; natively `ClusterIndex.add`."""
        self.add(block, source)
        self._producers.pop(block, None)

    def invalidate(self, block: int, source: int) -> None:
        """Invalidate a block of a source, which does not hold it any more."""
        held = self._holders.get(block, 0) & ~(1 << source)
        if held:
            self._holders[block] = held
        else:
            self._holders.pop(block, None)
            self._producers.pop(block, None)

    def produced(self, blocks: Iterable[int], producer: Job) -> None:
        """Note that a producer is done, so that its blocks are there."""
        for block in blocks:
            if self.producer(block) is producer:
                del self._producers[block]
