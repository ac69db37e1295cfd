"""The native index of blocks against plain dictionaries: what is there, of which bucket, behind which parent."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs._native.catalog.block_index import BlockIndex
from kvfs.errors import InvalidRequest
from kvfs.keys import split_keys

KEYS = [bytes([first]) + bytes([second]) * 15 for first in (0, 7, 255) for second in range(5)]
Fields = tuple[int, int, int, int, int, bool, bytes | None]

keys = st.sampled_from(KEYS)
blocks = st.tuples(
    st.integers(0, 1),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, 1 << 50),
    st.integers(0, (1 << 63)),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.booleans(),
    st.one_of(st.none(), keys),
)


@dataclass
class Model:
    blocks: dict[bytes, Fields] = field(default_factory=dict)

    def descendants(self, key: bytes) -> set[bytes]:
        found: set[bytes] = set()
        front = {key}
        while front:
            front = {each for each, block in self.blocks.items() if block[6] in front} - found - {key}
            found |= front
        return found


def check(index: BlockIndex, model: Model) -> None:
    assert len(index) == len(model.blocks)
    for key in KEYS:
        block = model.blocks.get(key)
        assert index.get(key) == block
        assert (key in index, index.sequence_of(key)) == (
            block is not None,
            None if block is None else block[3],
        )
        descendants = index.descendants(key)
        assert len(descendants) == len(set(descendants))
        assert set(descendants) == model.descendants(key)
        assert index.children(key) == sum(
            each != key and block[6] == key for each, block in model.blocks.items()
        )
        for at, each in enumerate(descendants):  # a block behind its parent
            parent = model.blocks[each][6]
            assert parent == key or parent in descendants[:at]
    for bucket in (0, 1):
        there = {key: block for key, block in model.blocks.items() if block[0] == bucket}
        assert index.bucket_blocks(bucket) == len(there)
        assert index.bucket_bytes(bucket) == sum(block[2] for block in there.values())
        for first in (0, 7, 255, 9):
            expected = sorted(key for key in there if key[0] == first)
            assert index.shelf(bucket, first) == expected
            assert index.shelf_blocks(bucket, first) == len(expected)
    order = sorted(model.blocks, key=lambda key: model.blocks[key][3])
    listed = split_keys(bytes(index.keys()))
    assert [model.blocks[key][3] for key in listed] == [model.blocks[key][3] for key in order]
    assert set(listed) == set(order)


@settings(max_examples=200)
@given(
    st.lists(st.one_of(st.tuples(keys, blocks), st.tuples(keys, st.none()), st.tuples(keys, st.booleans())))
)
def test_the_index_is_as_dictionaries_are(steps: list[tuple[bytes, Fields | bool | None]]) -> None:
    index, model = BlockIndex(), Model()
    assert [index.open_bucket(), index.open_bucket()] == [0, 1]
    for key, step in steps:
        if step is None:
            assert index.remove(key) == model.blocks.pop(key, None)
        elif isinstance(step, bool):
            index.pin(key, step)
            if key in model.blocks:
                model.blocks[key] = (*model.blocks[key][:5], step, model.blocks[key][6])
        else:
            index.add(key, *step)
            model.blocks[key] = step
    check(index, model)
    ids = [block[3] for block in model.blocks.values()]
    for key, block in model.blocks.items():
        if ids.count(block[3]) == 1:
            assert index.of_sequence(block[3]) == key
    for key in KEYS:
        index.remove(key)
    check(index, Model())


def test_many_blocks_take_what_is_promised() -> None:
    index = BlockIndex()
    bucket, empty = index.open_bucket(), index.state_bytes
    for number in range(50_000):
        parent = None if number % 50 == 0 else (number - 1).to_bytes(16, "little")
        index.add(number.to_bytes(16, "little"), bucket, 0, 1, number, 0, False, parent)
    assert (index.state_bytes - empty) / len(index) < 95
    assert index.descendants(bytes(16)) == [number.to_bytes(16, "little") for number in range(1, 50)]
    for number in range(50_000):
        assert index.remove(number.to_bytes(16, "little")) is not None
    assert (len(index), index.bucket_blocks(bucket), index.bucket_bytes(bucket)) == (0, 0, 0)


def test_a_bucket_is_opened_before_and_its_number_is_used_again() -> None:
    index = BlockIndex()
    with pytest.raises(InvalidRequest):
        index.add(KEYS[0], 0, 0, 1, 1, 1, False, None)
    assert [index.open_bucket() for _ in range(20)] == list(range(20))
    index.close_bucket(3)
    with pytest.raises(InvalidRequest):
        index.add(KEYS[0], 3, 0, 1, 1, 1, False, None)
    assert index.open_bucket() == 3
    with pytest.raises(InvalidRequest):
        index.get(b"short")
