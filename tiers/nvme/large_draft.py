"""A draft that is written extent by extent to NVMe, since it may be larger than DRAM takes.

Responsibility: extents that go to the log as they fill: written anywhere, truncated, read back, made durable. Names are
the store's; which extents lie where is `tiers.nvme.tier`'s.

Invariants:
- An extent of a draft is, in this order: in a buffer that can be written (`dirty`); in one that waits for the log;
  on the device; in the sealed object that the draft rewrites (`base`), up to `base_bytes`; zeros.
- What a draft is going to write is promised in the tier first, so that a full tier shows at `write`.
- Only the newest version of an extent counts, however late an older one is written.
- Nothing of a draft counts after a restart without a META, and that is queued only once every extent is written.
- A draft and its base are held in the tier (`NvmeTier.hold`) until they are closed.

Concurrency: the service's trio thread. A draft's operations follow one another (its lock), and no draft is sealed
while one of them runs or waits. `write`, `truncate` and `flush` wait for the device; what the log reports comes in
between.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

import trio

from kvfs import limits
from kvfs.errors import KvfsError, ObjectTooLarge, Superseded
from kvfs.formats import EndingKind, RecordType
from tiers.log.entries import Location, Record
from tiers.model.tier import object_key
from tiers.nvme.large_buffers import BasePayload, Buffer, BufferPayload, LargeBuffers, spans
from tiers.nvme.stored import GuardedPayload, Piece, Stored, data_header


@dataclass(slots=True, eq=False)
class _Queued:
    """Describes one version of an extent that waits for the log."""

    buffer: Buffer | None
    promised_bytes: int
    pending: bool = True


@dataclass(slots=True, eq=False)
class _Times:
    atime_ns: int
    mtime_ns: int
    ctime_ns: int


class LargeDraft:
    """See the module's header. Made by `LargeObjects.begin`."""

    def __init__(
        self, buffers: LargeBuffers, object_id: int, bucket_id: int, uid: int, base: Stored | None
    ) -> None:
        self._buffers = buffers
        self._nvme = buffers.nvme
        self._extent_bytes = buffers.extent_bytes
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
        buffers.opened(1)
        self._lock = trio.Lock()
        self._dirty: dict[int, Buffer] = {}
        self._queued: dict[int, _Queued] = {}
        """The newest version of each extent that waits for the log."""
        self._waiting = 0
        """Records of all versions that wait."""
        self._versions: dict[int, _Queued] = {}
        self._submitted: set[int] = set()
        """Extents that the log was given before: what is submitted now takes the place of that."""
        self._is_rewritten = False
        """Whether an extent was submitted twice, and its earlier version may not have ended yet."""
        self._closed = False
        self.sealed = False
        """Set by the store: from then on the object is its own."""
        self.persisted_bytes: int | None = None
        """Set by the store: the log has a META, and so the file would be there after a crash, with this size."""
        self.error: KvfsError | None = None
        """Why an extent could not be written: the draft will never be sealed."""
        now = time.time_ns()
        self.times = _Times(now, now, now)

    @property
    def object_id(self) -> int:
        """Return the id that the object has once it is sealed."""
        return self.stored.object_id

    @property
    def size_bytes(self) -> int:
        """Return the size as it is now."""
        return self.stored.size_bytes

    @property
    def is_written(self) -> bool:
        """Return whether the whole draft is in the log and nobody changes it, so that it can be sealed."""
        if self._lock.locked() or self.error or self._is_rewritten:
            return False
        return not (self._dirty or self._waiting) and self.stored.readable

    def check(self) -> None:
        """Check that the draft can be written. Raises what made it fail; Superseded once it is sealed or closed."""
        if self.error is not None:
            raise type(self.error)(str(self.error))
        if self._closed or self.sealed or self.stored.dropped:
            raise Superseded(f"draft {self.object_id} is no more")

    async def write(self, offset: int, data: bytes) -> int:
        """Put bytes anywhere; return their count. Raises ObjectTooLarge; NoSpace, DeviceFailed (a part may be
        written)."""
        self._check_size(offset + len(data))
        view = memoryview(data)
        async with self._lock:
            self.check()
            done = 0
            for number, start, count in spans(offset, len(data), self._extent_bytes):
                buffer = await self._writable(number, whole=start == 0 and count >= self._length(number))
                buffer.put(start, view[done : done + count])
                done += count
                if offset + done > self.size_bytes:
                    self._nvme.resize(self.stored, offset + done)
                if start + count == self._extent_bytes:
                    self.write_out(number)
            self.touch()
        return len(data)

    def _check_size(self, size_bytes: int) -> None:
        largest = self._nvme.largest_object_bytes
        if size_bytes > largest:
            raise ObjectTooLarge(f"{size_bytes} bytes: the limit is {largest}, half of the NVMe tier")

    def touch(self) -> None:
        """Note that the bytes changed."""
        self.times.mtime_ns = self.times.ctime_ns = time.time_ns()

    async def read(self, offset: int, size: int) -> bytes:
        """Return a range as it is now, short only at the end. Raises as `LargeReader.read`."""
        async with self._lock:
            touched = spans(offset, min(size, self.size_bytes - offset), self._extent_bytes)
            return b"".join([await self._copy(*span) for span in touched])

    async def _copy(self, number: int, start: int, count: int) -> bytes:
        buffer = self._in_memory(number)
        if buffer is not None:
            return buffer.copy(start, count)
        if self.stored.pieces[number] is not None:
            return await self._buffers.cache.copy(self.stored, number, start, count)
        there = min(max(self._base_length(number) - start, 0), count)
        found = b""
        if there:
            assert self._base is not None
            found = await self._buffers.cache.copy(self._base, number, start, there)
        return found + bytes(count - there)

    def _in_memory(self, number: int) -> Buffer | None:
        queued = self._queued.get(number)
        return self._dirty.get(number) or (queued.buffer if queued is not None else None)

    def _base_length(self, number: int) -> int:
        """Return how many bytes the base has of an extent."""
        return min(max(self._base_bytes - number * self._extent_bytes, 0), self._extent_bytes)

    def _length(self, number: int) -> int:
        """Return where an extent's bytes end: zeros follow."""
        buffer = self._in_memory(number)
        if buffer is not None:
            return buffer.used
        if number in self._queued:  # a hole, or a copy of the base
            return self._base_length(number)
        piece = self.stored.pieces[number] if number < len(self.stored.pieces) else None
        return self._base_length(number) if piece is None else piece.payload_bytes

    async def _writable(self, number: int, *, whole: bool) -> Buffer:
        """Return the extent's dirty buffer, with the bytes so far, unless all of them are to be replaced (`whole`)."""
        found = self._dirty.get(number)
        if found is not None:
            self._buffers.used(self, number)
            return found
        promised = self._nvme.record_bytes(self._extent_bytes)
        self._nvme.promise(promised)
        with ExitStack() as undo:
            undo.callback(self._nvme.promise, -promised)
            buffer = Buffer(await self._buffers.take())
            undo.callback(self._buffers.give, buffer.view)
            self.check()
            length = 0 if whole else self._length(number)
            if length:
                buffer.view[:length] = await self._copy(number, 0, length)
                buffer.used = length
            undo.pop_all()
        self._dirty[number] = buffer
        self._buffers.used(self, number)
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
            self._nvme.set_piece(self.stored, 0, None)
        self._base_bytes = min(self._base_bytes, size_bytes)

    def _drop_dirty(self, number: int) -> None:
        self._buffers.give(self._dirty.pop(number).view)
        self._buffers.unused(self, number)
        self._nvme.promise(-self._nvme.record_bytes(self._extent_bytes))

    def write_out(self, number: int) -> None:
        """Queue a dirty extent for the log: its buffer is free once it is written."""
        buffer = self._dirty.pop(number)
        self._buffers.unused(self, number)
        payload = BufferPayload(self._nvme, buffer, buffer.used)
        self._submit(number, payload, _Queued(buffer, self._nvme.record_bytes(self._extent_bytes)))

    def _submit(self, number: int, payload: BufferPayload | BasePayload, queued: _Queued) -> None:
        self._versions[number] = self._queued[number] = queued
        self._waiting += 1

        def written(location: Location, record_bytes: int, checksum: int) -> None:
            piece = Piece(*location, record_bytes, payload.size_bytes, checksum)
            if isinstance(payload, BufferPayload):
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
                payload=GuardedPayload(self.stored, payload) if payload.size_bytes else None,
                written=written,
                lost=lost,
                is_essential=lambda: self._nvme.buckets.is_durable(self.stored.bucket_id),
                ends=EndingKind.EXTENT if number in self._submitted else None,
                first_sequence=self.stored.first_sequence,
            )
        )
        self._is_rewritten |= number in self._submitted
        self._submitted.add(number)

    def _end(self, number: int, queued: _Queued) -> None:
        """End the wait of one version; a second time, after a failed sync, there is nothing left to do."""
        if not queued.pending:
            return
        queued.pending = False
        self._waiting -= 1
        self._nvme.promise(-queued.promised_bytes)
        if queued.buffer is not None:
            self._buffers.give(queued.buffer.view)
            queued.buffer = None
        if self._queued.get(number) is queued:
            del self._queued[number]
        self._buffers.changed()

    @asynccontextmanager
    async def settled(self) -> AsyncIterator[None]:
        """Write all of the draft, as `flush` does, and keep it as it is within the block."""
        async with self._lock:
            self.check()
            for number in sorted(self._dirty):
                self.write_out(number)
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
        """Wait until the whole draft is in the log, though not yet durable. Raises NoSpace, DeviceFailed."""
        async with self.settled():
            pass

    def _fill(self, number: int) -> None:
        """Queue an extent that was never written: the base's, or a hole."""
        length = self._base_length(number)
        promised = self._nvme.record_bytes(length)
        self._nvme.promise(promised)
        payload: BufferPayload | BasePayload = BufferPayload(self._nvme, None, 0)
        if length:
            assert self._base is not None
            payload = BasePayload(self._buffers.cache, self._base, number, length)
        self._submit(number, payload, _Queued(None, promised))

    async def _wait(self, most: int) -> None:
        """Wait until no more than `most` records wait."""
        while self._waiting > most:
            self.check()
            await self._buffers.wait()
        self.check()

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
        if self._base is not None:
            self._nvme.release(self._base)
            self._base = None
        self._buffers.opened(-1)
