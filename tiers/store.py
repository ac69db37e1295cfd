"""The store that all doors share: names, objects and blocks over the tiers.

Responsibility: reserve -> write -> seal, leases, names, removal and eviction, each as one step that is
complete when it returns. Lookups and listings are `tiers.catalog`, policy is `tiers.eviction`, bytes are
`tiers.dram`, ordered names are `kvfs.names`, and where each object lies is the shared table.

Invariants:
- An object is in the table exactly while its extent is sealed; a name row without a table entry is stale
  and reads as NotFound.
- The table entry goes before the slot is touched, so no reader can find a slot that is being recycled.
- Names: the last seal wins. Prefix hashes: the first seal wins, later ones are given the earlier object.

Concurrency: every method runs on the service's trio thread and, `wait_published` apart, none awaits: each
call is atomic towards all others. Native threads only read the table and count hits in it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import trio

from kvfs import crashpoints, limits, paths
from kvfs._native.slots import fd_xxh3_64
from kvfs._native.table import TIER_DRAM, TIER_NVME
from kvfs.errors import (
    Corrupt,
    Exists,
    InvalidRequest,
    IsDirectory,
    NoSpace,
    NotDirectory,
    NotEmpty,
    NotFound,
    NotPermitted,
    ObjectTooLarge,
    Superseded,
    WriterActive,
)
from kvfs.keys import Namespace, block_name
from kvfs.name_rows import SNAPSHOT
from kvfs.names import NameIndex, NameRow
from tiers import buckets
from tiers.adoption import ENTRY_PINNED
from tiers.base import NO_SLOT, Extent, Kind, SealHeader, StoreKey, object_key
from tiers.blocks import Block
from tiers.catalog import DIRECTORY, PINNED, Catalog, block_digest, directory_of_row, extent_of
from tiers.device import Device
from tiers.dram import DramTier
from tiers.eviction import LruLeafFirst
from tiers.evictor import Evictor
from tiers.heritage import Heritage, Lower, unit_of
from tiers.home import Home, open_home
from tiers.journal import Journal, Resident
from tiers.large import LargeDraft, LargeReader
from tiers.model import Attributes, Bucket, Change, ChangeKind, Directory, Draft, Name, ObjectInfo
from tiers.promotion import Promoter
from tiers.replay import open_nvme
from tiers.space import SpaceBook

log = logging.getLogger("kvfs.store")

SLOTS_AT_ONCE = 64
"""Objects evicted when no slot is free: their bytes may be none."""


class TieredStore(Catalog):
    """See the module's header. Make one with `TieredStore.open`."""

    def __init__(self, home: Home, names: NameIndex, dram: DramTier, quota_bytes: int) -> None:
        super().__init__(names, dram.table)
        self.home = home
        self.dram = dram
        self.listeners: list[Callable[[Change], None]] = []
        self.before_eviction: list[Callable[[], None]] = []
        """Called before victims are chosen and objects added: doors that answer hits natively report them here."""
        self.publishers: list[Callable[[Name], trio.Event | None]] = []
        """Asked to publish a closed draft of this name now; what they return ends when a pending one does."""
        self.quota_listeners: list[Callable[[bool], None]] = []
        """Told when some uid comes to be charged for more than its quota, and when none is any more."""
        self.over_quota = False
        usage = dram.usage()
        self.space = SpaceBook(usage.capacity_bytes, quota_bytes)
        self._largest_bytes = usage.largest_object_bytes
        self._policy: LruLeafFirst[bytes] = LruLeafFirst()
        self._evictor = Evictor(self._policy, self._is_held, self._evict_group, self._report_hits)
        self._last_reader: dict[int, int] = {}
        self.journal = Journal()
        """What becomes of objects outside of DRAM; a store without the NVMe tier has one that does nothing."""
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
    ) -> Self:
        """Open the store in `data_dir`, which it then owns until `close`.

        What an earlier service left in it, killed or not, is there again as far as it is whole (`tiers.heritage`).
        Raises StoreLocked, FormatMismatch, DeviceMissing (backing "tmpfs" without the right to mount).
        """
        _check_dram(dram_bytes)
        home = open_home(data_dir)
        open_tier = partial(
            DramTier.open,
            home.dram,
            dram_bytes,
            store_id=home.store_id,
            max_slots=max_slots,
            gid=gid,
            mode=backing,
        )
        quota_bytes = quota_bytes if quota_bytes is not None else dram_bytes // 2
        try:
            try:
                return cls._open(home, Heritage(home), open_tier, quota_bytes)
            except Corrupt as error:
                log.error("starting with an empty index: %s", error)
                return cls._open(home, Heritage(home, believe=False), open_tier, quota_bytes)
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
        max_slots: int = limits.DEFAULT_SLOTS,
        gid: int | None = None,
        backing: str = "auto",
        quota_bytes: int | None = None,
    ) -> Self:
        """As `open`, with an NVMe tier in `nvme_dir` (default: in the data directory), which the store outlives.

        `run` writes to it. Raises what `open` and `tiers.segments.open_pool` do.
        """
        _check_dram(dram_bytes)
        home = open_home(data_dir)
        open_tier = partial(
            DramTier.open,
            home.dram,
            dram_bytes,
            store_id=home.store_id,
            max_slots=max_slots,
            gid=gid,
            mode=backing,
        )
        open_lower = partial(
            open_nvme,
            device,
            nvme_dir or home.segments,
            store_id=home.store_id,
            capacity_bytes=nvme_bytes,
            segment_bytes=segment_bytes,
        )
        quota_bytes = quota_bytes if quota_bytes is not None else dram_bytes // 2
        try:
            try:
                return cls._open_over(home, Lower(*await open_lower()), open_tier, quota_bytes)
            except Corrupt as error:
                log.error("the index is built anew: %s", error)
                lower = Lower(*await open_lower())
                return cls._open_over(home, lower, open_tier, quota_bytes, believe=False)
        except BaseException:
            home.close(clean=False)
            raise

    @classmethod
    def _open_over(
        cls,
        home: Home,
        lower: Lower,
        open_tier: Callable[..., DramTier],
        quota_bytes: int,
        *,
        believe: bool = True,
    ) -> Self:
        """A store over an open lower tier, which is closed where that fails."""
        crashpoints.reach("start.after_log")
        try:
            return cls._open(home, Heritage(home, lower, believe=believe), open_tier, quota_bytes)
        except BaseException:
            lower.nvme.pool.close_files()
            raise

    @classmethod
    def _open(
        cls, home: Home, heritage: Heritage, open_tier: Callable[..., DramTier], quota_bytes: int
    ) -> Self:
        crashpoints.reach("start.after_names")
        with ExitStack() as on_failure:
            on_failure.callback(heritage.names.close)
            dram = open_tier(choose=heritage.choose)
            on_failure.callback(dram.close, keep=True)
            store = cls(home, heritage.names, dram, quota_bytes)
            heritage.restore(store)
            on_failure.pop_all()
        return store

    async def run(self) -> None:
        """Write to the lower tiers, until cancelled."""
        await self.journal.run()

    async def finish(self) -> None:
        """Before `close`: write what is queued, with its footer. Raises NoSpace, DeviceFailed."""
        await self.journal.finish()

    def close(self, *, keep: bool = False) -> None:
        """With `keep`, what is sealed stays in DRAM for the next `open`."""
        self.dram.close(keep=keep)
        self.home.close(clean=self.names.close())

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

    def create_bucket(
        self,
        name: bytes,
        *,
        uid: int,
        gid: int,
        mode: int = 0o755,
        durable: bool = False,
        admits_all: bool = True,
        large: bool = False,
        namespace: Namespace | None = None,
    ) -> Bucket:
        """Raises Exists, InvalidRequest, LimitExceeded; DeviceMissing for a durable or large one without the NVMe
        tier."""
        if durable:
            self.journal.check_durable(0)
        if large:
            self._need_large()
        made = buckets.create(
            self.names,
            name,
            uid=uid,
            gid=gid,
            mode=mode,
            durable=durable,
            admits_all=admits_all,
            large=large,
            namespace=namespace,
        )
        self._log_bucket(name)
        return made

    def _need_large(self) -> None:
        """Raises DeviceMissing."""
        _ = self.journal.large

    def _log_bucket(self, name: bytes) -> None:
        row = self.names.get_bucket(name)
        assert row is not None
        self.journal.bucket(row)

    def set_bucket(
        self,
        name: bytes,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        mtime_ns: int | None = None,
        namespace: Namespace | None = None,
        large: bool | None = None,
    ) -> Bucket:
        """Change what is given. Raises BucketNotFound; Exists, NotEmpty for a namespace that cannot be bound;
        DeviceMissing for `large` without the NVMe tier."""
        if large:
            self._need_large()
        changed = buckets.change(
            self.names,
            name,
            mode=mode,
            uid=uid,
            gid=gid,
            mtime_ns=mtime_ns,
            namespace=namespace,
            large=large,
        )
        self._log_bucket(name)
        self._tell(Change(ChangeKind.ATTRIBUTES, Name(name, b""), None))
        return changed

    def remove_bucket(self, name: bytes) -> None:
        """Raises NotEmpty while any name or block is in it."""
        bucket = self.bucket(name)
        if self.names.has_prefix(name, b"") or self._blocks.count(name):
            raise NotEmpty(f"bucket {name.decode()} is not empty")
        self.names.remove_bucket(name)
        self.journal.bucket_removed(bucket.bucket_id)
        self._tell(Change(ChangeKind.REMOVED, Name(name, b""), None))

    # --- writing ------------------------------------------------------------------------------------------

    def reserve(self, size_bytes: int = 0, *, uid: int) -> Draft:
        """Grant an empty draft, evicting for its room. Raises NoSpace, ObjectTooLarge, QuotaExceeded."""
        if size_bytes <= self._largest_bytes:  # else the tier says that it is too large, whatever the quota
            self.space.check_quota(uid, held_bytes=self.dram.charged_bytes(uid), more_bytes=size_bytes)
        try:
            extent = self.dram.reserve(size_bytes)
        except NoSpace:
            extent = self._reserve_evicting(size_bytes)
        self.space.opened(uid, size_bytes)
        return Draft(extent, uid, size_bytes)

    def prepare(self) -> Extent:
        """An empty extent for a draft that is granted later, without eviction. Raises NoSpace."""
        return self.dram.reserve(0)

    def grant(self, extent: Extent, *, uid: int) -> Draft:
        """Make what was prepared a draft of `uid`, whose quota the caller has looked at."""
        self.space.opened(uid, 0)
        return Draft(extent, uid, 0)

    def _reserve_evicting(self, size_bytes: int) -> Extent:
        self.make_room(size_bytes)
        try:
            return self.dram.reserve(size_bytes)
        except NoSpace:  # what is free was promised to open drafts, or it is slots that are short
            usage = self.dram.usage()
            short_of_slots = usage.slots >= usage.max_slots
            self._evictor.run(size_bytes, objects_wanted=SLOTS_AT_ONCE if short_of_slots else 0)
            return self.dram.reserve(size_bytes)

    def open_draft(self, draft: Draft) -> int:
        return self.dram.open_draft(draft.extent)

    def abort(self, draft: Draft) -> None:
        """Give the draft back; twice is harmless."""
        if draft.open:
            self._close_draft(draft, None)
            self.dram.abort(draft.extent, charge_uid=draft.uid)
            self._watch_quota()

    def seal(
        self,
        draft: Draft,
        name: Name,
        attributes: Attributes,
        *,
        replace: bool = True,
        checksum: int | None = None,
        snapshot: int | None = None,
    ) -> ObjectInfo:
        """Publish a draft under a name: the last seal wins. `snapshot` is what `persist_draft` made of it.

        Raises WriterActive while it can still be written, Exists when not `replace` and the name is taken
        (the draft stays open in both cases), NotPermitted for the names of blocks.
        """
        bucket, old = self._check_sealable(name, replace=replace)
        if bucket.durable:
            self.journal.check_durable(self.dram.draft_bytes(draft.extent))
        same = snapshot is not None and self.journal.is_snapshot(snapshot, *self._look_at(draft))
        sequence = snapshot if snapshot is not None and same else self.names.next_ids(1)
        key = object_key(sequence)
        row = _new_row(sequence, attributes, 0)
        sealed = self.dram.seal(
            draft.extent, SealHeader(key, sequence, sequence, uid=attributes.uid), checksum=checksum
        )
        crashpoints.reach("store.after_dram_seal")
        row = _with_size(row, sealed.size_bytes)
        self._index(draft, key, sealed.extent.slot, sealed.extent.generation, sealed.size_bytes)
        try:
            self.names.put(name.bucket, name.key, row)
        except BaseException:  # a full index, for one: without a name nothing would ever evict these bytes
            self._discard(key, attributes.uid)
            raise
        crashpoints.reach("store.after_index_put")
        self.enter(key.digest, name, row)
        self.journal.sealed(
            key,
            sequence,
            sealed.extent,
            sealed.size_bytes,
            bucket,
            named=(name, row),
            uid=attributes.uid,
            replaced=None if old is None else old.object_id,
            snapshot=snapshot,
        )
        if old is not None:
            self._discard(object_key(old.object_id), old.uid)
        self._tell(Change(ChangeKind.SEALED, name, key))
        return self._info(name, row, sealed.extent)

    def _check_sealable(self, name: Name, *, replace: bool) -> tuple[Bucket, NameRow | None]:
        """Where an object of this name goes, and the row of the one that it replaces."""
        bucket = self._check_name(name)
        if name.key.endswith(b"/"):
            raise InvalidRequest(f"{name} ends in '/': only a directory has such a name")
        if block_digest(bucket, name.key):
            raise NotPermitted(f"{name}: names under kv/ of a bound bucket are blocks, sealed by prefix hash")
        old = self._row(name)
        if old is not None and not replace:
            raise Exists(f"{name} exists")
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
        return self.journal.large.begin(
            self.names.next_ids(1), where.bucket_id, uid=uid, base=None if base is None else base.object_id
        )

    async def persist_large(self, draft: LargeDraft, name: Name, attributes: Attributes) -> None:
        """As `persist_draft`: what was written so far is durable, and there under its name after a crash.

        Raises NoSpace, DeviceFailed.
        """
        async with draft.settled():
            row = _with_size(_new_row(draft.object_id, attributes, SNAPSHOT), draft.size_bytes)
            await self.journal.persist_large(draft, name, row)
            draft.persisted = True

    def seal_large(
        self, draft: LargeDraft, name: Name, attributes: Attributes, *, replace: bool = True
    ) -> ObjectInfo:
        """As `seal`. Raises WriterActive while some of it is not yet written (`LargeDraft.flush`)."""
        bucket, old = self._check_sealable(name, replace=replace)
        draft.check()
        if not draft.is_written or draft.sealed:
            raise WriterActive(f"{name} is not written yet, or sealed already")
        stored, digest = draft.stored, draft.stored.key.digest
        row = _with_size(_new_row(draft.object_id, attributes, 0), stored.size_bytes)
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
        return self._info(name, row, None)

    def abort_large(self, draft: LargeDraft) -> None:
        """Give the draft back, and what was made durable of it; twice is harmless."""
        if not draft.sealed:
            self.journal.removed(draft.object_id)
        draft.close()

    def _look_at(self, draft: Draft) -> tuple[int, int]:
        """(bytes, XXH3-64) of a draft as it is now."""
        descriptor = self.dram.open_draft(draft.extent)
        try:
            return os.fstat(descriptor).st_size, fd_xxh3_64(descriptor)
        finally:
            os.close(descriptor)

    async def persist_draft(
        self, draft: Draft, name: Name, attributes: Attributes, *, previous: int | None = None
    ) -> int | None:
        """Make what a draft holds now durable under its name, though no door but its own sees it; the id of that.

        `previous` is the id of an earlier such copy, which it replaces. None without the NVMe tier. Raises NoSpace,
        DeviceFailed.
        """
        identity = self.names.next_ids(1)
        row = _with_size(_new_row(identity, attributes, SNAPSHOT), self.dram.draft_bytes(draft.extent))
        return await self.journal.persist_draft(draft.extent, name, row, previous)

    def enter(self, digest: bytes, name: Name, row: NameRow) -> None:
        """Know a named object that is in DRAM, as used now, in the unit that its name puts it in."""
        self._name_of[digest] = name
        self._policy.insert(
            digest,
            size_bytes=row.size_bytes,
            parent=None,
            now=time.monotonic(),
            pinned=bool(row.flags & PINNED),
            group=unit_of(name),
        )

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

        `digest` and `parent` are prefix hashes of 16 bytes. Raises WriterActive (the draft stays open).
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
        sealed = self.dram.seal(draft.extent, header, checksum=checksum)
        self._index(draft, key, sealed.extent.slot, sealed.extent.generation, sealed.size_bytes)
        block = Block(bucket, uid, sealed.size_bytes, sequence, sealed.sealed_at_ns, parent=parent)
        self.enter_block(digest, block)
        self.journal.sealed(
            key, sequence, sealed.extent, sealed.size_bytes, where, parent=header.parent, uid=uid
        )
        self._tell(Change(ChangeKind.SEALED, Name(bucket, block_name(digest)), key))
        return self.lookup_block(digest)

    def restore_name(self, digest: bytes, name: Name) -> None:
        """Know a named object that a lower tier has and that is in the table."""
        self._name_of[digest] = name

    def restore_block(self, digest: bytes, block: Block) -> None:
        """Know a block that a lower tier has and that is in the table."""
        self._blocks.add(digest, block)

    def enter_block(self, digest: bytes, block: Block) -> None:
        """Know a block that is in the table, as used now."""
        self._blocks.add(digest, block)
        self._count_block(digest, block)

    def _count_block(self, digest: bytes, block: Block) -> None:
        """Have the policy count a block that is in DRAM, as used now."""
        self._policy.insert(
            digest,
            size_bytes=block.size_bytes,
            parent=block.parent,
            now=time.monotonic(),
            pinned=block.pinned,
        )

    def _index(self, draft: Draft, key: StoreKey, slot: int, generation: int, size_bytes: int) -> None:
        self._report_hits()
        self._close_draft(draft, size_bytes)
        self.table.put(key.digest, int(key.kind), slot, generation, size_bytes)
        self._counts["seals"] += 1

    def _close_draft(self, draft: Draft, sealed_bytes: int | None) -> None:
        if draft.open:
            draft.open = False
            self.space.closed(draft.uid, draft.size_hint_bytes, sealed_bytes)

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

    async def load(self, info: ObjectInfo, *, uid: int) -> ObjectInfo:
        """The object, in DRAM: read back and verified if it was on a device only.

        Raises NotFound when it turns out to be gone or damaged, NoSpace, ObjectTooLarge, QuotaExceeded, DeviceFailed.
        """
        return info if info.extent is not None else await self._promoter.load(info, uid=uid)

    def note_misses(self, count: int) -> None:
        """Lookups of what does not exist that a door has answered without asking."""
        self._counts["misses"] += count

    async def wait_published(self, name: Name) -> None:
        """Wait, PUBLISH_WAIT_S at most, while `name` is a draft that is closed but not yet published."""
        with trio.move_on_after(limits.PUBLISH_WAIT_S):
            for publish in self.publishers:
                pending = publish(name)
                if pending is not None:
                    await pending.wait()

    # --- names --------------------------------------------------------------------------------------------

    def make_directory(self, name: Name, attributes: Attributes) -> Directory:
        """Raises Exists when any object or directory has the name, NotFound when its parent has not."""
        bucket = self._check_name(name)
        if not name.key.endswith(b"/"):
            raise InvalidRequest(f"{name}: a directory's key ends in '/'")
        if self._row(Name(name.bucket, name.key[:-1])) is not None or self.names.has_prefix(
            name.bucket, name.key
        ):
            raise Exists(f"{name} exists")
        if bucket.namespace is not None and (name.key + b"/").startswith(b"kv/"):
            raise NotPermitted(f"{name}: names under kv/ of a bound bucket are blocks")
        made = self.mark_directory(name, attributes)
        self._tell(Change(ChangeKind.SEALED, name, None))
        return made

    def mark_directory(self, name: Name, attributes: Attributes) -> Directory:
        """Give a directory that is only a common prefix a marker, which can hold attributes."""
        identity = self.names.next_ids(1)
        row = _new_row(identity, attributes, DIRECTORY)
        self.names.put(name.bucket, name.key, row)
        self.journal.directory(self.bucket(name.bucket), name, row)
        return directory_of_row(name, row)

    def remove_directory(self, name: Name) -> None:
        """Raises NotFound, NotEmpty."""
        if not name.key.endswith(b"/"):
            raise InvalidRequest(f"{name}: a directory's key ends in '/'")
        self._directory(self.bucket(name.bucket), name)
        self._check_empty(name)
        row = self.names.remove(name.bucket, name.key)
        if row is not None:
            self.journal.removed(row.object_id)
        self._tell(Change(ChangeKind.REMOVED, name, None))

    def _check_empty(self, name: Name) -> None:
        page = self.names.list(name.bucket, prefix=name.key, after=name.key, limit=1)
        if page.entries or any(self._block_names(name.bucket, name.key, b"", b"/")):
            raise NotEmpty(f"{name} is not empty")

    def remove(self, name: Name) -> None:
        """Raises NotFound, IsDirectory."""
        info = self.lookup(name)
        if isinstance(info, Directory):
            raise IsDirectory(f"{name} is a directory")
        if info.name is None:
            self.remove_block(info.key.digest)
            return
        self.names.remove(name.bucket, name.key)
        crashpoints.reach("store.after_remove")
        self.journal.removed(info.object_id)
        self._discard(info.key, info.uid)
        self._counts["removals"] += 1
        self._tell(Change(ChangeKind.REMOVED, name, info.key))

    def remove_block(self, digest: bytes) -> None:
        block = self._blocks.get(digest)
        if block is None:
            raise NotFound(f"no block {digest.hex()}")
        key = StoreKey(Kind.BLOCK, digest)
        self.journal.removed(block.sequence)
        self._discard(key, block.uid)
        self._counts["removals"] += 1
        self._tell(Change(ChangeKind.REMOVED, Name(block.bucket, block_name(digest)), key))

    def rename(self, src: Name, dst: Name, *, replace: bool = True) -> None:
        """Move a name, or every name of a directory (both keys then end in `/`), in one transaction.

        Raises NotFound, Exists, NotEmpty, IsDirectory, NotDirectory, CrossDevice (too many keys), NotPermitted.
        """
        for name in (src, dst):
            if self._check_name(name).namespace is not None and name.key.startswith(b"kv/"):
                raise NotPermitted(f"{src} -> {dst}: blocks have the names that their prefix hashes give")
        if src.key.endswith(b"/") != dst.key.endswith(b"/"):
            raise InvalidRequest(f"{src} -> {dst}: both keys end in '/' or none does")
        if src.key.endswith(b"/"):
            self._rename_directory(src, dst, replace)
        else:
            self._rename_object(src, dst, replace)
        self._tell(Change(ChangeKind.RENAMED, src, None, new_name=dst))

    def _rename_object(self, src: Name, dst: Name, replace: bool) -> None:
        row = self._row(src)
        if row is None:
            raise NotFound(f"no object {src}")
        if self._has_directory(dst.bucket, dst.key + b"/"):
            raise IsDirectory(f"{dst} is a directory")
        if not replace and self._row(dst) is not None:
            raise Exists(f"{dst} exists")
        if src == dst:
            return
        old = self.names.rename(src.bucket, src.key, dst.bucket, dst.key)
        crashpoints.reach("store.after_rename")
        self._renamed(row, src, dst, replaced=None if old is None else old.object_id)
        if old is not None:
            self._discard(object_key(old.object_id), old.uid)

    def _rename_directory(self, src: Name, dst: Name, replace: bool) -> None:
        if not self.names.has_prefix(src.bucket, src.key):
            raise NotFound(f"no directory {src}")
        if dst.bucket == src.bucket and dst.key.startswith(src.key) and dst != src:
            raise InvalidRequest(f"{src} -> {dst}: a directory cannot move into itself")
        if self._row(Name(dst.bucket, dst.key[:-1])) is not None:
            raise NotDirectory(f"{dst} is a file")
        if self.names.has_prefix(dst.bucket, dst.key) and src != dst:
            if not replace:
                raise Exists(f"{dst} exists")
            self._check_empty(dst)
        marker = self.names.get(dst.bucket, dst.key) if src != dst else None
        moved = self.names.rename_prefix(
            src.bucket, src.key, dst.bucket, dst.key, limit=limits.MAX_RENAME_KEYS
        )
        for old_key, key in moved:
            row = self.names.get(dst.bucket, key)
            if row is not None:
                replaced = marker.object_id if marker is not None and key == dst.key else None
                self._renamed(row, Name(src.bucket, old_key), Name(dst.bucket, key), replaced=replaced)

    def _renamed(self, row: NameRow, src: Name, dst: Name, *, replaced: int | None = None) -> None:
        if not row.flags & DIRECTORY:
            digest = object_key(row.object_id).digest
            self._name_of[digest] = dst
            if unit_of(src) != unit_of(dst) and digest in self._policy:
                self.enter(digest, dst, row)
        self.journal.renamed(row.object_id, dst, row, replaced)

    def set_attributes(
        self,
        name: Name,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        mtime_ns: int | None = None,
        pinned: bool | None = None,
        user_metadata: bytes | None = None,
    ) -> ObjectInfo | Directory:
        """Change what is given. Raises NotFound; NotPermitted for all but `pinned` on a block."""
        info = self.lookup(name)
        if isinstance(info, ObjectInfo) and info.name is None:
            return self._set_block(info, name, pinned, (mode, uid, gid, mtime_ns, user_metadata))
        if isinstance(info, Directory) and not info.name.key:
            self.set_bucket(name.bucket, mode=mode, uid=uid, gid=gid, mtime_ns=mtime_ns)
            return self.lookup(name)
        where = info.name
        assert where is not None
        row = self.names.get(where.bucket, where.key)
        if row is None:
            raise NotFound(f"{name} is a directory without a marker: it has no attributes of its own")
        flags = row.flags if pinned is None else (row.flags | PINNED if pinned else row.flags & ~PINNED)
        changed = replace(
            row,
            mode=row.mode if mode is None else mode & 0o7777,
            uid=row.uid if uid is None else uid,
            gid=row.gid if gid is None else gid,
            mtime_ns=row.mtime_ns if mtime_ns is None else mtime_ns,
            ctime_ns=time.time_ns(),
            flags=flags,
            user_metadata=row.user_metadata if user_metadata is None else user_metadata,
        )
        self.names.put(where.bucket, where.key, changed)
        self.journal.named(row.object_id, where, changed)
        if pinned is not None and isinstance(info, ObjectInfo):
            self._pin(info.key.digest, pinned)
            self.journal.pinned(row.object_id, pinned)
        self._tell(Change(ChangeKind.ATTRIBUTES, where, None))
        return self.lookup(where)

    def _set_block(
        self, info: ObjectInfo, name: Name, pinned: bool | None, others: tuple[object, ...]
    ) -> ObjectInfo | Directory:
        if any(value is not None for value in others):
            raise NotPermitted(f"{name}: a block has its bucket's attributes")
        block = self._blocks.get(info.key.digest)
        if pinned is not None and block is not None:
            block.pinned = pinned
            self._mark_pinned(info.key, pinned)
            self._pin(info.key.digest, pinned)
            self.journal.pinned(block.sequence, pinned)
        return self.lookup(name)

    def _mark_pinned(self, key: StoreKey, pinned: bool) -> None:
        """A block has no row that could say it, so its table entry does."""
        entry = self.table.get(key.digest)
        if entry is not None:
            self.table.put(
                key.digest,
                int(key.kind),
                entry.slot,
                entry.generation,
                entry.size_bytes,
                tiers=entry.tiers,
                flags=entry.flags | ENTRY_PINNED if pinned else entry.flags & ~ENTRY_PINNED,
                location=entry.location,
            )

    def _pin(self, digest: bytes, pinned: bool) -> None:
        if digest not in self._policy:
            return
        if pinned:
            self._policy.pin(digest)
        else:
            self._policy.unpin(digest)

    # --- space --------------------------------------------------------------------------------------------

    def evict(self, bytes_wanted: int | None = None, *, names: Iterable[Name] | None = None) -> int:
        """Evict by policy until `bytes_wanted` are free, or exactly `names`; the bytes that became free.

        By policy, what somebody holds open is passed over (nothing would come back). By name, a held slot
        is replaced and its bytes stay charged to the holder.
        """
        if names is None:
            return self._evictor.run(bytes_wanted or 0)
        freed = 0
        for name in list(names):
            info = self.lookup(name)
            if isinstance(info, Directory):
                raise IsDirectory(f"{name} is a directory: evict names the objects in it")
            freed += self._evict_one(info.key.digest)
        return freed

    def make_room(self, size_bytes: int) -> None:
        """Evict until `size_bytes` and the headroom fit, as far as anything can be evicted."""
        usage = self.dram.usage()
        self._sweep()
        wanted = max(size_bytes, self.space.headroom_bytes()) - (usage.capacity_bytes - usage.used_bytes)
        if wanted > 0:
            self._evictor.run(wanted)

    def _sweep(self) -> None:
        self.dram.sweep()
        self._watch_quota()

    def _watch_quota(self) -> None:
        over = self.dram.most_charged_bytes > self.space.quota_bytes
        if over != self.over_quota:
            self.over_quota = over
            for listener in self.quota_listeners:
                listener(over)

    def _report_hits(self) -> None:
        """Reads that were answered natively count before what comes next, not when eviction happens to ask."""
        for report in self.before_eviction:
            report()

    def _is_held(self, digest: bytes) -> bool:
        """Whether the DRAM copy may not go now: somebody has it open, or it is the only one of a durable object."""
        entry = self.table.get(digest)
        extent = None if entry is None else extent_of(entry)
        object_id = self.object_id_of(digest)
        if object_id is not None and self.journal.is_needed(object_id):
            return True
        return extent is not None and self.dram.held(extent)

    def _evict_group(self, group: list[bytes]) -> int:
        """Take what belongs together out of DRAM; the bytes that became free. Out of the store, too, where no lower
        tier has all of it: of a unit the names then go in one transaction, and its marker before them, so that a kill
        leaves all of it or nothing. A part, or the directory alone, would read as a hit."""
        if all(self._is_below(digest) for digest in group):
            return sum([self._demote(digest) for digest in group])
        group = [*group, *(digest for digest in self._dependents(group[0]) if digest not in group)]
        named = {digest: name for digest in group if (name := self._name_of.get(digest)) is not None}
        names = list(named.values())
        unit = paths.unit_prefix(names[0].key) if names else None
        if unit is None:
            return sum([self._evict_one(digest) for digest in group])
        keys = {unit, *(name.key for name in names)}
        page = self.names.list(
            names[0].bucket, prefix=unit, limit=min(len(keys) + 1, limits.MAX_LIST_ENTRIES)
        )
        if not page.truncated and all(entry.name in keys for entry in page.entries):
            self._drop_marker(names[0].bucket, unit)
        removed = self.names.remove_many([(name.bucket, name.key) for name in names])
        rows = dict(zip(named, removed, strict=True))
        freed = 0
        for digest in group:
            self._forget_below(digest)
            freed += self._expel(digest, rows.get(digest))
        self.drop_empty_unit(names[0])
        return freed

    def _evict_one(self, digest: bytes) -> int:
        """Take an object out of DRAM, and out of the store where no lower tier has it; the bytes that became free."""
        if self._is_below(digest):
            return self._demote(digest)
        self._forget_below(digest)
        return self._expel(digest)

    def _is_below(self, digest: bytes) -> bool:
        object_id = self.object_id_of(digest)
        return object_id is not None and self.journal.holds(object_id)

    def _forget_below(self, digest: bytes) -> None:
        """No lower tier is to have the object, or what was written of it so far."""
        object_id = self.object_id_of(digest)
        if object_id is not None:
            self.journal.removed(object_id)

    def _drop_marker(self, bucket: bytes, prefix: bytes) -> None:
        row = self.names.remove(bucket, prefix)
        if row is not None:
            self.journal.removed(row.object_id)

    def _demote(self, digest: bytes) -> int:
        """Take an object out of DRAM that a lower tier has; the bytes that became free."""
        entry = self.table.get(digest)
        extent = None if entry is None else extent_of(entry)
        if entry is None or extent is None:
            return 0
        self.table.put(
            digest,
            entry.kind,
            NO_SLOT,
            0,
            entry.size_bytes,
            tiers=entry.tiers & ~TIER_DRAM,
            flags=entry.flags,
            location=entry.location,
        )
        self._policy.remove(digest)
        uid = self._uid_of(digest)
        held = self.dram.free(extent, charge_uid=self._last_reader.pop(extent.slot, uid))
        self._counts["demotions"] += 1
        self._watch_quota()
        self._tell(Change(ChangeKind.MOVED, self._name_of.get(digest), StoreKey(Kind(entry.kind), digest)))
        return 0 if held else entry.size_bytes

    def _uid_of(self, digest: bytes) -> int:
        block = self._blocks.get(digest)
        if block is not None:
            return block.uid
        name = self._name_of.get(digest)
        row = None if name is None else self.names.get(name.bucket, name.key)
        return 0 if row is None else row.uid

    def _expel(self, digest: bytes, removed: NameRow | None = None) -> int:
        """An object leaves the store, as a cache's may; the bytes that became free in DRAM. `removed`: the row of its
        name, which is gone already."""
        name, block = self._name_of.get(digest), self._blocks.get(digest)
        if name is None and block is None:
            if digest in self._policy:
                self._policy.remove(digest)
            return 0
        key = StoreKey(Kind.BLOCK if block else Kind.OBJECT, digest)
        uid = block.uid if block else 0
        if name is not None:
            row = removed or self.names.remove(name.bucket, name.key)
            uid = row.uid if row else 0
            if removed is None:
                self.drop_empty_unit(name)
        elif block is not None:
            name = Name(block.bucket, block_name(digest))
        self.journal.evicted(key)
        freed = self._discard(key, uid)
        self._counts["evictions"] += 1
        self._tell(Change(ChangeKind.REMOVED, name, key, evicted=True))
        return freed

    def drop_empty_unit(self, name: Name) -> None:
        """A directory named by a hash reads as a hit while it exists, so it goes with its last file."""
        unit = paths.unit_prefix(name.key)
        if unit and not self.names.list(name.bucket, prefix=unit, after=unit, limit=1).entries:
            self._drop_marker(name.bucket, unit)
            self._tell(Change(ChangeKind.REMOVED, Name(name.bucket, unit), None, evicted=True))

    def _discard(self, key: StoreKey, uid: int) -> int:
        """Take an object out of table, policy and tier; the bytes that became free."""
        self._report_hits()
        entry = self.table.get(key.digest)
        self.table.remove(key.digest)
        if key.digest in self._policy:
            self._policy.remove(key.digest)
        self._name_of.pop(key.digest, None)
        self._blocks.remove(key.digest)
        extent = None if entry is None else extent_of(entry)
        if entry is None or extent is None:
            return 0
        held = self.dram.free(extent, charge_uid=self._last_reader.pop(extent.slot, uid))
        self._watch_quota()
        return 0 if held else entry.size_bytes

    # --- lower tiers --------------------------------------------------------------------------------------

    def in_dram(self, object_id: int) -> Resident | None:
        """An object that is in DRAM, and all that a lower tier has to know to take a copy; None if it is not."""
        digest = self._digest_of(object_id)
        entry = None if digest is None else self.table.get(digest)
        extent = None if entry is None else extent_of(entry)
        if digest is None or entry is None or extent is None:
            return None
        block, name = self._blocks.get(digest), self._name_of.get(digest)
        if block is not None:
            key = StoreKey(Kind.BLOCK, digest)
            where, parent = self.bucket(block.bucket), block.parent or bytes(16)
            return Resident(key, object_id, extent, entry.size_bytes, where, None, parent, block.uid)
        row = None if name is None else self.names.get(name.bucket, name.key)
        if name is None or row is None:
            return None
        key = StoreKey(Kind.OBJECT, digest)
        where = self.bucket(name.bucket)
        return Resident(key, object_id, extent, entry.size_bytes, where, (name, row), bytes(16), row.uid)

    def _digest_of(self, object_id: int) -> bytes | None:
        digest = object_key(object_id).digest
        return digest if digest in self._name_of else self._blocks.of_sequence(object_id)

    def note_copy(self, key: StoreKey, location: int) -> None:
        """The NVMe tier has the object, at this place."""
        entry = self.table.get(key.digest)
        if entry is not None:
            self.table.put(
                key.digest,
                entry.kind,
                entry.slot,
                entry.generation,
                entry.size_bytes,
                tiers=entry.tiers | TIER_NVME,
                flags=entry.flags,
                location=location,
            )

    def lose_copy(self, key: StoreKey) -> list[int]:
        """The NVMe tier has the object no more. The ids of those that leave the store with it: where DRAM has no
        copy the object itself, then the blocks behind it, or the other files of its unit."""
        entry = self.table.get(key.digest)
        if entry is None:
            return []
        if entry.tiers & TIER_DRAM:
            self.table.put(
                key.digest,
                entry.kind,
                entry.slot,
                entry.generation,
                entry.size_bytes,
                tiers=entry.tiers & ~TIER_NVME,
                flags=entry.flags,
            )
            return []
        digests = [key.digest, *self._dependents(key.digest)]
        leaving = [object_id for digest in digests if (object_id := self.object_id_of(digest)) is not None]
        for digest in digests:
            self._expel(digest)
        return leaving

    def _dependents(self, digest: bytes) -> list[bytes]:
        """What is of no use without this object, and not in DRAM either."""
        found = self._blocks.descendants(digest)
        name = self._name_of.get(digest)
        unit = None if name is None else paths.unit_prefix(name.key)
        if name is not None and unit:
            page = self.names.list(name.bucket, prefix=unit, after=unit)
            rows = [entry.row for entry in page.entries if entry.row is not None]
            found += [object_key(row.object_id).digest for row in rows if not row.flags & DIRECTORY]
        return [each for each in found if each != digest and not self._has_slot(each)]

    def _has_slot(self, digest: bytes) -> bool:
        entry = self.table.get(digest)
        return entry is not None and bool(entry.tiers & TIER_DRAM)

    def promoted(self, info: ObjectInfo, draft: Draft, checksum: int | None) -> ObjectInfo:
        """Seal the bytes that were read back into `draft` as the object's copy in DRAM.

        Raises NotFound when the object went away meanwhile (the draft then stays open), WriterActive.
        """
        entry = self.table.get(info.key.digest)
        if entry is None or self.object_id_of(info.key.digest) != info.object_id:
            raise NotFound(f"object {info.object_id} is gone")
        block, name = self._blocks.get(info.key.digest), self._name_of.get(info.key.digest)
        header = SealHeader(
            info.key,
            info.object_id,
            info.sequence,
            parent=block.parent or bytes(16) if block else bytes(16),
            uid=info.uid,
            bucket_id=self.bucket(block.bucket).bucket_id if block else 0,
        )
        sealed = self.dram.seal(draft.extent, header, checksum=checksum)
        self._close_draft(draft, sealed.size_bytes)
        self.table.put(
            info.key.digest,
            entry.kind,
            sealed.extent.slot,
            sealed.extent.generation,
            sealed.size_bytes,
            tiers=entry.tiers | TIER_DRAM,
            flags=entry.flags,
            location=entry.location,
        )
        if block is not None:
            self._count_block(info.key.digest, block)
        elif name is not None:
            row = self.names.get(name.bucket, name.key)
            assert row is not None
            self.enter(info.key.digest, name, row)
        self._counts["promotions"] += 1
        self._tell(Change(ChangeKind.MOVED, name, info.key))
        return replace(info, extent=sealed.extent, tier="dram")

    def maintain(self) -> None:
        """Sweep what holders let go, and evict down to the headroom. Cheap when there is nothing to do."""
        self._sweep()
        usage = self.dram.usage()
        short = self.space.headroom_bytes() - (usage.capacity_bytes - usage.used_bytes)
        if short > 0:
            self._evictor.run(short)

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
            **self._counts,
            "tiers": [
                {"name": self.dram.name, "backing": self.dram.backing, **asdict(self.dram.usage())},
                *self.journal.usage(),
            ],
        }

    def _tell(self, change: Change) -> None:
        for listener in self.listeners:
            listener(change)


def _check_dram(dram_bytes: int) -> None:
    if dram_bytes < limits.MIN_DRAM_BYTES:
        raise InvalidRequest(f"DRAM capacity of {dram_bytes} bytes: at least {limits.MIN_DRAM_BYTES}")


def _new_row(identity: int, attributes: Attributes, flags: int) -> NameRow:
    """The row of a new name, still without a size. Raises what its encoding would, before anything is done."""
    now = time.time_ns()
    row = NameRow(
        object_id=identity,
        ino=attributes.ino or identity,
        size_bytes=0,
        mode=attributes.mode & 0o7777,
        uid=attributes.uid,
        gid=attributes.gid,
        mtime_ns=now if attributes.mtime_ns is None else attributes.mtime_ns,
        ctime_ns=now,
        sequence=identity,
        flags=flags | (PINNED if attributes.pinned else 0),
        user_metadata=attributes.user_metadata,
    )
    row.encode()
    return row


def _with_size(row: NameRow, size_bytes: int) -> NameRow:
    return replace(row, size_bytes=size_bytes)
