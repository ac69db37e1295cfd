"""Plans of copies against a plain model, and started on the stand-in."""

from __future__ import annotations

import array
import ctypes
import mmap
import random
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs import limits
from kvfs._native.cuda.copies import DevicePlaces, Plan
from kvfs._native.cuda.driver import Context, open_driver
from kvfs.errors import ContextLost, InvalidRequest, LimitExceeded, OutOfResources
from tests.support.cuda_standin import Standin

Piece = tuple[int, int, int]
DESTINATIONS = [(1000, 40), (1040, 24), (2000, 30)]
SOURCES = [(5000, 64), (5064, 30)]
SIZE = 2 << 20


def numbers(pieces: Sequence[Piece]) -> array.array[int]:
    return array.array("Q", [number for piece in pieces for number in piece])


def plan(pieces: Sequence[Piece]) -> Plan:
    return Plan(numbers(pieces), DESTINATIONS, SOURCES)


def region_of(address: int, size: int, regions: list[tuple[int, int]]) -> tuple[int, int] | None:
    return next(((a, n) for a, n in regions if a <= address and address + size <= a + n), None)


def moved(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    return sorted((to + i, source + i) for to, source, size in pieces for i in range(size))


def merges(one: Piece, two: Piece) -> bool:
    """Whether two copies could be one, by the rules alone."""
    size = one[2] + two[2]
    return (
        one[0] + one[2] == two[0]
        and one[1] + one[2] == two[1]
        and region_of(one[0], size, DESTINATIONS) is not None
        and region_of(one[1], size, SOURCES) is not None
    )


PIECES = st.lists(
    st.tuples(st.integers(990, 2035), st.integers(4995, 5100), st.integers(0, 12))
    | st.tuples(st.integers(1000, 1063), st.integers(5000, 5090), st.integers(0, 3)),
    max_size=12,
) | st.builds(
    lambda begin, source, sizes: [
        (begin + sum(sizes[:i]), source + sum(sizes[:i]), size) for i, size in enumerate(sizes)
    ][::-1],
    st.integers(1000, 1030),
    st.integers(5000, 5060),
    st.lists(st.integers(0, 6), max_size=12),
)


@given(PIECES)
def test_a_plan_moves_the_same_bytes_in_the_fewest_copies(pieces: list[Piece]) -> None:
    inside = all(
        region_of(to, size, DESTINATIONS) and region_of(source, size, SOURCES) for to, source, size in pieces
    )
    targets = [to for to, _ in moved(pieces)]
    if not inside or len(targets) != len(set(targets)):
        with pytest.raises(InvalidRequest):
            plan(pieces)
        return
    made = plan(pieces)
    copies = made.copies()
    assert moved(copies) == moved(pieces)
    assert (len(made), made.total_bytes) == (len(copies), len(targets))
    assert all(region_of(to, n, DESTINATIONS) and region_of(source, n, SOURCES) for to, source, n in copies)
    assert not any(merges(one, two) for one in copies for two in copies)


def test_neighbours_in_two_regions_stay_two_copies() -> None:
    assert plan([(1036, 5000, 4), (1040, 5004, 4)]).copies() == [(1036, 5000, 4), (1040, 5004, 4)]
    assert plan([(1000, 5060, 4), (1004, 5064, 4)]).copies() == [(1000, 5060, 4), (1004, 5064, 4)]
    assert plan([(1004, 5004, 4), (1000, 5000, 4)]).copies() == [(1000, 5000, 8)]


@pytest.mark.parametrize(
    ("piece", "why"),
    [
        ((999, 5000, 1), "outside"),
        ((1000, 5094, 1), "outside"),
        ((1036, 5000, 8), "outside"),
        ((1000, 5000, 2**64 - 1), "outside"),
        ((2**64 - 1, 5000, 2), "outside"),
    ],
)
def test_what_lies_outside_is_named(piece: Piece, why: str) -> None:
    with pytest.raises(
        InvalidRequest, match=rf"{piece[2]} bytes from {piece[1]:#x} to {piece[0]:#x} .*{why}"
    ):
        plan([(1000, 5000, 0), piece])


def test_a_destination_that_is_read_too_is_refused() -> None:
    regions = [(1000, 100)]
    with pytest.raises(InvalidRequest, match="overlaps"):
        Plan(numbers([(1000, 1010, 10), (1020, 1005, 3), (1010, 1030, 4)]), regions, regions)
    assert len(Plan(numbers([(1000, 1010, 10), (1020, 1010, 10)]), regions, regions)) == 2


REGIONS = st.lists(st.integers(0, 40), min_size=2, max_size=8, unique=True).map(
    lambda edges: [(begin, end - begin) for begin, end in pairwise(sorted(edges))][::2]
)


@given(REGIONS, REGIONS, st.randoms())
def test_no_source_is_written_wherever_regions_meet(
    to: list[tuple[int, int]], sources: list[tuple[int, int]], rng: random.Random
) -> None:
    """Each destination's region is begun from the begin of one of the sources' regions."""
    pieces = [(begin, *rng.choice(sources)) for begin, _ in to]
    pieces = [(begin, source, min(n, size)) for (begin, source, n), (_, size) in zip(pieces, to, strict=True)]
    written, read = ({piece[side] + at for piece in pieces for at in range(piece[2])} for side in (0, 1))
    with pytest.raises(InvalidRequest, match="overlaps") if written & read else nullcontext():
        Plan(numbers(pieces), to, sources)


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True),
    st.permutations(range(3)),
    st.permutations(range(8)),
    st.booleans(),
)
def test_blocks_in_pieces_are_planned_both_ways(
    rows: list[int], runs: list[int], places_whole: list[int], are_apart: bool
) -> None:
    """Eight blocks of three pieces of 4 bytes, whose pieces lie by runs of all blocks, or beside each other."""
    block_step, run_step = (4, 32) if are_apart else (12, 4)
    regions, whole_regions = [(1000, 96)], [(5000, 96)]
    places = DevicePlaces(
        [8 * block_step, *(row * block_step for row in rows)],
        [1000 + run * run_step for run in runs],
        4,
        regions,
    )
    assert (len(places), places.block_pieces, places.block_bytes) == (len(rows) + 1, 3, 12)
    chosen = places.choose(range(1, len(places)))
    whole = [5000 + 12 * each for each in places_whole[: len(rows)]]
    expected = [
        (1000 + row * block_step + run * run_step + byte, at + 4 * piece + byte)
        for row, at in zip(rows, whole, strict=True)
        for piece, run in enumerate(runs)
        for byte in range(4)
    ]
    assert moved(chosen.load_plan(whole, whole_regions).copies()) == sorted(expected)
    assert moved(chosen.store_plan(whole, whole_regions).copies()) == sorted((to, at) for at, to in expected)
    with pytest.raises(InvalidRequest, match="outside"):
        places.load_plan([5000, *whole], whole_regions)


