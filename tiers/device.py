"""The seam between the store and the files of a storage device.

Responsibility: say what a device promises (`Device`), and open the one that this machine allows: io_uring, or
threads. `tests/conformance/device_suite.py` runs over every implementation.

Invariants (each has a conformance test):
- An operation moves all of its bytes or raises. A read that meets the end of the file raises `Corrupt`.
- A read never returns without the XXH3-64 of its payload, computed without the GIL.
- A cancelled caller waits, shielded, until the kernel is done with its buffer: an operation cannot be taken
  back, and a buffer that is reused under it would be written by the device.
- After `aclose` every call raises `DeviceFailed`.

Concurrency: one trio thread calls; `open_file`, `close_file` and `discard` hold it for as long as they take.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import trio

from kvfs import limits
from kvfs._native import slots
from kvfs.errors import Corrupt, DeviceFailed, DeviceMissing, from_device_errno
from tiers.device_base import FileDevice
from tiers.device_uring import UringDevice

T = TypeVar("T")
Kind = Literal["auto", "io_uring", "threads"]

_log = logging.getLogger("kvfs.device")


class Device(Protocol):
    """Files of one storage device, read and written around the page cache.

    Offsets, lengths and addresses on a direct descriptor are multiples of limits.DEVICE_ALIGNMENT_BYTES; others
    raise InvalidRequest or pass, as the device has it. Any descriptor will do for `read` and `write`, such as one
    of a slot on a tmpfs; on ordinary ones every alignment works. Memory that is a mapping has its pages (a sparse
    mapping of a full tmpfs fails the read with DeviceFailed).
    """

    @property
    def backend(self) -> str:
        """ "io_uring" or "threads"."""

    @property
    def depth(self) -> int:
        """Most operations in flight; further ones wait their turn, first come first served."""

    @property
    def direct(self) -> bool:
        """False once a file was opened whose filesystem has no O_DIRECT."""

    def open_file(self, path: Path, size_bytes: int, *, create: bool) -> int:
        """A read-write descriptor, direct where the filesystem allows it.

        create: makes the file, which must not exist, with all its `size_bytes` allocated, and syncs it and its
        directory; a failure leaves no file. Raises NoSpace, NotFound, Exists, DeviceFailed.
        """

    def close_file(self, fd: int) -> None:
        """Close a descriptor of `open_file` that no operation uses. Raises InvalidRequest for another."""

    def discard(self, fd: int, offset: int, length: int) -> None:
        """Tell the device that these bytes are not needed; they read as zeros and stay allocated. Best effort."""

    async def read(
        self,
        fd: int,
        offset: int,
        into: memoryview,
        *,
        checksum: int | None = None,
        payload_bytes: int | None = None,
    ) -> int:
        """Fill `into` and return the XXH3-64 of its first `payload_bytes` (default: of all).

        Raises Corrupt where the file ends before, or where `checksum` is given and differs; DeviceFailed.
        """

    async def write(self, fd: int, offset: int, data: memoryview) -> None:
        """Write all of `data`; durable after the next `sync`. Raises NoSpace, DeviceFailed."""

    async def sync(self, fd: int) -> None:
        """fdatasync(2): what was written before is durable. Raises NoSpace, DeviceFailed.

        After a failure the kernel may have dropped what was written, and a second sync may succeed without it.
        """

    def buffer(self) -> AbstractAsyncContextManager[memoryview]:
        """One of limits.DEVICE_BUFFERS buffers of limits.DEVICE_BUFFER_BYTES, aligned; waits until one is free.

        Its bytes are what the last user left there.
        """

    async def aclose(self) -> None:
        """Wait for the operations in flight, at most limits.DEVICE_CLOSE_WAIT_S; close what is still open.

        Callers whose operation has not ended by then get DeviceFailed, and its file and memory are left behind.
        """


class ThreadDevice(FileDevice):
    """System calls in trio's worker threads, wherever io_uring is not allowed."""

    backend = "threads"

    def __init__(self, depth: int = limits.DEVICE_DEPTH) -> None:
        super().__init__(depth)
        self._threads = trio.CapacityLimiter(depth)
        self._running: set[trio.CancelScope] = set()

    async def _read(self, fd: int, offset: int, into: memoryview, payload_bytes: int, what: str) -> int:
        return await self._run(partial(_read_all, fd, offset, into, payload_bytes, what))

    async def _write(self, fd: int, offset: int, data: memoryview, what: str) -> None:
        await self._run(partial(_write_all, fd, offset, data, what))

    async def _sync(self, fd: int, what: str) -> None:
        await self._run(partial(_sync_data, fd, what))

    async def _run(self, call: Callable[[], T]) -> T:
        """Only `aclose` gives up on a thread, and only one that does not end."""
        with trio.CancelScope(shield=True) as scope:
            self._running.add(scope)
            try:
                return await trio.to_thread.run_sync(call, limiter=self._threads, abandon_on_cancel=True)
            finally:
                self._running.discard(scope)
        raise DeviceFailed("the device was closed before the operation ended")

    async def _release(self, ended: bool) -> bool:
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


def open_device(kind: Kind = "auto", depth: int = limits.DEVICE_DEPTH) -> Device:
    """The device backend of this machine. Raises DeviceMissing where `kind` is "io_uring" and it is not allowed."""
    if kind != "threads":
        try:
            return UringDevice(depth)
        except DeviceMissing as error:
            if kind == "io_uring":
                raise
            _log.warning("%s; this device is driven by threads instead", error)
    return ThreadDevice(depth)
