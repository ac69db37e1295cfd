"""Reads: leases on objects in whatever tier they are, and waiting for a name that is being published.

Invariants: an open descriptor is the lease; nothing is handed out before its bytes are in DRAM or in memory beside it.
Concurrency: the service's trio thread; `load`, `lease`, `read_into` and `wait_*` await.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio

from kvfs import limits
from kvfs.errors import Busy, NoSpace, ObjectTooLarge, Superseded
from kvfs.index.rows import RETIRED
from tiers.model.objects import Name, ObjectInfo
from tiers.model.tier import StoreKey
from tiers.store.context import Context
from tiers.store.promotion import Promoter
from tiers.store.residency import Residency


class Reading:
    """See the module's header."""

    def __init__(self, context: Context, residency: Residency, promoter: Promoter) -> None:
        self._catalog, self._dram, self._space = context.catalog, context.dram, context.space
        self._listeners, self._journal, self._cold = context.listeners, context.journal, context.cold
        self._residency, self._promoter = residency, promoter

    def open_read(self, info: ObjectInfo, *, uid: int) -> int:
        """Open a read-only descriptor, which is the lease; the caller closes it. `load` brings up what is not in DRAM.

        Raises Superseded, QuotaExceeded, ObjectTooLarge.
        """
        if self._residency.is_large(info):
            raise ObjectTooLarge(
                f"object {info.object_id} has {info.size_bytes} bytes: DRAM takes {self._dram.largest_object_bytes}"
            )
        if info.extent is None:
            raise Superseded(f"object {info.object_id} is not in DRAM")
        self._space.check_quota(uid, held_bytes=self._dram.charged_bytes(uid))
        descriptor = self._dram.open_sealed(info.extent)
        self._residency.note_reader(info.extent.slot, uid)
        self.touch(info.key)
        return descriptor

    def touch(self, key: StoreKey) -> None:
        """Count a hit of an object."""
        self._catalog.table.touch(key.digest)
        self._catalog.counts["hits"] += 1
        self._residency.touch(key.digest)
        self._journal.touched(key)
        self._cold.touched(key)

    def checksum(self, key: StoreKey) -> int | None:
        """Return the XXH3-64 that DRAM or NVMe has for a whole object; None where there is none, or not yet."""
        info = self._catalog.lookup_object(key)
        if info is None:
            return None
        known = None if info.extent is None else self._dram.checksum(info.extent)
        return self._journal.checksum(info.object_id) if known is None else known

    async def load(self, info: ObjectInfo, *, uid: int) -> ObjectInfo:
        """Bring an object into DRAM: read back and verified if it was on a device only.

        Raises NotFound for an object that is gone or damaged, NoSpace, ObjectTooLarge, QuotaExceeded, DeviceFailed.
        """
        return info if info.extent is not None else await self._promoter.load(info, uid=uid)

    async def lease(self, info: ObjectInfo, *, uid: int) -> tuple[ObjectInfo, int]:
        """Open an object for reading in whatever tier it is; return it with a descriptor as `open_read` gives it.

        Where DRAM has no slot for it, the descriptor is of a copy beside the tier, and the object without an extent.
        Raises as `load` does, and Busy.
        """
        try:
            info = await self.load(info, uid=uid)
        except NoSpace:
            descriptor = await self._promoter.read_around(info, uid=uid)
            self.touch(info.key)
            return info, descriptor
        return info, self.open_read(info, uid=uid)

    def note_misses(self, count: int) -> None:
        """Count lookups of what does not exist that a door has answered without asking."""
        self._catalog.counts["misses"] += count

    async def read_into(self, info: ObjectInfo, into: memoryview) -> int:
        """Read a whole object from where it is, verified if that is a device, without bringing it up; return its size.

        `into` is page-aligned memory with room for whole units of RECORD_ALIGNMENT. Raises Superseded, Corrupt,
        DeviceFailed.
        """
        if info.extent is None:
            await self._journal.read_into(info.object_id, into)
            return info.size_bytes
        with self._dram.lease(info.extent) as lease:
            return await lease.read_into(0, into)

    async def wait_published(
        self, name: Name, deadline: float | None = None, *, creates: bool = False
    ) -> None:
        """Wait, PUBLISH_WAIT_S at most, while `name` is a draft that is closed but not yet published.

        Raises Busy where it still is: what had the name before must not be shown; with `creates` also where nothing had
        it, since the name is taken.
        """
        deadline = trio.current_time() + limits.PUBLISH_WAIT_S if deadline is None else deadline
        for publish in self._listeners.publishers:
            is_late = False
            while (pending := publish(name)) is not None and not is_late:
                with trio.move_on_at(deadline):
                    await pending.ended.wait()
                is_late = trio.current_time() >= deadline
            if pending is not None and (creates or pending.was_answered):
                raise Busy(f"{name} was closed, and is not published yet")
        row = self._catalog.row(name) if name.key and not self._listeners.publishers else None
        if row is not None and row.flags & RETIRED:
            raise Busy(f"{name} was closed, and its mount is gone")

    async def wait_all_published(self, names: Sequence[Name], *, creates: bool = False) -> dict[Name, Busy]:
        """Wait for several names, as long for all as `wait_published` for one; return those that are still to be
        published."""
        deadline, busy = trio.current_time() + limits.PUBLISH_WAIT_S, {}
        for name in names:
            try:
                await self.wait_published(name, deadline, creates=creates)
            except Busy as error:
                busy[name] = error
        return busy
