"""Room for bodies: it grows as they come, and all of them can always be finished. Against a plain model."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.backend.body_budget import BodyBudget, Holding
from gateway.backend.draft_queue import DraftQueue
from gateway.protocol.errors import S3Error
from kvfs import limits
from kvfs.errors import QuotaExceeded

MIB = 1 << 20


@dataclass
class Body:
    """What a client is sending."""

    size_bytes: int
    received_bytes: int = 0
    given_up: bool = False

    @property
    def body_done(self) -> bool:
        return self.received_bytes >= self.size_bytes

    def give_up(self) -> None:
        self.given_up = True


class Tier:
    """The budget and the queue as a process has them."""

    def __init__(self, capacity_bytes: int, largest_bytes: int) -> None:
        self.room = BodyBudget(self.more)
        self.room.resize(capacity_bytes, largest_bytes)
        self.queue = DraftQueue(self.room.hurry)

    async def more(self, holding: Holding) -> None:
        async def ask() -> None:
            await trio.lowlevel.checkpoint()
            self.room.set(holding, holding.next_bytes)

        await self.queue.grow(ask, holding.owner)

    async def send(self, owner: str, body: Body, rate: float) -> Holding:
        """Receive as from a client at so many bytes a second does; ends when the body does."""

        async def ask() -> Holding:
            await trio.lowlevel.checkpoint()
            return self.room.admit(owner, body.size_bytes, body)

        holding = await self.queue.reserve(ask, owner)
        try:
            while not body.body_done and not body.given_up:
                if body.received_bytes >= holding.held_bytes:
                    await holding.grow()
                step = min(max(1, int(rate)), holding.held_bytes - body.received_bytes)
                await trio.sleep(step / rate)
                body.received_bytes += step
        finally:
            holding.release()
        return holding


async def test_what_is_announced_takes_no_room(autojump_clock: trio.testing.MockClock) -> None:
    tier = Tier(64 * MIB, 32 * MIB)
    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(tier.send, "slow", Body(32 * MIB), 300.0)
        await trio.sleep(1)
        for owner in ("slow", "other"):
            with trio.fail_after(1):
                await tier.send(owner, Body(4096), 1e6)
            with trio.fail_after(2):
                await tier.send(owner, Body(32 * MIB), 100e6)
        nursery.cancel_scope.cancel()


async def test_slow_bodies_are_left_alone_while_there_is_room(autojump_clock: trio.testing.MockClock) -> None:
    tier, body = Tier(64 * MIB, 16 * MIB), Body(100_000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tier.send, "slow", body, 300.0)
        for _ in range(50):
            await tier.send("quick", Body(8 * MIB), 50e6)
    assert body.body_done
    assert tier.room.given_up == 0


async def test_slow_bodies_give_way_to_who_waits(autojump_clock: trio.testing.MockClock) -> None:
    """Slow bodies end while others still wait for their room; one that comes fast enough stays."""
    tier, quick = Tier(32 * MIB, 16 * MIB), Body(14 * MIB)
    slow = [Body(16 * MIB) for _ in range(24)]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tier.send, "quick", quick, 2e6)
        for body in slow:
            nursery.start_soon(tier.send, "slow", body, 300.0)
        await trio.sleep(2)
        began_s = trio.current_time()
        await tier.send("other", Body(4 * MIB), 50e6)
        await tier.send("slow", Body(4 * MIB), 50e6)
        assert trio.current_time() - began_s < limits.GATEWAY_ROOM_WAIT_S
        assert tier.room.given_up > 0
        await trio.sleep(10)
        assert quick.body_done
        assert not quick.given_up
        nursery.cancel_scope.cancel()


async def test_an_owner_has_a_share(autojump_clock: trio.testing.MockClock) -> None:
    room = Tier(100 * MIB, 10 * MIB).room
    held = [room.admit("many", MIB) for _ in range(75)]
    with pytest.raises(QuotaExceeded):
        room.admit("many", MIB)
    held += [room.admit("other", MIB) for _ in range(25)]
    with pytest.raises(QuotaExceeded):
        room.admit("third", MIB)
    for each in held:
        each.release()
        each.release()
    assert room.admit("third", 75 * MIB).held_bytes == 75 * MIB


async def test_large_objects_on_their_way_are_bounded() -> None:
    room = Tier(100 * MIB, 10 * MIB).room
    share = limits.MAX_TRANSFERS * limits.OWNER_ROOM_PERCENT // 100
    for _ in range(share):
        room.begin_transfer("many")
    with pytest.raises(QuotaExceeded):
        room.begin_transfer("many")
    for _ in range(limits.MAX_TRANSFERS - share):
        room.begin_transfer("other")
    with pytest.raises(QuotaExceeded):
        room.begin_transfer("third")
    room.end_transfer("many")
    room.begin_transfer("third")


BODIES = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(1, 16 * MIB), st.floats(1e6, 1e9)), min_size=1, max_size=24
)


@settings(deadline=None, max_examples=50)
@given(BODIES)
def test_bodies_that_come_at_all_are_all_finished(bodies: list[tuple[str, int, float]]) -> None:
    """However many begin at once, in whatever order they fill what they have: nobody waits for one who waits for him,
    and nobody is refused who would have had his turn."""

    async def run() -> None:
        tier = Tier(32 * MIB, 16 * MIB)
        sent = [(owner, Body(size_bytes), rate) for owner, size_bytes, rate in bodies]
        async with trio.open_nursery() as nursery:
            for owner, body, rate in sent:
                nursery.start_soon(_until_taken, tier, owner, body, rate)
        assert all(body.body_done and not body.given_up for _, body, _ in sent)
        assert tier.room.admit("a", 16 * MIB).held_bytes == 16 * MIB

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


async def _until_taken(tier: Tier, owner: str, body: Body, rate: float) -> None:
    """Try as clients do, which come again after SlowDown."""
    for _ in range(20):
        try:
            await tier.send(owner, body, rate)
            return
        except S3Error:
            body.received_bytes = 0


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from("ab"), st.integers(1, 20), st.booleans()), max_size=60
    )
)
def test_what_is_held_can_always_be_finished(steps: list[tuple[int, str, int, bool]]) -> None:
    """Every state that the room lets happen has an order in which all of them end (tried out, not computed)."""

    async def run() -> None:
        room, held = Tier(32 * MIB, 16 * MIB).room, list[Holding]()
        for number, owner, mib, ends in steps:
            try:
                if number < len(held):
                    if ends:
                        held.pop(number).release()
                    else:
                        room.set(held[number], held[number].next_bytes)
                else:
                    held.append(room.admit(owner, mib * MIB, Body(mib * MIB)))
            except QuotaExceeded:
                pass
            _check(held)

    trio.run(run)


def _check(held: list[Holding]) -> None:
    limit, share = 32 * MIB, 24 * MIB
    left = {each: each.held_bytes for each in held}
    assert sum(left.values()) <= limit
    while left:
        free = limit - sum(left.values())
        own = {owner: share - sum(v for k, v in left.items() if k.owner == owner) for owner in "ab"}
        ended = [k for k, v in left.items() if k.total_bytes - v <= min(free, own[k.owner])]
        assert ended, left
        del left[ended[0]]
