"""The NVMe tier: objects as extents in a log of segment files, found again by object id.

Responsibility: which object's extents and names lie where. Reading them is `tiers.nvme.extent_reader`'s; record
order, batches and durability are `tiers.log.log`; reclaim is `tiers.nvme.reclaimer`. The journal decides what is
written, and when.

Invariants:
- `objects` has an entry from the moment an object's first record is queued until it is dropped or evicted.
- An object can be read once all of its extents are written (`holds`), and is complete for a restart once its
  META, or for a block its last extent, is durable.
- Whatever was queued for an object is ended by a Deletion when it is dropped. An object that reclaim evicts
  needs none: without its extents its other records mean nothing.
- Until its Deletion is written a crash brings a dropped object back: its newest name stays, and is moved by
  reclaim, so that it never comes back under an earlier one; and one that makes room for a newer object under its
  name stays whole, since its Deletion is behind that one.
- An object that was evicted may be written again under its id. What is left of the earlier writing does
  not complete the later one: each record says which writing it is of.
- What somebody holds (`hold`: a lease) is never evicted, only moved. Dropped meanwhile, its extents stay until the
  last holder closes. Each time reclaim moves one of them past the Deletion, that is logged again behind it, so that
  none outlives it.
- Durable objects, held ones and what `promise` has counted fit in `durable_capacity_bytes` together, so that reclaim
  always gains something.

Concurrency: the service's trio thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from kvfs import limits
from kvfs.errors import Corrupt, KvfsError, NoSpace, QuotaExceeded, Superseded
from kvfs.formats import EndingKind, RecordType, record_extent
from kvfs.index.rows import LINK, BucketRow
from tiers.log.entries import Barrier, Deletion, Location, Payload, Record
from tiers.log.log import Log
from tiers.log.pool import SegmentPool
from tiers.log.records import MetaBody
from tiers.log.segments import LoggedRecord
from tiers.model.tier import Kind, StoreKey
from tiers.nvme.bucket_records import BucketRecords
from tiers.nvme.stored import (
    Fault,
    GuardedPayload,
    NvmeCounts,
    NvmeObserver,
    Piece,
    SegmentPayload,
    Stored,
    StoredObjects,
    counted_bytes,
    data_header,
    endings_of,
)

_log = logging.getLogger("kvfs.nvme")


class NvmeTier:
    """See the module's header. Made by `tiers.recovery.open_nvme.open_nvme`."""

    name = "nvme"

    def __init__(self, pool: SegmentPool) -> None:
        self.pool = pool
        self.device = pool.device
        self.log = Log(pool, self._written_again_at)
        self.objects = StoredObjects(lambda: self.log.durable_ticket)
        self.counts = NvmeCounts()
        self.observer = NvmeObserver()
        """Notified of what becomes of objects; the journal attaches itself here."""
        self.promised_bytes = 0
        """What open drafts are going to write, and what is queued of durable objects."""
        self.buckets = BucketRecords(self._account)
        self._deleting: dict[int, Stored] = {}
        """Dropped objects whose Deletion is not written yet."""
        self._held: dict[int, Stored] = {}
        """Dropped objects whose Deletion is written, and which somebody still holds."""
        self._writings = 0
        self._vacated: dict[tuple[bytes, bytes], int] = {}
        """Names that durable objects had, as (bucket, key), each with the ticket of the record of the next one; in the
        order of the tickets, while those are not durable."""
        self.deletion_ticket = 0
        """Of the newest ordered deletion that waits for nothing."""
        self._segments = {segment.number: segment for segment in pool.segments}

    async def grow(self) -> None:
        """Add a file past the capacity that was asked for: a start that finds it free removes it. Raises NoSpace."""
        segment = await self.pool.grow()
        self._segments[segment.number] = segment

    @property
    def capacity_bytes(self) -> int:
        """Return the bytes of all segments."""
        return self.pool.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Return the bytes of segments in use."""
        return self.capacity_bytes - len(self.pool.free) * self.pool.segment_bytes

    @property
    def durable_capacity_bytes(self) -> int:
        """Return what durable and open objects may fill: the rest keeps reclaim moving. A segment can end where the
        next extent does not fit: with segments of eight extents an eighth of each may stay empty."""
        usable = len(self.pool.segments) - limits.RESERVED_SEGMENTS - 1
        filled_bytes = self.pool.segment_bytes - self.record_bytes(self.pool.extent_bytes)
        return usable * filled_bytes * limits.DURABLE_PERCENT // 100

    @property
    def write_amplification(self) -> float:
        """Return how many bytes were written for each one that the store asked for."""
        counts = self.log.counts
        asked = counts.appended_bytes - counts.rewritten_bytes
        return counts.appended_bytes / asked if asked else 1.0

    def usage(self) -> dict[str, Any]:
        """Describe the tier as status shows it."""
        return {
            "name": self.name,
            "backing": self.device.backend,
            "capacity_bytes": self.capacity_bytes,
            "used_bytes": self.used_bytes,
            "live_bytes": self.pool.live_bytes,
            "durable_bytes": self.pool.kept_bytes,
            "durable_capacity_bytes": self.durable_capacity_bytes,
            "segments": len(self.pool.segments),
            "free_segments": len(self.pool.free),
            "bad_segments": sum(segment.bad or segment.failed for segment in self.pool.segments),
            "segment_bytes": self.pool.segment_bytes,
            "objects": len(self.objects),
            "backlog": self.log.backlog,
            "away_since_ns": self.device.drive.away_since_ns,
            "absences": self.device.drive.absences,
            "late_operations": self.device.late_operations,
            "write_amplification": round(self.write_amplification, 4),
            **asdict(self.log.counts),
            **asdict(self.counts),
            "trouble": None if self.log.trouble is None else str(self.log.trouble),
        }

    def record_bytes(self, size_bytes: int) -> int:
        """Return what an object of this size takes in the log, its META apart."""
        extent = self.pool.extent_bytes
        whole, rest = divmod(size_bytes, extent)
        total = whole * counted_bytes(record_extent(0, 0, extent)[1], 0)
        return total + (counted_bytes(record_extent(0, 0, rest)[1], 0) if rest or not whole else 0)

    def has_durable_room(self, size_bytes: int) -> bool:
        """Return whether so many durable bytes fit beside those that are there or on their way."""
        return self._wanted(self.record_bytes(size_bytes)) <= self.durable_capacity_bytes

    def check_durable_room(self, sizes_bytes: Iterable[int]) -> None:
        """Check that other durable objects of these sizes fit. Raises NoSpace."""
        self._check_room(sum(map(self.record_bytes, sizes_bytes)))

    def _wanted(self, more_bytes: int) -> int:
        return self.pool.kept_bytes + self.promised_bytes + more_bytes

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
        """Return the limit of one object, where nothing else has to stay."""
        return min(self.capacity_bytes // limits.OBJECT_SHARE_OF_NVME, self.durable_capacity_bytes)

    def extent_count(self, size_bytes: int) -> int:
        """Return how many extents an object of this size has; an empty one has one."""
        return max(1, -(-size_bytes // self.pool.extent_bytes))

    def holds(self, object_id: int) -> bool:
        """Return whether the object's bytes can be read from this tier."""
        return self.objects.is_readable(object_id)

    def begin(self, stored: Stored) -> None:
        """Make an object known whose extents follow with `put_extent`."""
        if stored.object_id in self.objects:
            raise Superseded(f"object {stored.object_id} is in the NVMe tier already")
        stored.first_sequence = self.log.writer.next_sequence
        stored.writing = self._writings = max(self._writings + 1, stored.first_sequence)
        self.objects[stored.object_id] = stored

    def put(self, stored: Stored, payloads: Sequence[Payload], meta: MetaBody | None) -> int:
        """Queue an object, all of its extents and then its name; return the ticket that makes it durable."""
        self.begin(stored)
        stored.pieces = [None] * len(payloads)
        for number, payload in enumerate(payloads):
            self.put_extent(stored, number, payload)
        if meta is not None:
            self.put_name(stored, meta)
        self.counts.objects_written += 1
        self.counts.bytes_written += stored.size_bytes
        return self.log.queue.ticket

    def put_extent(self, stored: Stored, number: int, payload: Payload) -> int:
        """Queue one extent; over an earlier one of the same number once it is written. A durable object's room is
        promised meanwhile, so that nobody else finds it free."""
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
            stored.problem = error
            if not isinstance(error, Superseded):
                _log.error("object %d is not written to NVMe: %s", stored.object_id, error)
            if isinstance(error, NoSpace):  # no deletion: without this extent the others mean nothing
                self._detach(stored)
                self.observer.refused(stored)
            else:
                self._detach_faulty(stored, Fault.MISREAD if isinstance(error, Corrupt) else Fault.UNWRITTEN)

        return self.log.append(
            Record(
                RecordType.DATA,
                stored.object_id,
                data_header(stored, number),
                payload=GuardedPayload(stored, payload) if payload.size_bytes else None,
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
        """Queue the name that the object has from here on; return the ticket. `is_final`: the earlier name ends
        even where no record can be written."""
        self._keep_order(meta)
        record = self.meta_record(stored, meta.encode(), 0 if meta.row.flags & LINK else meta.row.size_bytes)
        record.first_sequence, record.is_final = stored.first_sequence, is_final
        record.ends = EndingKind.NAME if stored.is_named else None
        stored.is_named = True
        return self.log.append(record)

    def vacate(self, bucket: bytes, key: bytes, ticket: int) -> None:
        """Note that a durable object has another name from the entry with this ticket on."""
        self._drop_settled()
        self._vacated.pop((bucket, key), None)
        self._vacated[bucket, key] = ticket

    def _drop_settled(self) -> None:
        while self._vacated and (first := next(iter(self._vacated.items())))[1] <= self.log.durable_ticket:
            del self._vacated[first[0]]

    def _keep_order(self, meta: MetaBody) -> None:
        """Have a name written once the record is durable by which an object went from it: that one must not be found
        under this name, where the newer one counts."""
        self._drop_settled()
        if (meta.bucket, meta.key) in self._vacated:
            self.log.append(Barrier())

    def put_marker(self, object_id: int, bucket_id: int, meta: MetaBody, *, kept: bool) -> int:
        """Queue the name of a directory or symbolic link; return the ticket."""
        stored = self.objects.get(object_id)
        if stored is None:
            key = StoreKey(Kind.OBJECT, object_id.to_bytes(16, "big"))
            stored = Stored(
                key, object_id, 0, bucket_id, kept=kept, first_sequence=self.log.writer.next_sequence
            )
            self.objects[object_id] = stored
        return self.put_name(stored, meta)

    def meta_record(
        self, stored: Stored, body: bytes, size_bytes: int, *, moved: LoggedRecord | None = None
    ) -> Record:
        """Make the record of a name. `size_bytes`: of the object as it has this name, where a draft may have grown
        since. `moved`: the record that reclaim writes again; it counts until the copy is durable."""
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
        """Drop an object or directory; return the ticket of its deletion, None when the log has nothing of it.

        `behind`: it is queued behind what replaces the object: its bytes stay until the deletion is written.
        `is_final`: also where no record can be written.
        """
        stored = self.objects.pop(object_id)
        if stored is None:
            return None
        self._deleting[object_id] = stored
        stored.is_replaced = behind
        if not behind and not stored.holders:
            self._drop_extents(stored)
        written = partial(self._deleted, stored)
        ordered = self._is_ordered(stored)
        ticket = self.log.append(
            Deletion(object_id, written, stored.first_sequence, False, is_final, ordered)
        )
        if ordered and not behind:
            self.deletion_ticket = ticket
        return ticket

    def _is_ordered(self, stored: Stored) -> bool:
        """Return whether a deletion is durable before what follows: all but those of a cache's names, which a start
        after a kill has from the index."""
        is_block = stored.key.kind is Kind.BLOCK
        return stored.kept or is_block or self.buckets.is_durable(stored.bucket_id)

    def _deleted(self, stored: Stored) -> None:
        """Detach an object whose Deletion is written, once nobody holds it."""
        if not stored.holders:
            self._detach(stored)
        elif self._deleting.pop(stored.object_id, None) is stored:
            self._held[stored.object_id] = stored
            self._set_meta(stored, None)

    def detach(self, object_id: int) -> None:
        """Count an object's records no more; others of the same id may follow."""
        stored = self.objects.get(object_id)
        if stored is not None:
            self._detach(stored)

    def _detach(self, stored: Stored) -> None:
        if self.known(stored.object_id) is stored:
            self.objects.pop(stored.object_id)
            for where in (self._deleting, self._held):
                where.pop(stored.object_id, None)
            self._drop_extents(stored)
            self._set_meta(stored, None)

    def _drop_extents(self, stored: Stored) -> None:
        stored.dropped = True
        for number in range(len(stored.pieces)):
            self.set_piece(stored, number, None)

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
        """End a lease; with the last one the space of an object that was dropped meanwhile is free."""
        self._restay(stored, kept=stored.kept, holders=stored.holders - 1)
        if stored.holders:
            return
        if self._held.get(stored.object_id) is stored:
            self._detach(stored)
        elif self._deleting.get(stored.object_id) is stored and not stored.is_replaced:
            self._drop_extents(stored)

    def put_bucket(self, row: BucketRow) -> int:
        """Queue a bucket as it is now; return the ticket."""
        return self.log.append(self.buckets.put(row))

    def drop_bucket(self, bucket_id: int) -> None:
        """Queue the deletion of a bucket."""
        if self.buckets.remove(bucket_id):
            self.deletion_ticket = self.log.append(Deletion(bucket_id, is_final=True))

    def adopt(self, stored: Stored) -> None:
        """Count an object of a replay, whose places are set."""
        self.objects[stored.object_id] = stored
        for piece in stored.pieces:
            if piece is not None:
                self._count_piece(piece, stored.stays, 1)
        self._account(stored.meta, 1)

    def count(self, segment: int, live_bytes: int, kept_bytes: int) -> None:
        """Count records of a replay that reclaim finds in this segment, and those that it has to move."""
        self.pool.count(self._segments[segment], live_bytes, kept_bytes)

    def keep(self, stored: Stored, kept: bool) -> None:
        """Have reclaim move the object, or evict it again."""
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

    def resize(self, stored: Stored, size_bytes: int) -> None:
        """Set the size of a draft: extents past its end are dropped, and new ones are not written."""
        count = self.extent_count(size_bytes)
        for number in range(count, len(stored.pieces)):
            self.set_piece(stored, number, None)
        del stored.pieces[count:]
        stored.pieces += [None] * (count - len(stored.pieces))
        stored.size_bytes = size_bytes

    def place(self, stored: Stored, number: int, piece: Piece) -> None:
        """Record where an extent was written."""
        self.set_piece(stored, number, piece)
        if stored.readable and self.objects.get(stored.object_id) is stored:
            self.observer.written(stored)

    def payload_of(self, piece: Piece) -> SegmentPayload:
        """Return what is written at this place, to be written again."""
        return SegmentPayload(self.device, self._segments[piece.segment].fd, piece)

    def set_piece(self, stored: Stored, number: int, piece: Piece | None) -> None:
        """Record where an extent is, or that it is nowhere, and count it there alone."""
        old = stored.pieces[number]
        if old is not None:
            self._count_piece(old, stored.stays, -1)
        stored.pieces[number] = piece
        if piece is not None:
            self._count_piece(piece, stored.stays, 1)

    def _count_piece(self, piece: Piece, kept: bool, sign: int) -> None:
        counted = sign * counted_bytes(piece.record_bytes, 0)
        self.pool.count(self._segments[piece.segment], counted, counted if kept else 0)

    def _set_meta(self, stored: Stored, place: tuple[Location, int] | None) -> None:
        self._account(stored.meta, -1)
        stored.meta = place
        self._account(place, 1)

    def _account(self, place: tuple[Location, int] | None, sign: int) -> None:
        """Count the record of a name or bucket, which always moves and so counts as kept."""
        if place is not None:
            (number, _), counted = place
            self.pool.count(self._segments[number], sign * counted, sign * counted)

    def damage(self, stored: Stored, number: int, error: KvfsError) -> None:
        """Detach an object with an extent that is not what was written: a miss unless DRAM has it."""
        self.counts.corrupt += 1
        stored.problem = error
        _log.error("object %d, extent %d on NVMe: %s", stored.object_id, number, error)
        self._detach_faulty(stored, Fault.DAMAGED)

    def _detach_faulty(self, stored: Stored, fault: Fault) -> None:
        """Detach an object that lacks an extent. Its deletion is logged only if it is not written again: a TOMBSTONE
        ends the later records of an id, too."""
        was_here = self.objects.get(stored.object_id) is stored
        self._detach(stored)
        if was_here and not self.observer.damaged(stored, fault):
            self.log.append(Deletion(stored.object_id, first_sequence=stored.first_sequence))

    def known(self, object_id: int) -> Stored | None:
        """Return the object, be it dropped and its records still of use."""
        return self.objects.get(object_id) or self._deleting.get(object_id) or self._held.get(object_id)

    def _written_again_at(self, object_id: int) -> int | None:
        stored = self.known(object_id)
        return None if stored is None else stored.first_sequence

    def is_deleted(self, object_id: int) -> bool:
        """Return whether the object's Deletion is written, and somebody still holds it."""
        return object_id in self._held

    def evict(self, stored: Stored, segment: int) -> None:
        """Evict an object that has an extent in this segment, and what has to go with it."""
        self.log.evicted.setdefault(segment, []).extend(endings_of(stored))
        others = self.observer.evicted(stored)
        self._detach(stored)
        self.counts.objects_evicted += 1
        for object_id in others:
            self.drop(object_id)
