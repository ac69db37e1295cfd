"""Files at the path door: what every program expects of open, read, write, close and locks, and when a file is sealed.

Each test passes on a plain directory (`KVFS_TEST_PATH=dir`); the mount is held to that.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.door import Door
from tests.support.posix import in_child, opened, pattern, start_child, wait_child, write_all
from tests.support.waits import eventually

pytestmark = pytest.mark.mount

KIB = 1 << 10
MIB = 1 << 20
SIZES = [0, 1, 4095, 4096, 4097, 64 * KIB + 1, MIB + 13, 3 * MIB + 1]


# --- reading and writing -----------------------------------------------------------------------------------
def test_every_closed_file_is_published_without_another_call(door: Door) -> None:
    """Whatever came before: the first file, one after a lone create, several at once."""
    door.need_service()
    for count in (1, 1, 3, 1):
        paths = [door.path / f"file-{count}-{i}" for i in range(count)]
        for path in paths:
            path.write_bytes(b"bytes")
        for path in paths:
            eventually(
                lambda path=path: os.getxattr(path, "user.kvfs.state") == b"sealed", f"{path.name} is sealed"
            )


@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_is_read_back(door: Door, size: int) -> None:
    path, data = door.path / "file", pattern(size, size)
    path.write_bytes(data)
    assert path.stat().st_size == size
    assert path.read_bytes() == data
    with opened(path, os.O_RDONLY) as fd:
        for offset in {0, 1, size // 2, max(0, size - 1), size, size + 1, size + 4096}:
            assert os.pread(fd, 5000, offset) == data[offset : offset + 5000]


def test_a_file_being_written_is_read_at_any_offset(door: Door) -> None:
    path = door.path / "file"
    expected = bytearray(300 * KIB)
    with opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
        for i, offset in enumerate([200_000, 0, 4090, 4096, 131_071, 299_000, 17]):
            data = pattern(i, 1 + 977 * i)[: len(expected) - offset]
            assert os.pwrite(fd, data, offset) == len(data)
            expected[offset : offset + len(data)] = data
            size = os.fstat(fd).st_size
            assert os.pread(fd, len(expected), 0) == bytes(expected[:size])
            assert path.stat().st_size == size
        with opened(path, os.O_RDONLY) as reader:
            assert os.pread(reader, len(expected), 0) == bytes(expected[:size])
    assert path.read_bytes() == bytes(expected[:size])


def test_append_goes_to_the_end_whatever_the_position(door: Door) -> None:
    path = door.path / "log"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    with opened(path, flags) as one, opened(path, flags) as two:
        for i in range(50):
            fd = one if i % 2 else two
            os.lseek(fd, 0, os.SEEK_SET)
            write_all(fd, b"line %3d\n" % i)
    assert path.read_bytes() == b"".join(b"line %3d\n" % i for i in range(50))
    with opened(path, flags) as fd:
        write_all(fd, b"later\n")
    assert path.read_bytes().endswith(b"line  49\nlater\n")


def test_opening_for_writing_keeps_the_content(door: Door) -> None:
    path, data = door.path / "file", bytearray(pattern(1, 100_000))
    path.write_bytes(data)
    with path.open("r+b") as file:
        file.seek(50_000)
        file.write(b"in the middle")
    data[50_000:50_013] = b"in the middle"
    assert path.read_bytes() == data
    with opened(path, os.O_WRONLY):
        pass
    assert path.read_bytes() == data


def test_vectors(door: Door) -> None:
    path = door.path / "file"
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        assert os.writev(fd, [b"one", b"", b"three"]) == 8
        assert os.pwritev(fd, [b"X", b"Y"], 6) == 2
        parts = [bytearray(2), bytearray(10)]
        assert os.preadv(fd, parts, 1) == 7
        assert bytes(parts[0]) + bytes(parts[1]) == b"nethrXY" + bytes(5)


def test_a_reader_sees_each_write_of_another_process(door: Door) -> None:
    path = door.path / "file"
    to_child, from_parent = os.pipe()
    to_parent, from_child = os.pipe()

    def reader() -> None:
        with opened(path, os.O_RDONLY) as fd:
            for i in range(20):
                assert os.read(to_child, 1) == b"."
                assert os.pread(fd, 1 << 20, 0) == pattern(7, 5000 * (i + 1))
                os.write(from_child, b".")

    with opened(path, os.O_WRONLY | os.O_CREAT) as fd:
        child = start_child(reader)
        os.close(from_child)  # a child that fails ends the pipe
        data = pattern(7, 100_000)
        for i in range(20):
            write_all(fd, data[5000 * i : 5000 * (i + 1)])
            os.write(from_parent, b".")
            assert os.read(to_parent, 1) == b"."
        assert wait_child(child) == 0
    for end in (to_child, from_parent, to_parent):
        os.close(end)


def test_direct_io(door: Door) -> None:
    path = door.path / "direct"
    size = 2 * MIB
    with mmap.mmap(-1, size) as memory, mmap.mmap(-1, size) as back:
        memory[:] = pattern(3, size)
        with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT) as fd:
            assert os.write(fd, memory) == size
        with opened(path, os.O_RDONLY | os.O_DIRECT) as fd:
            assert os.readv(fd, [back]) == size
            assert back[:] == memory[:]
            with memoryview(back) as view:
                assert os.preadv(fd, [view[:4096]], MIB) == 4096
            assert back[:4096] == memory[MIB : MIB + 4096]
            assert os.preadv(fd, [back], size) == 0
    assert path.read_bytes() == pattern(3, size)


def test_direct_read_of_a_tail(door: Door) -> None:
    """A file that ends within a block: the read is short, as on a disk."""
    path, data = door.path / "tail", pattern(4, 10_000)
    path.write_bytes(data)
    with mmap.mmap(-1, 16_384) as memory, opened(path, os.O_RDONLY | os.O_DIRECT) as fd:
        assert os.readv(fd, [memory]) == 10_000
        assert memory[:10_000] == data


# --- descriptors -------------------------------------------------------------------------------------------
def test_a_duplicate_writes_after_the_first_is_closed(door: Door) -> None:
    """close() of one of two descriptors sends FLUSH: the file is not finished by it."""
    path = door.path / "file"
    first = os.open(path, os.O_RDWR | os.O_CREAT)
    write_all(first, b"first ")
    second = os.dup(first)
    os.close(first)
    write_all(second, b"second")
    assert os.pread(second, 100, 0) == b"first second"
    os.close(second)
    assert path.read_bytes() == b"first second"


def test_children_inherit_a_descriptor_and_its_position(door: Door) -> None:
    """Each child that exits sends FLUSH too."""
    path = door.path / "file"
    with opened(path, os.O_WRONLY | os.O_CREAT) as fd:
        for i in range(4):
            assert in_child(lambda i=i: write_all(fd, b"child %d\n" % i)) == 0
            write_all(fd, b"parent %d\n" % i)
    assert path.read_bytes() == b"".join(b"child %d\nparent %d\n" % (i, i) for i in range(4))


def test_two_writers_of_one_file(door: Door) -> None:
    path = door.path / "file"
    with opened(path, os.O_WRONLY | os.O_CREAT) as one:
        with opened(path, os.O_WRONLY) as two:
            os.pwrite(one, b"one", 0)
            os.pwrite(two, b"two", 3)
        os.pwrite(one, b"three", 6)
    assert path.read_bytes() == b"onetwothree"


def test_path_descriptors_and_reopening_through_proc(door: Door) -> None:
    path = door.path / "file"
    path.write_bytes(b"content")
    with opened(path, os.O_PATH) as fd:
        assert os.fstat(fd).st_size == 7
        with opened(f"/proc/self/fd/{fd}", os.O_RDONLY) as again:
            assert os.read(again, 100) == b"content"


def test_files_relative_to_a_directory_descriptor(door: Door) -> None:
    with opened(door.path, os.O_RDONLY | os.O_DIRECTORY) as directory:
        fd = os.open("file", os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=directory)
        write_all(fd, b"x")
        os.close(fd)
        os.rename("file", "moved", src_dir_fd=directory, dst_dir_fd=directory)
        assert os.stat("moved", dir_fd=directory).st_size == 1
        os.unlink("moved", dir_fd=directory)
    assert os.listdir(door.path) == []


# --- locks -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lock", [fcntl.flock, fcntl.lockf], ids=["flock", "fcntl"])
def test_locks_exclude_another_process_until_closed(door: Door, lock: object) -> None:
    assert callable(lock)
    path = door.path / "locked"

    def try_lock() -> None:
        with opened(path, os.O_RDWR) as other:
            lock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)

    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        lock(fd, fcntl.LOCK_EX)
        assert in_child(try_lock) == 1
        lock(fd, fcntl.LOCK_UN)
        assert in_child(try_lock) == 0
        lock(fd, fcntl.LOCK_EX)
    assert in_child(try_lock) == 0


# --- only on the service: other doors, and what POSIX does not say ------------------------------------------
def state(path: Path) -> bytes:
    return os.getxattr(path, "user.kvfs.state")


def test_the_mount_runs_in_the_mode_that_was_asked_for(door: Door) -> None:
    """Otherwise the three modes of this suite would be one, after a silent fallback."""
    with door.need_service().client() as client:
        assert client.status()["mount"]["mode"] == door.mode


def test_a_file_is_sealed_after_its_last_writer(door: Door) -> None:
    door.need_service()
    path = door.path / "file"
    with opened(path, os.O_WRONLY | os.O_CREAT) as one:
        write_all(one, b"x")
        with opened(path, os.O_WRONLY) as two:
            write_all(two, b"y")
            assert state(path) == b"draft"
        os.close(os.dup(one))
        assert state(path) == b"draft"
    eventually(lambda: state(path) == b"sealed", "the file is sealed after its last close")


@pytest.mark.parametrize("flags", [os.O_TRUNC, 0], ids=["O_TRUNC", "in place"])
def test_a_reader_keeps_the_object_that_is_overwritten(door: Door, flags: int) -> None:
    """A sealed object is immutable: who has it open goes on reading it, whole."""
    door.need_service()
    path, old = door.path / "file", pattern(1, 100_000)
    path.write_bytes(old)
    eventually(lambda: state(path) == b"sealed", "sealed")
    with opened(path, os.O_RDONLY) as fd:
        assert os.pread(fd, 10, 0) == old[:10]
        with opened(path, os.O_WRONLY | flags) as writer:
            os.pwrite(writer, pattern(2, 50_000), 0)
            assert os.pread(fd, 200_000, 0) == old
        assert os.pread(fd, 200_000, 0) == old
    assert path.read_bytes() == pattern(2, 50_000) + (b"" if flags else old[50_000:])


def test_sizes_in_order_are_the_newest(door: Door) -> None:
    """Attributes are cached by the kernel: none may be older than the file."""
    path = door.path / "file"
    sizes = [10, 5_000, 3, 0, 70_000, 1]
    for size in sizes:
        path.write_bytes(pattern(size, size))
        assert path.stat().st_size == size
        assert len(path.read_bytes()) == size
    assert all(one != two for one, two in pairwise(sizes))
