"""Copies from and to slots of the device's own memory, with the checksum of each slot.

Responsibility: start a plan, if there is one, and the kernel that hashes the slots behind it; wait for both.

Invariants: everything that a call has started has ended when it returns or raises.
Concurrency: any thread; a call holds a row of columns for itself, and the lock of the copier only to start.
"""

from __future__ import annotations

import mmap
import queue
import threading
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvfs._native.cuda.copies import Copier, Plan
from kvfs._native.cuda.driver import Context, Event, Stream
from kvfs._native.cuda.images import CHECKSUM_THREADS, kernel_image
from kvfs.connectors.device.buffers import Buffer
from kvfs.limits import CONNECTOR_SLOTS

LEAST_BYTES = 241
"""Of what the kernel hashes."""


class _Columns:
    """Addresses, sizes and checksums in memory that the device reads and writes, and the end of what does."""

    def __init__(self, context: Context) -> None:
        column_bytes = 8 * CONNECTOR_SLOTS
        self._buffer = Buffer(context, -(-3 * column_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        numbers = memoryview(self._buffer.pages).cast("Q")
        self.slots, self.sizes, self.checksums = (
            numbers[CONNECTOR_SLOTS * column : CONNECTOR_SLOTS * (column + 1)] for column in range(3)
        )
        self.addresses = [self._buffer.region[0] + column_bytes * column for column in range(3)]
        """Where the device sees these columns."""
        self.done = context.event(sleeps=True)  # who waits for it may wait for a whole step

    def close(self) -> None:
        self._buffer.close()
        self.done.destroy()


class SlotCopies:
    """See the module's header."""

    def __init__(self, context: Context, copier: Copier, starting: threading.Lock) -> None:
        """Take the copier and the lock that guards it. Raises what `kvfs.errors.from_cuda` does."""
        self.context, self._copier, self._starting = context, copier, starting
        self._module = context.load_module(kernel_image("xxh3"))
        self._free: queue.SimpleQueue[_Columns] = queue.SimpleQueue()

    def run(
        self,
        plan: Plan,
        slots: Sequence[tuple[int, int]],
        stream: Stream,
        after: Event | None,
        *,
        within: bool,
    ) -> list[int]:
        """Copy, behind `after`, and return the XXH3-64 of slots (address, bytes; at most CONNECTOR_SLOTS) as they are
        then. `within`: the copies stay on the device. Raises what `kvfs.errors.from_cuda` does."""
        return self._hash(
            slots,
            stream,
            lambda done: self._copier.start(plan, stream, done, after, within_device=within),
        )

    def checksums(self, slots: Sequence[tuple[int, int]], stream: Stream) -> list[int]:
        """Return the XXH3-64 of slots (address, bytes; at most CONNECTOR_SLOTS) as they are. Raises what
        `kvfs.errors.from_cuda` does."""
        return self._hash(slots, stream, lambda done: None)

    def _hash(
        self, slots: Sequence[tuple[int, int]], stream: Stream, start: Callable[[Event], None]
    ) -> list[int]:
        """Hash slots behind what `start` starts on the stream."""
        columns = self._take()
        try:
            count = len(slots)
            columns.slots[:count] = array("Q", [address for address, _ in slots])
            columns.sizes[:count] = array("Q", [size for _, size in slots])
            try:
                with self._starting:
                    start(columns.done)
                    self._module.launch("kvfs_xxh3", stream, count, CHECKSUM_THREADS, columns.addresses)
                    columns.done.record(stream)
            finally:
                columns.done.synchronize()
            return columns.checksums[:count].tolist()
        finally:
            self._free.put(columns)

    def _take(self) -> _Columns:
        """Take columns; there are as many as threads that copied at once."""
        with suppress(queue.Empty):
            return self._free.get_nowait()
        return _Columns(self.context)

    def close(self) -> None:
        """Give everything back; no call is under way any more."""
        with suppress(queue.Empty):
            while True:
                self._free.get_nowait().close()
        self._module.unload()
