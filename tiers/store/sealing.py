"""Seals: a draft becomes an object under a name, or a block under its prefix hash.

Responsibility: each seal as one step of slot, table, index, policy, journal and listeners, complete when it returns;
durable copies of a draft before its seal (snapshots).

Invariants:
- Names: the last seal wins. Prefix hashes: the first seal wins, later ones are given the earlier object; but a
  seal into a durable bucket takes a block over from a cache's bucket, which may lose it.
- The name row is written before the table entry counts; a step that fails is undone at once.

Concurrency: the service's trio thread; nothing here awaits, so each seal is atomic towards all other calls.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import replace as with_fields
from functools import partial

from kvfs._native.seal.sealer import Sealed
from kvfs._native.shared.table import TIER_COLD, TIER_DRAM
from kvfs.errors import InvalidRequest, KvfsError, NoSpace, NotPermitted, block_error
from kvfs.index.names import NameRow
from kvfs.index.rows import SNAPSHOT
from kvfs.keys import block_name
from kvfs.system import crashpoints
from tiers.model.blocks import Block
from tiers.model.objects import Attributes, Bucket, Change, ChangeKind, Draft, Name, ObjectInfo
from tiers.model.tier import Extent, Kind, SealHeader, StoreKey, object_key
from tiers.model.tier import Sealed as SealedExtent
from tiers.nvme.journal import Resident
from tiers.nvme.snapshots import Snapshots
from tiers.store.context import Context
from tiers.store.drafts import Drafts
from tiers.store.name_ops import new_row
from tiers.store.placement import Placement
from tiers.store.residency import Residency


class Sealing:
    """See the module's header."""

    def __init__(self, context: Context, residency: Residency, drafts: Drafts, placement: Placement) -> None:
        self._catalog, self._dram, self._listeners = context.catalog, context.dram, context.listeners
        self._journal, self._cold = context.journal, context.cold
        self._residency, self._drafts, self._placement = residency, drafts, placement

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
        self._placement.make_entry_room()
        bucket, old = self._catalog.check_sealable(name, replace=replace, expected_id=expected_id)
        same = snapshot is not None and self.is_snapshot(snapshot, draft)
        if bucket.durable and not same:
            self._journal.check_durable(self._dram.draft_bytes(draft.extent))
        sequence = snapshot if snapshot is not None and same else self._catalog.names.next_ids(1)
        key = object_key(sequence)
        row = new_row(sequence, attributes, 0)
        self._fill_holes(draft)
        sealed = self._dram.seal(
            draft.extent,
            SealHeader(key, sequence, sequence, uid=attributes.uid),
            checksum=checksum,
            verify=bucket.durable,  # what is wrong may not replace what is right and durable
        )
        crashpoints.reach("store.after_dram_seal")
        row = with_fields(row, size_bytes=sealed.size_bytes)
        self._index(draft, sealed)
        found = Resident(
            key, sequence, sealed.extent, sealed.size_bytes, bucket, (name, row), bytes(16), attributes.uid
        )
        self._name(found, name, row)
        self._journal.sealed(found, replaced=None if old is None else old.object_id, snapshot=snapshot)
        self._cold.sealed(key, bucket)
        self._residency.detach_replaced(old)
        self._listeners.notify(Change(ChangeKind.SEALED, name, key))
        return self._catalog.info(name, row, sealed.extent, "dram")

    def _name(self, found: Resident, name: Name, row: NameRow) -> None:
        """Give an object that is in the table its name. Raises NoSpace; it is then detached again."""
        try:
            self._catalog.names.put(name.bucket, name.key, row)
        except BaseException:  # a full index, for one: without a name nothing would ever evict these bytes
            self._residency.detach(found.key, found.uid)
            raise
        crashpoints.reach("store.after_index_put")
        self._residency.enter(found.key.digest, name, row)

    def _fill_holes(self, draft: Draft) -> None:
        """Allocate the pages of a draft's holes. Raises NoSpace."""
        holes = self._dram.hole_bytes(draft.extent)
        if holes:
            self._residency.make_room(holes)
            self._dram.fill_holes(draft.extent)

    def is_snapshot(self, snapshot: int, draft: Draft) -> bool:
        """Return whether the snapshot that `put_snapshot` made has the bytes that the draft has now."""
        descriptor = self._dram.open_draft(draft.extent)
        try:
            return self._snapshots.is_same(snapshot, descriptor)
        finally:
            os.close(descriptor)

    def put_snapshot(self, draft: Draft, name: Name, attributes: Attributes) -> int | None:
        """Queue what a draft holds now under its name, though no door but its own sees it; return its id, for
        `settle_snapshot`. None without the NVMe tier. Raises NoSpace, DeviceFailed."""
        if self._journal.snapshots is None:
            return None
        identity = self._catalog.names.next_ids(1)
        size_bytes = self._dram.draft_bytes(draft.extent)
        row = with_fields(new_row(identity, attributes, SNAPSHOT), size_bytes=size_bytes)
        return self._snapshots.put(draft.extent, self._catalog.bucket(name.bucket), name, row)

    async def settle_snapshot(self, snapshot: int, previous: int | None) -> None:
        """Wait until what `put_snapshot` has queued is durable (`Snapshots.settle`)."""
        await self._snapshots.settle(snapshot, previous)

    @property
    def _snapshots(self) -> Snapshots:
        assert self._journal.snapshots is not None  # else there is no id to ask with
        return self._journal.snapshots

    def rename_snapshot(self, snapshot: int, name: Name, attributes: Attributes) -> None:
        """Rename a snapshot, whatever got the name after it was made."""
        row = with_fields(new_row(snapshot, attributes, SNAPSHOT), sequence=self._catalog.names.next_ids(1))
        self._snapshots.rename(self._catalog.bucket(name.bucket), name, row)

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
        """Publish a draft as a block: the first seal wins, and a later one is given the earlier object. A durable
        bucket takes a block over from a cache's.

        `digest` and `parent` are prefix hashes of 16 bytes. Raises WriterActive (the draft stays open), WrongChecksum
        as `seal` does, and NotPermitted in a durable bucket where another one keeps the block, durable or pinned.
        """
        if len(digest) != 16 or (parent is not None and len(parent) != 16):
            raise InvalidRequest("a prefix hash has 16 bytes")
        if not any(digest[:8]):  # one hash in 2^64; an object of this id would read the block's bytes
            raise block_error(errno.EINVAL, digest)
        where = self._catalog.bucket(bucket)
        if where.namespace is None:
            raise InvalidRequest(f"bucket {bucket.decode()} is bound to no namespace")
        self._placement.make_entry_room()
        self._fill_holes(draft)
        with self._catalog.native_seals.settled():
            if self._catalog.tiers_of(digest) == TIER_COLD:  # which may be away, and is slower
                self._residency.detach(StoreKey(Kind.BLOCK, digest), uid)
            rival = self._catalog.blocks.get(digest)
            if rival is not None and not self._takes_over(where, rival, digest):
                self._drafts.abort(draft)
                return self._catalog.lookup_block(digest)
            if where.durable:
                self._journal.check_durable(self._dram.draft_bytes(draft.extent))
            if rival is not None:
                self._residency.drop_lower_copies(digest)
                self._residency.evict_object(digest)
            key = StoreKey(Kind.BLOCK, digest)
            sequence = self._catalog.names.next_ids(1)
            header = SealHeader(
                key, sequence, sequence, parent=parent or bytes(16), uid=uid, bucket_id=where.bucket_id
            )
            sealed = self._dram.seal(draft.extent, header, checksum=checksum, verify=where.durable)
            self._index(draft, sealed)
        block = Block(bucket, uid, sealed.size_bytes, sequence, sealed.sealed_at_ns, parent=parent)
        self._enter_sealed(key, block, where, sealed.extent)
        return self._catalog.lookup_block(digest)

    def _takes_over(self, where: Bucket, rival: Block, digest: bytes) -> bool:
        """Return whether a seal into this bucket replaces the block: a durable bucket's names are there durably, and a
        prefix hash has one bucket. Raises NotPermitted where the other bucket keeps its block."""
        if not where.durable or rival.bucket == where.name:
            return False
        if rival.pinned or self._catalog.bucket(rival.bucket).durable:
            raise NotPermitted(
                f"block {digest.hex()} is kept in bucket {rival.bucket.decode(errors='replace')}, "
                f"and not in {where.name.decode(errors='replace')} besides: remove or unpin it there"
            )
        return True

    def replace_cold_block(self, draft: Draft, sealed: Sealed, bucket: Bucket) -> None:
        """End a draft whose block was there before the sealing thread came to it; seal the draft where only the cold
        tier has the block."""
        if self._catalog.tiers_of(sealed.key) == TIER_COLD:
            parent = sealed.parent if any(sealed.parent) else None
            with suppress(KvfsError):
                self.seal_block(draft, bucket.name, sealed.key, parent=parent, uid=draft.uid)
        self._drafts.abort(draft)

    def sealed_natively(self, draft: Draft, sealed: Sealed, bucket: Bucket) -> None:
        """Enter a block that the sealing thread has published, as `seal_block` does."""
        self._listeners.report_hits()
        self._drafts.close(draft, sealed.size_bytes)
        self._catalog.counts["seals"] += 1
        extent = self._dram.note_sealed(draft.extent, sealed.physical_bytes, has_checksum=sealed.has_checksum)
        parent = sealed.parent if any(sealed.parent) else None
        block = Block(
            bucket.name, draft.uid, sealed.size_bytes, sealed.object_id, sealed.sealed_at_ns, parent=parent
        )
        self._enter_sealed(StoreKey(Kind.BLOCK, sealed.key), block, bucket, extent)

    def drop_unindexed(self, draft: Draft, sealed: Sealed) -> None:
        """Free the slot of a draft that the sealing thread sealed and the table has no room for, and make room for the
        next one, if anything may be evicted."""
        self._drafts.close(draft, None)
        extent = self._dram.note_sealed(draft.extent, sealed.physical_bytes, has_checksum=True)
        self._dram.free(extent, charge_uid=draft.uid)
        with suppress(NoSpace):
            self._placement.make_entry_room()

    def _enter_sealed(self, key: StoreKey, block: Block, bucket: Bucket, extent: Extent) -> None:
        """Enter a block that is in the table, and notify the lower tiers and doors."""
        self._residency.enter_block(key.digest, block)
        self._residency.notify_placed(key.digest, 0, TIER_DRAM)
        parent = block.parent or bytes(16)
        self._journal.sealed(
            Resident(key, block.sequence, extent, block.size_bytes, bucket, None, parent, block.uid)
        )
        self._cold.sealed(key, bucket)
        self._listeners.notify(Change(ChangeKind.SEALED, Name(block.bucket, block_name(key.digest)), key))

    def _index(self, draft: Draft, sealed: SealedExtent) -> None:
        """Enter what was sealed in the table. Raises NoSpace; the slot is then free again, and the draft gone."""
        self._listeners.report_hits()
        self._drafts.close(draft, sealed.size_bytes)
        try:
            self._enter_in_table(sealed)
        except BaseException:  # or nothing would ever free it
            self._dram.free(sealed.extent, charge_uid=draft.uid)
            self._residency.watch_quota()
            raise
        self._catalog.counts["seals"] += 1

    def _enter_in_table(self, sealed: SealedExtent) -> None:
        key, extent = sealed.header.key, sealed.extent
        enter = partial(
            self._catalog.table.put,
            key.digest,
            int(key.kind),
            extent.slot,
            extent.generation,
            sealed.size_bytes,
        )
        try:
            enter()
        except NoSpace:  # a sealing thread took the room that `make_entry_room` had made
            self._placement.make_entry_room()
            enter()
