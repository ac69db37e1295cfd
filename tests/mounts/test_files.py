"""Files at the path door: what every program expects of open, read, write, truncate, rename and unlink.

Each test passes on a plain directory (`KVFS_TEST_PATH=dir`); the mount is held to that.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import socket
import stat
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.door import Door
from tests.support.posix import (
    FALLOC_FL_KEEP_SIZE,
    FALLOC_FL_PUNCH_HOLE,
    expect_errno,
    fallocate,
    in_child,
    opened,
    pattern,
    rename_noreplace,
    start_child,
    syncfs,
    wait_child,
    write_all,
)
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


# --- size --------------------------------------------------------------------------------------------------
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


# --- names -------------------------------------------------------------------------------------------------
def test_o_excl(door: Door) -> None:
    path = door.path / "lock"
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), expect_errno(errno.EEXIST):
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with expect_errno(errno.EEXIST):
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def test_one_of_many_wins_an_exclusive_create(door: Door) -> None:
    won: list[int] = []
    barrier = threading.Barrier(8)

    def contender(number: int) -> None:
        barrier.wait()
        try:
            fd = os.open(door.path / "lock", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return
        won.append(number)
        os.close(fd)

    threads = [threading.Thread(target=contender, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1


def test_a_missing_name(door: Door) -> None:
    missing = door.path / "missing"
    for call in (os.stat, os.unlink, os.rmdir, os.listdir):
        with expect_errno(errno.ENOENT):
            call(missing)
    with expect_errno(errno.ENOENT):
        os.open(missing, os.O_RDONLY)
    with expect_errno(errno.ENOENT):
        os.open(missing / "file", os.O_WRONLY | os.O_CREAT)
    missing.write_bytes(b"made after it was missed")
    assert missing.read_bytes() == b"made after it was missed"
    missing.unlink()
    assert not missing.exists()


def test_rename_over_an_existing_file(door: Door) -> None:
    old, new = door.path / "old", door.path / "new"
    old.write_bytes(pattern(1, 10_000))
    new.write_bytes(pattern(2, 30_000))
    with opened(old, os.O_RDONLY) as fd:
        os.rename(new, old)
        assert not new.exists()
        assert old.read_bytes() == pattern(2, 30_000)
        assert os.pread(fd, 50_000, 0) == pattern(1, 10_000)
    assert os.listdir(door.path) == ["old"]


def test_rename_moves_a_file_that_is_being_written(door: Door) -> None:
    temporary, final = door.path / ".tmp", door.path / "final"
    final.write_bytes(b"before")
    with opened(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600) as fd:
        write_all(fd, b"half ")
        os.rename(temporary, final)
        write_all(fd, b"whole")
        assert os.fstat(fd).st_ino == final.stat().st_ino
        assert final.read_bytes() == b"half whole"
        assert not temporary.exists()
    assert final.read_bytes() == b"half whole"
    assert os.listdir(door.path) == ["final"]


def test_rename_to_itself_and_noreplace(door: Door) -> None:
    one, two = door.path / "one", door.path / "two"
    one.write_bytes(b"1")
    os.rename(one, one)
    two.write_bytes(b"2")
    with expect_errno(errno.EEXIST):
        rename_noreplace(one, two)
    assert (one.read_bytes(), two.read_bytes()) == (b"1", b"2")
    rename_noreplace(one, door.path / "three")
    assert sorted(os.listdir(door.path)) == ["three", "two"]


def test_unlink_while_open(door: Door) -> None:
    path = door.path / "file"
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        write_all(fd, pattern(1, 5_000))
        os.unlink(path)
        assert not path.exists()
        os.pwrite(fd, b"still", 5_000)
        os.ftruncate(fd, 6_000)
        assert os.pread(fd, 10_000, 0) == pattern(1, 5_000) + b"still" + bytes(995)
        path.write_bytes(b"a new file of this name")
        assert os.fstat(fd).st_size == 6_000
    assert path.read_bytes() == b"a new file of this name"


def test_unlink_of_a_finished_file_while_a_reader_has_it(door: Door) -> None:
    path, data = door.path / "file", pattern(5, 2 * MIB)
    path.write_bytes(data)
    with opened(path, os.O_RDONLY) as fd:
        path.unlink()
        path.write_bytes(pattern(6, 2 * MIB))
        assert os.pread(fd, 3 * MIB, 0) == data
    assert path.read_bytes() == pattern(6, 2 * MIB)


def test_inode_number_is_stable(door: Door) -> None:
    """tar, rsync and git take another inode number for another file."""
    path, moved = door.path / "file", door.path / "moved"
    with opened(path, os.O_WRONLY | os.O_CREAT) as fd:
        number = os.fstat(fd).st_ino
        write_all(fd, b"x")
    assert path.stat().st_ino == number
    os.rename(path, moved)
    assert moved.stat().st_ino == number
    with os.scandir(door.path) as entries:
        assert [entry.inode() for entry in entries] == [number]
    with opened(moved, os.O_RDONLY) as fd:
        assert os.fstat(fd).st_ino == number


def test_a_name_that_is_replaced_all_the_time_is_always_there(door: Door) -> None:
    """Replacing by rename is how readers are spared half a file: they must not meet an error instead."""
    path, contents = door.path / "file", [pattern(i, 100_000 + i) for i in range(2)]
    path.write_bytes(contents[0])
    done = threading.Event()

    def replace(number: int) -> None:
        temporary = door.path / f".tmp-{number}"
        while not done.is_set():
            temporary.write_bytes(contents[number])
            os.rename(temporary, path)

    writers = [threading.Thread(target=replace, args=(i,)) for i in range(2)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(1000):
            assert path.read_bytes() in contents
    finally:
        done.set()
        for writer in writers:
            writer.join()


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


# --- sync and copies in the kernel -------------------------------------------------------------------------
def test_every_kind_of_sync(door: Door) -> None:
    path = door.path / "file"
    with opened(path, os.O_WRONLY | os.O_CREAT) as fd:
        write_all(fd, b"x")
        os.fsync(fd)
        os.fdatasync(fd)
        syncfs(fd)
    with opened(path, os.O_RDONLY) as fd:
        os.fsync(fd)
    with opened(door.path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)
    for flag in (os.O_SYNC, os.O_DSYNC):
        with opened(path, os.O_WRONLY | flag) as fd:
            write_all(fd, b"y")
    with opened(path, os.O_RDONLY) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.read(fd, 10) == b"y"


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "being written"])
def test_copy_file_range(door: Door, finished: bool) -> None:
    source, target, data = door.path / "source", door.path / "target", pattern(1, MIB + 100)
    with opened(source, os.O_RDWR | os.O_CREAT) as fd:
        write_all(fd, data)
        if not finished:
            copy_range(fd, target, len(data))
    if finished:
        with opened(source, os.O_RDONLY) as fd:
            copy_range(fd, target, len(data))
    assert target.read_bytes() == data


def copy_range(source: int, target: Path, size: int) -> None:
    with opened(target, os.O_WRONLY | os.O_CREAT) as out:
        done = 0
        while done < size:
            count = os.copy_file_range(source, out, size - done, done, done)
            assert count > 0
            done += count


def test_sendfile_to_a_socket_and_into_a_file(door: Door) -> None:
    path, data = door.path / "file", pattern(1, 300_000)
    path.write_bytes(data)
    receiver, sender = socket.socketpair()
    received = bytearray()

    def receive() -> None:
        while part := receiver.recv(1 << 20):
            received.extend(part)

    thread = threading.Thread(target=receive)
    thread.start()
    with opened(path, os.O_RDONLY) as fd, sender:
        offset = 0
        while offset < len(data):
            offset += os.sendfile(sender.fileno(), fd, offset, len(data) - offset)
    thread.join()
    receiver.close()
    assert received == data
    with opened(path, os.O_RDONLY) as fd, opened(door.path / "copy", os.O_WRONLY | os.O_CREAT) as out:
        while os.sendfile(out, fd, None, 1 << 20):
            pass
    assert (door.path / "copy").read_bytes() == data


def test_splice_from_and_into_a_pipe(door: Door) -> None:
    path, data = door.path / "file", pattern(1, 50_000)
    reader, writer = os.pipe()
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        write_all(writer, data)
        done = 0
        while done < len(data):
            done += os.splice(reader, fd, len(data) - done, offset_dst=done)
    with opened(path, os.O_RDONLY) as fd:
        count = os.splice(fd, writer, len(data), offset_src=0)
        assert count > 0
        assert os.read(reader, len(data)) == data[:count]
    os.close(reader)
    os.close(writer)


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


# --- attributes --------------------------------------------------------------------------------------------
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
