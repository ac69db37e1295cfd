"""Operations in trio's worker threads, wherever io_uring is not allowed.

Responsibility: whole reads and writes by system calls. Concurrency: called on the trio thread; each operation has a
thread of its own while it runs.
"""

from __future__ import annotations

import errno
import os
from functools import partial

from kvfs import limits
from kvfs._native.shared import slots
from kvfs.errors import Corrupt, DeviceFailed, from_device_errno
from tiers.device.files import FileDevice
from tiers.device.watched import Operation


def thread_device(depth: int = limits.DEVICE_DEPTH, *, has_deadlines: bool = True) -> FileDevice:
    """Make a device over worker threads."""
    return FileDevice(ThreadOperations, depth, has_deadlines=has_deadlines)


class ThreadOperations:
    """Implements `Operations` by system calls in trio's worker threads."""

    backend = "threads"

    def __init__(self, depth: int) -> None:
        """Need nothing: as many threads are used as operations run."""

    def add_buffer(self, view: memoryview) -> None:
        """Do nothing: any memory is as good."""

    def begin_read(self, operation: Operation, payload_bytes: int) -> None:
        what, fd, offset, into = operation.what, operation.fd, operation.offset, operation.memory
        operation.run_in_thread(partial(_read_all, fd, offset, into, payload_bytes, what))

    def begin_write(self, operation: Operation) -> None:
        what, fd, offset, data = operation.what, operation.fd, operation.offset, operation.memory
        operation.run_in_thread(partial(_write_all, fd, offset, data, what))

    def begin_sync(self, operation: Operation) -> None:
        operation.run_in_thread(partial(_sync_data, operation.fd, operation.what))

    async def release(self) -> None:
        """Do nothing: a call that does not end keeps its thread."""


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


def _write_all(fd: int, offset: int, data: memoryview, what: str) -> int:
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
    return 0


def _sync_data(fd: int, what: str) -> int:
    try:
        os.fdatasync(fd)
    except OSError as error:
        raise from_device_errno(error.errno or errno.EIO, what) from error
    return 0
