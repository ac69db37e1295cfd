"""Capacity of a pool: grown, shrunk, out of memory; blocks evicted for others; segments handed back after a restart."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvfs.errors import DeviceMissing, InvalidRequest, NoSpace, OutOfResources
from tests.support.device_pools import MIB, MappedPool, MemorySegments
from tiers.eviction.policy import policy_named
from tiers.hbm.block_pool import BlockPool
from tiers.hbm.exported_segments import ExportedSegments
from tiers.hbm.handover import HandedBlock
from tiers.hbm.tier import HbmTier
from tiers.model.tier import Kind, Sealed, SealHeader, StoreKey

SLOT = 256 << 10


class Pool:
    """A pool of blocks and one client; `put` writes blocks of one size."""

    def __init__(self, segments: int = 2, maker: MemorySegments | None = None) -> None:
        self.maker = maker or MemorySegments()
        self.tier = HbmTier(self.maker, segments * MIB, segment_bytes=MIB, max_slots=64)
        self.blocks = BlockPool(self.tier, policy_named("lru-leaf"))
        self.here = MappedPool(self.tier)

    def put(self, number: int) -> Sealed:
        draft = self.blocks.reserve(SLOT, self.here.client)
        self.here.write(draft, payload(number))
        return self.blocks.seal(draft, self.here.client, header(number), checksum(number))

    def has(self, *numbers: int) -> list[bool]:
        return [each is not None for each in self.find(*numbers)]

    def find(self, *numbers: int) -> list[Sealed | None]:
        return self.blocks.find([header(number).key.digest for number in numbers], 0)


def found(pool: Pool, number: int) -> Sealed:
    [sealed] = pool.find(number)
    assert sealed is not None
    return sealed


def payload(number: int) -> bytes:
    return bytes([number + 1]) * SLOT


def checksum(number: int) -> int:
    return 1000 + number


def header(number: int) -> SealHeader:
    return SealHeader(StoreKey(Kind.BLOCK, number.to_bytes(16, "little")), number, number)


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.here.close()


def test_the_block_used_longest_ago_is_evicted(pool: Pool) -> None:
    for number in range(8):
        pool.put(number)
    assert pool.has(0) == [True]
    pool.put(8)
    assert pool.has(*range(9)) == [True, False, *[True] * 7]
    assert len(pool.blocks) == 8


def test_blocks_of_another_size_empty_whole_segments(pool: Pool) -> None:
    for number in range(8):
        pool.put(number)
    draft = pool.blocks.reserve(MIB, pool.here.client)
    assert pool.tier.place(draft).slot_bytes == MIB
    assert 4 <= sum(pool.has(*range(8))) <= 4


def test_the_first_seal_wins(pool: Pool) -> None:
    first = pool.put(1)
    used = pool.tier.usage().used_bytes
    assert pool.put(1) == first
    assert pool.tier.usage().used_bytes == used


def test_a_block_is_found_in_its_bucket_alone(pool: Pool) -> None:
    sealed = [pool.put(number) for number in (0, 1, 3)]
    assert pool.find(0, 1, 2, 3) == [*sealed[:2], None, sealed[2]]
    assert pool.blocks.find([header(0).key.digest], 1) == [None]
    pool.blocks.remove_other_buckets({1})
    assert len(pool.blocks) == 0


def test_capacity_shrinks_once_clients_unmap(pool: Pool) -> None:
    for number in range(5):
        pool.put(number)
    last = found(pool, 4)
    with pool.here.lease(last.extent) as lease:
        evicted = pool.blocks.resize(MIB)
        assert evicted == 1
        assert pool.has(*range(5)) == [True] * 4 + [False]
        assert pool.here.tier.to_unmap(pool.here.client) == []
        assert lease.bytes() == payload(4)
    pool.tier.sweep()
    assert pool.tier.describe()["segment_bytes"] == 2 * MIB
    assert pool.tier.to_unmap(pool.here.client) == [1]
    with pytest.raises(NoSpace):
        pool.tier.reserve(SLOT, pool.here.client)
    pool.here.unmap(1)
    assert pool.tier.describe()["segment_bytes"] == MIB
    assert pool.blocks.resize(2 * MIB) == 0
    pool.put(5)
    assert len(pool.blocks) == 5


def test_a_device_out_of_memory_is_a_full_tier() -> None:
    pool = Pool(segments=4, maker=MemorySegments(device_bytes=2 * MIB))
    for number in range(9):
        pool.put(number)
    assert len(pool.blocks) == 8
    assert pool.tier.describe()["segment_bytes"] == 2 * MIB
    pool.here.close()


def hand_back(old: Pool, new: MappedPool, blocks: BlockPool, handed: list[HandedBlock]) -> list[object]:
    """Hand segment 0 of an old service's pool to a new one."""
    fd, token = old.tier.map_segment(old.here.client, 0)
    return list(blocks.adopt(new.client, os.dup(fd), token, handed, expected))


