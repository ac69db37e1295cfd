"""The cluster's index against dictionaries: who holds which block, what is under way, what is cleared and swept."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable
from itertools import groupby, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvfs._native.cluster.index import MAX_SOURCES, MAX_STRIDE, MAX_WINDOWS, ClusterIndex
from kvfs.errors import InvalidRequest
from kvfs.keys import split_keys

SOURCES = [0, 1, 2, 63, 64, 1000, 1023]
KEYS = [number.to_bytes(2, "big") * 8 for number in range(40)]
HEAP = [random.Random(number).randbytes(16) for number in range(9_000)]
"""More blocks than three segments have room for."""

ENDS_S = (3.0, 1.0, 2.0, 1.0)
"""When each producer is predicted to end."""
sources = st.sampled_from(SOURCES)
prompts = st.lists(st.sampled_from(KEYS), max_size=12)
parts = st.tuples(st.integers(0, 8_000), st.integers(0, 1_500)).map(lambda at: HEAP[at[0] : at[0] + at[1]])
blocks = st.one_of(prompts, prompts, parts)
strides = st.sampled_from([1, 1, 2, 3, 4])
windows = st.lists(st.tuples(sources, st.integers(1, 4), strides, st.booleans()), max_size=3)
Beside = tuple[int, int, int, bool]
"""As `ClusterIndex.set_windows` has them."""


class Model:
    """Each block's holders, and the prefill that is to make it."""

    def __init__(self) -> None:
        self.holders: dict[bytes, set[int]] = {}
        self.producers: dict[bytes, int] = {}
        self.windows: dict[int, list[Beside]] = {}
        self.others: dict[int, int] = {}
        self.alone: set[int] = set()

    def add(self, source: int, hashes: Iterable[bytes], producer: int | None = None) -> None:
        for key in hashes:
            held = self.holders.setdefault(key, set())
            before = self.producers.get(key)
            if producer is None:
                self.producers.pop(key, None)
            elif not held or (before is not None and ENDS_S[producer] < ENDS_S[before]):
                self.producers[key] = producer
            held.add(source)

    def remove(self, source: int, hashes: Iterable[bytes]) -> int:
        count = 0
        for key in hashes:
            held = self.holders.get(key, set())
            count += source in held
            held.discard(source)
            if not held:
                self.holders.pop(key, None)
                self.producers.pop(key, None)
        return count

    def clear(self, source: int) -> None:
        self.remove(source, self.of(source))

    def produced(self, producer: int, hashes: Iterable[bytes]) -> None:
        for key in hashes:
            if self.producers.get(key) == producer:
                del self.producers[key]

    def of(self, source: int) -> list[bytes]:
        return [key for key, held in self.holders.items() if source in held]

    def set_windows(self, source: int, windows: list[Beside], other: int | None, alone: bool) -> None:
        self.windows.pop(source, None)
        self.alone.discard(source)
        self.others[source] = source if other is None else other
        if windows:
            self.windows[source] = windows
            self.alone |= {source} if alone else set()

    def usable(self, hashes: list[bytes]) -> list[set[int]]:
        """Return who has each block of the longest prefix for somebody who goes on from there."""
        held = [self.holders.get(key, set()) for key in hashes]

        def goes_on(source: int, windows: list[Beside], end: int) -> bool:
            either = {source, self.others[source]}
            return (source in self.alone or all(either & each for each in held[:end])) and all(
                end % stride == 0
                and all(holder in each for each in _read(held[stride - 1 : end : stride], count, is_chunked))
                for holder, count, stride, is_chunked in windows
            )

        ends = {
            source: next((n for n in range(len(held), 0, -1) if goes_on(source, windows, n)), 0)
            for source, windows in self.windows.items()
        }
        beside = {holder for windows in self.windows.values() for holder, *_ in windows}
        there = [some | self.alone for some in held]
        found = [
            {each for each in some if n < ends.get(each, n + 1)} - beside for n, some in enumerate(there)
        ]
        return list(takewhile(bool, found))

    def runs(self, hashes: list[bytes]) -> tuple[tuple[int, int, int | None], ...]:
        states = [(mask(some), self.producers.get(hashes[n])) for n, some in enumerate(self.usable(hashes))]
        return tuple((holders, len(list(run)), producer) for (holders, producer), run in groupby(states))

    def match(self, hashes: list[bytes], among: Iterable[int] = SOURCES) -> list[tuple[int, int]]:
        depths = {source: depth(self, hashes, {source}) for source in among}
        return sorted(((s, d) for s, d in depths.items() if d), key=lambda found: (-found[1], found[0]))


