"""Payloads of what a start took over, verified while the store serves.

Responsibility: hash each slot that the table says is unverified: all of them in the background, one that is asked for
at once. The store, which decides what becomes of each, is a callback.

Invariants:
- An unverified object is in the table without `TIER_DRAM`: no door reads its slot, and who wants it asks for it as for
  one of a lower tier (`tiers.store.promotion`), or `checked` has a lower tier wait until it is hashed.
- A result counts only while the entry stands for the same slot and generation.

Concurrency: the service's trio thread; slots are hashed by a worker thread, and count as held meanwhile. A kill leaves
nothing behind: the next start takes all over as unverified again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import trio

from kvfs import limits
from kvfs._native.catalog.adoption import verify_slots
from kvfs._native.shared.table import TIER_UNVERIFIED, Entry
from kvfs.errors import KvfsError, is_shortage
from tiers.dram.tier import DramTier
from tiers.model.tier import Extent

log = logging.getLogger("kvfs.dram")


class Verifier:
    """Verifies the slots of one tier. `decide` is called with an object's key, its entry as it is now and whether the
    payload matches, and changes the entry."""

    def __init__(self, dram: DramTier, decide: Callable[[bytes, Entry, bool], None]) -> None:
        self._table, self._dram, self._decide = dram.table, dram, decide
        self.left = 0
        """Objects that a start took over unverified, and that the background has not come to yet."""

    async def run(self) -> None:
        """Verify all that a start took over."""
        if not self.left:
            return
        began, slot, hashed = time.monotonic(), 0, 0
        while slot < self._table.slots_used:
            try:
                slot, found = await trio.to_thread.run_sync(partial(self._verify_some, slot))
            except (KvfsError, OSError) as error:
                if not is_shortage(error):
                    raise
                await trio.sleep(limits.VERIFY_RETRY_S)
                continue
            hashed += len(found)
            self.left = max(0, self.left - len(found))
            for digest, at, generation, matches in found:
                self._take(digest, Extent(at, generation), matches)
        self.left = 0
        log.info("verified: %d objects in %.3f s", hashed, time.monotonic() - began)

    def _verify_some(self, slot: int) -> tuple[int, list[tuple[bytes, int, int, bool]]]:
        return verify_slots(
            self._table, self._dram.slotfd, slot, limits.VERIFY_SLOTS_AT_ONCE, limits.VERIFY_BYTES_AT_ONCE
        )

    async def verify(self, digest: bytes) -> None:
        """Have an object's slot hashed now, if it is not verified yet."""
        extent = self._unverified(digest)
        if extent is not None:
            matches = await trio.to_thread.run_sync(self._dram.matches, extent)
            self._take(digest, extent, matches)

    def checked(self, digest: bytes) -> Entry | None:
        """Return an object's entry, of a slot that was not verified yet only after hashing it here and now."""
        extent = self._unverified(digest)
        if extent is not None:
            self._take(digest, extent, self._dram.matches(extent))
        return self._table.get(digest)

    def _unverified(self, digest: bytes) -> Extent | None:
        entry = self._table.get(digest)
        if entry is None or not entry.tiers & TIER_UNVERIFIED:
            return None
        return Extent(entry.slot, entry.generation)

    def _take(self, digest: bytes, extent: Extent, matches: bool) -> None:
        """Have it decided what becomes of an object, unless its entry is of another slot by now."""
        if self._unverified(digest) != extent:
            return
        entry = self._table.get(digest)
        assert entry is not None
        if not matches:
            log.error("slot %d does not match its checksum: its object is lost", extent.slot)
        self._decide(digest, entry, matches)
