"""How the store's changes reach the NVMe tier, and what that tier decides comes back.

Responsibility: write objects behind (cache buckets) or at once (durable ones), log names, deletions and
buckets, and keep the table's tier bits true. `Journal` is a store without the tier: nothing to do, nothing to
wait for. `NvmeJournal` is one with it.

Invariants:
- A change of the store is complete in memory first; its records are queued in the same step, in the order of
  the changes. So the log is never ahead of what any door has seen.
- `settle` returns once everything is durable that was promised so far: durable objects, their names, and all
  deletions of what the log had heard of.
- An object is queued for writing only while it is in DRAM; what leaves DRAM unwritten was a cache's.

Concurrency: the service's trio thread. `run` writes behind; `settle` and `persist` await the log.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import trio
import xxhash

from kvfs import limits
from kvfs._native import slots as native
from kvfs._native.table import TIER_NVME
from kvfs.errors import Corrupt, DeviceFailed, DeviceMissing, KvfsError, NoSpace, Superseded
from kvfs.name_rows import PINNED, BucketRow, NameRow
from kvfs.records import MetaBody
from tiers.admission import GhostQueue
from tiers.base import Extent, StoreKey, object_key
from tiers.bucket_files import BucketFiles
from tiers.device import Device
from tiers.large import LargeDraft, LargeObjects
from tiers.log_entries import Barrier, Payload
from tiers.model import Bucket, Name
from tiers.nvme import Fault, NvmeTier, Stored
from tiers.snapshots import OPEN, SnapshotIndex

if TYPE_CHECKING:
    from tiers.store import TieredStore

_log = logging.getLogger("kvfs.nvme")


@dataclass(frozen=True, slots=True)
class Resident:
    """An object in DRAM, as a lower tier takes it."""

    key: StoreKey
    object_id: int
    extent: Extent
    size_bytes: int
    bucket: Bucket
    named: tuple[Name, NameRow] | None
    parent: bytes
    uid: int


class Journal:
    """A store that keeps its objects in DRAM only: nothing is written, everything is settled."""

    is_finished = True
    """Whether the lower tiers know all that the store does."""

    @property
    def large(self) -> LargeObjects:
        """Objects larger than DRAM takes. Raises DeviceMissing."""
        raise DeviceMissing("objects larger than DRAM takes need the NVMe tier, and this store has none")

    @property
    def largest_object_bytes(self) -> int:
        """Of those; 0: none."""
        return 0

    def sealed_large(
        self, draft: LargeDraft, bucket: Bucket, name: Name, row: NameRow, replaced: int | None
    ) -> None:
        """A draft that was written extent by extent has its name, in the place of object `replaced`."""

    async def persist_large(self, draft: LargeDraft, name: Name, row: NameRow) -> None:
        """What was written of such a draft is durable under this name when this returns."""

    def usage(self) -> list[dict[str, Any]]:
        """Of the tiers below DRAM."""
        return []

    async def run(self) -> None:
        """Write behind, until cancelled."""
        await trio.sleep_forever()

    async def finish(self) -> None:
        """Write what is queued. Raises NoSpace, DeviceFailed."""

    def check_queue(self) -> None:
        """Raise NoSpace or DeviceFailed while too much waits to be written for more to be queued."""

    def check_durable(self, size_bytes: int) -> None:
        """Raises DeviceMissing: there is nothing durable here."""
        raise DeviceMissing("a durable bucket needs the NVMe tier, and this store has none")

    def check_keepable(self, rows: Iterable[NameRow]) -> None:
        """Raises NoSpace where these objects cannot all become durable."""

    def holds(self, object_id: int) -> bool:
        """Whether a copy outside of DRAM can be read."""
        return False

    def is_writing(self, object_id: int) -> bool:
        """Whether an object is queued for a device, and not yet readable there."""
        return False

    def expendable(self) -> Iterable[StoreKey]:
        """Objects below DRAM that may leave the store, the oldest first."""
        return ()

    def is_needed(self, object_id: int) -> bool:
        """Whether the copy in DRAM may not go yet, since the object is durable and not on the device."""
        return False

    def sealed(self, found: Resident, *, replaced: int | None = None, snapshot: int | None = None) -> None:
        """An object was sealed into DRAM, in the place of object `replaced`; `snapshot`: of its draft, if any."""

    def named(self, object_id: int, name: Name, row: NameRow) -> None:
        """An object or directory has other attributes."""

    def renamed(self, object_id: int, name: Name, row: NameRow, replaced: int | None = None) -> None:
        """An object or directory has another name; `replaced` had it before."""

    def retired(self, object_id: int, name: Name, row: NameRow) -> None:
        """No start gives the name back to this object."""

    def directory(self, bucket: Bucket, name: Name, row: NameRow) -> None:
        """A directory was made."""

    def removed(self, object_id: int, *, behind: bool = False) -> None:
        """An object or directory was removed; `behind`: by what has its name, and goes once that is durable."""

    def evicted(self, key: StoreKey) -> None:
        """An object left the store, as a cache's may."""

    def touched(self, key: StoreKey) -> None:
        """An object in DRAM was read."""

    def promoted(self, key: StoreKey) -> None:
        """An object that no device has came back to DRAM from further below: it was wanted after it was gone."""

    def pinned(self, object_id: int, pinned: bool) -> None: ...

    def bucket(self, row: BucketRow) -> None:
        """A bucket was made or changed."""

    def bucket_removed(self, bucket_id: int) -> None: ...

    @property
    def is_settled(self) -> bool:
        return True

    @property
    def promised(self) -> int:
        """Ticket of what `settle` waits for now."""
        return 0

    def has_settled(self, ticket: int) -> bool:
        """Whether what was promised up to this ticket is durable."""
        return True

    @property
    def durable_losses(self) -> int:
        """How many durable objects were sealed, and could not be written since their bytes had changed in DRAM."""
        return 0

    async def settle(self) -> None:
        """Wait until what was promised so far is durable. Raises NoSpace, DeviceFailed for durable objects."""

    async def read_into(self, object_id: int, into: memoryview) -> None:
        """Read an object from below DRAM. Raises Superseded, Corrupt, DeviceFailed."""
        raise Superseded(f"object {object_id} is in no tier below DRAM")

    async def settle_start(self) -> None:
        """Before anybody is served, and before `run`: what this start found gone must not be there at the next."""

    async def settle_names(self) -> None:
        """Wait until every change of names so far is durable. Raises NoSpace, DeviceFailed."""

    async def persist(self, object_id: int) -> None:
        """Wait until a sealed object is durable, whatever its bucket. Raises NoSpace, DeviceFailed."""

    def put_snapshot(self, extent: Extent, name: Name, row: NameRow) -> int | None:
        """See `TieredStore.put_snapshot`."""
        return None

    async def settle_snapshot(self, snapshot: int, previous: int | None) -> None:
        """Wait until what `put_snapshot` has queued is durable; then `previous`, an earlier one, is no more. Raises
        NoSpace, DeviceFailed, and then it is dropped."""

    def rename_snapshot(self, name: Name, row: NameRow, size_bytes: int | None = None) -> None:
        """See `TieredStore.rename_snapshot`; `size_bytes`: of what is durable, where the draft may have grown since."""

    def keep_order(self) -> None:
        """What is queued from here on is written once all before it is durable."""

    def is_snapshot(self, object_id: int, descriptor: int) -> bool:
        """Whether a draft's durable copy has exactly the bytes of this file."""
        return False


