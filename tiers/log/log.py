"""The log of the NVMe tier: records queued by the store, written in batches, made durable in groups.

Responsibility: the order of records, when they are written and synced, and who waits for that. Which objects the
records speak of is known to their owner (`tiers.nvme.tier`), which is notified of each one's place.

Invariants:
- Records are written in the order in which they were appended. A batch is one write, its records without gaps.
- A ticket that `settle` was given for is durable when it returns: every record up to it was written and the
  segment synced afterwards.
- A batch ends before a barrier until what came before it is durable: so a deletion that makes room for a newer
  object under the same name never becomes durable before that object. Ordered deletions (of durable objects, blocks
  and buckets) are durable before what follows them.
- What nobody waits for is written within GATHER_S and durable within limits.SYNC_INTERVAL_S.
- What has ended is written beside the segments (`tiers.log.endings`) before its end is reported as durable;
  and that of a cache also while no record can be written, before that is reported to whoever waits.
- After an error of the device nothing is taken for written: the batch is written again, elsewhere when the
  device failed this segment; a sync that failed puts back everything since the last good one.
- While the drive is away nothing is written. Whoever waits for durability is told after limits.NVME_WRITE_S.
- What a late write may still change is neither written again nor used for anything else until that write has ended.

Concurrency: the service's trio thread. `append` never waits; one task (`run`) writes, syncs and reclaims.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from enum import Enum, auto

import trio

from kvfs import limits
from kvfs.errors import DeviceAway, DeviceFailed, KvfsError, NoSpace
from kvfs.system import crashpoints
from tiers.log.ending_notes import EndingNotes
from tiers.log.endings import Endings
from tiers.log.entries import Barrier, Deletion, Entry, LogQueue, Record
from tiers.log.pool import SegmentPool
from tiers.log.writer import SegmentWriter, TierFull

_log = logging.getLogger("kvfs.nvme")


GATHER_S = 0.002
"""How long what nobody waits for stays queued for more to be written with it: a write takes as long as ten entries
take to be queued."""
GATHERED = 64
"""Entries that wait no longer."""


class _Step(Enum):
    WRITTEN = auto()
    BARRIER = auto()
    NOTHING = auto()


class Log:
    """Queues entries, writes them in order and makes them durable."""

    def __init__(self, pool: SegmentPool, written_again_at: Callable[[int], int | None]) -> None:
        """Begin with nothing queued. `written_again_at`: see `EndingNotes`."""
        self.pool = pool
        self.trouble: KvfsError | None = None
        """Why the device takes no writes now; None while it does."""
        self.queue = LogQueue()
        self._notes = EndingNotes(pool.endings, written_again_at)
        self.evicted = self._notes.evicted
        self.writer = SegmentWriter(pool, self.queue, self._notes)
        self.counts = self.writer.counts
        self.durable_ticket = 0
        self._wanted = 0
        """Tickets that somebody waits to see durable."""
        self._work = trio.Event()
        self._settled = trio.Event()
        self._sync_at = math.inf
        """When SYNC_INTERVAL_S is over since the first write that is not synced."""
        self._is_due = False
        """Whether it is over."""
        self._closed = False

    @property
    def backlog(self) -> int:
        """Return how many entries wait to be written."""
        return len(self.queue)

    def check_queue(self) -> None:
        """Raise DeviceFailed, or NoSpace, while limits.MAX_LOG_QUEUE entries wait to be written."""
        if self.backlog >= limits.MAX_LOG_QUEUE:
            kind = DeviceFailed if self.trouble is None else type(self.trouble)
            why = "" if self.trouble is None else f": {self.trouble}"
            raise kind(f"{self.backlog} records wait for the NVMe tier, limit {limits.MAX_LOG_QUEUE}{why}")

    def append(self, entry: Entry) -> int:
        """Queue an entry; return its ticket."""
        ticket = self.queue.append(entry)
        if isinstance(entry, Deletion) and entry.is_ordered:
            self._wanted = ticket
        if self._has_hurry or len(self.queue) == 1:
            self._work.set()
        return ticket

    async def settle(self, ticket: int | None = None) -> None:
        """Wait until everything up to `ticket` (default: everything so far) is durable.

        Raises NoSpace, DeviceFailed or DeviceAway while the device takes no writes; then it may still be written later.
        """
        ticket = self.queue.ticket if ticket is None else ticket
        while self.durable_ticket < ticket:
            if self._closed:
                raise DeviceFailed("the NVMe tier's log is closed")
            self._wanted = max(self._wanted, ticket)
            self._work.set()
            await self._settled.wait()
            if self.durable_ticket < ticket and self.trouble is not None:
                raise type(self.trouble)(str(self.trouble))

    def _wake_settled(self) -> None:
        event, self._settled = self._settled, trio.Event()
        event.set()

    async def wait_backlog(self, below: int) -> None:
        """Wait until fewer than `below` entries wait to be written."""
        await trio.lowlevel.checkpoint()
        while self.backlog >= below:
            await self.queue.wait_popped()

    async def run(self) -> None:
        """Write what is queued, until cancelled; `close` then writes the rest."""
        while True:
            await self._wait_for_work()
            began = trio.current_time()
            try:
                await self._advance()
                if self.trouble is not None:  # no more: every segment gets another chance
                    self.trouble = None
                    for segment in self.pool.segments:
                        segment.failed = False
            except DeviceAway as error:
                if not await self._is_back(began):
                    await self._pause(error)
            except (NoSpace, DeviceFailed) as error:
                await self._pause(error)

    async def _is_back(self, began: float) -> bool:
        """Wait for a drive that is away, as long as whoever waits for durability does; return whether to repeat at once
        what `began` then."""
        if trio.current_time() - began >= limits.NVME_WRITE_S:  # it answers reads, and not what was written
            return False
        return await self.pool.device.drive.wait_here(limits.NVME_WRITE_S)

    @property
    def _has_hurry(self) -> bool:
        """Return whether what is queued is to be written now: somebody waits for it, or it is many."""
        return self._wanted > self.durable_ticket or self.backlog >= GATHERED

    async def _wait_for_work(self) -> None:
        """Wait for entries, and a moment for more of them unless somebody waits; or until the next sync is due."""
        await trio.lowlevel.checkpoint()
        if not (self.backlog or self._is_due or self._must_sync()):
            await self._wait_until(self._sync_at)
        if self.backlog and not (self._has_hurry or self._is_due):
            await self._wait_until(min(trio.current_time() + GATHER_S, self._sync_at))
        if trio.current_time() >= self._sync_at:
            self._wanted = max(self._wanted, self.queue.taken_ticket)
            self._is_due = True

    async def _wait_until(self, deadline: float) -> None:
        self._work = trio.Event()
        with trio.move_on_at(deadline):
            await self._work.wait()

    def _must_sync(self) -> bool:
        unsynced = self.writer.unsynced
        if not unsynced:
            return self.pool.endings.has_pending
        return (
            self._wanted > self.durable_ticket
            or self.writer.has_deleted
            or len(unsynced) >= limits.UNSYNCED_RECORDS
        )

    async def _advance(self) -> None:
        """Write one batch, and sync where that is due."""
        self.pool.device.drive.check()
        await self.writer.retry_sync()
        try:
            step = await self._write_batch()
        except TierFull as error:
            entry = self.queue.entries[0]
            if not isinstance(entry, Record) or entry.is_essential():
                raise
            self._refuse(entry, error)
            return
        if step is _Step.BARRIER or self._is_due or self._must_sync():
            await self.sync_now()
        elif step is _Step.NOTHING and self._wanted > self.durable_ticket:
            self._note_durable()

    async def _write_batch(self) -> _Step:
        queue = self.queue
        while queue and isinstance(queue.entries[0], Barrier):
            if self.writer.unsynced:
                return _Step.BARRIER
            queue.pop(1)
            self._note_durable()
        if not queue:
            return _Step.NOTHING
        await self.writer.write(queue.entries, moved=False)
        self._sync_at = min(self._sync_at, trio.current_time() + limits.SYNC_INTERVAL_S)
        return _Step.WRITTEN

    def _refuse(self, entry: Record, error: KvfsError) -> None:
        """Drop the payload at the head of the queue, for which there is no room: the entries behind it go on."""
        if entry.lost is not None:
            entry.lost(error)
        self.queue.pop(1)
        self._note_durable()

    async def _pause(self, error: KvfsError) -> None:
        """Notify whoever waits that the device refuses writes, and let some time pass before the next."""
        self.counts.write_errors += 1
        if self.trouble is None or type(self.trouble) is not type(error):
            _log.error("the NVMe tier takes no writes: %s", error)
        self.trouble = error
        await self._notes.write_unlogged(self.queue.entries, self.writer.next_sequence)
        self._wanted = self.durable_ticket
        self._wake_settled()
        self.queue.wake()
        await trio.sleep(limits.DEVICE_RETRY_S)

    async def drain(self) -> None:
        """Write and sync everything, without `run`. Raises NoSpace, DeviceFailed."""
        while self.backlog:
            await self._advance()
        await self.sync_now()

    async def close(self) -> None:
        """Close the open segment with a footer, so that the next start reads it fast; what a reclaim has evicted that
        was not done counts no more."""
        if not self._closed:
            self._closed = True
            try:
                await self._notes.write_unlogged(self.queue.entries, self.writer.next_sequence)
                await self.writer.finish()
                await self.pool.endings.finish()
            finally:
                self._wake_settled()

    async def sync_now(self) -> None:
        """Make everything written durable, and write beside the segments what has ended by that. After an error of a
        segment it counts as not written."""
        endings, writer = self.pool.endings, self.writer
        await endings.write()
        if writer.unsynced or endings.is_dirty:
            crashpoints.reach("log.before_sync")
            await self._sync_files()
            crashpoints.reach("log.after_sync")
            self.counts.syncs += 1
            if writer.unsynced:
                endings.durable_sequence = self.writer.next_sequence - 1
            writer.unsynced.clear()
        writer.has_deleted = self._is_due = False
        self._sync_at = math.inf
        self._notes.note_durable(self.queue.entries, self.writer.next_sequence)
        await endings.write()  # before anybody is notified: synced with what comes next
        if endings.is_dirty:
            self._sync_at = trio.current_time() + limits.SYNC_INTERVAL_S
        crashpoints.reach("log.after_endings")
        self._note_durable()

    async def _sync_files(self) -> None:
        """Sync segments and endings at once; both end before the first failure is raised."""
        failures: list[Exception] = []

        async def sync(files: SegmentWriter | Endings) -> None:
            try:
                await files.sync()
            except Exception as error:
                failures.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(sync, self.pool.endings)
            nursery.start_soon(sync, self.writer)
        if failures:
            raise failures[0]

    def _note_durable(self) -> None:
        if self.writer.unsynced or self.pool.endings.has_pending:
            return
        if self.durable_ticket < self.queue.taken_ticket:
            self.durable_ticket = self.queue.taken_ticket
            self._wake_settled()
