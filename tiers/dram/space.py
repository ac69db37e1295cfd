"""The capacity of the DRAM tier: how many physical bytes are used, and what drafts may still write.

Responsibility: refuse what does not fit. On a tmpfs the kernel knows what is used (statvfs) and enforces it (`size=`);
in a plain directory the tier adds up st_blocks.

Invariants: used and reserved bytes together never pass the capacity, as far as drafts keep to what they reserved.
Concurrency: the service's thread only.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvfs.errors import NoSpace
from tiers.dram import tmpfs
from tiers.dram.accounting import Accounting
from tiers.dram.layout import fit
from tiers.dram.slot_files import SlotFiles

_RECOUNT_SHARE = 16
"""In a directory, drafts are measured again every (drafts / this) reservations: 16 stats each."""


class DramSpace:
    """Measures one root, and refuses what does not fit."""

    def __init__(
        self, root: Path, backing: str, capacity_bytes: int, files: SlotFiles, accounting: Accounting
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._root = root
        self._is_directory = backing == "directory"
        self._files = files
        self._rootfd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._accounting = accounting
        self._draft_bytes = 0
        self._recount_in = 0
        self._is_wide = not self._is_directory and tmpfs.size_bytes(root) > capacity_bytes
        """Whether holders kept the start from giving the tmpfs its capacity."""

    def used_bytes(self, *, exact: bool = False) -> int:
        """Return what is used. In a directory, drafts count as they were when last measured, unless `exact`."""
        if not self._is_directory:
            fs = os.fstatvfs(self._rootfd)
            return (fs.f_blocks - fs.f_bfree) * fs.f_bsize
        if exact:
            self._measure_drafts()
        return self._accounting.sealed_total + self._accounting.held_total + self._draft_bytes

    def _measure_drafts(self) -> int:
        """Look at every draft; return the bytes reserved for drafts and not written yet."""
        accounting = self._accounting
        outstanding = self._draft_bytes = 0
        for slot, reserved in accounting.drafts.items():
            if reserved or self._is_directory:
                physical = self._files.physical_bytes(slot)
                self._draft_bytes += physical
                outstanding += max(0, reserved - physical)
                if reserved and physical >= reserved:
                    accounting.end_reservation(slot)
        self._recount_in = len(accounting.drafts) // _RECOUNT_SHARE
        return outstanding

    def check(self, size_bytes: int) -> None:
        """Raise NoSpace where so many more bytes do not fit."""
        reserved = self._accounting.reserved_bytes
        if self._is_directory:
            self._recount_in -= 1
        if self._recount_in >= 0 and self.used_bytes() + reserved + size_bytes <= self.capacity_bytes:
            return
        reserved = self._measure_drafts()
        used = self.used_bytes()
        if used + reserved + size_bytes > self.capacity_bytes:
            raise NoSpace(
                f"DRAM tier {self._root}: {used} bytes used and {reserved} reserved of {self.capacity_bytes}, "
                f"no room for {size_bytes}"
            )

    def check_sealed(self, physical_bytes: int) -> None:
        """Raise NoSpace for a draft that went over the capacity of a directory."""
        accounting = self._accounting
        over = accounting.sealed_total + accounting.held_total + physical_bytes - self.capacity_bytes
        if self._is_directory and over > 0:
            raise NoSpace(
                f"DRAM tier {self._root}: the draft goes {over} bytes over its {self.capacity_bytes}"
            )

    def shrink(self) -> None:
        """Resize a tmpfs to its capacity once holders no longer keep it larger."""
        if self._is_wide and self.used_bytes() <= self.capacity_bytes:
            self._is_wide = not fit(self._root, self.capacity_bytes, self._accounting.max_slots)

    def close(self) -> None:
        """Close the root."""
        os.close(self._rootfd)
