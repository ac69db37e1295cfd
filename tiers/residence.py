"""What is in DRAM, and what leaves it: drafts and their room, eviction, and the table's entries.

Responsibility: keep room for drafts, evict by policy (to a lower tier where that has a copy, else out of the store),
and take objects out of table, policy and tier. What the objects are called is `tiers.naming`, how they get in
`tiers.store`.

Invariants: the table entry goes before the slot is touched, so no reader can find a slot that is being recycled. A
durable object's only copy is never evicted. Of a unit (a directory whose files are useful only together) all goes, or
nothing.

Concurrency: the service's trio thread; nothing here awaits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from kvfs import limits, paths
from kvfs._native.table import TIER_COLD, TIER_DRAM, Entry
from kvfs.errors import (
    IsDirectory,
    NoSpace,
)
from kvfs.keys import block_name
from kvfs.names import NameIndex, NameRow
from tiers.base import NO_SLOT, Extent, Kind, StoreKey, object_key
from tiers.blocks import Block
from tiers.catalog import DIRECTORY, PINNED, Catalog, extent_of
from tiers.cold import Cold
from tiers.cold_format import ColdName
from tiers.dram import DramTier
from tiers.eviction import EvictionPolicy
from tiers.evictor import Evictor
from tiers.heritage import unit_of
from tiers.home import Home
from tiers.journal import Journal
from tiers.model import BlockPlaced, Change, ChangeKind, Directory, Draft, Name, Unpublished
from tiers.space import SpaceBook

log = logging.getLogger("kvfs.store")

T = TypeVar("T")
SLOTS_AT_ONCE = 64
"""Objects evicted when no slot is free: their bytes may be none."""


class Residence(Catalog):
    """The catalogue, and what of it is in DRAM."""

    def __init__(
        self, home: Home, names: NameIndex, dram: DramTier, quota_bytes: int, policy: EvictionPolicy[bytes]
    ) -> None:
        super().__init__(names, dram.table)
        self.home = home
        self.dram = dram
        self.listeners: list[Callable[[Change], None]] = []
        self.before_eviction: list[Callable[[], None]] = []
        """Called before victims are chosen and objects added: doors that answer hits natively report them here."""
        self.publishers: list[Callable[[Name], Unpublished | None]] = []
        """Asked to publish a closed draft of this name now; they return one for which that is still to come."""
        self.block_listeners: list[Callable[[BlockPlaced], None]] = []
        """Told when a block comes to a tier or leaves one, and nothing of named objects."""
        self.quota_listeners: list[Callable[[bool], None]] = []
        """Told when some uid comes to be charged for more than its quota, and when none is any more."""
        self.over_quota = False
        self.share_listeners: list[Callable[[bool], None]] = []
        """Told when some uid comes near to its share of the slots (`SpaceBook.is_share_near`), and when none is."""
        self._is_share_near = False
        usage = dram.usage()
        self.space = SpaceBook(usage.capacity_bytes, quota_bytes, usage.max_slots)
        self._largest_bytes = usage.largest_object_bytes
        self._policy = policy
        self._evictor = Evictor(self._policy, self._is_held, self._evict_group, self._report_hits)
        self._spares_halfway = True
        self._last_reader: dict[int, int] = {}
        self.journal = Journal()
        """What becomes of objects outside of DRAM; a store without the NVMe tier has one that does nothing."""
        self.cold = Cold()
        """Copies in a bucket elsewhere; without that tier one that does nothing."""
        self.recovery: dict[str, Any] = {}
        """What the start found and how long it took (`heritage.Recovery`)."""

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

    def _amend(self, digest: bytes, entry: Entry, **changes: int) -> None:
        """Put a table entry back with some of its fields changed: slot, generation, tiers, flags, location."""
        fields = {
            "slot": entry.slot,
            "generation": entry.generation,
            "tiers": entry.tiers,
            "flags": entry.flags,
            "location": entry.location,
        }
        fields |= changes
        self.table.put(digest, entry.kind, size=entry.size_bytes, **fields)
        if self.block_listeners and fields["tiers"] != entry.tiers:
            self._tell_placed(digest, entry.tiers, fields["tiers"])

    def _tell_placed(self, digest: bytes, before: int, after: int) -> None:
        block = self._blocks.get(digest)
        if block is not None:
            placed = BlockPlaced(digest, block.parent, block.bucket, before, after)
            for listener in self.block_listeners:
                listener(placed)

    def restore_name(self, digest: bytes, name: Name) -> None:
        """Know a named object that a lower tier has and that is in the table."""
        self._name_of[digest] = name

    def restore_block(self, digest: bytes, block: Block) -> None:
        """Know a block that a lower tier has and that is in the table."""
        self._blocks.add(digest, block)

    # --- drafts -------------------------------------------------------------------------------------------

    def reserve(self, size_bytes: int = 0, *, uid: int) -> Draft:
        """Grant an empty draft, evicting for its room. Raises NoSpace, ObjectTooLarge, QuotaExceeded."""
        if size_bytes <= self._largest_bytes:  # else the tier says that it is too large, whatever the quota
            self.space.check_quota(uid, held_bytes=self.dram.charged_bytes(uid), more_bytes=size_bytes)
        self.space.check_drafts(uid)
        try:
            extent = self.dram.reserve(size_bytes)
        except NoSpace:
            extent = self._evicting(size_bytes, lambda: self.dram.reserve(size_bytes))
        self.space.opened(uid, size_bytes)
        self._watch_shares()
        return Draft(extent, uid, size_bytes)

    def prepare(self) -> Extent:
        """An empty extent for a draft that is granted later, without eviction. Raises NoSpace."""
        return self.dram.reserve(0)

    def grant(self, extent: Extent, *, uid: int) -> Draft:
        """Make what was prepared a draft of `uid`, whose quota and share of the slots the caller has looked at."""
        self.space.opened(uid, 0)
        self._watch_shares()
        return Draft(extent, uid, 0)

    def promise(self, draft: Draft, size_bytes: int) -> None:
        """Promise a draft so many bytes in all, evicting for those that it has not yet; fewer than it has change
        nothing. Raises NoSpace, ObjectTooLarge, QuotaExceeded, Superseded."""
        more_bytes = size_bytes - draft.size_hint_bytes
        if more_bytes <= 0:
            return
        if size_bytes <= self._largest_bytes:
            held_bytes = self.dram.charged_bytes(draft.uid)
            self.space.check_quota(draft.uid, held_bytes=held_bytes, more_bytes=more_bytes)
        try:
            self.dram.promise(draft.extent, size_bytes)
        except NoSpace:
            self._evicting(more_bytes, lambda: self.dram.promise(draft.extent, size_bytes))
        self.space.promised(draft.uid, more_bytes)
        draft.size_hint_bytes = size_bytes

    def _evicting(self, size_bytes: int, ask: Callable[[], T]) -> T:
        """What `ask` gives once there is room for so many bytes. Raises NoSpace."""
        self.make_room(size_bytes)
        try:
            return ask()
        except NoSpace:  # what is free was promised to open drafts, or it is slots that are short
            usage = self.dram.usage()
            short_of_slots = usage.slots >= usage.max_slots
            self._spares_halfway = False
            try:
                self._evictor.run(size_bytes, objects_wanted=SLOTS_AT_ONCE if short_of_slots else 0)
            finally:
                self._spares_halfway = True
            return ask()

    def open_draft(self, draft: Draft) -> int:
        return self.dram.open_draft(draft.extent)

    def abort(self, draft: Draft) -> None:
        """Give the draft back; twice is harmless."""
        if draft.open:
            self._close_draft(draft, None)
            self.dram.abort(draft.extent, charge_uid=draft.uid)
            self._watch_quota()

    def _close_draft(self, draft: Draft, sealed_bytes: int | None) -> None:
        if draft.open:
            draft.open = False
            self.space.closed(draft.uid, draft.size_hint_bytes, sealed_bytes)
            self._watch_shares()

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
            if not self._is_halfway(info.key.digest):
                freed += self._evict_one(info.key.digest)
        return freed

    def make_room(self, size_bytes: int) -> None:
        """Evict until `size_bytes` and the headroom fit, as far as anything can be evicted."""
        usage = self.dram.usage()
        self._sweep()
        wanted = max(size_bytes, self.space.headroom_bytes()) - (usage.capacity_bytes - usage.used_bytes)
        if wanted > 0:
            self._evictor.run(wanted)

    def maintain(self) -> None:
        """Sweep what holders let go, and evict down to the headroom. Cheap when there is nothing to do."""
        self._sweep()
        usage = self.dram.usage()
        short = self.space.headroom_bytes() - (usage.capacity_bytes - usage.used_bytes)
        if short > 0:
            self._evictor.run(short)

    def _sweep(self) -> None:
        self.dram.sweep()
        self._watch_quota()

    def _watch_quota(self) -> None:
        over = self.dram.most_charged_bytes > self.space.quota_bytes
        if over != self.over_quota:
            self.over_quota = over
            for listener in self.quota_listeners:
                listener(over)

    def _watch_shares(self) -> None:
        near = self.space.is_share_near
        if near != self._is_share_near:
            self._is_share_near = near
            for listener in self.share_listeners:
                listener(near)

    def _report_hits(self) -> None:
        """Reads that were answered natively count before what comes next, not when eviction happens to ask."""
        for report in self.before_eviction:
            report()

    def _is_held(self, digest: bytes) -> bool:
        """Whether the DRAM copy may not go now: somebody has it open, or it is the only one of a durable object; or it
        would take the copy in the cold tier along, and there may be others to evict."""
        object_id = self.object_id_of(digest)
        if object_id is not None and self.journal.is_needed(object_id):
            return True
        if self._spares_halfway and self._is_halfway(digest):
            return True
        entry = self.table.get(digest)
        extent = None if entry is None else extent_of(entry)
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
        object_id = self.object_id_of(digest)
        if object_id is not None and self.journal.is_needed(object_id):
            return 0  # a durable one that is not on the device yet, also where it was named
        if self._is_below(digest):
            return self._demote(digest)
        self._forget_below(digest)
        return self._expel(digest)

    def _is_below(self, digest: bytes) -> bool:
        """Whether a lower tier has the object, so that DRAM may let it go."""
        object_id = self.object_id_of(digest)
        if object_id is None:
            return False
        return self.journal.holds(object_id) or (
            self._is_cold(digest) and not self.journal.is_writing(object_id)
        )

    def _is_cold(self, digest: bytes) -> bool:
        entry = self.table.get(digest)
        return entry is not None and bool(entry.tiers & TIER_COLD)

    def _is_far(self, digest: bytes) -> bool:
        """Whether only the cold tier has the object."""
        entry = self.table.get(digest)
        return entry is not None and entry.tiers == TIER_COLD

    def _is_halfway(self, digest: bytes) -> bool:
        """Whether the cold tier has the object, and NVMe is still writing it: out of DRAM now, it would have to leave
        all tiers. A write cannot be taken back without a deletion, and that ends whatever is written of an id later."""
        object_id = self.object_id_of(digest)
        return object_id is not None and self.journal.is_writing(object_id) and self._is_cold(digest)

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
        self._amend(digest, entry, slot=NO_SLOT, generation=0, tiers=entry.tiers & ~TIER_DRAM)
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

    def drop_replaced(self, row: NameRow) -> None:
        """The object of this row has lost its name to another, which the index is told by the caller."""
        self._discard(object_key(row.object_id), row.uid)

    def _discard(self, key: StoreKey, uid: int) -> int:
        """Take an object out of table, policy and tiers; the bytes that became free."""
        self._report_hits()
        entry = self.table.get(key.digest)
        self._discard_cold(key.digest, entry)
        self.table.remove(key.digest)
        if self.block_listeners and entry is not None:
            self._tell_placed(key.digest, entry.tiers, 0)
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

    def _discard_cold(self, digest: bytes, entry: Entry | None) -> None:
        """First of all, or a kill in between would leave a row that brings back what is removed."""
        if entry is not None and entry.tiers & TIER_COLD and (name := self.cold_name(digest)) is not None:
            self.cold.removed(name)

    def cold_name(self, digest: bytes) -> ColdName | None:
        """What the object of this key is called in the cold tier; None where there is no such object."""
        block = self._blocks.get(digest)
        if block is not None:
            key = StoreKey(Kind.BLOCK, digest)
            return ColdName(key, block.sequence, block.parent or bytes(16), block.bucket)
        if digest in self._name_of:
            return ColdName(StoreKey(Kind.OBJECT, digest), int.from_bytes(digest, "big"))
        return None

    def _tell(self, change: Change) -> None:
        self.directory_times.note(change)
        for listener in self.listeners:
            listener(change)
