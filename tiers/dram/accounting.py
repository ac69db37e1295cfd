"""The accounting of the DRAM tier: which slot is in which state, and which uid pays for what.

Responsibility: plain accounting, no I/O.

Invariants: every slot below `fresh` is in exactly one of free, kept, bare, drafts, sealed, zombies. What there is of
every slot is in an array: a million numbers of Python are 60 MB.
`reserved_bytes`, `sealed_total`, `held_total` and `charged` are the sums of what they summarise.
Concurrency: the service's thread only.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, compress
from operator import not_

from kvfs import limits

PAGE_BYTES = 4096


def whole_pages(size_bytes: int) -> int:
    """Return what so many bytes take in pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(slots=True)
class Held:
    """Describes an unlinked file that somebody still has: our descriptor of it, and who pays."""

    fd: int
    physical_bytes: int
    uid: int


class SealedSlots:
    """Counts the physical bytes of sealed slots, in 4 bytes for every slot up to the highest."""

    def __init__(self) -> None:
        self._counts = array("I")
        """1 more than the blocks of 512 bytes; 0: not sealed."""

    def __contains__(self, slot: int) -> bool:
        return slot < len(self._counts) and self._counts[slot] != 0

    def __iter__(self) -> Iterator[int]:
        return (slot for slot, count in enumerate(self._counts) if count)

    def add(self, slot: int, physical_bytes: int) -> None:
        """Note a slot as sealed, with so many physical bytes, a multiple of 512."""
        if slot >= len(self._counts):
            self._counts.extend(bytes(slot + 1 - len(self._counts)))
        self._counts[slot] = physical_bytes // 512 + 1

    def pop(self, slot: int) -> int:
        """Stop counting a slot; return its physical bytes."""
        count, self._counts[slot] = self._counts[slot], 0
        return (count - 1) * 512

    def free_below(self, slots: int) -> Iterator[int]:
        """Yield the slots below `slots` that are not sealed."""
        known = compress(range(slots), map(not_, self._counts))
        return chain(known, range(len(self._counts), slots))

    def counts(self, slots: int) -> memoryview:
        """Return the counts of the first `slots` slots, to be set at once."""
        self._counts = array("I", bytes(4 * slots))
        return memoryview(self._counts)


class SlotReaders:
    """Remembers who opened each slot last, in 4 bytes for every slot up to the highest."""

    def __init__(self) -> None:
        self._uids = array("I")

    def note(self, slot: int, uid: int) -> None:
        """Remember `uid` as the last one who opened the slot."""
        if slot >= len(self._uids):
            self._uids.extend([_NOBODY] * (slot + 1 - len(self._uids)))
        self._uids[slot] = uid

    def pop(self, slot: int, default: int) -> int:
        """Return who opened a slot last, once; `default` where nobody has."""
        if slot >= len(self._uids) or self._uids[slot] == _NOBODY:
            return default
        uid, self._uids[slot] = self._uids[slot], _NOBODY
        return uid


_NOBODY = (1 << 32) - 1
"""No uid: the kernel's own for none."""


@dataclass(slots=True)
class KeptSlots:
    """Accounts for free slots that keep the bytes and pages of an earlier object, by size, and for drafts made of them.

    Only of sizes that writers have asked for, MAX_KEPT_SIZES at most.
    """

    most_bytes: int = 0
    """What slots and drafts may keep in all."""
    total: int = 0
    """Physical bytes of the slots."""
    drafts: dict[int, int] = field(default_factory=dict)
    """Draft slot -> bytes that it had when it was taken."""
    drafts_total: int = 0
    """Physical bytes of these."""
    by_size: dict[int, list[int]] = field(default_factory=dict)
    """Size -> its slots, which may be none; the size that was asked for last is the last one."""

    @property
    def count(self) -> int:
        """Return how many free slots keep their pages."""
        return sum(map(len, self.by_size.values()))

    def ask(self, size_bytes: int) -> int | None:
        """Take a slot of this size for a draft, if there is one; remember that the size is asked for."""
        self.by_size[size_bytes] = slots = self.by_size.pop(size_bytes, [])
        if not slots:
            return None
        self.total -= whole_pages(size_bytes)
        slot = slots.pop()
        self.add_draft(slot, size_bytes)
        return slot

    def pop_size(self) -> list[int]:
        """Stop keeping the size that was asked for longest ago, if there are too many; return its slots."""
        if len(self.by_size) <= limits.MAX_KEPT_SIZES:
            return []
        size_bytes = next(iter(self.by_size))
        slots = self.by_size.pop(size_bytes)
        self.total -= whole_pages(size_bytes) * len(slots)
        return slots

    def size_of(self, physical_bytes: int) -> int:
        """Return the size that was asked for and takes so many bytes in pages, 0 for none."""
        sizes = (size for size in self.by_size if whole_pages(size) == physical_bytes)
        return next(sizes, 0) if physical_bytes >= limits.MIN_KEPT_SLOT_BYTES else 0

    def has_room(self, size_bytes: int) -> bool:
        """Return whether another slot of this size may keep its pages."""
        return self.total + self.drafts_total + whole_pages(size_bytes) <= self.most_bytes

    def add(self, slot: int, size_bytes: int) -> None:
        """Take in a free slot that keeps the pages of an object of this size."""
        self.by_size[size_bytes].append(slot)
        self.total += whole_pages(size_bytes)

    def pop(self, other_than: Iterable[int] = ()) -> int | None:
        """Stop counting a slot, of the size that was asked for longest ago; None where there is none."""
        for size_bytes, slots in self.by_size.items():
            if slots and size_bytes not in other_than:
                self.total -= whole_pages(size_bytes)
                return slots.pop()
        return None

    def add_draft(self, slot: int, size_bytes: int) -> None:
        """Note a draft made of a slot that kept its pages."""
        self.drafts[slot] = size_bytes
        self.drafts_total += whole_pages(size_bytes)

    def drop_draft(self, slot: int) -> None:
        """Stop counting such a draft; of any other slot nothing changes."""
        self.drafts_total -= whole_pages(self.drafts.pop(slot, 0))


