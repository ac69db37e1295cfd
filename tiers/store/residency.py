"""What is in DRAM, and what is evicted from it: room, eviction, and the table's entries.

Responsibility: keep room for drafts, evict by policy (to a lower tier where that has a copy, else out of the store),
and take objects out of table, policy and tier. What the objects are called is `tiers.store.name_ops`, how they get in
`tiers.store.sealing`.

Invariants: the table entry goes before the slot is touched, so no reader can find a slot that is being recycled. A
durable object's only copy is never evicted. A unit (a directory whose files are useful only together) is evicted as a
whole.

Concurrency: the service's trio thread; nothing here awaits.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from kvfs import limits, paths
from kvfs._native.catalog.adoption import Adoption
from kvfs._native.shared.table import TIER_COLD, TIER_DRAM, TIER_UNVERIFIED, Entry
from kvfs.errors import IsDirectory
from kvfs.index.names import ListEntry, NameRow
from kvfs.index.rows import LINK, PINNED, ROW_ONLY
from kvfs.keys import block_name
from tiers.cold.format import ColdName
from tiers.dram.accounting import SlotReaders
from tiers.eviction.evictor import Evictor
from tiers.eviction.policy import EvictionPolicy
from tiers.model.blocks import Block
from tiers.model.objects import BlockPlaced, Change, ChangeKind, Directory, Name, ObjectInfo, unit_of
from tiers.model.tier import NO_SLOT, StoreKey, Usage, object_key
from tiers.store.catalog import IN_SLOT, slot_of
from tiers.store.context import Context

SLOTS_AT_ONCE = 64
"""Objects evicted when no slot is free: their bytes may be none."""


class Residency:
    """See the module's header."""

    def __init__(self, context: Context, policy: EvictionPolicy[bytes]) -> None:
        self._catalog, self._dram, self._space = context.catalog, context.dram, context.space
        self._listeners, self._journal, self._cold = context.listeners, context.journal, context.cold
        self._policy = policy
        self.over_quota = False
        """Whether some uid is charged for more than its quota."""
        self._evictor = Evictor(policy, self._is_held, self._evict_group, self._listeners.report_hits)
        self._spares_in_flight = True
        self._last_reader = SlotReaders()

    def enter(self, digest: bytes, name: Name, row: NameRow) -> None:
        """Enter a named object that is in DRAM, as used now, in the unit that its name puts it in."""
        self._catalog.name_of[digest] = name
        self._policy.insert(
            digest,
            size_bytes=row.size_bytes,
            parent=None,
            now=time.monotonic(),
            pinned=bool(row.flags & PINNED),
            group=unit_of(name),
        )

    def enter_block(self, digest: bytes, block: Block) -> None:
        """Enter a block that is in the table, as used now."""
        self._catalog.blocks.add(digest, block)
        self.count_block(digest, block)

    def count_block(self, digest: bytes, block: Block) -> None:
        """Have the policy count a block that is in DRAM, as used now."""
        self._policy.insert(
            digest,
            size_bytes=block.size_bytes,
            parent=block.parent,
            now=time.monotonic(),
            pinned=block.pinned,
        )

    def restore(self, adoption: Adoption, buckets: Mapping[int, bytes]) -> None:
        """Enter what a start took over, the least dear first: the order of the calls is what the policy goes by.

        `buckets`: names by id. The names of objects are in the catalogue.
        """
        blocks = self._catalog.blocks
        numbers = {each: blocks.bucket_number(buckets[each]) for each in adoption.bucket_ids()}
        adoption.restore(
            self._catalog.table,
            blocks.index,
            numbers,
            self._catalog.name_of.native,
            self._policy.insert,
            time.monotonic(),
        )

    def amend(self, digest: bytes, entry: Entry, **changes: int) -> None:
        """Put a table entry back with some of its fields changed: slot, generation, tiers, flags, location."""
        fields = {
            "slot": entry.slot,
            "generation": entry.generation,
            "tiers": entry.tiers,
            "flags": entry.flags,
            "location": entry.location,
        }
        fields |= changes
        self._catalog.table.put(digest, entry.kind, size=entry.size_bytes, **fields)
        if self._listeners.blocks and fields["tiers"] != entry.tiers:
            self.notify_placed(digest, entry.tiers, fields["tiers"])

    def note_verified(self, digest: bytes, entry: Entry, matches: bool) -> None:
        """Have an object read in the slot that it was taken over in, or evict it where that is damaged: with its unit,
        if no lower tier has it."""
        if matches:
            self.amend(digest, entry, tiers=entry.tiers & ~TIER_UNVERIFIED | TIER_DRAM)
        elif self.has_lower_copy(digest):
            self.demote(digest)
        elif unit := self._unit_in_cache(digest):
            self._evict_group([digest, *(each for each in unit if each != digest)])
        else:
            self.drop_lower_copies(digest)
            self.evict_object(digest)

    def notify_placed(self, digest: bytes, before: int, after: int) -> None:
        """Notify doors of the tiers that a block came to or left."""
        block = self._catalog.blocks.get(digest)
        if block is not None:
            placed = BlockPlaced(digest, block.parent, block.bucket, before, after)
            for listener in self._listeners.blocks:
                listener(placed)

    def is_large(self, info: ObjectInfo) -> bool:
        """Return whether DRAM cannot take the object: it is read where it is."""
        return info.extent is None and info.size_bytes > self._dram.largest_object_bytes

    def touch(self, digest: bytes) -> None:
        """Count a use of what is in DRAM."""
        if digest in self._policy:
            self._policy.touch(digest, time.monotonic())

    def cool(self, digest: bytes) -> None:
        """Have the policy evict an object of DRAM next, unless it is used before."""
        if digest in self._policy:
            self._policy.cool(digest)

    def pin(self, digest: bytes, pinned: bool) -> None:
        """Have the policy keep an object of DRAM, or evict it again."""
        if digest in self._policy:
            (self._policy.pin if pinned else self._policy.unpin)(digest)

    def is_counted(self, digest: bytes) -> bool:
        """Return whether the policy counts this key."""
        return digest in self._policy

    def note_reader(self, slot: int, uid: int) -> None:
        """Remember who opened a slot last: its bytes are charged to that uid if they outlive the object."""
        self._last_reader.note(slot, uid)

    def evict(self, bytes_wanted: int | None = None, *, names: Iterable[Name] | None = None) -> int:
        """Evict by policy until `bytes_wanted` are free, or exactly `names`; return the bytes that became free.

        By policy, what somebody holds open is passed over (nothing would come back). By name, a held slot
        is replaced and its bytes stay charged to the holder.
        """
        if names is None:
            return self._evictor.run(bytes_wanted or 0)
        freed = 0
        for name in list(names):
            info = self._catalog.lookup(name)
            if isinstance(info, Directory):
                raise IsDirectory(f"{name} is a directory: evict names the objects in it")
            if not self.in_flight_to_nvme(info.key.digest):
                freed += self.evict_one(info.key.digest)
        return freed

    def make_room(self, size_bytes: int) -> None:
        """Evict until `size_bytes` and the headroom fit, as far as anything can be evicted."""
        usage = self._dram.usage()
        self._sweep()
        self._evict_for(max(size_bytes, self._space.headroom_bytes()), usage)
        self._dram.drop_kept(size_bytes)

    def make_slots(self, size_bytes: int) -> None:
        """Evict for so many bytes, where what is free was promised to open drafts, or slots are short."""
        usage = self._dram.usage()
        short_of_slots = usage.slots >= usage.max_slots
        self._spares_in_flight = False
        try:
            self._evictor.run(size_bytes, objects_wanted=SLOTS_AT_ONCE if short_of_slots else 0)
        finally:
            self._spares_in_flight = True

    @property
    def is_stuck(self) -> bool:
        """Return whether eviction has just found everything held by somebody: who can do without room need not ask."""
        return time.monotonic() < self._evictor.stuck_until_s

    def maintain(self) -> None:
        """Free what holders have closed, and evict down to the headroom. Cheap when there is nothing to do."""
        self._sweep()
        self._evict_for(self._space.headroom_bytes(), self._dram.usage())

    def _evict_for(self, free_bytes: int, usage: Usage) -> None:
        """Evict until so many bytes are free, by what was measured as used."""
        wanted = free_bytes - (usage.capacity_bytes - usage.used_bytes)
        if wanted > 0:
            self._evictor.run(wanted)

    def _sweep(self) -> None:
        self._dram.sweep()
        self.watch_quota()

    def watch_quota(self) -> None:
        """Notify doors when some uid comes over its quota, and when none is any more."""
        over = self._dram.most_charged_bytes > self._space.quota_bytes
        if over != self.over_quota:
            self.over_quota = over
            for listener in self._listeners.quota:
                listener(over)

    def _is_held(self, digest: bytes) -> bool:
        """Return whether the DRAM copy may not be evicted now: somebody has it open, or it is the only copy of a
        durable object; or the copy in the cold tier would go with it, and there may be others to evict."""
        object_id = self._catalog.object_id_of(digest)
        if object_id is not None and self._journal.is_needed(object_id):
            return True
        if self._spares_in_flight and self.in_flight_to_nvme(digest):
            return True
        entry = self._catalog.table.get(digest)
        extent = None if entry is None else slot_of(entry)
        return extent is not None and self._dram.held(extent)

    def _evict_group(self, group: list[bytes]) -> int:
        """Take a group out of DRAM, and out of the store where no lower tier has all of it; return the bytes freed.

        The names of a unit go in one transaction, and its marker before them: after a kill all of it is there, or
        nothing. A part, or the directory alone, would read as a hit; so its symbolic links go along.
        """
        if all(self.has_lower_copy(digest) for digest in group):
            return sum([self.demote(digest) for digest in group])
        group = [*group, *(digest for digest in self.dependents(group[0]) if digest not in group)]
        named = {digest: name for digest in group if (name := self._catalog.name_of.get(digest)) is not None}
        names = list(named.values())
        unit = paths.unit_prefix(names[0].key) if names else None
        if unit is None:
            return sum([self.evict_one(digest) for digest in group])
        bucket, keys = names[0].bucket, {unit, *(name.key for name in names)}
        page = self._catalog.names.list(bucket, prefix=unit)
        links = [entry.name for entry in page.entries if _is_link(entry)]
        if not page.truncated and all(entry.name in keys or _is_link(entry) for entry in page.entries):
            self.drop_marker(bucket, unit)
        removed = self._catalog.names.remove_many(
            [(bucket, key) for key in (*(each.key for each in names), *links)]
        )
        rows = dict(zip(named, removed[: len(named)], strict=True))
        self._links_evicted(bucket, links, removed[len(named) :])
        freed = 0
        for digest in group:
            self.drop_lower_copies(digest)
            freed += self.evict_object(digest, rows.get(digest))
        self.drop_empty_unit(names[0])
        return freed

    def evict_one(self, digest: bytes) -> int:
        """Take an object out of DRAM, and out of the store where no lower tier has it; return the bytes freed."""
        object_id = self._catalog.object_id_of(digest)
        if object_id is not None and self._journal.is_needed(object_id):
            return 0  # a durable one that is not on the device yet, also where it was named
        if self.has_lower_copy(digest):
            return self.demote(digest)
        self.drop_lower_copies(digest)
        return self.evict_object(digest)

    def has_lower_copy(self, digest: bytes) -> bool:
        """Return whether a lower tier has the object, so that DRAM may evict it."""
        object_id = self._catalog.object_id_of(digest)
        if object_id is None:
            return False
        return self._journal.holds(object_id) or (
            bool(self._catalog.tiers_of(digest) & TIER_COLD) and not self._journal.is_writing(object_id)
        )

    def in_flight_to_nvme(self, digest: bytes) -> bool:
        """Return whether the cold tier has the object, and NVMe is still writing it. Evicted from DRAM now, it would
        have to go from all tiers: only a deletion ends a write, and that ends whatever is written of the id later,
        too."""
        object_id = self._catalog.object_id_of(digest)
        if object_id is None or not self._journal.is_writing(object_id):
            return False
        return bool(self._catalog.tiers_of(digest) & TIER_COLD)

    def drop_lower_copies(self, digest: bytes) -> None:
        """Delete the object from the log, with what was written of it so far."""
        object_id = self._catalog.object_id_of(digest)
        if object_id is not None:
            self._journal.removed(object_id)

    def drop_marker(self, bucket: bytes, prefix: bytes) -> None:
        """Remove the marker of a directory, if it has one."""
        row = self._catalog.names.remove(bucket, prefix)
        if row is not None:
            self._journal.removed(row.object_id)

    def demote(self, digest: bytes) -> int:
        """Take an object out of DRAM that a lower tier has; return the bytes freed."""
        entry = self._catalog.table.get(digest)
        extent = None if entry is None else slot_of(entry)
        if entry is None or extent is None:
            return 0
        self.amend(digest, entry, slot=NO_SLOT, generation=0, tiers=entry.tiers & ~IN_SLOT)
        self._policy.remove(digest)
        uid = self._uid_of(digest)
        held = self._dram.free(extent, charge_uid=self._last_reader.pop(extent.slot, uid))
        self._catalog.counts["demotions"] += 1
        self.watch_quota()
        key = self._catalog.key_of(digest)
        self._listeners.notify(Change(ChangeKind.MOVED, self._catalog.name_of.get(digest), key))
        return 0 if held else entry.size_bytes

    def _uid_of(self, digest: bytes) -> int:
        block = self._catalog.blocks.get(digest)
        if block is not None:
            return block.uid
        name = self._catalog.name_of.get(digest)
        row = None if name is None else self._catalog.names.get(name.bucket, name.key)
        return 0 if row is None else row.uid

    def evict_object(self, digest: bytes, removed: NameRow | None = None) -> int:
        """Evict an object from the store; return the bytes freed in DRAM. `removed`: the row of its name, if that is
        removed already."""
        name, block = self._catalog.name_of.get(digest), self._catalog.blocks.get(digest)
        if name is None and block is None:
            if digest in self._policy:
                self._policy.remove(digest)
            return 0
        key, uid = self._catalog.key_of(digest), block.uid if block else 0
        if name is not None:
            row = removed or self._catalog.names.remove(name.bucket, name.key)
            uid = row.uid if row else 0
            if removed is None:
                self.drop_empty_unit(name)
        elif block is not None:
            name = Name(block.bucket, block_name(digest))
        self._journal.detached(key)
        freed = self.detach(key, uid)
        self._catalog.counts["evictions"] += 1
        self._listeners.notify(Change(ChangeKind.REMOVED, name, key, evicted=True))
        return freed

    def drop_empty_unit(self, name: Name) -> None:
        """Remove a directory named by a hash once nothing is in it but symbolic links: it would read as a hit."""
        unit = paths.unit_prefix(name.key)
        if not unit:
            return
        for limit in (1, limits.MAX_LIST_ENTRIES):  # mostly the first name says that there is more
            page = self._catalog.names.list(name.bucket, prefix=unit, after=unit, limit=limit)
            if not all(map(_is_link, page.entries)):
                return
        if page.truncated:
            return
        links = [entry.name for entry in page.entries]
        self.drop_marker(name.bucket, unit)
        removed = self._catalog.names.remove_many([(name.bucket, key) for key in links])
        self._links_evicted(name.bucket, links, removed)
        self._listeners.notify(Change(ChangeKind.REMOVED, Name(name.bucket, unit), None, evicted=True))

    def _links_evicted(self, bucket: bytes, links: list[bytes], removed: list[NameRow | None]) -> None:
        """Notify lower tiers and doors of symbolic links whose rows are removed."""
        for key, row in zip(links, removed, strict=True):
            if row is not None:
                self._journal.removed(row.object_id)
                gone = Change(ChangeKind.REMOVED, Name(bucket, key), object_key(row.object_id), evicted=True)
                self._listeners.notify(gone)

    def dependents(self, digest: bytes) -> list[bytes]:
        """List what is of no use without this object, not in DRAM either, and neither durable nor pinned."""
        found = [*self._catalog.blocks.descendants(digest), *self._unit_of(digest)]
        lower = [each for each in found if each != digest and not self._catalog.tiers_of(each) & IN_SLOT]
        return [each for each in lower if not self._stays(each)]

    def _stays(self, digest: bytes) -> bool:
        """Return whether an object is durable or pinned, and so leaves on nobody's account but its own."""
        block = self._catalog.blocks.get(digest)
        if block is not None:
            return block.pinned or self._catalog.bucket(block.bucket).durable
        name = self._catalog.name_of.get(digest)
        row = None if name is None else self._catalog.names.get(name.bucket, name.key)
        return name is not None and (
            self._catalog.bucket(name.bucket).durable or bool(row and row.flags & PINNED)
        )

    def _unit_of(self, digest: bytes) -> list[bytes]:
        """List the objects of the unit that an object is in, with itself; none where it is in no unit."""
        name = self._catalog.name_of.get(digest)
        unit = None if name is None else paths.unit_prefix(name.key)
        if name is None or not unit:
            return []
        page = self._catalog.names.list(name.bucket, prefix=unit, after=unit)
        rows = [entry.row for entry in page.entries if entry.row is not None]
        return [object_key(row.object_id).digest for row in rows if not row.flags & ROW_ONLY]

    def _unit_in_cache(self, digest: bytes) -> list[bytes]:
        """List the objects of an object's unit, as `_unit_of` does; none in a durable bucket."""
        name = self._catalog.name_of.get(digest)
        is_cache = name is not None and not self._catalog.bucket(name.bucket).durable
        return self._unit_of(digest) if is_cache else []

    def detach_replaced(self, row: NameRow | None) -> None:
        """Detach the object of a row, if there is one, whose name another object takes; the caller updates the
        index."""
        if row is not None:
            self.detach(object_key(row.object_id), row.uid)

    def detach(self, key: StoreKey, uid: int) -> int:
        """Take an object out of table, policy and tiers; return the bytes freed in DRAM."""
        self._listeners.report_hits()
        entry = self._catalog.table.get(key.digest)
        self.detach_cold(key.digest, entry)
        self._catalog.table.remove(key.digest)
        if self._listeners.blocks and entry is not None:
            self.notify_placed(key.digest, entry.tiers, 0)
        if key.digest in self._policy:
            self._policy.remove(key.digest)
        self._catalog.name_of.remove(key.digest)
        self._catalog.blocks.remove(key.digest)
        extent = None if entry is None else slot_of(entry)
        if entry is None or extent is None:
            return 0
        held = self._dram.free(extent, charge_uid=self._last_reader.pop(extent.slot, uid))
        self.watch_quota()
        return 0 if held else entry.size_bytes

    def detach_cold(self, digest: bytes, entry: Entry | None) -> None:
        """Drop the copy in the cold tier, before all else: after a kill in between its row would bring the object
        back."""
        if entry is not None and entry.tiers & TIER_COLD and (name := self.cold_name(digest)) is not None:
            self._cold.removed(name)

    def cold_name(self, digest: bytes) -> ColdName | None:
        """Return what the object of this key is called in the cold tier; None where there is no such object."""
        block, key = self._catalog.blocks.get(digest), self._catalog.key_of(digest)
        if block is not None:
            return ColdName(key, block.sequence, block.parent or bytes(16), block.bucket)
        return ColdName(key, int.from_bytes(digest, "big")) if digest in self._catalog.name_of else None


def _is_link(entry: ListEntry) -> bool:
    return entry.row is not None and bool(entry.row.flags & LINK)
