"""The health of one peer: what counts as its failure, and how long it is not asked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import pytest
import trio
from trio.testing import MockClock

from kvfs import limits
from kvfs.errors import DeadlinePassed, KvfsError, TierUnreachable
from tests.support.machines import SECRET
from tiers.remote.connections.identity import Identity
from tiers.remote.link import PeerLink, Read, Want
from tiers.remote.peer import Peer
from tiers.remote.read_queue import Urgency

OWN = Identity(b"m" * 16, SECRET)


async def test_a_peer_that_stays_down_is_tried_for_days(autojump_clock: MockClock) -> None:
    async def refuse(host: str, port: int, own: Identity) -> tuple[PeerLink, bytes]:
        raise OSError("refused")

    peer = Peer("peer:1", "peer", 1, OWN, refuse)
    with trio.move_on_after(3 * 86_400):
        await peer.run()
    assert peer.counts["failures"] > 3 * 86_400 / limits.MAX_REMOTE_BACKOFF_S / 1.5
    with pytest.raises(TierUnreachable):
        await peer.match(bytes(16), bytes(16), 1.0)


class SlowLink:
    """Answers after a while; a call that ends before leaves it closed."""

    transport = "tcp"

    def __init__(self, answer_s: float) -> None:
        self.answer_s = answer_s
        self.is_usable = True

    async def match(self, namespace: bytes, digests: bytes, wait_s: float) -> list[int]:
        if (late := await self._answer(wait_s)) is not None:
            raise late
        return [1]

    async def read(
        self, namespace: bytes, wants: Sequence[Want], wait_s: float, *, urgent: bool
    ) -> tuple[list[Read], KvfsError | None]:
        return [], await self._answer(wait_s)

    def close(self) -> None:
        self.is_usable = False

    async def _answer(self, wait_s: float) -> DeadlinePassed | None:
        self.is_usable = False
        with trio.move_on_after(wait_s):
            await trio.sleep(self.answer_s)
            self.is_usable = True
            return None
        return DeadlinePassed("late")


def slow_peer(link: SlowLink) -> Peer:
    async def open_link(host: str, port: int, own: Identity) -> tuple[PeerLink, bytes]:
        link.is_usable = True
        return link, b"p" * 16

    return Peer("peer:1", "peer", 1, OWN, open_link)


async def test_a_match_that_waits_for_its_turn_is_no_failure_of_the_peer(autojump_clock: MockClock) -> None:
    peer = slow_peer(SlowLink(0.015))
    answered: list[bool] = []

    async def ask() -> None:
        with suppress(DeadlinePassed):
            answered.append(bool(await peer.match(bytes(16), bytes(16), 0.02)))

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(ask)
    assert answered == [True]
    assert (peer.counts["deadlines"], peer.is_up) == (0, True)
    assert await peer.match(bytes(16), bytes(16), 0.02) == [1]


async def test_a_peer_that_hangs_is_found_out_whoever_waits_behind_whom(autojump_clock: MockClock) -> None:
    link = SlowLink(0.001)
    peer = slow_peer(link)
    assert await peer.match(bytes(16), bytes(16), 0.02) == [1]
    link.answer_s = 1e6

    async def ask() -> None:
        with suppress(KvfsError):
            await peer.match(bytes(16), bytes(16), 0.02)

    async with trio.open_nursery() as nursery:
        for _ in range(40):
            nursery.start_soon(ask)
            await trio.sleep(0.001)
        assert not peer.is_up
    assert peer.counts["deadlines"] == 1


async def test_a_read_whose_time_went_into_the_queue_is_no_failure_of_the_peer(
    autojump_clock: MockClock,
) -> None:
    link = SlowLink(3.0)
    peer = slow_peer(link)

    async def read(wait_s: float) -> None:
        async with peer.link(1, Urgency(True)) as found:
            await peer.read(found, bytes(16), [], wait_s, urgent=True)

    await read(1.0)
    assert (peer.counts["deadlines"], peer.is_up) == (0, True)
    await read(limits.REMOTE_READ_S)
    link.answer_s = 1e6
    for _ in range(4):
        await read(limits.REMOTE_READ_S / 4)
    assert (peer.counts["deadlines"], peer.is_up) == (1, False)


async def test_a_link_is_closed_once_nothing_came_over_it_for_long(autojump_clock: MockClock) -> None:
    opened: list[SlowLink] = []

    async def open_link(host: str, port: int, own: Identity) -> tuple[PeerLink, bytes]:
        opened.append(SlowLink(0))
        return opened[-1], b"p" * 16

    peer = Peer("peer:1", "peer", 1, OWN, open_link)

    async def read(at_once: int) -> None:
        if at_once:
            async with peer.link(1, Urgency(True)):
                await read(at_once - 1)

    await read(2)
    await trio.sleep(limits.REMOTE_IDLE_S - 1)
    peer.close_idle()
    assert [link.is_usable for link in opened] == [True, True]
    await read(1)
    await trio.sleep(1)
    peer.close_idle()
    assert sorted(link.is_usable for link in opened) == [False, True]
    await trio.sleep(limits.REMOTE_IDLE_S)
    async with peer.link(1, Urgency(True)):
        peer.close_idle()
        assert peer.status()["links"] == 1  # nobody closes one that is in use
    assert len(opened) == 2
    await trio.sleep(limits.REMOTE_IDLE_S)
    peer.close_idle()
    assert peer.status()["links"] == 0
    await read(1)
    assert len(opened) == 3
    assert (peer.is_up, peer.counts["failures"]) == (True, 0)
