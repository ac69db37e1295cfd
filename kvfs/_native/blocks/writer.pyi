"""Drafts of blocks: a slot of the store that only its writer sees until it is sealed."""

from collections import deque
from collections.abc import Sequence

from typing_extensions import disjoint_base

from kvfs._native.blocks.pieces import Memory, Pieces, Scatter
from kvfs._native.shared.table import Table

PUTS_AT_ONCE: int
"""The most blocks of one `put_blocks`."""

@disjoint_base
class Draft:
    """A block being written: writable memory of `size_bytes` (the buffer protocol), or filled by `write`."""

    key: bytes
    parent: bytes
    size_bytes: int
    layers: int
    """Equal parts along the outermost axis of the block, which `save_layer` fills; 0 for a block without layers."""
    slot: int
    generation: int
    session: object
    def __init__(
        self,
        key: bytes,
        parent: bytes,
        size_bytes: int,
        slot: int,
        generation: int,
        fd: int,
        session: object,
        layers: int = 0,
    ) -> None:
        """Take over `fd`."""

    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def missing_layers(self) -> list[int]: ...
    def write(self, buffer: Memory | Sequence[Memory], offset: int = 0) -> None:
        """Write bytes at `offset`. Raises NoSpace, InvalidRequest."""

    def save_layer(self, layer: int, buffer: Memory | Sequence[Memory]) -> bool:
        """Fill one layer; return whether it was the last one missing. Raises NoSpace, InvalidRequest."""

    def close(self) -> None:
        """Close it; twice is harmless. Raises InvalidRequest while a memoryview or an array of it lives."""

    def after_fork(self) -> None: ...
    def check_ready(self) -> None:
        """Raise InvalidRequest while a layer is missing, or memory of the draft is in use."""

    def finish(self) -> None:
        """Close the draft, at its full size, for its seal."""

def write_drafts(drafts: Sequence[Draft | None], pieces: Pieces, first: int = 0) -> None:
    """Write each draft's block, from the `first` of `pieces` on, and close the draft. Raises the first failure."""

def put_blocks(
    channel: int,
    drafts: list[tuple[int, int, int, int]],
    blocks: list[int],
    keys: bytes,
    parents: bytes,
    pieces: Pieces,
    timeout_s: float,
) -> list[int] | None:
    """Write `blocks` (indexes into keys, parents and pieces) into drafts (slot, generation, descriptor, bytes that it
    has of an earlier object), and seal them over a seal channel. Return the errno of each, 0 for a new block; None when
    the channel failed.

    All descriptors are closed. Copies and waits without the GIL. REQUIRES one call at a time for a channel.
    """

@disjoint_base
class Put:
    """The checked arguments of a put, and its progress. Raises InvalidRequest."""

    def __init__(
        self,
        keys: Sequence[bytes] | bytes,
        buffers: Sequence[Memory | Sequence[Memory]] | Scatter,
        parents: Sequence[bytes | None] | None,
    ) -> None: ...
    @property
    def keys(self) -> bytes: ...
    @property
    def parents(self) -> bytes:
        """Return 16 bytes for each block, zeros for none."""

    @property
    def pieces(self) -> Pieces: ...
    @property
    def count(self) -> int: ...
    @property
    def size_bytes(self) -> int:
        """Return the size of the first block."""

    @property
    def drafts(self) -> list[tuple[int, int, int, int]]:
        """Return the drafts that `at_once` took; their descriptors are closed."""

    @property
    def statuses(self) -> list[int] | None:
        """Return the errno of each block where `at_once` returned False; None when the channel failed."""

    def at_once(
        self, channel: int, spares: deque[tuple[int, int, int, int]], table: Table | None, timeout_s: float
    ) -> bool | None:
        """Put all blocks with spare drafts, as `put_blocks`; return whether all of them are new.

        None: nothing was done, since there are too many blocks or too few drafts, or some blocks are in the table.
        REQUIRES that nobody else uses the channel.
        """
