"""Blocks read in place, from the shared table and the slots, without asking the service."""

from collections.abc import Sequence
from os import PathLike
from types import TracebackType
from typing import Self

from typing_extensions import disjoint_base

from kvfs._native.blocks.pieces import Memory, Pieces, Scatter
from kvfs._native.shared.table import Table

MISS: int
"""A read's result: the block is not there."""
BELOW: int
"""A read's result: the block is in a lower tier only."""
NO_ROOM: int
"""A read's result: the block is longer than its places."""

@disjoint_base
class View:
    """A block's bytes, read-only, as a buffer: a mapping of its slot, which is a lease on it.

    Released by `release`, by `with`, or when it is collected.
    """

    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def release(self) -> None:
        """End the lease. Raises BufferError while a memoryview or an array of it lives. Releasing twice is harmless."""

    @property
    def released(self) -> bool: ...
    @staticmethod
    def of_descriptor(fd: int, size: int) -> View | None:
        """Return a view of an open slot; None where it has another size."""

    @staticmethod
    def copy(views: list[View | None], offset: int, size: int, pieces: Pieces) -> None:
        """Copy `size` bytes from `offset` on out of each view that is not None. Raises InvalidRequest."""

def read_descriptors(
    descriptors: list[int | None], sizes: list[int], pieces: Pieces, first: int = 0
) -> list[int]:
    """Read open slots; return the bytes of each, MISS for None and for one that is shorter, or NO_ROOM."""

@disjoint_base
class Reader:
    """Read the blocks of one store. REQUIRES that `table` stays open; `directory` has the slots. Raises OSError.

    `stream_bytes`: batches of so many bytes and more are copied past the processor's caches, which do not hold them.
    """

    def __init__(self, table: Table, directory: str | PathLike[str], stream_bytes: int) -> None: ...
    @property
    def table(self) -> Table: ...
    @property
    def alive(self) -> bool:
        """Return whether no later service has replaced this table."""

    def match(self, keys: bytes) -> int:
        """Return how many blocks are there without a gap from the first on, in whatever tier."""

    def find(self, keys: bytes) -> bytes:
        """Return the tier bits of each block (kvfs._native.shared.table), 0 for a miss."""

    def read(self, keys: bytes, pieces: Pieces) -> list[int]:
        """Copy blocks; return the bytes of each, or MISS, BELOW, NO_ROOM. Raises LimitExceeded, OSError."""

    def read_into(
        self, keys: Sequence[bytes] | bytes, buffers: Sequence[Memory | Sequence[Memory]] | Scatter
    ) -> list[int] | None:
        """Copy blocks as `read`; return None where the table is dead, or a result is neither a size nor MISS."""

    def map(self, keys: bytes) -> list[View | int]:
        """Return a view of each block, or MISS, BELOW. Raises LimitExceeded, OSError."""

    @property
    def unreported(self) -> int: ...
    def take_hits(self, most: int) -> bytes:
        """Take at most `most` keys of hits that were not reported to the service; those past the limit were dropped."""
