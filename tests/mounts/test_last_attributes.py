"""Attributes that are set before, while and after a file is published: the last ones set count, by every way to it."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from tests.support.door import ON_DIRECTORY, TEST_MODES, need_mount
from tests.support.posix import opened
from tests.support.service import BUCKET_KINDS, Service
from tests.support.small_store import state, watched, write_sealed
from tests.support.waits import eventually

pytestmark = [pytest.mark.mount, pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")]

ROUNDS: Final = 3
CHANGES: Final = {"cache": 40, "durable": 10, "large": 40, "durable-large": 10}
"""Of a file after its close: the first of them come before it is published, the last after that."""


@pytest.fixture(scope="module", params=TEST_MODES)
def shared(request: pytest.FixtureRequest) -> Iterator[Service]:
    need_mount()
    with Service(mode=request.param, dram="32MiB", nvme="256MiB") as service:
        for kind, options in BUCKET_KINDS.items():
            service.create_bucket(kind, **options)
        yield service


@pytest.fixture
def running(shared: Service) -> Iterator[Service]:
    with watched(shared):
        yield shared
    assert not shared.complaints()


class Changes:
    """Sets attributes of one file, by its name or a descriptor, and knows those set last."""

    def __init__(self, path: Path, seed: int) -> None:
        self._path = path
        self._random = random.Random(seed)
        found = path.stat()
        self._last = {
            "mode": found.st_mode & 0o777,
            "uid": found.st_uid,
            "gid": found.st_gid,
            "mtime": found.st_mtime_ns,
        }
        self._set_time = False

    def set_one(self, target: Path | int) -> None:
        kind = self._random.choice(("mode", "owner", "times"))
        if kind == "mode":
            self._last["mode"] = 0o600 | self._random.randrange(0o200)
            os.chmod(target, self._last["mode"])
        elif kind == "owner":
            self._last["uid"], self._last["gid"] = self._random.randrange(1000), self._random.randrange(1000)
            os.chown(target, self._last["uid"], self._last["gid"])
        else:
            self._last["mtime"], self._set_time = self._random.randrange(1 << 60), True
            os.utime(target, ns=(self._last["mtime"], self._last["mtime"]))

    def check(self, target: Path | int, when: str) -> None:
        found = os.stat(target)
        shown = {
            "mode": found.st_mode & 0o777,
            "uid": found.st_uid,
            "gid": found.st_gid,
            "mtime": found.st_mtime_ns,
        }
        if not self._set_time:
            shown["mtime"] = self._last["mtime"]
        assert shown == self._last, (when, target)


@pytest.mark.parametrize("hole", [False, True], ids=["whole", "hole"])
@pytest.mark.parametrize("has_reader", [False, True], ids=["alone", "read"])
@pytest.mark.parametrize("kind", BUCKET_KINDS)
def test_the_last_one_set_counts(running: Service, kind: str, has_reader: bool, hole: bool) -> None:
    for seed in range(ROUNDS):
        path = running.mount / kind / f"{has_reader}-{hole}-{seed}"
        with ExitStack() as stack:
            writer = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            reader = os.open(path, os.O_RDONLY) if has_reader else None
            if reader is not None:
                stack.callback(os.close, reader)
            ways: list[Path | int] = [path] if reader is None else [path, reader]
            os.pwrite(writer, b"content", 0)
            if hole:
                os.pwrite(writer, b"behind", 1 << 20)
            changes = Changes(path, seed)
            for way in (*ways, writer) if seed % 2 else ():
                changes.set_one(way)
                changes.check(writer, "written")
            os.close(writer)
            for number in range(CHANGES[kind]):
                way = ways[number % len(ways)] if seed % 3 else path
                changes.set_one(way)
                changes.check(way, f"closed, {number}")
            for way in ways:
                changes.check(way, "closed")
        eventually(lambda path=path: state(path) == b"sealed", "it is sealed")
        changes.check(path, "sealed")
        assert path.read_bytes()[:7] == b"content"
        changes.check(path, "read again")
        path.unlink()


class ChangeTimes:
    """What stat(2) shows of one file's time of change, whatever it is called."""

    def __init__(self) -> None:
        self._shown: list[tuple[str, int]] = []

    def look(self, target: Path | int, when: str) -> None:
        self._shown.append((when, os.stat(target).st_ctime_ns))

    def check(self) -> None:
        """Check that it was one and the same each time."""
        assert len({shown for _, shown in self._shown}) == 1, self._shown


