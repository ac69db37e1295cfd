"""The pools of a device: one for each uid over one capacity, blocks that are admitted, and seals that are refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.errors import NoSpace, NotFound, QuotaExceeded, WrongChecksum
from tests.support.device_pools import MIB, MemorySegments
from tiers.data_dir import open_home
from tiers.eviction.policy import policy_named
from tiers.hbm.device_pools import DevicePools, Seat, SharedDevice
from tiers.hbm.handover import HandedBlock
from tiers.hbm.segment_tokens import SegmentTokens
from tiers.hbm.wanted import Wanted
from tiers.model.tier import Extent, Kind, SealHeader, StoreKey

SLOT = 256 << 10
BUCKET = 7


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


def checksum(key: StoreKey) -> int | None:
    number = int.from_bytes(key.digest, "big")
    return 1000 + number if number < 100 else None


def header(number: int, bucket: int = BUCKET) -> SealHeader:
    return SealHeader(StoreKey(Kind.BLOCK, digest(number)), number, number, bucket_id=bucket)


class Pools:
    """The pools of one device of two segments, and processes of several uids."""

    def __init__(self) -> None:
        self.maker = MemorySegments()
        self.pools = DevicePools(
            [SharedDevice(self.maker, 2 * MIB)],
            policy=lambda: policy_named("lru-leaf"),
            expected=checksum,
            segment_bytes=MIB,
            max_slots=64,
        )

    def attach(self, uid: int) -> Seat:
        pid = os.getpid()
        return self.pools.attach(self.maker.device, uid, pid, lambda: os.pidfd_open(pid))

    def leave(self, seat: Seat) -> None:
        seat.pool.tier.detach(seat.client)
        self.pools.sweep()

    def reserve(self, seat: Seat, number: int) -> Extent:
        for _ in range(2):
            seat.pool.find([digest(number)], BUCKET)
        reserved = seat.pool.reserve(seat.client, digest(number), SLOT, 4)
        assert reserved is not None
        return reserved[0]

    def put(self, seat: Seat, number: int, bucket: int = BUCKET) -> None:
        seat.pool.seal(self.reserve(seat, number), seat.client, header(number, bucket), 1000 + number)

    def has(self, seat: Seat, *numbers: int) -> list[bool]:
        return [each is not None for each in seat.pool.find([digest(number) for number in numbers], BUCKET)]

    @property
    def segments(self) -> int:
        return int(self.pools.status()["segment_bytes"]) // MIB


@pytest.fixture
def pools() -> Iterator[Pools]:
    made = Pools()
    yield made
    made.pools.close()
    assert made.segments == 0


def test_a_block_gets_a_slot_when_it_is_missed_for_the_second_time(pools: Pools) -> None:
    seat = pools.attach(1)
    seat.pool.find([digest(1), digest(2)], BUCKET)
    assert seat.pool.reserve(seat.client, digest(1), SLOT, 4) is None
    seat.pool.find([digest(1)], BUCKET)
    reserved = seat.pool.reserve(seat.client, digest(1), SLOT, 4)
    assert reserved is not None
    assert seat.pool.reserve(seat.client, digest(2), SLOT, 4) is None
    seat.pool.seal(reserved[0], seat.client, header(1), 1001)
    assert pools.has(seat, 1, 2) == [True, False]
    counts = pools.pools.counts
    assert (counts.hits, counts.misses, counts.promoted) == (1, 4, 1)


def test_misses_are_forgotten_the_oldest_first() -> None:
    wanted = Wanted(2)
    for each in (b"a", b"b", b"a", b"c", b"b"):
        wanted.missed(each)
    assert [wanted.admits(each) for each in (b"a", b"b", b"c")] == [False, False, False]
    wanted.missed(b"b")
    assert wanted.admits(b"b")


@pytest.mark.parametrize(("number", "kind"), [(1, WrongChecksum), (100, NotFound)])
def test_a_seal_without_the_stores_checksum_is_refused(
    number: int, kind: type[Exception], pools: Pools
) -> None:
    seat = pools.attach(1)
    draft = pools.reserve(seat, number)
    with pytest.raises(kind, match=digest(number).hex()):
        seat.pool.seal(draft, seat.client, header(number), 999)
    assert pools.has(seat, number) == [False]
    assert seat.client.drafts == set()
    assert pools.pools.counts.refused == 1


def test_uids_have_pools_of_their_own_over_one_capacity(pools: Pools) -> None:
    mine, theirs = pools.attach(1), pools.attach(2)
    for number in range(4):
        pools.put(mine, number)
        pools.put(theirs, number + 10)
    assert pools.has(mine, 0, 10) == [True, False]
    assert pools.has(theirs, 0, 10) == [False, True]
    pools.put(mine, 5)  # in the place of a block of its own
    assert pools.has(mine, 0, 1, 5) == [True, False, True]
    assert all(pools.has(theirs, 10, 11, 12, 13))
    assert pools.pools.counts.evicted == 1
    assert pools.segments == 2
    with pytest.raises(NoSpace, match=pools.maker.device):
        pools.reserve(pools.attach(3), 6)


def test_a_pool_outlives_its_processes_until_another_needs_its_room(pools: Pools) -> None:
    first = pools.attach(1)
    for number in range(8):
        pools.put(first, number)
    pools.leave(first)
    again = pools.attach(1)
    assert all(pools.has(again, *range(8)))
    pools.leave(again)
    other = pools.attach(2)
    pools.put(other, 9)
    assert pools.segments == 1
    assert pools.has(pools.attach(1), 0) == [False]


def test_a_pool_without_processes_and_blocks_gives_its_segments_up(pools: Pools) -> None:
    seat = pools.attach(1)
    pools.put(seat, 1)
    pools.pools.remove(digest(1))
    pools.pools.sweep()
    assert pools.segments == 1
    pools.leave(seat)
    assert pools.segments == 0
    assert pools.pools.status()["pools"] == []


def test_a_block_is_of_one_bucket(pools: Pools) -> None:
    seat = pools.attach(1)
    pools.put(seat, 1, bucket=8)
    assert pools.has(seat, 1) == [False]
    pools.put(seat, 1)
    assert pools.has(seat, 1) == [True]
    assert seat.pool.find([digest(1)], 8) == [None]
    pools.pools.remove_other_buckets({8})
    assert pools.has(seat, 1) == [False]


def test_a_block_that_is_wrong_on_the_device_is_dropped_once(pools: Pools) -> None:
    seat = pools.attach(1)
    pools.put(seat, 1)
    [found] = seat.pool.find([digest(1)], BUCKET)
    assert found is not None
    extent = found[0].extent
    assert not seat.pool.drop_damaged(digest(1), Extent(extent.slot, extent.generation + 2), BUCKET)
    assert seat.pool.drop_damaged(digest(1), extent, BUCKET)
    assert not seat.pool.drop_damaged(digest(1), extent, BUCKET)
    assert pools.has(seat, 1) == [False]
    assert pools.pools.counts.damaged == 1


def test_drafts_of_a_process_are_bounded(pools: Pools) -> None:
    seat = pools.attach(1)
    for number in range(4):
        pools.reserve(seat, number)
    with pytest.raises(QuotaExceeded, match="4 drafts"):
        pools.reserve(seat, 4)


def test_a_device_that_is_not_shared_is_named(pools: Pools) -> None:
    with pytest.raises(NotFound, match="GPU-other"):
        pools.pools.attach("GPU-other", 1, os.getpid(), lambda: os.pidfd_open(os.getpid()))


def handed(number: int, at: int = 0) -> HandedBlock:
    return HandedBlock(at * SLOT, SLOT, header(number), 1000 + number)


def segment() -> int:
    return MemorySegments().make(MIB)


def test_what_is_handed_back_shares_the_capacity_of_the_device(pools: Pools) -> None:
    alice, bob = pools.attach(1), pools.attach(2)
    for number in range(5):
        pools.put(alice, number)
    assert pools.segments == 2
    fd, token = segment(), bob.tokens.make()
    with pytest.raises(NoSpace, match="no room for 1048576"):
        pools.pools.adopt(bob, os.dup(fd), token, [handed(7)])
    pools.leave(alice)
    [found] = pools.pools.adopt(bob, os.dup(fd), token, [handed(7)])
    assert found is not None
    assert pools.has(bob, 7) == [True]
    assert pools.segments == 1
    again = pools.attach(2)
    assert pools.pools.adopt(again, os.dup(fd), token, [handed(7), handed(8, 1)])[0] == found
    assert pools.has(bob, 7, 8) == [True, True]
    assert pools.pools.counts.adopted == 2
    os.close(fd)


def test_a_block_that_is_elsewhere_by_then_stays_there(pools: Pools) -> None:
    seat, fd = pools.attach(1), segment()
    pools.put(seat, 7)
    assert pools.pools.adopt(seat, os.dup(fd), seat.tokens.make(), [handed(7)]) == [None]
    assert pools.has(seat, 7) == [True]
    assert pools.segments == 1
    os.close(fd)


def test_tokens_are_of_one_key_and_pool() -> None:
    made = SegmentTokens(b"k" * 32, "GPU-a", 1, MIB)
    others = [
        SegmentTokens(b"l" * 32, "GPU-a", 1, MIB),
        SegmentTokens(b"k" * 32, "GPU-b", 1, MIB),
        SegmentTokens(b"k" * 32, "GPU-a", 11, MIB),
        SegmentTokens(b"k" * 32, "GPU-a", 1, 2 * MIB),
    ]
    token = made.make()
    assert made.make() != token
    assert SegmentTokens(b"k" * 32, "GPU-a", 1, MIB).has_made(token)
    assert [each.has_made(token) for each in others] == [False] * 4
    assert not made.has_made(token[:-1])
    assert not made.has_made(b"")


def test_a_key_that_cannot_be_written_is_one_starts_alone(tmp_path: Path) -> None:
    (tmp_path / "hbm.key.new").mkdir()
    home = open_home(tmp_path)
    try:
        first, second = home.hbm_key(), home.hbm_key()
        assert len({first, second}) == 2
        (tmp_path / "hbm.key.new").rmdir()
        assert home.hbm_key() == home.hbm_key()
    finally:
        home.close(clean=False)