def test_what_does_not_fit_places_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    places = DevicePlaces([0, 8], [1000, 1004], 4, [(1000, 16)])
    with pytest.raises(InvalidRequest, match="1 blocks for 2 places"):
        places.load_plan([5000], SOURCES)
    for row in (-1, 2):
        with pytest.raises(InvalidRequest, match=f"block {row} of 2"):
            places.choose([0, row])
    with pytest.raises(InvalidRequest, match="overlaps"):
        places.store_plan([5000, 5004], SOURCES)
    monkeypatch.setattr(limits, "MAX_COPY_PIECES", 3)
    with pytest.raises(LimitExceeded, match="4 pieces: a plan has at most 3"):
        places.store_plan([5000, 5008], SOURCES)


@pytest.mark.parametrize("regions", [[(1000, 0)], [(1000, 10), (1009, 10)], [(2**64 - 4, 8)]])
def test_regions_are_disjoint(regions: list[tuple[int, int]]) -> None:
    with pytest.raises(InvalidRequest, match="destinations: a region"):
        Plan(numbers([]), regions, SOURCES)


def test_a_plan_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_COPY_PIECES", 2)
    assert len(plan([(1000, 5000, 1), (1002, 5000, 1)])) == 2
    with pytest.raises(LimitExceeded, match="3 pieces: a plan has at most 2"):
        plan([(1000, 5000, 0)] * 3)
    with pytest.raises(InvalidRequest, match="25 bytes"):
        Plan(bytes(25), DESTINATIONS, SOURCES)


