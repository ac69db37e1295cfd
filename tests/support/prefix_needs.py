"""What a prefix needs of a prompt's cache groups, as a plain model: full attention, windows, states and chunks.

Responsibility: the blocks without which no prompt goes on behind a prefix, and the longest prefix that some blocks
allow. Groups may have blocks of different lengths; a prefix is as long as it has blocks of full attention, each of
BLOCK_TOKENS.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import NamedTuple

from tests.support.conductors import BLOCK_TOKENS

Block = tuple[int, int]
"""A group, and the block's place in it."""


class Layers(NamedTuple):
    """The layers of a group, by what they read."""

    tokens: int = BLOCK_TOKENS
    """Of one of the group's blocks."""
    read: int | None = None
    """How many of its blocks before a token are read; None: all, as full attention does. Of a state it is one."""
    is_chunked: bool = False
    """Whether those alone are read that are since a multiple of `read`."""

    def read_before(self, end: int) -> range:
        """Return the group's blocks that are read behind a prefix."""
        own = end * BLOCK_TOKENS // self.tokens
        if self.read is None:
            return range(own)
        return range(own // self.read * self.read if self.is_chunked else max(own - self.read, 0), own)


Groups = Mapping[int, Layers]
"""By their numbers."""


def needed(groups: Groups, end: int) -> set[Block]:
    """Return the blocks of all groups that are read behind a prefix."""
    return {(group, at) for group, layers in groups.items() for at in layers.read_before(end)}


def boundaries(groups: Groups, blocks: int) -> range:
    """Return the prefixes of a prompt with which blocks of all groups end, the empty one first."""
    step = math.lcm(BLOCK_TOKENS, *(layers.tokens for layers in groups.values())) // BLOCK_TOKENS
    return range(0, blocks + 1, step)


def longest(groups: Groups, held: Set[Block], blocks: int) -> int:
    """Return the longest prefix of a prompt for which each group has what is read behind it."""
    return max(end for end in boundaries(groups, blocks) if needed(groups, end) <= held)
