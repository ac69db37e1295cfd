"""Instances that say which cache groups they have: what their events cannot say of themselves, and layers of which a
store has told nothing."""

from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvfs.errors import InvalidRequest, LimitExceeded
from kvfs.events.event_streams import Engine
from kvfs.limits import MAX_ENGINE_GROUPS
from kvfs.namespace_groups import describe_groups
from kvfs.namespaces import Namespace
from scheduler.conductor.feeds.feed import Feed
from scheduler.conductor.sources import StreamName
from scheduler.conductor.values import CacheGroup, Instance, RouteRequest
from tests.scheduler.conductor.test_cache_groups import BLOCKS, FULL, PROMPT, of_group, removed
from tests.scheduler.conductor.test_feed import message, of_store
from tests.scheduler.conductor.test_store_windows import (
    ALSO_FULL,
    ALSO_WINDOW_3,
    STATE,
    WINDOW_2,
    WINDOW_3,
    Stand,
    all_of,
    groups_said,
    namespace_of,
)
from tests.scheduler.conductor.test_store_windows import PROMPT as PROMPT_IN_STORE
from tests.scheduler.conductor.test_store_windows import removed as gone_from_store
from tests.scheduler.conductor.test_store_windows import stored as stored_in
from tests.sessions.test_engine_groups import CHUNKS
from tests.support.conductors import BLOCK_TOKENS, NAMESPACE, Clock, conductor, instance
from tests.support.prefix_needs import Layers, longest

NODE: Final = StreamName("node", 0)
BLOCKS_IN_STORE: Final = len(all_of(FULL))


def hybrid(name: str, *groups: int, of: str = "hybrid", keyed: int = FULL, **changes: Any) -> Instance:
    """Return an engine on the store that says these groups of a model; `keyed`: by whose keys prompts are looked up."""
    namespace = namespace_of(keyed, of).as_mapping()
    given = {"model": of, "namespace": namespace, "engine_topic": "", "store_topic": "node", **changes}
    return instance(name, groups=groups_said(*groups, model=of), **given)


def stand_of(*said: Instance) -> Stand:
    """Return a Conductor whose instances of that model are these."""
    stand = Stand()
    stand.conductor.registry.remove("hybrid")
    for each in said:
        stand.conductor.registry.add(each)
        stand.feed.joined(NODE)
    stand.feed.wanted.clear()
    return stand


@given(st.sets(st.integers(0, BLOCKS - 1)), st.integers(1, BLOCKS))
def test_chunks_in_an_engines_own_memory_are_as_long_as_it_says(lost: set[int], end: int) -> None:
    """Its events do not say it."""
    chunks = CacheGroup(
        group=CHUNKS,
        kind="chunked_local_attention",
        block_tokens=BLOCK_TOKENS,
        chunk_tokens=4 * BLOCK_TOKENS,
    )
    full = CacheGroup(group=FULL, kind="full_attention", block_tokens=BLOCK_TOKENS)
    made = conductor(Clock(), instance("a", groups=(full, chunks)))
    feed = Feed(made.registry, made.now_s)
    told = of_group(CHUNKS, 0, end), of_group(FULL), removed(CHUNKS, lost)
    feed.receive(message("engine-a", 0, *told))
    held = {(FULL, block) for block in range(BLOCKS)} | {(CHUNKS, block) for block in {*range(end)} - lost}
    groups = {FULL: Layers(), CHUNKS: Layers(read=4, is_chunked=True)}
    assert (
        made.match(RouteRequest(model="m", tokens=PROMPT))["a"]
        == longest(groups, held, BLOCKS) * BLOCK_TOKENS
    )
    assert made.counts["other_group_events"] == 0


def test_a_store_that_has_told_nothing_of_windows_is_not_taken_for_one_without_any() -> None:
    """They may all have gone before anybody followed it."""
    stand = stand_of(hybrid("a", FULL, WINDOW_3, ALSO_WINDOW_3, STATE))
    stand.hears(*all_of(FULL))
    assert stand.held(name="a") == 0
    stand.hears(*all_of(WINDOW_3, STATE))
    assert stand.held(name="a") == 0, "two groups read as much"
    stand.hears(*all_of(ALSO_WINDOW_3))
    assert stand.held(name="a") == BLOCKS_IN_STORE
    stand.loses_all("restart")
    stand.hears(*all_of(FULL, WINDOW_3, STATE))
    assert stand.held(name="a") == 0


