"""Objects larger than DRAM takes: read and written extent by extent on NVMe.

Responsibility: leases for reading in place (`LargeReader`), and drafts whose extents go to the log as they fill
(`LargeDraft`): written anywhere, truncated, read back, made durable. Names are the store's; which extents lie
where is `tiers.nvme`'s.

Invariants:
- An extent of a draft is, in this order: in a buffer that can be written (`dirty`); in one that waits for the log;
  on the device; in the sealed object that the draft rewrites (`base`), up to `base_bytes`; zeros.
- At most LARGE_DIRTY_EXTENTS buffers exist, for all drafts together. Who needs one more has the oldest dirty one
  written, and waits: for the device, never for another writer.
- What a draft is going to write is promised in the tier first, so that a full tier is told to `write`.
- Only the newest version of an extent counts, however late an older one is written.
- Nothing of a draft counts after a restart without a META, and that is queued only once every extent is written.
- A reader, a draft and a draft's base are held in the tier (`NvmeTier.hold`) until they are closed.

Concurrency: the service's trio thread. A draft's operations follow one another (its lock), and no draft is sealed
while one of them runs or waits for its turn. `write`, `truncate` and `flush` wait for the device; what the log tells
comes in between.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from kvfs import limits
from kvfs._native.slots import xxh3_64
from kvfs.errors import KvfsError, NotFound, ObjectTooLarge, Superseded
from kvfs.formats import EndingKind, RecordType
from tiers.base import object_key
from tiers.extents import ExtentCache, extent_memory
from tiers.log_entries import Location, Record
from tiers.nvme import Guarded, NvmeTier, Piece, Stored, data_header


class LargeReader:
    """An object that is read in place; the lease ends with `close`."""

    def __init__(self, objects: LargeObjects, stored: Stored) -> None:
        objects.nvme.hold(stored)
        objects.opened(1)
        self._objects = objects
        self._stored = stored
        self._next = 0
        """The extent that follows the one read last."""

    @property
    def size_bytes(self) -> int:
        return self._stored.size_bytes

    async def read(self, offset: int, size: int) -> bytes:
        """A range, short only at the end. Raises Corrupt, Superseded (damaged before), DeviceFailed."""
        parts = []
        for number, start, count in _spans(
            offset, min(size, self.size_bytes - offset), self._objects.extent_bytes
        ):
            if number == self._next:
                self._objects.cache.read_ahead(self._stored, number + 1)
            self._next = number + 1
            parts.append(await self._objects.cache.copy(self._stored, number, start, count))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        self._objects.nvme.release(self._stored)
        self._objects.opened(-1)


def _spans(offset: int, size: int, extent_bytes: int) -> list[tuple[int, int, int]]:
    """(extent, start in it, count) of what a range touches."""
    found = []
    while size > 0:
        number, start = divmod(offset, extent_bytes)
        count = min(extent_bytes - start, size)
        found.append((number, start, count))
        offset, size = offset + count, size - count
    return found


@dataclass(slots=True, eq=False)
class _Buffer:
    """An extent in memory: `used` bytes, and zeros after them, whatever the memory holds there."""

    view: memoryview
    used: int = 0

    def put(self, start: int, data: memoryview) -> None:
        if start > self.used:
            self.view[self.used : start] = bytes(start - self.used)
        self.view[start : start + len(data)] = data
        self.used = max(self.used, start + len(data))

    def copy(self, start: int, count: int) -> bytes:
        found = bytes(self.view[start : min(start + count, self.used)]) if start < self.used else b""
        return found + bytes(count - len(found))


@dataclass(slots=True, eq=False)
class _BufferPayload:
    """A buffer on its way into the log. Once it is written the buffer is another's, and a log that has to write again
    (after a failed sync) takes the bytes from where they were written, if they are right there."""

    nvme: NvmeTier
    buffer: _Buffer | None
    size_bytes: int
    checksum: int | None = None
    piece: Piece | None = None

    async def read_into(self, view: memoryview) -> int:
        if self.buffer is not None:
            view[: self.size_bytes] = self.buffer.view[: self.size_bytes]
            return xxh3_64(view[: self.size_bytes])
        if self.piece is None:
            raise Superseded("the draft is no more")
        return await self.nvme.payload_of(self.piece).read_into(view)


@dataclass(slots=True, eq=False)
class _BasePayload:
    """An extent of the object that a draft rewrites, copied when its turn comes."""

    objects: LargeObjects
    stored: Stored
    number: int
    size_bytes: int
    checksum: int | None = None

    async def read_into(self, view: memoryview) -> int:
        view[: self.size_bytes] = await self.objects.cache.copy(self.stored, self.number, 0, self.size_bytes)
        return xxh3_64(view[: self.size_bytes])


@dataclass(slots=True, eq=False)
class _Queued:
    """One version of an extent that the log has, until it is written."""

    buffer: _Buffer | None
    promised_bytes: int
    pending: bool = True


@dataclass(slots=True, eq=False)
class _Times:
    atime_ns: int
    mtime_ns: int
    ctime_ns: int


class LargeDraft:
    """An unsealed object of one writer; see the module's header. Made by `LargeObjects.begin`."""

    def __init__(
        self, objects: LargeObjects, object_id: int, bucket_id: int, uid: int, base: Stored | None
    ) -> None:
        self._objects = objects
        self._nvme = objects.nvme
        self._extent_bytes = objects.extent_bytes
        self.uid = uid
        self.stored = Stored(
            object_key(object_id), object_id, 0, bucket_id, uid=uid, holders=1, pieces=[None]
        )
        self._base = base
        self._base_bytes = 0 if base is None else base.size_bytes
        if base is not None:
            self._nvme.hold(base)
        self._nvme.begin(self.stored)
        self._nvme.resize(self.stored, self._base_bytes)
        objects.opened(1)
        self._lock = trio.Lock()
        self._dirty: dict[int, _Buffer] = {}
        self._queued: dict[int, _Queued] = {}
        """The newest version of each extent that waits for the log."""
        self._waiting = 0
        """Records of all versions that wait."""
        self._versions: dict[int, _Queued] = {}
        self._submitted: set[int] = set()
        """Extents that the log was given before: what is submitted now takes the place of that."""
        self._is_rewritten = False
        """Whether that has happened, and the earlier version may not have ended yet."""
        self._closed = False
        self.sealed = False
        """Set by the store: from then on the object is its own."""
        self.persisted_bytes: int | None = None
        """Set by the store: the log has a META, and so the file would be there after a crash, with this size."""
        self.error: KvfsError | None = None
        """Why an extent could not be written: the draft will never be sealed."""
        now = time.time_ns()
        self.times = _Times(now, now, now)

    # --- what it is ---------------------------------------------------------------------------------------

    @property
    def object_id(self) -> int:
        return self.stored.object_id

    @property
    def size_bytes(self) -> int:
        return self.stored.size_bytes

    @property
    def is_written(self) -> bool:
        """Whether all of it is in the log, and nobody is changing it, so that it can be sealed."""
        if self._lock.locked() or self.error or self._is_rewritten:
            return False
        return not (self._dirty or self._waiting) and self.stored.readable

    def check(self) -> None:
        """Raises what made the draft fail; Superseded once it is sealed or closed."""
        if self.error is not None:
            raise type(self.error)(str(self.error))
        if self._closed or self.sealed or self.stored.dropped:
            raise Superseded(f"draft {self.object_id} is no more")

    # --- bytes --------------------------------------------------------------------------------------------

    async def write(self, offset: int, data: bytes) -> int:
        """Put bytes anywhere; their count. Raises ObjectTooLarge; NoSpace, DeviceFailed (a part may be written)."""
        self._check_size(offset + len(data))
        view = memoryview(data)
        async with self._lock:
            self.check()
            done = 0
            for number, start, count in _spans(offset, len(data), self._extent_bytes):
                buffer = await self._writable(number, whole=start == 0 and count >= self._length(number))
                buffer.put(start, view[done : done + count])
                done += count
                if offset + done > self.size_bytes:
                    self._nvme.resize(self.stored, offset + done)
                if start + count == self._extent_bytes:
                    self._queue(number)
            self.touch()
        return len(data)

    def _check_size(self, size_bytes: int) -> None:
        largest = self._nvme.largest_object_bytes
        if size_bytes > largest:
            raise ObjectTooLarge(f"{size_bytes} bytes: the limit is {largest}, half of the NVMe tier")

    def touch(self) -> None:
        """The bytes changed."""
        self.times.mtime_ns = self.times.ctime_ns = time.time_ns()

    async def read(self, offset: int, size: int) -> bytes:
        """A range as it is now, short only at the end. Raises as `LargeReader.read`."""
        async with self._lock:
            spans = _spans(offset, min(size, self.size_bytes - offset), self._extent_bytes)
            return b"".join([await self._copy(*span) for span in spans])

    async def _copy(self, number: int, start: int, count: int) -> bytes:
        buffer = self._in_memory(number)
        if buffer is not None:
            return buffer.copy(start, count)
        if self.stored.pieces[number] is not None:
            return await self._objects.cache.copy(self.stored, number, start, count)
        there = min(max(self._base_length(number) - start, 0), count)
        found = b""
        if there:
            assert self._base is not None
            found = await self._objects.cache.copy(self._base, number, start, there)
        return found + bytes(count - there)

    def _in_memory(self, number: int) -> _Buffer | None:
        queued = self._queued.get(number)
        return self._dirty.get(number) or (queued.buffer if queued is not None else None)

    def _base_length(self, number: int) -> int:
        """What the base has of an extent."""
        return min(max(self._base_bytes - number * self._extent_bytes, 0), self._extent_bytes)

    def _length(self, number: int) -> int:
        """Where an extent's bytes end: zeros follow."""
        buffer = self._in_memory(number)
        if buffer is not None:
            return buffer.used
        if number in self._queued:  # a hole, or a copy of the base
            return self._base_length(number)
        piece = self.stored.pieces[number] if number < len(self.stored.pieces) else None
        return self._base_length(number) if piece is None else piece.payload_bytes

    async def _writable(self, number: int, *, whole: bool) -> _Buffer:
        """The extent's dirty buffer, with what it holds so far unless all of that is to be replaced (`whole`)."""
        found = self._dirty.get(number)
        if found is not None:
            self._objects.used(self, number)
            return found
        promised = self._nvme.record_bytes(self._extent_bytes)
        self._nvme.promise(promised)
        try:
            buffer = _Buffer(await self._objects.take())
        except BaseException:
            self._nvme.promise(-promised)
            raise
        try:
            self.check()
            length = 0 if whole else self._length(number)
            if length:
                buffer.view[:length] = await self._copy(number, 0, length)
                buffer.used = length
        except BaseException:
            self._nvme.promise(-promised)
            self._objects.give(buffer.view)
            raise
        self._dirty[number] = buffer
        self._objects.used(self, number)
        return buffer

    async def truncate(self, size_bytes: int) -> None:
        """Set the size; what is added reads as zeros. Raises ObjectTooLarge, NoSpace, DeviceFailed."""
        self._check_size(size_bytes)
        async with self._lock:
            self.check()
            if size_bytes < self.size_bytes:
                await self._cut(size_bytes)
            self._nvme.resize(self.stored, size_bytes)
            self.touch()

    async def _cut(self, size_bytes: int) -> None:
        last, rest = divmod(size_bytes, self._extent_bytes)
        if rest and self._length(last) > rest:
            buffer = await self._writable(last, whole=False)
            buffer.used = min(buffer.used, rest)
        first_gone = last + 1 if rest else last
        for number in [number for number in self._dirty if number >= first_gone]:
            self._drop_dirty(number)
        for number in [number for number in self._versions if number >= first_gone]:
            del self._versions[number]
            self._queued.pop(number, None)
        if not size_bytes:
            self._nvme.forget_piece(self.stored, 0)
        self._base_bytes = min(self._base_bytes, size_bytes)

    def _drop_dirty(self, number: int) -> None:
        self._objects.give(self._dirty.pop(number).view)
        self._objects.unused(self, number)
        self._nvme.promise(-self._nvme.record_bytes(self._extent_bytes))

    # --- into the log -------------------------------------------------------------------------------------

    def write_out(self, number: int) -> None:
        """Have a dirty extent written: its buffer is wanted."""
        self._queue(number)

    def _queue(self, number: int) -> None:
        buffer = self._dirty.pop(number)
        self._objects.unused(self, number)
        payload = _BufferPayload(self._nvme, buffer, buffer.used)
        self._submit(number, payload, _Queued(buffer, self._nvme.record_bytes(self._extent_bytes)))

    def _submit(self, number: int, payload: _BufferPayload | _BasePayload, queued: _Queued) -> None:
        self._versions[number] = self._queued[number] = queued
        self._waiting += 1

        def written(location: Location, record_bytes: int, checksum: int) -> None:
            piece = Piece(*location, record_bytes, payload.size_bytes, checksum)
            if isinstance(payload, _BufferPayload):
                payload.buffer, payload.piece, payload.checksum = None, piece, checksum
            if not self.stored.dropped and self._versions.get(number) is queued:
                self._nvme.place(self.stored, number, piece)
            self._end(number, queued)

        def lost(error: KvfsError) -> None:
            if queued.pending and self._versions.get(number) is queued and not self._closed:
                self.error = self.error or error
            self._end(number, queued)

        self._nvme.log.append(
            Record(
                RecordType.DATA,
                self.object_id,
                data_header(self.stored, number),
                payload=Guarded(self.stored, payload) if payload.size_bytes else None,
                written=written,
                lost=lost,
                is_essential=lambda: self._nvme.is_durable(self.stored.bucket_id),
                ends=EndingKind.EXTENT if number in self._submitted else None,
                first_sequence=self.stored.first_sequence,
            )
        )
        self._is_rewritten |= number in self._submitted
        self._submitted.add(number)

    def _end(self, number: int, queued: _Queued) -> None:
        """This version waits no longer; told a second time, after a failed sync, there is nothing left to do."""
        if not queued.pending:
            return
        queued.pending = False
        self._waiting -= 1
        self._nvme.promise(-queued.promised_bytes)
        if queued.buffer is not None:
            self._objects.give(queued.buffer.view)
            queued.buffer = None
        if self._queued.get(number) is queued:
            del self._queued[number]
        self._objects.changed()

    @asynccontextmanager
    async def settled(self) -> AsyncIterator[None]:
        """All of it is written (`flush`), and stays as it is within the block."""
        async with self._lock:
            self.check()
            for number in sorted(self._dirty):
                self._queue(number)
            for number in range(len(self.stored.pieces)):
                if self.stored.pieces[number] is None and number not in self._queued:
                    await self._wait(limits.LARGE_DIRTY_EXTENTS)
                    self._fill(number)
            await self._wait(0)
            if self._is_rewritten:
                # A name must not stand for an earlier version where damage takes the last one.
                await self._nvme.log.settle()
                self._is_rewritten = False
            yield

    async def flush(self) -> None:
        """Wait until all of it is in the log, though not yet durable. Raises NoSpace, DeviceFailed."""
        async with self.settled():
            pass

    def _fill(self, number: int) -> None:
        """An extent that was never written: the base's, or a hole."""
        length = self._base_length(number)
        promised = self._nvme.record_bytes(length)
        self._nvme.promise(promised)
        payload: _BufferPayload | _BasePayload = _BufferPayload(self._nvme, None, 0)
        if length:
            assert self._base is not None
            payload = _BasePayload(self._objects, self._base, number, length)
        self._submit(number, payload, _Queued(None, promised))

    async def _wait(self, most: int) -> None:
        """Until no more than `most` records wait."""
        while self._waiting > most:
            self.check()
            await self._objects.wait()
        self.check()

    # --- ends ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the writer's lease; a draft that was not sealed is dropped. Twice is harmless."""
        if self._closed:
            return
        self._closed = True
        for number in list(self._dirty):
            self._drop_dirty(number)
        if not self.sealed:
            self._nvme.drop(self.object_id)
        self._nvme.release(self.stored)
        self._let_go_of_base()
        self._objects.opened(-1)

    def _let_go_of_base(self) -> None:
        base, self._base = self._base, None
        if base is not None:
            self._nvme.release(base)


