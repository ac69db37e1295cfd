"""Operations over io_uring: requests go to the native ring, and one task wakes their callers.

Responsibility: the trio side of `kvfs._native.device.uring`.

Invariants: a caller is in `_waiting` from its submit until its result is reaped, and cannot be cancelled there: the
kernel writes to its memory until then. How long that takes is the device's to say: a request that a driver has taken is
not returned (IORING_OP_ASYNC_CANCEL ends only what the kernel still queues), and ends with the driver's own timeout
(`nvme_core.io_timeout`). A stop of the service that takes longer than limits.STOP_WAIT_S is ended by its watchdog.
Concurrency: the trio thread. The reaper is a system task, started by the first operation; it waits for the
ring's descriptor and ends in `aclose`.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import NamedTuple

import trio

from kvfs import limits
from kvfs._native.device.uring import Ring
from kvfs.errors import Corrupt, DeviceFailed, from_device_errno
from tiers.device.files import FileDevice


class _Result(NamedTuple):
    error: int
    moved: int
    checksum: int


@dataclass(slots=True)
class _Caller:
    task: trio.lowlevel.Task
    result: _Result | None = None


def uring_device(depth: int = limits.DEVICE_DEPTH) -> FileDevice:
    """Make a device over io_uring. Raises DeviceMissing where it is not built in or not allowed."""
    return FileDevice(RingOperations, depth)


class RingOperations:
    """Submits requests to one native ring."""

    backend = "io_uring"

    def __init__(self, depth: int) -> None:
        """Make a ring. Raises DeviceMissing where io_uring is not built in or not allowed."""
        self._ring = Ring(depth, limits.DEVICE_BUFFERS)
        self._waiting: dict[int, _Caller] = {}
        self._reaping = False

    @property
    def registered_buffers(self) -> int:
        """Return how many buffers have pinned pages: as many as are in use, or fewer under RLIMIT_MEMLOCK."""
        return self._ring.registered_buffers

    def add_buffer(self, view: memoryview) -> None:
        """Register a buffer."""
        self._ring.add_buffer(view)

    async def read(self, fd: int, offset: int, into: memoryview, payload_bytes: int, what: str) -> int:
        result = await self._ended(self._ring.submit_read(fd, offset, into, payload_bytes))
        if result.error == errno.ENODATA:
            raise Corrupt(f"{what}: the file ends at {offset + result.moved}")
        _check(result, what)
        return result.checksum

    async def write(self, fd: int, offset: int, data: memoryview, what: str) -> None:
        _check(await self._ended(self._ring.submit_write(fd, offset, data)), what)

    async def sync(self, fd: int, what: str) -> None:
        _check(await self._ended(self._ring.submit_sync(fd)), what)

    async def _ended(self, request: int) -> _Result:
        if not self._reaping:
            self._reaping = True
            trio.lowlevel.spawn_system_task(self._reap)
        caller = self._waiting[request] = _Caller(trio.lowlevel.current_task())
        await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
        if caller.result is None:
            raise DeviceFailed("the device was closed before the operation ended")
        return caller.result

    async def _reap(self) -> None:
        try:
            while True:
                await trio.lowlevel.wait_readable(self._ring.fileno())
                self._wake(self._ring.reap())
        except trio.ClosedResourceError:
            pass

    def _wake(self, ended: list[tuple[int, int, int, int]]) -> None:
        for request, error, moved, checksum in ended:
            caller = self._waiting.pop(request)
            caller.result = _Result(error, moved, checksum)
            trio.lowlevel.reschedule(caller.task)

    async def release(self, ended: bool) -> bool:
        trio.lowlevel.notify_closing(self._ring.fileno())
        self._wake(await trio.to_thread.run_sync(self._ring.close, limits.DEVICE_CANCEL_WAIT_S))
        left = list(self._waiting.values())
        self._waiting.clear()
        for caller in left:
            trio.lowlevel.reschedule(caller.task)
        return not left


def _check(result: _Result, what: str) -> None:
    if result.error:
        raise from_device_errno(result.error, what)
