"""Times of directories: whoever remembers when one changed must not miss a name that came or went."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.door import Door
from tests.support.posix import opened, write_all
from tests.support.service import Service
from tests.support.waits import eventually

pytestmark = pytest.mark.mount

TICK_S = 0.011
"""Longer than the clock of file times takes to move on."""


def times(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_ctime_ns


def test_each_change_of_names_moves_a_directory(door: Door) -> None:
    """Times change as on a disk: by making, replacing, moving and removing; not by what happens further below."""
    one, two, below = door.path / "one", door.path / "two", door.path / "one" / "below"
    one.mkdir()
    two.mkdir()
    below.mkdir()
    (below / "file").write_bytes(b"x")
    (one / "seen").write_bytes(b"x")
    file = one / "file"
    changes: list[tuple[str, Callable[[], object], set[Path]]] = [
        ("create", lambda: os.close(os.open(file, os.O_CREAT | os.O_WRONLY)), {one}),
        ("create again", lambda: os.close(os.open(file, os.O_CREAT | os.O_WRONLY)), set()),
        ("write", lambda: file.write_bytes(b"bytes"), set()),
        ("read", lambda: file.read_bytes(), set()),
        ("append", lambda: file.open("ab").close(), set()),
        ("list", lambda: os.listdir(one), set()),
        ("miss", lambda: (one / "missing").exists(), set()),
        ("rename", lambda: os.rename(file, one / "renamed"), {one}),
        ("move", lambda: os.rename(one / "renamed", two / "moved"), {one, two}),
        ("replace", lambda: os.rename(one / "seen", two / "moved"), {one, two}),
        ("mkdir", lambda: (one / "directory").mkdir(), {one}),
        ("rmdir", lambda: (one / "directory").rmdir(), {one}),
        ("further below", lambda: (below / "file").unlink(), {below}),
        ("unlink", lambda: (two / "moved").unlink(), {two}),
        ("move of a directory", lambda: os.rename(below, two / "below"), {one, two}),
    ]
    for what, change, moved in changes:
        time.sleep(TICK_S)
        before = {path: times(path) for path in (one, two, below) if path.exists()}
        change()
        at_once = {path: times(path) for path in before if path.exists()}
        for path, (mtime, ctime) in at_once.items():
            assert (mtime > before[path][0]) == (path in moved), (what, path)
            assert (ctime > before[path][1]) == (path in moved), (what, path)
        if what != "write":
            continue
        if door.service is not None:
            eventually(lambda: os.getxattr(file, "user.kvfs.state") == b"sealed", "sealed")
        assert {path: times(path) for path in at_once} == at_once, "being published is no change of names"


def test_many_creates_in_a_row_move_it_each_time(door: Door) -> None:
    """Also those that the native loop answers by itself."""
    for i in range(100):
        time.sleep(TICK_S / 2 if door.service is None else 0)
        before = times(door.path)
        with opened(door.path / f".{i}", os.O_CREAT | os.O_WRONLY) as fd:
            write_all(fd, b"x")
        created = times(door.path)
        os.rename(door.path / f".{i}", door.path / f"{i}")
        assert times(door.path) >= created >= before
        assert door.service is None or times(door.path) > created > before


def test_times_that_are_set_stay_until_the_next_change(door: Door) -> None:
    os.utime(door.path, ns=(1, 2))
    assert door.path.stat().st_mtime_ns == 2
    (door.path / "file").write_bytes(b"x")
    assert door.path.stat().st_mtime_ns > 2
    os.utime(door.path, ns=(1, 3))
    door.path.chmod(0o700)
    assert door.path.stat().st_mtime_ns == 3


def test_other_doors_move_it_too(door: Door) -> None:
    service = door.need_service()
    (door.path / "sub").mkdir()
    with service.client() as client:
        bucket = service.name(door.path)
        before = times(door.path / "sub")
        client.put(f"{bucket}/sub/key", b"bytes")
        eventually(lambda: times(door.path / "sub") > before, "moved by a new key")
        between = times(door.path / "sub")
        client.remove(f"{bucket}/sub/key")
        eventually(lambda: times(door.path / "sub") > between, "moved by one that went")
        file = door.path / "file"
        file.write_bytes(b"x")
        eventually(lambda: os.getxattr(file, "user.kvfs.state") == b"sealed", "sealed")
        full = times(door.path)
        service.evict(file)
        eventually(lambda: times(door.path) > full, "an evicted file is gone")


def test_times_survive_a_clean_restart() -> None:
    with Service() as service:
        directory = service.mount / "bucket" / "directory"
        directory.mkdir(parents=True)
        before = times(directory)
        (directory / "file").write_bytes(b"x")
        (service.mount / "bucket" / "other").mkdir()
        found = times(directory), times(directory.parent)
        assert found[0] > before
        service.stop()
        service.restart()
        assert (times(directory)[0], times(directory.parent)[0]) == (found[0][0], found[1][0])
