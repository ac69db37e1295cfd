"""The allocator: sizes of slots, segments carved and removed, and no two slots that overlap."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs import limits
from kvfs.errors import NoSpace
from tiers.hbm.allocator import SlotAllocator
from tiers.hbm.size_classes import slot_bytes_for

KIB, MIB = 1 << 10, 1 << 20


@given(st.integers(0, limits.HBM_SEGMENT_BYTES))
def test_a_slot_is_at_most_an_eighth_too_large(size_bytes: int) -> None:
    slot_bytes = slot_bytes_for(size_bytes)
    assert max(size_bytes, limits.HBM_MIN_SLOT_BYTES) <= slot_bytes
    assert slot_bytes <= max(limits.HBM_MIN_SLOT_BYTES, size_bytes * 9 // 8 + 1)
    assert slot_bytes % 512 == 0
    assert slot_bytes_for(slot_bytes) == slot_bytes


def test_blocks_of_models_waste_nothing() -> None:
    for layers, heads, head_bytes in ((32, 8, 256), (80, 8, 256), (80, 1, 256), (61, 1, 1152)):
        size_bytes = 16 * 2 * layers * heads * head_bytes
        assert slot_bytes_for(size_bytes) <= size_bytes * 1.05


def test_a_segment_without_slots_takes_another_size() -> None:
    allocator = SlotAllocator(MIB, 100)
    allocator.add(7)
    large = allocator.take(MIB)
    assert large is not None
    assert allocator.take(4 * KIB) is None
    allocator.free(large)
    small = [allocator.take(4 * KIB) for _ in range(3)]
    assert [allocator.place(slot).offset_bytes for slot in small if slot is not None] == [0, 4096, 8192]
    assert allocator.take(MIB) is None


def test_a_closed_segment_gives_no_slots() -> None:
    allocator = SlotAllocator(MIB, 100)
    allocator.add(0)
    slots = [allocator.take(256 * KIB) for _ in range(3)]
    allocator.close(0)
    assert allocator.take(256 * KIB) is None
    assert slots[1] is not None
    allocator.free(slots[1])
    assert allocator.take(256 * KIB) is None
    allocator.reopen(0)
    assert sum(allocator.take(256 * KIB) is not None for _ in range(4)) == 2


def test_numbers_run_out() -> None:
    allocator = SlotAllocator(MIB, 2)
    allocator.add(0)
    allocator.take(1)
    allocator.take(1)
    with pytest.raises(NoSpace, match="all 2 slots"):
        allocator.take(1)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 300_000)), max_size=60))
def test_slots_never_overlap(steps: list[tuple[int, int]]) -> None:
    """Any run of taking, freeing, closing and opening, beside a list of what is taken."""
    allocator = SlotAllocator(MIB, 40)
    taken: list[int] = []
    for number in range(3):
        allocator.add(number)
    closed: set[int] = set()
    for kind, value in steps:
        if kind <= 1 and len(taken) < 40 and (slot := allocator.take(value)) is not None:
            assert slot not in taken
            assert allocator.place(slot).segment not in closed
            assert allocator.place(slot).slot_bytes >= value
            taken.append(slot)
        elif kind == 2 and taken:
            allocator.free(taken.pop(value % len(taken)))
        elif kind == 3:
            allocator.close(value % 3)
            closed.add(value % 3)
        elif kind == 4 and value % 3 in closed:
            allocator.reopen(value % 3)
            closed.discard(value % 3)
        places = sorted((allocator.place(slot) for slot in taken), key=lambda p: (p.segment, p.offset_bytes))
        for one, two in itertools.pairwise(places):
            assert one.segment != two.segment or one.offset_bytes + one.slot_bytes <= two.offset_bytes
        assert all(place.offset_bytes + place.slot_bytes <= MIB for place in places)
        assert allocator.taken_bytes == sum(place.slot_bytes for place in places)
        assert len(allocator) == len(taken)
