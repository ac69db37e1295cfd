"""Stores of blocks out of a paged cache on a CUDA device, which no thread of the engine waits for.

Responsibility: copy blocks into registered memory on a stream of this object's own, and keep them there until they are
in the store.

Invariants:
- What the engine's stream was given before `copy` has ended when the copies begin; what it is given from then on begins
  when they have ended. So the engine may reuse the blocks as soon as `copy` returns, though nothing is copied yet.
- Where `copy` raises, nothing is copied any more.
- A slot of registered memory is used again after it was given back, which is after its copy has ended.

Memory: CONNECTOR_STAGING_BUFFERS at first, further buffers when blocks find no slot, kept for the next step that is as
large. How many blocks are on their way at once bounds it, and is the caller's to bound.

Concurrency: `copy` and `close` are called by the engine's thread, which computes on one stream; an `Outgoing` belongs
to whoever stores its blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from kvfs._native.cuda.copies import Copier, DevicePlaces
from kvfs._native.cuda.driver import Context, Event
from kvfs._native.cuda.images import kernel_image
from kvfs.connectors.device.buffers import Buffer, buffer_bytes
from kvfs.errors import InvalidRequest, KvfsError
from kvfs.limits import CONNECTOR_STAGING_BUFFERS


@dataclass(frozen=True, slots=True)
class _Slot:
    """Registered memory of one block."""

    address: int
    """Where the device sees it."""
    memory: memoryview


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Blocks on their way out of a device."""

    _slots: list[_Slot]
    _block_bytes: int
    _copied: Event
    _free: deque[_Slot]

    def wait(self) -> list[memoryview]:
        """Wait until the blocks are copied; return them. Raises what went wrong on the device."""
        self._copied.synchronize()
        return [slot.memory[: self._block_bytes] for slot in self._slots]

    def give_back(self) -> None:
        """Leave the memory to other blocks: after `wait`, once nobody reads it any more."""
        self._free.extend(self._slots)


class DeviceStores:
    """Copy blocks out of the caches of one device."""

    def __init__(self, context: Context, block_bytes: int, compute_stream: Callable[[], int]) -> None:
        """Register memory for blocks of up to `block_bytes`. `compute_stream` returns the driver's handle of the stream
        that the calling thread computes on. Raises what `kvfs.errors.from_cuda` does."""
        self._context, self._compute_stream = context, compute_stream
        self.slot_bytes = block_bytes
        """Memory that a block takes, also one that is smaller."""
        self._copier, self._stream = Copier(context, kernel_image("copy")), context.stream()
        self._before = context.event()
        self._buffers: list[Buffer] = []
        self._free: deque[_Slot] = deque()
        for _ in range(CONNECTOR_STAGING_BUFFERS):
            self._add_buffer()

    def close(self) -> None:
        """Give the memory back, once what is on its way has ended. Closing twice is harmless."""
        with suppress(KvfsError):  # a lost context has given all back, and so has who closed before
            self._stream.synchronize()
            self._copier.close()
            for buffer in self._buffers:
                buffer.close()
            self._before.destroy()
            self._stream.destroy()

    def copy(self, places: DevicePlaces) -> Outgoing:
        """Begin to copy blocks, between what the engine's stream was given and what it is given next.

        Waits where sixteen launches of the copier are under way. Raises what `kvfs.errors.from_cuda` does, and OSError
        where there is no memory; the engine's stream waits for nothing then.
        """
        if places.block_bytes > self.slot_bytes:
            raise InvalidRequest(f"blocks of {places.block_bytes} bytes: there is room for {self.slot_bytes}")
        slots = self._take(len(places))
        try:
            return Outgoing(slots, places.block_bytes, self._start(places, slots), self._free)
        except BaseException:
            self._free.extend(slots)
            raise

    def _take(self, count: int) -> list[_Slot]:
        while len(self._free) < count:  # only this thread takes some
            self._add_buffer()
        return [self._free.pop() for _ in range(count)]

    def _add_buffer(self) -> None:
        buffer = Buffer(self._context, buffer_bytes(self.slot_bytes))
        self._buffers.append(buffer)
        address, size_bytes = buffer.region
        memory = memoryview(buffer.pages)
        for at in range(0, size_bytes - self.slot_bytes + 1, self.slot_bytes):
            self._free.append(_Slot(address + at, memory[at : at + self.slot_bytes]))

    def _start(self, places: DevicePlaces, slots: list[_Slot]) -> Event:
        """Start the copies, and have the engine's stream wait for their end, which is returned."""
        targets = [slot.address for slot in slots]
        plan = places.store_plan(targets, [buffer.region for buffer in self._buffers])
        compute = self._context.borrow_stream(self._compute_stream())
        copied = self._context.event(sleeps=True)  # who waits for it may wait for a whole step
        self._before.record(compute)
        self._copier.start(plan, self._stream, copied, self._before)
        try:
            compute.wait(copied)
        except KvfsError:
            with suppress(KvfsError):  # a lost context copies nothing more
                copied.synchronize()
            raise
        return copied
