"""Reads of the NVMe tier: extents, ranges and whole objects, verified; and extents kept in memory.

Invariants: bytes are returned only once their checksum was verified. An extent's payload may be shorter than the
extent: what follows in it is zeros. At most LARGE_CACHED_EXTENTS are in memory.

Concurrency: the service's trio thread. Reads may overlap reclaim: one that met a segment's next life fails its
checksum and looks the extent up again. The cache reads an extent once for however many ask for it.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from kvfs import limits
from kvfs.errors import Corrupt, KvfsError, Superseded
from kvfs.formats import RECORD_ALIGNMENT
from tiers.nvme.stored import Piece, Stored
from tiers.nvme.tier import NvmeTier


class ExtentReader:
    """See the module's header."""

    def __init__(self, nvme: NvmeTier) -> None:
        self._nvme = nvme
        self._loads = trio.CapacityLimiter(limits.DEVICE_BUFFERS)

    async def read_extent(self, stored: Stored, number: int, into: memoryview) -> int:
        """Read one extent, verified; return its length. `into` has room for whole RECORD_ALIGNMENT units.

        Raises Superseded when the tier has the object no more, Corrupt (the object is then dropped), DeviceFailed.
        """
        size_bytes = await self.verify_extent(stored, number, into)
        if size_bytes:
            self._nvme.counts.reads += 1
            self._nvme.counts.read_bytes += size_bytes
        return size_bytes

    async def verify_extent(self, stored: Stored, number: int, into: memoryview) -> int:
        """Read an extent for upkeep, which no count shows; otherwise as `read_extent`."""
        while True:
            piece = stored.pieces[number] if not stored.dropped and number < len(stored.pieces) else None
            if piece is None:
                raise Superseded(f"object {stored.object_id} has left the NVMe tier")
            aligned = -(-piece.payload_bytes // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
            if not aligned:
                return 0
            try:
                await self._nvme.payload_of(piece).read_into(into[:aligned])
            except Corrupt as error:
                if not stored.dropped and stored.is_at(number, piece):
                    self._nvme.damage(stored, number, error)
                    raise
                continue
            return piece.payload_bytes

    async def load(self, stored: Stored, into: memoryview) -> None:
        """Read a whole object, verified extent by extent. `into` is page-aligned and has whole RECORD_ALIGNMENT units.

        Raises Superseded, Corrupt, DeviceFailed.
        """
        extent = self._nvme.pool.extent_bytes
        numbers = range(len(stored.pieces))
        if len(numbers) == 1:
            await self._load_extent(stored, 0, into)
            return
        failures: list[KvfsError] = []

        async def one(number: int) -> None:
            async with self._loads:
                if not failures:
                    try:
                        await self._load_extent(stored, number, into[number * extent :])
                    except KvfsError as error:
                        failures.append(error)

        async with trio.open_nursery() as nursery:
            for number in numbers:
                nursery.start_soon(one, number)
        if failures:
            raise failures[0]

    async def fill(self, stored: Stored, descriptor: int) -> int | None:
        """Read a whole object into a draft's file; return its checksum where that of the whole is known. Raises as
        `load`."""
        if not stored.size_bytes:
            return None
        units = -(-stored.size_bytes // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
        os.posix_fallocate(descriptor, 0, units)  # a hole in a full tmpfs would be a SIGBUS
        mapping = mmap.mmap(descriptor, units)
        view = memoryview(mapping)
        await self.load(stored, view)  # after an error its traceback holds the view: the collector unmaps
        view.release()
        mapping.close()
        os.ftruncate(descriptor, stored.size_bytes)
        piece = stored.pieces[0] if len(stored.pieces) == 1 else None
        return piece.checksum if piece is not None and piece.payload_bytes == stored.size_bytes else None

    async def _load_extent(self, stored: Stored, number: int, into: memoryview) -> None:
        """Read one extent to where it belongs in the object, with the zeros that its record does not hold."""
        whole = min(self._nvme.pool.extent_bytes, stored.size_bytes - number * self._nvme.pool.extent_bytes)
        piece = stored.pieces[number] if number < len(stored.pieces) else None
        if (
            piece is not None and piece.payload_bytes > whole
        ):  # a draft's, that had grown when the service was killed
            async with self._nvme.device.buffer() as view:
                await self.read_extent(stored, number, view)
                into[:whole] = view[:whole]
            return
        length = await self.read_extent(stored, number, into)
        if length < whole:
            into[length:whole] = bytes(whole - length)

    async def read(self, stored: Stored, offset: int, into: memoryview) -> int:
        """Read a range, each extent that it touches verified whole; return the count, short only at the object's end.

        Raises Superseded, Corrupt, DeviceFailed.
        """
        extent = self._nvme.pool.extent_bytes
        end = min(offset + len(into), stored.size_bytes)
        done = 0
        async with self._nvme.device.buffer() as view:
            while offset + done < end:
                number, start = divmod(offset + done, extent)
                length = await self.read_extent(stored, number, view)
                count = min(extent - start, end - offset - done)
                there = min(max(length - start, 0), count)
                into[done : done + there] = view[start : start + there]
                into[done + there : done + count] = bytes(count - there)
                done += count
        return done


def extent_memory(extent_bytes: int) -> memoryview:
    """Allocate memory for one extent, aligned for direct I/O, in huge pages where the system has them."""
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
    """Keeps verified extents in memory, for small reads, and the next one ahead of who reads in order.

    An entry's key is its place and checksum, so it is right even after the segment was written anew. Bytes are copied
    out in the step that finds them: the next may drop the entry.
    """

    def __init__(self, reader: ExtentReader, extent_bytes: int) -> None:
        self._reader, self._extent_bytes = reader, extent_bytes
        self._entries: OrderedDict[Piece, _Entry] = OrderedDict()
        self._free: list[memoryview] = []
        self._made = 0
        self._reads = trio.CapacityLimiter(limits.LARGE_READS)
        self._ahead, self._to_read = trio.open_memory_channel[tuple[Stored, int]](limits.LARGE_READS)

    async def run(self) -> None:
        """Read ahead, until cancelled."""
        async for stored, number in self._to_read:
            try:
                if number < len(stored.pieces):
                    await self._entry(stored, number)
            except KvfsError:
                continue  # its reader meets the same error

    def read_ahead(self, stored: Stored, number: int) -> None:
        """Queue an extent to be read ahead of its reader; drop it where others wait already."""
        if number < len(stored.pieces) and stored.pieces[number] not in self._entries:
            with suppress(trio.WouldBlock):
                self._ahead.send_nowait((stored, number))

    async def copy(self, stored: Stored, number: int, start: int, count: int) -> bytes:
        """Return a part of one extent, with zeros past its payload. Raises Superseded, Corrupt, DeviceFailed."""
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
        """Read an extent into the cache, by its place: one that moves meanwhile has the same bytes elsewhere."""
        entry = self._entries[piece] = _Entry()
        try:
            async with self._reads:
                entry.view = self._view()
                entry.length = await self._reader.read_extent(stored, number, entry.view)
                entry.filled = True
        finally:
            entry.done.set()
            if not entry.filled:
                del self._entries[piece]
                if entry.view is not None:
                    self._made -= 1  # the device may still write into it
        return entry

    def _view(self) -> memoryview:
        if self._free:
            return self._free.pop()
        if self._made < limits.LARGE_CACHED_EXTENTS:
            self._made += 1
            return extent_memory(self._extent_bytes)
        piece = next(piece for piece, entry in self._entries.items() if entry.filled)
        view = self._entries.pop(piece).view
        assert view is not None
        return view

    def clear(self) -> None:
        """Free the memory, once nobody reads."""
        for piece in [piece for piece, entry in self._entries.items() if entry.filled]:
            del self._entries[piece]
            self._made -= 1
        self._made -= len(self._free)
        self._free.clear()
