"""The log of the NVMe tier: records queued by the store, written in batches, made durable in groups.

Responsibility: the order of records, their way into segments, syncs, and what happens when the device fails.
Which objects the records speak of is known to their owner (`tiers.nvme`), who is told where each one went.

Invariants:
- Records are written in the order in which they were appended. A batch is one write, its records without gaps.
- A ticket that `settle` was given for is durable when it returns: every record up to it was written and the
  segment synced afterwards.
- A batch ends before a barrier until what came before it is durable: so a deletion that makes room for a newer
  object under the same name never becomes durable before that object. Deletions are durable before what
  follows them.
- What has ended is written beside the segments (`tiers.endings`) before anybody is told that its end is durable; and
  that of a cache also while no record can be written, before whoever waits is told of that.
- After an error of the device nothing is taken for written: the batch is written again, elsewhere when the
  device failed this segment; a sync that failed puts back everything since the last good one.

Concurrency: the service's trio thread. `append` never waits; one task (`run`) writes, syncs and reclaims.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto

import trio

from kvfs import crashpoints, limits
from kvfs._native.slots import xxh3_64
from kvfs.errors import Corrupt, DeviceFailed, KvfsError, NoSpace, Superseded
from kvfs.formats import RECORD_HEADER, RecordHeader, RecordType, record_extent
from kvfs.records import TombstoneBody
from tiers.endings import Ending
from tiers.log_entries import Barrier, Deletion, Entry, Location, Record, final_endings
from tiers.segments import Segment, SegmentPool, page_up

_log = logging.getLogger("kvfs.nvme")


class TierFull(NoSpace):
    """No segment can be had; the device itself is well."""


class _Step(Enum):
    WRITTEN = auto()
    BARRIER = auto()
    NOTHING = auto()


@dataclass(slots=True)
class LogCounts:
    """What status and metrics show."""

    appended_bytes: int = 0
    """Everything that was written into segments."""
    rewritten_bytes: int = 0
    """Part of it that reclaim wrote again."""
    records: int = 0
    syncs: int = 0
    segments_reclaimed: int = 0
    write_errors: int = 0


class Log:
    """See the module's header."""

    def __init__(self, pool: SegmentPool, next_sequence: int) -> None:
        self.pool = pool
        self.device = pool.device
        self.counts = LogCounts()
        self.trouble: KvfsError | None = None
        """Why the device takes no writes now; None while it does."""
        self.reclaim: Callable[[], Awaitable[bool]] | None = None
        """Frees a segment, through `write_now`; False when there is none to gain from. Set by the owner."""
        self.evicted: dict[int, list[Ending]] = {}
        """Number of a segment that is not freed yet -> of what reclaim has let go there. Kept by the owner."""
        self._next_sequence = next_sequence
        self._queue: deque[Entry] = deque()
        self._ticket = 0
        self._queued_before = 0
        """Ticket of the entry before the queue's first."""
        self._durable = 0
        self._wanted = 0
        """Tickets that somebody waits to see durable."""
        self._work = trio.Event()
        self._settled = trio.Event()
        self._popped = trio.Event()
        self._segment: Segment | None = None
        self._unsynced: deque[tuple[int, Entry]] = deque()
        self._dirty: dict[int, Segment] = {}
        """Segments written to since their last sync."""
        self._failed_sync: Segment | None = None
        """The device failed to sync it, and has not synced since."""
        self._has_deleted = False
        """Whether a TOMBSTONE was written since."""
        self._is_due = False
        """Whether SYNC_INTERVAL_S is over."""
        self._replaced: list[Ending] = []
        """What records written since have taken the place of: it has ended once they are durable."""
        self._closed = False

    # --- what the store calls -----------------------------------------------------------------------------

    @property
    def ticket(self) -> int:
        """Of the newest entry."""
        return self._ticket

    @property
    def durable_ticket(self) -> int:
        return self._durable

    @property
    def backlog(self) -> int:
        """Entries that wait to be written."""
        return len(self._queue)

    def check_queue(self) -> None:
        """Raise DeviceFailed, or NoSpace, while limits.MAX_LOG_QUEUE entries wait to be written."""
        if len(self._queue) >= limits.MAX_LOG_QUEUE:
            kind = DeviceFailed if self.trouble is None else type(self.trouble)
            why = "" if self.trouble is None else f": {self.trouble}"
            raise kind(
                f"{len(self._queue)} records wait for the NVMe tier, limit {limits.MAX_LOG_QUEUE}{why}"
            )

    def append(self, entry: Entry) -> int:
        """Queue an entry; its ticket."""
        if isinstance(entry, Barrier) and self._queue and isinstance(self._queue[-1], Barrier):
            return self._ticket
        self._queue.append(entry)
        self._ticket += 1
        if isinstance(entry, Deletion):
            self._wanted = self._ticket
        self._work.set()
        return self._ticket

    async def settle(self, ticket: int | None = None) -> None:
        """Wait until everything up to `ticket` (default: everything so far) is durable.

        Raises NoSpace or DeviceFailed while the device refuses writes; then it may still be written later.
        """
        ticket = self._ticket if ticket is None else ticket
        while self._durable < ticket:
            if self._closed:
                raise DeviceFailed("the NVMe tier's log is closed")
            self._wanted = max(self._wanted, ticket)
            self._work.set()
            await self._settled.wait()
            if self._durable < ticket and self.trouble is not None:
                raise type(self.trouble)(str(self.trouble))

    def _wake_settled(self) -> None:
        event, self._settled = self._settled, trio.Event()
        event.set()

    # --- the writer ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write what is queued, until cancelled; `close` then writes the rest."""
        while True:
            await self._wait_for_work()
            try:
                await self._advance()
                self._note_well()
            except (NoSpace, DeviceFailed) as error:
                await self._give_way(error)

    async def _wait_for_work(self) -> None:
        if self._queue or self._is_due or self._must_sync():
            await trio.lowlevel.checkpoint()
            return
        self._work = trio.Event()
        is_late = bool(self._unsynced) or self.pool.endings.is_dirty
        with trio.move_on_after(limits.SYNC_INTERVAL_S if is_late else math.inf):
            await self._work.wait()
            return
        self._wanted = max(self._wanted, self._queued_before)
        self._is_due = True

    def _must_sync(self) -> bool:
        return self.pool.endings.has_pending or (
            bool(self._unsynced)
            and (
                self._wanted > self._durable
                or self._has_deleted
                or len(self._unsynced) >= limits.UNSYNCED_RECORDS
            )
        )

    async def _advance(self) -> None:
        """One batch, and a sync where one is due."""
        if self._failed_sync is not None:  # else each attempt would fill another segment for nothing
            await self.device.sync(self._failed_sync.fd)
            self._failed_sync = None
        try:
            step = await self._write_batch()
        except TierFull as error:
            entry = self._queue[0]
            if not isinstance(entry, Record) or entry.is_essential():
                raise
            self._refuse(entry, error)
            return
        if step is _Step.BARRIER or self._is_due or self._must_sync():
            await self._sync()
        elif step is _Step.NOTHING and self._wanted > self._durable:
            self._note_durable()

    def _refuse(self, entry: Record, error: KvfsError) -> None:
        """There is no room for the payload at the head of the queue: what is behind it must not wait for that."""
        if entry.lost is not None:
            entry.lost(error)
        self._pop(1)
        self._note_durable()

    def _note_well(self) -> None:
        """The device takes writes; after trouble every segment gets another chance."""
        if self.trouble is not None:
            self.trouble = None
            for segment in self.pool.segments:
                segment.failed = False

    async def _give_way(self, error: KvfsError) -> None:
        """The device refuses: say so to whoever waits, and try again later."""
        self.counts.write_errors += 1
        if self.trouble is None or type(self.trouble) is not type(error):
            _log.error("the NVMe tier takes no writes: %s", error)
        self.trouble = error
        await self._end_unwritten()
        self._wanted = self._durable
        self._wake_settled()
        self._wake_popped()
        await trio.sleep(limits.DEVICE_RETRY_S)

    async def _end_unwritten(self) -> None:
        """Say beside the segments, where there is room for it, what has ended by records that cannot be written: a
        cache's change is answered all the same."""
        endings = self.pool.endings
        try:
            while found := [*final_endings(self._queue, self._next_sequence), *self._evicted_endings()]:
                for ending in found:
                    endings.note(ending)
                await endings.write()
                await endings.sync()
                for evicted in self.evicted.values():
                    evicted.clear()
        except (NoSpace, DeviceFailed) as error:
            _log.error("what has ended cannot be said beside the segments either: %s", error)

    def _evicted_endings(self) -> Iterator[Ending]:
        """What reclaim has let go may be written again: what it was called, or a block's bytes, up to here."""
        for evicted in self.evicted.values():
            for each in evicted:
                yield each._replace(sequence=self._next_sequence)

    async def drain(self) -> None:
        """Write and sync everything, without `run`. Raises NoSpace, DeviceFailed."""
        while self._queue:
            await self._advance()
        await self._sync()

    async def close(self) -> None:
        """Close the open segment with a footer, so that the next start reads it fast."""
        if not self._closed:
            self._closed = True
            try:
                if self._segment is not None and self._segment.headers:
                    await self.pool.close(self._segment)
                await self.pool.endings.finish()
            finally:
                self._wake_settled()

    # --- batches ------------------------------------------------------------------------------------------

    async def _write_batch(self) -> _Step:
        while self._queue and isinstance(self._queue[0], Barrier):
            if self._unsynced:
                return _Step.BARRIER
            self._pop(1)
            self._note_durable()
        if not self._queue:
            return _Step.NOTHING
        await self.write_now(self._queue, from_queue=True)
        return _Step.WRITTEN

    def _pop(self, count: int) -> None:
        for _ in range(count):
            self._queue.popleft()
        self._queued_before += count
        self._wake_popped()

    def _wake_popped(self) -> None:
        event, self._popped = self._popped, trio.Event()
        event.set()

    async def wait_backlog(self, below: int) -> None:
        """Wait until fewer than `below` entries wait to be written."""
        await trio.lowlevel.checkpoint()
        while self.backlog >= below:
            await self._popped.wait()

    async def wait_written(self) -> None:
        """Wait until another batch was written, or the device refused one (`trouble`)."""
        await self._popped.wait()

    async def write_now(self, entries: deque[Entry], *, from_queue: bool = False) -> None:
        """Write one batch from the head of `entries`, which loses what was written."""
        segment = await self._segment_for(entries[0], reserve=not from_queue)
        batch = _Batch(self, segment)
        async with self.device.buffer() as view:
            taken = await batch.fill(entries, view)
            length = batch.finish(view)
            if length:
                crashpoints.reach("log.before_write")
                try:
                    await self.device.write(segment.fd, segment.end, view[:length])
                except DeviceFailed:
                    self._abandon(segment)
                    raise
                crashpoints.reach("log.after_write")
        for index in range(taken):
            if from_queue:
                self._unsynced.append((self._queued_before + index + 1, entries[index]))
            else:
                self._unsynced.append((0, entries[index]))
        if from_queue:
            self._pop(taken)
        else:
            for _ in range(taken):
                entries.popleft()
        self._dirty[segment.number] = segment
        self._has_deleted = self._has_deleted or batch.deletes
        self.counts.appended_bytes += length
        if not from_queue:
            self.counts.rewritten_bytes += length
        self._next_sequence = batch.commit(length)

    def note_replaced(self, record: Record, header: RecordHeader) -> None:
        """A record was written that takes the place of another; not yet durable."""
        assert record.ends is not None
        first, number = record.first_sequence, header.extent_number
        self._replaced.append(Ending(record.object_id, first, header.sequence, record.ends, number))

    def _abandon(self, segment: Segment) -> None:
        """The device failed a write: what the file holds already still counts, nothing more is added."""
        segment.closed = True
        if self._segment is segment:
            self._segment = None

    async def _segment_for(self, entry: Entry, *, reserve: bool) -> Segment:
        """The segment that the next batch goes to, with room for `entry`. Raises TierFull, NoSpace, DeviceFailed."""
        need, body_bytes = _space(entry)
        while True:
            segment = self._segment
            if segment is not None:
                if self.pool.room(segment, 1, body_bytes) >= need:
                    return segment
                await self._close_segment(segment)
            if not reserve:
                await self._keep_reserve()
            if self._segment is None:  # else reclaim opened one
                self._segment = await self._take()

    async def _take(self) -> Segment:
        try:
            taken = await self.pool.take()
        except DeviceFailed:
            self.pool.free.rotate(-1)  # the next attempt takes another file
            raise
        if taken is None:
            raise TierFull("no segment of the NVMe tier is free, and none can be reclaimed")
        return taken

    async def _keep_reserve(self) -> None:
        """Reclaim until more than the reserve is free, while anything can be gained.

        Once through all segments at most: where each gains little, the writes in between must not wait for ever.
        """
        for _ in self.pool.segments:
            if len(self.pool.free) > limits.RESERVED_SEGMENTS or self.reclaim is None:
                break
            if not await self.reclaim():
                break
        if self._segment is None and len(self.pool.free) < limits.RESERVED_SEGMENTS:
            raise TierFull("the NVMe tier is full of objects that may not be evicted")

    async def _close_segment(self, segment: Segment) -> None:
        self._segment = None
        segment.closed = True
        crashpoints.reach("log.before_footer")
        try:
            await self.pool.close(segment)
        except (NoSpace, DeviceFailed) as error:
            self._dirty[segment.number] = segment
            self._write_again(error)
            raise
        crashpoints.reach("log.after_footer")
        self._dirty.pop(segment.number, None)

    async def _sync(self) -> None:
        """Make everything written durable, and say beside the segments what has ended by that. After an error of a
        segment it counts as not written."""
        endings = self.pool.endings
        await endings.write()
        if self._unsynced or endings.is_dirty:
            crashpoints.reach("log.before_sync")
            await self._sync_files()
            crashpoints.reach("log.after_sync")
            self.counts.syncs += 1
            if self._unsynced:
                endings.durable_sequence = self._next_sequence - 1
            self._unsynced.clear()
        self._has_deleted = self._is_due = False
        self._note_replaced()
        await endings.write()  # before anybody is told: synced with what comes next
        crashpoints.reach("log.after_endings")
        self._note_durable()

    async def _sync_files(self) -> None:
        failures: list[Exception] = []

        async def of_endings() -> None:
            try:
                await self.pool.endings.sync()
            except Exception as error:
                failures.append(error)

        async def of_segments() -> None:
            try:
                for number, segment in list(self._dirty.items()):
                    await self.device.sync(segment.fd)
                    self._dirty.pop(number, None)
            except (NoSpace, DeviceFailed) as error:
                self._write_again(error)
                failures.append(error)
            except Exception as error:
                failures.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(of_endings)
            nursery.start_soon(of_segments)
        if failures:
            raise failures[0]

    def _note_replaced(self) -> None:
        """What is durable now has taken the place of something, and so have the objects whose deletions wait for it."""
        for ending in self._replaced:
            self.pool.endings.note(ending)
        self._replaced.clear()
        for entry in self._queue:
            if isinstance(entry, Deletion):
                self.repeat(entry, self._next_sequence)
            elif not isinstance(entry, Barrier):
                return

    def repeat(self, deletion: Deletion, sequence: int) -> None:
        """Have a deletion written beside the segments, too, once."""
        if not deletion.is_repeated:
            deletion.is_repeated = True
            self.pool.endings.note(Ending(deletion.object_id, deletion.first_sequence, sequence))

    async def sync_now(self) -> None:
        """As part of reclaim: all that was written becomes durable."""
        await self._sync()

    def _write_again(self, error: KvfsError) -> None:
        """Put back everything since the last good sync: what a failed sync leaves on the device is unknown."""
        for segment in self._dirty.values():
            self._abandon(segment)
            self._failed_sync = segment
        self._dirty.clear()
        self._replaced.clear()
        for ticket, entry in reversed(self._unsynced):
            if ticket:
                self._queue.appendleft(entry)
                self._queued_before -= 1
            elif (
                isinstance(entry, Record) and entry.lost is not None
            ):  # reclaim's: the old copy is still there
                entry.lost(error)
        self._unsynced.clear()

    def _note_durable(self) -> None:
        if not (self._unsynced or self.pool.endings.has_pending) and self._durable < self._queued_before:
            self._durable = self._queued_before
            self._wake_settled()

    def start_at(self, sequence: int) -> None:
        """The next record's sequence: above all that a replay found."""
        self._next_sequence = sequence

    # --- used by batches ----------------------------------------------------------------------------------

    @property
    def next_sequence(self) -> int:
        return self._next_sequence