def _read(blocks: list[set[int]], count: int, is_chunked: bool) -> list[set[int]]:
    """Return those of a window's blocks before a boundary that are read there."""
    return blocks[len(blocks) // count * count :] if is_chunked else blocks[-count:]


def mask(held: Iterable[int]) -> int:
    return sum(1 << source for source in held)


def depth(model: Model, hashes: list[bytes], group: set[int]) -> int:
    return len(list(takewhile(bool, (some & group for some in model.usable(hashes)))))


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = ClusterIndex(1_000_000)
        self.model = Model()

    @rule(source=sources, hashes=blocks)
    def add(self, source: int, hashes: list[bytes]) -> None:
        assert self.index.add(source, b"".join(hashes)) == 0
        self.model.add(source, hashes)

    @rule(source=sources, hashes=blocks)
    def remove(self, source: int, hashes: list[bytes]) -> None:
        assert self.index.remove(source, b"".join(hashes)) == self.model.remove(source, hashes)

    @rule(source=sources, producer=st.integers(0, 3), hashes=blocks)
    def produce(self, source: int, producer: int, hashes: list[bytes]) -> None:
        assert self.index.produce(source, producer, ENDS_S[producer], b"".join(hashes)) == 0
        self.model.add(source, hashes, producer)

    @rule(producer=st.integers(0, 3), hashes=blocks)
    def produced(self, producer: int, hashes: list[bytes]) -> None:
        self.index.produced(producer, b"".join(hashes))
        self.model.produced(producer, hashes)

    @rule(source=sources)
    def clear(self, source: int) -> None:
        self.index.clear(source)
        self.model.clear(source)

    @rule(source=sources, windows=windows, other=st.none() | sources, alone=st.booleans())
    def set_windows(self, source: int, windows: list[Beside], other: int | None, alone: bool) -> None:
        alone = alone and bool(windows)
        other = None if alone else other
        self.index.set_windows(source, windows, other, alone=alone)
        self.model.set_windows(source, windows, other, alone)

    @rule(segments=st.integers(1, 3))
    def sweep(self, segments: int) -> None:
        self.index.sweep(segments)

    @rule()
    def sweep_all(self) -> None:
        while self.index.sweep():
            pass
        assert len(self.index) == len(self.model.holders)

    @rule(hashes=blocks, groups=st.lists(st.sets(sources), max_size=4))
    def ask(self, hashes: list[bytes], groups: list[set[int]]) -> None:
        packed = b"".join(hashes)
        assert self.index.runs(packed) == self.model.runs(hashes)
        assert self.index.match(packed) == self.model.match(hashes)
        assert self.index.depths(packed, [*map(mask, groups)]) == [
            depth(self.model, hashes, group) for group in groups
        ]
        for group in groups:
            lacking = [key for key in hashes if not self.model.holders.get(key, set()) & group]
            assert self.index.lacking(packed, mask(group)) == b"".join(lacking)
            there = hashes.index(lacking[0]) if lacking else len(hashes)
            assert self.index.depths(packed, [mask(group)], limited=False) == [there]

    @rule(source=sources)
    def list_all(self, source: int) -> None:
        found = split_keys(self.index.manifest(source))
        assert sorted(found) == sorted(self.model.of(source))

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert len(self.index) >= len(self.model.holders)
        for key in KEYS:
            assert self.index.holders(key) == mask(self.model.holders.get(key, ()))
            assert self.index.runs(key) == self.model.runs([key])
        for source in SOURCES:
            assert self.index.source_blocks(source) == len(self.model.of(source))


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_the_index_is_as_dictionaries_are = Machine.TestCase


def test_a_million_changes_of_the_few_keep_the_index_right() -> None:
    """Sets of sources come and go, their numbers are used again, and remembered transitions with them."""
    draw = random.Random(5)
    index, model = ClusterIndex(100_000), Model()
    for step in range(6_000):
        source = draw.randrange(40)
        hashes = [HEAP[n] for n in draw.sample(range(60), draw.randrange(1, 20))]
        packed = b"".join(hashes)
        if draw.random() < 0.5:
            index.add(source, packed)
            model.add(source, hashes)
        else:
            assert index.remove(source, packed) == model.remove(source, hashes)
        if step % 97 == 0:
            index.clear(source)
            model.clear(source)
        assert index.runs(packed) == model.runs(hashes)
    assert [index.holders(key) for key in HEAP[:60]] == [
        mask(model.holders.get(key, ())) for key in HEAP[:60]
    ]


def test_blocks_over_the_limit_are_refused_and_counted() -> None:
    index = ClusterIndex(100)
    assert index.add(3, b"".join(HEAP[:150])) == 50
    assert (len(index), index.source_blocks(3)) == (100, 100)
    assert index.add(4, b"".join(HEAP[:150])) == 50  # a holder more takes no room
    assert index.match(b"".join(HEAP[:150])) == [(3, 100), (4, 100)]
    assert index.remove(3, b"".join(HEAP[:1])) == 1
    assert index.remove(4, b"".join(HEAP[:1])) == 1
    assert index.add(3, HEAP[149]) == 0


def test_sources_that_start_anew_again_and_again_hold_only_the_last_blocks() -> None:
    """More often than there are columns to spare, while all sources are in use and nobody sweeps."""
    index = ClusterIndex(100_000)
    for source in range(MAX_SOURCES):
        index.add(source, HEAP[source])
    for turn in range(3):
        for source in range(MAX_SOURCES):
            index.clear(source)
        for source in range(MAX_SOURCES):
            index.add(source, HEAP[source + turn + 1])
    for source in range(MAX_SOURCES):
        assert index.manifest(source) == HEAP[source + 3]
    while index.sweep():
        pass
    assert len(index) == MAX_SOURCES


def test_what_a_change_made_of_a_set_is_not_remembered_past_the_clearing_of_one_of_its_sources() -> None:
    """A block that nobody holds any more has no producer, whatever became of one in the same set before."""
    index = ClusterIndex(1_000)
    one, other = HEAP[0], HEAP[1]
    index.produce(0, 7, 1.0, one + other)
    index.add(1, one)
    assert index.runs(one) == ((0b11, 1, None),)
    index.clear(0)
    index.add(1, other)
    assert index.runs(other) == ((0b10, 1, None),)


def test_sources_that_are_cleared_and_not_swept_are_counted() -> None:
    index = ClusterIndex(100_000)
    for source in range(100):
        index.add(source, HEAP[source])
    index.clear(200)  # it holds nothing
    assert index.unswept_sources == 0
    for source in range(70):
        index.clear(source)
    assert index.unswept_sources == 70
    while index.sweep():
        pass
    assert index.unswept_sources == 0


few = st.sets(st.integers(0, 11), max_size=4)
lost = st.one_of(few, few.map(lambda kept: set(range(12)) - kept))
"""Of twelve blocks a few, or all but a few: chunks go on where nothing of theirs is there."""


beside = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6), strides, st.booleans()), max_size=3)
ALONE = (None, True)


