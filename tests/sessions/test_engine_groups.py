"""Prefixes of engines whose layers have several caches, as their KV events say it, against a plain model."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvfs.events.engine_index import EngineIndex
from kvfs.events.event_streams import Engine
from kvfs.events.kv_events import CPU, GPU, BlockHash, BlockRemoved, BlockStored, KVEvent
from tests.support.kv_events import TOPIC, message

ENGINE = Engine(TOPIC, 0)
BLOCK = 16
KINDS = (
    ("full_attention", None),
    ("sliding_window", 3 * BLOCK + 1),
    ("mamba", None),
    ("mla_attention", None),
    ("chunked_local_attention", None),
)
CHUNKS = 4
"""The group of four blocks each."""


def stored(group: int, blocks: list[int], medium: str = GPU) -> BlockStored:
    kind, window = KINDS[group]
    return BlockStored(
        list(blocks),
        None,
        [],
        BLOCK,
        None,
        medium,
        None,
        group_idx=group,
        kv_cache_spec_kind=kind,
        kv_cache_spec_sliding_window=window,
        chunk_tokens=4 * BLOCK if group == CHUNKS else None,
    )


def index_of(*events: KVEvent) -> EngineIndex:
    index = EngineIndex()
    for sequence, event in enumerate(events):
        assert index.receive(message(sequence, event)) is None
    return index


def reads(group: int, boundary: int) -> set[int]:
    """The blocks that the layers of a group read from a boundary on."""
    all_before = boundary * BLOCK
    tokens = {0: all_before, 1: 3 * BLOCK, 2: 1, 3: all_before, CHUNKS: boundary % 4 * BLOCK}[group]
    return {token // BLOCK for token in range(max(boundary * BLOCK - tokens, 0), boundary * BLOCK)}


@given(st.lists(st.sets(st.integers(0, 9)), min_size=5, max_size=5), st.sets(st.integers(0, 4), min_size=1))
def test_a_prefix_is_as_long_as_each_group_has_what_its_layers_read(
    held: list[set[int]], groups: set[int]
) -> None:
    events: list[KVEvent] = []
    for group in sorted(groups):
        events += [
            stored(group, list(range(10))),
            BlockRemoved(sorted(set(range(10)) - held[group]), GPU, group_idx=group),
        ]
    lengths = [n for n in range(11) if all(reads(group, n) <= held[group] for group in groups)]
    assert index_of(*events).match(ENGINE, list(range(10))) == max(lengths)


@given(
    st.lists(st.sampled_from([1, 2, 3]), min_size=5, max_size=5),
    st.lists(st.sets(st.integers(0, 11), max_size=3), min_size=5, max_size=5),
    st.sets(st.integers(0, 4), min_size=1),
)
def test_blocks_of_different_sizes_end_together_where_an_engine_goes_on(
    sizes: list[int], lost: list[set[int]], groups: set[int]
) -> None:
    """A group's block n is of so many small ones, and has the hash of the last of them."""
    events: list[KVEvent] = []
    held: dict[int, set[int]] = {}
    for group in sorted(groups):
        size = sizes[group]
        held[group] = set(range(12 // size)) - lost[group]
        window = KINDS[group][1] and 3 * size * BLOCK + 1
        ends = [(n + 1) * size - 1 for n in range(12 // size)]
        chunk = stored(group, []).chunk_tokens
        event = replace(
            stored(group, ends),
            block_size=size * BLOCK,
            kv_cache_spec_sliding_window=window,
            chunk_tokens=chunk and chunk * size,
        )
        events += [
            event,
            BlockRemoved([ends[n] for n in range(12 // size) if n in lost[group]], GPU, group_idx=group),
        ]
    smallest = min(sizes[group] for group in groups)
    if any(sizes[group] % smallest for group in groups):
        return
    # The small blocks are those of the smallest group.
    hashes: list[BlockHash] = [*range(smallest - 1, 12, smallest)]
    step = math.lcm(*(sizes[group] for group in groups))
    lengths = [
        end
        for end in range(0, 13, step)
        if all(reads(group, end // sizes[group]) <= held[group] for group in groups)
    ]
    assert index_of(*events).match(ENGINE, hashes) == max(lengths) // smallest


def test_groups_of_another_medium_are_not_asked() -> None:
    index = index_of(stored(0, [1, 2]), stored(2, [2], CPU))
    assert index.match(ENGINE, [1, 2]) == 2
    assert index.match(ENGINE, [1, 2], CPU) == 2, "a state is of all tokens before it"


def test_a_block_of_two_copies_is_there_until_both_are_gone() -> None:
    events: list[KVEvent] = [stored(0, [1, 2]), stored(0, [2]), BlockRemoved([1, 2], GPU, group_idx=0)]
    assert index_of(*events).holders(2) == [ENGINE]
    assert index_of(*events, BlockRemoved([2], GPU, group_idx=0)).holders(2) == []


def test_a_block_that_is_said_again_by_an_engine_without_groups_is_no_copy() -> None:
    again = BlockStored([1], None, [], BLOCK, None, GPU, None)
    assert index_of(again, again, BlockRemoved([1], GPU)).holders(1) == []


@pytest.mark.parametrize("kind", [None, "unknown", "a kind of a later release"])
def test_a_group_that_does_not_say_what_it_is_reads_all_blocks(kind: str | None) -> None:
    event = BlockStored([2], None, [], BLOCK, None, GPU, None, kv_cache_spec_kind=kind)
    assert index_of(event).match(ENGINE, [1, 2]) == 0
    assert index_of(event).match(ENGINE, [2, 1]) == 1
