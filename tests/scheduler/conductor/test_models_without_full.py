"""Models without layers of full attention, such as those with sliding windows alone: a prompt is a hit though its first
blocks are gone, in engines' own memory and in stores, against a plain model."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvfs.events.event_streams import Engine
from kvfs.events.kv_events import CPU, GPU, STORAGE, AllBlocksCleared, BlockHash, BlockRemoved, BlockStored
from kvfs.keys import prefix_hashes
from kvfs.namespace_groups import group_in
from scheduler.conductor.conductor import Conductor
from scheduler.conductor.door.mooncake import _keys
from scheduler.conductor.feeds.feed import Feed
from scheduler.conductor.values import RouteRequest
from tests.scheduler.conductor.test_feed import message, of_store
from tests.scheduler.conductor.test_feed import stored as of_tokens
from tests.scheduler.conductor.test_store_windows import (
    BLOCKS,
    FULL,
    PROMPT,
    STATE,
    WINDOW_2,
    WINDOW_3,
    groups_said,
    hashes,
    layers_in,
    namespace_of,
    removed,
)
from tests.scheduler.conductor.test_store_windows import stored as beside_full
from tests.support.conductors import BLOCK_TOKENS, Clock, conductor, instance
from tests.support.prefix_needs import Block, longest

MODEL: Final = "alone"
ENGINE: Final = "engine-a"


def stored(group: int, block: int, medium: str = CPU) -> BlockStored:
    """Return the event that a store says of one block: it follows the one before of its own group."""
    event, own = beside_full(group, block, medium, MODEL), hashes(group, MODEL)
    return replace(event, parent_block_hash=own[block - 1] if block else None)


def of_engine(group: int, first: int, last: int, kept: int = 0) -> BlockStored:
    """Return the event that an engine says of a stretch of blocks, of which those from `kept` on are there."""
    described = group_in(namespace_of(group, MODEL))
    assert described is not None
    own: list[BlockHash] = [*range(max(first, kept) + 1, last + 1)]
    tokens = PROMPT[first * BLOCK_TOKENS : last * BLOCK_TOKENS]
    given = {
        "group_idx": group,
        "kv_cache_spec_kind": described.kind,
        "kv_cache_spec_sliding_window": described.window_tokens,
    }
    return of_tokens(own, tokens, first or None, **given)


class Stand:
    """A Conductor that follows an engine and its store, of a model with these groups: prompts are looked up by the keys
    of the first one."""

    def __init__(self, *groups: int, is_said: bool = False, **options: Any) -> None:
        namespace = namespace_of(groups[0], MODEL).as_mapping()
        said = groups_said(*groups, model=MODEL) if is_said else ()
        given = {"model": MODEL, "namespace": namespace, "groups": said}
        self.conductor: Conductor = conductor(
            Clock(),
            instance("a", store_topic="node", store_peer="10.0.0.1:9400", **given),
            instance("b", store_topic="other", store_peer="10.0.0.2:9400", **given),
            instance("plain", store_topic="node"),
            **options,
        )
        self.feed = Feed(self.conductor.registry, self.conductor.now_s)
        self._sequences = defaultdict[str, int](int)

    def hears(self, topic: str, *events: Any) -> None:
        self.feed.receive(message(topic, self._sequences[topic], *events))
        self._sequences[topic] += 1

    def held(self, name: str = "a") -> int:
        return self.conductor.match(RouteRequest(model=MODEL, tokens=PROMPT))[name] // BLOCK_TOKENS


changes: Final = st.lists(
    st.tuples(st.booleans(), st.integers(0, BLOCKS - 1), st.sampled_from([CPU, STORAGE])), max_size=30
)


@given(st.sampled_from([WINDOW_3, STATE, WINDOW_2]), st.booleans(), changes)
def test_a_prompt_in_a_store_goes_on_where_its_window_is(
    group: int, is_said: bool, some: list[tuple[bool, int, str]]
) -> None:
    stand, held = Stand(group, is_said=is_said), defaultdict[int, set[str]](set)
    for is_stored, block, medium in some:
        if is_stored:
            held[block].add(medium)
        else:
            held[block].discard(medium)
        event = stored(group, block, medium) if is_stored else removed(group, block, medium, MODEL)
        stand.hears("node", event)
        there: set[Block] = {(group, block) for block, media in held.items() if media}
        assert stand.held() == longest(layers_in(MODEL, [group]), there, BLOCKS)
    assert stand.held("b") == 0
    assert stand.conductor.counts["other_group_events"] == 0
    stand.hears("node", AllBlocksCleared())
    assert stand.held() == 0


@given(st.sampled_from([WINDOW_3, STATE]), st.integers(1, BLOCKS), st.data())
def test_a_prompt_in_an_engines_own_memory_goes_on_where_its_window_is(
    group: int, end: int, data: st.DataObject
) -> None:
    stand = Stand(group)
    stand.hears(ENGINE, of_engine(group, 0, end), of_engine(group, end, BLOCKS))
    gone = data.draw(st.sets(st.integers(0, BLOCKS - 1)))
    stand.hears(ENGINE, BlockRemoved([block + 1 for block in sorted(gone)], GPU, group_idx=group))
    there: set[Block] = {(group, block) for block in range(BLOCKS) if block not in gone}
    assert stand.held() == longest(layers_in(MODEL, [group]), there, BLOCKS)
    stand.feed.silent(Engine(ENGINE, 0))
    assert stand.held() == 0


def test_of_a_stretch_that_is_not_kept_as_a_whole_nothing_counts() -> None:
    """An engine that keeps the window before a prompt's end alone says neither which blocks these are nor, of what
    follows a stretch without blocks, what is before it."""
    stand = Stand(WINDOW_3)
    stand.hears(ENGINE, of_engine(WINDOW_3, 0, 5, 2), of_engine(WINDOW_3, 5, 7, 7), of_engine(WINDOW_3, 7, 8))
    assert stand.held() == 0
    counts = stand.conductor.counts
    assert (counts["engine_blocks_malformed"], counts["engine_blocks_without_parent"]) == (3, 1)


def test_what_a_window_has_in_the_engine_and_in_its_store_count_each_for_itself() -> None:
    stand = Stand(WINDOW_3)
    stand.hears(ENGINE, of_engine(WINDOW_3, 0, 5))
    stand.hears("node", *(stored(WINDOW_3, block) for block in (5, 6)))
    assert stand.held() == 5
    stand.hears("node", stored(WINDOW_3, 4))
    assert stand.held() == 7


def test_a_route_predicts_what_is_there_behind_what_is_gone() -> None:
    stand = Stand(WINDOW_3)
    stand.hears("node", *(stored(WINDOW_3, block) for block in (3, 4, 5)))
    routed: Any = stand.conductor.route(RouteRequest(model=MODEL, tokens=[*PROMPT, 1]))
    assert (routed.decode, routed.cached_tokens) == ("a", 6 * BLOCK_TOKENS)


def test_another_machines_store_sends_what_is_there_behind_what_is_gone() -> None:
    stand = Stand(WINDOW_3, transfers=True)
    stand.hears("node", *(stored(WINDOW_3, block) for block in (3, 4, 5)))
    routed: Any = stand.conductor.route(RouteRequest(model=MODEL, tokens=[*PROMPT, 1], exclude=["a"]))
    assert (routed.decode, routed.cached_tokens) == ("b", 6 * BLOCK_TOKENS)
    stand.conductor.cancel(routed.id)
    routed = stand.conductor.route(RouteRequest(model=MODEL, tokens=[*PROMPT, 1]))
    [used, *_] = routed.ranges
    assert (routed.decode, used.action) == ("a", "use"), "its own is not sent to it"


@pytest.mark.parametrize("is_said", [False, True])
def test_of_several_groups_without_full_attention_a_store_s_count_nowhere(is_said: bool) -> None:
    """Nothing says which of their blocks end with the same token."""
    stand = Stand(WINDOW_3, STATE, is_said=is_said)
    windows = [stored(WINDOW_3, block) for block in range(BLOCKS)]
    stand.hears("node", *windows, stored(STATE, 0))
    assert stand.held() == 0
    stand.hears("node", *(stored(STATE, block) for block in range(1, BLOCKS)))
    assert stand.held() == 0


def test_in_an_engines_own_memory_all_its_groups_count() -> None:
    stand = Stand(WINDOW_3, STATE)
    stand.hears(ENGINE, of_engine(WINDOW_3, 0, 6), of_engine(STATE, 0, 6))
    assert stand.held() == 6
    stand.hears(ENGINE, BlockRemoved([4], GPU, group_idx=WINDOW_3))
    assert stand.held() == 3
    stand.hears(ENGINE, of_engine(STATE, 6, 7), of_engine(WINDOW_3, 6, 7))
    assert stand.held() == 7


def test_what_is_of_full_attention_after_all_counts_nowhere() -> None:
    """The namespace was that of a window, of an engine that has both."""
    stand = Stand(WINDOW_3)
    full = of_tokens([*range(1, BLOCKS + 1)], PROMPT, group_idx=7, kv_cache_spec_kind="full_attention")
    stand.hears(ENGINE, full)
    stand.hears("node", *(beside_full(FULL, block, CPU, MODEL) for block in range(BLOCKS)))
    assert stand.held() == 0
    assert stand.conductor.counts["other_group_events"] == 1 + BLOCKS


def test_a_stretch_of_which_nobody_knows_what_is_before_it_has_no_keys() -> None:
    stand = Stand(WINDOW_3)
    stand.hears(ENGINE, of_engine(WINDOW_3, 4, BLOCKS))
    assert stand.held() == 0
    assert stand.conductor.counts["engine_blocks_without_parent"] == BLOCKS - 4


def test_blocks_that_its_tokens_are_too_few_for_are_counted() -> None:
    stand = Stand(WINDOW_3)
    stand.hears(ENGINE, of_engine(WINDOW_3, 0, 4), of_tokens([20, 21], PROMPT[:16]))
    event = of_engine(WINDOW_3, 0, 1)
    stand.hears(ENGINE, replace(event, block_hashes=[7, 8]))
    assert stand.held() == 4
    assert stand.conductor.counts["engine_blocks_malformed"] == 4


def test_blocks_that_are_asked_for_by_hash_count_behind_those_that_are_gone() -> None:
    stand = Stand(WINDOW_3)
    stand.hears(ENGINE, of_engine(WINDOW_3, 0, BLOCKS), BlockRemoved([1, 2], GPU, group_idx=WINDOW_3))
    pool = stand.conductor.registry.pool(MODEL)
    member, context = pool.members["a"], cast(Any, SimpleNamespace(follows=stand.feed))
    keys = b"".join(_keys(context, pool, member, [*range(1, BLOCKS + 1)]))
    assert stand.conductor.depths(keys, [pool.mask_of(member)]) == [BLOCKS]


@pytest.mark.parametrize("left", [0, 1])
def test_without_numbers_nothing_counts_until_there_are_some(left: int) -> None:
    stand = Stand(WINDOW_3)
    numbers = stand.conductor.registry._sources._free
    kept = numbers[left:]
    del numbers[left:]
    stand.hears("node", *(stored(WINDOW_3, block) for block in range(3)))
    assert stand.held() == 0
    assert stand.conductor.counts["over_limit"] == 3
    numbers += kept
    stand.hears("node", AllBlocksCleared(), *(stored(WINDOW_3, block) for block in range(3)))
    assert stand.held() == 3


def test_no_copies_of_such_models_are_ordered() -> None:
    stand = Stand(WINDOW_3, transfers=True, copies=True)
    copies = stand.conductor.copies
    assert copies is not None
    for model, count in ((MODEL, 0), ("m", 1)):
        pool = stand.conductor.registry.pool(model)
        copies.routed(pool, 0, prefix_hashes(pool.namespace, PROMPT))
        assert len(copies._wanted) == count


def test_blocks_are_those_of_windows() -> None:
    stand = Stand(WINDOW_3)
    stand.hears("node", *(stored(WINDOW_3, block) for block in (3, 4, 5)), of_store(PROMPT))
    stand.hears(ENGINE, of_engine(WINDOW_3, 0, 7))
    streams = stand.conductor.registry.streams()
    of_model, of_other = (
        stand.conductor.count_blocks(
            source
            for stream in streams
            if pool.cache_model in stream.layers
            for source in stream.block_sources(pool.cache_model)
        )
        for pool in map(stand.conductor.registry.pool, (MODEL, "m"))
    )
    assert (of_model, of_other) == (3 + 7, BLOCKS)


def test_numbers_are_given_back_with_the_instance() -> None:
    stand = Stand(WINDOW_3)
    registry = stand.conductor.registry
    free = len(registry._sources._free)
    stand.hears("other", stored(WINDOW_3, 0))
    stand.hears("engine-b", of_engine(WINDOW_3, 0, 4))
    assert len(registry._sources._free) == free - 4, (
        "each has a window, and what stands in for full attention"
    )
    registry.remove("b")
    assert len(registry._sources._free) == free + 1  # and what it was expected to have
