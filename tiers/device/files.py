"""Files of a device, its pool of buffers, how many operations run at once, checked arguments and the close.

Responsibility: everything of the `Device` protocol but moving bytes, which is its `Operations`'.

Invariants: a descriptor is written through the page cache only where its filesystem has no O_DIRECT, and
`direct` says so. At most `depth` operations run at once, and none after `aclose`. A buffer is
never handed out twice, nor freed while an operation that was started on it may still run.

Concurrency: the trio thread; `Operations` say where they run. Only the async calls await.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Protocol

import trio

from kvfs import limits
from kvfs.errors import Corrupt, DeviceFailed, InvalidRequest, from_device_errno

_PUNCH_HOLE, _KEEP_SIZE = 2, 1
_MODE: Final = 0o600

_log = logging.getLogger("kvfs.device")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Operations(Protocol):
    """Moves bytes of files, for one device."""

    backend: str

    def add_buffer(self, view: memoryview) -> None:
        """Prepare memory that many operations will use."""
        ...

    async def read(self, fd: int, offset: int, into: memoryview, payload_bytes: int, what: str) -> int:
        """Fill `into`; return the XXH3-64 of its first `payload_bytes`. Ends only when the kernel is done with it."""
        ...

    async def write(self, fd: int, offset: int, data: memoryview, what: str) -> None:
        """Write all of `data`."""
        ...

    async def sync(self, fd: int, what: str) -> None:
        """Make what was written durable."""
        ...

    async def release(self, ended: bool) -> bool:
        """Release what operations run on; return whether none still runs. Where not all have `ended`, callers of the
        others get DeviceFailed."""
        ...


class FileDevice:
    """Implements `Device` over files, by some `Operations`."""

    def __init__(self, make_operations: Callable[[int], Operations], depth: int) -> None:
        if not 1 <= depth <= limits.DEVICE_DEPTH:
            raise InvalidRequest(f"device depth {depth}: must be 1 to {limits.DEVICE_DEPTH}")
        self.depth = depth
        self.operations = make_operations(depth)
        self._direct = True
        self._closed = False
        self._paths: dict[int, Path] = {}
        self._limit = trio.Semaphore(depth, max_value=depth)
        self._buffer_limit = trio.Semaphore(limits.DEVICE_BUFFERS, max_value=limits.DEVICE_BUFFERS)
        self._free_buffers: list[memoryview] = []

    @property
    def backend(self) -> str:
        return self.operations.backend

    @property
    def direct(self) -> bool:
        return self._direct

    def open_file(self, path: Path, size_bytes: int, *, create: bool) -> int:
        self._check_open()
        try:
            if create:
                _create(path, size_bytes)
            descriptor, direct = _open_direct(path)
        except OSError as error:
            raise from_device_errno(error.errno or errno.EIO, f"open {path}") from error
        if not direct and self._direct:
            _log.warning("%s: this filesystem has no O_DIRECT; bytes also pass the page cache", path)
            self._direct = False
        self._paths[descriptor] = path
        return descriptor

    def close_file(self, fd: int) -> None:
        if self._paths.pop(fd, None) is None:
            raise InvalidRequest(f"descriptor {fd}: this device did not open it")
        os.close(fd)

    def discard(self, fd: int, offset: int, length: int) -> None:
        for mode in (_PUNCH_HOLE | _KEEP_SIZE, 0):
            if _libc.fallocate(fd, mode, offset, length) != 0:
                reason = os.strerror(ctypes.get_errno())
                _log.info("discard %d bytes of %s at %d: %s", length, self._name(fd), offset, reason)
                return

    def _name(self, fd: int) -> str:
        path = self._paths.get(fd)
        return f"descriptor {fd}" if path is None else str(path)

    @asynccontextmanager
    async def buffer(self) -> AsyncIterator[memoryview]:
        self._check_open()
        async with self._buffer_limit:
            self._check_open()
            view = self._free_buffers.pop() if self._free_buffers else self._new_buffer()
            try:
                yield view
            finally:
                self._free_buffers.append(view)

    def _new_buffer(self) -> memoryview:
        """Map a buffer, aligned and zeroed, in huge pages where the system has them.

        256 plain pages are more segments than a virtio drive takes in one request: reads of 1 MiB at depth 8
        ran at 0.73 of fio's rate with plain pages that were not registered, at 1.3 with huge ones that were.
        """
        area = mmap.mmap(-1, limits.DEVICE_BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        area.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(area)
        self.operations.add_buffer(view)
        return view

    async def read(
        self,
        fd: int,
        offset: int,
        into: memoryview,
        *,
        checksum: int | None = None,
        payload_bytes: int | None = None,
    ) -> int:
        what = f"read {into.nbytes} bytes of {self._name(fd)} at {offset}"
        _check_range(what, offset, into)
        payload = into.nbytes if payload_bytes is None else payload_bytes
        if not 0 <= payload <= into.nbytes:
            raise InvalidRequest(f"{what}: a payload of {payload} bytes does not fit")
        if into.readonly:
            raise InvalidRequest(f"{what}: into a read-only buffer")
        async with self._limit:
            self._check_open()
            found = await self.operations.read(fd, offset, into, payload, what)
        if checksum is not None and found != checksum:
            raise Corrupt(f"{what}: checksum {found:016x}, not {checksum:016x}")
        return found

    async def write(self, fd: int, offset: int, data: memoryview) -> None:
        what = f"write {data.nbytes} bytes of {self._name(fd)} at {offset}"
        _check_range(what, offset, data)
        async with self._limit:
            self._check_open()
            await self.operations.write(fd, offset, data, what)

    async def sync(self, fd: int) -> None:
        async with self._limit:
            self._check_open()
            await self.operations.sync(fd, f"sync {self._name(fd)}")

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        with trio.CancelScope(shield=True):
            all_ended = await self.operations.release(await self._end_operations())
        if not all_ended:
            _log.error("operations did not end in time; their files and memory stay")
            return
        for fd in list(self._paths):
            self.close_file(fd)
        self._free_buffers.clear()

    async def _end_operations(self) -> bool:
        """Wait until no operation runs; whoever still waits to begin then gets DeviceFailed."""
        taken = 0
        with trio.move_on_after(limits.DEVICE_CLOSE_WAIT_S):
            while taken < self.depth:
                await self._limit.acquire()
                taken += 1
        for _ in range(taken):
            self._limit.release()
        return taken == self.depth

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceFailed("the device is closed")


def _check_range(what: str, offset: int, view: memoryview) -> None:
    if offset < 0 or view.nbytes > limits.MAX_DEVICE_IO_BYTES or not view.c_contiguous:
        raise InvalidRequest(f"{what}: not a contiguous run of at most {limits.MAX_DEVICE_IO_BYTES} bytes")


def _open_direct(path: Path) -> tuple[int, bool]:
    """Open a file; return the descriptor and whether it is direct. Raises OSError."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags), False


def _create(path: Path, size_bytes: int) -> None:
    """Make a file with all its blocks, durable with its name; nothing stays of a failure. Raises OSError.

    Not through the direct descriptor: where a filesystem has no fallocate, libc writes single bytes instead.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
    try:
        if size_bytes:
            os.posix_fallocate(descriptor, 0, size_bytes)
        os.fsync(descriptor)
        sync_directory(path.parent)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
