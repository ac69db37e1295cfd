"""Verified extents in memory, for reads of what DRAM does not hold as one piece.

Responsibility: small reads of extents without reading 4 MiB for each, and the next extent ahead of who reads in
order. Bytes come from `NvmeTier.read_extent`, which verifies them.

Invariants: at most LARGE_CACHED_EXTENTS are in memory. An entry's key is its place and checksum, so what is found
under a place is right even after the segment was written anew. Bytes are copied out in the step that finds them:
an entry may go with the next one.

Concurrency: the service's trio thread; one read of an extent for however many ask for it at once.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from kvfs import limits
from kvfs.errors import KvfsError, Superseded

if TYPE_CHECKING:
    from tiers.nvme import NvmeTier, Piece, Stored


def extent_memory(extent_bytes: int) -> memoryview:
    """Memory for one extent, aligned for direct I/O, in huge pages where the system has them."""
    area = mmap.mmap(-1, extent_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(area)


@dataclass(slots=True, eq=False)
class _Entry:
    view: memoryview | None = None
    length: int = 0
    filled: bool = False
    done: trio.Event = field(default_factory=trio.Event)


class ExtentCache:
    """Of one NVMe tier; see the module's header."""

    def __init__(self, nvme: NvmeTier) -> None:
        self._nvme = nvme
        self._entries: OrderedDict[Piece, _Entry] = OrderedDict()
        self._free: list[memoryview] = []
        self._made = 0
        self._turns = trio.CapacityLimiter(limits.LARGE_READS)
        self._ahead, self._to_read = trio.open_memory_channel[tuple["Stored", int]](limits.LARGE_READS)

    async def run(self) -> None:
        """Read ahead, until cancelled."""
        async for stored, number in self._to_read:
            try:
                if number < len(stored.pieces):
                    await self._entry(stored, number)
            except KvfsError:
                continue  # whoever comes for it is told

    def read_ahead(self, stored: Stored, number: int) -> None:
        """Somebody will want this extent soon. Dropped where others wait already."""
        if number < len(stored.pieces) and stored.pieces[number] not in self._entries:
            with suppress(trio.WouldBlock):
                self._ahead.send_nowait((stored, number))

    async def copy(self, stored: Stored, number: int, start: int, count: int) -> bytes:
        """A part of one extent, with zeros past its payload. Raises Superseded, Corrupt, DeviceFailed."""
        entry = await self._entry(stored, number)
        assert entry.view is not None
        found = bytes(entry.view[start : min(start + count, entry.length)]) if start < entry.length else b""
        return found + bytes(count - len(found))

    async def _entry(self, stored: Stored, number: int) -> _Entry:
        while True:
            piece = None if stored.dropped else stored.pieces[number]
            if piece is None:
                raise Superseded(f"object {stored.object_id} has left the NVMe tier")
            entry = self._entries.get(piece)
            if entry is None:
                return await self._fill(stored, number, piece)
            if entry.filled:
                self._entries.move_to_end(piece)
                return entry
            await entry.done.wait()

    async def _fill(self, stored: Stored, number: int, piece: Piece) -> _Entry:
        """An extent that moves meanwhile has the same bytes elsewhere: what is here is right under its old place."""
        entry = self._entries[piece] = _Entry()
        try:
            async with self._turns:
                entry.view = self._view()
                entry.length = await self._nvme.read_extent(stored, number, entry.view)
                entry.filled = True
        finally:
            entry.done.set()
            if not entry.filled:
                del self._entries[piece]
                if entry.view is not None:
                    self._free.append(entry.view)
        return entry

    def _view(self) -> memoryview:
        if self._free:
            return self._free.pop()
        if self._made < limits.LARGE_CACHED_EXTENTS:
            self._made += 1
            return extent_memory(self._nvme.pool.extent_bytes)
        piece = next(piece for piece, entry in self._entries.items() if entry.filled)
        view = self._entries.pop(piece).view
        assert view is not None
        return view

    def clear(self) -> None:
        """Nobody reads: the memory goes back."""
        for piece in [piece for piece, entry in self._entries.items() if entry.filled]:
            del self._entries[piece]
            self._made -= 1
        self._made -= len(self._free)
        self._free.clear()