@given(
    st.tuples(lost, lost, lost, lost),
    st.tuples(beside, beside),
    st.tuples(*[st.sampled_from([(None, False), (0, False), (3, False), ALONE, ALONE])] * 2),
)
def test_a_source_counts_as_far_as_its_windows_go_on(
    lost: tuple[set[int], ...],
    beside: tuple[list[Beside], ...],
    further: tuple[tuple[int | None, bool], ...],
) -> None:
    index, model, hashes = ClusterIndex(100), Model(), HEAP[:12]
    for source, gone in enumerate(lost):
        held = [key for n, key in enumerate(hashes) if n not in gone]
        index.add(source, b"".join(held))
        model.add(source, held)
    for source, windows, (other, alone) in zip((0, 3), beside, further, strict=True):
        if windows:
            index.set_windows(source, windows, other, alone=alone)
            model.set_windows(source, windows, other, alone)
    packed = b"".join(hashes)
    assert index.runs(packed) == model.runs(hashes)
    assert index.match(packed) == model.match(hashes, range(4))
    assert index.depths(packed, [1, 6, 15]) == [
        depth(model, hashes, group) for group in ({0}, {1, 2}, {0, 1, 2, 3})
    ]


def test_a_prompt_goes_on_from_where_windows_and_states_are_there() -> None:
    """Source 0 has full attention, 1 a window of two blocks, 2 states, of which the engine has kept two."""
    index, hashes = ClusterIndex(1_000), b"".join(HEAP[:10])
    index.set_windows(0, [(1, 2, 1, False), (2, 1, 1, False)])
    index.add(0, hashes)
    assert index.runs(hashes) == ()
    index.add(1, hashes)
    index.add(2, HEAP[3] + HEAP[8])
    assert (index.runs(hashes), index.match(hashes)) == (((1, 9, None),), [(0, 9)])
    index.remove(1, HEAP[7])  # what the later boundary needs of the window
    assert (index.match(hashes), index.depths(hashes, [1, 2, 7])) == ([(0, 4)], [4, 0, 4])
    index.remove(1, b"".join(HEAP[:2]))
    assert index.match(hashes) == [(0, 4)]
    index.add(5, hashes)
    assert index.runs(hashes) == ((0b100001, 4, None), (0b100000, 6, None))
    index.set_windows(0, [])
    assert index.depths(hashes, [1]) == [10]


