"""Copies of hot prefixes of models with several kinds of attention: what is ordered of each group, and what cools."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvfs.events.kv_events import CPU, STORAGE
from kvfs.limits import COPY_ORDER_S, COPY_SWEEP_S, MAX_COPIED_BLOCKS, MAX_HOT_HASHES, MAX_ORDER_BLOCKS
from kvfs.namespace_groups import group_in
from scheduler.conductor.conductor import Conductor
from scheduler.conductor.feeds.feed import Feed
from scheduler.conductor.values import Routed, RouteRequest
from scheduler.routing.replication import HALF_LIFE_S
from tests.scheduler.conductor.test_feed import message
from tests.scheduler.conductor.test_store_windows import (
    ALSO_WINDOW_3,
    BLOCKS,
    FULL,
    MODELS,
    PROMPT,
    READS,
    STATE,
    WINDOW_2,
    WINDOW_3,
    all_of,
    count_of,
    hashes,
    layers_in,
    namespace_of,
    removed,
    stored,
)
from tests.support.conductors import BLOCK_TOKENS, Clock, conductor, instance
from tests.support.prefix_needs import Block, boundaries, longest, needed

GROUPS: Final = range(6)


class Nodes:
    """A Conductor with engines of one model with several kinds of attention, each on a store of its own. What the first
    has is wanted at the second."""

    def __init__(self, model: str, count: int = 2) -> None:
        self.clock = Clock()
        described = namespace_of(FULL, model).as_mapping()
        self.conductor: Conductor = conductor(
            self.clock,
            *(
                instance(
                    f"i{n}",
                    model=model,
                    namespace=described,
                    engine_topic="",
                    store_topic=f"node-{n}",
                    store_peer=f"10.0.0.{n}:9400",
                )
                for n in range(count)
            ),
            copies=True,
            fitted=False,
        )
        self.conductor.tick()
        self.feed = Feed(self.conductor.registry, self.conductor.now_s)
        self.model, self._sequences = model, [0] * count
        self.named = {
            bytes.hex(key): (group, block)
            for group in GROUPS
            for block, key in enumerate(hashes(group, model))
        }

    def hears(self, n: int, *events: Any) -> None:
        self.feed.receive(message(f"node-{n}", self._sequences[n], *events))
        self._sequences[n] += 1

    def asks(
        self,
        times: int = 6,
        *,
        blocks: int = BLOCKS,
        keys: list[bytes] | None = None,
        model: str = "",
        exclude: tuple[str, ...] = ("i0",),
    ) -> None:
        """Route prompts that begin with the first blocks of the test's, or have these keys, and end them."""
        wanted = [key.hex() for key in keys or hashes(FULL, self.model)[:blocks]]
        for _ in range(times):
            asked = RouteRequest(
                model=model or self.model,
                hashes=wanted,
                length=len(wanted) * BLOCK_TOKENS + 1,
                exclude=list(exclude),
            )
            found = self.conductor.route(asked)
            assert isinstance(found, Routed)
            self.conductor.cancel(found.id)
            self.conductor.tick()

    def sweep(self) -> dict[str, int]:
        self.clock.now_s += COPY_SWEEP_S
        self.conductor.tick()
        return dict(self.conductor.status()["copies"]["counts"])

    def orders(self, n: int, kind: str = "orders") -> list[dict[str, Any]]:
        assert self.conductor.copies is not None
        found: dict[str, list[dict[str, Any]]]
        found = msgspec.to_builtins(self.conductor.copies.for_store(f"node-{n}"))
        return found[kind]

    def ordered(self, n: int, kind: str = "orders") -> list[Block]:
        """Return the blocks of all orders, each part of which names one group as nodes know it, full attention last."""
        found: list[Block] = []
        for order in self.orders(n, kind):
            groups = []
            for part in order["parts"]:
                blocks = [self.named[key] for key in part["hashes"]]
                [group] = {group for group, _ in blocks}
                described = group_in(namespace_of(group, self.model))
                assert described is not None
                of = {"namespace": "", "model": described.model.hex(), "group": described.number}
                if group == FULL:
                    of = {"namespace": namespace_of(FULL, self.model).digest.hex(), "model": "", "group": 0}
                assert part == {**of, "hashes": part["hashes"]}
                groups.append(group)
                found += blocks
            assert FULL not in groups[:-1]
        return found

    def held(self, n: int) -> int:
        asked = RouteRequest(model=self.model, tokens=PROMPT)
        return self.conductor.match(asked)[f"i{n}"] // BLOCK_TOKENS


def some_blocks(model: str) -> st.SearchStrategy[set[Block]]:
    every = [(group, block) for group in GROUPS for block in range(count_of(group, model))]
    return st.sets(st.sampled_from(every))