class SlotPayload:
    """A piece of a slot, sealed or not, read as it is when its turn to be written comes."""

    def __init__(
        self, device: Device, open_slot: Callable[[], int], offset: int, size_bytes: int, checksum: int | None
    ) -> None:
        self.size_bytes = size_bytes
        self.checksum = checksum
        self._device, self._open, self._offset = device, open_slot, offset

    async def read_into(self, view: memoryview) -> int:
        descriptor = self._open()
        try:
            os.set_blocking(descriptor, True)  # with O_NONBLOCK io_uring answers EAGAIN where it would wait
            return await self._device.read(
                descriptor, self._offset, view[: self.size_bytes], checksum=self.checksum
            )
        finally:
            os.close(descriptor)


class NvmeJournal(Journal):
    """See the module's header."""

    def __init__(self, store: TieredStore, nvme: NvmeTier) -> None:
        self.nvme = nvme
        self._large = LargeObjects(nvme)
        self._store = store
        self._snapshots = SnapshotIndex(store.names.environment)
        self.buckets = BucketFiles(store.home.path)
        self._ghosts = GhostQueue()
        self._behind: OrderedDict[bytes, None] = OrderedDict()
        """Keys of objects that are to be written when their turn comes."""
        self._returned: OrderedDict[bytes, int] = OrderedDict()
        """Keys of objects that came back from below NVMe, with their reads since: the one that brought them counts."""
        self._more = trio.Event()
        self._must = 0
        """Ticket of the newest entry that a durable object depends on..."""
        self._should = 0
        """...and of the newest rename, bucket, or deletion of what was replaced. They are waited for too, as is
        `NvmeTier.deletion_ticket`, but only the first may fail a request."""
        self._skipped = 0
        self._durable_losses = 0
        self.is_finished = False
        nvme.evicted = self._let_go
        nvme.hits_of = self._hits_of
        nvme.damaged = self._damaged
        nvme.refused = self._refused
        nvme.written = self._written

    def usage(self) -> list[dict[str, Any]]:
        return [self.nvme.usage() | {"write_behind": len(self._behind), "not_admitted": self._skipped}]

    # --- what the store tells -----------------------------------------------------------------------------

    @property
    def large(self) -> LargeObjects:
        return self._large

    @property
    def largest_object_bytes(self) -> int:
        return self.nvme.largest_object_bytes

    def sealed_large(
        self, draft: LargeDraft, bucket: Bucket, name: Name, row: NameRow, replaced: int | None
    ) -> None:
        stored = draft.stored
        self._snapshots.forget(stored.object_id)
        stored.bucket_id, stored.sealed_at_ns = bucket.bucket_id, row.mtime_ns
        self.nvme.keep(stored, bucket.durable or bool(row.flags & PINNED))
        stored.ticket = self.nvme.put_name(stored, MetaBody(name.bucket, name.key, row))
        if bucket.durable:
            self._must = stored.ticket
        self.nvme.counts.objects_written += 1
        self.nvme.counts.bytes_written += stored.size_bytes
        self._drop(replaced, behind=True, awaited=not bucket.durable)

    async def persist_large(self, draft: LargeDraft, name: Name, row: NameRow) -> None:
        self._note_snapshot(row.object_id, OPEN)
        draft.stored.bucket_id = self._store.bucket(name.bucket).bucket_id
        await self.nvme.log.settle(self.nvme.put_name(draft.stored, MetaBody(name.bucket, name.key, row)))
        draft.check()

    def check_queue(self) -> None:
        self.nvme.log.check_queue()

    def check_durable(self, size_bytes: int) -> None:
        self.check_queue()
        self.nvme.check_durable_room((size_bytes,))

    def check_keepable(self, rows: Iterable[NameRow]) -> None:
        sizes_bytes = [row.size_bytes for row in rows if not self._is_kept(row.object_id)]
        if sizes_bytes:
            self.nvme.check_durable_room(sizes_bytes)

    def _is_kept(self, object_id: int) -> bool:
        stored = self.nvme.objects.get(object_id)
        return stored is not None and stored.kept

    def holds(self, object_id: int) -> bool:
        return self.nvme.holds(object_id)

    def is_writing(self, object_id: int) -> bool:
        return object_id in self.nvme.objects and not self.nvme.holds(object_id)

    def expendable(self) -> Iterable[StoreKey]:
        return (each.key for each in list(self.nvme.objects.values()) if each.pieces and not each.stays)

    def is_needed(self, object_id: int) -> bool:
        stored = self.nvme.objects.get(object_id)
        return stored is not None and stored.kept and stored.ticket > self.nvme.log.durable_ticket

    def sealed(self, found: Resident, *, replaced: int | None = None, snapshot: int | None = None) -> None:
        bucket = found.bucket
        if snapshot is not None and snapshot != found.object_id:
            self._note_snapshot(snapshot, found.object_id)
        if found.named is not None and snapshot == found.object_id:
            self._snapshots.forget(snapshot)
            self._keep_snapshot(found.object_id, bucket, *found.named)
            self._drop(replaced, behind=True, awaited=False)
            return
        if bucket.durable or snapshot is not None:
            self._must = self._put(found)
            self._drop(snapshot, behind=True, awaited=False)
            self._drop(replaced, behind=True, awaited=False)
            return
        self._drop(replaced)
        if not bucket.admits_all and not self._ghosts.admits(_ghost_key(found)):
            self._skipped += 1
        else:
            self._queue(found.key)

    def _keep_snapshot(self, object_id: int, bucket: Bucket, name: Name, row: NameRow) -> None:
        """What was made durable of a draft is what was sealed: its bytes are written already."""
        stored = self.nvme.objects[object_id]
        self.nvme.keep(stored, bucket.durable or bool(row.flags & PINNED))
        stored.ticket = self._must = self.nvme.put_name(stored, MetaBody(name.bucket, name.key, row))
        self._store.note_copy(stored.key, TIER_NVME, stored.place)

    def rename_snapshot(self, name: Name, row: NameRow, size_bytes: int | None = None) -> None:
        stored = self.nvme.objects.get(row.object_id)
        if stored is not None:
            stored.bucket_id = self._store.bucket(name.bucket).bucket_id
            size_bytes = stored.size_bytes if size_bytes is None else size_bytes
            meta = MetaBody(name.bucket, name.key, replace(row, size_bytes=size_bytes))
            stored.ticket = self._must = self.nvme.put_name(stored, meta)

    def keep_order(self) -> None:
        self.nvme.log.append(Barrier())

    def is_snapshot(self, object_id: int, descriptor: int) -> bool:
        stored, size_bytes = self.nvme.objects.get(object_id), os.fstat(descriptor).st_size
        if stored is None or not stored.readable or stored.size_bytes != size_bytes:
            return False
        step = self.nvme.pool.extent_bytes
        return all(
            piece is not None and native.xxh3_64(os.pread(descriptor, step, number * step)) == piece.checksum
            for number, piece in enumerate(stored.pieces if size_bytes else ())
        )

    def put_snapshot(self, extent: Extent, name: Name, row: NameRow) -> int | None:
        bucket = self._store.bucket(name.bucket)
        self.check_durable(row.size_bytes)
        key = object_key(row.object_id)
        self._note_snapshot(row.object_id, OPEN)
        stored = Stored(key, row.object_id, row.size_bytes, bucket.bucket_id, uid=row.uid, kept=True)
        payloads = self._payloads(partial(self._store.dram.open_draft, extent), row.size_bytes, None)
        stored.ticket = self.nvme.put(stored, payloads, MetaBody(name.bucket, name.key, row))
        return row.object_id

    async def settle_snapshot(self, snapshot: int, previous: int | None) -> None:
        stored = self.nvme.objects.get(snapshot)
        if stored is None:
            return
        try:
            await self._settle_object(snapshot, stored.ticket, f"object {snapshot}")
        except KvfsError:
            if (
                self.nvme.objects.get(snapshot) is stored
            ):  # what the caller is told is not there must not come later
                self.removed(snapshot)
            raise
        self._drop(previous, behind=True, awaited=False)

    async def read_into(self, object_id: int, into: memoryview) -> None:
        stored = self.nvme.objects.get(object_id)
        if stored is None:
            raise Superseded(f"object {object_id} has left the NVMe tier")
        await self.nvme.load(stored, into)

    async def settle_start(self) -> None:
        try:
            await self.nvme.log.drain()
        except (NoSpace, DeviceFailed) as error:  # the log tries again, and status says so
            _log.error("what the start decided is not on the device yet: %s", error)

    async def settle_names(self) -> None:
        await self.nvme.log.settle()

    def _put(self, found: Resident) -> int:
        """Queue an object's records; the ticket of the last."""
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
            hits=self._hits(found.key.digest),
        )
        meta = MetaBody(named[0].bucket, named[0].key, named[1]) if named else None
        dram = self._store.dram
        checksum = dram.checksum(found.extent) if found.size_bytes <= self.nvme.pool.extent_bytes else None
        payloads = self._payloads(partial(dram.open_sealed, found.extent), found.size_bytes, checksum)
        stored.ticket = self.nvme.put(stored, payloads, meta)
        return stored.ticket

    def _pins(self, row: NameRow, *, kept: bool) -> bool:
        """Whether a cache's object is kept because it is pinned: pins take no room that is not there."""
        return bool(row.flags & PINNED) and (kept or self.nvme.has_durable_room(row.size_bytes))

    def _payloads(self, open_slot: Callable[[], int], size_bytes: int, checksum: int | None) -> list[Payload]:
        """The extents of a slot; `checksum` is of the only one, where there is only one and it is known."""
        step, device = self.nvme.pool.extent_bytes, self.nvme.device
        return [
            SlotPayload(device, open_slot, start, min(step, size_bytes - start), checksum)
            for start in range(0, max(size_bytes, 1), step)
        ]

    def _queue(self, key: StoreKey) -> None:
        self._behind[key.digest] = None
        self._more.set()

    def named(self, object_id: int, name: Name, row: NameRow) -> None:
        self._name(object_id, name, row)

    def renamed(self, object_id: int, name: Name, row: NameRow, replaced: int | None = None) -> None:
        stored = self.nvme.objects.get(object_id)
        was_kept = stored is not None and stored.kept
        ticket = self._name(object_id, name, row, moved=True)
        if ticket is not None:  # the old name must not come back, as after a removal
            self._should = ticket
            if was_kept:
                self._must = ticket
            self.nvme.log.append(Barrier())  # or another object under the old name could arrive without this
        self._drop(replaced, behind=ticket is not None, awaited=not self._store.bucket(name.bucket).durable)

    def retired(self, object_id: int, name: Name, row: NameRow) -> None:
        stored = self.nvme.objects.get(object_id)
        if stored is None:
            self._fence()
        else:
            self._should = self.nvme.put_name(stored, MetaBody(name.bucket, name.key, row), is_final=True)

    def _name(self, object_id: int, name: Name, row: NameRow, *, moved: bool = False) -> int | None:
        """Log what an object is called, if the log has it or must have it; the ticket. `moved`: not what it was."""
        bucket = self._store.bucket(name.bucket)
        stored = self.nvme.objects.get(object_id)
        if stored is None:
            found = self._store.in_dram(object_id) if bucket.durable else None
            if found is None:
                return None
            self._must = self._put(found)
            return self._must
        stored.bucket_id = bucket.bucket_id
        was_kept = stored.kept
        self.nvme.keep(stored, bucket.durable or self._pins(row, kept=was_kept))
        is_final = moved and not (was_kept or stored.kept)  # what is kept fails instead
        ticket = self.nvme.put_name(stored, MetaBody(name.bucket, name.key, row), is_final=is_final)
        if stored.kept:
            stored.ticket = max(stored.ticket, ticket)
            self._must = ticket
        return ticket

    def directory(self, bucket: Bucket, name: Name, row: NameRow) -> None:
        meta = MetaBody(name.bucket, name.key, row)
        ticket = self.nvme.put_marker(row.object_id, bucket.bucket_id, meta, kept=bucket.durable)
        if bucket.durable:
            self._must = ticket

    def removed(self, object_id: int, *, behind: bool = False) -> None:
        if not behind:
            self._snapshots.forget(object_id)
        self._drop(object_id, behind=behind)

    def _note_snapshot(self, object_id: int, sealed_as: int) -> None:
        self._snapshots.note(object_id, sealed_as, lambda each: self.nvme.known(each) is None)

    def _drop(self, object_id: int | None, *, behind: bool = False, awaited: bool = True) -> None:
        """`behind`: only once what was queued before is durable, which replaces it; not `awaited` where that stays."""
        if object_id is None or object_id not in self.nvme.objects:
            self._fence()
            return
        kept = self.nvme.objects[object_id].kept
        if behind:
            self.nvme.log.append(Barrier())
        ticket = self.nvme.drop(object_id, behind=behind, is_final=awaited and (behind or not kept))
        if ticket is not None and awaited:
            self._should = ticket
        if ticket is not None and kept and not behind:
            self._must = ticket

    def _fence(self) -> None:
        """What reclaim lets go of has no deletion in the log, so a name that it had is settled once it is gone."""
        if self.nvme.is_evicting:
            self._should = self.nvme.log.append(Barrier())

    def evicted(self, key: StoreKey) -> None:
        self._behind.pop(key.digest, None)

    def promoted(self, key: StoreKey) -> None:
        self._returned[key.digest] = 0
        if len(self._returned) > limits.RETURNED_KEYS:
            self._returned.popitem(last=False)

    def touched(self, key: StoreKey) -> None:
        if self._returned:
            self._touch_returned(key)
        if self._skipped and key.digest not in self._behind:
            object_id = self._store.object_id_of(key.digest)
            if object_id is not None and object_id not in self.nvme.objects:
                self._queue(key)

    def _touch_returned(self, key: StoreKey) -> None:
        """What came back from below is written when it is read once more: most of it never is."""
        reads = self._returned.pop(key.digest, None)
        if reads == 0:
            self._returned[key.digest] = 1
        elif reads is not None:
            self._queue(key)

    def pinned(self, object_id: int, pinned: bool) -> None:
        stored = self.nvme.objects.get(object_id)
        if stored is not None and not self.nvme.is_durable(stored.bucket_id):
            room = stored.kept or self.nvme.has_durable_room(stored.size_bytes)
            self.nvme.keep(stored, pinned and room)

    def bucket(self, row: BucketRow) -> None:
        self.buckets.put(row)
        self._should = self.nvme.put_bucket(row)
        if row.class_ == "durable":
            self._must = self._should

    def bucket_removed(self, bucket_id: int) -> None:
        self.buckets.remove(bucket_id)
        self.nvme.drop_bucket(bucket_id)

    # --- waiting ------------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        return self.has_settled(self.promised)

    def has_settled(self, ticket: int) -> bool:
        return self.nvme.log.durable_ticket >= ticket

    @property
    def promised(self) -> int:
        return max(self._must, self._should, self.nvme.deletion_ticket)

    @property
    def durable_losses(self) -> int:
        return self._durable_losses

    async def settle(self) -> None:
        must = self._must
        log = self.nvme.log
        try:
            await log.settle(self.promised)
        except (NoSpace, DeviceFailed):
            if log.durable_ticket < must:
                raise
            # A cache's change that the device does not take is done in memory, stays queued, and status says so; what
            # it has ended is said beside the segments.

    async def persist(self, object_id: int) -> None:
        stored = self.nvme.objects.get(object_id)
        if stored is None:
            found = self._store.in_dram(object_id)
            if found is None:
                raise Superseded(f"object {object_id} is no more")
            self.check_queue()
            self._behind.pop(found.key.digest, None)
            ticket = self._put(found)
        else:
            ticket = stored.ticket
        await self._settle_object(object_id, ticket, f"object {object_id}")

    async def _settle_object(self, object_id: int, ticket: int, what: str) -> None:
        await self.nvme.log.settle(ticket)
        if not self.nvme.holds(object_id):
            raise NoSpace(f"{what} found no room in the NVMe tier")

    # --- writing behind -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.nvme.log.run)
            nursery.start_soon(self._write_behind)
            nursery.start_soon(self._large.run)

    async def _write_behind(self) -> None:
        while True:
            if not self._behind:
                self._more = trio.Event()
                await self._more.wait()
            await self.nvme.log.wait_backlog(limits.WRITE_BEHIND_RECORDS)
            if not self._behind:  # evicted while the log was busy
                continue
            digest, _ = self._behind.popitem(last=False)
            try:
                await self._write_one(digest)
            except (Superseded, KeyError):
                pass
            except KvfsError as error:
                _log.log(type(error).log_level, "write behind: %s", error)
                if isinstance(error, Corrupt):
                    self._evict_misread(self._store.key_of(digest))

    async def _write_one(self, digest: bytes) -> None:
        """Queue one object's records, once its checksum is known. Raises Superseded, Corrupt."""
        object_id = self._store.object_id_of(digest)
        found = None if object_id is None else self._store.in_dram(object_id)
        if found is None or object_id is None or object_id in self.nvme.objects:
            return
        checksum = self._store.dram.checksum(found.extent)
        if checksum is None:
            self._behind[digest] = None
            await trio.sleep(limits.WRITE_BEHIND_POLL_S)
            return
        if found.size_bytes > self.nvme.pool.extent_bytes:
            await self._verify(found.extent, checksum)
            again = self._store.in_dram(object_id)
            if again is None or object_id in self.nvme.objects:
                return
            found = again
        self._put(found)

    async def _verify(self, extent: Extent, checksum: int) -> None:
        """A slot of several extents, whose checksum is of the whole. Raises Corrupt, Superseded."""
        descriptor = self._store.dram.open_sealed(extent)
        try:
            found = await trio.to_thread.run_sync(native.fd_xxh3_64, descriptor)
        finally:
            os.close(descriptor)
        if found != checksum:
            raise Corrupt(f"slot {extent.slot} does not match its checksum")

    def forget_snapshots(self) -> None:
        """Once a start has decided what becomes of the files that were being written."""
        self._snapshots.clear()

    def queue_unwritten(self) -> None:
        """Have written what a start took over and only DRAM has; durable objects before the first settle."""
        for sealed in self._store.dram.sealed():
            object_id = sealed.header.object_id
            if object_id in self.nvme.objects:
                continue
            found = self._store.in_dram(object_id)
            if found is not None and found.bucket.durable:
                self._must = self._put(found)
            else:
                self._queue(sealed.header.key)

    async def finish(self) -> None:
        while self._behind:
            digest, _ = self._behind.popitem(last=False)
            try:
                await self._write_one(digest)
            except (Superseded, Corrupt):
                continue
            if self.nvme.log.backlog >= limits.WRITE_BEHIND_RECORDS:
                await self.nvme.log.drain()
        await self.nvme.log.drain()
        await self.nvme.log.close()
        self.is_finished = True

    # --- what the tier tells ------------------------------------------------------------------------------

    def _written(self, stored: Stored) -> None:
        self._store.note_copy(stored.key, TIER_NVME, stored.place)

    def _let_go(self, stored: Stored) -> list[int]:
        """Reclaim lets an object go: it stays in DRAM if it is there, else it leaves the store, with its unit."""
        return self._store.lose_copy(stored.key, TIER_NVME)

    def _damaged(self, stored: Stored, fault: Fault) -> bool:
        if fault is Fault.MISREAD:
            self._durable_losses += stored.kept
            self._evict_misread(stored.key)
            return False
        for object_id in self._store.lose_damaged(stored.key):
            self.nvme.drop(object_id)
        found = self._store.in_dram(stored.object_id)
        if found is None:
            return False
        if fault is Fault.DAMAGED and found.bucket.durable:  # at once: until then nothing keeps it in DRAM
            self._must = self._put(found)
        else:
            self._queue(stored.key)
        return True

    def _evict_misread(self, key: StoreKey) -> None:
        """What is in DRAM is not what was sealed, and nothing else has it: the object leaves the store."""
        for object_id in self._store.cascade_evict(key):
            self.nvme.drop(object_id)

    def _refused(self, stored: Stored) -> None:
        """Nothing is tried again at once: it would find the tier as full."""
        for object_id in self._store.lose_copy(stored.key, TIER_NVME):
            self.nvme.drop(object_id)

    def _hits_of(self, stored: Stored) -> int:
        return self._hits(stored.key.digest)

    def _hits(self, digest: bytes) -> int:
        entry = self._store.table.get(digest)
        return 0 if entry is None else entry.hits


def _ghost_key(found: Resident) -> int:
    """What stays the same when an object is computed again: its prefix hash, or its name."""
    if found.named is None:
        return int.from_bytes(found.key.digest[:8], "little")
    name, _ = found.named
    return xxhash.xxh3_64_intdigest(name.bucket + b"\0" + name.key)
