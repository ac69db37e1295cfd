"""Promotion: objects read back from NVMe or the cold tier into a DRAM slot, verified.

Responsibility: one read for however many ask for the same object at once, straight into the pages of a slot.

Invariants: nothing is visible before its checksum was verified; no draft stays of a failed or cancelled read.
Concurrency: the service's trio thread; at most MAX_PROMOTIONS objects at a time from the device, further callers wait.
The cold tier has a limit of its own, so that a slow endpoint holds up nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import trio

from kvfs import limits
from kvfs.errors import NotFound
from tiers.dram.read_around import ReadAround
from tiers.dram.verification import Verifier
from tiers.model.objects import ObjectInfo
from tiers.store.context import Context
from tiers.store.drafts import Drafts
from tiers.store.placement import Placement


class Promoter:
    """Promotes objects of one store."""

    def __init__(self, context: Context, drafts: Drafts, placement: Placement, verifier: Verifier) -> None:
        self._catalog, self._journal, self._cold = context.catalog, context.journal, context.cold
        self._drafts, self._placement, self._verifier = drafts, placement, verifier
        self._under_way: dict[bytes, trio.Event] = {}
        self._loads = trio.CapacityLimiter(limits.MAX_PROMOTIONS)
        self.around = ReadAround()

    async def load(self, info: ObjectInfo, *, uid: int) -> ObjectInfo:
        """Bring an object into DRAM (`Reading.load`)."""
        digest = info.key.digest
        while True:
            current = self._current(info)
            if current.extent is not None:
                return current  # without a checkpoint, after which it might be evicted again
            running = self._under_way.get(digest)
            if running is None:
                break
            await running.wait()
        self._under_way[digest] = done = trio.Event()
        try:
            await self._verifier.verify(digest)
            current = self._current(info)
            return current if current.extent is not None else await self._read_back(current, uid)
        finally:
            del self._under_way[digest]
            done.set()

    async def read_around(self, info: ObjectInfo, *, uid: int) -> int:
        """Return a read-only descriptor of a verified copy beside DRAM.

        Raises NotFound, Busy, NoSpace, DeviceFailed.
        """

        async def fill(descriptor: int) -> None:
            current = self._current(info)
            if current.tier == "cold":
                await self._cold.fetch(current, descriptor)
            else:
                async with self._loads:
                    await self._journal.fetch(current, descriptor)

        return await self.around.read(info.size_bytes, fill, uid=uid)

    def _current(self, info: ObjectInfo) -> ObjectInfo:
        """Look an object up again. Raises NotFound where its key stands for no object, or another one."""
        current = self._catalog.lookup_object(info.key)
        if current is None or current.object_id != info.object_id:
            raise NotFound(f"object {info.object_id} is gone")
        return current

    async def _read_back(self, info: ObjectInfo, uid: int) -> ObjectInfo:
        if info.tier == "nvme":
            try:
                async with self._loads:
                    return await self._into_slot(info, uid, self._journal.fetch)
            except NotFound:
                again = self._catalog.lookup_object(info.key)
                if again is None or again.object_id != info.object_id or again.tier != "cold":
                    raise
        return await self._into_slot(info, uid, self._cold.fetch)

    async def _into_slot(
        self, info: ObjectInfo, uid: int, fill: Callable[[ObjectInfo, int], Awaitable[int | None]]
    ) -> ObjectInfo:
        """Have a draft's file filled, and publish it. `fill` returns the checksum, if it knows that of the whole."""
        draft = self._drafts.reserve(info.size_bytes, uid=uid, insists=False)
        try:
            descriptor = self._drafts.open(draft)
            try:
                checksum = await fill(info, descriptor)
            finally:
                os.close(descriptor)
            return self._placement.promoted(info, draft, checksum)
        finally:
            self._drafts.abort(draft)
