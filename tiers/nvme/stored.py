"""Objects of the NVMe tier as values: where their extents and names lie, and payloads on their way to the log.

Responsibility: what is known of one object, what of it counts, and who is notified of what becomes of it; all of them
by id, in Python while somebody uses them, else natively (`kvfs._native.catalog.records`).

Invariants: while anybody has a `Stored`, `StoredObjects` returns that one. Concurrency: the service's trio thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from kvfs import limits
from kvfs._native.catalog.records import RecordRows, unused
from kvfs.errors import KvfsError, Superseded
from kvfs.formats import RECORD_HEADER, EndingKind, record_extent
from tiers.device.device import Device
from tiers.log.ending_pages import Ending
from tiers.log.entries import Location, Payload
from tiers.log.pool import SegmentPool
from tiers.model.tier import Kind, StoreKey

_NO_PARENT = bytes(16)
RowFields = tuple[
    int, bytes, bytes, int, int, int, int, bool, int, int, int, bool, tuple[int, int, int, int] | None,
    tuple[int, int, int] | None,
]  # fmt: skip
"""What a native row keeps of an object (`RecordRows`)."""


class Fault(Enum):
    """Says why the tier lacks an extent of an object."""

    DAMAGED = auto()
    """The tier had it."""
    UNWRITTEN = auto()
    """It was to be written, and DRAM had the object no more."""
    MISREAD = auto()
    """It was to be written, and what DRAM has is not what was sealed: it would be found wrong however often."""


class Piece(NamedTuple):
    """Says where one extent is on the device."""

    segment: int
    offset: int
    """Of its record."""
    record_bytes: int
    payload_bytes: int
    checksum: int

    @property
    def payload_at(self) -> int:
        """Return the offset of the payload in the segment."""
        return self.offset + record_extent(self.offset, 0, self.payload_bytes)[0]


@dataclass(slots=True, eq=False)
class Stored:
    """Describes one object of the tier; a directory or symbolic link, which has no extents and no size."""

    key: StoreKey
    object_id: int
    size_bytes: int
    bucket_id: int = 0
    parent: bytes = _NO_PARENT
    uid: int = 0
    sealed_at_ns: int = 0
    kept: bool = False
    """Durable: reclaim moves it."""
    queued_bytes: int = 0
    """Of its extents that wait to be written: promised while it is kept."""
    holders: int = 0
    """Leases on it: reclaim moves it, too."""
    hits: int = 0
    """That it had when it was written: with more it counts as hot."""
    writing: int = 0
    """Which writing of the object its extents are of: those of two never make one object."""
    pieces: list[Piece | None] = field(default_factory=list)
    meta: tuple[Location, int] | None = None
    """Where its newest META is, and what that counts for (`counted_bytes`)."""
    dropped: bool = False
    """Its bytes are no more."""
    is_replaced: bool = False
    """It makes room for a newer object: until its Deletion is written it stays whole."""
    ticket: int = 0
    """Of the log entry after which all of it is durable."""
    first_sequence: int = 0
    """No record of it is older."""
    is_named: bool = False
    """The log has a name of it, which the next one takes the place of."""
    problem: KvfsError | None = None
    """Why an extent of it was not written."""

    @property
    def place(self) -> int:
        """Return where it begins, as the table's `location` says it; 0 while it is not written."""
        piece = self.pieces[0] if self.pieces else None
        return 0 if piece is None else piece.segment << limits.SEGMENT_OFFSET_BITS | piece.offset

    @property
    def stays(self) -> bool:
        """Return whether reclaim has to move it."""
        return self.kept or self.holders > 0

    def is_at(self, number: int, piece: Piece) -> bool:
        """Return whether this is where the extent is; a draft's may have been written again, or cut off."""
        return number < len(self.pieces) and self.pieces[number] is piece

    @property
    def readable(self) -> bool:
        """Return whether every extent is on the device."""
        return None not in self.pieces

    def fields(self, durable_ticket: int) -> RowFields | None:
        """Return what a row keeps; None for an object that is being written, held or dropped, or has several
        extents, or one of another size."""
        is_used = self.dropped or self.is_replaced or self.holders or self.queued_bytes
        if is_used or self.ticket > durable_ticket or len(self.pieces) > 1:
            return None
        piece, meta = self.pieces[0] if self.pieces else None, self.meta
        if self.pieces and (piece is None or piece.payload_bytes != self.size_bytes):
            return None
        return (
            int(self.key.kind), self.key.digest, self.parent, self.size_bytes, self.bucket_id, self.uid,
            self.sealed_at_ns, self.kept, self.hits, self.writing, self.first_sequence, self.is_named,
            None if piece is None else (piece.segment, piece.offset, piece.record_bytes, piece.checksum),
            None if meta is None else (*meta[0], meta[1]),
        )  # fmt: skip

    @classmethod
    def of_fields(cls, object_id: int, fields: RowFields) -> Stored:
        """Make the object of a row."""
        kind, key, parent, size, bucket, uid, sealed_ns, kept, hits, writing, first, named, piece, meta = (
            fields
        )
        stored = cls(
            StoreKey(Kind(kind), key),
            object_id,
            size,
            bucket,
            parent,
            uid,
            sealed_ns,
            kept,
            0,
            0,
            hits,
            writing,
        )
        stored.first_sequence, stored.is_named = first, named
        if piece is not None:
            segment, offset, record_bytes, checksum = piece
            stored.pieces = [Piece(segment, offset, record_bytes, size, checksum)]
        if meta is not None:
            stored.meta = (meta[0], meta[1]), meta[2]
        return stored


