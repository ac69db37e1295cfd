"""Free slots filled with zeros ahead of the writers who ask for such ones.

Responsibility: where pages are slow to come (memory that the machine's host gives as it is touched), have some ready
before a block needs them. What has become free keeps its pages anyhow (`tiers.dram.recycler`); a tier that still grows
has nothing of that.

Invariants: within half of what free slots may keep, since the other half is for what becomes free; and while as much
as they may keep is free beside it. A slot being filled counts as a draft made of a kept one. Nothing is filled where
pages come fast.

Concurrency: the service's thread, in one task; bytes are written by a worker thread without the GIL.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import trio

from kvfs import limits
from kvfs._native.shared import slots as native
from kvfs.errors import KvfsError, NoSpace
from tiers.dram.accounting import Accounting
from tiers.dram.recycler import SlotRecycler
from tiers.dram.slot_files import SlotFiles

_ASKS_PER_PROBE = 256
"""Where pages came fast, they are looked at again after so many drafts: memory may have gone meanwhile."""


class PageFiller:
    """Fills slots of the size that was asked for last."""

    def __init__(
        self,
        files: SlotFiles,
        accounting: Accounting,
        recycler: SlotRecycler,
        free_bytes: Callable[[], int],
    ) -> None:
        """Take what the tier's slots are taken from; `free_bytes` returns its room."""
        self._files, self._accounting, self._recycler = files, accounting, recycler
        self._free_bytes = free_bytes
        self._asked = trio.Event()
        self._size_bytes = 0
        self._asks_left = 0
        self.filled_bytes = 0

    def ask(self, size_bytes: int) -> None:
        """Note that a writer asked for a slot of this size and found none."""
        self._asks_left -= 1
        if self._asks_left < 0 or size_bytes != self._size_bytes:
            self._size_bytes = size_bytes
            self._asked.set()

    async def run(self) -> None:
        """Fill slots when asked, until cancelled."""
        while True:
            await self._asked.wait()
            self._asked = trio.Event()
            if not await self._fill_some(1):
                continue
            while await self._fill_some(max(1, limits.FILL_AT_ONCE_BYTES // self._size_bytes)):
                pass

    async def _fill_some(self, count: int) -> bool:
        """Fill so many slots at most; return whether more are worth it."""
        size_bytes = self._size_bytes
        slots = self._take(count, size_bytes)
        if not slots:
            return False
        began = time.perf_counter()
        filled = True
        try:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(native.fill, self._files.fd, slots, size_bytes)
        except (KvfsError, OSError):  # others took the room
            filled = False
        self._finish(slots, size_bytes if filled else 0)
        rate = len(slots) * size_bytes / max(time.perf_counter() - began, 1e-9)
        if filled and rate < limits.FILL_WORTH_BYTES_S:
            return True
        self._asks_left = _ASKS_PER_PROBE
        return False

    def _take(self, count: int, size_bytes: int) -> list[int]:
        kept, slots = self._accounting.kept, list[int]()
        while len(slots) < count and self._is_wanted(size_bytes):
            try:
                slot = self._recycler.take()
            except NoSpace:
                break
            kept.add_draft(slot, size_bytes)
            slots.append(slot)
        return slots

    def _is_wanted(self, size_bytes: int) -> bool:
        kept = self._accounting.kept
        if len(kept.by_size.get(size_bytes, ())) >= limits.FILLED_SLOTS:
            return False
        has_room = kept.has_room(size_bytes + kept.most_bytes // 2)
        return has_room and self._free_bytes() - kept.drafts_total >= kept.most_bytes

    def _finish(self, slots: list[int], size_bytes: int) -> None:
        """Make filled slots free ones that keep their pages; empty them where that failed, or nobody asks any more."""
        kept = self._accounting.kept
        for slot in slots:
            kept.drop_draft(slot)
            if size_bytes in kept.by_size:
                kept.add(slot, size_bytes)
                self.filled_bytes += size_bytes
            else:
                self._recycler.recycle(slot, 0)
