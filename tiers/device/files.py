"""Files of a device, its pool of buffers, checked arguments and the close.

Responsibility: everything of the `Device` protocol but moving bytes, which is its `Operations`', and deadlines, which
are its `Watch`'s.

Invariants: a descriptor is written through the page cache only where its filesystem has no O_DIRECT, and
`direct` says so. No operation begins after `aclose`. A buffer is never handed out twice, nor handed out, freed or its
file closed while an operation that was started on it may still run.

Concurrency: the trio thread; `Operations` say where they run. Only the async calls await.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import mmap
import os
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

import trio

from kvfs import limits
from kvfs.errors import Corrupt, DeviceAway, DeviceFailed, InvalidRequest, NoSpace, from_device_errno
from tiers.device.drive import Drive
from tiers.device.watched import Operation, Operations, Watch

_PUNCH_HOLE, _KEEP_SIZE = 2, 1
_MODE: Final = 0o600

_log = logging.getLogger("kvfs.device")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class FileDevice:
    """Implements `Device` over files, by some `Operations`."""

    def __init__(
        self, make_operations: Callable[[int], Operations], depth: int, *, has_deadlines: bool = True
    ) -> None:
        if not 1 <= depth <= limits.DEVICE_DEPTH:
            raise InvalidRequest(f"device depth {depth}: must be 1 to {limits.DEVICE_DEPTH}")
        self.depth = depth
        self.operations = make_operations(depth + 1)  # one for the probe
        self.drive = Drive(self._probe)
        self._watch = Watch(depth, self.drive, self._late_ended)
        self._has_deadlines = has_deadlines
        self._direct = True
        self._closed = False
        self._paths: dict[int, Path] = {}
        self._starts: dict[int, int] = {}
        """Descriptors whose bytes do not begin at the first one of their block device."""
        self._buffer_permits = trio.Semaphore(limits.DEVICE_BUFFERS, max_value=limits.DEVICE_BUFFERS)
        self._free_buffers: list[memoryview] = []
        self._late_buffers: list[memoryview] = []
        """Returned by who used them, not by the device: each keeps its permit."""
        self._late_files: list[int] = []
        """Descriptors to be closed, which an operation still uses."""

    @property
    def backend(self) -> str:
        return self.operations.backend

    @property
    def direct(self) -> bool:
        return self._direct

    @property
    def late_operations(self) -> int:
        return self._watch.late

    def open_file(self, path: Path, start: int = 0, *, exclusive: bool = False) -> int:
        self._check_open()
        try:
            descriptor, direct = _open_direct(path, os.O_EXCL if exclusive else 0)
        except OSError as error:
            raise from_device_errno(error.errno or errno.EIO, f"open {path}") from error
        if not direct and self._direct:
            _log.warning("%s: this filesystem has no O_DIRECT; bytes also pass the page cache", path)
            self._direct = False
        self._paths[descriptor] = path
        if start:
            self._starts[descriptor] = start
        return descriptor

    async def create_file(self, path: Path, size_bytes: int) -> int:
        await self._call(Operation(f"create {path}", -1), partial(_create, path, size_bytes))
        return self.open_file(path)

    async def allocate(self, path: Path, size_bytes: int) -> None:
        await self._call(Operation(f"extend {path}", -1), partial(_allocate, path, size_bytes))

    async def _call(self, operation: Operation, call: Callable[[], None]) -> None:
        """Run a call that may hang in a thread."""

        def mapped() -> int:
            try:
                call()
            except OSError as error:
                raise from_device_errno(error.errno or errno.EIO, operation.what) from error
            return 0

        operation.patience_s = limits.NVME_WRITE_S
        await self._run(operation, lambda operation: operation.run_in_thread(mapped))

    def close_file(self, fd: int) -> None:
        if self._paths.pop(fd, None) is None:
            raise InvalidRequest(f"descriptor {fd}: this device did not open it")
        self._starts.pop(fd, None)
        if self._watch.uses(fd):
            self._late_files.append(fd)
        else:
            os.close(fd)

    def is_changing(self, fd: int) -> bool:
        return self._watch.changes(fd)

    async def discard(self, fd: int, offset: int, length: int) -> None:
        operation = Operation(f"discard {length} bytes of {self._name(fd)} at {offset}", fd, changes=True)
        with suppress(DeviceAway):  # what is late may still come: `is_changing` says so
            await self._call(operation, partial(_discard, fd, self._at(fd, offset), length, operation.what))

    def _name(self, fd: int) -> str:
        path, start = self._paths.get(fd), self._starts.get(fd)
        name = f"descriptor {fd}" if path is None else str(path)
        return name if start is None else f"{name} from {start}"

    def _at(self, fd: int, offset: int) -> int:
        """Return where a byte of what was opened is in its file or block device."""
        return self._starts.get(fd, 0) + offset

    @asynccontextmanager
    async def buffer(self) -> AsyncIterator[memoryview]:
        self._check_open()
        await self.drive.acquire(self._buffer_permits)
        view = None
        try:
            self._check_open()
            view = self._free_buffers.pop() if self._free_buffers else self._new_buffer()
            yield view
        finally:
            if view is None:
                self._buffer_permits.release()
            else:
                self._late_buffers.append(view)
                self._return_buffers()

    def _return_buffers(self) -> None:
        """Lend again what neither its user nor the device uses any more."""
        views, self._late_buffers = self._late_buffers, []
        for view in views:
            if self._watch.has_memory(view):
                self._late_buffers.append(view)
            else:
                self._free_buffers.append(view)
                self._buffer_permits.release()

    def _late_ended(self) -> None:
        """Take back what an operation kept that is over by now."""
        self._return_buffers()
        files, self._late_files = self._late_files, []
        for fd in files:
            if self._watch.uses(fd):
                self._late_files.append(fd)
            else:
                os.close(fd)

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
        operation = Operation(what, fd, self._at(fd, offset), into, patience_s=limits.NVME_READ_S)
        found = await self._run(operation, partial(self.operations.begin_read, payload_bytes=payload))
        if checksum is not None and found != checksum:
            raise Corrupt(f"{what}: checksum {found:016x}, not {checksum:016x}")
        return found

    async def write(self, fd: int, offset: int, data: memoryview) -> None:
        what = f"write {data.nbytes} bytes of {self._name(fd)} at {offset}"
        _check_range(what, offset, data)
        at = self._at(fd, offset)
        operation = Operation(what, fd, at, data, patience_s=limits.NVME_WRITE_S, changes=True)
        try:
            await self._run(operation, self.operations.begin_write)
        except NoSpace as error:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                raise
            raise DeviceFailed(f"{what}: the device ends before") from error

    async def sync(self, fd: int) -> None:
        operation = Operation(f"sync {self._name(fd)}", fd, patience_s=limits.NVME_WRITE_S)
        await self._run(operation, self.operations.begin_sync)

    async def _run(self, operation: Operation, begin: Callable[[Operation], None]) -> int:
        def begin_open(operation: Operation) -> None:
            self._check_open()
            begin(operation)

        self._check_open()
        if not self._has_deadlines:
            operation.patience_s = math.inf
        await self._watch.begin(operation, begin_open)
        return await operation.wait()

    async def _probe(self) -> None:
        """Read the first page of what the last late operation was on, else of any open file, past the page cache where
        the filesystem allows it: files may lie on several drives."""
        self._check_open()
        late = self._watch.late_fd
        fd = late if late in self._paths else next(iter(self._paths), None)
        if fd is None:
            raise DeviceFailed("no file is open")
        page = memoryview(mmap.mmap(-1, limits.DEVICE_ALIGNMENT_BYTES))
        operation = Operation(f"probe {self._name(fd)}", fd, self._at(fd, 0), page, patience_s=math.inf)
        await self._watch.probe(operation, partial(self.operations.begin_read, payload_bytes=0))

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        with trio.CancelScope(shield=True):
            await self._watch.drain()
            await self.operations.release()
        if not self._watch.abandon():
            _log.error("operations did not end in time; their files and memory stay")
            return
        for fd in list(self._paths):
            self.close_file(fd)
        self._free_buffers.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceFailed("the device is closed")


def _check_range(what: str, offset: int, view: memoryview) -> None:
    if offset < 0 or view.nbytes > limits.MAX_DEVICE_IO_BYTES or not view.c_contiguous:
        raise InvalidRequest(f"{what}: not a contiguous run of at most {limits.MAX_DEVICE_IO_BYTES} bytes")


def _open_direct(path: Path, more_flags: int) -> tuple[int, bool]:
    """Open a file; return the descriptor and whether it is direct. Raises OSError."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | more_flags
    try:
        return os.open(path, flags | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags), False


def _discard(fd: int, offset: int, length: int, what: str) -> None:
    modes = [_PUNCH_HOLE | _KEEP_SIZE]
    if stat.S_ISREG(os.fstat(fd).st_mode):
        modes.append(0)  # allocated again
    for mode in modes:
        if _libc.fallocate(fd, mode, offset, length) != 0:
            _log.info("%s: %s", what, os.strerror(ctypes.get_errno()))
            return


def _allocate(path: Path, size_bytes: int) -> None:
    """Extend a file with all its blocks, durably. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
