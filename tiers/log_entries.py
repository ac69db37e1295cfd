"""What waits to be written to the log of the NVMe tier: records, deletions, and barriers between them.

Responsibility: the entries of `tiers.log`'s queue, and which of a cache's objects and names they have ended though the
log cannot write them: a cache is answered all the same, and an older version must not come back.

Concurrency: values of the service's trio thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from kvfs.errors import KvfsError
from kvfs.formats import EndingKind, RecordType
from tiers.endings import Ending

Location = tuple[int, int]
"""(segment number, offset in the segment) of a record."""


class Payload(Protocol):
    """Where a DATA record's bytes come from."""

    size_bytes: int
    checksum: int | None
    """XXH3-64 if it is known: then other bytes are refused."""

    async def read_into(self, view: memoryview) -> int:
        """Put the bytes at the start of `view`, which has whole RECORD_ALIGNMENT units; their XXH3-64.

        Raises Superseded when there is nothing to write any more, Corrupt.
        """
        ...


@dataclass(slots=True)
class Record:
    """Something to be written. `header` gets its sequences, sizes and checksums when it is."""

    type: RecordType
    object_id: int
    header: dict[str, int | bytes] = field(default_factory=dict)
    body: bytes = b""
    payload: Payload | None = None
    written: Callable[[Location, int, int], None] | None = None
    """Told where it is, its record_bytes and the payload's checksum; not yet durable. After an error, told again."""
    lost: Callable[[KvfsError], None] | None = None
    """Told that it will not be written, or that what was written may not count."""
    is_essential: Callable[[], bool] = lambda: True
    """Asked when there is no room for it: only a cache's payload may be given up."""
    ends: EndingKind | None = None
    """What it takes the place of: the object's earlier names, or an extent's earlier bytes."""
    first_sequence: int = 0
    """No record of its object is older, where it ends any."""
    is_final: bool = False
    """What it ends has ended though this may never be written: a cache's change is answered without it."""


@dataclass(slots=True)
class Barrier:
    """What follows is written only once everything before is durable."""


@dataclass(slots=True)
class Deletion:
    """An object or bucket of which no record counts any more; neighbours become one record."""

    object_id: int
    written: Callable[[], None] | None = None
    """Told once its record is; not yet durable."""
    first_sequence: int = 0
    """No record of the object is older."""
    is_repeated: bool = False
    """Its ending is written already."""
    is_final: bool = False
    """As of `Record`."""


Entry = Record | Barrier | Deletion


def final_endings(entries: Iterable[Entry], sequence: int) -> Iterator[Ending]:
    """What has ended by entries that are not written, each once; `sequence`: none of them will have a lower one."""
    for entry in entries:
        if isinstance(entry, Barrier) or not entry.is_final:
            continue
        if isinstance(entry, Deletion):
            if not entry.is_repeated:
                entry.is_repeated = True
                yield Ending(entry.object_id, entry.first_sequence, sequence)
        elif entry.ends is not None:
            entry.is_final = False
            yield Ending(entry.object_id, entry.first_sequence, sequence, entry.ends)
