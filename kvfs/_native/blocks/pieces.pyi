"""Places in a caller's memory, for batches that are copied without the interpreter."""

from collections.abc import Sequence
from typing import Any

from typing_extensions import Buffer, disjoint_base

Memory = Any
"""Anything with the buffer protocol, or a contiguous torch tensor on the CPU (also of types without a format)."""

class Scatter:
    """Strided places, such as those of a paged KV cache.

    Block i is, for each of `bases` in turn, `piece_bytes` bytes at each of `offsets[i]` in turn. `bases` is one
    piece of memory or a list of them (a tensor per layer). `offsets` (bytes) is a sequence of ints, or of rows of
    ints of equal length, or an int64 array of one or two dimensions.
    """

    bases: list[Memory]
    offsets: Any
    piece_bytes: int
    def __init__(self, bases: Memory, offsets: Any, piece_bytes: int) -> None: ...
    def __len__(self) -> int: ...

@disjoint_base
class Pieces:
    def __init__(
        self, buffers: Sequence[Memory | Sequence[Memory]] | Scatter, blocks: int, writable: bool
    ) -> None: ...
    def sizes(self) -> list[int]:
        """Return the bytes of each block."""

    def choose(self, which: Sequence[int]) -> Pieces:
        """Return the places of some blocks, in this order."""

def join_keys(keys: Sequence[bytes] | Buffer) -> bytes: ...
