"""The NVMe tier against a plain dict: written, renamed, dropped, reclaimed, and found again by a replay."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from kvfs._native.shared.slots import xxh3_64
from kvfs.errors import ConfigError, FormatMismatch, NoSpace, Superseded
from kvfs.formats import SEGMENT_DATA_START
from kvfs.index.rows import BucketRow, NameRow
from kvfs.limits import MIB
from tests.support.faulty_device import FailingDevice
from tests.support.seeds import SEED, rounds
from tests.support.waits import WAIT_S
from tiers.device.threads import thread_device
from tiers.log.entries import Barrier
from tiers.log.records import MetaBody
from tiers.log.segments import Segment
from tiers.model.tier import Kind, StoreKey, object_key
from tiers.nvme.extent_reader import ExtentReader
from tiers.nvme.stored import Fault, NvmeObserver, Stored
from tiers.nvme.tier import NvmeTier
from tiers.recovery.log_replay import Replayed
from tiers.recovery.open_nvme import open_nvme

STORE = bytes(range(16))
CAPACITY = 16 * MIB
SEGMENT = 1 * MIB
CACHE, DURABLE = 1, 2
CHANGES = rounds(150, 250)
"""Of a life: about as many bytes as the tier has."""


class Bytes:
    """A payload in memory."""

    def __init__(self, data: bytes) -> None:
        self.size_bytes = len(data)
        self.checksum: int | None = xxh3_64(data)
        self._data = data

    async def read_into(self, view: memoryview) -> int:
        await trio.lowlevel.checkpoint()
        view[: len(self._data)] = self._data
        return xxh3_64(self._data)


def content(object_id: int, size: int) -> bytes:
    return random.Random(object_id).randbytes(size)


def bucket_row(bucket_id: int) -> BucketRow:
    class_ = "durable" if bucket_id == DURABLE else "cache"
    return BucketRow(f"b{bucket_id}".encode(), bucket_id, class_, 0, 0, 0o755, 0, 0)  # type: ignore[arg-type]


def row(object_id: int, size: int) -> NameRow:
    return NameRow(object_id, object_id, size, 0o644, 0, 0, 7, 8, object_id, 0)


@dataclass
class Bench:
    """A tier, and what it should hold."""

    directory: Path
    tier: NvmeTier
    found: Replayed
    names: dict[bytes, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    next_id: int = 100

    def put(self, name: bytes, size: int, bucket_id: int = CACHE) -> int:
        object_id, self.next_id = self.next_id, self.next_id + 1
        stored = Stored(object_key(object_id), object_id, size, bucket_id, kept=bucket_id == DURABLE)
        data, extent = content(object_id, size), self.tier.pool.extent_bytes
        payloads = [Bytes(data[start : start + extent]) for start in range(0, max(size, 1), extent)]
        bucket = f"b{bucket_id}".encode()
        self.tier.put(stored, payloads, MetaBody(bucket, name, row(object_id, size)))
        old = self.names.get(name)
        self.names[name], self.sizes[object_id] = object_id, size
        if old is not None:
            self.tier.log.append(Barrier())
            self.tier.drop(old)
            self.sizes.pop(old)
        return object_id

    def drop(self, name: bytes) -> None:
        object_id = self.names.pop(name)
        self.tier.drop(object_id)
        self.sizes.pop(object_id)

    def rename(self, old: bytes, new: bytes) -> None:
        object_id = self.names.pop(old)
        stored = self.tier.objects.get(object_id)
        if stored is not None:
            bucket = f"b{stored.bucket_id}".encode()
            self.tier.put_name(stored, MetaBody(bucket, new, row(object_id, stored.size_bytes)))
        self.names[new] = object_id

    async def check(self, *, evictable: bool) -> int:
        """Every object is right or, if that may be, gone; how many are there."""
        there = 0
        for name, object_id in self.names.items():
            stored = self.tier.objects.get(object_id)
            if stored is None:
                assert evictable, f"{name!r}, object {object_id}, is gone"
                continue
            there += 1
            size = self.sizes[object_id]
            out = bytearray(size)
            assert await ExtentReader(self.tier).read(stored, 0, memoryview(out)) == size
            assert out == content(object_id, size)
        unknown = {s.object_id for s in self.tier.objects.values()} - set(self.names.values())
        assert not unknown, f"objects {sorted(unknown)} should not be there"
        return there


@asynccontextmanager
async def tier_at(
    directory: Path, capacity: int = CAPACITY, *, run: bool = True
) -> AsyncIterator[tuple[NvmeTier, Replayed]]:
    """A tier that is left as a crash would leave it: whatever was not written is lost."""
    device = thread_device()
    tier, found = await open_nvme(
        device, directory, store_id=STORE, capacity_bytes=capacity, segment_bytes=SEGMENT
    )
    try:
        async with trio.open_nursery() as nursery:
            if run:
                nursery.start_soon(tier.log.run)
            yield tier, found
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await device.aclose()


def fresh(tier: NvmeTier) -> None:
    for bucket_id in (CACHE, DURABLE):
        tier.put_bucket(bucket_row(bucket_id))


def check_totals(tier: NvmeTier) -> None:
    assert tier.pool.kept_bytes == sum(segment.kept_bytes for segment in tier.pool.segments)
    assert tier.pool.live_bytes == sum(segment.live_bytes for segment in tier.pool.segments)


async def reopened(bench: Bench, check: Callable[[Bench], None] = lambda bench: None) -> int:
    async with tier_at(bench.directory, run=False) as (tier, found):
        bench.tier, bench.found = tier, found
        names = {}
        for of, (_, name) in found.names.items():
            meta = found.meta(of)
            assert name == meta.bucket + b"\0" + meta.key
            assert meta.row.object_id == of
            names[meta.key] = meta.row.object_id
        for name, object_id in names.items():
            assert bench.names.get(name) == object_id
        check(bench)
        return await bench.check(evictable=True)


async def test_what_was_written_is_read_and_found_again(tmp_path: Path) -> None:
    async with tier_at(tmp_path) as (tier, found):
        fresh(tier)
        bench = Bench(tmp_path, tier, found)
        for number, size in enumerate((0, 1, 511, 512, 4095, 4096, 4097, 70_000, MIB // 4, MIB, 3 * MIB + 5)):
            bench.put(b"n%d" % number, size)
        bench.rename(b"n3", b"moved/n3")
        bench.put(b"n4", 5_000)
        bench.drop(b"n5")
        await tier.log.settle()
        assert await bench.check(evictable=False) == 10
    assert await reopened(bench) == 10
    assert not bench.found.losers


async def test_blocks_need_no_name(tmp_path: Path) -> None:
    digest, parent = b"\xaa" * 16, b"\xbb" * 16
    async with tier_at(tmp_path) as (tier, _):
        fresh(tier)
        stored = Stored(StoreKey(Kind.BLOCK, digest), 7, 4096, CACHE, parent, uid=5, sealed_at_ns=9)
        tier.put(stored, [Bytes(content(7, 4096))], None)
        await tier.log.settle()
    async with tier_at(tmp_path, run=False) as (tier, _):
        again = tier.objects[7]
        assert (again.key.digest, again.parent, again.uid, again.sealed_at_ns) == (digest, parent, 5, 9)


async def test_a_removed_name_stays_removed_without_a_footer(tmp_path: Path) -> None:
    async with tier_at(tmp_path) as (tier, found):
        fresh(tier)
        bench = Bench(tmp_path, tier, found)
        for number in range(50):
            bench.put(b"%d" % number, 10_000)
        for number in range(0, 50, 2):
            bench.drop(b"%d" % number)
        await tier.log.settle()
    assert await reopened(bench) == 25


class Gone(Bytes):
    """A payload whose slot was given to another object before it could be read."""

    async def read_into(self, view: memoryview) -> int:
        raise Superseded("the slot has another object")


class WrittenAgain(NvmeObserver):
    def damaged(self, stored: Stored, fault: Fault) -> bool:
        return True


class EvictedAlone(NvmeObserver):
    def evicted(self, stored: Stored) -> list[int]:
        return [stored.object_id]


class Counted(NvmeObserver):
    def __init__(self, hits: dict[int, int]) -> None:
        self.hits = hits

    def hits_of(self, stored: Stored) -> int:
        return self.hits.get(stored.object_id, 0)


async def test_two_half_writings_make_no_object(tmp_path: Path) -> None:
    """Neither was ever whole, so nobody deletes the object, whose name may have been given away since."""
    async with tier_at(tmp_path) as (tier, _):
        fresh(tier)
        tier.observer = WrittenAgain()
        extent = tier.pool.extent_bytes
        data = content(7, 2 * extent)
        for written, lost in ((0, 1), (1, 0)):
            stored = Stored(object_key(7), 7, len(data), CACHE)
            tier.begin(stored)
            stored.pieces = [None, None]
            tier.put_extent(stored, written, Bytes(data[written * extent :][:extent]))
            tier.put_extent(stored, lost, Gone(data[lost * extent :][:extent]))
            tier.put_name(stored, MetaBody(b"b1", b"name", row(7, len(data))))
            await tier.log.settle()
            assert not tier.holds(7)
    async with tier_at(tmp_path, run=False) as (tier, found):
        assert not tier.objects
        assert not found.names


@pytest.mark.seeded
@pytest.mark.parametrize("seed", range(SEED, SEED + 6))
async def test_a_random_life_with_reclaim_and_restarts(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    bench: Bench | None = None
    for life in range(4):
        async with tier_at(tmp_path) as (tier, found):
            if bench is None:
                fresh(tier)
                bench = Bench(tmp_path, tier, found)
            bench.tier, bench.found = tier, found
            tier.observer = EvictedAlone()
            bench.names = {name: i for name, i in bench.names.items() if i in tier.objects}
            for _ in range(CHANGES):
                names = list(bench.names)
                action = rng.random()
                if action < 0.7 or not names:
                    durable = rng.random() < 0.05
                    size = rng.choice((0, 100, 5_000, 50_000, 200_000, 600_000))
                    name = rng.choice(names) if names and rng.random() < 0.3 else b"n%d" % bench.next_id
                    stored = tier.objects.get(bench.names.get(name, 0))
                    if stored is not None:
                        durable = stored.kept
                    bench.put(name, 20_000 if durable else size, DURABLE if durable else CACHE)
                elif action < 0.85:
                    bench.drop(rng.choice(names))
                else:
                    bench.rename(rng.choice(names), b"r%d" % rng.randrange(10**9))
                if rng.random() < 0.05:
                    await tier.log.settle()
            await tier.log.settle()
            await bench.check(evictable=True)
            for name, object_id in bench.names.items():
                stored = tier.objects.get(object_id)
                assert stored is not None or name not in bench.names or bench.sizes[object_id] != 20_000
            live = sum(s.live_bytes for s in tier.pool.segments)
            assert 0 <= live <= tier.used_bytes <= tier.capacity_bytes
            check_totals(tier)
            if life % 2:
                await tier.log.close()
        there = {i for i in bench.names.values() if i in tier.objects}

        def same_as_before(bench: Bench, there: set[int] = there) -> None:
            assert set(bench.tier.objects) == there

        await reopened(bench, same_as_before)
    assert tier.log.counts.segments_reclaimed > 0


async def test_durable_objects_are_refused_when_they_fill_the_tier(tmp_path: Path) -> None:
    async with tier_at(tmp_path, 8 * MIB) as (tier, found):
        fresh(tier)
        bench = Bench(tmp_path, tier, found)
        full = 0
        while tier.pool.kept_bytes + tier.record_bytes(100_000) <= tier.durable_capacity_bytes:
            bench.put(b"%d" % full, 100_000, DURABLE)
            await tier.log.settle()
            full += 1
        with pytest.raises(NoSpace, match="durable objects would take"):
            tier.check_durable_room((100_000,))
        for number in range(300):  # and it goes on: overwritten, dropped, cache objects in between
            name = b"%d" % (number % full)
            bench.put(name, 100_000, DURABLE)
            bench.put(b"c%d" % number, 100_000)
            await tier.log.settle()
        bench.names = {n: i for n, i in bench.names.items() if i in tier.objects or not n.startswith(b"c")}
        assert await bench.check(evictable=False) >= full
        check_totals(tier)


async def test_room_for_a_durable_object_is_known_without_a_look_at_each_segment(tmp_path: Path) -> None:
    """A device of 16 TiB has 65,536 of them, and each durable seal asks."""
    async with tier_at(tmp_path) as (tier, found):
        fresh(tier)
        bench = Bench(tmp_path, tier, found)
        for number in range(20):
            bench.put(b"%d" % number, 100_000, DURABLE)
        await tier.log.settle()

        class Segments(list[Segment]):
            def __iter__(self) -> Iterator[Segment]:
                raise AssertionError("all segments are looked at")

        segments = tier.pool.segments
        tier.pool.segments = Segments(segments)
        assert tier.has_durable_room(100_000)
        tier.check_durable_room([100_000])
        tier.promise(10)
        tier.promise(-10)
        tier.pool.segments = segments
        check_totals(tier)


async def test_hot_objects_stay_and_amplification_is_bounded(tmp_path: Path) -> None:
    rng = random.Random(4)
    async with tier_at(tmp_path) as (tier, found):
        fresh(tier)
        bench = Bench(tmp_path, tier, found)
        hits: dict[int, int] = {}
        tier.observer = Counted(hits)
        hot: list[int] = []
        for number in range(1_000):
            if number % 10 == 0 and len(hot) < 20:
                hot.append(bench.put(b"hot%d" % number, 50_000))
            bench.put(b"c%d" % number, 50_000)
            for object_id in rng.sample(hot, min(len(hot), 5)):
                hits[object_id] = hits.get(object_id, 0) + 1
            if number % 10 == 0:
                await tier.log.settle()
        await tier.log.settle()
        assert sum(object_id in tier.objects for object_id in hot) >= 18
        assert tier.write_amplification < 1.34


@pytest.mark.parametrize("trim", [False, True])
async def test_a_freed_segment_is_trimmed_and_stays_allocated(tmp_path: Path, trim: bool) -> None:
    async with tier_at(tmp_path) as (tier, found):
        fresh(tier)
        tier.pool.trims = trim
        bench = Bench(tmp_path, tier, found)
        with trio.fail_after(WAIT_S):
            while not tier.log.counts.segments_reclaimed:
                bench.put(b"name", 200_000)
                await tier.log.settle()
        freed = tier.pool.free[-1]
        file = tmp_path / f"{freed.number:08x}.seg"
        assert file.stat().st_blocks * 512 >= SEGMENT
        assert any(file.read_bytes()[SEGMENT_DATA_START:]) is not trim


async def test_a_pool_that_does_not_fit_leaves_room_for_a_smaller_one(tmp_path: Path) -> None:
    device = FailingDevice(thread_device())
    device.fail("create_file", NoSpace, at=20)
    with pytest.raises(NoSpace):
        await open_nvme(device, tmp_path / "nvme", store_id=STORE, capacity_bytes=256 * MIB)
    assert list((tmp_path / "nvme").iterdir()) == []
    tier, _ = await open_nvme(device, tmp_path / "nvme", store_id=STORE, capacity_bytes=CAPACITY)
    assert tier.log.pool.segment_bytes == SEGMENT
    tier.log.pool.close_files()
    await device.aclose()


async def test_another_store_or_geometry_is_refused(tmp_path: Path) -> None:
    async with tier_at(tmp_path, run=False):
        pass
    device = thread_device()
    with pytest.raises(FormatMismatch, match="segments of store"):
        await open_nvme(device, tmp_path, store_id=bytes(16), capacity_bytes=CAPACITY)
    with pytest.raises(ConfigError, match="makes 4 segments"):
        await open_nvme(device, tmp_path, store_id=STORE, capacity_bytes=4 * MIB)
    await device.aclose()
