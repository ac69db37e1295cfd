"""What the store tells lower tiers of its objects, and hears from them.

Responsibility: an object as a lower tier takes it, the table's word on where copies are, and an object that came back
up into a slot.

Concurrency: the service's trio thread; nothing here awaits.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from kvfs import limits
from kvfs._native.table import TIER_COLD, TIER_DRAM, TIER_NVME
from kvfs.errors import NoSpace, NotFound
from tiers.base import Kind, Sealed, SealHeader, StoreKey, object_key
from tiers.blocks import Block
from tiers.catalog import extent_of
from tiers.journal import Resident
from tiers.model import Change, ChangeKind, Draft, ObjectInfo
from tiers.residence import Residence


class Copies(Residence):
    """Objects and their copies below DRAM."""

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

    def note_copy(self, key: StoreKey, tier: int, location: int | None = None) -> None:
        """A lower tier (`TIER_NVME`, at this place, or `TIER_COLD`) has the object."""
        entry = self.table.get(key.digest)
        if entry is not None:
            location = entry.location if location is None else location
            self._amend(key.digest, entry, tiers=entry.tiers | tier, location=location)

    def lose_copy(self, key: StoreKey, tier: int) -> list[int]:
        """A lower tier has the object no more. The ids of those that leave the store with it: where no other has a
        copy the object itself, then the blocks behind it, or the other files of its unit."""
        entry = self.table.get(key.digest)
        if entry is None:
            return []
        left = entry.tiers & ~tier
        if left:
            if tier == TIER_COLD:
                self._discard_cold(key.digest, entry)
            location = 0 if tier == TIER_NVME else entry.location
            self._amend(key.digest, entry, tiers=left, location=location)
            return []
        return self.cascade_evict(key)

    def lose_damaged(self, key: StoreKey) -> list[int]:
        """As `lose_copy` of the NVMe tier, of which the log deletes what DRAM does not have: its id cannot be written
        there again, so that a copy in the cold tier goes, too."""
        entry = self.table.get(key.digest)
        if entry is not None and not entry.tiers & TIER_DRAM:
            return self.cascade_evict(key)
        return self.lose_copy(key, TIER_NVME)

    def cascade_evict(self, key: StoreKey) -> list[int]:
        """Take an object out of all tiers, with what is of no use without it; the ids of all of them."""
        digests = [key.digest, *self._dependents(key.digest)]
        leaving = [object_id for digest in digests if (object_id := self.object_id_of(digest)) is not None]
        for digest in digests:
            self._expel(digest)
        return leaving

    def make_entry_room(self) -> None:
        """Have the table take another entry: where it is full, the oldest of what DRAM does not have leaves the store.

        Raises NoSpace where nothing may.
        """
        if len(self.table) < self.table.max_entries:
            return
        left = limits.ENTRIES_AT_ONCE
        for key in chain(self.cold.expendable(), self.journal.expendable()):
            entry = self.table.get(key.digest)
            if entry is None or entry.tiers & TIER_DRAM:
                continue
            for object_id in self.cascade_evict(key):
                self.journal.removed(object_id)
                left -= 1
            if left <= 0:
                return
        if left == limits.ENTRIES_AT_ONCE:
            raise NoSpace(f"the index is full: {len(self.table)} objects, and none may be evicted")

    def key_of(self, digest: bytes) -> StoreKey:
        return StoreKey(Kind.BLOCK if self._blocks.get(digest) is not None else Kind.OBJECT, digest)

    def adopted_block(self, digest: bytes, block: Block, tier: int) -> None:
        """Know a block that a lower tier was found to have, and that is in the table."""
        self.restore_block(digest, block)
        if self.block_listeners:
            self._tell_placed(digest, 0, tier)

    def lose_slot(self, sealed: Sealed) -> None:
        """The bytes of a slot are not what was sealed: the object is read from a lower tier, or leaves the store."""
        entry = self.table.get(sealed.header.key.digest)
        if entry is not None and extent_of(entry) == sealed.extent:
            self._evict_one(sealed.header.key.digest)

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
        slot, generation = sealed.extent.slot, sealed.extent.generation
        self._amend(info.key.digest, entry, slot=slot, generation=generation, tiers=entry.tiers | TIER_DRAM)
        if block is not None:
            self._count_block(info.key.digest, block)
        elif name is not None:
            row = self.names.get(name.bucket, name.key)
            assert row is not None
            self.enter(info.key.digest, name, row)
        if not entry.tiers & TIER_NVME:
            self.journal.promoted(info.key)
        self._counts["promotions"] += 1
        self._tell(Change(ChangeKind.MOVED, name, info.key))
        return replace(info, extent=sealed.extent, tier="dram")
