"""What the mount has answered is final: a service killed at any moment comes back with it, or (in a cache) without the
file, and never with what the file was before. Where the index is lost, too, a cache may have an earlier version."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from kvfs.system import linux
from tests.support.door import ON_DIRECTORY, TEST_MODES, need_mount
from tests.support.posix import in_flight, mapped_pages, opened, pattern
from tests.support.seeds import SEED, rounds
from tests.support.service import BUCKET_KINDS, STOP_WAIT_S, Service, mounts_under
from tests.support.stopped_threads import native_threads_stopped, signal_main_thread
from tests.support.waits import WAIT_S, eventually

pytestmark = [pytest.mark.mount, pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")]

ROUNDS = int(os.environ.get("KVFS_TEST_ROUNDS", rounds(2, 4)))
"""Kills in each mode; the index is removed with every other one."""


@pytest.fixture(params=TEST_MODES)
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    need_mount()
    with Service(mode=request.param, dram="64MiB", nvme="256MiB") as running:
        for kind, options in BUCKET_KINDS.items():
            running.create_bucket(kind, **options)
        yield running


Content = bytes | None
"""Bytes of a file; None where there is none."""


class Worker:
    """Changes one file again and again; knows what was answered last, and what was asked for since."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.path, self.temporary = directory / f"file{seed}", directory / f".tmp{seed}"
        self.random = random.Random(seed)
        self.answered: Content = None
        self.asked: Content = None
        self.renames = False
        """Whether the temporary name is in use."""
        self.versions = 0
        self.past: list[Content] = []
        """What the file was, and was asked to be, since the last start."""
        self.old: dict[bytes, int] = {}

    def run(self) -> None:
        try:
            while True:
                kinds = [self.overwrite, self.replace, self.replace, self.change, self.truncate, self.remove]
                self.random.choice(kinds)()
                self.past.append(self.asked)
                self.answered = self.asked
                self.renames = False
                time.sleep(self.random.choice([0, 0, 0.0005, 0.001, 0.004]))
        except OSError:  # the service is gone
            return

    def fresh(self) -> bytes:
        self.versions += 1
        return pattern(self.random.getrandbits(31), self.random.choice([10, 5000, 300_000]))

    def overwrite(self) -> None:
        self.asked = self.fresh()
        self.write(self.path, self.asked)

    def replace(self) -> None:
        self.asked, self.renames = self.fresh(), True
        self.write(self.temporary, self.asked)
        if self.random.random() < 0.3:
            time.sleep(0.002)
        os.rename(self.temporary, self.path)

    def write(self, path: Path, data: bytes) -> None:
        with opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
            assert os.write(fd, data) == len(data)

    def change(self) -> None:
        if self.answered is not None:
            data = self.fresh()[:10]
            self.asked = data + self.answered[len(data) :]
            with opened(self.path, os.O_RDWR) as fd:
                os.pwrite(fd, data, 0)

    def truncate(self) -> None:
        if self.answered is not None:
            size = self.random.randrange(1, 6000)
            self.asked = self.answered[:size] + bytes(max(size - len(self.answered), 0))
            os.truncate(self.path, size)

    def remove(self) -> None:
        if self.answered is not None and self.random.random() < 0.5:
            self.asked = None
            self.path.unlink()

    def check(self, *, durable: bool, index_lost: bool) -> None:
        """After the kill. What is there now is what was answered."""
        found = self.path.read_bytes() if self.path.exists() else None
        allowed = [self.answered, self.asked] + ([] if durable else [None])
        may_be_older = index_lost and not durable
        allowed += self.past if may_be_older else []
        shown = "nothing" if found is None else f"{len(found)} bytes that are neither"
        assert found in allowed, f"{self.path.parent.name}/{self.path.name}, version {self.versions}: {shown}"
        if self.temporary.exists():
            assert self.renames or (may_be_older and self.temporary.read_bytes() in self.past)
        self.answered = self.asked = found
        self.past = [found]
        self.temporary.unlink(missing_ok=True)


@pytest.mark.seeded
def test_no_kill_undoes_what_was_answered(service: Service) -> None:
    generator = random.Random(SEED)
    workers = [
        Worker(service.mount / bucket, SEED + number) for number, bucket in enumerate([*BUCKET_KINDS] * 2)
    ]
    for number in range(ROUNDS):
        threads = [threading.Thread(target=worker.run, daemon=True) for worker in workers]
        for thread in threads:
            thread.start()
        time.sleep(generator.uniform(0.05, 0.25))  # how much is done, and in the middle of what it ends
        service.kill()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        if number % 2:
            shutil.rmtree(service.data / "index")
        service.restart()
        for worker in workers:
            durable = worker.path.parent.name.startswith("durable")
            worker.check(durable=durable, index_lost=number % 2 == 1)
    assert min(worker.versions for worker in workers) > 0