def test_groups_that_no_instance_has_limit_nothing() -> None:
    """Engines of an earlier version have grouped the same layers otherwise, and left blocks behind."""
    stand = stand_of(hybrid("a", FULL, WINDOW_3))
    stand.hears(*all_of(FULL, WINDOW_3, ALSO_WINDOW_3, STATE), gone_from_store(STATE, 8))
    assert stand.held(name="a") == BLOCKS_IN_STORE
    assert stand.conductor.counts["other_group_events"] == len(all_of(ALSO_WINDOW_3, STATE))
    stand.hears(gone_from_store(WINDOW_3, 8))
    assert stand.held(name="a") == BLOCKS_IN_STORE - 1


def test_other_groups_count_once_no_instance_says_those_that_did() -> None:
    """Engines of two releases are on one store while the one takes the other's place."""
    stand = stand_of(hybrid("a", FULL, WINDOW_3), hybrid("b", FULL, WINDOW_2, ALSO_WINDOW_3))
    registry = stand.conductor.registry
    stand.hears(of_store(PROMPT_IN_STORE), *all_of(FULL, WINDOW_3, WINDOW_2))
    assert (stand.held(name="a"), stand.held(name="b")) == (BLOCKS_IN_STORE, 0), (
        "it has nothing of b's groups"
    )
    registry.remove("a")
    registry.add(hybrid("c", FULL, WINDOW_2, ALSO_WINDOW_3))
    stand.feed.regroup(NODE)
    assert stand.feed.wanted == {Engine(*NODE)}
    assert stand.held("m", "plain") == BLOCKS_IN_STORE, "other models' blocks stay known"
    assert (stand.held(name="b"), stand.held(name="c")) == (0, 0)
    stand.hears(*all_of(FULL, WINDOW_3, WINDOW_2))
    assert stand.held(name="b") == 0, "nothing is known of one of its groups"
    stand.hears(*all_of(ALSO_WINDOW_3))
    assert (stand.held(name="b"), stand.held(name="c")) == (BLOCKS_IN_STORE, BLOCKS_IN_STORE)
    stand.hears(gone_from_store(WINDOW_2, 8), gone_from_store(WINDOW_3, 7))
    assert stand.held(name="b") == BLOCKS_IN_STORE - 1


def test_of_those_that_are_left_the_last_one_s_groups_count() -> None:
    stand = stand_of(hybrid("a", FULL, WINDOW_3), hybrid("b", FULL, STATE), hybrid("c", FULL, WINDOW_2))
    stand.conductor.registry.remove("a")
    stand.feed.regroup(NODE)
    stand.hears(*all_of(FULL, WINDOW_2))
    assert (stand.held(name="b"), stand.held(name="c")) == (0, BLOCKS_IN_STORE)


@pytest.mark.parametrize("first", [(FULL,), (FULL, WINDOW_3)])
def test_what_was_passed_over_is_asked_for_once_it_counts(first: tuple[int, ...]) -> None:
    stand = stand_of(hybrid("a", *first))
    stand.hears(*all_of(FULL, WINDOW_2))
    stand.conductor.registry.add(hybrid("b", FULL, WINDOW_2))
    stand.conductor.registry.remove("a")
    stand.feed.regroup(NODE)
    assert stand.feed.wanted == {Engine(*NODE)}
    stand.hears(*all_of(WINDOW_2))
    assert stand.held(name="b") == BLOCKS_IN_STORE


def test_an_instance_that_is_registered_anew_finds_what_was_known() -> None:
    """Its role has changed, or where others reach its store."""
    stand = stand_of(hybrid("a", FULL, WINDOW_3))
    stand.hears(*all_of(FULL, WINDOW_3))
    stand.conductor.registry.remove("a")
    stand.conductor.registry.add(hybrid("a", FULL, WINDOW_3, role="decode"))
    stand.feed.joined(NODE)
    assert stand.held(name="a") == BLOCKS_IN_STORE
    assert not stand.feed.wanted


def test_what_is_said_while_no_instance_is_there_is_asked_for_again() -> None:
    """What it had is not believed then: some of it may have gone."""
    stand = stand_of(hybrid("a", FULL, WINDOW_3))
    registry = stand.conductor.registry
    free = len(registry._sources._free)
    stand.hears(*all_of(FULL, WINDOW_3))
    registry.remove("a")
    stand.hears(gone_from_store(FULL, 3), stored_in(FULL, 3))
    registry.sweep()
    assert len(registry._sources._free) == free + 1, "what it was expected to have has none either"
    registry.add(hybrid("a", FULL, WINDOW_3))
    stand.feed.joined(NODE)
    assert stand.held(name="a") == 0
    assert stand.feed.wanted == {Engine(*NODE)}
    stand.hears(*all_of(FULL, WINDOW_3))
    assert stand.held(name="a") == BLOCKS_IN_STORE


