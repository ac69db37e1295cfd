"""The NVMe tier: objects as extents in a log of segment files, found again by object id.

Responsibility: which object's extents and names lie where, reading and verifying them. Record order, batches and
durability are `tiers.log`; reclaim is `tiers.reclaiming`; what is written, and when, the store decides.

Invariants:
- `objects` has an entry from the moment an object's first record is queued until it is dropped or evicted.
- An object can be read once all of its extents are written (`holds`), and is complete for a restart once its
  META, or for a block its last extent, is durable.
- Whatever was queued for an object is ended by a Deletion when it is dropped. An object that reclaim evicts
  needs none: without its extents its other records mean nothing.
- Until its Deletion is written a crash brings a dropped object back: its newest name stays, and is moved by
  reclaim, so that it never comes back under an earlier one; and one that makes room for a newer object under its
  name stays whole, since its Deletion is behind that one.
- An object that left without a Deletion may be written again under its id. What is left of the earlier writing does
  not complete the later one: each record says which writing it is of.
- Bytes leave this module only after their checksum was found right.
- An extent's payload may be shorter than the extent: what follows in it is zeros.
- What somebody holds (`hold`: a lease) is never evicted, only moved. Dropped meanwhile, its extents stay until the
  last holder lets go. Each time reclaim moves one of them past the Deletion, that is logged again behind it, so that
  none outlives it.
- Durable objects, held ones and what `promise` has counted fit in `durable_capacity_bytes` together, so that reclaim
  always gains something.

Concurrency: the service's trio thread. Reads may overlap reclaim: one that met a segment's next life fails its
checksum and looks the extent up again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import trio

from kvfs import limits
from kvfs.errors import Corrupt, KvfsError, NoSpace, QuotaExceeded, Superseded
from kvfs.formats import RECORD_ALIGNMENT, RECORD_HEADER, EndingKind, RecordType, record_extent
from kvfs.name_rows import BucketRow
from kvfs.records import BucketBody, MetaBody
from tiers.base import Kind, StoreKey
from tiers.device import Device
from tiers.endings import Ending
from tiers.log import Log
from tiers.log_entries import Deletion, Location, Payload, Record
from tiers.segments import Found, SegmentPool

_log = logging.getLogger("kvfs.nvme")


class Fault(Enum):
    """Why the tier lacks an extent of an object."""

    DAMAGED = auto()
    """The tier had it."""
    UNWRITTEN = auto()
    """It was to be written, and DRAM had the object no more."""
    MISREAD = auto()
    """It was to be written, and what DRAM has is not what was sealed: it would be found wrong however often."""


class Piece(NamedTuple):
    """One extent on the device."""

    segment: int
    offset: int
    """Of its record."""
    record_bytes: int
    payload_bytes: int
    checksum: int

    @property
    def payload_at(self) -> int:
        """In the segment."""
        return self.offset + record_extent(self.offset, 0, self.payload_bytes)[0]


@dataclass(slots=True, eq=False)
class Stored:
    """One object of the tier, or the marker of a directory (which has no extents)."""

    key: StoreKey
    object_id: int
    size_bytes: int
    bucket_id: int = 0
    parent: bytes = bytes(16)
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

    @property
    def place(self) -> int:
        """Where it begins, as the table's `location` says it; 0 while it is not written."""
        piece = self.pieces[0] if self.pieces else None
        return 0 if piece is None else piece.segment << limits.SEGMENT_OFFSET_BITS | piece.offset

    @property
    def stays(self) -> bool:
        """Whether reclaim has to move it."""
        return self.kept or self.holders > 0

    def is_at(self, number: int, piece: Piece) -> bool:
        """Whether this is where the extent is; a draft's may have been written again, or cut off."""
        return number < len(self.pieces) and self.pieces[number] is piece

    @property
    def readable(self) -> bool:
        return None not in self.pieces


@dataclass(slots=True)
class NvmeCounts:
    """What status and metrics show."""

    objects_written: int = 0
    bytes_written: int = 0
    objects_evicted: int = 0
    reads: int = 0
    read_bytes: int = 0
    corrupt: int = 0


@dataclass(slots=True)
class _BucketPlace:
    row: BucketRow
    place: tuple[Location, int] | None = None


