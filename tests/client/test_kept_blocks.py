"""What a place in a pool of GPU memory keeps to hand back: bounded, and sorted by segment."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import cast

import pytest

from kvfs import limits
from kvfs._native.cuda.driver import Mapping
from kvfs.client.kept_blocks import KeptSegment, KnownBlock, KnownBlocks

SIZE = 1000


@dataclass
class Range:
    address: int
    size_bytes: int = SIZE


def kept(address: int, *, others: int = 0, token: str = "token") -> KeptSegment:
    reading, writing = os.pipe()
    try:
        return KeptSegment.of(cast(Mapping, Range(address)), token, reading, others)
    finally:
        os.close(reading)
        os.close(writing)


def block(slot: int, address: int, generation: int = 2) -> KnownBlock:
    return KnownBlock(bytes([slot]) * 16, slot, generation, address, 10, 0)


def test_blocks_are_found_in_the_segments_that_are_kept() -> None:
    segments = {7: kept(5000), 3: kept(2000), 5: kept(8000, token="")}
    blocks = KnownBlocks()
    blocks.add(block(slot, address) for slot, address in enumerate((2000, 2999, 3000, 5000, 1999, 8000)))
    blocks.add([block(1, 2998, generation=4), block(3, 5500)])
    found = blocks.in_segments(segments, lambda each: each.slot != 0)
    assert found == {7: [block(3, 5500)], 3: [block(1, 2998, generation=4)]}
    for segment in (segments[7], segments[3]):
        os.close(segment.descriptor)
    assert segments[5].descriptor == -1


def test_a_block_is_known_until_its_slot_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HBM_KEPT_BLOCKS", 3)
    blocks, first = KnownBlocks(), block(1, 2000)
    blocks.add([first])
    assert blocks.get(first.key) == first
    moved = first._replace(slot=2, address=3000)
    blocks.add([moved, first._replace(key=bytes(16))])
    assert (blocks.get(first.key), blocks.get(bytes(16))) == (moved, first._replace(key=bytes(16)))
    blocks.add(block(slot, 4000) for slot in (3, 4, 5))
    assert (blocks.get(first.key), blocks.get(bytes(16))) == (None, None)
    assert blocks.get(bytes([4]) * 16) == block(4, 4000)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HBM_KEPT_BLOCKS", 4)
    monkeypatch.setattr(limits, "MAX_BATCH", 2)
    blocks, segments = KnownBlocks(), {0: kept(0)}
    blocks.add(block(slot, slot) for slot in range(6))
    blocks.add([block(2, 2)])
    asked: list[KnownBlock] = []

    def ask(each: KnownBlock) -> bool:
        asked.append(each)
        return False

    assert blocks.in_segments(segments, ask) == {}
    assert asked == [block(2, 2), block(5, 5), block(4, 4), block(3, 3)], "those heard of last"
    assert blocks.in_segments(segments, lambda each: True) == {0: [block(2, 2), block(5, 5)]}
    os.close(segments[0].descriptor)
    assert kept(0, others=limits.HBM_KEPT_SEGMENTS).descriptor == -1


def test_a_process_without_room_for_a_descriptor_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "dup", full)
    assert kept(0).descriptor == -1
