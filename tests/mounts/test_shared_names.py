"""Processes that share a name: opens beside writers, locks between versions of a file, followers of a growing one."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.door import Door
from tests.support.posix import expect_errno, in_child, opened, pattern, start_child, wait_child
from tests.support.waits import eventually

pytestmark = pytest.mark.mount


def sealed(door: Door, path: Path) -> None:
    """Wait until the file is what other doors see; on a plain directory it is at once."""
    if door.service is not None:
        eventually(lambda: os.getxattr(path, "user.kvfs.state") == b"sealed", "sealed")


def together(*works: Callable[[], None]) -> None:
    """Run each in a process of its own; all must succeed. When one fails, those after it are ended."""
    children = [start_child(work) for work in works]
    codes: list[int] = []
    for child in children:
        if any(codes):
            os.kill(child, signal.SIGKILL)
        codes.append(wait_child(child))
    assert codes == [0] * len(children)


# --- opens -------------------------------------------------------------------------------------------------
APPENDERS, LINES = 4, 60


@pytest.mark.parametrize("readers", [0, 2])
def test_many_append_to_one_file(door: Door, readers: int) -> None:
    """Each open finds the file, each line is there once, and a reader sees a prefix of what there will be."""
    path = door.path / "log"
    path.write_bytes(b"")

    def append(number: int) -> None:
        for i in range(LINES):
            with opened(path, os.O_WRONLY | os.O_APPEND) as fd:
                os.write(fd, b"%d:%04d\n" % (number, i))

    def read() -> None:
        seen = 0
        while seen < LINES * APPENDERS * 7 // 2:
            found = path.read_bytes()
            assert len(found) % 7 == 0
            seen = max(seen, len(found))

    together(*[lambda i=i: append(i) for i in range(APPENDERS)], *[read] * readers)
    lines = path.read_bytes().splitlines()
    assert sorted(lines) == sorted(b"%d:%04d" % (i, j) for i in range(APPENDERS) for j in range(LINES))


def test_created_replaced_and_removed_at_once(door: Door) -> None:
    """Every way to open a name that others write, replace and remove: it opens, or the name is not there."""
    path, rounds = door.path / "file", 150

    def use(number: int) -> None:
        temporary = door.path / f".tmp-{number}"
        for i in range(rounds):
            for flags in (os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.O_RDONLY):
                try:
                    with opened(path, flags) as fd:
                        if flags != os.O_RDONLY:
                            os.pwrite(fd, b"x" * 100, 0)
                except FileNotFoundError:
                    assert flags == os.O_RDONLY
            temporary.write_bytes(pattern(number, 1000))
            os.rename(temporary, path)
            try:
                os.truncate(path, 10 + i)
                if i % 5 == number:
                    path.unlink()
            except FileNotFoundError:
                pass

    together(*[lambda i=i: use(i) for i in range(3)])


def test_stat_of_a_name_that_others_write(door: Door) -> None:
    path = door.path / "file"
    path.write_bytes(b"x")

    def write() -> None:
        for i in range(200):
            with opened(path, os.O_WRONLY | (os.O_TRUNC if i % 2 else 0)) as fd:
                os.write(fd, b"y" * (i + 1))

    def look() -> None:
        for _ in range(2000):
            assert path.stat().st_nlink in (0, 1)  # 0: replaced between the name and the look

    together(write, write, look, look)


@pytest.mark.parametrize("loss", ["replaced", "removed", "rewritten"])
def test_an_open_file_is_opened_again_through_proc(door: Door, loss: str) -> None:
    path = door.path / "file"
    path.write_bytes(pattern(1, 5000))
    sealed(door, path)
    with opened(path, os.O_RDONLY) as fd:
        if loss == "replaced":
            other = door.path / "other"
            other.write_bytes(b"other")
            os.rename(other, path)
        elif loss == "removed":
            path.unlink()
        elif door.service is not None:
            with opened(path, os.O_RDWR) as writer:
                os.pwrite(writer, b"new", 0)
        with opened(f"/proc/self/fd/{fd}", os.O_RDONLY) as again:
            assert os.pread(again, 10_000, 0) == pattern(1, 5000)
            assert os.fstat(again).st_ino == os.fstat(fd).st_ino


def test_sealed_bytes_are_not_written_through_proc(door: Door) -> None:
    """A descriptor for reading holds bytes that never change, so it leads nobody to a file for writing."""
    door.need_service()
    path = door.path / "file"
    path.write_bytes(b"sealed")
    sealed(door, path)
    with opened(path, os.O_RDONLY) as fd:
        with expect_errno(errno.ETXTBSY):
            os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        with opened(path, os.O_RDWR) as writer:
            os.pwrite(writer, b"opened", 0)
        assert os.pread(fd, 10, 0) == b"sealed"
    assert path.read_bytes() == b"opened"


def test_rewriting_keeps_the_file_where_nobody_reads_the_old_one(door: Door) -> None:
    """The same inode, as on a disk; with a reader, whose bytes stay, it is another file of that name."""
    path = door.path / "file"
    path.write_bytes(b"one")
    sealed(door, path)
    number = path.stat().st_ino
    for i in range(3):
        with path.open("ab") as file:
            file.write(b"+%d" % i)
        sealed(door, path)
        assert path.stat().st_ino == number
        assert path.read_bytes() == b"one+0+1+2"[: 5 + 2 * i]
    os.truncate(path, 2)
    assert (path.stat().st_ino, path.stat().st_size, path.read_bytes()) == (number, 2, b"on")
    if door.service is None:
        return
    sealed(door, path)
    with opened(path, os.O_RDONLY) as reader:
        with path.open("ab") as file:
            file.write(b"!")
        assert path.stat().st_ino != number
        assert os.fstat(reader).st_ino == number
        assert os.pread(reader, 10, 0) == b"on"


# --- following ---------------------------------------------------------------------------------------------
def test_a_follower_by_name_sees_every_line(door: Door) -> None:
    """Read as `tail -F` does: it looks at the name, and opens it again where that leads to another file."""
    path = door.path / "log"
    path.write_bytes(b"0\n")
    sealed(door, path)
    file = os.open(path, os.O_RDONLY)
    seen = os.read(file, 1000)
    for i in range(1, 6):
        with path.open("ab") as log:
            log.write(b"%d\n" % i)
        sealed(door, path)
        if os.fstat(file).st_ino != path.stat().st_ino:
            os.close(file)
            file = os.open(path, os.O_RDONLY)
            os.lseek(file, len(seen), os.SEEK_SET)
        seen += os.read(file, 1000)
        assert seen == b"".join(b"%d\n" % j for j in range(i + 1))
    os.close(file)


def test_who_opens_a_growing_file_sees_it_grow(door: Door) -> None:
    path = door.path / "log"
    with path.open("wb", buffering=0) as log, path.open("rb") as follower:
        for i in range(5):
            log.write(b"%d\n" % i)
            assert os.fstat(follower.fileno()).st_size == 2 * (i + 1)
            assert follower.read() == b"%d\n" % i


# --- locks -------------------------------------------------------------------------------------------------
def try_lock(path: Path, lock: Callable[..., object], flags: int, kind: int) -> int:
    """0 when another process takes the lock at once, EAGAIN when it is refused."""

    def attempt() -> None:
        with opened(path, flags) as fd:
            lock(fd, kind | fcntl.LOCK_NB)

    return in_child(attempt)


both_locks = pytest.mark.parametrize("lock", [fcntl.flock, fcntl.lockf], ids=["flock", "fcntl"])


@both_locks
def test_one_lock_for_readers_and_writers(door: Door, lock: Callable[..., object]) -> None:
    if door.mode == "plain":
        pytest.skip("see test_the_plain_mode_locks_each_version_of_a_file_apart")
    path = door.path / "file"
    path.write_bytes(b"x" * 100)
    sealed(door, path)
    with opened(path, os.O_RDONLY) as reader:
        lock(reader, fcntl.LOCK_SH)
        assert try_lock(path, lock, os.O_RDONLY, fcntl.LOCK_SH) == 0
        with opened(path, os.O_RDWR) as writer:
            with expect_errno(errno.EAGAIN):
                if lock is fcntl.flock:
                    lock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
                else:  # one process has one POSIX lock
                    raise OSError(errno.EAGAIN, "")
            assert try_lock(path, lock, os.O_RDWR, fcntl.LOCK_EX) == 1
            lock(reader, fcntl.LOCK_UN)
            lock(writer, fcntl.LOCK_EX)
            assert try_lock(path, lock, os.O_RDONLY, fcntl.LOCK_SH) == 1
            os.pwrite(writer, b"y", 0)
        assert try_lock(path, lock, os.O_RDONLY, fcntl.LOCK_SH) == 0


@both_locks
def test_a_lock_outlives_versions_of_its_file(door: Door, lock: Callable[..., object]) -> None:
    if door.mode == "plain":
        pytest.skip("see test_the_plain_mode_locks_each_version_of_a_file_apart")
    path = door.path / "file"
    path.write_bytes(b"x")
    sealed(door, path)
    with opened(path, os.O_RDONLY) as reader:
        lock(reader, fcntl.LOCK_SH)
        for i in range(3):

            def change(i: int = i) -> None:
                with path.open("ab") as file:
                    file.write(b"%d" % i)

            assert in_child(change) == 0
            sealed(door, path)
            assert try_lock(path, lock, os.O_RDWR, fcntl.LOCK_EX) == 1
        os.rename(path, door.path / "moved")
        assert try_lock(door.path / "moved", lock, os.O_RDWR, fcntl.LOCK_EX) == 1
        path.write_bytes(b"another file")
        assert try_lock(path, lock, os.O_RDWR, fcntl.LOCK_EX) == 0
    assert try_lock(door.path / "moved", lock, os.O_RDWR, fcntl.LOCK_EX) == 0


@both_locks
def test_the_plain_mode_locks_each_version_of_a_file_apart(door: Door, lock: Callable[..., object]) -> None:
    """The kernel keeps its locks, by node, and pyfuse3 has no request for them (docs/mount.md)."""
    if door.mode != "plain":
        pytest.skip("the other modes lock the file: test_one_lock_for_readers_and_writers")
    path = door.path / "file"
    path.write_bytes(b"x")
    sealed(door, path)
    with opened(path, os.O_RDONLY) as reader:
        lock(reader, fcntl.LOCK_SH)
        with opened(path, os.O_RDWR) as writer:
            # Another version from here on: the reader's lock is not seen by it, nor by who opens the name now.
            lock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
            assert try_lock(path, lock, os.O_RDWR, fcntl.LOCK_EX) == 1
            assert try_lock(path, lock, os.O_RDONLY, fcntl.LOCK_SH) == 1
            os.pwrite(writer, b"y", 0)
        sealed(door, path)
        assert try_lock(path, lock, os.O_RDWR, fcntl.LOCK_EX) == 0
    # Nobody has it open: the writer's version is the file that others open, and one lock is for all of them.
    with opened(path, os.O_RDWR) as writer:
        lock(writer, fcntl.LOCK_EX)
        assert try_lock(path, lock, os.O_RDONLY, fcntl.LOCK_SH) == 1
        assert try_lock(path, lock, os.O_RDWR, fcntl.LOCK_EX) == 1
    assert try_lock(path, lock, os.O_RDONLY, fcntl.LOCK_SH) == 0
