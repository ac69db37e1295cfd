"""Objects on their way back up: from a device or the cold tier into a DRAM slot, verified.

Responsibility: one read for however many ask for the same object at once, straight into the pages of a slot.

Invariants: nothing is visible before its checksum was found right; a failed or cancelled read leaves no draft.
Concurrency: the service's trio thread; at most MAX_PROMOTIONS objects at a time from the device, further callers wait.
The cold tier has turns of its own, so that a slow endpoint holds up nothing else.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import trio

from kvfs import limits
from kvfs.errors import Corrupt, NotFound, Superseded
from kvfs.formats import RECORD_ALIGNMENT
from tiers.journal import NvmeJournal
from tiers.model import ObjectInfo
from tiers.read_around import ReadAround

if TYPE_CHECKING:
    from tiers.nvme import Stored
    from tiers.store import TieredStore


class Promoter:
    """Brings objects of one store back into DRAM."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._under_way: dict[bytes, trio.Event] = {}
        self._turns = trio.CapacityLimiter(limits.MAX_PROMOTIONS)
        self.around = ReadAround()

    async def load(self, info: ObjectInfo, *, uid: int) -> ObjectInfo:
        """See `TieredStore.load`."""
        digest = info.key.digest
        while True:
            current = self._store.lookup_object(info.key)
            if current is None or current.object_id != info.object_id:
                raise NotFound(f"object {info.object_id} is gone")
            if current.extent is not None:
                return current  # without a checkpoint, after which it might be evicted again
            running = self._under_way.get(digest)
            if running is None:
                break
            await running.wait()
        self._under_way[digest] = done = trio.Event()
        try:
            return await self._read_back(current, uid)
        finally:
            del self._under_way[digest]
            done.set()

    async def read_around(self, info: ObjectInfo, *, uid: int) -> int:
        """Return a read-only descriptor of a verified copy beside DRAM.

        Raises NotFound, Busy, NoSpace, DeviceFailed.
        """

        async def fill(descriptor: int) -> None:
            current = self._store.lookup_object(info.key)
            if current is None or current.object_id != info.object_id:
                raise NotFound(f"object {info.object_id} is gone")
            if current.tier == "cold":
                await self._store.cold.fetch(current, descriptor)
            else:
                async with self._turns:
                    await self._from_nvme(current, descriptor)

        return await self.around.read(info.size_bytes, fill, uid=uid)

    async def _read_back(self, info: ObjectInfo, uid: int) -> ObjectInfo:
        if info.tier == "nvme":
            try:
                async with self._turns:
                    return await self._into_slot(info, uid, self._from_nvme)
            except NotFound:
                again = self._store.lookup_object(info.key)
                if again is None or again.object_id != info.object_id or again.tier != "cold":
                    raise
        return await self._into_slot(info, uid, self._store.cold.fetch)

    async def _into_slot(
        self, info: ObjectInfo, uid: int, fill: Callable[[ObjectInfo, int], Awaitable[int | None]]
    ) -> ObjectInfo:
        """Have a draft's file filled, and publish it. `fill` returns the checksum, if it knows that of the whole."""
        draft = self._store.reserve(info.size_bytes, uid=uid)
        try:
            descriptor = self._store.open_draft(draft)
            try:
                checksum = await fill(info, descriptor)
            finally:
                os.close(descriptor)
            return self._store.promoted(info, draft, checksum)
        finally:
            self._store.abort(draft)

    async def _from_nvme(self, info: ObjectInfo, descriptor: int) -> int | None:
        """Raises NotFound, DeviceFailed."""
        journal = self._store.journal
        stored = journal.nvme.objects.get(info.object_id) if isinstance(journal, NvmeJournal) else None
        if stored is None or not isinstance(journal, NvmeJournal):
            raise NotFound(f"object {info.object_id} is gone")
        try:
            await _fill(journal, stored, descriptor)
        except (Corrupt, Superseded) as error:
            raise NotFound(f"object {info.object_id} is gone: {error}") from error
        piece = stored.pieces[0] if len(stored.pieces) == 1 else None
        known = piece is not None and 0 < piece.payload_bytes == stored.size_bytes
        return piece.checksum if piece and known else None


async def _fill(journal: NvmeJournal, stored: Stored, descriptor: int) -> None:
    """Read an object into a draft's pages. They are allocated first: a hole in a full tmpfs would be a SIGBUS."""
    if not stored.size_bytes:
        return
    units = -(-stored.size_bytes // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
    os.posix_fallocate(descriptor, 0, units)
    mapping = mmap.mmap(descriptor, units)
    view = memoryview(mapping)
    await journal.nvme.load(stored, view)  # after an error its traceback holds the view: the collector unmaps
    view.release()
    mapping.close()
    os.ftruncate(descriptor, stored.size_bytes)
