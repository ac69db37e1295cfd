"""Operations over io_uring: requests go to the native ring, and one task ends their operations.

Responsibility: the trio side of `kvfs._native.device.uring`.

Invariants: an operation is in `_waiting` from its submit until its result is reaped: the kernel uses its memory until
then. How long that takes is the device's to say: a request that a driver has taken is not returned
(IORING_OP_ASYNC_CANCEL ends only what the kernel still queues), and ends with the driver's own timeout
(`nvme_core.io_timeout`). Who waits for it meanwhile is told by `tiers.device.watched`.
Concurrency: the trio thread. The reaper is a system task, started by the first operation; it waits for the
ring's descriptor and ends in `aclose`.
"""

from __future__ import annotations

import errno

import trio

from kvfs import limits
from kvfs._native.device.uring import Ring
from kvfs.errors import Corrupt, from_device_errno
from tiers.device.files import FileDevice
from tiers.device.watched import Operation


def uring_device(depth: int = limits.DEVICE_DEPTH, *, has_deadlines: bool = True) -> FileDevice:
    """Make a device over io_uring. Raises DeviceMissing where it is not built in or not allowed."""
    return FileDevice(RingOperations, depth, has_deadlines=has_deadlines)


class RingOperations:
    """Implements `Operations` by requests to one native ring."""

    backend = "io_uring"

    def __init__(self, depth: int) -> None:
        """Make a ring. Raises DeviceMissing where io_uring is not built in or not allowed."""
        self._ring = Ring(depth, limits.DEVICE_BUFFERS)
        self._waiting: dict[int, Operation] = {}
        self._reaping = False

    @property
    def registered_buffers(self) -> int:
        """Return how many buffers have pinned pages: as many as are in use, or fewer under RLIMIT_MEMLOCK."""
        return self._ring.registered_buffers

    def add_buffer(self, view: memoryview) -> None:
        """Register a buffer."""
        self._ring.add_buffer(view)

    def begin_read(self, operation: Operation, payload_bytes: int) -> None:
        request = self._ring.submit_read(operation.fd, operation.offset, operation.memory, payload_bytes)
        self._began(request, operation)

    def begin_write(self, operation: Operation) -> None:
        self._began(self._ring.submit_write(operation.fd, operation.offset, operation.memory), operation)

    def begin_sync(self, operation: Operation) -> None:
        self._began(self._ring.submit_sync(operation.fd), operation)

    def _began(self, request: int, operation: Operation) -> None:
        self._waiting[request] = operation
        if not self._reaping:
            self._reaping = True
            trio.lowlevel.spawn_system_task(self._reap)

    async def _reap(self) -> None:
        try:
            while True:
                await trio.lowlevel.wait_readable(self._ring.fileno())
                self._end(self._ring.reap())
        except trio.ClosedResourceError:
            pass

    def _end(self, ended: list[tuple[int, int, int, int]]) -> None:
        for request, error, moved, checksum in ended:
            operation = self._waiting.pop(request)
            if not error:
                operation.end(checksum)
            elif error == errno.ENODATA:
                operation.end(Corrupt(f"{operation.what}: the file ends at {operation.offset + moved}"))
            else:
                operation.end(from_device_errno(error, operation.what))

    async def release(self) -> None:
        trio.lowlevel.notify_closing(self._ring.fileno())
        self._end(await trio.to_thread.run_sync(self._ring.close, limits.DEVICE_CANCEL_WAIT_S))