def expected(key: StoreKey) -> int | None:
    number = int.from_bytes(key.digest, "little")
    return checksum(number) if number < 8 else None


def test_segments_outlive_the_service(pool: Pool) -> None:
    handed = []
    for number in range(3):
        place = pool.tier.place(pool.put(number).extent)
        handed.append(HandedBlock(place.offset_bytes, SLOT, header(number), checksum(number)))
    fresh = Pool()
    wrong = HandedBlock(handed[2].offset_bytes, SLOT, header(2), 7)
    extents = hand_back(pool, fresh.here, fresh.blocks, [*handed[:2], wrong])
    assert [extent is not None for extent in extents] == [True, True, False]
    assert fresh.has(0, 1, 2) == [True, True, False]
    for number in (0, 1):
        with fresh.here.lease(found(fresh, number).extent) as lease:
            assert lease.bytes() == payload(number)
    assert fresh.tier.place(fresh.put(5).extent).segment == 1, (
        "nobody knows who still writes to an old segment"
    )
    assert hand_back(pool, fresh.here, fresh.blocks, handed[:1]) == extents[:1]
    for number in (0, 1):
        fresh.blocks.remove(header(number).key.digest)
    assert fresh.tier.to_unmap(fresh.here.client) == [0]
    assert hand_back(pool, fresh.here, fresh.blocks, handed[:1]) == [None]
    fresh.here.unmap(0)
    assert fresh.tier.describe()["segment_bytes"] == MIB
    fresh.here.close()


@pytest.mark.parametrize(
    "block",
    [
        HandedBlock(-SLOT, SLOT, header(1), checksum(1)),
        HandedBlock(MIB, SLOT, header(1), checksum(1)),
        HandedBlock(SLOT // 2, SLOT, header(1), checksum(1)),
        HandedBlock(SLOT, SLOT + 1, header(1), checksum(1)),
        HandedBlock(SLOT, -1, header(1), checksum(1)),
        HandedBlock(0, SLOT, header(1), checksum(1)),
        HandedBlock(SLOT, SLOT, header(9), checksum(9)),
    ],
)
def test_what_does_not_fit_is_not_taken_over(pool: Pool, block: HandedBlock) -> None:
    """Beside a block at offset 0."""
    pool.put(0)
    fresh = Pool()
    good = HandedBlock(0, SLOT, header(0), checksum(0))
    first, second = hand_back(pool, fresh.here, fresh.blocks, [good, block])
    assert (first is not None, second) == (True, None)
    assert fresh.tier.usage().used_bytes == SLOT
    fresh.here.close()


def test_only_an_earlier_services_segment_is_taken_over(pool: Pool) -> None:
    pool.put(0)
    with pytest.raises(InvalidRequest, match="made by this service"):
        hand_back(pool, pool.here, pool.blocks, [])
    full = Pool(segments=1)
    full.put(1)
    with pytest.raises(NoSpace):
        hand_back(pool, full.here, full.blocks, [])
    full.here.close()


class Device:
    """A driver's device: exports a descriptor that outlives the allocation."""

    uuid, granularity_bytes, shares_memory = "GPU-1", 2 * MIB, True

    def __init__(self) -> None:
        self.open = 0
        self.room = 1

    def create(self, size_bytes: int) -> Device:
        if not self.room:
            raise OutOfResources("cuMemCreate: out of memory")
        self.room -= 1
        self.open += 1
        return self

    def export(self) -> int:
        return os.memfd_create("allocation")

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.open -= 1


def test_a_device_keeps_nothing_but_descriptors() -> None:
    device = Device()
    maker = ExportedSegments(device, 4 * MIB)
    assert maker.device == "GPU-1"
    os.close(maker.make(4 * MIB))
    assert device.open == 0
    with pytest.raises(NoSpace, match="GPU-1"):
        maker.make(4 * MIB)
    with pytest.raises(DeviceMissing, match="units of 2097152"):
        ExportedSegments(device, MIB)
    device.shares_memory = False
    with pytest.raises(DeviceMissing, match="exports no memory"):
        ExportedSegments(device, 4 * MIB)