@dataclass(slots=True)
class Accounting:
    """Accounts for every slot."""

    max_slots: int
    kept: KeptSlots = field(default_factory=KeptSlots)
    fresh: int = 0
    """Slots from this one on were never used."""
    free: array[int] = field(default_factory=lambda: array("I"))
    """Empty files; the one freed last is taken first, its inode is still in the CPU's caches."""
    bare: array[int] = field(default_factory=lambda: array("I"))
    """Free slots without a file."""
    drafts: dict[int, int] = field(default_factory=dict)
    """Draft slot -> bytes reserved for it and not seen written yet."""
    reserved_bytes: int = 0
    sealed: SealedSlots = field(default_factory=SealedSlots)
    sealed_total: int = 0
    held: list[Held] = field(default_factory=list)
    zombies: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Retired slots that could be neither emptied nor detached yet -> (uid, physical bytes)."""
    held_total: int = 0
    charged: dict[int, int] = field(default_factory=dict)
    """uid -> bytes of its held files and zombies; never 0."""

    @property
    def free_slots(self) -> int:
        """Return how many slots a draft could take, those without a file included."""
        return len(self.free) + self.kept.count + len(self.bare) + self.max_slots - self.fresh

    def open_draft(self, slot: int, reserved_bytes: int) -> None:
        """Note a draft in this slot, with the bytes that are reserved for it."""
        self.drafts[slot] = reserved_bytes
        self.reserved_bytes += reserved_bytes

    def close_draft(self, slot: int) -> None:
        """Stop counting a draft, and what is reserved for it."""
        self.reserved_bytes -= self.drafts.pop(slot)
        self.kept.drop_draft(slot)

    def reserve(self, slot: int, reserved_bytes: int) -> None:
        """Reserve so much in all for a draft."""
        self.reserved_bytes += reserved_bytes - self.drafts[slot]
        self.drafts[slot] = reserved_bytes

    def end_reservation(self, slot: int) -> None:
        """Count a draft by its physical bytes from now on: it has written all that was reserved for it."""
        self.reserved_bytes -= self.drafts[slot]
        self.drafts[slot] = 0

    def add_sealed(self, slot: int, physical_bytes: int) -> None:
        """Count a sealed slot and its physical bytes."""
        self.sealed.add(slot, physical_bytes)
        self.sealed_total += physical_bytes

    def drop_sealed(self, slot: int) -> int:
        """Stop counting a sealed slot; return its physical bytes."""
        physical_bytes = self.sealed.pop(slot)
        self.sealed_total -= physical_bytes
        return physical_bytes

    def charge(self, uid: int, change_bytes: int) -> None:
        """Change what a uid pays for held bytes; `change_bytes` may be negative."""
        self.held_total += change_bytes
        left = self.charged.get(uid, 0) + change_bytes
        if left:
            self.charged[uid] = left
        else:
            self.charged.pop(uid, None)

    def add_held(self, held: Held) -> None:
        """Note an unlinked slot that somebody still holds, and charge its bytes to who does."""
        self.held.append(held)
        self.charge(held.uid, held.physical_bytes)

    def add_zombie(self, slot: int, uid: int, physical_bytes: int) -> None:
        """Note a retired slot that can be neither emptied nor detached yet, and charge its bytes to its holder."""
        self.zombies[slot] = (uid, physical_bytes)
        self.charge(uid, physical_bytes)

    def drop_zombie(self, slot: int) -> int:
        """Stop counting a zombie; return the uid that paid for it."""
        uid, physical_bytes = self.zombies.pop(slot)
        self.charge(uid, -physical_bytes)
        return uid