def test_of_two_doors_the_one_that_was_answered_last_wins(service: Service) -> None:
    with service.client() as client:
        for bucket in BUCKET_KINDS:
            for number in range(12):
                path = service.mount / bucket / f"file{number % 5}"
                path.write_bytes(b"path %d" % number)
                if number % 3 == 0:
                    time.sleep(0.001)
                client.put(service.name(path), b"client %d" % number)
                assert client.get(service.name(path)) == b"client %d" % number
                assert path.read_bytes() == b"client %d" % number
                with opened(path, os.O_WRONLY) as fd:
                    os.pwrite(fd, b"PATH", 0)
                assert client.get(service.name(path)) == b"PATHnt %d" % number
        for path in service.mount.glob("*/file*"):
            eventually(lambda path=path: os.getxattr(path, "user.kvfs.state") == b"sealed", "sealed")
            assert path.read_bytes()[:7] == b"PATHnt " == client.get(service.name(path))[:7]


def test_what_another_door_renames_over_a_file_or_removes_stays_so(service: Service) -> None:
    with service.client() as client:
        for bucket in BUCKET_KINDS:
            for number in range(24):
                path, before = service.mount / bucket / f"file{number}", service.mount / bucket / "before"
                path.write_bytes(b"path")
                client.put(service.name(before), b"renamed %d" % number)
                if number % 4 == 3:
                    os.truncate(path, 2)
                    client.remove(service.name(path))
                    eventually(lambda path=path: not path.exists(), "the kernel has been notified")
                    client.rename(service.name(before), service.name(path), replace=False)
                else:
                    os.truncate(path, 2) if number % 2 else path.write_bytes(b"again")
                    client.rename(service.name(before), service.name(path))
                assert path.read_bytes() == b"renamed %d" % number == client.get(service.name(path))
        for path in service.mount.glob("*/file*"):
            eventually(lambda path=path: os.getxattr(path, "user.kvfs.state") == b"sealed", "sealed")
            assert path.read_bytes() == b"renamed " + path.name[4:].encode(), path


@pytest.mark.seeded
def test_what_was_synced_before_the_last_close_does_not_come_back(service: Service) -> None:
    for number in range(4):
        files = {
            service.mount / bucket / f"{number}": b"more" * (number + 1) for bucket in ("cache", "large")
        }
        descriptors = []
        for path, more in files.items():
            fd = os.open(path, os.O_WRONLY | os.O_CREAT)
            os.write(fd, b"synced")
            os.fsync(fd)
            os.write(fd, more)
            descriptors.append(fd)
        for fd in random.Random(SEED).sample(descriptors, len(descriptors)):
            os.close(fd)
        service.kill()
        service.restart()
        for path, more in files.items():
            assert path.read_bytes() == b"synced" + more, path


@pytest.mark.parametrize("bucket", ["cache", "durable"])
@pytest.mark.parametrize("end", ["open", "closed", "synced and closed"])
def test_what_a_sync_is_worth_once_the_file_is_written_again_through_a_mapping(
    service: Service, bucket: str, end: str
) -> None:
    """Until the close is asked for, what was synced stays. From then on a cache has the new bytes or, as long as the
    mapping keeps them from being published, nothing, unless they were synced, too."""
    path = service.mount / bucket / "file"
    with opened(path, os.O_WRONLY | os.O_CREAT) as fd:
        os.write(fd, b"synced")
        os.fsync(fd)
    eventually(lambda: os.getxattr(path, "user.kvfs.state") == b"sealed", "it is sealed")
    fd = os.open(path, os.O_RDWR)
    with mmap.mmap(fd, 6) as mapping:
        mapping[:] = b"mapped"
        if end == "synced and closed":
            os.fsync(fd)
        if end != "open":
            os.close(fd)
        service.kill()
    if end == "open":
        with suppress(OSError):
            os.close(fd)
    service.restart()
    found = path.read_bytes() if path.exists() else None
    if end == "open":
        assert found == b"synced"
    else:
        assert found == (b"mapped" if bucket == "durable" or end != "closed" else None)


def test_a_clean_stop_keeps_what_was_closed_a_moment_before(service: Service) -> None:
    for number in range(4):
        files = [service.mount / bucket / f"{number}" for bucket in ("large", "cache")]
        for path in files:
            path.write_bytes(b"%d" % number)
        service.stop()
        service.restart()
        for path in files:
            assert path.exists(), f"{path}: {service.log()}"
            assert path.read_bytes() == b"%d" % number