@given(st.data(), st.sampled_from(MODELS), st.sets(st.sampled_from(sorted(READS))), st.booleans())
def test_what_a_node_lacks_of_a_prefix_is_ordered_of_each_group(
    data: st.DataObject, model: str, windows: set[int], is_empty: bool
) -> None:
    """The source has some prefix whole, and what else is drawn; the target what is drawn, or nothing. The orders are
    exactly what the target lacks of the source's longest prefix; as they are carried out, one by one, an empty target
    that gets blocks of each group is never believed to have what it has not."""
    groups = layers_in(model, {FULL, *windows})
    whole = needed(groups, data.draw(st.integers(1, BLOCKS)))
    has = whole | {each for each in data.draw(some_blocks(model)) if each[0] in groups}
    target = set() if is_empty else {each for each in data.draw(some_blocks(model)) if each[0] in groups}
    made = Nodes(model)
    for group in sorted(
        windows
    ):  # a group that has nothing is told of, too: the target's are those of the source
        made.hears(0, stored(group, 0, model=model), removed(group, 0, model=model))
        if not is_empty:
            made.hears(1, stored(group, 0, model=model), removed(group, 0, model=model))
    for n, blocks in enumerate((has, target)):
        for group, at in sorted(blocks):
            medium = STORAGE if (group + at) % 3 == 0 else CPU
            made.hears(n, stored(group, at, medium, model))
    reach, short = longest(groups, has, BLOCKS), longest(groups, target, BLOCKS)
    assert made.held(0) == reach
    made.asks()
    made.sweep()
    wanted = needed(groups, reach) - target
    ordered = made.ordered(1)
    assert set(ordered) == (wanted if short < reach else set())
    assert len(ordered) == len(set(ordered))
    assert made.orders(0) == []
    hears_of_all = is_empty and {group for group, _ in ordered} == groups.keys()
    for each in ordered:
        made.hears(1, stored(*each, model=model))
        target.add(each)
        assert not hears_of_all or made.held(1) <= longest(groups, target, BLOCKS)
    assert made.held(1) >= reach
    counts = made.sweep()
    assert counts.get("carried_out", 0) == counts.get("ordered", 0)
    assert counts.get("copied_blocks", 0) == len(ordered)
    assert made.orders(1) == []


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("blocks", range(1, BLOCKS + 1))
def test_of_each_group_what_is_read_behind_a_prefix_is_ordered_and_no_more(model: str, blocks: int) -> None:
    made, groups = Nodes(model), layers_in(model, GROUPS)
    made.hears(0, *all_of(*GROUPS, model=model))
    made.asks(blocks=blocks)
    made.sweep()
    assert set(made.ordered(1)) == needed(groups, boundaries(groups, blocks)[-1])


def hot(model: str = "hybrid") -> Nodes:
    made = Nodes(model)
    made.hears(0, *all_of(WINDOW_2, STATE, FULL, model=model))
    made.asks()
    return made


def test_an_order_is_open_until_events_have_all_of_each_group() -> None:
    made = hot()
    assert made.sweep()["ordered"] == 1
    ordered = made.ordered(1)
    assert {group for group, _ in ordered} == {WINDOW_2, STATE, FULL}
    for group in (FULL, WINDOW_2):
        made.hears(1, *(stored(*each) for each in ordered if each[0] == group))
        made.asks()
        counts = made.sweep()
        assert ("carried_out" in counts, counts["ordered"]) == (False, 1), (
            "one that is open is not given again"
        )
    made.hears(1, *(stored(*each) for each in ordered if each[0] == STATE))
    counts = made.sweep()
    assert (counts["carried_out"], counts["copied_blocks"], made.held(1)) == (1, len(ordered), BLOCKS)


def test_what_has_gone_from_a_copy_is_ordered_again_alone() -> None:
    made = hot()
    made.sweep()
    made.hears(1, *(stored(*each) for each in made.ordered(1)))
    assert made.sweep()["carried_out"] == 1
    made.hears(1, removed(WINDOW_2, BLOCKS - 1), removed(FULL, 2))
    made.asks()
    assert made.sweep()["ordered"] == 2
    assert made.ordered(1) == [(WINDOW_2, BLOCKS - 1), (FULL, 2)]


def test_a_prefix_is_ordered_with_what_a_node_had_of_it_and_lost() -> None:
    made = Nodes("hybrid")
    made.hears(0, *all_of(WINDOW_2, FULL))
    made.hears(1, *(stored(group, at) for group in (WINDOW_2, FULL) for at in range(4)))
    made.asks()
    made.hears(1, removed(FULL, 1))
    made.sweep()
    last = {(WINDOW_2, BLOCKS - 2), (WINDOW_2, BLOCKS - 1)}
    assert set(made.ordered(1)) == {(FULL, 1), *((FULL, at) for at in range(4, BLOCKS)), *last}


