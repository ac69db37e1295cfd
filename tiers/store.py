"""The store that all doors share: names, objects and blocks over the tiers.

Responsibility: open and close it, seal drafts, read; each step is complete when it returns. It stands on four
layers: lookups and listings (`tiers.catalog`), room and eviction (`tiers.residence`), copies below DRAM
(`tiers.copies`), names and buckets (`tiers.naming`). Policy is `tiers.eviction`, bytes are `tiers.dram` and
`tiers.nvme`, ordered names are `kvfs.names`, and where each object lies is the shared table.

Invariants:
- An object is in the table exactly while a tier has its sealed bytes; a name row without a table entry is stale
  and reads as NotFound.
- The table entry goes before the slot is touched, so no reader can find a slot that is being recycled.
- Names: the last seal wins. Prefix hashes: the first seal wins, later ones are given the earlier object.

Concurrency: every method runs on the service's trio thread; those that change something do not await, so each
is atomic towards all others. Native threads only read the table and count hits in it.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import trio

from kvfs import crashpoints, limits
from kvfs._native.sealer import Sealed
from kvfs._native.table import TIER_DRAM, TIER_NVME
from kvfs.errors import (
    Busy,
    ConfigError,
    Corrupt,
    Exists,
    InvalidRequest,
    KvfsError,
    NoSpace,
    NotPermitted,
    ObjectTooLarge,
    Superseded,
    WriterActive,
)
from kvfs.keys import block_name
from kvfs.name_rows import RETIRED, SNAPSHOT
from kvfs.names import NameIndex, NameRow
from tiers.base import NO_SLOT, Extent, Kind, SealHeader, StoreKey, object_key
from tiers.base import Sealed as SealedExtent
from tiers.blocks import Block
from tiers.catalog import block_digest
from tiers.cold_bucket import ColdOptions
from tiers.device import Device
from tiers.dram import DramTier
from tiers.eviction import EvictionPolicy, policy_named
from tiers.heritage import Heritage, Lower, walking
from tiers.home import Home, open_home
from tiers.journal import Resident
from tiers.large import LargeDraft, LargeReader
from tiers.model import Attributes, Bucket, Change, ChangeKind, Draft, Name, ObjectInfo
from tiers.naming import Naming, new_row
from tiers.promotion import Promoter
from tiers.replay import open_nvme

log = logging.getLogger("kvfs.store")


class TieredStore(Naming):
    """See the module's header. Make one with `TieredStore.open` or `TieredStore.start`."""

    def __init__(
        self, home: Home, names: NameIndex, dram: DramTier, quota_bytes: int, policy: EvictionPolicy[bytes]
    ) -> None:
        super().__init__(home, names, dram, quota_bytes, policy)
        self._promoter = Promoter(self)

    # --- life ---------------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        data_dir: Path,
        *,
        dram_bytes: int,
        max_slots: int = limits.DEFAULT_SLOTS,
        gid: int | None = None,
        backing: str = "auto",
        quota_bytes: int | None = None,
        policy: str = "default",
        cold: ColdOptions | None = None,
    ) -> Self:
        """Open the store in `data_dir`, which it then owns until `close`.

        What an earlier service left in it, killed or not, is there again as far as it is whole (`tiers.heritage`).
        Raises ConfigError where that had an NVMe tier.
        `policy` is one of `tiers.eviction.POLICY_NAMES`. Raises StoreLocked, FormatMismatch, InvalidRequest,
        DeviceMissing (backing "tmpfs" without the right to mount).
        """
        make_policy = _checked(dram_bytes, policy)
        home = open_home(data_dir)
        open_tier = _tier_opener(home, dram_bytes, max_slots, gid, backing)
        quota_bytes = quota_bytes if quota_bytes is not None else dram_bytes // 2
        with _without_gc():
            try:
                _check_no_segments(home)
                try:
                    with walking(home) as walk:
                        heritage = Heritage(home, cold=cold, walk=walk)
                        return cls._open(home, heritage, open_tier, quota_bytes, make_policy)[0]
                except Corrupt as error:
                    log.error("starting with an empty index: %s", error)
                    heritage = Heritage(home, cold=cold, believe=False)
                    return cls._open(home, heritage, open_tier, quota_bytes, make_policy)[0]
            except BaseException:
                home.close(clean=False)
                raise

    @classmethod
    async def start(
        cls,
        data_dir: Path,
        device: Device,
        *,
        nvme_bytes: int,
        dram_bytes: int,
        nvme_dir: Path | None = None,
        segment_bytes: int | None = None,
        trim: bool = False,
        max_slots: int = limits.DEFAULT_SLOTS,
        gid: int | None = None,
        backing: str = "auto",
        quota_bytes: int | None = None,
        policy: str = "default",
        cold: ColdOptions | None = None,
    ) -> Self:
        """As `open`, with an NVMe tier in `nvme_dir` (default: in the data directory), which the store outlives.

        `trim`: tell the device what freed segments no longer hold. `run` writes to the tier. Raises what `open` and
        `tiers.segments.open_pool` do.
        """
        make_policy = _checked(dram_bytes, policy)
        home = open_home(data_dir)
        open_tier = _tier_opener(home, dram_bytes, max_slots, gid, backing)
        open_lower = partial(
            open_nvme,
            device,
            nvme_dir or home.segments,
            store_id=home.store_id,
            capacity_bytes=nvme_bytes,
            segment_bytes=segment_bytes,
            trim=trim,
        )
        quota_bytes = quota_bytes if quota_bytes is not None else dram_bytes // 2
        with _without_gc(), walking(home) as walk:
            try:
                home.note_segments(nvme_dir or home.segments)
                try:
                    lower = Lower(*await open_lower())
                    heritage = partial(Heritage, home, lower, cold=cold, walk=walk)
                    return await cls._open_over(home, heritage, lower, open_tier, quota_bytes, make_policy)
                except Corrupt as error:
                    log.error("the index is built anew: %s", error)
                    lower = Lower(*await open_lower())
                    heritage = partial(Heritage, home, lower, cold=cold, believe=False)
                    return await cls._open_over(home, heritage, lower, open_tier, quota_bytes, make_policy)
            except BaseException:
                home.close(clean=False)
                raise

    @classmethod
    async def _open_over(
        cls,
        home: Home,
        make_heritage: Callable[[], Heritage],
        lower: Lower,
        open_tier: Callable[..., DramTier],
        quota_bytes: int,
        make_policy: Callable[[], EvictionPolicy[bytes]],
    ) -> Self:
        """A store over an open lower tier, its decisions on the device; where that fails both are closed."""
        crashpoints.reach("start.after_log")
        try:
            store, on_failure = cls._open(home, make_heritage(), open_tier, quota_bytes, make_policy)
            with on_failure:
                await store.journal.settle_start()
                on_failure.pop_all()
        except BaseException:
            lower.nvme.pool.close_files()
            raise
        return store

    @classmethod
    def _open(
        cls,
        home: Home,
        heritage: Heritage,
        open_tier: Callable[..., DramTier],
        quota_bytes: int,
        make_policy: Callable[[], EvictionPolicy[bytes]],
    ) -> tuple[Self, ExitStack]:
        """The store, and what undoes that."""
        crashpoints.reach("start.after_names")
        with ExitStack() as on_failure:
            on_failure.callback(heritage.give_up)
            dram = open_tier(choose=heritage.choose, below=heritage.below)
            on_failure.callback(dram.close, keep=True)
            store = cls(home, heritage.names, dram, quota_bytes, make_policy())
            heritage.restore(store)
            return store, on_failure.pop_all()

    async def run(self) -> None:
        """Write to the lower tiers, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.journal.run)
            nursery.start_soon(self.cold.run)

    def maintain(self) -> None:
        super().maintain()
        self._promoter.around.sweep()

    async def finish(self) -> None:
        """Before `close`: write what is queued, with its footer. Raises NoSpace, DeviceFailed."""
        await self.journal.finish()

    def close(self, *, keep: bool = False) -> None:
        """With `keep`, what is sealed stays in DRAM for the next `open`."""
        self._promoter.around.close()
        self.dram.close(keep=keep)
        self.directory_times.write()
        whole = self.names.close()
        self.home.close(clean=whole and self.journal.is_finished)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def store_id(self) -> bytes:
        return self.home.store_id

    @property
    def data_dir(self) -> Path:
        return self.home.path

    # --- writing ------------------------------------------------------------------------------------------

    def seal(
        self,
        draft: Draft,
        name: Name,
        attributes: Attributes,
        *,
        replace: bool = True,
        expected_id: int | None = None,
        checksum: int | None = None,
        snapshot: int | None = None,
    ) -> ObjectInfo:
        """Publish a draft under a name: the last seal wins. `snapshot` is what `put_snapshot` made of it.

        Raises WriterActive while it can still be written, Exists when not `replace` and the name is taken, and
        where another object than `expected_id` has it, NotFound where none has (the draft then stays open),
        NotPermitted for the names of blocks, NoSpace of a full index, WrongChecksum in a durable bucket where
        the bytes do not have `checksum`.
        """
        self.make_entry_room()
        bucket, old = self._check_sealable(name, replace=replace, expected_id=expected_id)
        same = snapshot is not None and self.is_snapshot(snapshot, draft)
        if bucket.durable and not same:
            self.journal.check_durable(self.dram.draft_bytes(draft.extent))
        sequence = snapshot if snapshot is not None and same else self.names.next_ids(1)
        key = object_key(sequence)
        row = new_row(sequence, attributes, 0)
        self._fill_holes(draft)
        sealed = self.dram.seal(
            draft.extent,
            SealHeader(key, sequence, sequence, uid=attributes.uid),
            checksum=checksum,
            verify=bucket.durable,  # what is wrong may not replace what is right and durable
        )
        crashpoints.reach("store.after_dram_seal")
        row = _with_size(row, sealed.size_bytes)
        self._index(draft, sealed)
        try:
            self.names.put(name.bucket, name.key, row)
        except BaseException:  # a full index, for one: without a name nothing would ever evict these bytes
            self._discard(key, attributes.uid)
            raise
        crashpoints.reach("store.after_index_put")
        self.enter(key.digest, name, row)
        found = Resident(
            key, sequence, sealed.extent, sealed.size_bytes, bucket, (name, row), bytes(16), attributes.uid
        )
        self.journal.sealed(found, replaced=None if old is None else old.object_id, snapshot=snapshot)
        self.cold.sealed(key, bucket)
        if old is not None:
            self._discard(object_key(old.object_id), old.uid)
        self._tell(Change(ChangeKind.SEALED, name, key))
        return self._info(name, row, sealed.extent, "dram")

    def _fill_holes(self, draft: Draft) -> None:
        """Raises NoSpace."""
        holes = self.dram.hole_bytes(draft.extent)
        if holes:
            self.make_room(holes)
            self.dram.fill_holes(draft.extent)

    def _check_sealable(
        self, name: Name, *, replace: bool, expected_id: int | None = None
    ) -> tuple[Bucket, NameRow | None]:
        """Where an object of this name goes, and the row of the one that it replaces."""
        bucket = self._check_name(name)
        if name.key.endswith(b"/"):
            raise InvalidRequest(f"{name} ends in '/': only a directory has such a name")
        if block_digest(bucket, name.key):
            raise NotPermitted(f"{name}: names under kv/ of a bound bucket are blocks, sealed by prefix hash")
        old = self._row(name)
        if old is not None and not replace:
            raise Exists(f"{name} exists")
        if expected_id is not None:
            self._check_expected(name, expected_id)
        return bucket, old

    # --- objects larger than DRAM takes -------------------------------------------------------------------

    def is_large(self, info: ObjectInfo) -> bool:
        """Whether DRAM cannot take the object: it is read where it is (`open_large`)."""
        return info.extent is None and info.size_bytes > self._largest_bytes

    def open_large(self, info: ObjectInfo) -> LargeReader:
        """A lease on an object in the NVMe tier; the caller closes it. Raises NotFound, QuotaExceeded."""
        reader = self.journal.large.open(info.object_id)
        self.touch(info.key)
        return reader

    def begin_large(self, bucket: bytes, *, uid: int, base: ObjectInfo | None = None) -> LargeDraft:
        """An empty draft that is written extent by extent to the NVMe tier, or one with the bytes of `base`; the
        caller closes it, sealed or not (`abort_large`).

        Raises BucketNotFound, NotFound (`base` is not in that tier), QuotaExceeded, DeviceMissing.
        """
        where = self.bucket(bucket)
        self.journal.check_queue()
        return self.journal.large.begin(
            self.names.next_ids(1), where.bucket_id, uid=uid, base=None if base is None else base.object_id
        )

    async def persist_large(self, draft: LargeDraft, name: Name, attributes: Attributes) -> None:
        """What was written so far is durable when this returns, and there under its name after a crash.

        Raises NoSpace, DeviceFailed.
        """
        async with draft.settled():
            draft.persisted_bytes = draft.size_bytes
            await self.journal.persist_large(draft, name, self._large_row(draft, attributes, SNAPSHOT))

    def _large_row(self, draft: LargeDraft, attributes: Attributes, flags: int) -> NameRow:
        """With a sequence of its own: the object has had its id since before what may have got the name meanwhile."""
        size_bytes = draft.persisted_bytes if flags & SNAPSHOT else draft.size_bytes
        row = new_row(draft.object_id, attributes, flags)
        return replace(row, size_bytes=size_bytes or 0, sequence=self.names.next_ids(1))

    def rename_large(self, draft: LargeDraft, name: Name, attributes: Attributes) -> None:
        """What `persist_large` made durable, if anything, has this name from here on."""
        if draft.persisted_bytes is not None:
            row = self._large_row(draft, attributes, SNAPSHOT)
            self.journal.rename_snapshot(name, row, draft.persisted_bytes)

    def seal_large(
        self,
        draft: LargeDraft,
        name: Name,
        attributes: Attributes,
        *,
        replace: bool = True,
        expected_id: int | None = None,
    ) -> ObjectInfo:
        """As `seal`. Raises WriterActive while some of it is not yet written (`LargeDraft.flush`)."""
        self.make_entry_room()
        bucket, old = self._check_sealable(name, replace=replace, expected_id=expected_id)
        draft.check()
        if not draft.is_written:
            raise WriterActive(f"{name} is not written yet, or is being written")
        stored, digest = draft.stored, draft.stored.key.digest
        row = self._large_row(draft, attributes, 0)
        self._report_hits()
        kind = int(stored.key.kind)
        self.table.put(digest, kind, NO_SLOT, 0, row.size_bytes, tiers=TIER_NVME, location=stored.place)
        try:
            self.names.put(name.bucket, name.key, row)
        except BaseException:
            self.table.remove(digest)
            raise
        crashpoints.reach("store.after_index_put")
        self._name_of[digest] = name
        self._counts["seals"] += 1
        draft.sealed = True
        self.journal.sealed_large(draft, bucket, name, row, None if old is None else old.object_id)
        if old is not None:
            self._discard(object_key(old.object_id), old.uid)
        self._tell(Change(ChangeKind.SEALED, name, stored.key))
        return self._info(name, row, None, "nvme")

    def abort_large(self, draft: LargeDraft) -> None:
        """Give the draft back, and what was made durable of it; twice is harmless."""
        if not draft.sealed:
            self.journal.removed(draft.object_id)
        draft.close()

    def is_snapshot(self, snapshot: int, draft: Draft) -> bool:
        """Whether what `put_snapshot` made of a draft is the draft as it is now."""
        descriptor = self.dram.open_draft(draft.extent)
        try:
            return self.journal.is_snapshot(snapshot, descriptor)
        finally:
            os.close(descriptor)

    def put_snapshot(self, draft: Draft, name: Name, attributes: Attributes) -> int | None:
        """Queue what a draft holds now under its name, though no door but its own sees it; the id of that, for
        `journal.settle_snapshot`. None without the NVMe tier. Raises NoSpace."""
        identity = self.names.next_ids(1)
        row = _with_size(new_row(identity, attributes, SNAPSHOT), self.dram.draft_bytes(draft.extent))
        return self.journal.put_snapshot(draft.extent, name, row)

    def rename_snapshot(self, snapshot: int, name: Name, attributes: Attributes) -> None:
        """What `put_snapshot` made has this name from here on, whatever got the name after it was made."""
        row = replace(new_row(snapshot, attributes, SNAPSHOT), sequence=self.names.next_ids(1))
        self.journal.rename_snapshot(name, row)

    def seal_block(
        self,
        draft: Draft,
        bucket: bytes,
        digest: bytes,
        *,
        parent: bytes | None,
        uid: int,
        checksum: int | None = None,
    ) -> ObjectInfo:
        """Publish a draft as a block: the first seal wins, and a later one is given the earlier object.

        `digest` and `parent` are prefix hashes of 16 bytes. Raises WriterActive (the draft stays open), and
        WrongChecksum as `seal` does.
        """
        if len(digest) != 16 or (parent is not None and len(parent) != 16):
            raise InvalidRequest("a prefix hash has 16 bytes")
        if not any(digest[:8]):  # one hash in 2^64; an object of this id would read the block's bytes
            raise InvalidRequest(
                f"prefix hash {digest.hex()}: eight zero bytes begin the keys of named objects"
            )
        where = self.bucket(bucket)
        if where.namespace is None:
            raise InvalidRequest(f"bucket {bucket.decode()} is bound to no namespace")
        self.make_entry_room()
        self._fill_holes(draft)
        with self.native_seals.settled():
            if self._is_far(digest):  # this one is nearer, and there when the bucket elsewhere is not
                self._discard(StoreKey(Kind.BLOCK, digest), uid)
            if self._blocks.get(digest) is not None:
                self.abort(draft)
                return self.lookup_block(digest)
            if where.durable:
                self.journal.check_durable(self.dram.draft_bytes(draft.extent))
            key = StoreKey(Kind.BLOCK, digest)
            sequence = self.names.next_ids(1)
            header = SealHeader(
                key, sequence, sequence, parent=parent or bytes(16), uid=uid, bucket_id=where.bucket_id
            )
            sealed = self.dram.seal(draft.extent, header, checksum=checksum, verify=where.durable)
            self._index(draft, sealed)
        block = Block(bucket, uid, sealed.size_bytes, sequence, sealed.sealed_at_ns, parent=parent)
        self._enter_sealed(key, block, where, sealed.extent)
        return self.lookup_block(digest)

    def seal_far_block(self, draft: Draft, sealed: Sealed, bucket: Bucket) -> None:
        """The sealing thread found a block there already: its draft goes back, or takes its place where only the cold
        tier has it."""
        if self._is_far(sealed.key):
            parent = sealed.parent if any(sealed.parent) else None
            with suppress(KvfsError):
                self.seal_block(draft, bucket.name, sealed.key, parent=parent, uid=draft.uid)
        self.abort(draft)

    def sealed_natively(self, draft: Draft, sealed: Sealed, bucket: Bucket) -> None:
        """The sealing thread has published a draft as a block: know it, as `seal_block` does."""
        self._report_hits()
        self._close_draft(draft, sealed.size_bytes)
        self._counts["seals"] += 1
        extent = self.dram.note_sealed(draft.extent, sealed.physical_bytes, has_checksum=sealed.has_checksum)
        parent = sealed.parent if any(sealed.parent) else None
        block = Block(
            bucket.name, draft.uid, sealed.size_bytes, sealed.object_id, sealed.sealed_at_ns, parent=parent
        )
        self._enter_sealed(StoreKey(Kind.BLOCK, sealed.key), block, bucket, extent)

    def drop_unindexed(self, draft: Draft, sealed: Sealed) -> None:
        """The sealing thread has sealed a draft that the table has no room for: the slot goes back, and there is room
        for the next one, if anything may be evicted."""
        self._close_draft(draft, None)
        extent = self.dram.note_sealed(draft.extent, sealed.physical_bytes, has_checksum=True)
        self.dram.free(extent, charge_uid=draft.uid)
        with suppress(NoSpace):
            self.make_entry_room()

    def _enter_sealed(self, key: StoreKey, block: Block, bucket: Bucket, extent: Extent) -> None:
        """Tell all who want to know of a block that is in the table from here on."""
        self.enter_block(key.digest, block)
        self._tell_placed(key.digest, 0, TIER_DRAM)
        parent = block.parent or bytes(16)
        self.journal.sealed(
            Resident(key, block.sequence, extent, block.size_bytes, bucket, None, parent, block.uid)
        )
        self.cold.sealed(key, bucket)
        self._tell(Change(ChangeKind.SEALED, Name(block.bucket, block_name(key.digest)), key))

    def _index(self, draft: Draft, sealed: SealedExtent) -> None:
        """Enter what was sealed in the table. Raises NoSpace; the slot is then free again, and the draft gone."""
        self._report_hits()
        self._close_draft(draft, sealed.size_bytes)
        try:
            self._enter_in_table(sealed)
        except BaseException:  # or nothing would ever free it
            self.dram.free(sealed.extent, charge_uid=draft.uid)
            self._watch_quota()
            raise
        self._counts["seals"] += 1

    def _enter_in_table(self, sealed: SealedExtent) -> None:
        key, extent = sealed.header.key, sealed.extent
        enter = partial(
            self.table.put, key.digest, int(key.kind), extent.slot, extent.generation, sealed.size_bytes
        )
        try:
            enter()
        except NoSpace:  # a sealing thread took the room that `make_entry_room` had made
            self.make_entry_room()
            enter()

    # --- reading ------------------------------------------------------------------------------------------

    def open_read(self, info: ObjectInfo, *, uid: int) -> int:
        """A read-only descriptor, which is the lease; the caller closes it. `load` brings up what is not in DRAM.

        Raises Superseded, QuotaExceeded, ObjectTooLarge.
        """
        if self.is_large(info):
            raise ObjectTooLarge(
                f"object {info.object_id} has {info.size_bytes} bytes: DRAM takes {self._largest_bytes}"
            )
        if info.extent is None:
            raise Superseded(f"object {info.object_id} is not in DRAM")
        self.space.check_quota(uid, held_bytes=self.dram.charged_bytes(uid))
        descriptor = self.dram.open_sealed(info.extent)
        self.note_reader(info.extent.slot, uid)
        self.touch(info.key)
        return descriptor

    def note_reader(self, slot: int, uid: int) -> None:
        """Remember who opened a slot last: its bytes are charged to that uid if they outlive the object."""
        self._last_reader[slot] = uid

    def touch(self, key: StoreKey) -> None:
        """Count a hit."""
        self.table.touch(key.digest)
        self._counts["hits"] += 1
        if key.digest in self._policy:
            self._policy.touch(key.digest, time.monotonic())
        self.journal.touched(key)
        self.cold.touched(key)

    async def load(self, info: ObjectInfo, *, uid: int) -> ObjectInfo:
        """The object, in DRAM: read back and verified if it was on a device only.

        Raises NotFound when it turns out to be gone or damaged, NoSpace, ObjectTooLarge, QuotaExceeded, DeviceFailed.
        """
        return info if info.extent is not None else await self._promoter.load(info, uid=uid)

    async def lease(self, info: ObjectInfo, *, uid: int) -> tuple[ObjectInfo, int]:
        """Open an object for reading in whatever tier it is: the object, and a descriptor as `open_read` gives it.

        Where DRAM has no slot for it, the descriptor is of a copy beside the tier, and the object without an extent.
        Raises as `load` does, and Busy.
        """
        try:
            info = await self.load(info, uid=uid)
        except NoSpace:
            descriptor = await self._promoter.read_around(info, uid=uid)
            self.touch(info.key)
            return info, descriptor
        return info, self.open_read(info, uid=uid)

    def note_misses(self, count: int) -> None:
        """Lookups of what does not exist that a door has answered without asking."""
        self._counts["misses"] += count

    async def read_into(self, info: ObjectInfo, into: memoryview) -> int:
        """Read a whole object from where it is, verified if that is a device, without bringing it up; its size.

        `into` is page-aligned memory with room for whole units of RECORD_ALIGNMENT. Raises Superseded, Corrupt,
        DeviceFailed.
        """
        if info.extent is None:
            await self.journal.read_into(info.object_id, into)
            return info.size_bytes
        with self.dram.lease(info.extent) as lease:
            return await lease.read_into(0, into)

    async def wait_published(
        self, name: Name, deadline: float | None = None, *, creates: bool = False
    ) -> None:
        """Wait, PUBLISH_WAIT_S at most, while `name` is a draft that is closed but not yet published.

        Raises Busy where it still is: what had the name before must not be shown; with `creates` also where nothing had
        it, since the name is taken.
        """
        deadline = trio.current_time() + limits.PUBLISH_WAIT_S if deadline is None else deadline
        for publish in self.publishers:
            is_late = False
            while (pending := publish(name)) is not None and not is_late:
                with trio.move_on_at(deadline):
                    await pending.ended.wait()
                is_late = trio.current_time() >= deadline
            if pending is not None and (creates or pending.was_answered):
                raise Busy(f"{name} was closed, and is not published yet")
        if not self.publishers and self._is_retired(name):
            raise Busy(f"{name} was closed, and its mount is gone")

    async def wait_all_published(self, names: Sequence[Name], *, creates: bool = False) -> dict[Name, Busy]:
        """As `wait_published`, as long for all as for one; those that still are not."""
        deadline, busy = trio.current_time() + limits.PUBLISH_WAIT_S, {}
        for name in names:
            try:
                await self.wait_published(name, deadline, creates=creates)
            except Busy as error:
                busy[name] = error
        return busy

    def _is_retired(self, name: Name) -> bool:
        row = self._row(name) if name.key else None
        return row is not None and bool(row.flags & RETIRED)

    def capacity(self) -> tuple[int, int]:
        """(capacity, used) in bytes of the largest tier: what a smaller one has, it has too, or will have."""
        dram = self.dram.usage()
        tiers = [(tier["capacity_bytes"], tier["live_bytes"]) for tier in self.journal.usage()]
        return max([(dram.capacity_bytes, dram.used_bytes), *tiers])

    def usage(self) -> dict[str, Any]:
        """What `kvfs status` shows; every value is JSON-able."""
        return {
            "store_id": self.store_id.hex(),
            "data_dir": str(self.data_dir),
            "objects": len(self._name_of),
            "blocks": len(self._blocks),
            "buckets": len(self.names.buckets()),
            "open_drafts": self.space.open_drafts,
            "quota_bytes": self.space.quota_bytes,
            "headroom_bytes": self.space.headroom_bytes(),
            "read_around": self._promoter.around.reads,
            "read_around_bytes": self._promoter.around.held_bytes,
            **self._counts,
            "recovery": self.recovery,
            "tiers": [
                {"name": self.dram.name, "backing": self.dram.backing, **asdict(self.dram.usage())},
                *self.journal.usage(),
                *self.cold.usage(),
            ],
        }


@contextmanager
def _without_gc() -> Iterator[None]:
    """A start makes millions of objects, none of them garbage: looking for some was half of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_no_segments(home: Home) -> None:
    """Raises ConfigError where an NVMe tier has objects of this store: without it their names would be dropped."""
    directory = home.known_segments()
    if directory is not None:
        raise ConfigError(
            f"{home.path} has an NVMe tier in {directory}: start with it, or remove that directory and what it holds"
        )


def _checked(dram_bytes: int, policy: str) -> Callable[[], EvictionPolicy[bytes]]:
    """What makes the policy, once what can be said without the data directory is right. Raises InvalidRequest."""
    if dram_bytes < limits.MIN_DRAM_BYTES:
        raise InvalidRequest(f"DRAM capacity of {dram_bytes} bytes: at least {limits.MIN_DRAM_BYTES}")
    policy_named(policy)
    return partial(policy_named, policy)


def _tier_opener(
    home: Home, dram_bytes: int, max_slots: int, gid: int | None, backing: str
) -> Callable[..., DramTier]:
    return partial(
        DramTier.open,
        home.dram,
        dram_bytes,
        store_id=home.store_id,
        max_slots=max_slots,
        gid=gid,
        mode=backing,
    )


def _with_size(row: NameRow, size_bytes: int) -> NameRow:
    return replace(row, size_bytes=size_bytes)