def test_a_clean_stop_keeps_what_was_closed_though_the_kernel_was_not_heard(service: Service) -> None:
    """close() is answered before the kernel says that a file has no holder any more, which an unmount may swallow."""
    if service.mode == "plain":
        pytest.skip("one thread serves all")
    files = [service.mount / bucket / "file" for bucket in ("large", "cache")]
    with ExitStack() as mappings:
        for path in files:
            with path.open("w+b") as writer:
                writer.write(b"bytes")
                writer.flush()
                mappings.enter_context(mapped_pages(writer.fileno(), 5))
        held = mappings.pop_all()
    stop_as_last_holders_end(service, held)
    service.restart()
    assert [path.read_bytes() for path in files] == [b"bytes"] * 2


def stop_as_last_holders_end(service: Service, held: ExitStack) -> None:
    """Stop cleanly while `held` ends, of which the native threads hear nothing before the mount is gone."""
    assert service.process is not None
    with native_threads_stopped(service.pid):
        held.close()
        signal_main_thread(service.pid, signal.SIGTERM)
        eventually(lambda: not mounts_under(service.mount), "unmounted")
    assert service.process.wait(STOP_WAIT_S) == 0


@pytest.mark.parametrize("is_used", [False, True])
def test_a_clean_stop_keeps_what_was_closed_though_its_release_was_not_read(
    service: Service, is_used: bool
) -> None:
    if service.mode == "plain":
        pytest.skip("one thread serves all")
    files = [service.mount / bucket / "file" for bucket in ("large", "cache")]
    with ExitStack() as others, ExitStack() as held:
        if is_used:
            others.enter_context(suppress(OSError))  # its mount is gone then
            others.enter_context(opened(service.mount / "cache" / "other", os.O_WRONLY | os.O_CREAT))
        for path in files:
            with path.open("wb") as writer:
                writer.write(b"bytes")
                writer.flush()
                held.enter_context(in_flight(writer.fileno()))
        stop_as_last_holders_end(service, held)
    service.restart()
    assert [path.read_bytes() for path in files] == [b"bytes"] * 2


def truncate(path: Path) -> None:
    os.truncate(path, 4)


def pin(path: Path) -> None:
    os.setxattr(path, "user.kvfs.pin", b"1")


def close_and_pin(path: Path) -> None:
    path.write_bytes(b"again")
    pin(path)


def close_and_chmod(path: Path) -> None:
    path.write_bytes(b"again")
    path.chmod(0o600)


def make_for_reading(path: Path) -> None:
    path.unlink()
    os.close(os.open(path, os.O_CREAT | os.O_RDONLY))


def rename_from_a_cache(path: Path) -> None:
    other = path.parent.parent / "cache" / "other"
    other.write_bytes(b"moved")
    other.rename(path)


def rename_while_it_is_written(path: Path) -> None:
    with opened(path.parent / "other", os.O_WRONLY | os.O_CREAT) as fd:
        os.write(fd, b"being written")
        (path.parent / "other").rename(path)


CHANGES: list[tuple[Callable[[Path], None], bytes]] = [
    (truncate, b"firs"),
    (pin, b"first"),
    (close_and_pin, b"again"),
    (close_and_chmod, b"again"),
    (make_for_reading, b""),
    (rename_from_a_cache, b"moved"),
    (rename_while_it_is_written, b"being written"),
]


@pytest.mark.seeded
def test_changes_by_path_are_on_the_device_of_a_durable_bucket_before_they_are_answered(
    service: Service,
) -> None:
    for number in range(2):
        expected = {}
        bucket = service.mount / ("durable" if number % 2 else "durable-large")
        for change, content in CHANGES:
            path = bucket / f"{number}-{change.__name__}"
            path.write_bytes(b"first")
            eventually(lambda path=path: os.getxattr(path, "user.kvfs.state") == b"sealed", "sealed")
            expected[path] = change, content
        for path, (change, _) in random.Random(SEED).sample([*expected.items()], len(expected)):
            change(path)
        service.kill()
        linux.unmount(service.data / "dram", linux.MNT_DETACH)
        shutil.rmtree(service.data / "dram")
        shutil.rmtree(service.data / "index")
        service.restart()
        for path, (change, content) in expected.items():
            assert path.read_bytes() == content, change
            assert os.getxattr(path, "user.kvfs.pin") == (b"1" if "pin" in change.__name__ else b"0")
            assert (path.stat().st_mode & 0o777 == 0o600) == (change is close_and_chmod), change


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_file_that_was_synced_has_one_name_when_a_kill_follows_its_rename(
    service: Service, is_closed: bool
) -> None:
    """Its copy on the device has the name of its fsync until the service hears of the rename."""
    old, new = service.mount / "cache/.tmp", service.mount / "cache/file"
    fd = os.open(old, os.O_WRONLY | os.O_CREAT)
    try:
        os.write(fd, b"bytes")
        os.fsync(fd)
    finally:
        if is_closed:
            os.close(fd)
    os.rename(old, new)
    service.kill()
    if not is_closed:
        with suppress(OSError):  # its mount is gone
            os.close(fd)
    service.restart()
    assert not old.exists()
    assert new.read_bytes() == b"bytes"
