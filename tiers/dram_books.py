"""The DRAM tier's books: which slot is in which state, and which uid pays for what.

Responsibility: plain bookkeeping, no I/O.

Invariants: every slot below `fresh` is in exactly one of free, bare, drafts, sealed_bytes, zombies.
`promised_bytes`, `sealed_total`, `held_total` and `charged` are the sums of what they summarise.
Concurrency: the service's thread only.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Held:
    """An unlinked file that somebody still has: our descriptor of it, and who pays."""

    fd: int
    physical_bytes: int
    uid: int


@dataclass(slots=True)
class Books:
    """The state of every slot."""

    max_slots: int
    fresh: int = 0
    """Slots from this one on were never used."""
    free: list[int] = field(default_factory=list)
    """Empty files; the one freed last is taken first, its inode is still in the CPU's caches."""
    bare: list[int] = field(default_factory=list)
    """Free slots without a file."""
    drafts: dict[int, int] = field(default_factory=dict)
    """Draft slot -> bytes promised to it and not seen written yet."""
    promised_bytes: int = 0
    sealed_bytes: dict[int, int] = field(default_factory=dict)
    """Sealed slot -> physical bytes."""
    sealed_total: int = 0
    held: list[Held] = field(default_factory=list)
    zombies: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Retired slots that could be neither emptied nor detached yet -> (uid, physical bytes)."""
    held_total: int = 0
    charged: dict[int, int] = field(default_factory=dict)
    """uid -> bytes of its held files and zombies; never 0."""
    unsummed: dict[int, int] = field(default_factory=dict)
    """Slot -> generation of what was sealed while the checksum queue was full."""

    @property
    def free_slots(self) -> int:
        return len(self.free) + len(self.bare) + self.max_slots - self.fresh

    def open_draft(self, slot: int, promised_bytes: int) -> None:
        self.drafts[slot] = promised_bytes
        self.promised_bytes += promised_bytes

    def close_draft(self, slot: int) -> None:
        self.promised_bytes -= self.drafts.pop(slot)

    def promise(self, slot: int, promised_bytes: int) -> None:
        """The draft is promised so much in all."""
        self.promised_bytes += promised_bytes - self.drafts[slot]
        self.drafts[slot] = promised_bytes

    def fulfil(self, slot: int) -> None:
        """The draft has written all that was promised to it: from now on its physical bytes speak."""
        self.promised_bytes -= self.drafts[slot]
        self.drafts[slot] = 0

    def add_sealed(self, slot: int, physical_bytes: int) -> None:
        self.sealed_bytes[slot] = physical_bytes
        self.sealed_total += physical_bytes

    def drop_sealed(self, slot: int) -> None:
        self.sealed_total -= self.sealed_bytes.pop(slot)

    def charge(self, uid: int, change_bytes: int) -> None:
        self.held_total += change_bytes
        left = self.charged.get(uid, 0) + change_bytes
        if left:
            self.charged[uid] = left
        else:
            self.charged.pop(uid, None)

    def add_held(self, held: Held) -> None:
        self.held.append(held)
        self.charge(held.uid, held.physical_bytes)

    def add_zombie(self, slot: int, uid: int, physical_bytes: int) -> None:
        self.zombies[slot] = (uid, physical_bytes)
        self.charge(uid, physical_bytes)

    def drop_zombie(self, slot: int) -> int:
        """The uid that paid for it."""
        uid, physical_bytes = self.zombies.pop(slot)
        self.charge(uid, -physical_bytes)
        return uid