# --- on the stand-in -----------------------------------------------------------------------------------------


class Ends:
    """Device memory and host memory, and a plan of every other 100 bytes of the host's."""

    def __init__(self, context: Context) -> None:
        self.pages = mmap.mmap(-1, SIZE)
        self.pages[:10_000] = bytes(i % 251 for i in range(10_000))
        self.host = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))
        self.allocation = context.device.create(SIZE)
        self.mapping = context.device.map(self.allocation)
        self.pieces = [(self.mapping.address + i, self.host + i, 100) for i in range(0, 10_000, 200)]
        device, host = [(self.mapping.address, SIZE)], [(self.host, SIZE)]
        self.load = Plan(numbers(self.pieces), device, host)
        self.stream, self.done = context.stream(), context.event()

    def loaded(self) -> bytes:
        return ctypes.string_at(self.mapping.address, 10_000)

    def expected(self) -> bytes:
        return b"".join(self.pages[i : i + 100] + bytes(100) for i in range(0, 10_000, 200))


@pytest.mark.parametrize("missing", [(), ("missing:cuMemcpyBatchAsync:0",)])
def test_a_plan_is_copied_behind_an_event(missing: tuple[str, ...], standin: Standin) -> None:
    standin.set_faults(*missing)
    context = open_driver(standin.path).devices()[0].retain_context()
    ends, other, ready = Ends(context), context.stream(), context.event()
    standin.hold(True)
    for _ in range(2000):
        other.copy(ends.host + SIZE - 1, ends.host, 1)
    other.copy(ends.host, ends.host + 5, 1)
    ready.record(other)
    ends.load.start(ends.stream, ends.done, ready)
    assert (ends.done.query(), any(ends.loaded())) == (False, False)
    standin.hold(False)
    ends.done.synchronize()
    assert (ends.loaded(), ends.loaded()[0]) == (ends.expected(), 5)


def test_an_empty_plan_ends(context: Context) -> None:
    stream, done = context.stream(), context.event()
    plan([(1000, 5000, 0)]).start(stream, done)
    done.synchronize()
    assert done.query()


@pytest.mark.parametrize("fault", ["batched copy:2:20", "cuMemcpyBatchAsync:2:1", "cuEventRecord:2:1"])
def test_nothing_is_in_flight_when_a_start_fails(fault: str, standin: Standin, context: Context) -> None:
    ends = Ends(context)
    standin.set_faults(fault)
    with pytest.raises(OutOfResources, match="50 copies: CUDA_ERROR_OUT_OF_MEMORY"):
        ends.load.start(ends.stream, ends.done)
    assert ends.stream.query()
    assert standin.context_depth() == 0
    ends.load.start(ends.stream, ends.done)
    ends.done.synchronize()
    assert ends.loaded() == ends.expected()


def test_a_copy_into_a_read_only_mapping_ends_the_context(standin: Standin, context: Context) -> None:
    ends = Ends(context)
    read_only = context.device.map(ends.allocation, writable=False)
    bad = Plan(
        numbers([(read_only.address, ends.host, 10)]), [(read_only.address, SIZE)], [(ends.host, SIZE)]
    )
    standin.hold(True)
    bad.start(ends.stream, ends.done)
    standin.hold(False)
    with pytest.raises(ContextLost, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        ends.done.synchronize()
    with pytest.raises(ContextLost):
        ends.load.start(ends.stream, ends.done)