def test_a_prefix_that_is_in_one_medium_and_the_other_by_turns_is_one_run() -> None:
    """Nodes go on where they have all, in whichever of their tiers."""
    made = Nodes("hybrid")
    keys = [n.to_bytes(16, "big") for n in range(1, 41)]
    for at, key in enumerate(keys):
        parent = keys[at - 1] if at else None
        block = replace(stored(FULL, 0), block_hashes=[key], parent_block_hash=parent)
        made.hears(0, replace(block, medium=STORAGE if at % 2 else CPU))
    window = stored(WINDOW_2, 0)
    beside = [(key, bytes([1]) + key[1:]) for key in keys[-2:]]
    made.hears(0, *(replace(window, block_hashes=[own], parent_block_hash=key) for key, own in beside))
    made.asks(keys=keys)
    assert made.sweep()["ordered"] == 1
    hashes_of = [part["hashes"] for part in made.orders(1)[0]["parts"]]
    assert hashes_of == [[own.hex() for _, own in beside], [key.hex() for key in keys]]


def test_two_prefixes_of_one_prompt_have_no_block_ordered_twice() -> None:
    """A part of the prompts leaves the others where windows were kept, too."""
    made = Nodes("hybrid")
    made.hears(0, *all_of(WINDOW_2, FULL))
    made.asks(8, blocks=4)
    made.asks(6)
    assert made.sweep()["ordered"] == 2
    ordered = made.ordered(1)
    assert len(ordered) == len(set(ordered)) == BLOCKS + 4
    assert set(ordered) >= {(WINDOW_2, at) for at in (2, 3, BLOCKS - 2, BLOCKS - 1)}


def test_a_node_that_cannot_go_on_with_all_of_it_keeps_no_other_from_it() -> None:
    """Its store told of layers that no other has: it lacks nothing, and is never ready."""
    made = Nodes("hybrid", 3)
    made.hears(0, *all_of(WINDOW_3, FULL))
    made.hears(1, *all_of(WINDOW_3, FULL), stored(ALSO_WINDOW_3, 0), removed(ALSO_WINDOW_3, 0))
    assert [made.held(n) for n in range(3)] == [BLOCKS, 0, 0]
    made.asks(exclude=("i0", "i1"))
    made.sweep()
    assert (made.ordered(1), len(made.ordered(2))) == ([], BLOCKS + 3)


def test_orders_that_expire_are_of_this_node_and_given_anew_after_a_pause() -> None:
    made = hot()
    made.sweep()
    made.clock.now_s += COPY_ORDER_S
    assert made.sweep()["expired"] == 1
    assert made.orders(1) == []
    made.clock.now_s += COPY_ORDER_S
    made.asks()
    assert made.sweep()["ordered"] == 2


# --- what cools ----------------------------------------------------------------------------------------------
def copied(*groups: int) -> Nodes:
    """Return nodes the second of which has a copy by order of all that the first has."""
    made = Nodes("hybrid")
    made.hears(0, *all_of(*groups, FULL))
    made.asks()
    made.sweep()
    made.hears(1, *(stored(*each) for each in made.ordered(1)))
    assert made.sweep()["carried_out"] == 1
    return made


def cools(made: Nodes, *, blocks: int) -> list[Block]:
    """Return what is to go of the copy while prompts of so many blocks are wanted alone."""
    for _ in range(40):
        if blocks:
            made.asks(8, blocks=blocks)
        made.sweep()
        if made.orders(1, "cool"):
            break
    return sorted(made.ordered(1, "cool"))


def test_windows_and_states_cool_with_their_prefix_and_never_the_last_of_them() -> None:
    made = copied(WINDOW_2, STATE)
    made.hears(0, removed(STATE, BLOCKS - 1))
    made.clock.now_s += 3 * HALF_LIFE_S
    assert "cooled" not in made.sweep()
    made.hears(0, stored(STATE, BLOCKS - 1))
    made.sweep()
    last = [(WINDOW_2, BLOCKS - 2), (WINDOW_2, BLOCKS - 1), (STATE, BLOCKS - 1)]
    assert sorted(made.ordered(1, "cool")) == sorted([*((FULL, at) for at in range(BLOCKS)), *last])
    assert made.orders(0, "cool") == []


