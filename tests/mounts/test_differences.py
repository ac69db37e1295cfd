"""What suites for disk filesystems find different on the mount; docs/mount.md says why."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Final

import pytest

from tests.support.door import Door
from tests.support.posix import expect_errno, opened, write_all
from tests.support.waits import eventually

pytestmark = pytest.mark.mount

_libc: Final = ctypes.CDLL(None, use_errno=True)


def sealed(door: Door, path: Path) -> None:
    if door.service is not None:
        eventually(lambda: os.getxattr(path, "user.kvfs.state") == b"sealed", "sealed")


class FileHandle(ctypes.Structure):
    """`struct file_handle` of name_to_handle_at(2)."""

    _fields_ = [("bytes", ctypes.c_uint), ("type", ctypes.c_int), ("handle", ctypes.c_ubyte * 128)]


def test_a_rename_leaves_the_change_time(door: Door) -> None:
    door.need_service()
    path, moved = door.path / "file", door.path / "moved"
    path.write_bytes(b"first")
    sealed(door, path)
    before = path.stat().st_ctime_ns
    path.rename(moved)
    assert moved.stat().st_ctime_ns == before


def test_a_store_through_a_mapping_moves_the_time_of_modification(door: Door) -> None:
    path = door.path / "file"
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        write_all(fd, b"before")
        os.utime(fd, ns=(1, 1))
        with mmap.mmap(fd, 6) as mapping:
            mapping[:] = b"mapped"
            mapping.flush()
        assert door.mode == "dir" or os.fstat(fd).st_mtime_ns > 1
    sealed(door, path)
    assert door.mode == "dir" or path.stat().st_mtime_ns > 1


def test_a_lease_is_on_a_version(door: Door) -> None:
    path = door.path / "file"
    path.write_bytes(b"first")
    sealed(door, path)
    with opened(path, os.O_RDONLY) as reader:
        with opened(path, os.O_RDONLY), expect_errno(errno.EAGAIN):
            fcntl.fcntl(reader, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        if door.mode == "dir":
            return
        with opened(path, os.O_RDWR) as writer:
            fcntl.fcntl(writer, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(writer, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def test_the_kernel_shows_no_locks_of_the_mount(door: Door) -> None:
    if door.mode in ("dir", "plain"):
        pytest.skip("the kernel keeps the locks")
    path = door.path / "file"
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        found = os.fstat(fd)
        place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino} "
        assert place not in Path("/proc/locks").read_text()


def test_a_handle_ends_with_the_node(door: Door) -> None:
    """name_to_handle_at(2) works, and its handle leads to the file for as long as the kernel knows that."""
    door.need_service()
    path = door.path / "file"
    path.write_bytes(b"first")
    sealed(door, path)
    handle, mount_id = FileHandle(bytes=128), ctypes.c_int()
    at_fdcwd = -100
    assert (
        _libc.name_to_handle_at(at_fdcwd, os.fsencode(path), ctypes.byref(handle), ctypes.byref(mount_id), 0)
        == 0
    )
    with opened(door.path, os.O_RDONLY) as on_mount:
        found = _libc.open_by_handle_at(on_mount, ctypes.byref(handle), os.O_RDONLY)
        assert os.read(found, 10) == b"first"
        os.close(found)
        path.write_bytes(b"another")  # in the place of the node, or of the file
        path.unlink()
        assert _libc.open_by_handle_at(on_mount, ctypes.byref(handle), os.O_RDONLY) == -1
    assert ctypes.get_errno() == errno.ESTALE
