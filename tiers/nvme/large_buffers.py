"""Memory of objects larger than DRAM takes: buffers of drafts, and payloads on their way from these into the log.

Invariants: at most LARGE_DIRTY_EXTENTS buffers exist, for all drafts together. A draft that needs one more has the
oldest dirty one written, and waits for the device, never for another writer.

Concurrency: the service's trio thread.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

import trio

from kvfs import limits
from kvfs._native.shared.slots import xxh3_64
from kvfs.errors import Superseded
from tiers.nvme.extent_reader import ExtentCache, ExtentReader, extent_memory
from tiers.nvme.stored import Piece, Stored
from tiers.nvme.tier import NvmeTier


def spans(offset: int, size: int, extent_bytes: int) -> list[tuple[int, int, int]]:
    """List (extent, start in it, count) of what a range touches."""
    found = []
    while size > 0:
        number, start = divmod(offset, extent_bytes)
        count = min(extent_bytes - start, size)
        found.append((number, start, count))
        offset, size = offset + count, size - count
    return found


@dataclass(slots=True, eq=False)
class Buffer:
    """Holds an extent in memory: `used` bytes, and zeros after them, whatever the memory holds there."""

    view: memoryview
    used: int = 0

    def put(self, start: int, data: memoryview) -> None:
        """Write `data` at `start`; a gap before it becomes zeros."""
        if start > self.used:
            self.view[self.used : start] = bytes(start - self.used)
        self.view[start : start + len(data)] = data
        self.used = max(self.used, start + len(data))

    def copy(self, start: int, count: int) -> bytes:
        """Return `count` bytes from `start`; those past `used` are zeros."""
        found = bytes(self.view[start : min(start + count, self.used)]) if start < self.used else b""
        return found + bytes(count - len(found))


@dataclass(slots=True, eq=False)
class BufferPayload:
    """Supplies a buffer to the log. Once it is written the buffer is another's, and a log that has to write again
    (after a failed sync) takes the bytes from where they were written, if they are right there."""

    nvme: NvmeTier
    buffer: Buffer | None
    size_bytes: int
    checksum: int | None = None
    piece: Piece | None = None

    async def read_into(self, view: memoryview) -> int:
        """Copy the buffer, or read what the log has of it by now. Raises Superseded."""
        if self.buffer is not None:
            view[: self.size_bytes] = self.buffer.view[: self.size_bytes]
            return xxh3_64(view[: self.size_bytes])
        if self.piece is None:
            raise Superseded("the draft is no more")
        return await self.nvme.payload_of(self.piece).read_into(view)


@dataclass(slots=True, eq=False)
class BasePayload:
    """Supplies an extent of the object that a draft rewrites, copied when it is written."""

    cache: ExtentCache
    stored: Stored
    number: int
    size_bytes: int
    checksum: int | None = None

    async def read_into(self, view: memoryview) -> int:
        """Copy the extent of the object that is rewritten, by way of the cache."""
        view[: self.size_bytes] = await self.cache.copy(self.stored, self.number, 0, self.size_bytes)
        return xxh3_64(view[: self.size_bytes])


class DirtyExtents(Protocol):
    """Has extents in buffers that can be written out: a draft."""

    def write_out(self, number: int) -> None:
        """Have a dirty extent written: its buffer is wanted."""
        ...


class LargeBuffers:
    """Shares buffers among drafts, and extents that were read among readers and drafts."""

    def __init__(self, nvme: NvmeTier, reader: ExtentReader) -> None:
        self.nvme = nvme
        self.cache = ExtentCache(reader, nvme.pool.extent_bytes)
        self.extent_bytes = nvme.pool.extent_bytes
        self._free: list[memoryview] = []
        self._made = 0
        self._dirty: OrderedDict[tuple[DirtyExtents, int], None] = OrderedDict()
        self._changed = trio.Event()
        self._users = 0

    def opened(self, more: int) -> None:
        """Count so many more readers and drafts; with the last one free the memory."""
        self._users += more
        if not self._users:
            self.cache.clear()
            self._made -= len(self._free)
            self._free.clear()

    async def take(self) -> memoryview:
        """Take a buffer for an extent; wait for the device while all are in use. Raises NoSpace, DeviceFailed."""
        while True:
            if self._free:
                return self._free.pop()
            if self._made < limits.LARGE_DIRTY_EXTENTS:
                self._made += 1
                return extent_memory(self.extent_bytes)
            if self._dirty:
                draft, number = next(iter(self._dirty))
                draft.write_out(number)
            await self.wait()

    def give(self, view: memoryview) -> None:
        """Take back a buffer that nobody uses any more, and wake who waits for one."""
        self._free.append(view)
        self.changed()

    def used(self, draft: DirtyExtents, number: int) -> None:
        """Note that a dirty extent was written to: its buffer is taken last."""
        self._dirty[draft, number] = None
        self._dirty.move_to_end((draft, number))
        self.changed()

    def unused(self, draft: DirtyExtents, number: int) -> None:
        """Stop counting an extent as one whose buffer could be written out."""
        del self._dirty[draft, number]

    def changed(self) -> None:
        """Wake all who wait for a buffer."""
        event, self._changed = self._changed, trio.Event()
        event.set()

    async def wait(self) -> None:
        """Wait until a buffer or a record changes its state. Raises NoSpace, DeviceFailed while the device refuses
        writes."""
        trouble = self.nvme.log.trouble
        if trouble is not None:
            raise type(trouble)(str(trouble))
        with trio.move_on_after(limits.DEVICE_RETRY_S):
            await self._changed.wait()
