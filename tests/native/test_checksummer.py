"""The background checksums: right, dropped when the slot moves on, out of the way of probes, bounded."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import xxhash

from kvfs._native.seal.checksummer import Checksummer
from kvfs._native.shared import slots
from kvfs._native.shared.table import Table
from kvfs.errors import DeadlinePassed
from tests.support.waits import WAIT_S

MIB = 1 << 20


class Bench:
    """A table and a slot folder without a tier around them."""

    def __init__(self, path: Path) -> None:
        self.table = Table.create(path / "table", bytes(16), 64, 128)
        (path / "slots").mkdir()
        self.folder = os.open(path / "slots", os.O_RDONLY)

    def seal(self, slot: int, payload: bytes) -> int:
        fd = slots.create(self.folder, slot)
        os.pwrite(fd, payload, 0)
        os.close(fd)
        draft = self.table.begin(slot)
        return self.table.publish(slot, draft, kind=2, key=bytes(16), size=len(payload))

    def reads(self, slot: int) -> bool:
        """Return whether this process has a slot open: `is_held` would keep the thread from opening it."""
        held = []
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                held.append(descriptor.readlink().name)
        return slots.slot_name(slot) in held


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.table.close()
    os.close(bench.folder)


@pytest.fixture
def summer(bench: Bench) -> Iterator[Checksummer]:
    summer = Checksummer(bench.table, bench.folder, 16)
    yield summer
    summer.close()


def test_checksums_arrive(bench: Bench, summer: Checksummer) -> None:
    payloads = [os.urandom(size) for size in (0, 1, 4096, 300_000, 3 * MIB)]
    for slot, payload in enumerate(payloads):
        assert summer.push(slot, bench.seal(slot, payload))
    summer.drain(10)
    for slot, payload in enumerate(payloads):
        assert bench.table.read_header(slot).checksum == xxhash.xxh3_64_intdigest(payload)
    assert (summer.done, summer.abandoned, summer.failed) == (5, 0, 0)


def test_a_slot_that_moved_on_keeps_no_checksum(bench: Bench, summer: Checksummer) -> None:
    generation = bench.seal(0, b"old")
    assert summer.pause(0)
    assert summer.push(0, generation)
    bench.table.retire(0, generation)
    draft = bench.table.begin(0)
    bench.table.publish(0, draft, kind=2, key=bytes(16), size=3)
    summer.resume()
    summer.drain(10)
    assert bench.table.read_header(0).checksum is None
    assert summer.abandoned == 1


def test_a_missing_slot_is_dropped(bench: Bench, summer: Checksummer) -> None:
    generation = bench.seal(0, b"x")
    os.unlink(slots.slot_name(0), dir_fd=bench.folder)
    summer.push(0, generation)
    summer.drain(10)
    assert (summer.done, summer.abandoned, summer.failed) == (0, 1, 0)


def test_a_pause_takes_the_thread_off_the_slot_and_it_goes_on_after(
    bench: Bench, summer: Checksummer
) -> None:
    payload = os.urandom(16 * MIB)
    generation = bench.seal(0, payload)
    rounds = 0
    while summer.yielded == 0 and rounds < 200:
        summer.push(0, generation)
        deadline = time.monotonic() + WAIT_S
        while not (bench.reads(0) or summer.idle):
            assert time.monotonic() < deadline, "the checksum thread does not begin"
        assert summer.pause(0)
        try:
            assert not slots.is_held(bench.folder, 0), "the checksum thread was taken for a reader"
        finally:
            summer.resume()
        summer.drain(20)
        rounds += 1
    assert summer.yielded > 0
    assert bench.table.read_header(0).checksum == xxhash.xxh3_64_intdigest(payload)
    assert summer.done == rounds


def test_a_pause_of_one_slot_leaves_others_alone(bench: Bench, summer: Checksummer) -> None:
    assert summer.pause(5)
    summer.push(1, bench.seal(1, b"one"))
    summer.drain(10)
    assert bench.table.read_header(1).checksum == xxhash.xxh3_64_intdigest(b"one")
    summer.push(5, bench.seal(5, b"five"))
    with pytest.raises(DeadlinePassed):
        summer.drain(0.02)
    summer.resume()
    summer.drain(10)
    assert bench.table.read_header(5).checksum == xxhash.xxh3_64_intdigest(b"five")


def test_the_queue_is_bounded(bench: Bench, summer: Checksummer) -> None:
    generation = bench.seal(0, b"x")
    assert summer.pause(0)
    accepted = [summer.push(0, generation) for _ in range(40)]
    assert accepted.count(True) in (16, 17), "the ring, and one that the thread has taken"
    summer.resume()
    summer.drain(10)
    assert summer.push(0, generation)


def test_a_stop_drops_what_waits(bench: Bench) -> None:
    summer = Checksummer(bench.table, bench.folder, 16)
    generation = bench.seal(0, os.urandom(16 * MIB))
    for _ in range(16):
        summer.push(0, generation)
    summer.close()
    summer.close()
    assert not summer.push(0, generation)
    assert summer.pause(0)
    summer.resume()
