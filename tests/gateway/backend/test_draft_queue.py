"""Bodies that wait for quota, on a clock that runs as fast as the test."""

from __future__ import annotations

import pytest
import trio

from gateway.backend.body_budget import Draft
from gateway.backend.draft_queue import DraftQueue
from gateway.protocol.errors import S3Error
from kvfs import limits
from kvfs.errors import NoSpace, QuotaExceeded


class Quota:
    """A quota of so many bytes; drafts are given by hand."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.queue = DraftQueue()
        self.given: list[int] = []

    async def take(self, size: int) -> None:
        async def ask() -> Draft:
            await trio.lowlevel.checkpoint()
            if size > self.free:
                raise QuotaExceeded("no quota")
            self.free -= size
            self.given.append(size)
            return Draft(None, size, 0, -1)  # type: ignore[arg-type]

        await self.queue.reserve(ask)


async def test_who_waits_gets_room_when_there_is_some(autojump_clock: trio.testing.MockClock) -> None:
    quota = Quota(10)
    await quota.take(8)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(quota.take, 5)
        await trio.sleep(limits.GATEWAY_ROOM_WAIT_S / 2)
        assert quota.given == [8]
        quota.free += 8
    assert quota.given == [8, 5]


async def test_a_large_body_is_not_passed_by_small_ones(autojump_clock: trio.testing.MockClock) -> None:
    quota = Quota(2)
    async with trio.open_nursery() as nursery:
        for size in (8, 1, 1):
            nursery.start_soon(quota.take, size)
            await trio.sleep(1)
        assert quota.given == []
        quota.free += 10
    assert quota.given == [8, 1, 1]


async def test_nobody_waits_for_ever(autojump_clock: trio.testing.MockClock) -> None:
    quota, began_s = Quota(1), trio.current_time()
    ends: list[tuple[str, int, int]] = []

    async def refused(size: int) -> None:
        with pytest.raises(S3Error) as error:
            await quota.take(size)
        ends.append((error.value.code, error.value.status, round(trio.current_time() - began_s)))

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(refused, 8)
    assert ends == [("SlowDown", 503, limits.GATEWAY_ROOM_WAIT_S)] * 3
    await quota.take(1)


@pytest.mark.parametrize("full_s", [limits.GATEWAY_ROOM_WAIT_S / 2, limits.GATEWAY_ROOM_WAIT_S * 2])
async def test_dram_that_is_full_is_waited_for(autojump_clock: trio.testing.MockClock, full_s: float) -> None:
    """Wait for what is still being written to the device: but not for ever."""
    began_s = trio.current_time()

    async def ask() -> Draft:
        await trio.lowlevel.checkpoint()
        if trio.current_time() - began_s < full_s:
            raise NoSpace("full")
        return Draft(None, 1, 0, -1)  # type: ignore[arg-type]

    if full_s < limits.GATEWAY_ROOM_WAIT_S:
        assert (await DraftQueue().reserve(ask)).slot == 1
    else:
        with pytest.raises(NoSpace):
            await DraftQueue().reserve(ask)
        assert trio.current_time() - began_s == pytest.approx(limits.GATEWAY_ROOM_WAIT_S)


async def test_pairs_are_taken_one_after_the_other(autojump_clock: trio.testing.MockClock) -> None:
    """Two that each hold a half of the quota, and want another half, would wait for each other."""
    quota, done = Quota(2), []

    async def copy() -> None:
        async with quota.queue.pair():
            await quota.take(1)
            await trio.sleep(1)
            await quota.take(1)
        await trio.sleep(1)
        quota.free += 2
        done.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(copy)
    assert len(done) == 3


async def test_a_pair_that_cannot_be_had_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    queue = DraftQueue()

    async def refused() -> None:
        with pytest.raises(S3Error, match="SlowDown"):
            async with queue.pair():
                pass

    async with queue.pair(), trio.open_nursery() as nursery:
        nursery.start_soon(refused)
    async with queue.pair():
        pass