def test_windows_that_were_told_of_are_known_to_be_there_though_the_instance_was_away() -> None:
    """It says nothing of its groups, and the store has lost them."""
    gone = (gone_from_store(ALSO_WINDOW_3, block) for block in range(BLOCKS_IN_STORE))
    stand = Stand(*all_of(FULL, WINDOW_3, ALSO_WINDOW_3), *gone)
    registry = stand.conductor.registry
    again = registry.member("hybrid")[1].instance
    assert stand.held() == 0
    registry.remove("hybrid")
    stand.hears(gone_from_store(FULL, 8))
    registry.add(again)
    stand.feed.joined(NODE)
    stand.hears(*all_of(FULL, WINDOW_3))
    assert stand.held() == 0
    stand.hears(*all_of(ALSO_WINDOW_3))
    assert stand.held() == BLOCKS_IN_STORE


@pytest.mark.parametrize("is_said", [False, True])
@pytest.mark.parametrize(("first", "then"), [(WINDOW_3, FULL), (WINDOW_3, WINDOW_2), (FULL, WINDOW_3)])
@pytest.mark.parametrize("model", ["hybrid", "mixed"])
def test_a_model_that_is_keyed_otherwise_than_before_counts_by_what_it_is_now(
    model: str, first: int, then: int, is_said: bool
) -> None:
    """The namespace was that of another group, in a file of instances; nothing was told between."""
    stand = stand_of()
    told = all_of(FULL, WINDOW_3, WINDOW_2, model=model)
    for keyed in (first, then):
        groups = (FULL, WINDOW_3, WINDOW_2) if is_said and keyed == FULL else ()
        stand.conductor.registry.add(hybrid("a", *groups, of=model, keyed=keyed))
        stand.feed.joined(NODE)
        stand.hears(*told)
        if keyed == first:
            stand.conductor.registry.remove("a")
    assert stand.feed.wanted == {Engine(*NODE)}
    fresh = stand_of()
    fresh.conductor.registry.add(stand.conductor.registry.member("a")[1].instance)
    for each in (stand, fresh):
        each.hears(*told, gone_from_store(FULL, 8, model=model), gone_from_store(WINDOW_3, 6, model=model))
    assert stand.held(model, "a") == fresh.held(model, "a")


@pytest.mark.parametrize("is_full_first", [False, True])
def test_of_two_pools_that_know_one_model_by_other_blocks_the_first_counts(is_full_first: bool) -> None:
    stand = stand_of()
    pools = [("x", FULL), ("y", WINDOW_3)]
    for name, keyed in pools if is_full_first else reversed(pools):
        stand.conductor.registry.add(hybrid(name, keyed=keyed, model=name))
    stand.hears(*(stored_in(FULL, block) for block in (7, 8)), *all_of(WINDOW_3))
    assert stand.held("x", "x") == 0
    assert stand.held("y", "y") == (0 if is_full_first else BLOCKS_IN_STORE)
    stand.hears(*all_of(FULL))
    assert stand.held("x", "x") == (BLOCKS_IN_STORE if is_full_first else 0)


def test_two_names_of_one_model_share_its_groups() -> None:
    stand = stand_of(hybrid("a", FULL, WINDOW_3), hybrid("b", FULL, WINDOW_2, model="same"))
    stand.hears(*all_of(FULL, WINDOW_3, WINDOW_2))
    assert (stand.held(name="a"), stand.held("same", "b")) == (BLOCKS_IN_STORE, 0)
    stand.conductor.registry.remove("a")
    stand.feed.regroup(NODE)
    stand.hears(*all_of(WINDOW_2))
    assert stand.held("same", "b") == BLOCKS_IN_STORE


def test_a_store_is_not_asked_again_where_nothing_else_is_said() -> None:
    stand = stand_of(hybrid("a", FULL, WINDOW_3))
    stand.hears(*all_of(FULL, WINDOW_3))
    silent, new, same = hybrid("c"), hybrid("d", of="other"), hybrid("e", FULL, WINDOW_3)
    same_in_other_order = replace(same, groups=same.groups[::-1])
    for each in (hybrid("b", FULL, WINDOW_3), silent, new, same_in_other_order):
        stand.conductor.registry.add(each)
        stand.feed.joined(NODE)
    stand.conductor.registry.remove("b")
    stand.feed.regroup(NODE)
    assert not stand.feed.wanted
    assert stand.held(name="a") == stand.held(name="c") == BLOCKS_IN_STORE


