"""System calls that Python does not wrap, and calls made as another user, for the path tests."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import socket
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import pytest

from tests.support.processes import end_with

T = TypeVar("T")

PR_SET_DUMPABLE: Final = 4
CREDENTIAL_CALLS: Final = {"x86_64": (116, 119, 117), "aarch64": (159, 149, 147)}
"""Machine -> its numbers of setgroups(2), setresgid(2) and setresuid(2)."""
FALLOC_FL_KEEP_SIZE: Final = 1
FALLOC_FL_PUNCH_HOLE: Final = 2
RENAME_NOREPLACE: Final = 1
AT_FDCWD: Final = -100
NOBODY: Final = 65534
SOMEBODY: Final = 65533

_libc = ctypes.CDLL(None, use_errno=True)
_libc.opendir.restype = ctypes.c_void_p
_libc.opendir.argtypes = [ctypes.c_char_p]
_libc.readdir64.argtypes = [ctypes.c_void_p]
_libc.telldir.restype = ctypes.c_long
_libc.telldir.argtypes = [ctypes.c_void_p]
_libc.seekdir.argtypes = [ctypes.c_void_p, ctypes.c_long]
_libc.rewinddir.argtypes = [ctypes.c_void_p]
_libc.closedir.argtypes = [ctypes.c_void_p]
_libc.fallocate64.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


_libc.mmap64.restype = ctypes.c_void_p
_libc.mmap64.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class _Dirent(ctypes.Structure):
    _fields_ = (
        ("d_ino", ctypes.c_uint64),
        ("d_off", ctypes.c_int64),
        ("d_reclen", ctypes.c_ushort),
        ("d_type", ctypes.c_ubyte),
        ("d_name", ctypes.c_char * 256),
    )


_libc.readdir64.restype = ctypes.POINTER(_Dirent)


class FileHandle(ctypes.Structure):
    """`struct file_handle` of name_to_handle_at(2)."""

    _fields_ = (("handle_bytes", ctypes.c_uint), ("type", ctypes.c_int), ("handle", ctypes.c_ubyte * 128))


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2)."""
    _check(_libc.fallocate64(fd, mode, offset, length))


def rename_noreplace(source: Path, target: Path) -> None:
    """renameat2(2) with RENAME_NOREPLACE."""
    _check(_libc.renameat2(AT_FDCWD, bytes(source), AT_FDCWD, bytes(target), RENAME_NOREPLACE))


def syncfs(fd: int) -> None:
    """syncfs(2)."""
    _check(_libc.syncfs(fd))


@contextmanager
def mapped_pages(fd: int, length: int) -> Iterator[int]:
    """The address of a shared read-only mapping that may pass the file's end, which Python's mmap refuses."""
    address = _libc.mmap64(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    _check(-1 if address == ctypes.c_void_p(-1).value else 0)
    try:
        yield address
    finally:
        _libc.munmap(address, length)


@contextmanager
def in_flight(fd: int) -> Iterator[None]:
    """An open file in the queue of a socket alone, once `fd` is closed: its end is a RELEASE without a FLUSH."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [b"-"], [fd])
        yield


class Directory:
    """An open directory stream: readdir(3) with its positions. Names without `.` and `..`, unless `dots`."""

    def __init__(self, path: Path, *, dots: bool = False) -> None:
        self._dots = dots
        self._stream = _libc.opendir(bytes(path))
        if not self._stream:
            _check(-1)

    def read(self) -> tuple[str, int] | None:
        """The next name and d_type, None at the end."""
        while True:
            ctypes.set_errno(0)
            entry = _libc.readdir64(self._stream)
            if not entry:
                _check(-1 if ctypes.get_errno() else 0)
                return None
            name = entry.contents.d_name
            if self._dots or name not in (b".", b".."):
                return os.fsdecode(name), entry.contents.d_type

    def names(self) -> Iterator[str]:
        while (entry := self.read()) is not None:
            yield entry[0]

    def tell(self) -> int:
        return int(_libc.telldir(self._stream))

    def seek(self, position: int) -> None:
        _libc.seekdir(self._stream, position)

    def rewind(self) -> None:
        _libc.rewinddir(self._stream)

    def close(self) -> None:
        _libc.closedir(self._stream)


def fork_quietly() -> int:
    """os.fork(), although numpy's threads exist: the child makes system calls and leaves by os._exit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def run_as(uid: int, function: Callable[[], T], groups: Sequence[int] = ()) -> T:
    """What `function` returns or raises in a thread whose uid and gid are `uid`, with these other groups.

    Linux has these for each thread, while libc's calls, and with them Python's, change those of all. A fork for each
    costs as much as the tests around it: 30 ms in a process that has imported them all.
    """

    def run() -> T:
        setgroups, setresgid, setresuid = CREDENTIAL_CALLS[platform.machine()]
        _check(_libc.syscall(setgroups, len(groups), (ctypes.c_uint * len(groups))(*groups)))
        _check(_libc.syscall(setresgid, uid, uid, uid))
        _check(_libc.syscall(setresuid, uid, uid, uid))
        return function()

    with ThreadPoolExecutor(1) as thread:
        outcome = thread.submit(run)
    # A change of credentials takes it from the whole process.
    _check(_libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0))
    return outcome.result()


def start_child(function: Callable[[], object]) -> int:
    """The pid of a child that runs `function` and exits with 0, or with 1 when it raises.

    It is killed when this process ends: a test run that is cut off leaves nobody behind.
    """
    parent = os.getpid()
    child = fork_quietly()
    if child == 0:
        try:
            end_with(parent)
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def wait_child(pid: int) -> int:
    """Its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_child(function: Callable[[], object]) -> int:
    """Run `function` in a child and wait."""
    return wait_child(start_child(function))


@contextmanager
def expect_errno(number: int) -> Iterator[None]:
    """A context in which exactly this errno must be raised."""
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the number is checked, not the message
        yield
    assert caught.value.errno == number, caught.value


@contextmanager
def opened(path: Path | str, flags: int, mode: int = 0o644) -> Iterator[int]:
    """os.open() and os.close()."""
    fd = os.open(path, flags, mode)
    try:
        yield fd
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def pattern(seed: int, size_bytes: int) -> bytes:
    """Bytes that differ by seed and by offset: no two 8-byte words of two files are equal."""
    words = (size_bytes + 7) // 8
    start = (seed & 0xFFFF_FFFF) << 32
    return (np.arange(words, dtype=np.uint64) + np.uint64(start)).tobytes()[:size_bytes]


def handle_of(path: Path) -> FileHandle:
    """name_to_handle_at(2); links are followed."""
    handle, mount_id, follow = FileHandle(handle_bytes=128), ctypes.c_int(), 0x400
    made = _libc.name_to_handle_at(
        AT_FDCWD, os.fsencode(path), ctypes.byref(handle), ctypes.byref(mount_id), follow
    )
    _check(made)
    return handle


def open_handle(on_mount: int, handle: FileHandle) -> int:
    """open_by_handle_at(2), for reading; `on_mount` is a descriptor of anything on its mount."""
    found: int = _libc.open_by_handle_at(on_mount, ctypes.byref(handle), os.O_RDONLY)
    _check(found)
    return found