@pytest.mark.parametrize("before", ["new", "replaced", "set"])
@pytest.mark.parametrize("content", ["whole", "hole", "empty"])
@pytest.mark.parametrize("has_reader", [False, True], ids=["alone", "read"])
@pytest.mark.parametrize("kind", BUCKET_KINDS)
def test_the_time_of_change_stays_when_a_file_is_published(
    running: Service, kind: str, has_reader: bool, content: str, before: str
) -> None:
    directory = running.mount / kind / f"{before}-{has_reader}-{content}"
    directory.mkdir()
    for number in range(ROUNDS):  # the later ones are made natively, where a directory was made by path
        path, moved, times = directory / f"{number}", directory / f"moved-{number}", ChangeTimes()
        if before == "replaced":
            write_sealed(path, b"what was there")
        with ExitStack() as stack:
            writer = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            if has_reader:
                stack.callback(os.close, os.open(path, os.O_RDONLY))
            if content != "empty":
                os.pwrite(writer, b"content", 0)
            if content == "hole":
                os.pwrite(writer, b"behind", 1 << 20)
            if before == "set":
                os.fchmod(writer, 0o600)
            times.look(writer, "written")
            os.close(writer)
            times.look(path, "closed")
            if number % 2:
                path.rename(moved)
                path = moved
                times.look(path, "moved")
        eventually(lambda path=path: state(path) == b"sealed", "it is sealed")
        times.look(path, "sealed")
        path.rename(again := directory / f"again-{number}")
        times.look(again, "moved again")
        times.check()
    shutil.rmtree(directory)


@pytest.fixture(params=BUCKET_KINDS)
def path(running: Service, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A sealed file."""
    path = running.mount / request.param / "sealed"
    write_sealed(path, b"content")
    yield path
    for left in path.parent.iterdir():
        left.unlink()


def shows(path: Path, what: str, *expected: int) -> None:
    """Wait until the path shows these attributes: the kernel is told in a thread of its own that those it has of the
    file's newest version are old."""

    def found() -> tuple[int, ...]:
        status = path.stat()
        return status.st_mode & 0o777, status.st_uid, status.st_gid, status.st_mtime_ns

    eventually(lambda: found() == expected, what)


def test_a_descriptor_of_an_earlier_version_is_one_of_the_file(path: Path) -> None:
    with path.open("rb") as reader:
        with path.open("r+b") as writer:
            writer.write(b"changed")
            writer.flush()
            os.fchmod(reader.fileno(), 0o640)
            assert (
                os.fstat(reader.fileno()).st_mode & 0o777
                == os.fstat(writer.fileno()).st_mode & 0o777
                == 0o640
            )
        eventually(lambda: state(path) == b"sealed", "it is sealed again")
        os.fchown(reader.fileno(), 7, 8)
        os.utime(reader.fileno(), ns=(5, 5))
        shows(path, "mode owner time", 0o640, 7, 8, 5)
        path.rename(path.with_name("moved"))
        os.fchmod(reader.fileno(), 0o600)
        shows(path.with_name("moved"), "the mode", 0o600, 7, 8, 5)
        assert reader.read() == b"content"


def test_a_file_that_another_door_renames_keeps_what_is_set_by_its_descriptor(
    running: Service, path: Path
) -> None:
    with path.open("rb") as reader, running.client() as client:
        client.rename(f"{path.parent.name}/sealed", f"{path.parent.name}/moved")
        os.fchmod(reader.fileno(), 0o640)
        assert path.with_name("moved").stat().st_mode & 0o777 == 0o640


def test_a_removed_file_shows_what_is_set_by_its_descriptor(path: Path) -> None:
    with path.open("rb") as reader:
        path.unlink()
        os.fchmod(reader.fileno(), 0o640)
        os.utime(reader.fileno(), ns=(5, 5))
        found = os.fstat(reader.fileno())
        assert (found.st_mode & 0o777, found.st_mtime_ns, found.st_nlink) == (0o640, 5, 0)
    assert not path.exists()


def test_what_replaces_a_file_keeps_its_own(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"another")
    with path.open("rb") as reader:
        other.replace(path)
        os.fchmod(reader.fileno(), 0o600)
        assert os.fstat(reader.fileno()).st_mode & 0o777 == 0o600
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_mode_set_by_a_path_that_was_found_before_another_version_took_the_name(path: Path) -> None:
    """As of a chmod(2) between whose look-up and whose change another opens the file for writing, while it is read."""
    with opened(path, os.O_PATH) as found:
        with path.open("rb") as reader, path.open("r+b") as writer:
            writer.write(b"changed")
            writer.flush()
            assert os.fstat(writer.fileno()).st_ino != os.fstat(found).st_ino, "another version has the name"
            os.chmod(f"/proc/self/fd/{found}", 0o640)
            eventually(lambda: path.stat().st_mode & 0o777 == 0o640, "the mode is shown by the name")
            assert os.fstat(writer.fileno()).st_mode & 0o777 == 0o640
            assert os.fstat(reader.fileno()).st_mode & 0o777 == 0o640
        eventually(lambda: state(path) == b"sealed", "it is sealed again")
        assert path.stat().st_mode & 0o777 == 0o640, "which the kernel keeps from here on"
        os.chmod(f"/proc/self/fd/{found}", 0o604)
        eventually(lambda: path.stat().st_mode & 0o777 == 0o604, "the mode is shown by the name")
    assert path.read_bytes() == b"changed"