class StoredObjects:
    """Keeps objects by id. One that nobody uses is a native row: as Python's it would take six times the memory."""

    def __init__(self, durable_ticket: Callable[[], int] = lambda: 0) -> None:
        """Make an empty collection. `durable_ticket`: of the newest entry of the log that is durable."""
        self.rows = RecordRows()
        self.used: dict[int, Stored] = {}
        """Those that somebody uses or has used lately, and those that fit in no row."""
        self._durable_ticket = durable_ticket
        self._most_used = limits.STORED_IN_USE

    def get(self, object_id: int) -> Stored | None:
        """Return an object, which stays the same one while the caller has it."""
        stored = self.used.get(object_id)
        if stored is None and (fields := self.rows.take(object_id)) is not None:
            stored = Stored.of_fields(object_id, fields)
            self[object_id] = stored
        return stored

    def __getitem__(self, object_id: int) -> Stored:
        stored = self.get(object_id)
        if stored is None:
            raise KeyError(object_id)
        return stored

    def __setitem__(self, object_id: int, stored: Stored) -> None:
        self.rows.take(object_id)
        self.used[object_id] = stored
        if len(self.used) > self._most_used:
            self.store_unused()

    def pop(self, object_id: int) -> Stored | None:
        """Remove an object; return it, None where there is none."""
        stored = self.get(object_id)
        self.used.pop(object_id, None)
        return stored

    def store_unused(self) -> None:
        """Make rows of the objects that nobody uses. The next time is when as many others were: so each costs the
        same."""
        durable_ticket = self._durable_ticket()
        for object_id in unused(self.used):
            fields = self.used[object_id].fields(durable_ticket)
            if fields is not None and self.rows.put(object_id, fields):
                del self.used[object_id]
        self._most_used = max(limits.STORED_IN_USE, 2 * len(self.used))

    def __contains__(self, object_id: int) -> bool:
        return object_id in self.used or object_id in self.rows

    def __len__(self) -> int:
        return len(self.used) + len(self.rows)

    def __iter__(self) -> Iterator[int]:
        return iter([*self.rows.ids(), *self.used])

    def values(self) -> Iterator[Stored]:
        """Yield the objects that are there when they are reached, rows in the order of their writing first."""
        return (stored for each in self if (stored := self.get(each)) is not None)

    def is_readable(self, object_id: int) -> bool:
        """Return whether all extents of an object are written."""
        stored = self.used.get(object_id)
        return object_id in self.rows if stored is None else stored.readable

    def is_kept(self, object_id: int) -> bool:
        """Return whether reclaim moves an object since it is durable."""
        stored = self.used.get(object_id)
        return self.rows.is_kept(object_id) if stored is None else stored.kept

    def is_unsettled(self, object_id: int) -> bool:
        """Return whether an object is durable, and not all of it is on the device yet."""
        stored = self.used.get(object_id)
        return stored is not None and stored.kept and stored.ticket > self._durable_ticket()

    def expendable(self) -> Iterator[Stored]:
        """Yield objects with extents that reclaim may evict, the oldest rows first, then those in use."""
        for object_id in self._oldest_rows():
            stored = self.get(object_id)
            if stored is not None and stored.pieces and not stored.stays:
                yield stored
        yield from (each for each in list(self.used.values()) if each.pieces and not each.stays)

    def _oldest_rows(self) -> Iterator[int]:
        after = 0, 0
        while page := self.rows.oldest(after, limits.ENTRIES_AT_ONCE):
            yield from (object_id for _, object_id in page)
            after = page[-1]


