"""Every kind of sync at the path door, and copies that the kernel makes.

Each test passes on a plain directory (`KVFS_TEST_PATH=dir`); the mount is held to that.
"""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from tests.support.door import Door
from tests.support.posix import opened, pattern, syncfs, write_all

pytestmark = pytest.mark.mount

MIB = 1 << 20


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
