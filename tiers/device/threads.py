"""Operations in trio's worker threads, wherever io_uring is not allowed.

Responsibility: whole reads and writes by system calls. Concurrency: called on the trio thread; no more threads than
the device's depth.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import trio

from kvfs import limits
from kvfs._native.shared import slots
from kvfs.errors import Corrupt, DeviceFailed, from_device_errno
from tiers.device.files import FileDevice

T = TypeVar("T")


def thread_device(depth: int = limits.DEVICE_DEPTH) -> FileDevice:
    """Make a device over worker threads."""
    return FileDevice(ThreadOperations, depth)


class ThreadOperations:
    """Makes system calls in trio's worker threads."""

    backend = "threads"

    def __init__(self, depth: int) -> None:
        self._threads = trio.CapacityLimiter(depth)
        self._running: set[trio.CancelScope] = set()

    def add_buffer(self, view: memoryview) -> None:
        """Do nothing: any memory is as good."""

    async def read(self, fd: int, offset: int, into: memoryview, payload_bytes: int, what: str) -> int:
        return await self._run(partial(_read_all, fd, offset, into, payload_bytes, what))

    async def write(self, fd: int, offset: int, data: memoryview, what: str) -> None:
        await self._run(partial(_write_all, fd, offset, data, what))

    async def sync(self, fd: int, what: str) -> None:
        await self._run(partial(_sync_data, fd, what))

    async def _run(self, call: Callable[[], T]) -> T:
        """Call in a thread; only `release` abandons one, and only one that does not end."""
        with trio.CancelScope(shield=True) as scope:
            self._running.add(scope)
            try:
                return await trio.to_thread.run_sync(call, limiter=self._threads, abandon_on_cancel=True)
            finally:
                self._running.discard(scope)
        raise DeviceFailed("the device was closed before the operation ended")

    async def release(self, ended: bool) -> bool:
        for scope in self._running:
            scope.cancel()
        return ended


# Views are released here: an exception's traceback would keep them, and the caller could not unmap its memory.
def _read_all(fd: int, offset: int, into: memoryview, payload_bytes: int, what: str) -> int:
    done = 0
    with into.cast("B") as flat:
        while done < flat.nbytes:
            try:
                with flat[done:] as rest:
                    count = os.preadv(fd, [rest], offset + done)
            except OSError as error:
                raise from_device_errno(error.errno or errno.EIO, what) from error
            if count == 0:
                raise Corrupt(f"{what}: the file ends at {offset + done}")
            done += count
        with flat[:payload_bytes] as payload:
            return slots.xxh3_64(payload)


def _write_all(fd: int, offset: int, data: memoryview, what: str) -> None:
    done = 0
    with data.cast("B") as flat:
        while done < flat.nbytes:
            try:
                with flat[done:] as rest:
                    count = os.pwritev(fd, [rest], offset + done)
            except OSError as error:
                raise from_device_errno(error.errno or errno.EIO, what) from error
            if count == 0:
                raise DeviceFailed(f"{what}: the device takes no more after {done} bytes")
            done += count


def _sync_data(fd: int, what: str) -> None:
    try:
        os.fdatasync(fd)
    except OSError as error:
        raise from_device_errno(error.errno or errno.EIO, what) from error
