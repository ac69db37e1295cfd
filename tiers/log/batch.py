"""One write of the log: records laid out in a buffer, one behind the other, with their headers.

Responsibility: how many entries fit into a write, their bytes, and who is notified when the write is done.

Invariants: neighbouring deletions become one TOMBSTONE; a batch ends with the first ordered TOMBSTONE and before a
barrier. A
record whose payload is gone takes no bytes and no sequence.

Concurrency: the log's writer task, of the service's trio thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from kvfs import limits
from kvfs._native.shared.slots import xxh3_64
from kvfs.errors import Corrupt, Superseded
from kvfs.formats import RECORD_HEADER, RecordHeader, RecordType, record_extent
from tiers.log.ending_notes import EndingNotes
from tiers.log.entries import Barrier, Deletion, Entry, Location, Record
from tiers.log.pool import SegmentPool
from tiers.log.records import TombstoneBody
from tiers.log.segments import Segment, page_up


def space_of(entry: Entry) -> tuple[int, int]:
    """Return (most bytes, body bytes) that an entry takes at the start of a batch."""
    if not isinstance(entry, Record):
        body = 16 + 8 * limits.MAX_TOMBSTONE_IDS
        return page_up(RECORD_HEADER.size + body), body
    _, record_bytes = record_extent(0, len(entry.body), entry.payload_bytes)
    return page_up(record_bytes), len(entry.body)


@dataclass(slots=True)
class _Placed:
    record: Record
    offset: int
    header: RecordHeader
    encoded: bytes = b""


class Batch:
    """Lays records out for one write at the end of a segment."""

    def __init__(self, pool: SegmentPool, segment: Segment, sequence: int, notes: EndingNotes) -> None:
        """Begin with the record that gets this sequence."""
        self._pool = pool
        self._segment = segment
        self._notes = notes
        self._placed: list[_Placed] = []
        self._used = 0
        self._body_bytes = 0
        self.next_sequence = sequence
        """Of the record after those that are laid out."""
        self.deletes = False
        """Whether a TOMBSTONE is among the records that has to be durable before what follows."""

    async def fill(self, entries: deque[Entry], view: memoryview) -> int:
        """Take entries while they fit; return how many."""
        taken = 0
        while taken < len(entries):
            entry = entries[taken]
            if isinstance(entry, Barrier):
                break
            count = 1
            is_ordered = False
            if isinstance(entry, Deletion):
                count, is_ordered, entry = self._merge(entries, taken)
            if not self._fits(entry, len(view)):
                break
            await self._place(entry, view)
            taken += count
            if is_ordered:  # what follows may give its name to something
                self.deletes = True
                break
        return taken

    def _merge(self, entries: deque[Entry], start: int) -> tuple[int, bool, Record]:
        """Make one TOMBSTONE of neighbouring deletions; return their count, and whether one of them is ordered."""
        merged: list[Deletion] = []
        for index in range(start, min(len(entries), start + limits.MAX_TOMBSTONE_IDS)):
            entry = entries[index]
            if not isinstance(entry, Deletion):
                break
            merged.append(entry)
        body = TombstoneBody(self.next_sequence, tuple(each.object_id for each in merged)).encode()

        sequence = self.next_sequence

        def written(location: Location, record_bytes: int, checksum: int) -> None:
            for each in merged:
                self._notes.repeat(each, sequence)
                if each.written is not None:
                    each.written()

        is_ordered = any(each.is_ordered for each in merged)
        return len(merged), is_ordered, Record(RecordType.TOMBSTONE, 0, body=body, written=written)

    def _fits(self, record: Record, view_bytes: int) -> bool:
        _, record_bytes = record_extent(
            self._segment.end + self._used, len(record.body), record.payload_bytes
        )
        end = page_up(self._used + record_bytes)
        room = self._pool.room(self._segment, len(self._placed) + 1, self._body_bytes + len(record.body))
        return end <= min(view_bytes, room)

    async def _place(self, record: Record, view: memoryview) -> None:
        """Put a record's bytes at the end of the buffer; drop a record whose payload is gone."""
        payload_bytes, start = record.payload_bytes, self._segment.end + self._used
        payload_at, record_bytes = record_extent(start, len(record.body), payload_bytes)
        checksum = 0
        if record.payload is not None:
            at = self._used + payload_at
            try:
                checksum = await record.payload.read_into(view[at : at + record_bytes - payload_at])
            except (Superseded, Corrupt) as error:
                if record.lost is not None:
                    record.lost(error)
                return
        head_end = self._used + RECORD_HEADER.size + len(record.body)
        view[self._used + RECORD_HEADER.size : head_end] = record.body
        _clear(view, head_end, self._used + (payload_at or record_bytes))
        if payload_at:
            _clear(view, self._used + payload_at + payload_bytes, self._used + record_bytes)
        header = RecordHeader(
            record.type,
            sequence=self.next_sequence,
            segment_sequence=self._segment.sequence,
            record_bytes=record_bytes,
            object_id=record.object_id,
            body_bytes=len(record.body),
            body_checksum=xxh3_64(record.body) if record.body else 0,
            payload_bytes=payload_bytes,
            payload_offset=payload_at if payload_bytes else 0,
            payload_checksum=checksum,
            **record.header,  # type: ignore[arg-type]
        )
        self._placed.append(_Placed(record, self._used, header))
        self._used += record_bytes
        self._body_bytes += len(record.body)
        self.next_sequence += 1

    def finish(self, view: memoryview) -> int:
        """Write the headers and stretch the last record to a whole page; return the batch's bytes."""
        if not self._placed:
            return 0
        length = page_up(self._used)
        last = self._placed[-1]
        stretched = last.header.record_bytes + length - self._used
        last.header = replace(last.header, record_bytes=stretched)
        _clear(view, self._used, length)
        for placed in self._placed:
            placed.encoded = placed.header.encode()
            view[placed.offset : placed.offset + RECORD_HEADER.size] = placed.encoded
        return length

    def commit(self, length: int) -> int:
        """Note that the batch is on the device, and notify the records' owners; return the next sequence."""
        segment, base = self._segment, self._segment.end
        segment.end += length
        for placed in self._placed:
            record, header = placed.record, placed.header
            segment.note(placed.encoded, record.body, header.sequence)
            if record.ends is not None:
                self._notes.note_replaced(record, header)
            if record.written is not None:
                location = (segment.number, base + placed.offset)
                record.written(location, header.record_bytes, header.payload_checksum)
        return self.next_sequence


def _clear(view: memoryview, start: int, end: int) -> None:
    if end > start:
        view[start:end] = bytes(end - start)