class NvmeObserver:
    """Is notified of what becomes of the tier's objects. As it is, for a tier without a journal: nothing was read,
    nothing goes along, nothing is written again."""

    def written(self, stored: Stored) -> None:
        """Note that an object can be read from the tier; again when it moved."""

    def evicted(self, stored: Stored) -> list[int]:
        """Note that reclaim evicts an object; return the ids of others that have to go with it."""
        return []

    def damaged(self, stored: Stored, fault: Fault) -> bool:
        """Note that an object lacks an extent and left the tier; return whether it will be written again."""
        return False

    def refused(self, stored: Stored) -> None:
        """Note that an object found no room in the tier."""

    def hits_of(self, stored: Stored) -> int:
        """Return how often the object was read so far."""
        return 0


@dataclass(slots=True)
class NvmeCounts:
    """Counts what status and metrics show."""

    objects_written: int = 0
    bytes_written: int = 0
    objects_evicted: int = 0
    reads: int = 0
    read_bytes: int = 0
    corrupt: int = 0


class SegmentPayload:
    """Supplies an extent that is on the device."""

    def __init__(self, device: Device, fd: int, piece: Piece) -> None:
        self.size_bytes = piece.payload_bytes
        self.checksum: int | None = piece.checksum
        self._device, self._fd, self._at = device, fd, piece.payload_at

    async def read_into(self, view: memoryview) -> int:
        """Read the extent from its segment. Raises Corrupt where the checksum differs, DeviceFailed."""
        return await self._device.read(
            self._fd, self._at, view, checksum=self.checksum, payload_bytes=self.size_bytes
        )


class SlotPayload:
    """Supplies a piece of a slot, sealed or not, as it is when it is written."""

    def __init__(
        self, device: Device, open_slot: Callable[[], int], offset: int, size_bytes: int, checksum: int | None
    ) -> None:
        self.size_bytes = size_bytes
        self.checksum = checksum
        self._device, self._open, self._offset = device, open_slot, offset

    async def read_into(self, view: memoryview) -> int:
        """Read the piece from the slot's file. Raises Superseded once the slot has another life, Corrupt."""
        descriptor = self._open()
        try:
            os.set_blocking(descriptor, True)  # with O_NONBLOCK io_uring answers EAGAIN where it would wait
            return await self._device.read(
                descriptor, self._offset, view[: self.size_bytes], checksum=self.checksum
            )
        finally:
            os.close(descriptor)


def slot_payloads(
    pool: SegmentPool, open_slot: Callable[[], int], size_bytes: int, checksum: int | None = None
) -> list[Payload]:
    """Return the extents of a slot; `checksum` is of the only one, where there is only one and it is known."""
    step = pool.extent_bytes
    return [
        SlotPayload(pool.device, open_slot, start, min(step, size_bytes - start), checksum)
        for start in range(0, max(size_bytes, 1), step)
    ]


class GuardedPayload:
    """Supplies a payload unless its object was dropped before it is written."""

    def __init__(self, stored: Stored, payload: Payload) -> None:
        self.size_bytes = payload.size_bytes
        self.checksum = payload.checksum
        self._stored, self._payload = stored, payload

    async def read_into(self, view: memoryview) -> int:
        """Read the payload. Raises Superseded once its object is dropped."""
        if self._stored.dropped:
            raise Superseded(f"object {self._stored.object_id} is no more")
        return await self._payload.read_into(view)


def endings_of(stored: Stored) -> Iterator[Ending]:
    """Yield what must not come back of an object evicted without a Deletion; the sequence is still to be set."""
    if stored.key.kind is Kind.OBJECT:
        yield Ending(stored.object_id, stored.first_sequence, 0, EndingKind.NAME)
        return
    for number in range(len(stored.pieces)):
        yield Ending(stored.object_id, stored.first_sequence, 0, EndingKind.EXTENT, number)


def counted_bytes(record_bytes: int, body_bytes: int) -> int:
    """Return what a record takes of its segment: itself, and its share of the footer."""
    return record_bytes + RECORD_HEADER.size + body_bytes


def has_all(stored: Stored, count: int) -> bool:
    """Return whether an object that is not counted yet has all of so many extents; cut off those behind them."""
    del stored.pieces[count:]
    if stored.pieces and len(stored.pieces) < count:
        stored.pieces.append(None)  # one for all: the count is a row's word, and may be any number
    return stored.readable


def data_header(stored: Stored, number: int) -> dict[str, int | bytes]:
    """Return the fields of a DATA record's header for one extent, without its sequence, length and checksums."""
    return {
        "kind": int(stored.key.kind),
        "key": stored.key.digest,
        "parent": stored.parent,
        "extent_number": number,
        "object_bytes": stored.size_bytes,
        "sealed_at_ns": stored.sealed_at_ns,
        "uid": stored.uid,
        "bucket_id": stored.bucket_id,
        "origin_sequence": stored.writing,
    }