@pytest.mark.parametrize("said", [(FULL, WINDOW_3), (FULL,)])
def test_groups_that_were_inferred_give_way_to_those_that_are_said(said: tuple[int, ...]) -> None:
    """An engine that says nothing of them is joined by one that does."""
    stand = Stand(*all_of(FULL, WINDOW_3, WINDOW_2))
    stand.hears(gone_from_store(WINDOW_2, 8))
    assert stand.held() == BLOCKS_IN_STORE - 1
    woken: list[set[Engine]] = []
    stand.feed.on_wanted = lambda: woken.append(set(stand.feed.wanted))
    stand.conductor.registry.add(hybrid("a", *said))
    stand.feed.joined(NODE)
    assert woken == [stand.feed.wanted] == [{Engine(*NODE)}]
    stand.hears(*all_of(FULL, WINDOW_3, WINDOW_2), gone_from_store(WINDOW_2, 8))
    assert stand.held() == stand.held(name="a") == BLOCKS_IN_STORE
    stand.conductor.registry.remove("a")
    assert stand.held() == BLOCKS_IN_STORE, "what was said stays: more is not known of others"


def test_what_one_cache_for_all_layers_has_in_a_store_is_not_limited() -> None:
    """Its namespace says so, whatever groups the engine has itself."""
    said = groups_said(FULL, WINDOW_3)
    made = conductor(Clock(), instance("a", groups=said, store_topic="node"))
    [stream] = [each for each in made.registry.streams() if each.is_store]
    assert not stream.windows


def test_a_worker_that_has_one_group_of_all_layers_says_nothing() -> None:
    assert describe_groups({0: NAMESPACE}) == []
    assert describe_groups({0: namespace_of(WINDOW_3), 1: NAMESPACE}) == []
    chunked = Namespace.from_mapping(namespace_of(WINDOW_3, "hybrid, chunks").as_mapping())
    assert describe_groups({3: chunked}) == [
        {
            "group": 3,
            "kind": "chunked_local_attention",
            "block_tokens": BLOCK_TOKENS,
            "layers": str(WINDOW_3),
            "window_tokens": None,
            "chunk_tokens": 3 * BLOCK_TOKENS,
        }
    ]


FULL_GROUP: Final = {"group": 0, "kind": "full_attention", "block_tokens": BLOCK_TOKENS}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([FULL_GROUP, FULL_GROUP], "'a': groups: 0: must be a number below 64 that no other has"),
        ([{**FULL_GROUP, "group": MAX_ENGINE_GROUPS}], "groups: 64: must be a number below 64"),
        ([{**FULL_GROUP, "group": -1}], "groups: -1: must be a number"),
        ([{**FULL_GROUP, "block_tokens": 0}], "block_tokens is 0: must be from 1 to 65536"),
        (
            [{**FULL_GROUP, "window_tokens": 1 << 40}],
            "window_tokens is 1099511627776: must be from 1 to 2147483648",
        ),
        ([{**FULL_GROUP, "chunk_tokens": 0}], "chunk_tokens is 0: must be"),
        ([{**FULL_GROUP, "kind": "k" * 2000}], "groups: 0: kind: the limit is"),
        ([{**FULL_GROUP, "layers": "k" * 2000}], "groups: 0: layers: the limit is"),
        ([{**FULL_GROUP, "group": n} for n in range(MAX_ENGINE_GROUPS + 1)], "65 groups: the limit is 64"),
    ],
)
def test_groups_that_cannot_be_are_refused(groups: list[dict[str, Any]], message: str) -> None:
    said = tuple(CacheGroup(**each) for each in groups)
    with pytest.raises((InvalidRequest, LimitExceeded), match=message):
        conductor(Clock(), instance("a", groups=said))


def test_a_namespace_of_windows_is_none_of_a_model_with_full_attention() -> None:
    with pytest.raises(
        InvalidRequest, match="'a': groups: 0 is of full_attention, but the namespace is of sliding_w"
    ):
        conductor(
            Clock(),
            instance("a", namespace=namespace_of(WINDOW_3).as_mapping(), groups=groups_said(FULL, WINDOW_3)),
        )


def test_a_namespace_of_a_further_group_of_full_attention_is_none_of_an_instance() -> None:
    further = namespace_of(ALSO_FULL).as_mapping()
    with pytest.raises(
        InvalidRequest, match="'a': namespace: it is of a further group of full attention: it must be"
    ):
        conductor(Clock(), instance("a", namespace=further, groups=groups_said(FULL, ALSO_FULL)))


def test_a_further_group_of_full_attention_that_has_told_nothing_has_nothing() -> None:
    stand = stand_of(hybrid("a", FULL, WINDOW_3, ALSO_FULL))
    stand.hears(*all_of(FULL, WINDOW_3))
    assert stand.held(name="a") == 0
    stand.hears(*all_of(ALSO_FULL), gone_from_store(ALSO_FULL, 4))
    assert stand.held(name="a") == 4
    [stream] = [each for each in stand.conductor.status()["streams"] if each["stream"] == "node"]
    assert ["", None, BLOCKS_IN_STORE - 1] in stream["windows"]