def _space(entry: Entry) -> tuple[int, int]:
    """(most bytes, body bytes) that an entry takes at the start of a batch."""
    if not isinstance(entry, Record):
        body = 16 + 8 * limits.MAX_TOMBSTONE_IDS
        return page_up(RECORD_HEADER.size + body), body
    payload = entry.payload.size_bytes if entry.payload else 0
    _, record_bytes = record_extent(0, len(entry.body), payload)
    return page_up(record_bytes), len(entry.body)


@dataclass(slots=True)
class _Placed:
    record: Record
    offset: int
    header: RecordHeader
    encoded: bytes = b""


class _Batch:
    """Records on their way into one buffer and one place of a segment."""

    def __init__(self, log: Log, segment: Segment) -> None:
        self._log = log
        self._segment = segment
        self._placed: list[_Placed] = []
        self._used = 0
        self._body_bytes = 0
        self._sequence = log.next_sequence
        self.deletes = False

    async def fill(self, entries: deque[Entry], view: memoryview) -> int:
        """Take entries while they fit; how many were taken."""
        taken = 0
        while taken < len(entries):
            entry = entries[taken]
            if isinstance(entry, Barrier):
                break
            count = 1
            if isinstance(entry, Deletion):
                count, entry = self._merge(entries, taken)
                self.deletes = True
            if not self._fits(entry, len(view)):
                break
            await self._place(entry, view)
            taken += count
            if self.deletes:  # durable before what follows, which may give its name to something
                break
        return taken

    def _merge(self, entries: deque[Entry], start: int) -> tuple[int, Record]:
        """Neighbouring deletions as one TOMBSTONE."""
        merged: list[Deletion] = []
        for index in range(start, min(len(entries), start + limits.MAX_TOMBSTONE_IDS)):
            entry = entries[index]
            if not isinstance(entry, Deletion):
                break
            merged.append(entry)
        body = TombstoneBody(self._sequence, tuple(each.object_id for each in merged)).encode()

        sequence = self._sequence

        def written(location: Location, record_bytes: int, checksum: int) -> None:
            for each in merged:
                self._log.repeat(each, sequence)
                if each.written is not None:
                    each.written()

        return len(merged), Record(RecordType.TOMBSTONE, 0, body=body, written=written)

    def _fits(self, record: Record, view_bytes: int) -> bool:
        payload = record.payload.size_bytes if record.payload else 0
        start = self._segment.end + self._used
        _, record_bytes = record_extent(start, len(record.body), payload)
        end = page_up(self._used + record_bytes)
        room = self._log.pool.room(self._segment, len(self._placed) + 1, self._body_bytes + len(record.body))
        return end <= min(view_bytes, room)

    async def _place(self, record: Record, view: memoryview) -> None:
        """Put one record's bytes at the end of the buffer; it is dropped when its payload is gone."""
        payload_bytes = record.payload.size_bytes if record.payload else 0
        start = self._segment.end + self._used
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
            sequence=self._sequence,
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
        self._sequence += 1

    def finish(self, view: memoryview) -> int:
        """Write the headers, stretch the last record to a whole page; the bytes of the batch."""
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
        """The batch is on the device: count it and tell the records' owners. The next sequence."""
        segment, base = self._segment, self._segment.end
        segment.end += length
        self._log.counts.records += len(self._placed)
        for placed in self._placed:
            record, header = placed.record, placed.header
            segment.note(placed.encoded, record.body, header.sequence)
            if record.ends is not None:
                self._log.note_replaced(record, header)
            if record.written is not None:
                location = (segment.number, base + placed.offset)
                record.written(location, header.record_bytes, header.payload_checksum)
        return self._sequence


def _clear(view: memoryview, start: int, end: int) -> None:
    if end > start:
        view[start:end] = bytes(end - start)
