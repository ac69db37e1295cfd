"""The journal of a store with the NVMe tier: changes of the store go down, decisions of the tier come up.

Responsibility: write objects behind (cache buckets) or at once (durable ones), log names, deletions and
buckets, and keep the table's tier bits true.

Invariants:
- A change of the store is complete in memory first; its records are queued in the same step, in the order of
  the changes. So the log is never ahead of what any door has seen.
- `settle` returns once all of this is durable so far: durable objects, their names and deletions, blocks' deletions,
  and buckets. `settle_names` waits for the names of caches, too.
- An object is queued for writing only while it is in DRAM; what is evicted unwritten was a cache's.

Concurrency: the service's trio thread. `run` writes behind; `settle` and `persist` await the log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trio

from kvfs import limits
from kvfs._native.shared.table import TIER_NVME
from kvfs.errors import Corrupt, DeviceAway, DeviceFailed, KvfsError, NoSpace, NotFound, Superseded
from kvfs.formats import RecordType
from kvfs.index.draft_snapshots import SnapshotIndex
from kvfs.index.names import NameIndex
from kvfs.index.rows import PINNED, BucketRow, NameRow
from tiers.dram.tier import DramTier
from tiers.log.bucket_files import BucketFiles
from tiers.log.entries import Barrier, Record
from tiers.log.records import MetaBody, RenameBody
from tiers.model.objects import Bucket, Name, ObjectInfo
from tiers.model.tier import Kind, StoreKey
from tiers.nvme.extent_reader import ExtentReader
from tiers.nvme.journal import Journal, Resident, Residents
from tiers.nvme.large_objects import LargeObjects
from tiers.nvme.snapshots import Snapshots
from tiers.nvme.stored import Fault, NvmeObserver, Stored, slot_payloads
from tiers.nvme.tickets import Tickets
from tiers.nvme.tier import NvmeTier
from tiers.nvme.write_queue import WriteQueue

_log = logging.getLogger("kvfs.nvme")


class NvmeJournal(Journal, NvmeObserver):
    """See the module's header."""

    snapshots: Snapshots

    def __init__(self, nvme: NvmeTier, names: NameIndex, dram: DramTier, data_dir: Path) -> None:
        self.nvme = nvme
        self.reader = ExtentReader(nvme)
        self.buckets = BucketFiles(data_dir)
        self.is_finished = False
        self._dram = dram
        self._tickets = tickets = Tickets(nvme)
        self.snapshots = snapshots = Snapshots(nvme, dram, tickets, SnapshotIndex(names.environment))
        self._large = LargeObjects(nvme, self.reader, tickets, snapshots)
        self._queue = WriteQueue(nvme)
        self._residents: Residents

    def attach(self, residents: Residents) -> None:
        self._residents = residents
        self.nvme.observer = self

    def usage(self) -> list[dict[str, Any]]:
        return [self.nvme.usage() | self._queue.usage()]

    @property
    def large(self) -> LargeObjects:
        return self._large

    @property
    def largest_object_bytes(self) -> int:
        return self.nvme.largest_object_bytes

    def check_queue(self) -> None:
        self.nvme.log.check_queue()

    def check_durable(self, size_bytes: int) -> None:
        self.check_queue()
        self.nvme.check_durable_room((size_bytes,))

    def check_keepable(self, rows: Iterable[NameRow]) -> None:
        sizes_bytes = [row.size_bytes for row in rows if not self.is_kept(row.object_id)]
        if sizes_bytes:
            self.nvme.check_durable_room(sizes_bytes)

    def is_kept(self, object_id: int) -> bool:
        return self.nvme.objects.is_kept(object_id)

    def holds(self, object_id: int) -> bool:
        return self.nvme.holds(object_id)

    def is_writing(self, object_id: int) -> bool:
        return object_id in self.nvme.objects and not self.nvme.holds(object_id)

    def expendable(self) -> Iterable[StoreKey]:
        return (each.key for each in self.nvme.objects.expendable())

    def is_needed(self, object_id: int) -> bool:
        return self.nvme.objects.is_unsettled(object_id)

    def sealed(self, found: Resident, *, replaced: int | None = None, snapshot: int | None = None) -> None:
        bucket = found.bucket
        if snapshot is not None and snapshot != found.object_id:
            self.snapshots.note(snapshot, found.object_id)
        if found.named is not None and snapshot == found.object_id:
            stored = self.snapshots.keep(snapshot, bucket, *found.named)
            self._residents.note_copy(stored.key, TIER_NVME, stored.place)
            self._tickets.drop(replaced, behind=True, awaited=False)
            return
        if bucket.durable or snapshot is not None:
            self._tickets.required = self._put(found)
            self._tickets.drop(snapshot, behind=True, awaited=False)
            self._tickets.drop(replaced, behind=True, awaited=False)
            return
        self._tickets.drop(replaced)
        self._queue.admit(found)

    def checksum(self, object_id: int) -> int | None:
        stored = self.nvme.objects.get(object_id)
        whole = stored is not None and len(stored.pieces) == 1
        piece = stored.pieces[0] if stored is not None and whole else None
        return None if piece is None else piece.checksum

    async def read_into(self, object_id: int, into: memoryview) -> None:
        stored = self.nvme.objects.get(object_id)
        if stored is None:
            raise Superseded(f"object {object_id} has left the NVMe tier")
        await self.reader.load(stored, into)

    async def fetch(self, info: ObjectInfo, descriptor: int) -> int | None:
        stored = self.nvme.objects.get(info.object_id)
        if stored is None:
            raise NotFound(f"object {info.object_id} is gone")
        try:
            return await self.reader.fill(stored, descriptor)
        except (Corrupt, Superseded) as error:
            raise NotFound(f"object {info.object_id} is gone: {error}") from error
        except DeviceAway as error:
            if stored.kept and stored.key.kind is Kind.OBJECT:
                raise
            raise NotFound(f"object {info.object_id} cannot be read now: {error}") from error

    async def settle_start(self) -> None:
        try:
            await self.nvme.log.drain()
        except (NoSpace, DeviceFailed) as error:  # the log tries again, and status says so
            _log.error("what the start decided is not on the device yet: %s", error)

    async def settle_names(self) -> None:
        await self.nvme.log.settle()

    def _put(self, found: Resident) -> int:
        """Queue an object's records; return the ticket of the last."""
        named = found.named
        stored = Stored(
            found.key,
            found.object_id,
            found.size_bytes,
            found.bucket.bucket_id,
            found.parent,
            found.uid,
            sealed_at_ns=named[1].mtime_ns if named else time.time_ns(),
            kept=found.bucket.durable or bool(named and self._pins(named[1], kept=False)),
            hits=self._residents.hits(found.key.digest),
        )
        meta = MetaBody(named[0].bucket, named[0].key, named[1]) if named else None
        dram = self._dram
        checksum = dram.checksum(found.extent) if found.size_bytes <= self.nvme.pool.extent_bytes else None
        open_slot = partial(dram.open_copy, found.extent)
        payloads = slot_payloads(self.nvme.pool, open_slot, found.size_bytes, checksum)
        stored.ticket = self.nvme.put(stored, payloads, meta)
        return stored.ticket

    def _pins(self, row: NameRow, *, kept: bool) -> bool:
        """Return whether a cache's object is kept because it is pinned: pins take no room that is not there."""
        return bool(row.flags & PINNED) and (kept or self.nvme.has_durable_room(row.size_bytes))

    def named(self, object_id: int, name: Name, row: NameRow) -> None:
        self._name(object_id, name, row)

    def renamed(
        self,
        object_id: int,
        name: Name,
        row: NameRow,
        *,
        source: Name | None = None,
        replaced: int | None = None,
    ) -> None:
        was_kept = self.is_kept(object_id)
        ticket = self._name(object_id, name, row, moved=True)
        if ticket is not None and (was_kept or self.is_kept(object_id)):
            self._tickets.required = ticket
            if source is not None:
                self.nvme.vacate(source.bucket, source.key, ticket)
        self._tickets.drop(
            replaced, behind=ticket is not None, awaited=not self._residents.bucket(name.bucket).durable
        )

    def directory_renamed(self, source: Name, target: Name, object_ids: Sequence[int]) -> None:
        logged = [each for each in object_ids if each in self.nvme.objects]
        if len(logged) > 1:
            body = RenameBody((source.bucket, source.key), (target.bucket, target.key))
            self.nvme.log.append(Record(RecordType.RENAME, logged[-1], body=body.encode()))
            if any(self._residents.bucket(each.bucket).durable for each in (source, target)):
                self.nvme.log.append(Barrier())  # a power cut leaves no name without it

    def retired(self, object_id: int, name: Name, row: NameRow) -> None:
        stored = self.nvme.objects.get(object_id)
        if stored is not None:
            self.nvme.put_name(stored, MetaBody(name.bucket, name.key, row), is_final=True)

    def _name(self, object_id: int, name: Name, row: NameRow, *, moved: bool = False) -> int | None:
        """Log an object's name, if the log has the object or must have it; return the ticket. `moved`: the name is
        new."""
        bucket = self._residents.bucket(name.bucket)
        stored = self.nvme.objects.get(object_id)
        if stored is None:
            found = self._residents.in_dram(object_id) if bucket.durable else None
            if found is None:
                return None
            self._tickets.required = self._put(found)
            return self._tickets.required
        stored.bucket_id = bucket.bucket_id
        was_kept = stored.kept
        self.nvme.keep(stored, bucket.durable or self._pins(row, kept=was_kept))
        is_final = moved and not (was_kept or stored.kept)  # what is kept fails instead
        ticket = self.nvme.put_name(stored, MetaBody(name.bucket, name.key, row), is_final=is_final)
        stored.ticket = max(stored.ticket, ticket)
        if stored.kept:
            self._tickets.required = ticket
        return ticket

    def directory(self, bucket: Bucket, name: Name, row: NameRow) -> None:
        meta = MetaBody(name.bucket, name.key, row)
        ticket = self.nvme.put_marker(row.object_id, bucket.bucket_id, meta, kept=bucket.durable)
        if bucket.durable:
            self._tickets.required = ticket

    def check_link(self) -> None:
        self.check_queue()
        self.nvme.check_durable_room((0,))

    def linked(self, bucket: Bucket, name: Name, row: NameRow, replaced: int | None = None) -> None:
        self.directory(bucket, name, row)
        self._tickets.drop(replaced, behind=True, awaited=not bucket.durable)

    def removed(self, object_id: int, *, behind: bool = False) -> None:
        if not behind:
            self.snapshots.index.remove(object_id)
        self._tickets.drop(object_id, behind=behind)

    def block_removed(self, object_id: int) -> None:
        if object_id not in self.nvme.objects:
            self._tickets.fence()
        self.removed(object_id)

    def detached(self, key: StoreKey) -> None:
        self._queue.remove(key.digest)

    def promoted(self, key: StoreKey) -> None:
        self._queue.promoted(key.digest)

    def touched(self, key: StoreKey) -> None:
        self._queue.touched(key.digest, self._residents.object_id_of)

    def pinned(self, object_id: int, pinned: bool) -> None:
        stored = self.nvme.objects.get(object_id)
        if stored is not None and not self.nvme.buckets.is_durable(stored.bucket_id):
            room = stored.kept or self.nvme.has_durable_room(stored.size_bytes)
            self.nvme.keep(stored, pinned and room)

    def bucket(self, row: BucketRow) -> None:
        self.buckets.put(row)
        self._tickets.awaited = self.nvme.put_bucket(row)
        if row.class_ == "durable":
            self._tickets.required = self._tickets.awaited

    def bucket_removed(self, bucket_id: int) -> None:
        self.buckets.remove(bucket_id)
        self.nvme.drop_bucket(bucket_id)

    def has_settled(self, ticket: int) -> bool:
        return self.nvme.log.durable_ticket >= ticket

    @property
    def awaited_ticket(self) -> int:
        return self._tickets.newest

    async def settle(self, since: int = -1) -> None:
        if self._tickets.newest > since:
            await self._tickets.settle()

    async def persist(self, object_id: int) -> None:
        stored = self.nvme.objects.get(object_id)
        if stored is None:
            found = self._residents.in_dram(object_id)
            if found is None:
                raise Superseded(f"object {object_id} is no more")
            self.check_queue()
            self._queue.remove(found.key.digest)
            ticket = self._put(found)
        else:
            ticket = stored.ticket
        await self.snapshots.settle_object(object_id, ticket)

    async def run(self) -> None:
        """Write, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.nvme.log.run)
            nursery.start_soon(self._write_behind)
            nursery.start_soon(self._large.run)

    async def _write_behind(self) -> None:
        while True:
            await self._queue.wait()
            await self.nvme.log.wait_backlog(limits.WRITE_BEHIND_RECORDS)
            digest = self._queue.pop()
            if digest is None:  # evicted while the log was busy
                continue
            try:
                with self._queue.in_hand():
                    await self._write_one(digest)
            except (Superseded, KeyError):
                pass
            except KvfsError as error:
                _log.log(type(error).log_level, "write behind: %s", error)
                if isinstance(error, Corrupt):
                    self._evict_misread(self._residents.key_of(digest))

    async def _write_one(self, digest: bytes) -> None:
        """Queue one object's records, once its checksum is known. Raises Superseded, Corrupt."""
        object_id = self._residents.object_id_of(digest)
        found = None if object_id is None else self._residents.in_dram(object_id)
        if found is None or object_id is None or object_id in self.nvme.objects:
            return
        checksum = self._dram.checksum(found.extent)
        if checksum is None:
            self._queue.put(digest)
            await trio.sleep(limits.WRITE_BEHIND_POLL_S)
            return
        if found.size_bytes > self.nvme.pool.extent_bytes:  # whose checksum is of the whole
            if await self._dram.hash(found.extent) != checksum:
                raise Corrupt(f"slot {found.extent.slot} does not match its checksum")
            again = self._residents.in_dram(object_id)
            if again is None or object_id in self.nvme.objects:
                return
            found = again
        self._put(found)

    def queue_unwritten(self) -> None:
        """Queue what a start took over and only DRAM has; durable objects before the first settle."""
        for sealed in self._dram.sealed():
            header, object_id = sealed.header, sealed.header.object_id
            if object_id in self.nvme.objects:
                continue
            # To ask for a cache's block would hash it now, and those are many.
            is_cached = header.key.kind is Kind.BLOCK and not self.nvme.buckets.is_durable(header.bucket_id)
            found = None if is_cached else self._residents.in_dram(object_id)
            if found is not None and found.bucket.durable:
                self._tickets.required = self._put(found)
            else:
                self._queue.put(sealed.header.key.digest)

    async def finish(self) -> None:
        while (digest := self._queue.pop()) is not None:
            try:
                await self._write_one(digest)
            except (Superseded, Corrupt):
                continue
            if self.nvme.log.backlog >= limits.WRITE_BEHIND_RECORDS:
                await self.nvme.log.drain()
        await self.nvme.log.drain()
        await self.nvme.log.close()
        self.is_finished = True

    def written(self, stored: Stored) -> None:
        self._residents.note_copy(stored.key, TIER_NVME, stored.place)

    def evicted(self, stored: Stored) -> list[int]:
        """Note that reclaim evicts an object: it stays in DRAM if it is there, else the store evicts it with its
        unit."""
        return self._residents.drop_copy(stored.key, TIER_NVME)

    def damaged(self, stored: Stored, fault: Fault) -> bool:
        if fault is Fault.MISREAD:
            self.durable_losses += stored.kept
            self._evict_misread(stored.key)
            return False
        self._drop_all(self._residents.drop_damaged(stored.key))
        found = self._residents.in_dram(stored.object_id)
        if found is None:
            return False
        if fault is Fault.DAMAGED and found.bucket.durable:  # at once: until then nothing keeps it in DRAM
            self._tickets.required = self._put(found)
        else:
            self._queue.put(stored.key.digest)
        return True

    def _evict_misread(self, key: StoreKey) -> None:
        """Evict an object from the store whose bytes in DRAM are not what was sealed, and which no other tier has."""
        self._drop_all(self._residents.cascade_evict(key))

    def _drop_all(self, object_ids: Iterable[int]) -> None:
        for object_id in object_ids:
            self.nvme.drop(object_id)

    def refused(self, stored: Stored) -> None:
        """Drop the copy of an object that had no room: tried again at once, it would find the tier as full."""
        self._drop_all(self._residents.drop_copy(stored.key, TIER_NVME))

    def hits_of(self, stored: Stored) -> int:
        return self._residents.hits(stored.key.digest)
