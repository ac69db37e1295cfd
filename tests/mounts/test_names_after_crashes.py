"""Renames, removals and overwrites that were answered, and a kill right after the last answer.

The index decides after a kill alone. Where it is lost with DRAM, as when the power fails, a cache's name has something
that it had before, whole, and no object has two names; a durable bucket has what was answered. What a device loses of
unsynced writes is `tests/faults/test_power_cuts.py`'s.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvfs.system import linux
from tests.support.door import ON_DIRECTORY, TEST_MODES, need_mount
from tests.support.seeds import SEED, rounds
from tests.support.service import Service

pytestmark = [pytest.mark.mount, pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")]

ROUNDS = int(os.environ.get("KVFS_TEST_ROUNDS", rounds(2, 4)))
NAMES = [f"{directory}/{number}" for directory in ("a", "b") for number in range(5)]


@pytest.fixture(params=TEST_MODES)
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    need_mount()
    with Service(mode=request.param, dram="64MiB", nvme="256MiB") as running:
        for name in ("cache", "durable"):
            bucket = running.create_bucket(name, durable=name == "durable")
            for directory in ("a", "b"):
                (bucket / directory).mkdir()
        yield running


@dataclass
class Bucket:
    """A bucket, what was answered of its names, and what they have had since the last start."""

    path: Path
    chance: random.Random
    names: dict[str, bytes] = field(default_factory=dict)
    past: dict[str, set[bytes]] = field(default_factory=dict)
    versions: int = 0

    def change(self) -> None:
        self.chance.choice([self.write, self.write, self.move, self.move, self.remove])()

    def write(self) -> None:
        self.versions += 1
        name, size = self.chance.choice(NAMES), self.chance.choice([20, 5_000, 200_000])
        data = b"%s %d %s" % (self.path.name.encode(), self.versions, self.chance.randbytes(size))
        (self.path / name).write_bytes(data)
        self.now(name, data)

    def move(self) -> None:
        if self.names:
            source, target = self.chance.choice(sorted(self.names)), self.chance.choice(NAMES)
            (self.path / source).rename(self.path / target)
            self.now(target, self.names.pop(source))

    def remove(self) -> None:
        if self.names:
            name = self.chance.choice(sorted(self.names))
            (self.path / name).unlink()
            del self.names[name]

    def now(self, name: str, data: bytes) -> None:
        self.names[name] = data
        self.past.setdefault(name, set()).add(data)

    def found(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.path)): path.read_bytes()
            for path in self.path.rglob("*")
            if path.is_file()
        }

    def check(self, *, index_lost: bool) -> None:
        found = self.found()
        if self.path.name == "durable":
            assert found == self.names
        elif index_lost:
            assert all(data in self.past.get(name, ()) for name, data in found.items())
            assert len(set(found.values())) == len(found), "an object has two names"
        else:
            assert found.items() <= self.names.items()
        self.names, self.past = found, {name: {data} for name, data in found.items()}


def lose_power(service: Service) -> None:
    linux.unmount(service.data / "dram", linux.MNT_DETACH)
    shutil.rmtree(service.data / "dram")
    shutil.rmtree(service.data / "index")


@pytest.mark.seeded
def test_a_kill_right_after_an_answer(service: Service) -> None:
    chance = random.Random(SEED)
    buckets = [Bucket(service.mount / name, chance) for name in ("cache", "durable")]
    for number in range(ROUNDS):
        for _ in range(chance.randrange(2, 80)):
            chance.choice(buckets).change()
        service.signal(signal.SIGKILL)
        if number % 2:
            lose_power(service)
        service.restart()
        for bucket in buckets:
            bucket.check(index_lost=number % 2 == 1)
            for directory in ("a", "b"):
                (bucket.path / directory).mkdir(exist_ok=True)
    assert all(bucket.versions for bucket in buckets)
