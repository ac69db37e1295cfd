"""The health of one peer: what counts as its failure, and how long it is not asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest
import trio
from trio.testing import MockClock

from kvfs import limits
from kvfs.errors import DeadlinePassed, KvfsError, ProtocolError, TierUnreachable
from tests.support.machines import SECRET
from tiers.remote.connections.identity import Identity
from tiers.remote.connections.stream_count import _Phase
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


class GrowingPeer:
    """A peer of which eight streams bring most, as measured; links beyond the first four are opened in a nursery."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.opened: list[SlowLink] = []
        self.more: list[SlowLink | Exception] = []
        """What each opening of a further link comes to, the last one first; else to a link."""
        self.asked = 0
        self.peer = Peer(
            "peer:1",
            "peer",
            1,
            OWN,
            self._open,
            more_opener=self._open_more,
            want_more=lambda peer: nursery.start_soon(peer.open_more),
        )
        self.peer._streams.wanted = limits.MAX_REMOTE_STREAMS

    async def _open(self, host: str, port: int, own: Identity) -> tuple[PeerLink, bytes]:
        self.opened.append(SlowLink(0.0))
        return self.opened[-1], b"p" * 16

    async def _open_more(self, host: str, port: int, own: Identity) -> tuple[PeerLink, bytes]:
        self.asked += 1
        await trio.sleep(0.001)
        if not self.more:
            return await self._open(host, port, own)
        comes = self.more.pop()
        if isinstance(comes, Exception):
            raise comes
        self.opened.append(comes)
        return comes, b"p" * 16

    @property
    def links(self) -> int:
        return sum(link.is_usable for link in self.opened)

    async def read_at_once(self, reads: int) -> int:
        """Hold so many links for a second each, as many at a time as the peer gives; return the most at a time."""
        held = most = 0

        async def one() -> None:
            nonlocal held, most
            async with self.peer.link(1, Urgency(True)):
                held += 1
                most = max(held, most)
                await trio.sleep(1)
                held -= 1

        async with trio.open_nursery() as nursery:
            for _ in range(reads):
                nursery.start_soon(one)
        return most


