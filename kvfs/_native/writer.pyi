"""Drafts of blocks: a slot of the store that only its writer sees until it is sealed."""

from collections import deque
from collections.abc import Sequence

from typing_extensions import disjoint_base

from kvfs._native.pieces import Memory, Pieces, Scatter
from kvfs._native.table import Table

PUTS_AT_ONCE: int
"""Blocks of one `put_blocks`."""

@disjoint_base
class Draft:
    """A block on its way in: writable memory of `size_bytes` (the buffer protocol), or filled by `write`."""

    key: bytes
    parent: bytes
    size_bytes: int
    layers: int
    """Equal parts, the outermost axis of the block, that `save_layer` fills; 0 for a block that is filled at will."""
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
        """Takes over `fd`."""

    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def missing_layers(self) -> list[int]: ...
    def write(self, buffer: Memory | Sequence[Memory], offset: int = 0) -> None:
        """Raises NoSpace, InvalidRequest."""

    def save_layer(self, layer: int, buffer: Memory | Sequence[Memory]) -> bool:
        """Fill one layer; whether that was the last one missing. Raises NoSpace, InvalidRequest."""

    def close(self) -> None:
        """Raises InvalidRequest while a memoryview or an array of it is alive; twice is harmless."""

    def after_fork(self) -> None: ...
    def check_ready(self) -> None:
        """Raises InvalidRequest while a layer is missing, or memory of it is in use."""

    def finish(self) -> None:
        """Close it before its seal."""

def write_drafts(drafts: Sequence[Draft | None], pieces: Pieces, first: int = 0) -> None:
    """Write each draft's block whole, from the `first` of `pieces` on, and close it. Raises the first failure."""

def put_blocks(
    channel: int,
    drafts: list[tuple[int, int, int]],
    blocks: list[int],
    keys: bytes,
    parents: bytes,
    pieces: Pieces,
    timeout_s: float,
) -> list[int] | None:
    """Write `blocks` (indexes into keys, parents and pieces) into drafts (slot, generation, descriptor), with their
    checksums, and seal them over a seal channel. The errno of each, 0 for a new block; None when the channel failed.

    All descriptors are closed. Copies and waits without the GIL; one call at a time for a channel.
    """

@disjoint_base
class Put:
    """What a caller gave to put, checked, and how far it came. Raises InvalidRequest."""

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
        """Sixteen bytes for each block, zeros for none."""

    @property
    def pieces(self) -> Pieces: ...
    @property
    def count(self) -> int: ...
    @property
    def drafts(self) -> list[tuple[int, int, int]]:
        """What `at_once` took; their descriptors are closed."""

    @property
    def statuses(self) -> list[int] | None:
        """Of each block, where `at_once` did not make all of them new; None when the channel failed."""

    def at_once(
        self, channel: int, spares: deque[tuple[int, int, int]], table: Table | None, timeout_s: float
    ) -> bool | None:
        """As `put_blocks` of all, with spare drafts: whether all of them are new. None where nothing was done: too
        many blocks, too few drafts, or some of them are in the table. REQUIRES that nobody else uses the channel.
        """