def test_a_prompt_goes_on_where_longer_blocks_of_windows_end() -> None:
    """Source 1 has blocks as long as three of source 0, of which two are read; source 2 states as long as two."""
    index, hashes = ClusterIndex(1_000), b"".join(HEAP[:16])
    index.add(0, hashes)
    index.set_windows(0, [(1, 2, 3, False)])
    assert index.match(hashes) == []
    index.add(1, HEAP[2] + HEAP[5] + HEAP[11] + HEAP[14])
    assert index.match(hashes) == [(0, 15)]
    index.remove(1, HEAP[14])
    assert (index.match(hashes), index.runs(hashes)) == ([(0, 6)], ((1, 6, None),))
    index.add(1, HEAP[8])
    assert index.match(hashes) == [(0, 12)], "within a run that all hold"
    index.add(2, HEAP[5])
    index.set_windows(0, [(1, 2, 3, False), (2, 1, 2, False)])
    assert index.match(hashes) == [(0, 6)]
    index.add(3, hashes)
    assert index.runs(hashes) == ((0b1001, 6, None), (0b1000, 10, None))
    index.set_windows(0, [(1, 1, MAX_STRIDE - n, False) for n in range(MAX_WINDOWS)])
    assert index.match(hashes) == [(3, 16)], "no prompt is as long as that"


def test_a_prompt_goes_on_where_a_chunk_ends_or_its_blocks_are_there() -> None:
    """Source 1 has the blocks of chunks of four, but for their last ones, which nobody reads."""
    index, hashes = ClusterIndex(1_000), b"".join(HEAP[:15])
    index.add(0, hashes)
    index.set_windows(0, [(1, 4, 1, True)])
    assert (index.match(hashes), index.runs(hashes)) == ([(0, 12)], ((1, 12, None),)), "nothing is read there"
    index.add(1, b"".join(HEAP[12:14]))
    assert index.match(hashes) == [(0, 14)]
    index.add(1, HEAP[14])
    assert index.match(hashes) == [(0, 15)]
    index.remove(1, HEAP[12])
    assert index.match(hashes) == [(0, 12)], "those behind a gap are worth nothing"
    index.remove(0, HEAP[11])
    assert index.match(hashes) == [(0, 8)]
    index.add(1, b"".join(HEAP[8:10]))
    assert index.match(hashes) == [(0, 10)]
    index.set_windows(0, [(1, 4, 1, True), (2, 1, 3, False)])
    index.add(2, HEAP[5] + HEAP[8])
    assert index.match(hashes) == [(0, 9)], "a chunk's begin and a window's end"
    index.remove(1, HEAP[8])
    index.add(1, HEAP[4])
    assert index.match(hashes) == []
    index.add(1, HEAP[5])
    assert index.match(hashes) == [(0, 6)]


def test_where_a_chunk_begins_windows_go_on_too() -> None:
    """Nothing is there of a chunk of four; a window of three blocks has a gap before; states are as long as two."""
    index, hashes = ClusterIndex(1_000), b"".join(HEAP[:10])
    index.add(0, hashes)
    index.add(2, b"".join(HEAP[2:7]))
    index.set_windows(0, [(2, 3, 1, False), (1, 4, 1, True)])
    assert index.match(hashes[: 7 * 16]) == []
    index.add(2, HEAP[1])
    assert index.match(hashes[: 7 * 16]) == [(0, 4)]
    index.add(3, hashes)
    index.set_windows(0, [(3, 1, 2, False), (1, 3, 1, True)])
    assert index.match(hashes) == [(0, 6)], "not 9, where no state ends, nor 8, within a chunk"