async def test_further_links_are_opened_beside_the_reads_that_fill_the_others(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    growing = GrowingPeer(nursery)
    assert await growing.read_at_once(limits.REMOTE_STREAMS - 1) == growing.links
    assert growing.asked == 0, "there are links that nobody uses"
    assert await growing.read_at_once(32) == limits.MAX_REMOTE_STREAMS
    assert (growing.links, growing.asked) == (limits.MAX_REMOTE_STREAMS, limits.REMOTE_STREAMS)
    await trio.sleep(limits.REMOTE_IDLE_S + 1)
    growing.peer.close_idle()
    assert growing.links == 0
    assert await growing.read_at_once(1) == growing.links == 1
    assert await growing.read_at_once(32) == growing.links == limits.MAX_REMOTE_STREAMS
    assert growing.asked == 2 * limits.REMOTE_STREAMS, "reads open no more than the first four"
    await trio.sleep(limits.REMOTE_IDLE_S + 1)
    growing.peer.close_idle()
    assert await growing.read_at_once(32) == growing.links == limits.MAX_REMOTE_STREAMS
    assert growing.asked == 3 * limits.REMOTE_STREAMS
    growing.opened[-1].close()
    assert await growing.read_at_once(1) == 1
    assert growing.links == limits.MAX_REMOTE_STREAMS - 1, "none is missed"


@pytest.mark.parametrize(
    "comes",
    [
        OSError("refused"),
        ProtocolError("it closed the connection within the TLS handshake"),
        DeadlinePassed("no greeting within 2 s"),
        ValueError("no such name"),
        SlowLink(0.0),
    ],
    ids=["OSError", "ProtocolError", "DeadlinePassed", "ValueError", "of another kind"],
)
async def test_a_further_link_that_cannot_be_had_is_no_failure_of_the_peer(
    autojump_clock: MockClock, nursery: trio.Nursery, comes: SlowLink | Exception
) -> None:
    growing = GrowingPeer(nursery)
    if isinstance(comes, SlowLink):
        comes.transport = "ucx"
    growing.more = [comes, SlowLink(0.0)]
    most = limits.REMOTE_STREAMS + 1
    assert await growing.read_at_once(4 * most) == growing.links == most
    assert (growing.peer.counts["failures"], growing.peer.counts["deadlines"], growing.peer.is_up) == (
        0,
        0,
        True,
    )
    assert growing.asked == 2, "no more are asked for"
    assert growing.peer.status()["streams"] == most
    growing.peer._streams.wanted = limits.MAX_REMOTE_STREAMS
    assert await growing.read_at_once(4 * most) == growing.links == most
    await trio.sleep(limits.REMOTE_STREAMS_PAUSE_S)
    assert await growing.read_at_once(32) == growing.links == limits.MAX_REMOTE_STREAMS


async def test_a_trial_ends_where_a_further_link_cannot_be_had(
    autojump_clock: MockClock, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing = GrowingPeer(nursery)
    growing.peer._streams.wanted = limits.REMOTE_STREAMS
    growing.more = [OSError("refused")]
    monkeypatch.setattr(limits, "REMOTE_STREAM_WINDOW_BYTES", 1)
    seen = set()

    async def read() -> None:
        for _ in range(64):
            async with growing.peer.link(1, Urgency(True)):
                await trio.sleep(1)
                growing.peer._streams.brought(1)
            seen.add(growing.peer.streams)

    async with trio.open_nursery() as readers:
        for _ in range(limits.REMOTE_STREAMS):
            readers.start_soon(read)
    assert growing.asked > 0
    assert growing.links == limits.REMOTE_STREAMS
    assert seen == {limits.REMOTE_STREAMS // 2, limits.REMOTE_STREAMS, limits.MAX_REMOTE_STREAMS}
    assert growing.peer.counts["failures"] == 0


async def test_links_that_a_peer_has_ended_are_not_opened_by_reads(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    growing = GrowingPeer(nursery)
    assert await growing.read_at_once(32) == limits.MAX_REMOTE_STREAMS
    for link in growing.opened:
        link.close()
    growing.more = [OSError("refused")]
    assert await growing.read_at_once(32) == growing.links == limits.REMOTE_STREAMS
    assert (growing.peer.counts["failures"], growing.peer.is_up) == (0, True)


async def test_a_peer_that_fails_ends_a_trial_and_has_its_links_opened_by_reads(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    growing = GrowingPeer(nursery)
    assert await growing.read_at_once(32) == limits.MAX_REMOTE_STREAMS
    growing.peer._streams._candidate = 1
    growing.peer._streams._enter(_Phase.TRIAL)
    assert growing.peer.streams == 1
    growing.peer._fail(TierUnreachable("gone"))
    assert (growing.links, growing.peer.streams) == (0, limits.MAX_REMOTE_STREAMS)
    await trio.sleep(limits.MAX_REMOTE_BACKOFF_S)
    growing.more = [OSError("refused")]
    assert await growing.read_at_once(32) == growing.links == limits.REMOTE_STREAMS
    assert growing.peer.is_up


@pytest.mark.parametrize("end", [Peer.close, lambda peer: peer._fail(TierUnreachable("gone"))])
async def test_a_further_link_that_comes_too_late_is_closed(
    autojump_clock: MockClock, nursery: trio.Nursery, end: Callable[[Peer], None]
) -> None:
    growing = GrowingPeer(nursery)
    with suppress(TierUnreachable):
        async with trio.open_nursery() as readers:
            readers.start_soon(growing.read_at_once, limits.REMOTE_STREAMS)
            await trio.sleep(0.0005)
            end(growing.peer)
    await trio.sleep(1)
    assert (growing.asked, len(growing.opened)) == (1, limits.REMOTE_STREAMS + 1)
    assert not growing.opened[-1].is_usable
    assert growing.peer.status()["links"] == growing.links <= limits.REMOTE_STREAMS


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