class LargeObjects:
    """Readers and drafts of one NVMe tier: their buffers, and the extents that they share."""

    def __init__(self, nvme: NvmeTier) -> None:
        self.nvme = nvme
        self.cache = ExtentCache(nvme)
        self.extent_bytes = nvme.pool.extent_bytes
        self._free: list[memoryview] = []
        self._made = 0
        self._dirty: OrderedDict[tuple[LargeDraft, int], None] = OrderedDict()
        self._changed = trio.Event()
        self._opened = 0

    async def run(self) -> None:
        """Read ahead, until cancelled."""
        await self.cache.run()

    def open(self, object_id: int) -> LargeReader:
        """Raises NotFound, QuotaExceeded."""
        return LargeReader(self, self._need(object_id))

    def begin(self, object_id: int, bucket_id: int, *, uid: int, base: int | None = None) -> LargeDraft:
        """A new draft, of the bytes of object `base` where that is given. Raises NotFound, QuotaExceeded."""
        return LargeDraft(self, object_id, bucket_id, uid, None if base is None else self._need(base))

    def _need(self, object_id: int) -> Stored:
        stored = self.nvme.objects.get(object_id)
        if stored is None or not stored.readable:
            raise NotFound(f"object {object_id} is not in the NVMe tier")
        return stored

    def opened(self, more: int) -> None:
        """Readers and drafts come and go; with the last one goes the memory."""
        self._opened += more
        if not self._opened:
            self.cache.clear()
            self._made -= len(self._free)
            self._free.clear()

    # --- buffers ------------------------------------------------------------------------------------------

    async def take(self) -> memoryview:
        """A buffer for an extent; waits for the device while all are in use. Raises NoSpace, DeviceFailed."""
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
        self._free.append(view)
        self.changed()

    def used(self, draft: LargeDraft, number: int) -> None:
        """A dirty extent was written to: of all it is wanted least soon."""
        self._dirty[draft, number] = None
        self._dirty.move_to_end((draft, number))
        self.changed()

    def unused(self, draft: LargeDraft, number: int) -> None:
        del self._dirty[draft, number]

    def changed(self) -> None:
        event, self._changed = self._changed, trio.Event()
        event.set()

    async def wait(self) -> None:
        """Until something of all this has changed. Raises NoSpace, DeviceFailed while the device refuses writes."""
        trouble = self.nvme.log.trouble
        if trouble is not None:
            raise type(trouble)(str(trouble))
        with trio.move_on_after(limits.DEVICE_RETRY_S):
            await self._changed.wait()
