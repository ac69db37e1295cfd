"""Free slots: taken for drafts, and made of those that are no draft and not sealed any more.

Responsibility: a retired slot becomes free, its file held, or itself a zombie; and what holders have closed since.

Invariants: a slot is free only once F_WRLCK on it was granted (slots_core.c). Then it is empty, always by truncation;
or it keeps its bytes and pages, for a writer who asks for such a one, where nobody has read, mapped or sent any of it
since it was last free; or, if it lay on other NUMA nodes than new ones, it has no file. While somebody holds it, its
name goes and its bytes stay charged: one descriptor each, at most MAX_HELD_SLOTS; above that it waits as a zombie, name
and all.
Concurrency: the service's thread only.
"""

from __future__ import annotations

import os
from contextlib import suppress

from kvfs import limits
from kvfs._native.shared import slots as native
from kvfs.errors import NoSpace, NotFound, Unsupported
from tiers.dram.accounting import Accounting, Held
from tiers.dram.checksums import ChecksumQueue
from tiers.dram.slot_files import SlotFiles


class SlotRecycler:
    """Takes and frees the slots of one tier."""

    def __init__(
        self, files: SlotFiles, accounting: Accounting, checksums: ChecksumQueue, moved: int
    ) -> None:
        """`moved`: below this the files of slots lie on other NUMA nodes than those that are made now."""
        self._files = files
        self._accounting = accounting
        self._checksums = checksums
        self._is_elsewhere = bytearray(b"\1") * moved

    def take(self, kept_bytes: int = 0) -> int:
        """Take a free slot: one that keeps `kept_bytes`, if there is such a one, else with an empty file. Raises
        NoSpace."""
        accounting = self._accounting
        kept = accounting.kept.ask(kept_bytes) if kept_bytes else None
        for slot in accounting.kept.pop_size():
            self.recycle(slot, 0)
        if kept is not None:
            return kept
        if not (accounting.free or accounting.bare or accounting.fresh < accounting.max_slots):
            self.drop_kept(1)
        if accounting.free:
            return accounting.free.pop()
        if accounting.bare:
            slot = accounting.bare[-1]
        elif accounting.fresh < accounting.max_slots:
            slot = accounting.fresh
        else:
            raise NoSpace(f"DRAM tier {self._files.root}: all {accounting.max_slots} slots are in use")
        self._files.create(slot)
        if slot < len(self._is_elsewhere):
            self._is_elsewhere[slot] = 0
        if accounting.bare:
            accounting.bare.pop()
        else:
            accounting.fresh += 1
        return slot

    def drop_kept(self, wanted_bytes: int) -> None:
        """Empty free slots that keep pages until so many bytes have become free, or none keeps any."""
        kept = self._accounting.kept
        target = kept.total - wanted_bytes
        while kept.total > target and (slot := kept.pop()) is not None:
            self.recycle(slot, 0)

    def _size_to_keep(self, physical_bytes: int) -> int:
        """Return the size of a slot of so many physical bytes if it may keep them, else 0. Slots of sizes that were
        asked for longer ago make room."""
        kept = self._accounting.kept
        size_bytes = kept.size_of(physical_bytes)
        while size_bytes and not kept.has_room(size_bytes):
            if (other := kept.pop(other_than=(size_bytes,))) is None:
                return 0
            self.recycle(other, 0)
        return size_bytes

    def recycle(self, slot: int, uid: int, physical_bytes: int = 0) -> int:
        """Free a retired slot; return the bytes that stay held, charged to `uid`. One of `physical_bytes` may keep
        them, if that is as many as writers have asked for."""
        accounting = self._accounting
        is_elsewhere = slot < len(self._is_elsewhere) and self._is_elsewhere[slot]
        size_to_keep = 0 if is_elsewhere else self._size_to_keep(physical_bytes)
        if not self._checksums.thread.pause(slot):
            return self._make_zombie(slot, uid)
        try:
            kept_bytes = self._free(slot, size_to_keep)
        except NotFound:  # somebody has unlinked the file
            accounting.bare.append(slot)
            return 0
        finally:
            self._checksums.thread.resume()
        if kept_bytes:
            accounting.kept.add(slot, kept_bytes)
            return 0
        if (
            kept_bytes is not None and is_elsewhere
        ):  # a file has the nodes that it was made for, whatever is written
            with suppress(FileNotFoundError):
                self._files.unlink(slot)
            accounting.bare.append(slot)
            return 0
        if kept_bytes is not None:
            accounting.free.append(slot)
            return 0
        if len(accounting.held) >= limits.MAX_HELD_SLOTS:
            return self._make_zombie(slot, uid)
        try:
            fd, physical_bytes = native.detach(self._files.fd, slot)
        except OSError:  # out of descriptors
            return self._make_zombie(slot, uid)
        accounting.add_held(Held(fd, physical_bytes, uid))
        accounting.bare.append(slot)
        return physical_bytes

    def _free(self, slot: int, size_to_keep: int) -> int | None:
        """Free the slot; return how many bytes it keeps, None where somebody holds it."""
        try:
            return native.recycle(self._files.fd, slot, size_to_keep)
        except (
            Unsupported,
            OSError,
        ):  # no leases any more, or no descriptors: then everybody may be a reader
            return None

    def _make_zombie(self, slot: int, uid: int) -> int:
        physical_bytes = self._files.physical_bytes(slot)
        self._accounting.add_zombie(slot, uid, physical_bytes)
        return physical_bytes

    def sweep(self) -> int:
        """Free what holders have closed since; return the bytes that became free."""
        accounting = self._accounting
        freed = self._sweep_held()
        for slot, (_, physical_bytes) in list(accounting.zombies.items()):
            freed += physical_bytes - self.recycle(slot, accounting.drop_zombie(slot))
        return max(0, freed)

    def _sweep_held(self) -> int:
        accounting = self._accounting
        freed = 0
        still: list[Held] = []
        for held in accounting.held:
            if native.fd_is_held(held.fd):
                now_bytes = native.physical_bytes(held.fd)  # an aborted draft's writer may still write
                accounting.charge(held.uid, now_bytes - held.physical_bytes)
                held.physical_bytes = now_bytes
                still.append(held)
            else:
                os.close(held.fd)
                accounting.charge(held.uid, -held.physical_bytes)
                freed += held.physical_bytes
        accounting.held = still
        return freed
