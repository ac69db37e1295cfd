"""Threads that seal blocks for sessions without the event loop, and report it afterwards."""

from types import TracebackType
from typing import Self

from typing_extensions import disjoint_base

from kvfs._native.shared.table import Table

NEW: int
"""An outcome: the block is sealed and in the table."""
THERE: int
"""An outcome: the block was there, and the draft is to be aborted."""
UNINDEXED: int
"""An outcome: the table was full, and the sealed slot is to be recycled."""
SEALS_AT_ONCE: int
"""The most seals of one packet."""

@disjoint_base
class Sealed:
    """The outcome of one seal."""

    @property
    def slot(self) -> int: ...
    @property
    def generation(self) -> int:
        """Return the generation of the draft."""

    @property
    def channel(self) -> int: ...
    @property
    def outcome(self) -> int: ...
    @property
    def key(self) -> bytes: ...
    @property
    def parent(self) -> bytes: ...
    @property
    def object_id(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def physical_bytes(self) -> int: ...
    @property
    def sealed_at_ns(self) -> int: ...
    @property
    def has_checksum(self) -> bool: ...

@disjoint_base
class Sealer:
    """Seal drafts that were granted to a channel, by a thread for each channel. A `with` block stops all seals.

    REQUIRES that no other method is called within the block. Raises OSError without a thread.
    """

    def __init__(
        self, table: Table, dirfd: int, largest_bytes: int, channels: int = ..., room: int = ...
    ) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def fileno(self) -> int:
        """Return a descriptor that is readable while `take` has something that nobody was notified of."""

    def open(self, fd: int, uid: int, bucket_id: int) -> int:
        """Take over a SEQPACKET socket as the channel of a writer; return its number. Raises OSError."""

    def close_channel(self, channel: int) -> None: ...
    def grant(self, slot: int, generation: int, channel: int) -> None: ...
    def revoke(self, slot: int) -> None:
        """Seal the draft in this slot no more; it may have been sealed."""

    def give_ids(self, first: int, count: int) -> None:
        """Set the object ids to use from here on, in place of those left."""

    @property
    def ids_left(self) -> int: ...
    @property
    def pending(self) -> int: ...
    def take(self) -> list[Sealed]:
        """Take outcomes, oldest first; more may be left."""

    def close(self) -> None:
        """End every channel. REQUIRES that outcomes were taken before. Closing twice is harmless."""
