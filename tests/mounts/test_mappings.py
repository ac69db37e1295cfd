"""Mappings at the path door: loaders of tensors read by mmap, and numpy writes by it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.support.door import Door
from tests.support.posix import (
    expect_errno,
    in_child,
    mapped_pages,
    opened,
    pattern,
    start_child,
    wait_child,
    write_all,
)
from tests.support.waits import eventually

pytestmark = pytest.mark.mount

SIZE = 3 * (1 << 20) + 1234
PIECE, PIECES = 64 << 10, 32
READ = mmap.PROT_READ
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


@pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE], ids=["shared", "private"])
@pytest.mark.parametrize("populate", [0, mmap.MAP_POPULATE], ids=["", "populated"])
def test_a_mapping_reads_the_file_after_close_and_unlink(door: Door, flags: int, populate: int) -> None:
    path, data = door.path / "file", pattern(1, SIZE)
    path.write_bytes(data)
    with opened(path, os.O_RDONLY) as fd:
        mapping = mmap.mmap(fd, SIZE, flags | populate, READ)
    assert mapping[:] == data
    path.unlink()
    path.write_bytes(pattern(2, SIZE))
    assert mapping[:] == data
    mapping.close()
    assert path.read_bytes() == pattern(2, SIZE)


def test_a_mapping_keeps_the_object_that_a_rename_replaces(door: Door) -> None:
    path, new = door.path / "file", door.path / "new"
    path.write_bytes(pattern(1, SIZE))
    with opened(path, os.O_RDONLY) as fd:
        mapping = mmap.mmap(fd, SIZE, mmap.MAP_SHARED, READ)
    new.write_bytes(pattern(2, SIZE))
    os.rename(new, path)
    assert mapping[:] == pattern(1, SIZE)
    with opened(path, os.O_RDONLY) as fd, mmap.mmap(fd, SIZE, mmap.MAP_SHARED, READ) as second:
        assert second[:] == pattern(2, SIZE)
        assert mapping[:] == pattern(1, SIZE)
    mapping.close()


def test_mapping_a_part_and_the_end_of_the_last_page(door: Door) -> None:
    path, data = door.path / "file", pattern(1, 10_000)
    path.write_bytes(data)
    with opened(path, os.O_RDONLY) as fd:
        with mmap.mmap(fd, 1808, mmap.MAP_SHARED, READ, offset=8192) as part:
            assert part[:] == data[8192:]
        with mmap.mmap(fd, 0, mmap.MAP_PRIVATE, READ) as whole:
            assert len(whole) == 10_000
        # The rest of the last page is zeros, never another object's bytes.
        with mapped_pages(fd, 12_288) as address:
            assert ctypes.string_at(address, 12_288) == data + bytes(2288)


def test_access_past_the_end_is_sigbus(door: Door) -> None:
    path = door.path / "file"
    path.write_bytes(b"x" * 100)
    with opened(path, os.O_RDONLY) as fd, mapped_pages(fd, 8192) as address:

        def past_the_end() -> None:
            signal.signal(signal.SIGBUS, signal.SIG_DFL)
            ctypes.string_at(address + 4096, 1)

        assert ctypes.string_at(address, 101) == b"x" * 100 + b"\0"
        assert in_child(past_the_end) == -signal.SIGBUS


def test_a_private_mapping_is_copied_on_write(door: Door) -> None:
    path, data = door.path / "file", pattern(1, SIZE)
    path.write_bytes(data)
    with opened(path, os.O_RDONLY) as fd, mmap.mmap(fd, SIZE, mmap.MAP_PRIVATE, READ_WRITE) as mapping:
        mapping[5000:5010] = b"0123456789"
        assert mapping[4990:5020] == data[4990:5000] + b"0123456789" + data[5010:5020]
        assert os.pread(fd, SIZE, 0) == data
    assert path.read_bytes() == data


def test_a_shared_writable_mapping_needs_a_writable_descriptor(door: Door) -> None:
    path = door.path / "file"
    path.write_bytes(bytes(4096))
    with opened(path, os.O_RDONLY) as fd, expect_errno(errno.EACCES):
        mmap.mmap(fd, 4096, mmap.MAP_SHARED, READ_WRITE)


def test_writing_a_new_file_through_a_mapping(door: Door) -> None:
    path, data = door.path / "file", pattern(1, SIZE)
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        os.ftruncate(fd, SIZE)
        with mmap.mmap(fd, SIZE, mmap.MAP_SHARED, READ_WRITE) as mapping:
            mapping[:] = data
            mapping.flush()
            assert os.pread(fd, SIZE, 0) == data
            os.pwrite(fd, b"written", 100)
            assert mapping[100:107] == b"written"
    assert path.read_bytes() == data[:100] + b"written" + data[107:]


def test_writing_an_existing_file_through_a_mapping(door: Door) -> None:
    path, data = door.path / "file", pattern(1, SIZE)
    path.write_bytes(data)
    with opened(path, os.O_RDWR) as fd, mmap.mmap(fd, SIZE, mmap.MAP_SHARED, READ_WRITE) as mapping:
        mapping[70_000:70_003] = b"abc"
    assert path.read_bytes() == data[:70_000] + b"abc" + data[70_003:]


def test_writing_through_a_mapping_after_close(door: Door) -> None:
    """Nothing of the mapping reaches the server: the file is finished at munmap(), not at close()."""
    path, data = door.path / "file", pattern(1, SIZE)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, SIZE)
    mapping = mmap.mmap(fd, SIZE, mmap.MAP_SHARED, READ_WRITE)
    os.close(fd)
    mapping[: SIZE // 2] = data[: SIZE // 2]
    assert path.stat().st_size == SIZE
    mapping[SIZE // 2 :] = data[SIZE // 2 :]
    if door.service is not None:
        assert os.getxattr(path, "user.kvfs.state") == b"draft"
    mapping.close()
    assert path.read_bytes() == data
    if door.service is not None:
        eventually(lambda: os.getxattr(path, "user.kvfs.state") == b"sealed", "sealed after munmap()")
        assert path.read_bytes() == data


def test_a_mapping_shared_with_a_child(door: Door) -> None:
    path = door.path / "file"
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        os.ftruncate(fd, 8192)
        mapping = mmap.mmap(fd, 8192, mmap.MAP_SHARED, READ_WRITE)

    def child() -> None:
        mapping[:5] = b"child"

    assert in_child(child) == 0
    assert mapping[:5] == b"child"
    mapping[4096:4102] = b"parent"
    mapping.close()
    assert path.read_bytes() == b"child".ljust(4096, b"\0") + b"parent".ljust(4096, b"\0")


def test_growing_a_mapped_file(door: Door) -> None:
    """truncate and fallocate reach the server while pages are mapped."""
    path = door.path / "file"
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        write_all(fd, b"x" * 4096)
        with mmap.mmap(fd, 4096, mmap.MAP_SHARED, READ_WRITE) as small:
            os.posix_fallocate(fd, 0, 1 << 20)
            with mmap.mmap(fd, 1 << 20, mmap.MAP_SHARED, READ_WRITE) as large:
                large[-4:] = b"tail"
                small[:4] = b"head"
                assert large[:5] == b"headx"
                os.ftruncate(fd, 2 << 20)
                assert large[-4:] == b"tail"
    data = path.read_bytes()
    assert len(data) == 2 << 20
    assert (data[:5], data[(1 << 20) - 4 : 1 << 20], data[1 << 20 :]) == (b"headx", b"tail", bytes(1 << 20))


def test_advice_and_locking_of_pages(door: Door) -> None:
    path, data = door.path / "file", pattern(1, SIZE)
    path.write_bytes(data)
    with opened(path, os.O_RDONLY) as fd, mmap.mmap(fd, SIZE, mmap.MAP_SHARED, READ) as mapping:
        for advice in (mmap.MADV_SEQUENTIAL, mmap.MADV_WILLNEED, mmap.MADV_DONTNEED):
            mapping.madvise(advice)
            assert mapping[:] == data


def test_many_mappings_of_many_files(door: Door) -> None:
    mappings = []
    for i in range(100):
        path = door.path / f"{i}"
        path.write_bytes(pattern(i, 20_000))
        with opened(path, os.O_RDONLY) as fd:
            mappings.append(mmap.mmap(fd, 20_000, mmap.MAP_SHARED, READ))
    for i, mapping in enumerate(mappings):
        assert mapping[:] == pattern(i, 20_000)
        mapping.close()


def write_directly(path: Path, rounds: int) -> None:
    with opened(path, os.O_RDWR | os.O_DIRECT) as fd, mmap.mmap(-1, PIECE) as piece:
        for number in range(rounds):
            piece[:] = bytes([number]) * PIECE
            for start in range(0, PIECES * PIECE, PIECE):
                assert os.pwrite(fd, piece, start) == PIECE


def write_mapped(path: Path, rounds: int) -> None:
    with opened(path, os.O_RDWR) as fd:
        for number in range(rounds):
            with mmap.mmap(fd, PIECES * PIECE, mmap.MAP_SHARED, READ_WRITE) as mapping:
                for start in range(0, len(mapping), mmap.PAGESIZE):
                    mapping[start] = number
                mapping.flush()


def read_mapped(path: Path, rounds: int) -> None:
    with opened(path, os.O_RDONLY) as fd:
        for _ in range(rounds):
            with mmap.mmap(fd, PIECES * PIECE, mmap.MAP_SHARED, READ) as mapping:
                assert max(mapping[:]) < rounds


def test_direct_writes_beside_mappings_end_and_the_file_never_seems_empty(door: Door) -> None:
    """What generic/247 and generic/615 of xfstests do."""
    path, rounds = door.path / "file", 5
    path.write_bytes(bytes(PIECES * PIECE))
    with opened(path, os.O_RDWR):  # a draft for all of them
        children = [
            start_child(partial(what, path, rounds)) for what in (write_directly, write_mapped, read_mapped)
        ]
        while any(
            os.waitid(os.P_PID, each, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None for each in children
        ):
            assert os.stat(path).st_blocks > 0
        assert [wait_child(each) for each in children] == [0, 0, 0]
