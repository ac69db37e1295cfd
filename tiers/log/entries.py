"""What waits to be written to the log of the NVMe tier: records, deletions, and barriers between them.

Responsibility: the entries and their queue; who writes them is `tiers.log.log`.

Invariants: tickets count entries in the order in which they were appended, from 1 on; entries that are put back keep
theirs.
Concurrency: the service's trio thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import trio

from kvfs.errors import KvfsError
from kvfs.formats import EndingKind, RecordType

Location = tuple[int, int]
"""(segment number, offset in the segment) of a record."""


class Payload(Protocol):
    """Supplies the bytes of a DATA record."""

    size_bytes: int
    checksum: int | None
    """XXH3-64 if it is known: then other bytes are refused."""

    async def read_into(self, view: memoryview) -> int:
        """Put the bytes at the start of `view`, which has whole RECORD_ALIGNMENT units; return their XXH3-64.

        Raises Superseded when there is nothing to write any more, Corrupt.
        """
        ...


@dataclass(slots=True)
class Record:
    """Describes a record to be written. `header` gets its sequences, sizes and checksums then."""

    type: RecordType
    object_id: int
    header: dict[str, int | bytes] = field(default_factory=dict)
    body: bytes = b""
    payload: Payload | None = None
    written: Callable[[Location, int, int], None] | None = None
    """Notified of its place, its record_bytes and the checksum; not yet durable. Again where it is written again."""
    lost: Callable[[KvfsError], None] | None = None
    """Notified that it will not be written, or that what was written may not count."""
    is_essential: Callable[[], bool] = lambda: True
    """Asked when there is no room for it: only a cache's payload may be dropped."""
    ends: EndingKind | None = None
    """What it takes the place of: the object's earlier names, or an extent's earlier bytes."""
    first_sequence: int = 0
    """No record of its object is older, where it ends any."""
    is_final: bool = False
    """What it ends has ended though this may never be written: a cache's change is answered without it."""

    @property
    def payload_bytes(self) -> int:
        """Return the size of the payload, 0 without one."""
        return 0 if self.payload is None else self.payload.size_bytes


@dataclass(slots=True)
class Barrier:
    """Separates entries: what follows is written only once everything before is durable."""


@dataclass(slots=True)
class Deletion:
    """Ends all records of an object or bucket; neighbours become one record."""

    object_id: int
    written: Callable[[], None] | None = None
    """Notified once its record is written; not yet durable."""
    first_sequence: int = 0
    """No record of the object is older."""
    is_repeated: bool = False
    """Its ending is written already."""
    is_final: bool = False
    """As of `Record`."""
    is_ordered: bool = True
    """It is durable before what follows it, and soon; else in the order of the log, with the next sync."""


Entry = Record | Barrier | Deletion


class LogQueue:
    """Keeps entries in the order of their appending, each with a ticket."""

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque()
        self.ticket = 0
        """Ticket of the newest entry."""
        self.taken_ticket = 0
        """Ticket of the entry before the first that waits."""
        self._popped = trio.Event()

    def __len__(self) -> int:
        return len(self.entries)

    def append(self, entry: Entry) -> int:
        """Queue an entry; return its ticket. Neighbouring barriers are one."""
        if isinstance(entry, Barrier) and self.entries and isinstance(self.entries[-1], Barrier):
            return self.ticket
        self.entries.append(entry)
        self.ticket += 1
        return self.ticket

    def pop(self, count: int) -> None:
        """Remove so many entries from the head."""
        for _ in range(count):
            self.entries.popleft()
        self.taken_ticket += count
        self.wake()

    def put_back(self, entry: Entry) -> None:
        """Put the entry that was popped last at the head again."""
        self.entries.appendleft(entry)
        self.taken_ticket -= 1

    def wake(self) -> None:
        """Wake whoever waits in `wait_popped`."""
        event, self._popped = self._popped, trio.Event()
        event.set()

    async def wait_popped(self) -> None:
        """Wait until entries were popped, or could not be."""
        await self._popped.wait()
