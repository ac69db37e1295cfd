"""Writes entries of the log into segments, batch by batch, and syncs those segments.

Responsibility: which segment a batch goes to, when a segment gets its footer, which ones wait for a sync, and what is
written again when the device fails.

Invariants:
- A batch is one write, its records without gaps. What was moved by reclaim never takes from the queue.
- limits.RESERVED_SEGMENTS stay free for reclaim, which alone may take them.
- After an error of the device nothing since the last good sync is taken for written: the queue's entries go back to
  its head, and whatever reclaim moved counts where it was.

Concurrency: the log's writer task, of the service's trio thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvfs import limits
from kvfs.errors import DeviceAway, DeviceFailed, KvfsError, NoSpace
from kvfs.system import crashpoints
from tiers.log.batch import Batch, space_of
from tiers.log.ending_notes import EndingNotes
from tiers.log.entries import Entry, LogQueue, Record
from tiers.log.pool import SegmentPool
from tiers.log.segments import Segment


class TierFull(NoSpace):
    """Says that no segment can be had; the device itself is well."""


@dataclass(slots=True)
class LogCounts:
    """Counts what status and metrics show."""

    appended_bytes: int = 0
    """Everything that was written into segments."""
    rewritten_bytes: int = 0
    """Part of it that reclaim wrote again."""
    syncs: int = 0
    segments_reclaimed: int = 0
    write_errors: int = 0


class SegmentWriter:
    """Writes batches at the end of one segment after the other."""

    def __init__(self, pool: SegmentPool, queue: LogQueue, notes: EndingNotes) -> None:
        self.counts = LogCounts()
        self.next_sequence = 1
        """Of the next record; a start sets it above all that its replay found."""
        self.reclaim: Callable[[], Awaitable[bool]] | None = None
        """Frees a segment, through `write`; returns False when none gains anything. Set by who opens the tier."""
        self.unsynced: deque[tuple[Entry, bool]] = deque()
        """What was written since the last sync, and whether it was moved by reclaim, not taken from the queue."""
        self.has_deleted = False
        """Whether a TOMBSTONE was written since the last sync that is to be durable before what follows."""
        self._pool = pool
        self._device = pool.device
        self._queue = queue
        self._notes = notes
        self.segment: Segment | None = None
        """What batches go to now."""
        self._dirty: dict[int, Segment] = {}
        """Segments written to since their last sync."""
        self._failed_sync: Segment | None = None
        """The device failed to sync it, and has not synced since."""

    async def write(self, entries: deque[Entry], *, moved: bool) -> None:
        """Write one batch from the head of the queue's entries, or of those that reclaim moves; pop what was written.

        Raises TierFull, NoSpace, DeviceFailed.
        """
        segment = await self._segment_for(entries[0], keep_reserve=not moved)
        batch = Batch(self._pool, segment, self.next_sequence, self._notes)
        async with self._device.buffer() as view:
            taken = await batch.fill(entries, view)
            length = batch.finish(view)
            if length:
                try:
                    await self._write_buffer(segment, view[:length])
                except DeviceAway:  # may come to the device yet: what is written from here on is younger
                    self.next_sequence = batch.next_sequence
                    raise
        self.unsynced.extend((entries[index], moved) for index in range(taken))
        if moved:
            for _ in range(taken):
                entries.popleft()
            self.counts.rewritten_bytes += length
        else:
            self._queue.pop(taken)
        self._dirty[segment.number] = segment
        self.has_deleted = self.has_deleted or batch.deletes
        self.counts.appended_bytes += length
        self.next_sequence = batch.commit(length)

    async def _write_buffer(self, segment: Segment, data: memoryview) -> None:
        crashpoints.reach("log.before_write")
        try:
            await self._device.write(segment.fd, segment.end, data)
        except DeviceFailed:
            self._abandon(segment)
            raise
        crashpoints.reach("log.after_write")

    def _abandon(self, segment: Segment) -> None:
        """Close a segment whose write failed: its records so far still count."""
        segment.closed = True
        if self.segment is segment:
            self.segment = None

    async def _segment_for(self, entry: Entry, *, keep_reserve: bool) -> Segment:
        """Return a segment with room for `entry`. Raises TierFull, NoSpace, DeviceFailed."""
        need, body_bytes = space_of(entry)
        while True:
            segment = self.segment
            if segment is not None:
                if self._pool.room(segment, 1, body_bytes) >= need:
                    return segment
                await self.close_segment(segment)
            if keep_reserve:
                await self._keep_reserve()
            if self.segment is None:  # else reclaim opened one
                self.segment = await self._take()

    async def _take(self) -> Segment:
        try:
            taken = await self._pool.take()
        except DeviceFailed:
            self._pool.free.rotate(-1)  # the next attempt takes another file
            raise
        if taken is None:
            raise TierFull("no segment of the NVMe tier is free, and none can be reclaimed")
        return taken

    async def _keep_reserve(self) -> None:
        """Reclaim until more than the reserve is free, while anything can be gained.

        Once through all segments at most: where each gains little, the writes in between must not wait for ever.
        """
        for _ in self._pool.segments:
            if len(self._pool.free) > limits.RESERVED_SEGMENTS or self.reclaim is None:
                break
            if not await self.reclaim():
                break
        if self.segment is None and len(self._pool.free) < limits.RESERVED_SEGMENTS:
            raise TierFull("the NVMe tier is full of objects that may not be evicted")

    async def close_segment(self, segment: Segment) -> None:
        """Write a segment's footer. Raises NoSpace, DeviceFailed: then it counts as not written."""
        self.segment = None
        segment.closed = True
        crashpoints.reach("log.before_footer")
        try:
            await self._pool.close(segment)
        except (NoSpace, DeviceFailed) as error:
            self._dirty[segment.number] = segment
            self._write_again(error)
            raise
        crashpoints.reach("log.after_footer")
        self._dirty.pop(segment.number, None)

    async def finish(self) -> None:
        """Write the footer of the open segment, if it has records. Raises NoSpace, DeviceFailed."""
        if self.segment is not None and self.segment.headers:
            await self._pool.close(self.segment)

    async def sync(self) -> None:
        """Sync every segment written to. Raises NoSpace, DeviceFailed: then it counts as not written."""
        try:
            for number, segment in list(self._dirty.items()):
                await self._device.sync(segment.fd)
                self._dirty.pop(number, None)
        except (NoSpace, DeviceFailed) as error:
            self._write_again(error)
            raise

    async def retry_sync(self) -> None:
        """Sync what the device failed to sync last: else each attempt would fill another segment for nothing."""
        if self._failed_sync is not None:
            await self._device.sync(self._failed_sync.fd)
            self._failed_sync = None

    def _write_again(self, error: KvfsError) -> None:
        """Queue everything since the last good sync again: what is on the device after a failed sync is unknown."""
        for segment in self._dirty.values():
            self._abandon(segment)
            self._failed_sync = segment
        self._dirty.clear()
        self._notes.drop_replaced()
        for entry, moved in reversed(self.unsynced):
            if not moved:
                self._queue.put_back(entry)
            elif isinstance(entry, Record) and entry.lost is not None:  # the old copy is still there
                entry.lost(error)
        self.unsynced.clear()