def test_several_sources_end_within_a_run_that_all_hold() -> None:
    index, hashes = ClusterIndex(1_000), b"".join(HEAP[:11])
    for full, stride in ((0, 4), (2, 3), (4, 8), (6, 1), (8, 4)):
        index.add(full, hashes)
        index.add(full + 1, hashes)
        index.set_windows(full, [(full + 1, 1, stride, False)])
    assert sorted(index.match(hashes)) == [(0, 8), (2, 9), (4, 8), (6, 11), (8, 8)]
    assert index.runs(hashes) == ((0b101010101, 8, None), (0b1000100, 1, None), (0b1000000, 2, None))


def test_a_window_alone_goes_on_behind_blocks_that_nobody_holds() -> None:
    """Source 0 is of a model whose layers all have a window of two blocks, which source 1 holds."""
    index, hashes = ClusterIndex(1_000), b"".join(HEAP[:10])
    index.set_windows(0, [(1, 2, 1, False)], alone=True)
    assert index.match(hashes) == []
    index.add(1, HEAP[5] + HEAP[6] + HEAP[7] + HEAP[9])
    assert (index.runs(hashes), index.match(hashes)) == (((1, 8, None),), [(0, 8)])
    assert index.depths(hashes, [1, 2, 3]) == [8, 0, 8]
    assert index.match(hashes[: 6 * 16]) == [], "half of the window is not there"
    index.add(5, b"".join(HEAP[:3] + HEAP[7:]))
    assert index.runs(hashes) == ((0b100001, 3, None), (1, 4, None), (0b100001, 1, None), (0b100000, 2, None))
    assert index.match(hashes) == [(0, 8), (5, 3)]
    assert index.depths(hashes, [1, 0b100000], limited=False) == [0, 3], "what is held"
    index.remove(1, HEAP[6])
    assert index.match(hashes) == [(5, 3)]
    index.add(1, HEAP[6])
    index.set_windows(0, [(1, 2, 1, False)])
    assert index.match(hashes) == [(5, 3)], "of full attention it needs all"


def test_states_alone_go_on_from_the_last_one_that_is_there() -> None:
    """Source 1 has states, each as long as two blocks of source 0; what else was held was cleared."""
    index, hashes = ClusterIndex(1_000), b"".join(HEAP[:10])
    index.set_windows(0, [(1, 1, 2, False)], alone=True)
    index.add(1, HEAP[3] + HEAP[7])
    index.add(6, HEAP[2] + HEAP[8])
    index.produce(7, 4, 1.0, b"".join(HEAP[:5]))
    index.clear(6)
    index.clear(7)
    for _ in range(2):
        assert index.runs(hashes) == ((1, 8, None),)
        assert index.match(hashes[: 7 * 16]) == [(0, 4)]
        assert index.match(hashes[: 3 * 16]) == []
        while index.sweep():
            pass
    index.produce(7, 4, 1.0, b"".join(HEAP[4:8]))
    assert index.runs(hashes) == ((1, 4, None), (0b10000001, 3, 4), (0b10000001, 1, None))
    index.add(7, b"".join(HEAP[:4]))
    index.clear(1)
    assert index.match(hashes) == [(7, 8)]


def test_of_windows_alone_that_nobody_holds_a_prompt_counts_only_where_chunks_end() -> None:
    index, hashes = ClusterIndex(1_000), b"".join(HEAP[:10])
    index.set_windows(0, [(1, 4, 1, True)], alone=True)
    assert (index.runs(hashes), index.match(hashes[:48])) == (((1, 8, None),), [])
    assert index.match(hashes[: 8 * 16]) == [(0, 8)]
    index.set_windows(2, [(3, 3, 1, True)], alone=True)
    assert index.runs(hashes) == ((0b101, 8, None), (0b100, 1, None))
    index.set_windows(0, [(1, 4, 1, True), (4, 1, 1, False)], alone=True)
    assert index.match(hashes) == [(2, 9)]
    index.set_windows(2, [(3, 10, 1, False)], alone=True)
    assert index.runs(hashes) == ()


