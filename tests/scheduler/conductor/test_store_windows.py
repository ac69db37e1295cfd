"""Stores of models with several kinds of attention, as the Conductor's index has them: a prefix counts as far as the
store has what each kind of layers reads, in whichever of its tiers, against a plain model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvfs.events.event_streams import Engine
from kvfs.events.kv_events import (
    CPU,
    STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    first_sequence,
    start_of,
)
from kvfs.keys import prefix_hashes, split_keys
from kvfs.namespace_groups import CHUNK, FULL_TOKENS, FURTHER, KIND, LAYERS, WINDOW, describe_groups, group_in
from kvfs.namespaces import Namespace
from scheduler.conductor.conductor import Conductor
from scheduler.conductor.feeds.feed import Feed
from scheduler.conductor.feeds.store_windows import StoreWindows
from scheduler.conductor.sources import StreamName
from scheduler.conductor.values import CacheGroup, RouteRequest
from tests.scheduler.conductor.test_feed import message, of_store
from tests.support.conductors import BLOCK_TOKENS, NAMESPACE, Clock, conductor, instance
from tests.support.prefix_needs import Block, Layers, longest

BLOCKS: Final = 9
PROMPT: Final = list(range(500, 500 + BLOCKS * BLOCK_TOKENS))
FULL, WINDOW_3, ALSO_WINDOW_3, STATE, WINDOW_2, ALSO_FULL = range(6)
READS: Final = {WINDOW_3: 3, ALSO_WINDOW_3: 3, STATE: 1, WINDOW_2: 2, ALSO_FULL: BLOCKS}
"""Blocks before a boundary that each group's layers read, of their own or, if these are shorter, of full attention;
of full attention all, by the keys of whose first group prompts are looked up. Of chunks they are as many."""
_MIXED: Final = {
    WINDOW_3: BLOCK_TOKENS // 2,
    ALSO_WINDOW_3: 3 * BLOCK_TOKENS,
    WINDOW_2: 2 * BLOCK_TOKENS,
    ALSO_FULL: BLOCK_TOKENS // 2,
}
"""Tokens of blocks of these groups in the models that are mixed."""
MODELS: Final = ("hybrid", "mixed", "hybrid, chunks", "mixed, chunks")


def tokens_of(group: int, model: str) -> int:
    return _MIXED.get(group, BLOCK_TOKENS) if model.startswith("mixed") else BLOCK_TOKENS


def is_chunked(group: int, model: str) -> bool:
    return group in (WINDOW_3, WINDOW_2) and model.endswith("chunks")


def count_of(group: int, model: str) -> int:
    """Return how many blocks of a group the prompt has."""
    return len(PROMPT) // tokens_of(group, model)


def read_of(group: int, model: str) -> int:
    """Return how many of its own blocks a group's layers read."""
    return READS[group] * max(BLOCK_TOKENS // tokens_of(group, model), 1)


def layers_in(model: str, groups: Iterable[int]) -> dict[int, Layers]:
    """Return what the layers of some groups read."""
    return {
        group: Layers(
            tokens_of(group, model),
            None if group in (FULL, ALSO_FULL) else read_of(group, model),
            is_chunked(group, model),
        )
        for group in groups
    }


def namespace_of(group: int, model: str = "hybrid") -> Namespace:
    tokens = tokens_of(group, model)
    extra = {"backend": "CPU", "config": "1", KIND: "SlidingWindowSpec", WINDOW: "none", LAYERS: str(group)}
    if group == FULL:
        extra[KIND] = "FullAttentionSpec"
    elif group == ALSO_FULL:
        extra |= {KIND: "FullAttentionSpec", FURTHER: "full"}
    elif group == STATE:
        extra |= {KIND: "MambaSpec", "backend": "ShortConv -"}
    elif is_chunked(group, model):
        extra |= {KIND: "ChunkedLocalAttentionSpec", CHUNK: str(read_of(group, model) * tokens)}
    else:
        extra[WINDOW] = str((read_of(group, model) - 1) * tokens + 2)
    if model.startswith("mixed"):
        extra[FULL_TOKENS] = str(BLOCK_TOKENS)
    return Namespace.from_mapping(
        {**NAMESPACE.as_mapping(), "model": model, "block_tokens": tokens, "extra": extra}
    )


def groups_said(*groups: int, model: str = "hybrid") -> tuple[CacheGroup, ...]:
    """Return what an engine says of these groups, by its connector."""
    described = describe_groups({group: namespace_of(group, model) for group in groups})
    assert len(described) == len(groups)
    return tuple(CacheGroup(**each) for each in described)


def hashes(group: int, model: str = "hybrid") -> list[bytes]:
    return split_keys(prefix_hashes(namespace_of(group, model), PROMPT))


def stored(group: int, block: int, medium: str = CPU, model: str = "hybrid") -> BlockStored:
    """Return the event that a store says of one block."""
    own, full, described = hashes(group, model), hashes(FULL, model), group_in(namespace_of(group, model))
    assert described is not None
    tokens = tokens_of(group, model)
    with_last = -(-(block + 1) * tokens // BLOCK_TOKENS) - 1
    parent = full[with_last] if group != FULL else full[block - 1] if block else None
    return BlockStored(
        block_hashes=[own[block]],
        parent_block_hash=parent,
        token_ids=[],
        block_size=tokens,
        lora_id=None,
        medium=medium,
        lora_name=None,
        group_idx=described.number,
        kv_cache_spec_kind=described.kind,
        kv_cache_spec_sliding_window=described.window_tokens,
        layers_of=described.model,
        chunk_tokens=described.chunk_tokens,
    )


def removed(group: int, block: int, medium: str = CPU, model: str = "hybrid") -> BlockRemoved:
    described = group_in(namespace_of(group, model))
    assert described is not None
    hash = hashes(group, model)[block]
    return BlockRemoved([hash], medium, described.number, layers_of=described.model)


class Stand:
    """A Conductor with engines of two models on the store `node`: one with several kinds of attention, one without."""

    def __init__(self, *events: KVEvent, model: str = "hybrid", said: Iterable[int] | None = None) -> None:
        """`said`: the groups beside full attention, where the instance says which there are."""
        hybrid = namespace_of(FULL, model).as_mapping()
        groups = () if said is None else groups_said(FULL, *said, model=model)
        self.conductor: Conductor = conductor(
            Clock(),
            instance("hybrid", model=model, namespace=hybrid, groups=groups, store_topic="node"),
            instance("plain", store_topic="node"),
        )
        self.feed = Feed(self.conductor.registry, self.conductor.now_s)
        self.model, self._sequence = model, 0
        self.hears(*events)

    def hears(self, *events: KVEvent) -> None:
        self.feed.receive(message("node", self._sequence, *events))
        self._sequence += 1

    def loses_all(self, how: str) -> None:
        """Have the store be one of which nothing is known any more."""
        if how in ("gap", "silence"):
            if how == "silence":
                self.feed.silent(Engine("node", 0))
            self._sequence += 7
            self.hears()
            self.feed.replay_ended(Engine("node", 0))
        elif how == "restart":
            self._sequence = start_of(self._sequence) + first_sequence(1.0)
            self.hears(AllBlocksCleared())
        else:
            self.hears(AllBlocksCleared())

    def held(self, model: str = "", name: str = "hybrid") -> int:
        """How many blocks of the prompt count for an instance."""
        asked = RouteRequest(model=model or self.model, tokens=PROMPT)
        return self.conductor.match(asked)[name] // BLOCK_TOKENS


def all_of(*groups: int, model: str = "hybrid") -> list[BlockStored]:
    return [stored(group, block, model=model) for group in groups for block in range(count_of(group, model))]


Change = tuple[bool, int, int, str]
changes: Final = st.lists(
    st.tuples(
        st.booleans(), st.integers(0, 5), st.integers(0, 2 * BLOCKS - 1), st.sampled_from([CPU, STORAGE])
    ),
    max_size=6,
)


LOSSES: Final = ("gap", "silence", "restart", "clearing")


@given(
    st.sampled_from(MODELS),
    st.permutations(range(6)),
    st.integers(1, 6),
    st.none() | st.sets(st.sampled_from(sorted(READS))),
    st.lists(st.integers(0, BLOCKS), min_size=6, max_size=6),
    changes,
    changes,
    st.sampled_from(LOSSES),
)
def test_a_prefix_counts_as_far_as_each_group_has_what_its_layers_read(
    model: str,
    order: list[int],
    count: int,
    said: set[int] | None,
    demoted: list[int],
    some: list[Change],
    more: list[Change],
    loss: str,
) -> None:
    """Groups are told in any order, some as a whole, each of which is on NVMe from some block on; then blocks come to
    either tier and leave it. A manifest says all again, also after all was lost. Some have longer or shorter blocks.

    Where the instance has `said` its groups, these count and no others, whether they are told or not.
    """
    stand, held = Stand(model=model, said=said), defaultdict[Block, set[str]](set)
    whole = [
        (True, group, block, STORAGE if block >= demoted[group] else CPU)
        for group in dict.fromkeys([*order[:count], FULL])
        for block in range(count_of(group, model))
    ]

    def hear(*each: Change) -> None:
        for is_stored, group, drawn, medium in each:
            block = drawn % count_of(group, model)
            if is_stored:
                held[group, block].add(medium)
            else:
                held[group, block].discard(medium)
            told.update([group] if is_stored else [])
            stand.hears((stored if is_stored else removed)(group, block, medium, model))

    def agrees() -> bool:
        there = {block for block, media in held.items() if media}
        groups = {FULL, *(told if said is None else said)}
        return stand.held() == longest(layers_in(model, groups), there, BLOCKS)

    told: set[int] = set()
    hear(*whole, *some)
    assert agrees()
    manifest = [stored(*each, medium, model) for each, media in held.items() for medium in media]
    stand.hears(*manifest)
    assert agrees(), "who knows all learns nothing"
    stand.loses_all(loss)
    assert stand.held() == 0
    stand.hears(*manifest)
    assert agrees(), "what is gone is remembered as a group that has nothing"
    hear(*more)
    assert agrees()


def test_a_block_of_full_attention_wants_all_parts_of_a_window_beside_it() -> None:
    stand = Stand(*all_of(FULL, WINDOW_3, model="mixed"), model="mixed")
    assert stand.held() == BLOCKS
    last = count_of(WINDOW_3, "mixed") - 1
    for event in (removed, stored):
        stand.hears(event(WINDOW_3, last, model="mixed"))
        assert stand.held() == (BLOCKS - 1 if event is removed else BLOCKS)
        stand.hears(removed(WINDOW_3, last - 1, model="mixed"))
        assert stand.held() == BLOCKS - 1
        stand.hears(stored(WINDOW_3, last - 1, model="mixed"))
        assert stand.held() == (BLOCKS - 1 if event is removed else BLOCKS)


def test_a_part_that_a_prompt_shares_is_beside_the_block_with_which_it_came() -> None:
    """Prompts that differ within a block of full attention share its first part, which the second one does not store:
    less is predicted of it than there is, never more."""
    model, block = "mixed", BLOCKS - 1
    shared = replace(stored(WINDOW_3, 2 * block, model=model), parent_block_hash=bytes(16))
    others = [each for each in all_of(WINDOW_3, model=model) if each.block_hashes != shared.block_hashes]
    stand = Stand(*all_of(FULL, model=model), shared, *others, model=model)
    assert stand.held() == block
    stand.hears(removed(WINDOW_3, 2 * block, model=model), stored(WINDOW_3, 2 * block, model=model))
    assert stand.held() == BLOCKS


def test_a_prompt_goes_on_where_a_chunk_ends_and_within_it_with_its_blocks() -> None:
    """A store has none of a chunk's last block, which no token reads."""
    model = "hybrid, chunks"
    chunks = [stored(WINDOW_3, block, model=model) for block in range(BLOCKS) if block % 3 < 2]
    stand = Stand(*all_of(FULL, model=model), *chunks, model=model)
    assert stand.held() == BLOCKS
    stand.hears(removed(FULL, BLOCKS - 1, model=model))
    assert stand.held() == BLOCKS - 1
    stand.hears(removed(WINDOW_3, BLOCKS - 3, model=model))
    assert stand.held() == BLOCKS - 3
    for block in range(BLOCKS - 3):
        stand.hears(*([removed(WINDOW_3, block, model=model)] if block % 3 < 2 else []))
    assert stand.held() == BLOCKS - 3, "nothing is read there"
    stand.hears(removed(FULL, BLOCKS - 4, model=model))
    assert stand.held() == BLOCKS - 6


def test_a_part_of_a_block_says_that_there_are_windows() -> None:
    stand = Stand(*all_of(FULL, model="mixed"), model="mixed")
    assert stand.held() == BLOCKS
    stand.hears(stored(WINDOW_3, 0, model="mixed"))
    assert stand.held() == 0


def test_a_prompt_half_of_which_was_demoted_counts_as_a_whole() -> None:
    """Blocks that are followed by others are demoted last; the window's are where they are."""
    stand = Stand(*all_of(FULL), *(stored(WINDOW_3, block) for block in range(6, 9)))
    assert stand.held() == BLOCKS
    for block in range(4, 9):
        stand.hears(stored(FULL, block, STORAGE), removed(FULL, block))
    assert stand.held() == BLOCKS
    stand.hears(stored(WINDOW_3, 7, STORAGE), removed(WINDOW_3, 7))
    assert stand.held() == BLOCKS
    stand.hears(removed(WINDOW_3, 7, STORAGE))
    assert stand.held() == 0


@pytest.mark.parametrize("tokens", [BLOCK_TOKENS // 2, BLOCK_TOKENS + 8])
def test_blocks_that_are_no_whole_ones_of_full_attention_do_not_count(tokens: int) -> None:
    """Full attention does, alone."""
    stand = Stand(*all_of(FULL), replace(stored(WINDOW_2, 0), block_size=tokens))
    assert stand.held() == BLOCKS
    assert stand.conductor.counts["other_group_events"] == 1


def test_a_chunk_that_is_no_whole_blocks_of_full_attention_does_not_count() -> None:
    """Of its own, which are shorter, it is."""
    model = "mixed, chunks"
    chunk = replace(stored(WINDOW_3, 0, model=model), chunk_tokens=BLOCK_TOKENS * 3 // 2)
    assert chunk.block_size == BLOCK_TOKENS // 2
    stand = Stand(*all_of(FULL, model=model), chunk, model=model)
    assert stand.held() == BLOCKS
    assert stand.conductor.counts["other_group_events"] == 1


def test_windows_and_chunks_of_one_length_are_counted_apart() -> None:
    model = "hybrid, chunks"
    stand = Stand(*all_of(FULL, WINDOW_3, model=model), stored(ALSO_WINDOW_3, 0, model=model), model=model)
    [stream] = [each for each in stand.conductor.status()["streams"] if each["stream"] == "node"]
    assert (stream["windows"], stream["chunks"]) == ([["", 3, 1]], [["", 3, BLOCKS]])


@pytest.mark.parametrize("tokens", [0, -1, 1 << 62])
def test_events_of_a_model_that_nobody_has_named_are_counted(tokens: int) -> None:
    nameless = replace(stored(WINDOW_2, 0), block_size=tokens, layers_of=None)
    stand = Stand(nameless)
    stand.conductor.registry.remove("plain")
    stand.hears(nameless, *all_of(FULL))
    assert stand.held() == BLOCKS
    assert stand.conductor.counts["other_group_events"] == 2


def test_groups_of_one_cache_with_blocks_of_different_sizes_are_of_one_model() -> None:
    groups = [group_in(namespace_of(group, "mixed")) for group in range(6)]
    assert len({each.model for each in groups if each is not None}) == 1
    fields = namespace_of(FULL, "mixed").as_mapping()
    other = {**fields, "extra": {**fields["extra"], FULL_TOKENS: str(2 * BLOCK_TOKENS)}}
    described = group_in(Namespace.from_mapping(other))
    assert described is not None
    assert described.model not in {each.model for each in groups if each is not None}


def test_models_in_one_store_do_not_limit_each_other() -> None:
    stand = Stand(of_store(PROMPT), *all_of(FULL), stored(STATE, 3))
    assert (stand.held(), stand.held("m", "plain")) == (4, BLOCKS)
    other = namespace_of(FULL, "other").as_mapping()
    stand.conductor.registry.add(instance("other", model="other", namespace=other, store_topic="node"))
    stand.hears(*all_of(FULL, WINDOW_2, model="other"), removed(WINDOW_2, 3, model="other"))
    assert (stand.held(), stand.held("m", "plain"), stand.held("other", "other")) == (4, BLOCKS, BLOCKS)


def test_what_a_route_predicts_is_what_the_store_can_go_on_from() -> None:
    stand = Stand(*all_of(FULL, WINDOW_3), stored(STATE, 4))
    routed: Any = stand.conductor.route(RouteRequest(model="hybrid", tokens=[*PROMPT, 1]))
    assert routed.cached_tokens == 5 * BLOCK_TOKENS


@pytest.mark.parametrize("loss", LOSSES)
def test_a_store_that_has_lost_its_windows_is_known_to_have_had_some(loss: str) -> None:
    """They are evicted first."""
    stand = Stand(*all_of(FULL, WINDOW_3))
    assert stand.held() == BLOCKS
    stand.loses_all(loss)
    stand.hears(*all_of(FULL))
    assert stand.held() == 0
    stand.hears(*all_of(WINDOW_3))
    assert stand.held() == BLOCKS


@pytest.mark.parametrize("loss", LOSSES)
def test_a_group_that_had_nothing_when_all_was_lost_is_known_to_be_there(loss: str) -> None:
    """Beside another one with the same window, in whose place its blocks are."""
    stand = Stand(*all_of(FULL, WINDOW_3, ALSO_WINDOW_3))
    stand.hears(*(removed(ALSO_WINDOW_3, block) for block in range(BLOCKS)))
    stand.loses_all(loss)
    stand.hears(*all_of(FULL, WINDOW_3))
    assert stand.held() == 0
    stand.hears(*all_of(ALSO_WINDOW_3))
    assert stand.held() == BLOCKS


def test_full_attention_counts_nowhere_where_its_windows_get_no_number() -> None:
    stand = Stand(*all_of(FULL))
    numbers = stand.conductor.registry._sources._free
    kept = numbers.copy()
    numbers.clear()
    stand.hears(*all_of(WINDOW_3))
    assert stand.held() == 0
    assert stand.conductor.counts["over_limit"] == BLOCKS
    numbers += kept
    stand.loses_all("clearing")
    stand.hears(*all_of(FULL, WINDOW_3))
    assert stand.held() == BLOCKS


def test_models_of_which_there_is_no_instance_take_no_numbers() -> None:
    stand = Stand()
    free = len(stand.conductor.registry._sources._free)
    stand.hears(*all_of(FULL, WINDOW_3, model="later"), *all_of(FULL))
    assert len(stand.conductor.registry._sources._free) == free - 1
    namespace = namespace_of(FULL, "later").as_mapping()
    stand.conductor.registry.add(
        instance("later", model="later", namespace=namespace, engine_topic="", store_topic="node")
    )
    name = StreamName("node", 0)
    stand.feed.joined(name)
    assert stand.feed.wanted == {Engine(*name)}
    stand.hears(*all_of(FULL, WINDOW_3, model="later"))
    assert stand.held("later", "later") == BLOCKS
    stand.feed.wanted.clear()
    stand.feed.joined(name)
    assert not stand.feed.wanted, "nothing was passed over since"


@pytest.mark.parametrize("window", ["9" * 5000, "9" * 30, str(1 << 40), str((1 << 31) + 1), "-1", "\u0663"])
def test_windows_of_no_length_that_there_is_are_none(window: str) -> None:
    fields = namespace_of(WINDOW_3).as_mapping()
    described = group_in(Namespace.from_mapping({**fields, "extra": {**fields["extra"], WINDOW: window}}))
    assert described is not None
    odd = replace(stored(WINDOW_3, 0), kv_cache_spec_sliding_window=described.window_tokens)
    stand = Stand(*all_of(FULL), odd)
    assert stand.held() == BLOCKS
    assert stand.conductor.counts["other_group_events"] == 1


def test_blocks_without_an_anchor_and_chunks_of_no_length_are_counted() -> None:
    chunk = stored(WINDOW_3, 0, model="hybrid, chunks")
    assert chunk.chunk_tokens == 3 * BLOCK_TOKENS
    stand = Stand(
        *all_of(FULL, model="hybrid, chunks"),
        replace(chunk, parent_block_hash=None),
        *(replace(chunk, chunk_tokens=tokens) for tokens in (None, 0, 1 << 40, BLOCK_TOKENS * 3 // 2)),
        model="hybrid, chunks",
    )
    assert stand.held() == BLOCKS
    assert stand.conductor.counts["other_group_events"] == 5


def test_blocks_over_the_limit_are_misses_and_counted() -> None:
    stand = Stand(*all_of(FULL))
    [stream] = [each for each in stand.conductor.registry.streams() if each.is_store]
    stand.feed._windows[stream.name] = StoreWindows(stand.conductor.counts, max_blocks=4)
    stand.hears(*all_of(WINDOW_2))
    assert stand.held() == 4
    assert stand.conductor.counts["store_windows_over_limit"] == BLOCKS - 4
    stand.hears(removed(WINDOW_2, 3), stored(WINDOW_2, 8), removed(WINDOW_2, 8))
    assert stand.held() == 3


@pytest.mark.parametrize("field", ["model", "revision", "block_tokens", "tensor_shards", "config"])
def test_groups_of_one_cache_are_of_one_model_and_others_are_not(field: str) -> None:
    groups = [group_in(namespace_of(group)) for group in range(6)]
    assert len({each.model for each in groups if each is not None}) == 1
    assert [each.is_full for each in groups if each is not None] == [True, False, False, False, False, True]
    assert [each.number is None for each in groups if each is not None] == [True] + [False] * 5
    fields = namespace_of(STATE).as_mapping()
    changed = {"model": "n", "revision": "2", "block_tokens": 2 * BLOCK_TOKENS, "tensor_shards": 2}
    other = (
        {**fields, field: changed[field]}
        if field in changed
        else {**fields, "extra": {**fields["extra"], field: "2"}}
    )
    described = group_in(Namespace.from_mapping(other))
    assert described is not None
    assert groups[0] is not None
    assert described.model != groups[0].model
    assert group_in(NAMESPACE) is None
