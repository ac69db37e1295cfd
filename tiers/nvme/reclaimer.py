"""Reclaim of the NVMe tier: segments are freed, and what must stay is written again elsewhere.

Responsibility: carry out what `tiers.nvme.reclaim_policy` decides, on the records of one segment at a time.

Invariants:
- A segment's file is used again only after what was moved out of it is durable.
- A record is moved only if it is the one that counts; what is dropped meanwhile is not moved, or its copy not counted.
- An object is evicted as a whole, with what is of no use without it.
- A TOMBSTONE or RENAME is moved while any segment may hold what it ends; and an extent that is moved past its
  object's TOMBSTONE, since somebody holds it, has another one behind it.

Concurrency: the service's trio thread, as part of the log's writing; no batch of the queue is written meanwhile.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from kvfs import limits
from kvfs.errors import Corrupt, DeviceAway, DeviceFailed, KvfsError
from kvfs.formats import RecordType
from kvfs.system import crashpoints
from tiers.log.entries import Deletion, Entry, Location, Record
from tiers.log.records import TombstoneBody
from tiers.log.segments import LoggedRecord, Segment
from tiers.nvme.reclaim_policy import Fate, MoveBudget, SegmentView, choose_segment, tombstone_counts
from tiers.nvme.stored import GuardedPayload, Piece, Stored, data_header
from tiers.nvme.tier import NvmeTier

_log = logging.getLogger("kvfs.nvme")


class Reclaimer:
    """Reclaims the segments of one NVMe tier; `reclaim` is for `SegmentWriter.reclaim`."""

    def __init__(self, nvme: NvmeTier) -> None:
        self._nvme = nvme
        self._pool = nvme.pool
        self._log = nvme.log

    async def reclaim(self) -> bool:
        """Free one segment, moving what must stay; return False if none would gain anything. Raises DeviceFailed,
        NoSpace."""
        is_changing = self._pool.device.is_changing
        closed = [s for s in self._pool.used() if s.closed and not (s.bad or s.failed or is_changing(s.fd))]
        views = [SegmentView(s.number, s.sequence, self._pool.segment_bytes, s.kept_bytes) for s in closed]
        short = len(self._pool.free) < limits.RESERVED_SEGMENTS
        choice = choose_segment(views, short=short)
        if choice is None:
            return False
        victim = next(s for s in closed if s.number == choice.number)
        try:
            records = await self._pool.reader.records(victim)
        except DeviceAway:
            raise
        except DeviceFailed as error:
            _log.error("segment %d cannot be reclaimed: %s", victim.number, error)
            victim.failed = True
            return True
        budget = (
            MoveBudget(0) if short else MoveBudget.of_segment(self._pool.segment_bytes, victim.kept_bytes)
        )
        await self._rewrite(self._sort_out(victim, records, budget))
        try:
            await self._pool.release(victim)
        except DeviceFailed:
            victim.failed = True  # the next attempt takes another one
            raise
        self._log.evicted.pop(victim.number, None)
        crashpoints.reach("reclaim.after_release")
        self._log.counts.segments_reclaimed += 1
        return True

    async def evacuate(self, victim: Segment, records: Sequence[LoggedRecord]) -> None:
        """Write everything that counts of `records`, which are the segment's, again in another one; durably.

        Then the segment's file may go. Raises DeviceFailed, NoSpace.
        """
        await self._rewrite(self._sort_out(victim, records, MoveBudget(0, everything=True)))

    async def _rewrite(self, entries: deque[Entry]) -> None:
        crashpoints.reach("reclaim.before_rewrite")
        while entries:
            await self._log.writer.write(entries, moved=True)
        await self._log.sync_now()
        crashpoints.reach("reclaim.after_rewrite")

    def _sort_out(self, victim: Segment, records: Sequence[LoggedRecord], budget: MoveBudget) -> deque[Entry]:
        """Evict what may be; return what is to be moved, in order."""
        others = [s.first_sequence for s in self._pool.used() if s is not victim]
        entries: deque[Entry] = deque()
        for found in records:
            record = self._kept_record(victim, found, budget, others)
            if record is not None:
                entries.append(record)
                if record.type == RecordType.DATA and self._nvme.is_deleted(record.object_id):
                    entries.append(Deletion(record.object_id))
        return entries

    def _kept_record(
        self, victim: Segment, found: LoggedRecord, budget: MoveBudget, others: Sequence[int]
    ) -> Record | None:
        kind, object_id = found.header["type"], found.header["object_id"]
        here = (victim.number, found.offset)
        if kind == RecordType.DATA:
            return self._kept_data(here, found, budget)
        if kind == RecordType.META:
            stored = self._nvme.known(object_id)
            if stored is None or stored.meta is None or stored.meta[0] != here:
                return None
            return self._nvme.meta_record(stored, found.body, found.header["object_bytes"], moved=found)
        if kind == RecordType.BUCKET:
            return self._nvme.buckets.record_at(object_id, here)
        if kind == RecordType.TOMBSTONE:
            body = TombstoneBody.decode(found.body)
            if tombstone_counts(body.deleted_sequence, others):
                return Record(RecordType.TOMBSTONE, 0, body=found.body)
        if kind == RecordType.RENAME:
            origin = found.header["origin_sequence"] or found.header["sequence"]
            if tombstone_counts(origin, others):
                return Record(RecordType.RENAME, object_id, {"origin_sequence": origin}, found.body)
        return None

    def _kept_data(self, here: Location, found: LoggedRecord, budget: MoveBudget) -> Record | None:
        stored = self._nvme.known(found.header["object_id"])
        number = found.header["extent_number"]
        piece = stored.pieces[number] if stored is not None and number < len(stored.pieces) else None
        live = piece is not None and (piece.segment, piece.offset) == here
        fate = budget.data_fate(
            live=live,
            kept=live and stored is not None and stored.stays,
            hot=live and stored is not None and self._nvme.observer.hits_of(stored) > stored.hits,
            record_bytes=found.header["record_bytes"],
        )
        if fate is Fate.DEAD or stored is None or piece is None:
            return None
        if fate is Fate.MOVE:
            return self._move(stored, number, piece)
        self._nvme.evict(stored, piece.segment)
        return None

    def _move(self, stored: Stored, number: int, piece: Piece) -> Record:
        payload = self._nvme.payload_of(piece)
        moved = piece

        def written(location: Location, record_bytes: int, checksum: int) -> None:
            nonlocal moved
            if not stored.dropped and stored.is_at(number, moved):
                moved = Piece(*location, record_bytes, piece.payload_bytes, checksum)
                self._nvme.place(stored, number, moved)

        def lost(error: KvfsError) -> None:
            if stored.dropped or not stored.is_at(number, moved):
                return
            if isinstance(error, Corrupt):
                self._nvme.damage(stored, number, error)
            else:  # the copy may not count, and the original is still there
                self._nvme.set_piece(stored, number, piece)

        stored.hits = self._nvme.observer.hits_of(stored)
        return Record(
            RecordType.DATA,
            stored.object_id,
            data_header(stored, number),
            payload=GuardedPayload(stored, payload) if piece.payload_bytes else None,
            written=written,
            lost=lost,
        )
