"""The service dies, or who uses it dies or is interrupted. A service of its own for each test."""

from __future__ import annotations

import errno
import mmap
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs import limits
from kvfs.cli import service_commands
from tests.support.door import BUCKET, ON_DIRECTORY, TEST_MODES
from tests.support.holder import DIED, ERROR, RIGHT, Holder
from tests.support.posix import expect_errno, opened, pattern, start_child, wait_child, write_all
from tests.support.processes import task_state
from tests.support.service import Service
from tests.support.small_store import MIB, check, refill, small_service, state, write_sealed
from tests.support.waits import WAIT_S, eventually

pytestmark = [pytest.mark.mount, pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")]


@pytest.fixture(params=TEST_MODES)
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    with small_service(request.param) as running:
        yield running


@pytest.fixture
def bucket(service: Service) -> Path:
    return service.mount / BUCKET


# --- the service dies --------------------------------------------------------------------------------------
def test_kill_and_restart_with_readers_and_writers(service: Service, bucket: Path) -> None:
    kept = {bucket / f"kept-{i}": pattern(i, 200_000 + i) for i in range(20)}
    for path, data in kept.items():
        write_sealed(path, data)
    path, data = next(iter(kept.items()))
    with Holder(path, data, "descriptor") as reader, Holder(path, data, "populated mapping") as mapped:
        writer = os.open(bucket / "draft", os.O_RDWR | os.O_CREAT)
        write_all(writer, pattern(99, 500_000))
        service.kill()
        assert reader.look() in (RIGHT, ERROR)
        assert mapped.look() in (RIGHT, DIED)
        with expect_errno(errno.ENOTCONN):
            os.stat(bucket / "draft")

        service.restart()
        assert not (bucket / "draft").exists()
        check(kept)
        # Old descriptors still reach their slots through passthrough: nobody else may get those.
        scribble(writer)
        expected = refill(bucket, 7)
        scribble(writer)
        assert check(expected) >= len(expected) // 4
        assert reader.look() in (RIGHT, ERROR)
        assert mapped.look() in (RIGHT, DIED)
        try:
            os.close(writer)
        except OSError as error:
            assert error.errno in (errno.ENOTCONN, errno.ECONNABORTED)  # noqa: PT017
        assert check(expected) >= len(expected) // 4
    assert not (bucket / "draft").exists()


def scribble(fd: int) -> None:
    """Write through a descriptor of the dead service; an error is as good."""
    for offset in range(0, 4 * MIB, 65_536):
        try:
            os.pwrite(fd, b"\xee" * 65_536, offset)
        except OSError:
            return


def test_kill_and_restart_many_times(service: Service, bucket: Path) -> None:
    expected: dict[Path, bytes] = {}
    for round_number in range(4):
        for i in range(10):
            path = bucket / f"file-{i}"
            data = pattern(100 * round_number + i, 50_000 * (i + 1))
            # A name is at one of its two contents until the restart shows which.
            (bucket / ".tmp").write_bytes(data)
            os.rename(bucket / ".tmp", path)
            expected[path] = data
        for path in expected:
            eventually(lambda path=path: state(path) == b"sealed", "sealed")
        service.kill()
        service.restart()
        check(expected)


def test_a_clean_stop_with_open_files(service: Service, bucket: Path) -> None:
    kept = {bucket / f"kept-{i}": pattern(i, 100_000) for i in range(10)}
    for path, data in kept.items():
        write_sealed(path, data)
    path, data = next(iter(kept.items()))
    with Holder(path, data, "descriptor") as reader, Holder(path, data, "populated mapping") as mapped:
        writer = os.open(bucket / "draft", os.O_RDWR | os.O_CREAT)
        write_all(writer, b"half")
        # Files are open, so the mount is busy: the service detaches it and still ends in time.
        service.stop()
        assert reader.look() in (RIGHT, ERROR)
        assert mapped.look() in (RIGHT, DIED)
        service.restart()
        check(kept)
        assert not (bucket / "draft").exists()
        expected = refill(bucket, 3)
        assert check(expected) > 0
        assert reader.look() in (RIGHT, ERROR)
        assert mapped.look() in (RIGHT, DIED)
        try:
            os.close(writer)
        except OSError as error:
            assert error.errno in (errno.ENOTCONN, errno.ECONNABORTED)  # noqa: PT017


# --- a client dies or is interrupted -----------------------------------------------------------------------
def test_a_killed_writer_leaves_nothing(service: Service, bucket: Path) -> None:
    """Half a file under its final name, from a process that was killed: nobody may take it for whole."""
    ready, child_ready = os.pipe()

    def writer() -> None:
        fd = os.open(bucket / "half", os.O_RDWR | os.O_CREAT)
        write_all(fd, pattern(1, 600_000))
        mapping = mmap.mmap(fd, 600_000)
        mapping[:4] = b"gone"
        os.write(child_ready, b".")
        signal.pause()

    pid = start_child(writer)
    assert os.read(ready, 1) == b"."
    assert (bucket / "half").stat().st_size == 600_000
    os.kill(pid, signal.SIGKILL)
    assert wait_child(pid) == -signal.SIGKILL
    for end in (ready, child_ready):
        os.close(end)
    eventually(lambda: not (bucket / "half").exists(), "the draft of the killed writer is gone")
    with service.client() as client:
        assert list(client.list(f"{BUCKET}/")) == []
    assert check(expected := refill(bucket, 2)) >= len(expected) // 4


def test_calls_under_a_storm_of_signals(bucket: Path) -> None:
    """Each signal sends INTERRUPT for the call in flight; the call is retried and must have happened once."""

    def work() -> None:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
        for i in range(150):
            directory = bucket / f"directory-{i}"
            directory.mkdir()
            path = directory / "file"
            with opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
                write_all(fd, pattern(i, 100_000))
                os.fsync(fd)
            os.rename(path, directory / "moved")
            assert (directory / "moved").read_bytes() == pattern(i, 100_000)
            assert os.listdir(directory) == ["moved"]
            (directory / "moved").unlink()
            directory.rmdir()
        signal.setitimer(signal.ITIMER_REAL, 0)

    children = [start_child(work)]
    assert [wait_child(child) for child in children] == [0]
    assert os.listdir(bucket) == []


def test_a_process_that_waits_for_a_stopped_service_can_be_interrupted(
    service: Service, bucket: Path
) -> None:
    """SIGINT and SIGKILL end a call that nobody answers; the service, when it goes on, is unharmed."""
    write_sealed(bucket / "file", b"content")
    # Of their own: the kernel holds a directory's lock while it waits for a name in it.
    parents = {name: bucket / f"of-{name}" for name in ("interrupted", "killed")}
    for parent in parents.values():
        parent.mkdir()
    started, child_started = os.pipe()

    def wait_for_service(name: str) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            os.write(child_started, b".")
            (parents[name] / "made").mkdir()
        except KeyboardInterrupt:
            os._exit(42)

    with service.paused():
        interrupted = start_child(lambda: wait_for_service("interrupted"))
        killed = start_child(lambda: wait_for_service("killed"))
        assert os.read(started, 1) + os.read(started, 1) == b".."
        for child in (interrupted, killed):
            eventually(lambda child=child: sleeps(child), "the child waits for the service")
        os.kill(interrupted, signal.SIGINT)
        os.kill(killed, signal.SIGKILL)
        # A request that nobody has read yet is taken back at once; one that was read waits for its answer,
        # unless its process is killed.
        assert wait_child(killed) == -signal.SIGKILL
    os.close(started)
    os.close(child_started)
    # Its mkdir was made, or was interrupted before it was.
    assert wait_child(interrupted) in (0, 42)
    assert (bucket / "file").read_bytes() == b"content"
    for parent in parents.values():
        (parent / "made").mkdir(exist_ok=True)
        assert os.listdir(parent) == ["made"]


def test_an_unmount_ends_the_calls_that_wait_for_a_stopped_service(
    service: Service, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else does: they have no deadline. Whether the service answers, `kvfs umount` waits to see: this one never
    does."""
    monkeypatch.setattr(limits, "ANSWER_WAIT_S", 0.05)

    def wait_for_service() -> None:
        try:
            (bucket / "made").mkdir()
        except OSError as error:
            assert error.errno in (errno.ECONNABORTED, errno.ENOTCONN)  # noqa: PT017 - in a child: this is the answer
        else:
            raise AssertionError("it was answered")

    with service.paused():
        waiting = start_child(wait_for_service)
        eventually(lambda: sleeps(waiting), "the child waits for the service")
        service_commands.umount(str(service.mount))
        assert wait_child(waiting) == 0
    assert service.running.wait(WAIT_S) == 0, "a service without its mount stops"


def sleeps(pid: int) -> bool:
    """Whether the process waits for something in the kernel."""
    return task_state(Path(f"/proc/{pid}")) in "SD"
