"""Sizes of files at the path door: what every program expects of truncate, fallocate and holes.

Each test passes on a plain directory (`KVFS_TEST_PATH=dir`); the mount is held to that.
"""

from __future__ import annotations

import errno
import os

import pytest

from tests.support.door import Door
from tests.support.posix import (
    FALLOC_FL_KEEP_SIZE,
    FALLOC_FL_PUNCH_HOLE,
    expect_errno,
    fallocate,
    opened,
    pattern,
    write_all,
)

pytestmark = pytest.mark.mount

KIB = 1 << 10
MIB = 1 << 20


def test_truncate_down_and_up_again_shows_zeros(door: Door) -> None:
    path, data = door.path / "file", pattern(2, 20_000)
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        write_all(fd, data)
        os.ftruncate(fd, 5_000)
        assert os.fstat(fd).st_size == 5_000
        os.ftruncate(fd, 20_000)
        assert os.pread(fd, 30_000, 0) == data[:5_000] + bytes(15_000)
        os.pwrite(fd, b"end", 40_000)
        assert os.pread(fd, 100_000, 20_000) == bytes(20_000) + b"end"
    assert path.read_bytes() == data[:5_000] + bytes(35_000) + b"end"


def test_truncate_by_path(door: Door) -> None:
    path, data = door.path / "file", pattern(2, 20_000)
    path.write_bytes(data)
    os.truncate(path, 4_097)
    assert path.stat().st_size == 4_097
    assert path.read_bytes() == data[:4_097]
    os.truncate(path, 10_000)
    assert path.read_bytes() == data[:4_097] + bytes(5_903)
    os.truncate(path, 0)
    assert path.read_bytes() == b""


def test_truncate_of_a_read_only_descriptor_is_refused(door: Door) -> None:
    path = door.path / "file"
    path.write_bytes(b"x")
    with opened(path, os.O_RDONLY) as fd:
        with expect_errno(errno.EINVAL):
            os.ftruncate(fd, 0)
        with expect_errno(errno.EBADF):
            os.write(fd, b"y")
    with opened(path, os.O_WRONLY) as fd, expect_errno(errno.EBADF):
        os.read(fd, 1)


def test_o_trunc_empties_an_existing_file(door: Door) -> None:
    path = door.path / "file"
    path.write_bytes(pattern(1, 50_000))
    with opened(path, os.O_WRONLY | os.O_TRUNC) as fd:
        assert os.fstat(fd).st_size == 0
        assert path.stat().st_size == 0
        write_all(fd, b"short")
    assert path.read_bytes() == b"short"
    path.write_bytes(b"")
    assert path.read_bytes() == b""


def test_posix_fallocate_grows_with_zeros(door: Door) -> None:
    path = door.path / "file"
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        write_all(fd, b"head")
        os.posix_fallocate(fd, 0, 100_000)
        assert os.fstat(fd).st_size == 100_000
        assert os.fstat(fd).st_blocks * 512 >= 100_000
        assert os.pread(fd, 200_000, 0) == b"head" + bytes(99_996)
    assert path.read_bytes() == b"head" + bytes(99_996)


@pytest.mark.parametrize("mode", [FALLOC_FL_KEEP_SIZE, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE])
def test_fallocate_modes_work_or_are_refused(door: Door, mode: int) -> None:
    """Either is right; the size and the other bytes stay in any case."""
    path, data = door.path / "file", bytearray(pattern(1, 64 * KIB))
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        write_all(fd, data)
        try:
            fallocate(fd, mode, 8192, 8192)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
        else:
            if mode & FALLOC_FL_PUNCH_HOLE:
                data[8192:16384] = bytes(8192)
        assert os.fstat(fd).st_size == 64 * KIB
    assert path.read_bytes() == data


def test_seek_data_and_hole_never_hide_data(door: Door) -> None:
    path = door.path / "sparse"
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        os.pwrite(fd, pattern(1, 4096), 2 * MIB)
        os.ftruncate(fd, 4 * MIB)
        written = bytearray(4 * MIB)
        written[2 * MIB : 2 * MIB + 4096] = pattern(1, 4096)
    with opened(path, os.O_RDONLY) as fd:
        found, position = bytearray(4 * MIB), 0
        while True:
            try:
                start = os.lseek(fd, position, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                break
            position = os.lseek(fd, start, os.SEEK_HOLE)
            assert position > start
            found[start:position] = os.pread(fd, position - start, start)
            if position == 4 * MIB:
                break
        assert found == written
        assert os.lseek(fd, 0, os.SEEK_END) == 4 * MIB
        with expect_errno(errno.ENXIO):
            os.lseek(fd, 4 * MIB, os.SEEK_DATA)
