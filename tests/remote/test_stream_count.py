"""How many streams a peer's bytes come over, on links of several kinds and in virtual time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs import limits
from kvfs.limits import GIB, MIB
from tiers.remote.connections.stream_count import StreamCount

READ_BYTES = 4 * MIB
Rate = Callable[[int, float], float]
"""Bytes per second of all streams together, of how many there are and when."""


class Link:
    """A link that its streams share, always full or with a burst of reads each second."""

    def __init__(
        self,
        rate: Rate,
        *,
        burst: int = 0,
        most: int = 1 << 30,
        seed: int | None = None,
        opens_s: float = 0.0,
    ) -> None:
        """`seed`: of the sizes of reads, which are all the same without; `most`: streams that the peer takes;
        `opens_s`: how long it takes until those beyond the first four are there."""
        self.streams, self.now_s, self.most = StreamCount(), 0.0, most
        self.seen: Counter[int] = Counter()
        """How many reads began with so many streams."""
        self._rate, self._burst = rate, burst
        self._opens_s, self._asked_s = opens_s, 0.0
        self.there = limits.REMOTE_STREAMS
        self._sizes = None if seed is None else random.Random(seed)
        self._left: list[tuple[float, int]] = []
        """Of each read what is to come, and its size."""

    def run(self, gib: float) -> int:
        """Carry so much; return the number of streams that is found to bring most."""
        reads = int(gib * GIB / READ_BYTES)
        waiting = self._burst or reads
        while reads > 0:
            while waiting > 0 and len(self._left) < self._open():
                self._begin()
                waiting -= 1
                reads -= 1
            if self._left:
                self._go_on()
            else:
                self.now_s += 1.0
                waiting = self._burst
        return self.streams.wanted

    def _open(self) -> int:
        """Return how many streams there are."""
        count = self.streams.count
        if count <= self.there:
            self._asked_s = self.now_s
        elif self.now_s >= self._asked_s + self._opens_s:
            self.there = min(count, self.most)
        self.streams.note_there(min(count, self.there))
        if self.most <= self.there < count:
            self.streams.give_up()
        return min(self.streams.count, self.there)

    def _begin(self) -> None:
        size_bytes = READ_BYTES if self._sizes is None else self._sizes.randrange(MIB, 2 * READ_BYTES)
        self._left.append((size_bytes, size_bytes))
        self.streams.began(self.now_s)
        self.seen[self.streams.count] += 1

    def _go_on(self) -> None:
        """Go on to the end of the read that ends first; each has as much of the rate."""
        self._left.sort()
        share = self._rate(len(self._left), self.now_s) / len(self._left)
        (come, size_bytes), *rest = self._left
        self._left = [(left - come, size) for left, size in rest]
        self.now_s += come / share
        self.streams.brought(size_bytes)
        self.streams.ended(self.now_s)


def each(stream_rate: float, link_rate: float = 1e12) -> Rate:
    """Streams with a rate of their own, on a link with one."""
    return lambda streams, now_s: min(streams * stream_rate, link_rate)


@pytest.mark.parametrize("burst", [0, 32, 256, 400, 1_000])
@pytest.mark.parametrize("stream_rate", [5e6, 1e8, 3e9])
def test_streams_that_each_have_a_rate_of_their_own_become_as_many_as_may_be(
    stream_rate: float, burst: int
) -> None:
    assert Link(each(stream_rate), burst=burst).run(64) == limits.MAX_REMOTE_STREAMS


@pytest.mark.parametrize("burst", [0, 32, 400])
def test_a_link_that_one_stream_fills_has_one(burst: int) -> None:
    assert Link(each(1e9, 1e9), burst=burst).run(320) == 1


@pytest.mark.parametrize("enough", [2, 4])
def test_no_more_are_there_than_fill_the_link(enough: int) -> None:
    assert Link(each(1e9 / enough, 1e9)).run(320) == enough


def test_streams_that_hinder_each_other_become_fewer() -> None:
    assert Link(lambda streams, now_s: 1e9 / (1 + 0.2 * abs(streams - 2))).run(320) == 2


@pytest.mark.parametrize("burst", [0, 32, 64, 96, 160, 400])
@pytest.mark.parametrize("seed", range(5))
def test_more_streams_are_not_kept_where_they_bring_nothing_whatever_reads_are_like(
    burst: int, seed: int
) -> None:
    link = Link(each(1e9, 1e9), burst=burst, seed=seed)
    assert link.run(160) <= limits.REMOTE_STREAMS


def test_a_link_that_changes_is_followed() -> None:
    changes_s = 500.0
    link = Link(lambda streams, now_s: each(2e8)(streams, 0) if now_s < changes_s else 4e8)
    assert link.run(32) == limits.MAX_REMOTE_STREAMS
    assert link.now_s < changes_s
    assert link.run(1_600) == 1


def test_reads_that_never_fill_the_streams_change_nothing() -> None:
    link = Link(each(1e9), burst=limits.REMOTE_STREAMS - 1)
    assert link.run(160) == limits.REMOTE_STREAMS
    assert set(link.seen) == {limits.REMOTE_STREAMS}


def test_a_number_that_reads_do_not_fill_is_given_up() -> None:
    link = Link(each(1e9), burst=limits.REMOTE_STREAMS + 1)
    assert link.run(320) == limits.REMOTE_STREAMS
    assert 0 < link.seen[limits.MAX_REMOTE_STREAMS] < 4_000


@pytest.mark.parametrize("burst", [1_030, 1_500, 2_040])
@pytest.mark.parametrize("at_first_gib", [2.5, 3.0, 3.5])
def test_bursts_that_are_never_measured_end_a_trial(burst: int, at_first_gib: float) -> None:
    link = Link(each(2.5e8, 1e9), burst=32)
    link.run(at_first_gib)
    link._burst = burst
    link.run(64)
    assert link.streams.count == limits.REMOTE_STREAMS


def test_what_is_tried_in_vain_is_tried_less_often() -> None:
    link = Link(each(2.5e8, 1e9))
    link.run(160)
    tried = {count: reads for count, reads in link.seen.items() if count != limits.REMOTE_STREAMS}
    link.seen.clear()
    link.run(160)
    later = {count: reads for count, reads in link.seen.items() if count != limits.REMOTE_STREAMS}
    assert 0 < sum(later.values()) < sum(tried.values()) < 6_000


def test_a_trial_for_which_there_are_not_enough_streams_proves_nothing() -> None:
    link = Link(each(1e8), most=limits.MAX_REMOTE_STREAMS - 1)
    assert link.run(80) == link.streams.count == limits.REMOTE_STREAMS
    assert link.there == limits.MAX_REMOTE_STREAMS - 1, "more were tried"
    link.most = limits.MAX_REMOTE_STREAMS
    assert link.run(320) == limits.MAX_REMOTE_STREAMS


def test_streams_that_cannot_be_had_any_more_are_not_waited_for() -> None:
    link = Link(lambda streams, now_s: 1e9 / (1 + 0.2 * abs(streams - 2)), most=5)
    link.streams.wanted = limits.MAX_REMOTE_STREAMS
    assert link.run(1) == link.there == 5
    assert link.run(320) == 2


@pytest.mark.parametrize("opens_s", [0.3, 3.0])
@pytest.mark.parametrize("burst", [0, 256])
def test_a_trial_waits_for_its_streams(opens_s: float, burst: int) -> None:
    link = Link(each(6e8), burst=burst, opens_s=opens_s)
    assert link.run(64) == limits.MAX_REMOTE_STREAMS


def test_time_between_reads_counts_though_no_read_is_under_way() -> None:
    """Reads with a moment between each and the next: over one stream nothing comes meanwhile."""

    class Halting(Link):
        def _begin(self) -> None:
            if not self._left:
                self.now_s += 0.002
            super()._begin()

    assert Halting(each(1e9, 1e9)).run(320) > 1


def test_to_give_up_where_nothing_is_tried_changes_nothing() -> None:
    link = Link(each(1e8))
    link.run(1)
    link.streams.give_up()
    assert link.run(64) == limits.MAX_REMOTE_STREAMS


@given(
    stream_rate=st.floats(1e6, 5e9),
    link_rate=st.floats(1e7, 1e10),
    noise=st.floats(0, 0.03),
    burst=st.sampled_from([0, 32, 128, 400]),
    seed=st.none() | st.integers(0, 1 << 32),
)
def test_the_number_brings_nearly_what_the_best_one_would(
    stream_rate: float, link_rate: float, noise: float, burst: int, seed: int | None
) -> None:
    rng, plain = random.Random(seed or 0), each(stream_rate, link_rate)
    link = Link(
        lambda streams, now_s: plain(streams, now_s) * (1 + noise * rng.uniform(-1, 1)),
        burst=burst,
        seed=seed,
    )
    found = link.run(96)
    best = max(plain(count, 0) for count in range(1, limits.MAX_REMOTE_STREAMS + 1))
    assert plain(found, 0) >= 0.8 * best