def test_windows_alone_change_nothing_of_sources_with_full_attention() -> None:
    """Source 0 has full attention and a window in source 1, source 2 lacks a block, and source 3 has windows alone, in
    source 2, which is none for a prompt then."""
    index, hashes = ClusterIndex(1_000), b"".join(HEAP[:12])
    index.add(0, b"".join(HEAP[:6] + HEAP[7:]))
    index.add(1, b"".join(HEAP[:5] + HEAP[7:]))
    index.add(2, b"".join(HEAP[:4] + HEAP[8:11]))
    index.set_windows(0, [(1, 2, 1, False)])
    assert (index.match(hashes), index.runs(hashes)) == ([(0, 5), (2, 4)], ((0b101, 4, None), (1, 1, None)))
    index.set_windows(4, [(5, 1, 1, False)], alone=True)
    assert (index.match(hashes), index.runs(hashes)) == ([(0, 5), (2, 4)], ((0b101, 4, None), (1, 1, None)))
    index.set_windows(3, [(2, 3, 1, False)], alone=True)
    assert (index.match(hashes), index.runs(hashes)) == ([(3, 11), (0, 5)], ((0b1001, 5, None), (8, 6, None)))


def test_blocks_without_their_parent_are_counted() -> None:
    index = ClusterIndex(1_000)
    index.add(0, b"".join(HEAP[:3]))
    index.add(0, b"".join(HEAP[3:5]), HEAP[2])
    assert index.detached == 0
    index.add(1, b"".join(HEAP[3:5]), HEAP[2])
    assert index.detached == 2
    assert index.match(b"".join(HEAP[:5])) == [(0, 5)]


def test_a_table_that_grows_stays_small() -> None:
    index = ClusterIndex(1_000_000)
    for count in range(100_000, 400_001, 100_000):
        index.add(count % 7, random.Random(count).randbytes(16 * 100_000))
        assert len(index) == count
        assert index.size_bytes / count < 80  # of few blocks, arenas of 2 MiB are a part


def test_questions_from_other_threads_are_answered_while_blocks_come_and_go() -> None:
    index = ClusterIndex(1_000_000)
    kept = b"".join(HEAP[:1_000])
    index.add(9, kept)
    packed = random.Random("others").randbytes(16 * 50_000)
    done = threading.Event()
    wrong: list[object] = []

    def ask() -> None:
        while not done.is_set():
            found = index.match(kept)
            if found != [(9, 1_000)] or len(index.runs(kept)) != 1:
                wrong.append(found)

    asker = threading.Thread(target=ask)
    asker.start()
    for _ in range(5):
        assert index.add(1, packed) == 0
        assert index.remove(1, packed) == 50_000
    done.set()
    asker.join()
    assert wrong == []
    assert len(index) == 1_000


@pytest.mark.parametrize(
    "call",
    [
        lambda index: index.add(MAX_SOURCES, bytes(16)),
        lambda index: index.add(0, bytes(15)),
        lambda index: index.add(0, bytes(16), bytes(3)),
        lambda index: index.produce(0, -1, 1.0, bytes(16)),
        lambda index: index.produce(0, 1, float("nan"), bytes(16)),
        lambda index: index.holders(bytes(17)),
        lambda index: index.depths(bytes(16), [-1]),
        lambda index: index.depths(bytes(16), [1 << MAX_SOURCES]),
        lambda index: index.lacking(bytes(17), 1),
        lambda index: index.lacking(bytes(16), 1 << MAX_SOURCES),
        lambda index: index.set_windows(MAX_SOURCES, []),
        lambda index: index.set_windows(0, [(MAX_SOURCES, 1, 1, False)]),
        lambda index: index.set_windows(0, [(1, 1, 0, False)]),
        lambda index: index.set_windows(0, [(1, 0, 1, True)]),
        lambda index: index.set_windows(0, [(1, 1, MAX_STRIDE + 1, False)]),
        lambda index: index.set_windows(0, [(1, 1, 1, False)], MAX_SOURCES),
        lambda index: index.set_windows(0, [(1, 1, 1, False)] * (MAX_WINDOWS + 1)),
        lambda index: index.set_windows(0, [], alone=True),
        lambda index: index.set_windows(0, [(1, 1, 1, False)], 0, alone=True),
    ],
)
def test_what_is_out_of_range_is_refused(call: object) -> None:
    index = ClusterIndex(10)
    with pytest.raises(InvalidRequest):
        call(index)  # type: ignore[operator]
    assert len(index) == 0
