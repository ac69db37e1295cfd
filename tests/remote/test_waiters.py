"""Fetches of blocks that another fetch is bringing already."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import (
    AsyncIterator,
    Sequence,
)
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from kvfs import limits
from kvfs._native.shared.slots import xxh3_64
from tests.support.machines import Machine, digest_of, machine
from tests.support.rogue_peers import (
    having_all,
    item,
    serving,
)
from tests.support.waits import WAIT_S, until

SIZE = 4096
DATA = b"x" * SIZE
DIGESTS = [digest_of(number) for number in range(1, 65)]


class HeldPeer:
    """Has every block, and sends each when a test lets it go."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.free: defaultdict[bytes, trio.Event] = defaultdict(trio.Event)
        self.serve = having_all(SIZE, self._answer)

    async def _answer(self, stream: trio.SocketStream, number: int, digests: Sequence[bytes]) -> None:
        self.asked.extend(digests)
        for index, digest in enumerate(digests):
            await self.free[digest].wait()
            await stream.send_all(item(number, index, SIZE, xxh3_64(DATA)) + DATA)


class Fetches:
    """Fetches under way, and what each returned."""

    def __init__(self, asker: Machine, nursery: trio.Nursery) -> None:
        self._asker, self._nursery = asker, nursery
        self.counts: dict[str, int] = {}

    async def begin(self, name: str, digests: list[bytes], *, urgent: bool) -> None:
        self._nursery.start_soon(self._fetch, name, digests, urgent)
        await trio.testing.wait_all_tasks_blocked()

    async def _fetch(self, name: str, digests: list[bytes], urgent: bool) -> None:
        found = self._asker.cluster.fetch(self._asker.bucket, digests, uid=0, hint=None, urgent=urgent)
        self.counts[name] = await found


@asynccontextmanager
async def background_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[HeldPeer, Fetches]]:
    """A fetch that nobody waits for, of all blocks, each in a read of its own; the first reads are at the peer."""
    monkeypatch.setattr(limits, "REMOTE_READ_BLOCKS", 1)
    monkeypatch.setattr(limits, "REMOTE_READ_S", 2 * WAIT_S)
    monkeypatch.setattr(limits, "REMOTE_FETCH_S", 2 * WAIT_S)
    peer = HeldPeer()
    async with (
        serving(peer.serve) as address,
        machine(tmp_path / "asker", peers=[address]) as asker,
        trio.open_nursery() as nursery,
    ):
        await until(lambda: asker.cluster.status()["peers_up"] == 1)
        fetches = Fetches(asker, nursery)
        await fetches.begin("background", DIGESTS, urgent=False)
        await until(lambda: len(peer.asked) == limits.REMOTE_STREAMS)
        yield peer, fetches
        for digest in DIGESTS:
            peer.free[digest].set()
        await until(lambda: fetches.counts.get("background") == len(DIGESTS))


async def test_who_waits_for_a_block_goes_on_with_its_seal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with background_fetch(tmp_path, monkeypatch) as (peer, fetches):
        await fetches.begin("one", [peer.asked[0]], urgent=True)
        peer.free[peer.asked[0]].set()
        await until(lambda: "one" in fetches.counts)
        assert fetches.counts == {"one": 1}


async def test_an_urgent_fetch_makes_the_read_urgent_that_brings_its_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with background_fetch(tmp_path, monkeypatch) as (peer, fetches):
        [*_, wanted] = [digest for digest in DIGESTS if digest not in peer.asked]
        await fetches.begin("one", [wanted], urgent=True)
        peer.free[peer.asked[0]].set()
        await until(lambda: len(peer.asked) > limits.REMOTE_STREAMS)
        assert peer.asked[limits.REMOTE_STREAMS] == wanted
