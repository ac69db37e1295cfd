"""Blocks read in place, from the shared table and the slots, without asking the service."""

from collections.abc import Sequence
from os import PathLike
from types import TracebackType
from typing import Self

from typing_extensions import disjoint_base

from kvfs._native.pieces import Memory, Pieces, Scatter
from kvfs._native.table import Table

MISS: int
"""Results of a read besides a size: not there..."""
BELOW: int
"""...not in DRAM, but in a lower tier..."""
NO_ROOM: int
"""...longer than its places."""

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
        """End the lease. Raises BufferError while a memoryview or an array of it is alive; twice is harmless."""

    @property
    def released(self) -> bool: ...
    @staticmethod
    def of_descriptor(fd: int, size: int) -> View | None:
        """A view of an open slot; None where it has another size."""

    @staticmethod
    def copy(views: list[View | None], offset: int, size: int, pieces: Pieces) -> None:
        """Copy `size` bytes from `offset` on out of each view that is not None. Raises InvalidRequest."""

def read_descriptors(
    descriptors: list[int | None], sizes: list[int], pieces: Pieces, first: int = 0
) -> list[int]:
    """Read open slots: the bytes of each, MISS for None and for one that is shorter, NO_ROOM."""

@disjoint_base
class Reader:
    """Reads of one store. `table` stays open while this is used; `directory` has the slots. Raises OSError."""

    def __init__(self, table: Table, directory: str | PathLike[str]) -> None: ...
    @property
    def table(self) -> Table: ...
    @property
    def alive(self) -> bool:
        """Whether no later service has replaced this table."""

    def match(self, keys: bytes) -> int:
        """How many blocks are there without a gap from the first on, in whatever tier."""

    def find(self, keys: bytes) -> bytes:
        """The tier bits of each block (kvfs._native.table), 0 for what is not there."""

    def read(self, keys: bytes, pieces: Pieces) -> list[int]:
        """Bytes of each block, or MISS, BELOW, NO_ROOM. Raises LimitExceeded, OSError."""

    def read_into(
        self, keys: Sequence[bytes] | bytes, buffers: Sequence[Memory | Sequence[Memory]] | Scatter
    ) -> list[int] | None:
        """`read` of what a caller gave. None where the table is dead, or a result is neither a size nor MISS."""

    def map(self, keys: bytes) -> list[View | int]:
        """A view of each block, or MISS, BELOW. Raises LimitExceeded, OSError."""

    @property
    def unreported(self) -> int: ...
    def take_hits(self, most: int) -> bytes:
        """Keys of hits that the service is to be told of; bounded, what did not fit is forgotten."""
