"""Many processes write, read, map, evict and remove keys whose content follows from the key."""

from __future__ import annotations

import errno
import mmap
import os
import random
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.door import BUCKET, ON_DIRECTORY, TEST_MODES
from tests.support.holder import read_whole
from tests.support.posix import opened, pattern, start_child, wait_child, write_all
from tests.support.seeds import SEED, rounds
from tests.support.service import Service
from tests.support.small_store import MIB, check, small_service
from tests.support.waits import eventually

pytestmark = [pytest.mark.mount, pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")]


@pytest.fixture(params=TEST_MODES)
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    with small_service(request.param) as running:
        yield running


@pytest.fixture
def bucket(service: Service) -> Path:
    return service.mount / BUCKET


KEYS = 300
WORKERS = 4
OPERATIONS = rounds(600, 1200)
"""Between two restarts, all workers together."""
RESTARTS = 3
LOST_CONNECTION = (errno.ENOTCONN, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EIO, errno.ENODEV)


def content(key: int) -> bytes:
    """What the key must hold, wherever it is found."""
    return pattern(key + 1, 1000 + key * 7919 % 300_000)


class Worker:
    """Puts, reads, evicts and removes keys in a random order; raises AssertionError for wrong bytes."""

    def __init__(self, service: Service, seed: int, progress: int, stop: int, *, restarts: bool) -> None:
        self.service, self.bucket = service, service.mount / BUCKET
        self.random = random.Random(seed)
        self.temporary = self.bucket / f".tmp-{seed}"
        self.progress, self.stop, self.restarts = progress, stop, restarts
        self.right = 0

    def run(self) -> None:
        actions = (
            [self.put] * 4 + [self.read, self.map, self.direct] * 3 + [self.evict, self.unlink, self.look]
        )
        while not select.select([self.stop], [], [], 0)[0]:
            key = int(self.random.triangular(0, KEYS, 0))
            try:
                self.random.choice(actions)(key, self.bucket / f"key-{key}")
            except FileNotFoundError:
                pass
            except OSError as error:
                if not (self.restarts and error.errno in LOST_CONNECTION):
                    raise
                self.wait_for_service()
            os.write(self.progress, b".")
        assert self.right > 0, "nothing was ever read"

    def wait_for_service(self) -> None:
        def back() -> bool:
            try:
                os.stat(self.bucket)
            except OSError:
                return False
            return True

        eventually(back, "the service is back", timeout_s=60)

    def put(self, key: int, path: Path) -> None:
        data = content(key)
        try:
            with opened(self.temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as fd:
                # A mapping without its bytes is SIGBUS, which is honest but ends the worker.
                if self.random.random() < 0.3 and not self.restarts:
                    os.ftruncate(fd, len(data))
                    with mmap.mmap(fd, len(data)) as mapping:
                        mapping[:] = data
                else:
                    cut = self.random.randrange(len(data))
                    write_all(fd, data[:cut])
                    write_all(fd, data[cut:])
            os.rename(self.temporary, path)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self.temporary.unlink(missing_ok=True)

    def compare(self, key: int, found: bytes) -> None:
        assert found == content(key), f"key {key}: wrong bytes ({len(found)} of {len(content(key))})"
        self.right += 1

    def read(self, key: int, path: Path) -> None:
        with opened(path, os.O_RDONLY) as fd:
            self.compare(key, read_whole(fd))

    def map(self, key: int, path: Path) -> None:
        with opened(path, os.O_RDONLY) as fd:
            mapping = mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        if self.restarts:
            mapping.close()
            return
        self.compare(key, mapping[:])
        mapping.close()

    def direct(self, key: int, path: Path) -> None:
        with mmap.mmap(-1, MIB) as memory, opened(path, os.O_RDONLY | os.O_DIRECT) as fd:
            size = os.readv(fd, [memory])
            if size < len(content(key)):
                os.fsync(fd)  # a service that dies within a read makes it short, and the next call fails
            self.compare(key, memory[:size])

    def evict(self, key: int, path: Path) -> None:
        from kvfs.errors import DeadlinePassed, NotFound, SessionClosed

        try:
            self.service.evict(path)
        except NotFound:
            return
        except (SessionClosed, DeadlinePassed):
            if not self.restarts:
                raise
            self.wait_for_service()

    def unlink(self, key: int, path: Path) -> None:
        path.unlink()

    def look(self, key: int, path: Path) -> None:
        assert path.stat().st_size == len(content(key))
        listed = [name for name in os.listdir(self.bucket) if not name.startswith(".tmp-")]
        assert len(set(listed)) == len(listed)
        assert set(listed) <= {f"key-{i}" for i in range(KEYS)}


@pytest.mark.seeded
@pytest.mark.parametrize("restarts", [False, True], ids=["one service", "restarted service"])
def test_every_read_is_right_or_a_miss(service: Service, bucket: Path, restarts: bool) -> None:
    progress, child_progress = os.pipe()
    child_stop, stop = os.pipe()

    def make_progress() -> None:
        done = 0
        while done < OPERATIONS:
            part = os.read(progress, 65_536)
            assert part, "every worker ended"
            done += len(part)

    children = [
        start_child(Worker(service, SEED + i, child_progress, child_stop, restarts=restarts).run)
        for i in range(WORKERS)
    ]
    os.close(child_progress)
    make_progress()
    for _ in range(RESTARTS if restarts else 1):
        if restarts:
            service.kill()
            service.restart()
            while select.select([progress], [], [], 0)[0]:  # what was done before
                os.read(progress, 65_536)
        make_progress()
    os.write(stop, b"all of you")
    while os.read(progress, 65_536):
        pass
    assert [wait_child(child) for child in children] == [0] * WORKERS
    for end in (progress, child_stop, stop):
        os.close(end)
    assert check({bucket / f"key-{key}": content(key) for key in range(KEYS)}) > 0
