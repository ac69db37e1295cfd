"""How many copies of each block an engine has, as its events say.

Responsibility: count. vLLM computes blocks anew that it has, where a window or a state before them is gone, and says of
each copy in its own memory that it comes and goes; who says no groups of layers, and what holds blocks elsewhere, says
of a block whether it is there.

Concurrency: plain state for one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from kvfs.events.kv_events import GPU, BlockStored

Block = TypeVar("Block")


class BlockCopies(Generic[Block]):
    """Count the copies of blocks."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[Block, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._counts)

    def __contains__(self, block: object) -> bool:
        return block in self._counts

    def add(self, blocks: Iterable[Block], event: BlockStored) -> None:
        """Count blocks of an event in."""
        is_copy = event.kv_cache_spec_kind is not None and (event.medium or GPU) == GPU
        for block in blocks:
            self._counts[block] = 1 + (self._counts.get(block, 0) if is_copy else 0)

    def remove(self, block: Block) -> bool:
        """Take a copy out; return whether it was the last."""
        left = self._counts.pop(block, 0) - 1
        if left > 0:
            self._counts[block] = left
        return left == 0
