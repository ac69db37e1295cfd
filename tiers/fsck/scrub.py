"""The scrub: stored bytes are read and verified before a reader needs them.

Responsibility: go through every slot in DRAM that has its checksum and every extent on NVMe, at a bounded rate, again
and again; have what is damaged dropped, and report its progress.

Invariants:
- One extent at a time, and none is begun before the bytes of those before have had their time at the rate: the
  device and the processor are free in between.
- The owner of the bytes deals with damage, as when a reader meets it: the NVMe tier drops the object and writes it
  again from DRAM (`ExtentReader.verify_extent`); a slot is dropped, and the object read from NVMe (`Store.drop_slot`).
- DRAM is read first: nothing else verifies what is read there, and a large NVMe tier takes hours.
- What was sealed or moved since a pass began may wait for the next one; what was removed meanwhile is no damage.

Concurrency: one task of the service's nursery, on trio's clock; slots are hashed by a worker thread. While a slot is
read it counts as held.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import trio

from kvfs import limits
from kvfs.errors import Corrupt, DeviceAway, DeviceFailed, Superseded
from tiers.nvme.stored import Stored
from tiers.nvme.write_behind import NvmeJournal
from tiers.store.store import Store

log = logging.getLogger("kvfs.scrub")


class Scrub:
    """Verifies one store, while `run` runs. A rate of 0 bytes per second does nothing."""

    def __init__(self, store: Store, rate_bytes_s: int) -> None:
        self.rate_bytes_s = rate_bytes_s
        self._store = store
        self._next = 0.0
        """When the next extent may be read, on trio's clock."""
        self._counts = {
            "passes": 0,
            "verified_bytes": 0,
            "damaged_extents": 0,
            "damaged_slots": 0,
            "unreadable": 0,
        }
        self._done_bytes = 0
        self._total_bytes = 0
        self._last_finished_s: float | None = None
        self._last_pass_s: float | None = None

    def status(self) -> dict[str, Any]:
        """Describe the scrub as `kvfs status` shows it; times are of the realtime clock."""
        done, total = self._done_bytes, self._total_bytes
        return {
            "rate_bytes_s": self.rate_bytes_s,
            "progress": round(min(done / total, 1.0), 4) if total else 0.0,
            "last_finished_s": self._last_finished_s,
            "last_pass_s": self._last_pass_s,
            **self._counts,
        }

    async def run(self) -> None:
        """Scrub until cancelled."""
        if not self.rate_bytes_s:
            await trio.sleep_forever()
        self._next = trio.current_time()
        while True:
            began = trio.current_time()
            await self._pass()
            self._counts["passes"] += 1
            self._last_finished_s, self._last_pass_s = time.time(), trio.current_time() - began
            self._done_bytes = self._total_bytes = 0
            await trio.sleep_until(began + limits.SCRUB_INTERVAL_S)

    async def _pass(self) -> None:
        journal = self._store.journal
        self._total_bytes = self._store.dram.sealed_bytes
        if isinstance(journal, NvmeJournal):
            self._total_bytes += journal.nvme.pool.live_bytes
        for slot in self._store.dram.sealed_slots():
            await self._slot(slot)
        if isinstance(journal, NvmeJournal):
            for stored in journal.nvme.objects.values():  # in the order of their writing, the device's
                await self._object(journal, stored)

    async def _pace(self, size_bytes: int) -> None:
        """Wait until so many more bytes may be read."""
        await trio.sleep_until(self._next)
        self._next = max(self._next, trio.current_time()) + size_bytes / self.rate_bytes_s

    def _verified(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        self._counts["verified_bytes"] += size_bytes

    async def _object(self, journal: NvmeJournal, stored: Stored) -> None:
        for number in range(len(stored.pieces)):
            piece = stored.pieces[number]
            if piece is None or not piece.payload_bytes:
                continue
            await self._pace(piece.payload_bytes)
            try:
                async with journal.nvme.device.buffer() as view:
                    self._verified(await journal.reader.verify_extent(stored, number, view))
            except Superseded:
                return
            except Corrupt:
                self._counts["damaged_extents"] += 1
                return
            except DeviceAway:
                await journal.nvme.device.drive.wait_here(math.inf)
                return
            except DeviceFailed as error:
                self._counts["unreadable"] += 1
                log.error("object %d, extent %d: %s", stored.object_id, number, error)

    async def _slot(self, slot: int) -> None:
        dram = self._store.dram
        sealed = dram.look(slot)
        if sealed is None or sealed.checksum is None:
            return
        await self._pace(sealed.size_bytes)
        try:
            found = await dram.hash(sealed.extent)
        except Superseded:
            return
        self._verified(sealed.size_bytes)
        if found != sealed.checksum:
            self._counts["damaged_slots"] += 1
            log.error("slot %d does not match its checksum any more", slot)
            self._store.drop_slot(sealed)
