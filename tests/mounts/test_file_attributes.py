"""Attributes of files at the path door: times, modes and owners.

Each test passes on a plain directory (`KVFS_TEST_PATH=dir`); the mount is held to that.
"""

from __future__ import annotations

import os
import stat

import pytest

from tests.support.door import Door
from tests.support.posix import opened, pattern, write_all

pytestmark = pytest.mark.mount


def test_times_are_set_to_the_nanosecond_and_kept(door: Door) -> None:
    path = door.path / "file"
    access, modified = 1_700_000_000_123_456_789, 1_600_000_000_987_654_321
    with opened(path, os.O_WRONLY | os.O_CREAT) as fd:
        write_all(fd, b"x")
        os.utime(fd, ns=(access, modified))
        found = os.fstat(fd)
        assert (found.st_atime_ns, found.st_mtime_ns) == (access, modified)
    assert path.stat().st_mtime_ns == modified
    os.utime(path, ns=(access, modified + 1))
    assert path.stat().st_mtime_ns == modified + 1  # what is sealed has no access time of its own
    os.utime(door.path, ns=(access, modified))
    assert door.path.stat().st_mtime_ns == modified


def test_modification_time_moves_with_the_bytes(door: Door) -> None:
    path = door.path / "file"
    path.write_bytes(b"x")
    os.utime(path, ns=(0, 0))
    assert path.read_bytes() == b"x"
    assert path.stat().st_mtime_ns == 0
    with path.open("ab") as file:
        file.write(b"y")
    assert path.stat().st_mtime_ns > 0
    os.utime(path, ns=(0, 0))
    os.truncate(path, 0)
    assert path.stat().st_mtime_ns > 0


def test_stat_of_a_file(door: Door) -> None:
    path = door.path / "file"
    path.write_bytes(pattern(1, 123_456))
    found = path.stat()
    assert stat.S_ISREG(found.st_mode)
    assert found.st_nlink == 1
    assert found.st_size == 123_456
    assert found.st_blocks * 512 >= 123_456
    assert found.st_blksize >= 512
    assert found.st_dev == door.path.stat().st_dev
    assert os.path.samefile(path, door.path / "." / "file")


def test_mode_of_a_new_file_follows_the_umask(door: Door) -> None:
    previous = os.umask(0o027)
    try:
        with opened(door.path / "file", os.O_WRONLY | os.O_CREAT, 0o666):
            pass
        (door.path / "directory").mkdir(mode=0o777)
    finally:
        os.umask(previous)
    assert stat.S_IMODE((door.path / "file").stat().st_mode) == 0o640
    assert stat.S_IMODE((door.path / "directory").stat().st_mode) == 0o750


def test_chmod_and_chown_stay(door: Door) -> None:
    path = door.path / "file"
    with opened(path, os.O_WRONLY | os.O_CREAT, 0o600) as fd:
        os.fchmod(fd, 0o640)
        write_all(fd, b"x")
        os.fchown(fd, 1234, 4321)
    found = path.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o640, 1234, 4321)
    path.chmod(0o444)
    os.rename(path, door.path / "moved")
    found = (door.path / "moved").stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o444, 1234, 4321)
