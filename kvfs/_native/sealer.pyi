"""Threads that seal blocks for sessions without the event loop, and tell that afterwards."""

from types import TracebackType
from typing import Self

from typing_extensions import disjoint_base

from kvfs._native.table import Table

NEW: int
"""Outcomes: sealed and in the table..."""
THERE: int
"""...the block was there, so the draft is to be given back..."""
UNINDEXED: int
"""...the table was full, so the sealed slot is to be given back."""
SEALS_AT_ONCE: int
"""Seals of one packet."""

@disjoint_base
class Sealed:
    """What was done to one draft."""

    @property
    def slot(self) -> int: ...
    @property
    def generation(self) -> int:
        """Of the draft."""

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
    """Seals drafts that were granted to a channel, by a thread each. As a context manager: seals nothing meanwhile.

    While it is held so, no other method of it may be called. Raises OSError without a thread.
    """

    def __init__(
        self, table: Table, dirfd: int, largest_bytes: int, channels: int = ..., room: int = ...
    ) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def fileno(self) -> int:
        """Readable while `take` has something that nobody was told of."""

    def open(self, fd: int, uid: int, bucket_id: int) -> int:
        """Take over a SEQPACKET socket as the channel of a writer; its number. Raises OSError."""

    def close_channel(self, channel: int) -> None: ...
    def grant(self, slot: int, generation: int, channel: int) -> None: ...
    def revoke(self, slot: int) -> None:
        """From here on the draft in this slot is not sealed here; it may have been."""

    def give_ids(self, first: int, count: int) -> None:
        """The object ids to use from here on, in place of those left."""

    @property
    def ids_left(self) -> int: ...
    @property
    def pending(self) -> int: ...
    def take(self) -> list[Sealed]:
        """What was done since, oldest first; not always all of it."""

    def close(self) -> None:
        """End every channel; `take` what is pending before. Closing twice is harmless."""

    @property
    def sealed(self) -> int: ...
    @property
    def refused(self) -> int: ...
