"""Slow reads that another holder is asked for as well."""

from __future__ import annotations

import os
from collections.abc import (
    Iterator,
    Sequence,
)
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from kvfs import limits
from kvfs._native.remote.stream import FOUND, NOT_ANSWERED
from kvfs._native.shared.slots import xxh3_64
from kvfs.errors import DeadlinePassed, KvfsError
from tests.support.machines import SECRET, digest_of, machine, open_descriptors, threads
from tests.support.rogue_peers import (
    having_all,
    item,
    serving,
)
from tests.support.stores import BOUND, small_store
from tests.support.waits import WAIT_S, until
from tiers.remote.connections.identity import Identity
from tiers.remote.fetch import Fetcher
from tiers.remote.hedging import Allowance, hedge_after_s
from tiers.remote.link import PeerLink, Read, Want
from tiers.remote.peer import Peer
from tiers.store.store import Store

SIZE = 4096
DATA = b"x" * SIZE
SUM = xxh3_64(DATA)
OWN = Identity(b"m" * 16, SECRET)
QUICK_S = 0.001


TIMES = st.floats(0, 10)
FEW = st.lists(TIMES, max_size=limits.REMOTE_LEAST_LATENCIES - 1)
ENOUGH = st.lists(TIMES, min_size=limits.REMOTE_LEAST_LATENCIES, max_size=limits.REMOTE_LATENCIES)


@given(FEW | ENOUGH)
def test_few_reads_are_beyond_what_a_hedge_waits_for(samples: list[float]) -> None:
    after_s = hedge_after_s(samples)
    assert (after_s is None) == (len(samples) < limits.REMOTE_LEAST_LATENCIES)
    if after_s is not None:
        longer = sum(sample > after_s for sample in samples)
        assert longer <= limits.REMOTE_HEDGE_SHARE * len(samples)
        assert after_s >= limits.REMOTE_HEDGE_FLOOR_S
        assert after_s == limits.REMOTE_HEDGE_FLOOR_S or after_s in samples


@given(st.lists(st.tuples(st.booleans(), st.integers(0, limits.MAX_REMOTE_BYTES))))
def test_no_more_than_a_share_is_asked_twice_at_any_moment(steps: list[tuple[bool, int]]) -> None:
    allowance, asked, again = Allowance(), 0, 0
    for is_hedge, size_bytes in steps:
        if not is_hedge:
            allowance.earn(size_bytes)
            asked += size_bytes
        elif allowance.take(size_bytes):
            again += size_bytes
        assert again <= limits.REMOTE_HEDGE_SHARE * asked + 1e-6 * asked


def test_what_was_not_asked_twice_is_kept_up_to_a_bound() -> None:
    allowance = Allowance()
    allowance.earn(1 << 50)
    assert allowance.take(limits.MAX_REMOTE_BYTES)
    assert not allowance.take(1)


class TimedPeer:
    """Has every block, and brings it after a time that a test sets."""

    def __init__(self, name: str) -> None:
        self.answer_s = QUICK_S
        self.peer = Peer(name, name, 1, OWN, self._open)

    async def _open(self, host: str, port: int, own: Identity) -> tuple[PeerLink, bytes]:
        return TimedLink(self), host.encode().ljust(16)


