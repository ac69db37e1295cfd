"""Names of files at the path door: what every program expects of O_EXCL, rename and unlink.

Each test passes on a plain directory (`KVFS_TEST_PATH=dir`); the mount is held to that.
"""

from __future__ import annotations

import errno
import os
import threading

import pytest

from tests.support.door import Door
from tests.support.posix import expect_errno, opened, pattern, rename_noreplace, write_all

pytestmark = pytest.mark.mount

MIB = 1 << 20


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