class SegmentPayload:
    """An extent that reclaim moves."""

    def __init__(self, device: Device, fd: int, piece: Piece) -> None:
        self.size_bytes = piece.payload_bytes
        self.checksum: int | None = piece.checksum
        self._device, self._fd, self._at = device, fd, piece.payload_at

    async def read_into(self, view: memoryview) -> int:
        return await self._device.read(
            self._fd, self._at, view, checksum=self.checksum, payload_bytes=self.size_bytes
        )


class NvmeTier:
    """See the module's header. Made by `tiers.replay.open_nvme`."""

    name = "nvme"

    def __init__(self, pool: SegmentPool, next_sequence: int) -> None:
        self.pool = pool
        self.device = pool.device
        self.log = Log(pool, next_sequence)
        self.objects: dict[int, Stored] = {}
        self.counts = NvmeCounts()
        self.evicted: Callable[[Stored], list[int]] = lambda stored: []
        """Told that reclaim lets an object go; the ids of others that have to leave with it."""
        self.hits_of: Callable[[Stored], int] = lambda stored: 0
        """How often the object was read so far."""
        self.damaged: Callable[[Stored, Fault], bool] = lambda stored, fault: False
        """Told that an object lacks an extent and left the tier; whether it will be written again."""
        self.refused: Callable[[Stored], None] = lambda stored: None
        """Told that an object found no room in the tier."""
        self.written: Callable[[Stored], None] = lambda stored: None
        """Told that an object can be read from here; again when it moved."""
        self.promised_bytes = 0
        """What open drafts are going to write, and what is queued of durable objects."""
        self._buckets: dict[int, _BucketPlace] = {}
        self._leaving: dict[int, Stored] = {}
        """Dropped objects whose Deletion is not written yet."""
        self._gone: dict[int, Stored] = {}
        """Dropped objects whose Deletion is written, and which somebody still holds."""
        self._writings = 0
        self.deletion_ticket = 0
        """Of the newest deletion that waits for nothing: names that became free are settled once it is durable."""
        self._by_number = {segment.number: segment for segment in pool.segments}
        self._loads = trio.CapacityLimiter(limits.DEVICE_BUFFERS)

    def grow(self) -> None:
        """Add a file past the capacity that was asked for: a start that finds it free removes it. Raises NoSpace."""
        segment = self.pool.grow()
        self._by_number[segment.number] = segment

    # --- capacity -----------------------------------------------------------------------------------------

    @property
    def capacity_bytes(self) -> int:
        return self.pool.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Physical: whole segments."""
        return self.capacity_bytes - len(self.pool.free) * self.pool.segment_bytes

    @property
    def live_bytes(self) -> int:
        """Of records that still count."""
        return self.pool.live_bytes

    @property
    def kept_bytes(self) -> int:
        """Of objects that reclaim moves: durable, pinned, held."""
        return self.pool.kept_bytes

    @property
    def durable_capacity_bytes(self) -> int:
        """What durable and open objects may fill: the rest keeps reclaim moving. A segment can end where the next
        extent does not fit: with segments of eight extents an eighth of each may stay empty."""
        usable = len(self.pool.segments) - limits.RESERVED_SEGMENTS - 1
        filled_bytes = self.pool.segment_bytes - self.record_bytes(self.pool.extent_bytes)
        return usable * filled_bytes * limits.DURABLE_PERCENT // 100

    @property
    def write_amplification(self) -> float:
        """Bytes written for each byte that the store asked for."""
        counts = self.log.counts
        asked = counts.appended_bytes - counts.rewritten_bytes
        return counts.appended_bytes / asked if asked else 1.0

    def usage(self) -> dict[str, Any]:
        counts = self.log.counts
        return {
            "name": self.name,
            "backing": self.device.backend,
            "capacity_bytes": self.capacity_bytes,
            "used_bytes": self.used_bytes,
            "live_bytes": self.live_bytes,
            "durable_bytes": self.kept_bytes,
            "durable_capacity_bytes": self.durable_capacity_bytes,
            "segments": len(self.pool.segments),
            "free_segments": len(self.pool.free),
            "bad_segments": sum(segment.bad or segment.failed for segment in self.pool.segments),
            "segment_bytes": self.pool.segment_bytes,
            "objects": len(self.objects),
            "backlog": self.log.backlog,
            "write_amplification": round(self.write_amplification, 4),
            "appended_bytes": counts.appended_bytes,
            "rewritten_bytes": counts.rewritten_bytes,
            "syncs": counts.syncs,
            "segments_reclaimed": counts.segments_reclaimed,
            "write_errors": counts.write_errors,
            "objects_written": self.counts.objects_written,
            "bytes_written": self.counts.bytes_written,
            "objects_evicted": self.counts.objects_evicted,
            "reads": self.counts.reads,
            "read_bytes": self.counts.read_bytes,
            "corrupt": self.counts.corrupt,
            "trouble": None if self.log.trouble is None else str(self.log.trouble),
        }

    def record_bytes(self, size_bytes: int) -> int:
        """What an object of this size takes in the log, its META apart."""
        extent = self.pool.extent_bytes
        whole, rest = divmod(size_bytes, extent)
        total = whole * counted_bytes(record_extent(0, 0, extent)[1], 0)
        return total + (counted_bytes(record_extent(0, 0, rest)[1], 0) if rest or not whole else 0)

    def has_durable_room(self, size_bytes: int) -> bool:
        return self._wanted(self.record_bytes(size_bytes)) <= self.durable_capacity_bytes

    def check_durable_room(self, sizes_bytes: Iterable[int]) -> None:
        """Raises NoSpace when other durable objects of these sizes would not fit."""
        self._check_room(sum(map(self.record_bytes, sizes_bytes)))

    def _wanted(self, more_bytes: int) -> int:
        return self.kept_bytes + self.promised_bytes + more_bytes

    def _check_room(self, more_bytes: int) -> None:
        wanted = self._wanted(more_bytes)
        if wanted > self.durable_capacity_bytes:
            raise NoSpace(
                f"open and durable objects would take {wanted} bytes of the NVMe tier, which has room for "
                f"{self.durable_capacity_bytes}"
            )

    def promise(self, more_bytes: int) -> None:
        """Count what an open draft is going to write, or (negative) has written. Raises NoSpace."""
        if more_bytes > 0:
            self._check_room(more_bytes)
        self.promised_bytes += more_bytes

    @property
    def largest_object_bytes(self) -> int:
        """Of one object, where nothing else has to stay."""
        return min(self.capacity_bytes // limits.OBJECT_SHARE_OF_NVME, self.durable_capacity_bytes)

    # --- writing ------------------------------------------------------------------------------------------

    def extent_count(self, size_bytes: int) -> int:
        return max(1, -(-size_bytes // self.pool.extent_bytes))

    def holds(self, object_id: int) -> bool:
        """Whether the object's bytes can be read from this tier."""
        stored = self.objects.get(object_id)
        return stored is not None and stored.readable

    @property
    def is_evicting(self) -> bool:
        """Whether a crash could bring back, without any index, what reclaim is about to let go."""
        return any(self.log.evicted.values())

    def begin(self, stored: Stored) -> None:
        """Make an object known whose extents follow with `put_extent`."""
        if stored.object_id in self.objects:
            raise Superseded(f"object {stored.object_id} is in the NVMe tier already")
        stored.first_sequence = self.log.next_sequence
        stored.writing = self._writings = max(self._writings + 1, stored.first_sequence)
        self.objects[stored.object_id] = stored

    def put(self, stored: Stored, payloads: Sequence[Payload], meta: MetaBody | None) -> int:
        """Queue an object, all of its extents and then its name; the ticket that makes it durable."""
        self.begin(stored)
        stored.pieces = [None] * len(payloads)
        for number, payload in enumerate(payloads):
            self.put_extent(stored, number, payload)
        if meta is not None:
            self.put_name(stored, meta)
        self.counts.objects_written += 1
        self.counts.bytes_written += stored.size_bytes
        return self.log.ticket

    def put_extent(self, stored: Stored, number: int, payload: Payload) -> int:
        """Queue one extent; over an earlier one of the same number once it is written. A durable object's room is
        promised meanwhile, so that nobody else is told that it is free."""
        queued_bytes = self.record_bytes(payload.size_bytes)
        self._note_queued(stored, queued_bytes)

        def end_promise() -> None:
            nonlocal queued_bytes
            self._note_queued(stored, -queued_bytes)
            queued_bytes = 0

        def written(location: Location, record_bytes: int, checksum: int) -> None:
            end_promise()
            if stored.dropped:
                return
            self.place(stored, number, Piece(*location, record_bytes, payload.size_bytes, checksum))

        def lost(error: KvfsError) -> None:
            end_promise()
            if stored.dropped or stored.pieces[number] is not None:
                return
            if not isinstance(error, Superseded):
                _log.error("object %d is not written to NVMe: %s", stored.object_id, error)
            if isinstance(error, NoSpace):  # no deletion: without this extent the others mean nothing
                self._forget(stored)
                self.refused(stored)
            else:
                self._lose(stored, Fault.MISREAD if isinstance(error, Corrupt) else Fault.UNWRITTEN)

        return self.log.append(
            Record(
                RecordType.DATA,
                stored.object_id,
                data_header(stored, number),
                payload=Guarded(stored, payload) if payload.size_bytes else None,
                written=written,
                lost=lost,
                is_essential=lambda: stored.kept,
            )
        )

    def _note_queued(self, stored: Stored, more_bytes: int) -> None:
        stored.queued_bytes += more_bytes
        if stored.kept:
            self.promised_bytes += more_bytes

    def put_name(self, stored: Stored, meta: MetaBody, *, is_final: bool = False) -> int:
        """Queue what the object is called from here on; the ticket. `is_final`: no more as before, in any case."""
        record = self.meta_record(stored, meta.encode(), meta.row.size_bytes)
        record.first_sequence, record.is_final = stored.first_sequence, is_final
        record.ends = EndingKind.NAME if stored.is_named else None
        stored.is_named = True
        return self.log.append(record)

    def put_marker(self, object_id: int, bucket_id: int, meta: MetaBody, *, kept: bool) -> int:
        """Queue the name of a directory; the ticket."""
        stored = self.objects.get(object_id)
        if stored is None:
            key = StoreKey(Kind.OBJECT, object_id.to_bytes(16, "big"))
            stored = Stored(key, object_id, 0, bucket_id, kept=kept, first_sequence=self.log.next_sequence)
            self.objects[object_id] = stored
        return self.put_name(stored, meta)

    def meta_record(
        self, stored: Stored, body: bytes, size_bytes: int, *, moved: Found | None = None
    ) -> Record:
        """`size_bytes`: of the object as it has this name, where a draft may have grown since. `moved`: the record that
        reclaim writes again; it counts until the copy is durable."""
        original = stored.meta

        def written(location: Location, record_bytes: int, _: int) -> None:
            if self.known(stored.object_id) is stored:
                self._set_meta(stored, (location, counted_bytes(record_bytes, len(body))))

        def lost(error: KvfsError) -> None:
            if self.known(stored.object_id) is stored:
                self._set_meta(stored, original)

        origin = 0 if moved is None else moved.header["origin_sequence"] or moved.header["sequence"]
        header: dict[str, int | bytes] = {
            "kind": int(stored.key.kind),
            "key": stored.key.digest,
            "object_bytes": size_bytes,
            "bucket_id": stored.bucket_id,
            "origin_sequence": origin,
        }
        return Record(
            RecordType.META, stored.object_id, header, body, written=written, lost=lost if moved else None
        )

    def drop(self, object_id: int, *, behind: bool = False, is_final: bool = False) -> int | None:
        """The object or directory is no more; the ticket of its deletion, None when the log never heard of it.

        `behind`: a Barrier was queued before, behind what replaces the object: its bytes stay until the deletion is
        written. `is_final`: also where no record can be written.
        """
        stored = self.objects.get(object_id)
        if stored is None:
            return None
        self._leaving[object_id] = self.objects.pop(object_id)
        stored.is_replaced = behind
        if not behind and not stored.holders:
            self._forget_bytes(stored)
        written = partial(self._deleted, stored)
        ticket = self.log.append(Deletion(object_id, written, stored.first_sequence, is_final=is_final))
        if not behind:
            self.deletion_ticket = ticket
        return ticket

    def _deleted(self, stored: Stored) -> None:
        """Its Deletion is written: who holds it is the last with a use for its extents."""
        if not stored.holders:
            self._forget(stored)
        elif self._leaving.pop(stored.object_id, None) is stored:
            self._gone[stored.object_id] = stored
            self._set_meta(stored, None)

    def forget(self, object_id: int) -> None:
        """The object's records count no more, but may be followed by others of the same id."""
        stored = self.objects.get(object_id)
        if stored is not None:
            self._forget(stored)

    def _forget(self, stored: Stored) -> None:
        if self.known(stored.object_id) is stored:
            for where in (self.objects, self._leaving, self._gone):
                where.pop(stored.object_id, None)
            self._forget_bytes(stored)
            self._set_meta(stored, None)

    def _forget_bytes(self, stored: Stored) -> None:
        stored.dropped = True
        for number in range(len(stored.pieces)):
            self._set_piece(stored, number, None)

    def hold(self, stored: Stored) -> None:
        """Take a lease: the object's extents stay readable until `release`. Raises Superseded, QuotaExceeded."""
        if stored.dropped:
            raise Superseded(f"object {stored.object_id} has left the NVMe tier")
        if not stored.stays:
            try:
                self._check_room(self.record_bytes(stored.size_bytes))
            except NoSpace as error:
                raise QuotaExceeded(f"object {stored.object_id} cannot be held open: {error}") from error
        self._restay(stored, kept=stored.kept, holders=stored.holders + 1)

    def release(self, stored: Stored) -> None:
        """End a lease; with the last one an object that was dropped meanwhile gives its space back."""
        self._restay(stored, kept=stored.kept, holders=stored.holders - 1)
        if stored.holders:
            return
        if self._gone.get(stored.object_id) is stored:
            self._forget(stored)
        elif self._leaving.get(stored.object_id) is stored and not stored.is_replaced:
            self._forget_bytes(stored)

    def put_bucket(self, row: BucketRow) -> int:
        """Queue a bucket as it is now; the ticket."""
        place = self._buckets.setdefault(row.bucket_id, _BucketPlace(row))
        place.row = row
        return self.log.append(self._bucket_record(place))

    def bucket_record_at(self, bucket_id: int, here: Location) -> Record | None:
        """The bucket as it is now, if its record here is the one that counts."""
        place = self._buckets.get(bucket_id)
        live = place is not None and place.place is not None and place.place[0] == here
        return self._bucket_record(place) if place is not None and live else None

    def _bucket_record(self, place: _BucketPlace) -> Record:
        bucket_id = place.row.bucket_id

        body = BucketBody(place.row).encode()
        original = place.place

        def move_to(found: tuple[Location, int] | None) -> None:
            if self._buckets.get(bucket_id) is place:
                self._account(place.place, -1)
                place.place = found
                self._account(place.place, 1)

        def written(location: Location, record_bytes: int, _: int) -> None:
            move_to((location, counted_bytes(record_bytes, len(body))))

        header: dict[str, int | bytes] = {"bucket_id": bucket_id}
        return Record(
            RecordType.BUCKET, bucket_id, header, body, written=written, lost=lambda error: move_to(original)
        )

    def drop_bucket(self, bucket_id: int) -> None:
        place = self._buckets.pop(bucket_id, None)
        if place is not None:
            self._account(place.place, -1)
            self.deletion_ticket = self.log.append(Deletion(bucket_id, is_final=True))

    # --- books --------------------------------------------------------------------------------------------

    def adopt(self, stored: Stored) -> None:
        """Count an object that a replay found, whose places are set."""
        self.objects[stored.object_id] = stored
        for piece in stored.pieces:
            if piece is not None:
                self._count_piece(piece, stored.stays, 1)
        self._account(stored.meta, 1)

    def adopt_bucket(self, row: BucketRow, place: tuple[Location, int]) -> None:
        self._buckets[row.bucket_id] = _BucketPlace(row, place)
        self._account(place, 1)

    def keep(self, stored: Stored, kept: bool) -> None:
        """Have reclaim move the object from now on, or not any more."""
        self._restay(stored, kept=kept, holders=stored.holders)

    def _restay(self, stored: Stored, *, kept: bool, holders: int) -> None:
        stayed = stored.stays
        self.promised_bytes += (kept - stored.kept) * stored.queued_bytes
        stored.kept, stored.holders = kept, holders
        if stored.stays != stayed:
            for piece in stored.pieces:
                if piece is not None:
                    self._count_piece(piece, stayed, -1)
                    self._count_piece(piece, stored.stays, 1)

    def is_durable(self, bucket_id: int) -> bool:
        place = self._buckets.get(bucket_id)
        return place is not None and place.row.class_ == "durable"

    def resize(self, stored: Stored, size_bytes: int) -> None:
        """A draft has another size: extents past its end are no more, and new ones are not written."""
        count = self.extent_count(size_bytes)
        for number in range(count, len(stored.pieces)):
            self._set_piece(stored, number, None)
        del stored.pieces[count:]
        stored.pieces += [None] * (count - len(stored.pieces))
        stored.size_bytes = size_bytes

    def forget_piece(self, stored: Stored, number: int) -> None:
        """An extent of a draft has no bytes any more; it is to be written again before the draft is sealed."""
        self._set_piece(stored, number, None)

    def place(self, stored: Stored, number: int, piece: Piece) -> None:
        """An extent was written, here."""
        self._set_piece(stored, number, piece)
        if stored.readable and self.objects.get(stored.object_id) is stored:
            self.written(stored)

    def payload_of(self, piece: Piece) -> SegmentPayload:
        """What is written at this place, to be written again."""
        return SegmentPayload(self.device, self._by_number[piece.segment].fd, piece)

    def put_back(self, stored: Stored, number: int, piece: Piece) -> None:
        """A copy of the extent may not count: it is where it was."""
        self._set_piece(stored, number, piece)

    def _set_piece(self, stored: Stored, number: int, piece: Piece | None) -> None:
        old = stored.pieces[number]
        if old is not None:
            self._count_piece(old, stored.stays, -1)
        stored.pieces[number] = piece
        if piece is not None:
            self._count_piece(piece, stored.stays, 1)

    def _count_piece(self, piece: Piece, kept: bool, sign: int) -> None:
        counted = sign * counted_bytes(piece.record_bytes, 0)
        self.pool.count(self._by_number[piece.segment], counted, counted if kept else 0)

    def _set_meta(self, stored: Stored, place: tuple[Location, int] | None) -> None:
        self._account(stored.meta, -1)
        stored.meta = place
        self._account(place, 1)

    def _account(self, place: tuple[Location, int] | None, sign: int) -> None:
        """Names and buckets always move, so they count as kept."""
        if place is not None:
            (number, _), counted = place
            self.pool.count(self._by_number[number], sign * counted, sign * counted)

    # --- reading ------------------------------------------------------------------------------------------

    async def read_extent(self, stored: Stored, number: int, into: memoryview) -> int:
        """Read one extent, verified; its length. `into` has room for whole RECORD_ALIGNMENT units.

        Raises Superseded when the object left the tier, Corrupt (and then it leaves), DeviceFailed.
        """
        size_bytes = await self.verify_extent(stored, number, into)
        if size_bytes:
            self.counts.reads += 1
            self.counts.read_bytes += size_bytes
        return size_bytes

    async def verify_extent(self, stored: Stored, number: int, into: memoryview) -> int:
        """As `read_extent`, for upkeep: it is not counted as a read."""
        while True:
            piece = stored.pieces[number] if not stored.dropped and number < len(stored.pieces) else None
            if piece is None:
                raise Superseded(f"object {stored.object_id} has left the NVMe tier")
            aligned = -(-piece.payload_bytes // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
            if not aligned:
                return 0
            try:
                await self.device.read(
                    self._by_number[piece.segment].fd,
                    piece.payload_at,
                    into[:aligned],
                    checksum=piece.checksum,
                    payload_bytes=piece.payload_bytes,
                )
            except Corrupt as error:
                if not stored.dropped and stored.is_at(number, piece):
                    self.damage(stored, number, error)
                    raise
                continue
            return piece.payload_bytes

    def damage(self, stored: Stored, number: int, error: KvfsError) -> None:
        """An extent is not what was written: the object leaves the tier, and is a miss unless DRAM has it."""
        self.counts.corrupt += 1
        _log.error("object %d, extent %d on NVMe: %s", stored.object_id, number, error)
        self._lose(stored, Fault.DAMAGED)

    def _lose(self, stored: Stored, fault: Fault) -> None:
        """An object leaves the tier with an extent that it lacks. Its deletion is logged only if it is not written
        again: a TOMBSTONE ends the later records of an id, too."""
        was_here = self.objects.get(stored.object_id) is stored
        self._forget(stored)
        if was_here and not self.damaged(stored, fault):
            gone = Deletion(stored.object_id, first_sequence=stored.first_sequence)
            self.deletion_ticket = self.log.append(gone)

    async def load(self, stored: Stored, into: memoryview) -> None:
        """Read a whole object, verified extent by extent. `into` is page-aligned and has whole RECORD_ALIGNMENT units.

        Raises Superseded, Corrupt, DeviceFailed.
        """
        extent = self.pool.extent_bytes
        numbers = range(len(stored.pieces))
        if len(numbers) == 1:
            await self._load_extent(stored, 0, into)
            return
        failures: list[KvfsError] = []

        async def one(number: int) -> None:
            async with self._loads:
                if not failures:
                    try:
                        await self._load_extent(stored, number, into[number * extent :])
                    except KvfsError as error:
                        failures.append(error)

        async with trio.open_nursery() as nursery:
            for number in numbers:
                nursery.start_soon(one, number)
        if failures:
            raise failures[0]

    async def _load_extent(self, stored: Stored, number: int, into: memoryview) -> None:
        """One extent to where it belongs in the object, with the zeros that its record does not hold."""
        whole = min(self.pool.extent_bytes, stored.size_bytes - number * self.pool.extent_bytes)
        piece = stored.pieces[number] if number < len(stored.pieces) else None
        if (
            piece is not None and piece.payload_bytes > whole
        ):  # a draft's, that had grown when the service was killed
            async with self.device.buffer() as view:
                await self.read_extent(stored, number, view)
                into[:whole] = view[:whole]
            return
        length = await self.read_extent(stored, number, into)
        if length < whole:
            into[length:whole] = bytes(whole - length)

    async def read(self, stored: Stored, offset: int, into: memoryview) -> int:
        """Read a range, each extent that it touches verified whole; the count, short only at the object's end.

        Raises Superseded, Corrupt, DeviceFailed.
        """
        extent = self.pool.extent_bytes
        end = min(offset + len(into), stored.size_bytes)
        done = 0
        async with self.device.buffer() as view:
            while offset + done < end:
                number, start = divmod(offset + done, extent)
                length = await self.read_extent(stored, number, view)
                count = min(extent - start, end - offset - done)
                there = min(max(length - start, 0), count)
                into[done : done + there] = view[start : start + there]
                into[done + there : done + count] = bytes(count - there)
                done += count
        return done

    # --- reclaim ------------------------------------------------------------------------------------------

    def known(self, object_id: int) -> Stored | None:
        """The object, one that is dropped and still of use included."""
        return self.objects.get(object_id) or self._leaving.get(object_id) or self._gone.get(object_id)

    def is_deleted(self, object_id: int) -> bool:
        """Whether the object's Deletion is written, and somebody still holds it."""
        return object_id in self._gone

    def evict(self, stored: Stored, segment: int) -> None:
        """Let an object go that has an extent in this segment, and what has to leave with it."""
        self.log.evicted.setdefault(segment, []).extend(_endings_of(stored))
        leaving = self.evicted(stored)
        self._forget(stored)
        self.counts.objects_evicted += 1
        for object_id in leaving:
            self.drop(object_id)

    def released(self, segment: int) -> None:
        """The segment has no records any more."""
        self.log.evicted.pop(segment, None)


def _endings_of(stored: Stored) -> Iterator[Ending]:
    """What of an object that left without a Deletion must not come back; the sequence is still to be set."""
    if stored.key.kind is Kind.OBJECT:
        yield Ending(stored.object_id, stored.first_sequence, 0, EndingKind.NAME)
        return
    for number in range(len(stored.pieces)):
        yield Ending(stored.object_id, stored.first_sequence, 0, EndingKind.EXTENT, number)


class Guarded:
    """A payload whose object may be dropped before it is written."""

    def __init__(self, stored: Stored, payload: Payload) -> None:
        self.size_bytes = payload.size_bytes
        self.checksum = payload.checksum
        self._stored, self._payload = stored, payload

    async def read_into(self, view: memoryview) -> int:
        if self._stored.dropped:
            raise Superseded(f"object {self._stored.object_id} is no more")
        return await self._payload.read_into(view)


def counted_bytes(record_bytes: int, body_bytes: int) -> int:
    """What a record takes of its segment: itself, and its share of the footer."""
    return record_bytes + RECORD_HEADER.size + body_bytes


def has_all(stored: Stored, count: int) -> bool:
    """Whether so many extents are there, of an object that is not counted yet and has any; those behind them go."""
    if stored.pieces and len(stored.pieces) != count:
        stored.pieces = (stored.pieces + [None] * count)[:count]
    return stored.readable


def data_header(stored: Stored, number: int) -> dict[str, int | bytes]:
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
