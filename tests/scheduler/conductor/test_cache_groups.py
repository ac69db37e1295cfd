"""Engines whose layers have several caches, as the Conductor's index has them: a prefix counts as far as all of them
go on, against a plain model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs import limits
from kvfs._native.cluster.index import MAX_WINDOWS
from kvfs.events.event_streams import Engine
from kvfs.events.kv_events import CPU, GPU, AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent
from scheduler.conductor.values import Routed, RouteRequest
from tests.scheduler.conductor.test_feed import Stand, message, stored
from tests.sessions.test_engine_groups import KINDS, reads
from tests.support.conductors import BLOCK_TOKENS

BLOCKS = 10
PROMPT = list(range(500, 500 + BLOCKS * BLOCK_TOKENS))
FULL, WINDOW, STATE, ALSO_FULL = range(4)
"""What `KINDS` of groups there are, by number; the window is of three blocks."""


def of_group(group: int, first: int = 0, last: int = BLOCKS, **values: Any) -> BlockStored:
    """Return the event that an engine says of blocks of the prompt, whose hashes are 1, 2 and so on."""
    kind, window = KINDS[group]
    given = {"group_idx": group, "kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": window, **values}
    tokens = PROMPT[first * BLOCK_TOKENS : last * BLOCK_TOKENS]
    return stored([*range(first + 1, last + 1)], tokens, parent=first or None, **given)


def removed(group: int, blocks: set[int], medium: str = GPU) -> BlockRemoved:
    hashes: list[BlockHash] = [block + 1 for block in sorted(blocks)]
    return BlockRemoved(hashes, medium, group_idx=group)


def stand_of(*events: KVEvent) -> Stand:
    stand = Stand()
    stand.feed.receive(message("engine-a", 0, *events))
    return stand


@given(
    st.lists(st.sets(st.integers(0, BLOCKS - 1), max_size=3), min_size=4, max_size=4),
    st.lists(st.integers(BLOCKS - 3, BLOCKS), min_size=2, max_size=2),
    st.permutations(range(4)),
    st.integers(1, 4),
)
def test_a_prefix_is_as_long_as_each_group_has_what_its_layers_read(
    lost: list[set[int]], ends: list[int], order: list[int], count: int
) -> None:
    """Those of full attention store the prompt up to different blocks."""
    end = [ends[0], BLOCKS, BLOCKS, ends[1]]
    groups, held = order[:count], [set(range(end[group])) - each for group, each in enumerate(lost)]
    events = [of_group(group, 0, end[group]) for group in groups]
    gone = [removed(group, lost[group]) for group in groups]
    lengths = [n for n in range(BLOCKS + 1) if all(reads(group, n) <= held[group] for group in groups)]
    has_full = FULL in groups or ALSO_FULL in groups
    assert stand_of(*events, *gone).held(PROMPT) == (max(lengths) if has_full else 0)


def of_long_blocks(stride: int, read: int, blocks: set[int], **values: Any) -> BlockStored:
    """Return the event of a window of which so many blocks are read, each as long as some of full attention: vLLM gives
    it the hash of the last."""
    hashes = [stride * (block + 1) for block in sorted(blocks)]
    given = {
        "block_size": stride * BLOCK_TOKENS,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": (read - 1) * stride * BLOCK_TOKENS + 2,
        **values,
    }
    return stored(hashes, PROMPT[: stride * BLOCK_TOKENS * len(hashes)], **given)


@given(
    st.sets(st.integers(0, BLOCKS - 1), max_size=1),
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 3), st.sets(st.integers(0, BLOCKS - 1), max_size=3)),
        min_size=1,
        max_size=3,
    ),
)
def test_windows_with_longer_blocks_go_on_where_one_of_each_ends(
    lost: set[int], windows: list[tuple[int, int, set[int]]]
) -> None:
    stand, held = stand_of(of_group(FULL), removed(FULL, lost)), []
    for group, (stride, read, gone) in enumerate(windows, 1):
        all_blocks = set(range(BLOCKS // stride))
        held.append((stride, read, all_blocks - gone))
        left = [stride * (block + 1) for block in sorted(all_blocks & gone)]
        stand.feed.receive(
            message(
                "engine-a",
                group,
                of_long_blocks(stride, read, all_blocks, group_idx=group),
                BlockRemoved([*left], GPU, group_idx=group),
            )
        )
    lengths = [
        end
        for end in range(min(lost, default=BLOCKS) + 1)
        for lacked in [
            any(
                end % stride or set(range(max(end // stride - read, 0), end // stride)) - blocks
                for stride, read, blocks in held
            )
        ]
        if not lacked
    ]
    assert stand.held(PROMPT) == max(lengths)


@pytest.mark.parametrize("tokens", [BLOCK_TOKENS // 2, BLOCK_TOKENS + 8, 0])
def test_full_attention_counts_alone_where_blocks_are_no_whole_ones_of_it(tokens: int) -> None:
    stand = stand_of(of_group(FULL), of_long_blocks(1, 2, {0, 1}, group_idx=1, block_size=tokens))
    assert stand.held(PROMPT) == BLOCKS
    assert stand.conductor.counts["other_group_events"] == 1


def test_a_block_that_comes_back_to_its_window_counts_again() -> None:
    stand = stand_of(of_group(FULL), of_group(WINDOW), removed(WINDOW, {1, 5}))
    assert stand.held(PROMPT) == BLOCKS
    stand.feed.receive(message("engine-a", 1, removed(WINDOW, {8})))
    assert stand.held(PROMPT) == 5
    stand.feed.receive(message("engine-a", 2, of_group(WINDOW, 8, 9)))
    assert stand.held(PROMPT) == BLOCKS


def test_a_block_of_two_copies_is_there_until_both_are_gone() -> None:
    """vLLM computes blocks of full attention that it has, where the window before them is gone."""
    stand = stand_of(of_group(FULL), of_group(WINDOW), of_group(FULL, 4), removed(FULL, {5}))
    assert stand.held(PROMPT) == BLOCKS
    stand.feed.receive(message("engine-a", 1, removed(FULL, {5})))
    assert stand.held(PROMPT) == 5


def test_groups_with_the_same_window_all_have_what_counts() -> None:
    alike: Any = {"kv_cache_spec_kind": KINDS[WINDOW][0], "kv_cache_spec_sliding_window": KINDS[WINDOW][1]}
    events = [of_group(FULL), of_group(WINDOW), of_group(WINDOW, group_idx=7, **alike)]
    stand = stand_of(*events, removed(7, {8}))
    assert stand.held(PROMPT) == 8
    stand.feed.receive(message("engine-a", 1, removed(WINDOW, {8}), of_group(WINDOW, 8, 9)))
    assert stand.held(PROMPT) == 8, "the other one has it not"
    stand.feed.receive(message("engine-a", 2, of_group(WINDOW, 8, 9, group_idx=7, **alike)))
    assert stand.held(PROMPT) == BLOCKS


def test_a_window_goes_on_from_a_block_that_full_attention_alone_has_and_says_later() -> None:
    """Of what a connector has loaded, layers with a window have the end; groups are said in order of their numbers."""
    stand = stand_of(of_group(WINDOW, 7), of_group(STATE, 9), of_group(FULL))
    assert stand.held(PROMPT) == BLOCKS
    assert stand.conductor.counts["engine_blocks_without_parent"] == 0


def test_layers_that_have_said_nothing_since_have_nothing() -> None:
    """vLLM says of the first steps of a long prompt that its windows and states have kept no block."""
    stand = stand_of(of_group(FULL))
    assert stand.held(PROMPT) == BLOCKS, "there may be no other layers"
    stand.feed.receive(message("engine-a", 1, of_group(WINDOW, 0, 0)))
    assert stand.held(PROMPT) == 0
    stand.feed.receive(message("engine-a", 2, of_group(WINDOW)))
    assert stand.held(PROMPT) == BLOCKS
    stand.feed.receive(message("engine-a", 3, AllBlocksCleared(), of_group(FULL)))
    assert stand.held(PROMPT) == 0, "the window was cleared too"
    stand.feed.receive(message("engine-a", 4, of_group(WINDOW, 0, 4)))
    assert stand.held(PROMPT) == 4


@pytest.mark.parametrize("end", ["restarted", "silent"])
def test_an_engine_that_may_have_started_anew_may_have_other_layers(end: str) -> None:
    stand = stand_of(of_group(WINDOW, group_idx=0), of_group(FULL, group_idx=1))
    if end == "silent":
        stand.feed.silent(Engine("engine-a", 0))
    stand.feed.receive(message("engine-a", 0, stored([1, 2, 3], PROMPT[:48])))
    assert stand.held(PROMPT) == 3


def test_after_a_gap_windows_are_as_empty_as_full_attention() -> None:
    stand = stand_of(of_group(FULL), of_group(WINDOW))
    stand.feed.receive(message("engine-a", 5, of_group(FULL)))
    stand.feed.replay_ended(Engine("engine-a", 0))
    assert stand.held(PROMPT) == 0
    stand.feed.receive(message("engine-a", 6, of_group(WINDOW)))
    assert stand.held(PROMPT) == BLOCKS


def test_full_attention_counts_nowhere_where_its_windows_get_no_number() -> None:
    stand = stand_of(of_group(FULL))
    stand.conductor.registry._sources._free.clear()
    stand.feed.receive(message("engine-a", 1, of_group(WINDOW)))
    assert stand.held(PROMPT) == 0
    assert stand.conductor.counts["over_limit"] == BLOCKS


def test_full_attention_counts_nowhere_beside_more_kinds_of_windows_than_are_followed() -> None:
    windows = [
        of_group(WINDOW, group_idx=10 + n, kv_cache_spec_sliding_window=(n + 1) * BLOCK_TOKENS + 1)
        for n in range(MAX_WINDOWS + 1)
    ]
    assert stand_of(of_group(FULL), *windows[:-1]).held(PROMPT) == BLOCKS
    assert stand_of(of_group(FULL), *windows).held(PROMPT) == 0


def test_a_window_counts_in_its_own_medium() -> None:
    stand = stand_of(of_group(FULL), of_group(WINDOW, 0, 4), of_group(FULL, 0, 6, medium=CPU))
    assert stand.held(PROMPT) == 6
    stand.feed.receive(message("engine-a", 1, of_group(WINDOW, 0, 5, medium=CPU)))
    assert stand.held(PROMPT) == 5


def test_chunks_of_a_length_that_nobody_says_limit_nothing() -> None:
    chunks = of_group(
        WINDOW, 8, kv_cache_spec_kind="chunked_local_attention", kv_cache_spec_sliding_window=None
    )
    stand = stand_of(of_group(FULL), chunks, removed(WINDOW, {9}))
    assert stand.held(PROMPT) == BLOCKS
    assert stand.conductor.counts["other_group_events"] == 2


def test_layers_that_read_nothing_before_a_token_limit_nothing() -> None:
    stand = stand_of(of_group(FULL), of_group(WINDOW, 0, 1, kv_cache_spec_sliding_window=1))
    assert stand.held(PROMPT) == BLOCKS
    assert stand.conductor.counts["other_group_events"] == 1


def test_a_prompt_goes_where_its_window_is_still_there() -> None:
    stand = stand_of(of_group(FULL), of_group(WINDOW))
    stand.feed.receive(message("engine-b", 0, of_group(FULL, 0, 8), of_group(WINDOW, 0, 8)))

    def place() -> tuple[str, int]:
        routed = stand.conductor.route(RouteRequest(model="m", tokens=[*PROMPT, 1]))
        assert isinstance(routed, Routed)
        stand.conductor.cancel(routed.id)
        return routed.decode, routed.cached_tokens

    assert place() == ("a", BLOCKS * BLOCK_TOKENS)
    stand.feed.receive(message("engine-a", 1, removed(WINDOW, {6, 8})))
    assert place() == ("b", 8 * BLOCK_TOKENS)


def test_an_instance_that_goes_takes_its_windows_along() -> None:
    stand = stand_of(of_group(FULL), of_group(WINDOW), of_group(STATE))
    registry = stand.conductor.registry
    free = len(registry._sources._free)
    registry.remove("a")
    assert len(registry._sources._free) == free + 4  # and what it was expected to have
    registry.sweep()
    stand.feed.receive(message("engine-b", 0, of_group(FULL)))
    assert stand.held(PROMPT, "b") == BLOCKS


def test_groups_are_bounded() -> None:
    stand = stand_of(*(of_group(FULL, group_idx=n) for n in range(limits.MAX_ENGINE_GROUPS + 1)))
    assert stand.held(PROMPT) == BLOCKS
    assert stand.conductor.counts["other_group_events"] == 1
