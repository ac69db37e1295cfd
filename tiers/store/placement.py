"""Where objects are: objects in DRAM as lower tiers take them, and the copies that lower tiers report.

Responsibility: the table's record of where copies are, what is evicted from the store with a copy, and objects that
were promoted into a slot.

Invariants: an object that no tier has is evicted from the store, with what is of no use without it.
Concurrency: the service's trio thread; nothing here awaits.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from kvfs import limits
from kvfs._native.shared.table import TIER_COLD, TIER_DRAM, TIER_NVME
from kvfs.errors import NoSpace, NotFound
from tiers.dram.verification import Verifier
from tiers.model.blocks import Block
from tiers.model.objects import Change, ChangeKind, Draft, ObjectInfo
from tiers.model.tier import NO_SLOT, Kind, Sealed, SealHeader, StoreKey, object_key
from tiers.nvme.journal import Resident
from tiers.store.catalog import IN_SLOT, extent_of, slot_of
from tiers.store.context import Context
from tiers.store.drafts import Drafts
from tiers.store.residency import Residency


class Placement:
    """See the module's header."""

    def __init__(self, context: Context, residency: Residency, drafts: Drafts, verifier: Verifier) -> None:
        self._catalog, self._dram, self._listeners = context.catalog, context.dram, context.listeners
        self._journal, self._cold = context.journal, context.cold
        self._residency, self._drafts, self._verifier = residency, drafts, verifier
        self.bucket, self.object_id_of = self._catalog.bucket, self._catalog.object_id_of
        self.key_of, self.lookup_object = self._catalog.key_of, self._catalog.lookup_object
        self.cold_name, self.is_large = residency.cold_name, residency.is_large

    def hits(self, digest: bytes) -> int:
        """Return how often the object of this key was read so far."""
        entry = self._catalog.table.get(digest)
        return 0 if entry is None else entry.hits

    def in_dram(self, object_id: int) -> Resident | None:
        """Return an object of DRAM with all that a lower tier needs for a copy; None if it is not there."""
        key = object_key(object_id)
        is_named = key.digest in self._catalog.name_of
        digest = key.digest if is_named else self._catalog.blocks.of_sequence(object_id)
        entry = None if digest is None else self._verifier.checked(digest)
        extent = None if entry is None else extent_of(entry)
        if digest is None or entry is None or extent is None:
            return None
        key, size_bytes, block = self.key_of(digest), entry.size_bytes, self._catalog.blocks.get(digest)
        if block is not None:
            where, parent = self.bucket(block.bucket), block.parent or bytes(16)
            return Resident(key, object_id, extent, size_bytes, where, None, parent, block.uid)
        name = self._catalog.name_of.get(digest)
        row = None if name is None else self._catalog.names.get(name.bucket, name.key)
        if name is None or row is None:
            return None
        where = self.bucket(name.bucket)
        return Resident(key, object_id, extent, size_bytes, where, (name, row), bytes(16), row.uid)

    def note_copy(self, key: StoreKey, tier: int, location: int | None = None) -> None:
        """Record that a lower tier (`TIER_NVME`, at this place, or `TIER_COLD`) has the object."""
        entry = self._catalog.table.get(key.digest)
        if entry is not None:
            location = entry.location if location is None else location
            self._residency.amend(key.digest, entry, tiers=entry.tiers | tier, location=location)

    def drop_copy(self, key: StoreKey, tier: int) -> list[int]:
        """Record that a lower tier has the object no more. Where no other tier has a copy, evict the object, the blocks
        behind it and the other files of its unit; return the ids of all that was evicted."""
        entry = self._catalog.table.get(key.digest)
        if entry is None:
            return []
        left = entry.tiers & ~tier
        if left:
            if tier == TIER_COLD:
                self._residency.detach_cold(key.digest, entry)
            location = 0 if tier == TIER_NVME else entry.location
            self._residency.amend(key.digest, entry, tiers=left, location=location)
            return []
        return self.cascade_evict(key)

    def drop_damaged(self, key: StoreKey) -> list[int]:
        """Record that the NVMe copy is damaged; return ids as `drop_copy` does. Where DRAM has no copy, the one in the
        cold tier goes too: the log deletes the id, which cannot be written there again."""
        tiers = self._catalog.tiers_of(key.digest)
        return self.cascade_evict(key) if tiers and not tiers & IN_SLOT else self.drop_copy(key, TIER_NVME)

    def cascade_evict(self, key: StoreKey) -> list[int]:
        """Take an object out of all tiers, with what is of no use without it; return the ids of all of them."""
        digests = [key.digest, *self._residency.dependents(key.digest)]
        evicted = [
            object_id for digest in digests if (object_id := self._catalog.object_id_of(digest)) is not None
        ]
        for digest in digests:
            self._residency.evict_object(digest)
        return evicted

    def make_entry_room(self) -> None:
        """Make room for another table entry: where it is full, evict the oldest of what DRAM does not have.

        Raises NoSpace where nothing may.
        """
        if len(self._catalog.table) < self._catalog.table.max_entries:
            return
        left = limits.ENTRIES_AT_ONCE
        for key in chain(self._cold.expendable(), self._journal.expendable()):
            entry = self._catalog.table.get(key.digest)
            if entry is None or entry.tiers & IN_SLOT:
                continue
            for object_id in self.cascade_evict(key):
                self._journal.removed(object_id)
                left -= 1
            if left <= 0:
                return
        if left == limits.ENTRIES_AT_ONCE:
            raise NoSpace(f"the index is full: {len(self._catalog.table)} objects, and none may be evicted")

    def restore_copy(self, key: StoreKey, size_bytes: int, tier: int, location: int = 0) -> None:
        """Enter an object that a lower tier has in the table, at a start; beside its copies in others, if it has
        any."""
        if self._catalog.table.get(key.digest) is None:
            self._catalog.table.put(
                key.digest, int(key.kind), NO_SLOT, 0, size_bytes, tiers=tier, location=location
            )
        else:
            self.note_copy(key, tier, location if tier == TIER_NVME else None)

    def restore_block(self, digest: bytes, block: Block, tier: int, location: int = 0) -> bool:
        """Enter a block that a lower tier has, at a start; return False where another tier has a later one."""
        known = self._catalog.object_id_of(digest)
        if known not in (None, block.sequence):
            return False
        self.restore_copy(StoreKey(Kind.BLOCK, digest), block.size_bytes, tier, location)
        if known is None:
            self._catalog.blocks.add(digest, block)
        return True

    def adopt_cold_block(self, digest: bytes, block: Block) -> bool:
        """Enter a block that only the cold tier has; return False where it is there already, or there is no room."""
        catalog = self._catalog
        with catalog.native_seals.settled():
            if catalog.object_id_of(digest) is not None:
                return False
            try:
                self.make_entry_room()
            except NoSpace:
                return False
            catalog.names.skip_ids(block.sequence)
            catalog.table.put(digest, int(Kind.BLOCK), NO_SLOT, 0, block.size_bytes, tiers=TIER_COLD)
        catalog.blocks.add(digest, block)
        if self._listeners.blocks:
            self._residency.notify_placed(digest, 0, TIER_COLD)
        return True

    def drop_slot(self, sealed: Sealed) -> None:
        """Evict an object from DRAM whose slot does not have the bytes that were sealed."""
        entry = self._catalog.table.get(sealed.header.key.digest)
        if entry is not None and slot_of(entry) == sealed.extent:
            self._residency.evict_one(sealed.header.key.digest)

    def promoted(self, info: ObjectInfo, draft: Draft, checksum: int | None) -> ObjectInfo:
        """Seal the bytes that were read back into `draft` as the object's copy in DRAM.

        Raises NotFound when the object is gone (the draft then stays open), WriterActive.
        """
        entry = self._catalog.table.get(info.key.digest)
        if entry is None or self._catalog.object_id_of(info.key.digest) != info.object_id:
            raise NotFound(f"object {info.object_id} is gone")
        block, name = self._catalog.blocks.get(info.key.digest), self._catalog.name_of.get(info.key.digest)
        header = SealHeader(
            info.key,
            info.object_id,
            info.sequence,
            parent=block.parent or bytes(16) if block else bytes(16),
            uid=info.uid,
            bucket_id=self._catalog.bucket(block.bucket).bucket_id if block else 0,
        )
        sealed = self._dram.seal(draft.extent, header, checksum=checksum)
        self._drafts.close(draft, sealed.size_bytes)
        slot, generation = sealed.extent.slot, sealed.extent.generation
        self._residency.amend(
            info.key.digest, entry, slot=slot, generation=generation, tiers=entry.tiers | TIER_DRAM
        )
        if block is not None:
            self._residency.count_block(info.key.digest, block)
        elif name is not None:
            row = self._catalog.names.get(name.bucket, name.key)
            assert row is not None
            self._residency.enter(info.key.digest, name, row)
        if not entry.tiers & TIER_NVME:
            self._journal.promoted(info.key)
        self._catalog.counts["promotions"] += 1
        self._listeners.notify(Change(ChangeKind.MOVED, name, info.key))
        return replace(info, extent=sealed.extent, tier="dram")
