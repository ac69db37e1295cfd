"""Engines whose layers have several caches, as the Conductor's index has them: a prefix counts as far as all of them
go on, against a plain model."""

from __future__ import annotations

from itertools import count
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvfs import limits
from kvfs._native.cluster.index import MAX_WINDOWS
from kvfs.events.event_streams import Engine
from kvfs.events.kv_events import CPU, GPU, AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent
from scheduler.conductor.values import Routed, RouteRequest
from tests.scheduler.conductor.test_feed import Stand, message, stored
from tests.sessions.test_engine_groups import KINDS
from tests.support.conductors import BLOCK_TOKENS
from tests.support.prefix_needs import Layers, longest

BLOCKS = 10
PROMPT = list(range(500, 500 + BLOCKS * BLOCK_TOKENS))
FULL, WINDOW, STATE, ALSO_FULL = range(4)
"""What `KINDS` of groups there are, by number; the window is of three blocks."""
LAYERS = {FULL: Layers(), WINDOW: Layers(read=3), STATE: Layers(read=1), ALSO_FULL: Layers()}


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
    groups = order[:count]
    held = {(group, at) for group in groups for at in range(end[group]) if at not in lost[group]}
    events = [of_group(group, 0, end[group]) for group in groups]
    gone = [removed(group, lost[group]) for group in groups]
    length = longest({group: LAYERS[group] for group in groups}, held, BLOCKS)
    has_full = FULL in groups or ALSO_FULL in groups
    assert stand_of(*events, *gone).held(PROMPT) == (length if has_full else 0)


