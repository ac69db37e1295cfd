"""Prefixes of models with several kinds of attention: which blocks each group of layers needs, and which are kept.

Responsibility: the rules as pure functions. An engine keeps the KV cache of such a model by groups of layers. A
boundary is where a block of each group ends: they are numbered, and as far apart as the least common multiple of all
blocks. From a boundary on, layers of full attention read all blocks before it, those of a sliding window the blocks
that have one of its last `window - 1` tokens, those of chunked local attention the blocks since the last chunk ended,
recurrent layers their state behind its last token, which is the block before it.

Invariants: a prefix is a hit only if every group has all that it reads. What `Kept` keeps makes a hit of each of its
boundaries, and nothing else is kept. Concurrency: immutable values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

_PIECE_BLOCKS: Final = 256
"""Blocks that are looked up at once: most prefixes end in the first piece."""

Present = Callable[[int, int, int], Sequence[bool]]
"""Says of a group, by its index, which blocks from a first one to one past the last are there."""


class Prefix(NamedTuple):
    """The longest prefix for which every group has what it needs."""

    boundary: int
    """Where it ends."""
    reach: int
    """The boundary up to which the groups of full attention have all; `boundary` where there are no such groups."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share their blocks."""

    window_blocks: int | None = None
    """Blocks before a boundary that its layers read at most; None: all of them, full attention."""
    is_state: bool = False
    """Recurrent layers: a block is their state behind its last token, where the engine has kept it."""
    is_chunked: bool = False
    """Chunked local attention: its layers read back to a multiple of `window_blocks`."""
    stride: int = 1
    """Its blocks from one boundary to the next: several where blocks of another group have more tokens."""

    @property
    def is_full(self) -> bool:
        """Return whether its layers read everything before a boundary."""
        return self.window_blocks is None

    @classmethod
    def of_state(cls, stride: int = 1) -> Group:
        """Return the group of recurrent layers, which go on from the last state alone."""
        return cls(1, is_state=True, stride=stride)

    @classmethod
    def of_window(cls, window_tokens: int, block_tokens: int, stride: int = 1) -> Group:
        """Return the group of a sliding window, in which a token reads itself and `window_tokens - 1` before it."""
        return cls(-(-(window_tokens - 1) // block_tokens), stride=stride)

    @classmethod
    def of_chunks(cls, chunk_tokens: int, block_tokens: int, stride: int = 1) -> Group:
        """Return the group of chunked local attention, in which a token reads its own chunk up to itself. A chunk is
        some whole blocks."""
        return cls(chunk_tokens // block_tokens, is_chunked=True, stride=stride)

    def needed(self, first: int, boundary: int) -> range:
        """Return the blocks behind the boundary `first` that a prefix up to `boundary` needs."""
        begin, end = first * self.stride, boundary * self.stride
        if self.window_blocks is None:
            return range(begin, end)
        blocks = end % self.window_blocks if self.is_chunked else self.window_blocks
        return range(max(begin, end - blocks), end)

    def next_boundary(self, block: int) -> int:
        """Return the first boundary that is not before the end of a block."""
        return block // self.stride + 1


def longest_prefix(groups: Sequence[Group], first: int, last: int, present: Present) -> Prefix:
    """Return the longest prefix up to the boundary `last` at most; what is before `first` is there."""
    reach = last
    for index, group in enumerate(groups):
        if group.is_full:
            reach = _before_missing(index, group, first, reach, present)
    boundary, before = reach, -1
    while boundary != before:  # each group takes the boundary down to the next one for which it has all
        before = boundary
        for index, group in enumerate(groups):
            if group.is_chunked:
                # All boundaries behind a block that is missing, up to the chunk's end, need it.
                boundary = _before_missing(index, group, first, boundary, present)
            elif group.window_blocks:
                boundary = _last_window(index, group, first, boundary, present)
    has_full = any(group.is_full for group in groups)
    return Prefix(boundary, reach if has_full else boundary)


def _before_missing(index: int, group: Group, first: int, last: int, present: Present) -> int:
    """Return the last boundary before the first block that is missing of those that `last` needs; else `last`."""
    needed = group.needed(first, last)
    for start in range(needed.start, needed.stop, _PIECE_BLOCKS):
        there = present(index, start, min(start + _PIECE_BLOCKS, needed.stop))
        if not all(there):
            return (start + list(there).index(False)) // group.stride
    return last


def _last_window(index: int, group: Group, first: int, last: int, present: Present) -> int:
    """Return the last boundary before which the blocks of a window are there, from `first` on."""
    boundary, stop = last, last * group.stride
    while stop > first * group.stride:
        start = max(first * group.stride, stop - _PIECE_BLOCKS)
        there = present(index, start, stop)
        for block in range(stop - 1, start - 1, -1):
            if not there[block - start]:
                boundary = block // group.stride
            elif boundary * group.stride - block == group.window_blocks:
                return boundary
        stop = start
    return boundary


@dataclass(frozen=True, slots=True)
class Kept:
    """The boundaries of one request that are kept, so that a later one may go on there."""

    tail: int
    """From this boundary on all are kept: a request goes on anywhere behind its prompt."""
    junction: int = 0
    """Where this request leaves what earlier ones have in common with it; 0: nowhere."""
    every: int = 0
    """Of the blocks before the tail, each boundary at a multiple of this is kept; 0: none."""

    def has(self, group: Group, block: int) -> bool:
        """Return whether a block of a group is kept: one of its kept boundaries needs it. Of states all are that an
        engine keeps at boundaries: it has few of a prompt."""
        following = group.next_boundary(block)
        if block not in group.needed(0, following):  # nothing behind it reads it: a chunk's last block is one
            return False
        if group.is_full or group.is_state or block >= group.needed(0, self.tail).start:
            return True
        checkpoint = -(-following // self.every) * self.every if self.every else 0
        return block in group.needed(0, self.junction) or block in group.needed(0, checkpoint)


def checkpoint_every(groups: Sequence[Group], windows: int) -> int:
    """Return the distance of boundaries that are kept, such that one of so many windows is; 0 without windows."""
    sizes = (-(-windows * (each.window_blocks or 0) // each.stride) for each in groups if not each.is_state)
    return max(sizes, default=0)
