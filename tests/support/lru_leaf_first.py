"""The reference of the eviction orders, in Python, over keys of any kind: least recently used first, leaves first.

Invariants:
- `_order` holds units by last use. A unit found there that cannot go is set aside (PARKED) until its last
  child goes or its last pin does; then it is older than all of `_order`, and waits in the heap `_ready`.
- `_ready` is empty whenever a unit is taken off `_order`, so it never holds a unit twice.
- A unit that `victims` gave out is CLAIMED: it counts as gone until it is touched or the iteration ends.
- `children` of a key counts the cached, unclaimed keys that name it as parent, also while it is absent
  itself (`_orphans`): a parent may come after its child.

Costs: insert, touch, remove, pin and unpin are O(1), victims O(1) amortised for each victim, plus O(log r)
where r parents wait in `_ready` (those that became leaves since they were passed over, so they go next). Only
a key that joins two chains walks up its ancestors once, lest a false parent closes a cycle that never leaves.

"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from enum import Enum, auto
from heapq import heappop, heappush
from typing import Generic, TypeVar

from kvfs.errors import InvalidRequest, NotFound

K = TypeVar("K", bound=Hashable)
COOLED_AGE = 1 << 31


class _Place(Enum):
    ORDER = auto()
    PARKED = auto()
    READY = auto()
    CLAIMED = auto()
    GONE = auto()


class _Unit(Generic[K]):
    __slots__ = ("children", "pins", "place", "stamp")

    def __init__(self) -> None:
        self.stamp = 0
        self.children = 0
        self.pins = 0
        self.place = _Place.GONE

    def members(self) -> Iterable[_Entry[K]]:
        raise NotImplementedError


class _Group(_Unit[K]):
    """Keys that leave together. Its `children` and `pins` are the sums over its members."""

    __slots__ = ("entries", "name")

    def __init__(self, name: K) -> None:
        super().__init__()
        self.name = name
        self.entries: dict[K, _Entry[K]] = {}

    def members(self) -> Iterable[_Entry[K]]:
        return self.entries.values()


class _Entry(_Unit[K]):
    """A key; without a group it is a unit by itself, which saves an object for each block."""

    __slots__ = ("group", "key", "parent", "pinned", "size_bytes")

    def __init__(self, key: K, size_bytes: int, parent: K | None, group: _Group[K] | None) -> None:
        super().__init__()
        self.key = key
        self.size_bytes = size_bytes
        self.parent = parent
        self.group = group
        self.pinned = False

    @property
    def unit(self) -> _Unit[K]:
        return self if self.group is None else self.group

    def members(self) -> Iterable[_Entry[K]]:
        return (self,)


class LruLeafFirst(Generic[K]):
    """The reference policy: see the module's header. It orders by calls, so it has no use for `now`."""

    def __init__(self) -> None:
        self._entries: dict[K, _Entry[K]] = {}
        self._groups: dict[K, _Group[K]] = {}
        self._orphans: dict[K, int] = {}
        self._order: OrderedDict[_Unit[K], None] = OrderedDict()
        self._ready: list[tuple[int, _Unit[K]]] = []
        self._claims = 0
        self._stamp = 0
        self._total_bytes = 0

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def total_bytes(self) -> int:
        return self._total_bytes

    def insert(
        self,
        key: K,
        *,
        size_bytes: int,
        parent: K | None,
        now: float,
        pinned: bool = False,
        group: K | None = None,
    ) -> None:
        if size_bytes < 0:
            raise InvalidRequest(f"size of {key!r} is {size_bytes} bytes")
        if parent is not None and group is not None:
            raise InvalidRequest(f"{key!r} has both a parent and a group; blocks have one, files the other")
        if key in self._entries:
            self.remove(key)
        if parent is not None and self._closes_cycle(key, parent):
            parent = None
        owner = None if group is None else self._groups.setdefault(group, _Group(group))
        entry = _Entry(key, size_bytes, parent, owner)
        entry.children = self._orphans.pop(key, 0)
        if owner is not None:
            owner.entries[key] = entry
            owner.children += entry.children
        self._entries[key] = entry
        self._total_bytes += size_bytes
        if parent is not None:
            self._gain_child(parent)
        self._use(entry.unit)
        if pinned:
            self.pin(key)

    def touch(self, key: K, now: float) -> None:
        self._use(self._entry(key).unit)

    def cool(self, key: K) -> None:
        unit = self._entry(key).unit
        self._stamp += 1
        unit.stamp = self._stamp - COOLED_AGE
        if unit.place is _Place.CLAIMED:
            return
        self._order.pop(unit, None)
        unit.place = _Place.PARKED
        self._wake(unit)

    def remove(self, key: K) -> None:
        entry = self._entry(key)
        unit, group = entry.unit, entry.group
        del self._entries[key]
        self._total_bytes -= entry.size_bytes
        if entry.parent is not None and unit.place is not _Place.CLAIMED:
            self._lose_child(entry.parent)
        if entry.children:
            self._orphans[key] = entry.children
        if group is None:
            self._drop(unit)
            return
        del group.entries[key]
        group.children -= entry.children
        group.pins -= entry.pinned
        if group.entries:
            self._wake(group)
        else:
            del self._groups[group.name]
            self._drop(group)

    def pin(self, key: K) -> None:
        entry = self._entry(key)
        if not entry.pinned:
            entry.pinned = True
            entry.unit.pins += 1

    def unpin(self, key: K) -> None:
        entry = self._entry(key)
        if entry.pinned:
            entry.pinned = False
            entry.unit.pins -= 1
            self._wake(entry.unit)

    def victims(self, bytes_needed: int, now: float) -> Iterator[list[K]]:
        claimed: list[_Unit[K]] = []
        try:
            while bytes_needed > 0 and (unit := self._claim()) is not None:
                claimed.append(unit)
                bytes_needed -= sum(entry.size_bytes for entry in unit.members())
                yield [entry.key for entry in unit.members()]
        finally:
            for unit in claimed:
                if unit.place is _Place.CLAIMED:
                    self._unclaim(unit)
                    self._make_ready(unit)

    # --- the order ---------------------------------------------------------------------------------------

    def _use(self, unit: _Unit[K]) -> None:
        """Put a unit behind all others."""
        if unit.place is _Place.CLAIMED:
            self._unclaim(unit)
        self._stamp += 1
        unit.stamp = self._stamp
        unit.place = _Place.ORDER
        self._order[unit] = None
        self._order.move_to_end(unit)

    def _oldest(self) -> _Unit[K] | None:
        """Take the unit of the oldest use off the order; what waits in `_ready` is older than the rest."""
        while self._ready:
            stamp, unit = heappop(self._ready)
            if (
                unit.place is _Place.READY and unit.stamp == stamp
            ):  # else it was touched, cooled or removed since
                return unit
        return self._order.popitem(last=False)[0] if self._order else None

    def _claim(self) -> _Unit[K] | None:
        """The next victim, counted as gone."""
        while (unit := self._oldest()) is not None:
            if unit.children or unit.pins:
                unit.place = _Place.PARKED
                continue
            unit.place = _Place.CLAIMED
            self._claims += 1
            for entry in unit.members():
                if entry.parent is not None:
                    self._lose_child(entry.parent)
            return unit
        return None

    def _unclaim(self, unit: _Unit[K]) -> None:
        self._claims -= 1
        for entry in unit.members():
            if entry.parent is not None:
                self._gain_child(entry.parent)

    def _make_ready(self, unit: _Unit[K]) -> None:
        unit.place = _Place.READY
        heappush(self._ready, (unit.stamp, unit))

    def _wake(self, unit: _Unit[K]) -> None:
        """Bring a unit back that was set aside, once nothing keeps it."""
        if unit.place is _Place.PARKED and not unit.children and not unit.pins:
            self._make_ready(unit)

    def _drop(self, unit: _Unit[K]) -> None:
        self._claims -= unit.place is _Place.CLAIMED
        unit.place = _Place.GONE
        self._order.pop(unit, None)

    # --- parents -----------------------------------------------------------------------------------------

    def _gain_child(self, parent: K) -> None:
        entry = self._entries.get(parent)
        if entry is None:
            self._orphans[parent] = self._orphans.get(parent, 0) + 1
            return
        entry.children += 1
        if entry.group is not None:
            entry.group.children += 1

    def _lose_child(self, parent: K) -> None:
        entry = self._entries.get(parent)
        if entry is None:
            self._orphans[parent] -= 1
            if not self._orphans[parent]:
                del self._orphans[parent]
            return
        entry.children -= 1
        if entry.group is not None:
            entry.group.children -= 1
        self._wake(entry.unit)

    def _closes_cycle(self, key: K, parent: K) -> bool:
        """Whether `key`, not here yet, is an ancestor of `parent`: hashes form no cycle, a writer may lie."""
        if parent == key:
            return True
        if key not in self._orphans and not self._claims:  # `_orphans` leaves out what is claimed
            return False
        entry = self._entries.get(parent)
        while entry is not None and entry.parent is not None:
            if entry.parent == key:
                return True
            entry = self._entries.get(entry.parent)
        return False

    def _entry(self, key: K) -> _Entry[K]:
        try:
            return self._entries[key]
        except KeyError:
            raise NotFound(f"the eviction policy does not know {key!r}") from None
