"""What suites for disk filesystems find different on the mount; docs/mount.md says why."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import struct
from pathlib import Path
from typing import Final

import pytest

from tests.support.door import Door
from tests.support.posix import (
    NOBODY,
    expect_errno,
    handle_of,
    in_child,
    open_handle,
    opened,
    run_as,
    write_all,
)
from tests.support.waits import eventually

pytestmark = pytest.mark.mount

REFUSED: Final = 11


def sealed(door: Door, path: Path) -> None:
    if door.service is not None:
        eventually(lambda: os.getxattr(path, "user.kvfs.state") == b"sealed", "sealed")


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


@pytest.mark.parametrize("mode", [0o6755, 0o2666])
def test_privileges_end_with_a_change_of_owner_by_anybody_that_changes_none(door: Door, mode: int) -> None:
    path = door.path / "file"
    path.touch()
    path.chmod(mode)
    if door.mode == "dir" or (door.mode == "plain" and mode == 0o6755):
        with expect_errno(errno.EPERM):
            run_as(NOBODY, lambda: os.chown(path, -1, -1))
    else:
        run_as(NOBODY, lambda: os.chown(path, -1, -1))
        assert stat.S_IMODE(path.stat().st_mode) == mode & 0o777


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


# --- locks of open file descriptions -----------------------------------------------------------------------
def lock_description(fd: int, kind: int) -> None:
    """Lock all bytes with F_OFD_SETLK; in `struct flock` the process is 0 then."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", kind, os.SEEK_SET, 0, 0, 0))


def is_locked(path: Path, kind: int = fcntl.F_WRLCK) -> bool:
    """Whether another process is refused such a lock."""

    def attempt() -> None:
        with opened(path, os.O_RDWR) as fd:
            try:
                lock_description(fd, kind)
            except BlockingIOError:
                os._exit(REFUSED)

    found = in_child(attempt)
    assert found in (0, REFUSED)
    return found == REFUSED


def test_a_lock_of_a_description_ends_with_its_last_descriptor(door: Door) -> None:
    path = door.path / "file"
    with opened(path, os.O_RDWR | os.O_CREAT) as first:
        lock_description(first, fcntl.F_WRLCK)
        copy = os.dup(first)
    assert is_locked(path)
    assert in_child(lambda: os.close(copy)) == 0
    assert is_locked(path), "its own descriptor of it is open"
    os.close(copy)
    eventually(lambda: not is_locked(path), "RELEASE ends it")


def test_a_lock_of_a_description_of_sealed_bytes_ends_with_all_that_have_them_open(door: Door) -> None:
    if door.mode == "plain":
        pytest.skip("the kernel keeps the locks, each version's apart")
    path = door.path / "file"
    path.write_bytes(b"first")
    sealed(door, path)
    with opened(path, os.O_RDONLY) as other:
        with opened(path, os.O_RDONLY) as reader:
            lock_description(reader, fcntl.F_RDLCK)
            assert is_locked(path)
            assert not is_locked(path, fcntl.F_RDLCK)
            lock_description(reader, fcntl.F_UNLCK)
            assert not is_locked(path), "by the unlock"
            lock_description(reader, fcntl.F_RDLCK)
        assert os.read(other, 5) == b"first"
    eventually(lambda: not is_locked(path), "RELEASE of the last one ends it, where that of its own did not")


def test_a_handle_ends_with_the_node(door: Door) -> None:
    """name_to_handle_at(2) works, and its handle leads to the file for as long as the kernel knows that."""
    door.need_service()
    path = door.path / "file"
    path.write_bytes(b"first")
    sealed(door, path)
    with opened(door.path, os.O_RDONLY) as on_mount:
        with opened(path, os.O_RDONLY) as kept:  # what nobody has open, the kernel may drop at any time
            handle = handle_of(Path(f"/proc/self/fd/{kept}"))
            found = open_handle(on_mount, handle)
            assert os.read(found, 10) == b"first"
            os.close(found)
        path.write_bytes(b"another")  # in the place of the node, or of the file
        path.unlink()
        with expect_errno(errno.ESTALE):
            open_handle(on_mount, handle)