class WindowGroup(NamedTuple):
    """A group whose blocks are as long as some of full attention, or as a part of one."""

    group: int
    tokens: int
    read: int
    """How many of its blocks are read; of parts all of so many blocks of full attention."""

    @property
    def in_prompt(self) -> int:
        return len(PROMPT) // self.tokens

    @property
    def reads(self) -> int:
        return self.read * max(BLOCK_TOKENS // self.tokens, 1)

    def hash(self, block: int) -> int:
        """Return the hash of a block: of one that ends where one of full attention does, it is that one's."""
        full, rest = divmod((block + 1) * self.tokens, BLOCK_TOKENS)
        return 1000 * self.tokens + block if rest else full

    def stored(self, first: int, last: int, kept: int = 0, **values: Any) -> BlockStored:
        """Return the event of a stretch of blocks, of which those from `kept` on are: vLLM says the tokens of all, and
        what precedes the first."""
        given = {
            "block_size": self.tokens,
            "group_idx": self.group,
            "kv_cache_spec_kind": "sliding_window",
            "kv_cache_spec_sliding_window": (self.reads - 1) * self.tokens + 2,
            **values,
        }
        before = self.hash(first - 1) if first else None
        tokens = PROMPT[first * self.tokens : last * self.tokens]
        hashes: list[BlockHash] = [*map(self.hash, range(max(first, kept), last))]
        return stored(hashes, tokens, before, **given)

    def removed(self, block: int) -> BlockRemoved:
        return BlockRemoved([self.hash(block)], GPU, group_idx=self.group)


@given(
    st.lists(st.tuples(st.sampled_from([4, 8, 16, 32, 48]), st.integers(1, 3)), min_size=1, max_size=3),
    st.integers(0, BLOCKS),
    st.data(),
)
def test_windows_with_longer_or_shorter_blocks_go_on_where_one_of_each_ends(
    drawn: list[tuple[int, int]], full: int, data: st.DataObject
) -> None:
    """Blocks come in two steps, of which full attention is told first; then some go, and some of these come again."""
    windows = [WindowGroup(group, *each) for group, each in enumerate(drawn, 1)]
    groups = {window.group: Layers(window.tokens, window.reads) for window in windows}
    held: dict[WindowGroup, set[int]] = {window: set() for window in windows}
    stand = Stand()
    sequence = count()

    def hear(*events: KVEvent) -> None:
        stand.feed.receive(message("engine-a", next(sequence), *events))
        there = {(window.group, block) for window, blocks in held.items() for block in blocks}
        assert stand.held(PROMPT) == longest(groups, there, BLOCKS)

    first = {window: data.draw(st.integers(0, window.in_prompt)) for window in windows}
    for window in windows:
        held[window] = set(range(first[window]))
    hear(of_group(FULL), *(window.stored(0, first[window]) for window in windows))
    kept = {window: data.draw(st.integers(first[window], window.in_prompt)) for window in windows}
    for window in windows:
        held[window] |= set(range(kept[window], window.in_prompt))
    hear(
        of_group(FULL, full),
        *(window.stored(first[window], window.in_prompt, kept[window]) for window in windows),
    )
    hear(*([removed(FULL, set(range(full, BLOCKS)))] if full < BLOCKS else []))
    for window in windows:
        for block in data.draw(st.lists(st.integers(0, window.in_prompt - 1), max_size=3, unique=True)):
            was_held = block in held[window]
            held[window].discard(block)
            hear(window.removed(block))
            if was_held and data.draw(st.booleans()):
                held[window].add(block)
                hear(window.stored(block, block + 1))


@pytest.mark.parametrize("kind", ["chunked_local_attention", "sliding_window"])
def test_layers_that_are_not_followed_are_no_full_attention_where_they_come_first(kind: str) -> None:
    """Chunks are not, nor windows whose blocks are no whole ones of full attention."""
    other = WindowGroup(0, BLOCK_TOKENS + 8, 2).stored(0, 6, kv_cache_spec_kind=kind)
    stand = stand_of(other)
    assert stand.held(PROMPT) == 0
    stand.feed.receive(message("engine-a", 1, of_group(FULL, group_idx=1)))
    assert stand.held(PROMPT) == BLOCKS
    assert stand.conductor.counts["other_group_events"] == 1


def test_a_state_at_a_prompts_end_does_not_change_what_its_group_is() -> None:
    """vLLM says of it a shorter block of the same group."""
    states: Any = {"group_idx": 1, "kv_cache_spec_kind": "mamba"}
    ends: Any = {**states, "block_size": 4 * BLOCK_TOKENS}
    stand = stand_of(of_group(FULL), stored([4, 8], PROMPT[: 8 * BLOCK_TOKENS], **ends))
    assert stand.held(PROMPT) == 8
    stand.feed.receive(message("engine-a", 1, stored([9], PROMPT[-BLOCK_TOKENS:], 8, **states)))
    assert stand.held(PROMPT) == 8
    stand.feed.receive(message("engine-a", 2, removed(1, {7})))
    assert stand.held(PROMPT) == 4
    stand.feed.receive(message("engine-a", 3, removed(1, {3}), stored([], [], 8, **ends)))
    assert stand.held(PROMPT) == 0


def test_an_event_that_has_gaps_breaks_no_parts_apart_that_were_told_together() -> None:
    quarters, read = WindowGroup(1, BLOCK_TOKENS // 4, 1), BLOCKS * 4
    stand = stand_of(of_group(FULL), quarters.stored(0, read))
    gaps: list[BlockHash] = [quarters.hash(read - 4), quarters.hash(read - 1)]
    stand.feed.receive(message("engine-a", 1, replace(quarters.stored(read - 4, read), block_hashes=gaps)))
    assert stand.held(PROMPT) == BLOCKS
    for sequence, block in enumerate([*range(read - 4, read), read - 4, read - 1], 2):
        stand.feed.receive(message("engine-a", sequence, quarters.removed(block)))
    assert stand.held(PROMPT) == BLOCKS - 1


def test_a_block_of_full_attention_wants_all_parts_of_a_window_beside_it() -> None:
    halves, sequence = WindowGroup(1, BLOCK_TOKENS // 2, 1), count(1)
    stand = stand_of(of_group(FULL), halves.stored(0, halves.in_prompt))
    last, before = halves.in_prompt - 1, halves.in_prompt - 2

    def after(event: KVEvent) -> int:
        stand.feed.receive(message("engine-a", next(sequence), event))
        return stand.held(PROMPT)

    assert after(halves.removed(before)) == BLOCKS - 1
    assert after(halves.removed(last)) == BLOCKS - 1
    assert after(halves.stored(last, last + 1)) == BLOCKS - 1
    assert after(halves.stored(before, last)) == BLOCKS
    assert after(halves.stored(before, last)) == BLOCKS
    assert after(halves.removed(before)) == BLOCKS, "there is another copy"
    assert after(halves.removed(before)) == BLOCKS - 1


def test_prompts_that_part_within_a_block_share_its_first_half() -> None:
    half = BLOCK_TOKENS // 2
    one, other = PROMPT[:BLOCK_TOKENS], [*PROMPT[:half], *PROMPT[-half:]]
    halves: Any = {
        "block_size": half,
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": half + 2,
    }
    stand = stand_of(
        stored([1], one, kv_cache_spec_kind="full_attention"),
        stored([2], other, kv_cache_spec_kind="full_attention"),
        stored([100, 1], one, **halves),
        stored([2], other[half:], 100, **halves),
    )
    assert (stand.held(one), stand.held(other)) == (1, 1)
    stand.feed.receive(message("engine-a", 1, BlockRemoved([100], GPU, group_idx=1)))
    assert (stand.held(one), stand.held(other)) == (0, 0)


@pytest.mark.parametrize("tokens", [BLOCK_TOKENS // 2, BLOCK_TOKENS + 8, 0])
def test_full_attention_counts_alone_where_blocks_are_no_whole_ones_of_it(tokens: int) -> None:
    stand = stand_of(of_group(FULL), WindowGroup(1, BLOCK_TOKENS, 2).stored(0, 2, block_size=tokens))
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
