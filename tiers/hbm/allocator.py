"""Which slot has which bytes of which segment.

Responsibility: plain state, no I/O: segments are carved into slots of one size each, slots are taken and freed.

Invariants:
- No two slots that are taken overlap. A slot's number has its place from `take` to `free`; then number and place go
  their own ways.
- A segment without a taken slot is blank: it may be carved for another size, or removed. A closed one gives no slots.
Concurrency: the service's thread only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvfs.errors import NoSpace
from tiers.hbm.size_classes import slot_bytes_for


@dataclass(frozen=True, slots=True)
class Place:
    """Says where a slot's bytes are."""

    segment: int
    offset_bytes: int
    slot_bytes: int


@dataclass(slots=True)
class _Carved:
    """Describes one segment."""

    slot_bytes: int = 0
    fresh_bytes: int = 0
    """Offset from which on no slot was taken since the segment was carved."""
    free: list[int] = field(default_factory=list)
    """Offsets below `fresh_bytes` that are free."""
    taken: set[int] = field(default_factory=set)
    """The numbers of its slots."""
    closed: bool = False


class SlotAllocator:
    """Gives slots of any size up to a segment's."""

    def __init__(self, segment_bytes: int, max_slots: int) -> None:
        self.segment_bytes = segment_bytes
        self.max_slots = max_slots
        self.taken_bytes = 0
        self._segments: dict[int, _Carved] = {}
        self._blank: dict[int, None] = {}
        self._room: dict[int, dict[int, None]] = {}
        """Size of slots -> the segments that have a free one."""
        self._places: dict[int, Place] = {}
        self._free_numbers: list[int] = []
        self._fresh_number = 0

    def __len__(self) -> int:
        """Count the slots that are taken."""
        return len(self._places)

    def add(self, segment: int) -> None:
        """Add a blank segment."""
        self._segments[segment] = _Carved()
        self._blank[segment] = None

    def take(self, size_bytes: int) -> int | None:
        """Take a slot, None where no segment has one of that size. Raises NoSpace when all numbers are taken."""
        if len(self._places) >= self.max_slots:
            raise NoSpace(f"HBM tier: all {self.max_slots} slots are in use")
        slot_bytes = slot_bytes_for(size_bytes)
        segments = self._room.setdefault(slot_bytes, {})
        if not segments:
            if not self._blank:
                return None
            number, _ = self._blank.popitem()
            self._segments[number] = _Carved(slot_bytes)
            segments[number] = None
        return self._take_in(next(iter(segments)))

    def _take_in(self, number: int) -> int:
        segment = self._segments[number]
        if segment.free:
            offset_bytes = segment.free.pop()
        else:
            offset_bytes = segment.fresh_bytes
            segment.fresh_bytes += segment.slot_bytes
        if not self._has_room(segment):
            del self._room[segment.slot_bytes][number]
        return self._number(Place(number, offset_bytes, segment.slot_bytes))

    def _number(self, place: Place) -> int:
        if self._free_numbers:
            slot = self._free_numbers.pop()
        else:
            slot = self._fresh_number
            self._fresh_number += 1
        self._places[slot] = place
        self._segments[place.segment].taken.add(slot)
        self.taken_bytes += place.slot_bytes
        return slot

    def _has_room(self, segment: _Carved) -> bool:
        return bool(segment.free) or segment.fresh_bytes + segment.slot_bytes <= self.segment_bytes

    def place(self, slot: int) -> Place:
        """Return where a taken slot is."""
        return self._places[slot]

    def free(self, slot: int) -> Place:
        """Free a taken slot; return where it was."""
        place = self._places.pop(slot)
        self._free_numbers.append(slot)
        self.taken_bytes -= place.slot_bytes
        segment = self._segments[place.segment]
        segment.taken.discard(slot)
        segment.free.append(place.offset_bytes)
        if not segment.closed:
            self._offer(place.segment)
        return place

    def _offer(self, number: int) -> None:
        """Let slots be taken in an open segment, as far as it has room."""
        segment = self._segments[number]
        if not segment.taken:
            self._room.get(segment.slot_bytes, {}).pop(number, None)
            self._segments[number] = _Carved()
            self._blank[number] = None
        elif self._has_room(segment):
            self._room[segment.slot_bytes][number] = None

    def close(self, number: int) -> None:
        """Have no more slots taken in a segment."""
        segment = self._segments[number]
        segment.closed = True
        self._blank.pop(number, None)
        self._room.get(segment.slot_bytes, {}).pop(number, None)

    def reopen(self, number: int) -> None:
        """Have slots taken in a segment again."""
        self._segments[number].closed = False
        self._offer(number)

    def slots_in(self, number: int) -> Iterator[int]:
        """Yield the slots that are taken in a segment, in order."""
        return iter(sorted(self._segments[number].taken))

    def taken_in(self, number: int) -> int:
        """Count the slots that are taken in a segment."""
        return len(self._segments[number].taken)

    def remove(self, number: int) -> None:
        """Remove a closed segment without taken slots."""
        assert self._segments[number].closed
        assert not self._segments[number].taken
        del self._segments[number]

    def adopt(self, number: int) -> None:
        """Add a segment of an earlier service: closed for ever, as nobody knows who still uses what is free in it."""
        self._segments[number] = _Carved(closed=True)

    def adopt_slot(self, place: Place) -> int | None:
        """Number a slot of an adopted segment, None when all numbers are taken."""
        return None if len(self._places) >= self.max_slots else self._number(place)