class TimedLink:
    """Implements `PeerLink`: a call that ends early leaves it closed."""

    transport = "tcp"

    def __init__(self, of: TimedPeer) -> None:
        self._of = of
        self.is_usable = True

    async def match(self, namespace: bytes, digests: bytes, wait_s: float) -> list[int]:
        return [SIZE] * (len(digests) // 16)

    async def read(
        self, namespace: bytes, wants: Sequence[Want], wait_s: float, *, urgent: bool
    ) -> tuple[list[Read], KvfsError | None]:
        self.is_usable = False
        with drafts_of(wants) as drafts, trio.move_on_after(wait_s):
            await trio.sleep(self._of.answer_s)
            for draft in drafts:
                os.pwrite(draft, DATA, 0)
            self.is_usable = True
            return [Read(FOUND, SIZE, SUM, bytes(16))] * len(wants), None
        return [Read(NOT_ANSWERED, 0, 0, bytes(16))] * len(wants), DeadlinePassed("late")

    def close(self) -> None:
        self.is_usable = False


@contextmanager
def drafts_of(wants: Sequence[Want]) -> Iterator[list[int]]:
    drafts = [want.open_draft() for want in wants]
    try:
        yield drafts
    finally:
        for draft in drafts:
            os.close(draft)


class Reads:
    """Fetches of eight blocks, each a read of its own, every other one from a peer that may be slow."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.slow, self.quick = TimedPeer("slow"), TimedPeer("quick")
        self._fetcher = Fetcher(store, [self.slow.peer, self.quick.peer], 1.0)
        self._digests = iter(map(digest_of, range(1, 10_000)))

    async def fetch(self, *, is_hinted: bool = False, urgent: bool = True) -> float:
        """Return how long a fetch has taken; one with hints needs no MATCH, whose answers count as such."""
        digests = [next(self._digests) for _ in range(8)]
        began_s = trio.current_time()
        hints = [self.slow.peer, self.quick.peer] if is_hinted else []
        bucket = self.store.bucket(BOUND)
        assert await self._fetcher.fetch(bucket, digests, uid=0, hints=hints, urgent=urgent) == 8
        assert self.store.space.open_drafts == 0
        for digest in digests:
            self.store.remove_block(digest)
        return trio.current_time() - began_s

    async def warm(self) -> int:
        """Have the peers be known; return how many blocks that took."""
        times = -(-limits.REMOTE_LEAST_LATENCIES // 4)
        for _ in range(times):
            assert await self.fetch() == pytest.approx(QUICK_S)
        return 8 * times


@pytest.fixture
def reads(tmp_path: Path) -> Iterator[Reads]:
    with small_store(tmp_path / "data") as store:
        yield Reads(store)


async def test_a_slow_read_is_asked_of_another_holder_whose_answer_counts(
    reads: Reads, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    monkeypatch.setattr(limits, "REMOTE_HEDGE_SHARE", 0.5)
    await reads.warm()
    reads.slow.answer_s = 3.0
    assert await reads.fetch() == pytest.approx(limits.REMOTE_HEDGE_FLOOR_S + QUICK_S)
    slow, quick = reads.slow.peer.status(), reads.quick.peer.status()
    assert (slow["hedges"], slow["hedges_won"], slow["hedged_bytes"]) == (4, 4, 4 * SIZE)
    assert (slow["is_up"], slow["deadlines"], slow["waiting"]) == (True, 0, 0)
    assert (quick["hedges"], quick["failures"]) == (0, 0)
    reads.slow.answer_s = QUICK_S
    assert await reads.fetch() == pytest.approx(QUICK_S)  # it has its turns and links again


async def test_a_slow_read_that_comes_first_after_all_ends_the_other(
    reads: Reads, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    monkeypatch.setattr(limits, "REMOTE_HEDGE_SHARE", 0.5)
    await reads.warm()
    before = reads.quick.peer.counts["blocks"]
    reads.slow.answer_s, reads.quick.answer_s = 0.03, 0.015
    assert await reads.fetch() == pytest.approx(0.03)
    slow, quick = reads.slow.peer.status(), reads.quick.peer.status()
    assert (slow["hedges"], slow["hedges_won"]) == (4, 0)
    assert (quick["blocks"] - before, quick["is_up"], quick["deadlines"]) == (4, True, 0)
    assert await reads.fetch() == pytest.approx(0.03)


async def test_only_a_share_of_the_bytes_is_asked_twice(reads: Reads, autojump_clock: MockClock) -> None:
    asked = await reads.warm() + 8
    reads.slow.answer_s = 3.0
    assert await reads.fetch() == pytest.approx(3.0)
    assert reads.slow.peer.counts["hedges"] == int(asked * limits.REMOTE_HEDGE_SHARE)


async def test_what_nobody_waits_for_is_not_asked_twice(reads: Reads, autojump_clock: MockClock) -> None:
    await reads.warm()
    reads.slow.answer_s = 3.0
    assert await reads.fetch(urgent=False) == pytest.approx(3.0)
    assert reads.slow.peer.counts["hedges"] == 0


async def test_a_peer_is_not_hedged_before_it_is_known(reads: Reads, autojump_clock: MockClock) -> None:
    reads.slow.answer_s = 3.0
    assert await reads.fetch() == pytest.approx(3.0)
    assert reads.slow.peer.counts["hedges"] == 0


async def test_a_peer_that_answers_nothing_is_found_out_by_reads_that_were_given_up(
    reads: Reads, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    monkeypatch.setattr(limits, "REMOTE_HEDGE_SHARE", 0.5)
    await reads.warm()
    reads.slow.answer_s = 1e6
    began_s = trio.current_time()
    while reads.slow.peer.is_up:
        await reads.fetch(is_hinted=True)
    assert trio.current_time() - began_s <= limits.REMOTE_READ_S
    assert reads.slow.peer.counts["deadlines"] == 1


class GatedPeer:
    """Has every block, and sends what is read while its gate is open."""

    def __init__(self) -> None:
        self.gate = trio.Event()
        self.gate.set()
        self.serve = having_all(SIZE, self._answer)

    async def _answer(self, stream: trio.SocketStream, number: int, digests: Sequence[bytes]) -> None:
        await self.gate.wait()
        for index in range(len(digests)):
            await stream.send_all(item(number, index, SIZE, SUM) + DATA)


async def test_a_machine_that_hangs_in_a_read_delays_no_fetch_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("REMOTE_READ_S", 2 * WAIT_S), ("REMOTE_FETCH_S", 2 * WAIT_S)):
        monkeypatch.setattr(limits, name, value)
    monkeypatch.setattr(limits, "REMOTE_LEAST_LATENCIES", 1)
    monkeypatch.setattr(limits, "REMOTE_HEDGE_SHARE", 0.5)
    digests = [digest_of(number) for number in range(1, 49)]
    slow, quick = GatedPeer(), GatedPeer()
    before = open_descriptors(), threads()
    async with (
        serving(slow.serve) as first,
        serving(quick.serve) as second,
        machine(tmp_path / "asker", peers=[first, second]) as asker,
    ):
        await until(lambda: asker.cluster.status()["peers_up"] == 2)
        assert await asker.fetch(digests[:16]) == 16
        slow.gate = trio.Event()
        with trio.fail_after(WAIT_S):
            assert await asker.fetch(digests[16:32]) == 16
        peer = asker.cluster.status()["peers"][0]
        assert (peer["hedges"], peer["hedges_won"], peer["hedged_bytes"]) == (4, 4, 8 * SIZE)
        assert (peer["failures"], peer["deadlines"], peer["is_up"]) == (0, 0, True)
        assert asker.drafts() == 0
        slow.gate.set()
        with trio.fail_after(WAIT_S):  # it has its turns again
            assert await asker.fetch(digests[32:]) == 16
    assert open_descriptors() <= before[0]
    await until(lambda: threads() <= before[1])