def test_a_shorter_prefix_that_is_warm_keeps_what_it_has_of_a_longer_one() -> None:
    made = copied(WINDOW_2)
    made.hears(1, stored(WINDOW_2, 2), stored(WINDOW_2, 3))
    last = [(WINDOW_2, BLOCKS - 2), (WINDOW_2, BLOCKS - 1)]
    assert cools(made, blocks=4) == sorted([*((FULL, at) for at in range(4, BLOCKS)), *last])


def test_a_longer_prefix_that_is_warm_keeps_all_of_a_shorter_one() -> None:
    made = Nodes("hybrid")
    made.hears(0, *all_of(WINDOW_2, FULL))
    made.asks(blocks=4)
    made.sweep()
    made.hears(1, *(stored(*each) for each in made.ordered(1)))
    made.asks()
    assert made.sweep()["carried_out"] == 1
    made.hears(1, *(stored(*each) for each in made.ordered(1)))
    assert cools(made, blocks=BLOCKS) == []
    assert made.conductor.status()["copies"]["counts"]["carried_out"] == 2


def test_a_copy_whose_run_is_known_no_more_is_left_to_eviction() -> None:
    made = copied(WINDOW_2)
    copies = made.conductor.copies
    assert copies is not None
    copies._drop(next(iter(copies._runs)))
    made.clock.now_s += 3 * HALF_LIFE_S
    assert "cooled" not in made.sweep()
    assert copies._cool._copied == {}


def test_one_of_several_copies_cools_that_would_stay_if_there_were_two() -> None:
    made = Nodes("hybrid", 3)
    made.hears(0, *all_of(WINDOW_2, FULL))
    for n in (1, 2):
        made.asks(10)
        made.sweep()
        made.hears(n, *(stored(*each) for each in made.ordered(n)))
    assert made.sweep()["carried_out"] == 2
    copies = made.conductor.copies
    assert copies is not None
    [run] = copies._runs
    for _ in range(40):
        if "cooled" in made.sweep():
            break
    assert 3.0 < (copies.heat_of(run, made.clock.now_s) or 0.0) < 4.0
    assert sorted(len(made.ordered(n, "cool")) for n in range(3)) == [0, 0, BLOCKS + 2]


def test_blocks_of_two_models_on_the_same_stores_end_their_own_orders() -> None:
    made = hot()
    plain = [n.to_bytes(16, "big") for n in range(1, 5)]
    for n in range(2):
        made.conductor.registry.add(
            instance(f"p{n}", engine_topic="", store_topic=f"node-{n}", store_peer=f"10.0.0.{n}:9400")
        )
    told = replace(
        stored(FULL, 0), block_hashes=plain, group_idx=None, kv_cache_spec_kind=None, layers_of=None
    )
    made.hears(0, told)
    made.asks(keys=plain, model="m", exclude=("p0",))
    assert made.sweep()["ordered"] == 2
    made.hears(1, told)
    assert made.sweep()["carried_out"] == 1
    [order] = made.orders(1)
    assert len(order["parts"]) == 3
    made.hears(1, *(stored(*each) for each in made.ordered(1)))
    assert made.sweep()["carried_out"] == 2
    made.clock.now_s += 3 * HALF_LIFE_S
    assert made.sweep()["cooled"] == 2


def test_prefixes_that_are_too_long_are_not_known_and_what_is_known_is_bounded() -> None:
    made = Nodes("hybrid")
    pool = made.conductor.registry.pool("hybrid")
    copies = made.conductor.copies
    assert copies is not None
    event = stored(FULL, 0)

    def told(first: int, count: int) -> bytes:
        keys = [n.to_bytes(16, "big") for n in range(first, first + count)]
        for at in range(0, count, MAX_ORDER_BLOCKS):
            made.hears(0, replace(event, block_hashes=keys[at : at + MAX_ORDER_BLOCKS]))
        return b"".join(keys)

    copies.routed(pool, 1, told(1 << 40, MAX_COPIED_BLOCKS + 1))
    made.conductor.tick()
    assert copies.status()["runs"] == 0
    most = MAX_HOT_HASHES // MAX_COPIED_BLOCKS
    for n in range(most + 3):
        copies.routed(pool, 1, told((n + 1) << 20, MAX_COPIED_BLOCKS))
        made.conductor.tick()
    assert (copies.status()["runs"], len(copies._beginning)) == (most, most)
    for _ in range(3):  # the oldest, again
        copies.routed(pool, 1, told(4 << 20, MAX_COPIED_BLOCKS))
        made.conductor.tick()
    assert copies.status()["runs"] == most
    copies.routed(pool, 1, told(1 << 41, MAX_COPIED_BLOCKS))
    made.conductor.tick()
    assert (copies.status()["runs"], copies._hashes) == (most, most * MAX_COPIED_BLOCKS)
    assert (4 << 20).to_bytes(16, "big") in copies._beginning
