"""LRU leaf-first eviction against a naive model, and against reference figures on a public trace."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvfs.errors import InvalidRequest, NotFound
from tiers.eviction import EvictionPolicy, LruLeafFirst

TRACE = "mooncake_conversation_trace.jsonl.zst"


# --- the model ----------------------------------------------------------------------------------------------


@dataclass
class Known:
    size_bytes: int
    parent: int | None
    group: int | None
    pinned: bool


class Model:
    """The policy's definition, written down without a thought for cost."""

    def __init__(self) -> None:
        self.keys: dict[int, Known] = {}
        self.used: dict[int, int] = {}
        """Last use of each unit, by its group or its only key; the two do not overlap."""
        self.uses = 0

    def unit(self, key: int) -> list[int]:
        group = self.keys[key].group
        return [key] if group is None else [k for k, known in self.keys.items() if known.group == group]

    def use(self, key: int) -> None:
        self.uses += 1
        group = self.keys[key].group
        self.used[key if group is None else group] = self.uses

    def last_use(self, key: int) -> int:
        group = self.keys[key].group
        return self.used[key if group is None else group]

    def insert(self, key: int, size_bytes: int, parent: int | None, pinned: bool, group: int | None) -> None:
        self.keys.pop(key, None)
        ancestor = parent
        while ancestor is not None:
            if ancestor == key:
                parent = None
                break
            ancestor = self.keys[ancestor].parent if ancestor in self.keys else None
        self.keys[key] = Known(size_bytes, parent, group, pinned)
        self.use(key)

    def next_victim(self, gone: set[int]) -> list[int] | None:
        """The leaf without pins whose last use is the oldest, when `gone` are not there."""
        best: tuple[int, list[int]] | None = None
        for key in self.keys.keys() - gone:
            unit = self.unit(key)
            children = [k for k, known in self.keys.items() if known.parent in unit]
            if any(self.keys[k].pinned for k in unit) or set(children) - set(unit) - gone:
                continue
            used = self.last_use(key)
            if best is None or used < best[0]:
                best = used, unit
        return None if best is None else best[1]

    def bytes_of(self, unit: list[int]) -> int:
        return sum(self.keys[key].size_bytes for key in unit)


keys = st.integers(0, 24)
wanted = st.integers(0, 60)


class EvictionAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.policy: LruLeafFirst[int] = LruLeafFirst()
        self.model = Model()

    def choose(self, data: st.DataObject) -> int | None:
        return data.draw(st.sampled_from(sorted(self.model.keys))) if self.model.keys else None

    def insert_key(
        self, key: int, size_bytes: int, parent: int | None, pinned: bool, group: int | None
    ) -> None:
        self.policy.insert(key, size_bytes=size_bytes, parent=parent, now=0.0, pinned=pinned, group=group)
        self.model.insert(key, size_bytes, parent, pinned, group)

    def remove_key(self, key: int) -> None:
        self.policy.remove(key)
        del self.model.keys[key]

    def touch_key(self, key: int) -> None:
        self.policy.touch(key, 0.0)
        self.model.use(key)

    @rule(
        key=keys,
        size_bytes=st.integers(0, 9),
        parent=st.none() | keys,
        pinned=st.sampled_from([False] * 7 + [True]),
    )
    def insert_block(self, key: int, size_bytes: int, parent: int | None, pinned: bool) -> None:
        self.insert_key(key, size_bytes, parent, pinned, None)

    @rule(start=keys, length=st.integers(2, 8), backwards=st.booleans())
    def insert_chain(self, start: int, length: int, backwards: bool) -> None:
        chain = list(range(start, min(start + length, 25)))
        for key in reversed(chain) if backwards else chain:
            self.insert_key(key, 1, key - 1 if key > start else None, False, None)

    @rule(
        key=keys,
        size_bytes=st.integers(0, 9),
        pinned=st.sampled_from([False] * 7 + [True]),
        group=st.integers(100, 102),
    )
    def insert_file(self, key: int, size_bytes: int, pinned: bool, group: int) -> None:
        self.insert_key(key, size_bytes, None, pinned, group)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        if (key := self.choose(data)) is not None:
            self.touch_key(key)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if (key := self.choose(data)) is not None:
            self.remove_key(key)

    @rule(data=st.data(), pinned=st.booleans())
    def pin(self, data: st.DataObject, pinned: bool) -> None:
        if (key := self.choose(data)) is not None:
            self.model.keys[key].pinned = pinned
            (self.policy.pin if pinned else self.policy.unpin)(key)

    def expected(self, bytes_needed: int) -> list[list[int]]:
        gone: set[int] = set()
        units = []
        while bytes_needed > 0 and (unit := self.model.next_victim(gone)) is not None:
            units.append(unit)
            gone.update(unit)
            bytes_needed -= self.model.bytes_of(unit)
        return units

    @rule(bytes_needed=wanted, evicted=st.integers(0, 5))
    def plan_then_evict(self, bytes_needed: int, evicted: int) -> None:
        """All victims are asked for first; then some go."""
        units = list(self.policy.victims(bytes_needed, 0.0))
        assert sorted(map(sorted, units)) == sorted(map(sorted, self.expected(bytes_needed)))
        assert [set(unit) for unit in units] == [set(unit) for unit in self.expected(bytes_needed)]
        for unit in units[:evicted]:
            for key in unit:
                self.remove_key(key)

    @rule(data=st.data(), bytes_needed=wanted)
    def change_while_evicting(self, data: st.DataObject, bytes_needed: int) -> None:
        gone: set[int] = set()
        for unit in self.policy.victims(bytes_needed, 0.0):
            assert bytes_needed > 0
            expected = self.model.next_victim(gone)
            assert expected is not None
            assert set(unit) == set(expected)
            bytes_needed -= self.model.bytes_of(unit)
            gone.update(unit)
            what = data.draw(st.sampled_from(["evict", "evict", "keep", "touch", "touch another", "stop"]))
            if what == "evict":
                for key in unit:
                    self.remove_key(key)
            elif what == "touch":
                self.touch_key(unit[0])
                gone.difference_update(unit)
            elif what == "touch another" and (other := self.choose(data)) is not None:
                gone.difference_update(self.model.unit(other))
                self.touch_key(other)
            elif what == "stop":
                return
            gone &= self.model.keys.keys()
        assert bytes_needed <= 0 or self.model.next_victim(gone) is None

    @invariant()
    def totals_agree(self) -> None:
        assert len(self.policy) == len(self.model.keys)
        assert self.policy.total_bytes == sum(known.size_bytes for known in self.model.keys.values())
        assert all(key in self.policy for key in self.model.keys)

    def teardown(self) -> None:
        """With no pin left, everything can go, parents last, and nothing stays behind in the policy."""
        for key in self.model.keys:
            self.policy.unpin(key)
        seen: set[int] = set()
        for unit in self.policy.victims(1 << 30, 0.0):
            assert not {
                self.model.keys[key].parent for key in self.model.keys.keys() - seen - set(unit)
            } & set(unit)
            seen.update(unit)
            for key in unit:
                self.policy.remove(key)
        assert seen == set(self.model.keys)
        for left in (self.policy._order, self.policy._orphans, self.policy._groups):
            assert not left


EvictionAgainstModel.TestCase.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
TestEvictionAgainstModel = EvictionAgainstModel.TestCase


# --- single rules -------------------------------------------------------------------------------------------


def policy_of(*chains: str) -> LruLeafFirst[str]:
    """Each letter is a block whose parent is the letter before."""
    policy: LruLeafFirst[str] = LruLeafFirst()
    for chain in chains:
        for parent, key in zip([None, *chain], chain, strict=False):
            if key not in policy:
                policy.insert(key, size_bytes=1, parent=parent, now=0.0)
    return policy


def order_of(policy: EvictionPolicy[str]) -> str:
    return "".join("".join(unit) for unit in policy.victims(1 << 30, 0.0))


def test_leaves_go_before_their_ancestors() -> None:
    assert order_of(policy_of("abc", "xy")) == "cbayx"


def test_a_shared_prefix_goes_last() -> None:
    policy = policy_of("abc", "abde")
    assert order_of(policy) == "cedba"
    policy.touch("c", 0.0)
    assert order_of(policy) == "edcba"


def test_asking_changes_nothing() -> None:
    policy = policy_of("abc", "xy")
    assert [order_of(policy) for _ in range(3)] == ["cbayx"] * 3


def test_a_pin_protects_the_ancestors() -> None:
    policy = policy_of("abc", "xy")
    policy.pin("b")
    policy.pin("b")
    assert order_of(policy) == "cyx"
    policy.unpin("b")
    assert order_of(policy) == "cbayx"


def test_a_group_goes_as_a_whole() -> None:
    policy: LruLeafFirst[str] = LruLeafFirst()
    for key in ("1", "a", "2", "b"):
        policy.insert(key, size_bytes=3, parent=None, now=0.0, group="dir" if key.isalpha() else None)
    assert list(policy.victims(7, 0.0)) == [["1"], ["2"], ["a", "b"]]
    policy.pin("b")
    assert list(policy.victims(7, 0.0)) == [["1"], ["2"]]


def test_only_what_is_needed_is_given() -> None:
    policy = policy_of("abc")
    assert list(policy.victims(0, 0.0)) == []
    assert list(policy.victims(2, 0.0)) == [["c"], ["b"]]


def test_a_cycle_of_false_parents_still_leaves() -> None:
    policy: LruLeafFirst[str] = LruLeafFirst()
    for key, parent in (("a", "c"), ("b", "a"), ("c", "b"), ("d", "d")):
        policy.insert(key, size_bytes=1, parent=parent, now=0.0)
    assert sorted(order_of(policy)) == ["a", "b", "c", "d"]


def test_bad_calls_are_refused() -> None:
    policy: LruLeafFirst[str] = LruLeafFirst()
    for call in (policy.remove, policy.pin, policy.unpin, lambda key: policy.touch(key, 0.0)):
        with pytest.raises(NotFound, match="'a'"):
            call("a")
    with pytest.raises(InvalidRequest, match="-1 bytes"):
        policy.insert("a", size_bytes=-1, parent=None, now=0.0)
    with pytest.raises(InvalidRequest, match="parent and a group"):
        policy.insert("a", size_bytes=1, parent="b", now=0.0, group="g")
    assert len(policy) == 0


def test_passing_over_parents_is_paid_once() -> None:
    """A thousand old parents above one fresh leaf are not walked again by every eviction."""
    policy: LruLeafFirst[int] = LruLeafFirst()
    for key in range(1000):
        policy.insert(key, size_bytes=1, parent=key - 1 if key else None, now=0.0)
    policy.pin(999)
    moves = 0
    oldest = policy._oldest

    def counted() -> object:
        nonlocal moves
        moves += 1
        return oldest()

    policy._oldest = counted  # type: ignore[method-assign, assignment]
    for key in range(1000, 1100):
        policy.insert(key, size_bytes=1, parent=None, now=0.0)
        assert list(policy.victims(1, 0.0)) == [[key]]
        policy.remove(key)
    assert moves <= 1000 + 2 * 100


# --- the trace ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace() -> list[list[int]]:
    """The block ids of each request, in order of arrival."""
    folder = os.environ.get("KVFS_TRACE_DIR")
    if not folder:
        pytest.skip(f"set KVFS_TRACE_DIR to the folder that holds {TRACE}")
    zstandard = pytest.importorskip("zstandard")
    with (Path(folder) / TRACE).open("rb") as packed:
        text = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(packed), encoding="utf-8")
        return [json.loads(line)["hash_ids"] for line in text]


def replay(policy: EvictionPolicy[int], requests: list[list[int]], capacity: int) -> float:
    """Block hit ratio: a request's contiguous prefix scores, its blocks enter last to first, then some go."""
    hits = 0
    for now, ids in enumerate(requests):
        hits += next((depth for depth, key in enumerate(ids) if key not in policy), len(ids))
        for depth in reversed(range(len(ids))):
            if ids[depth] in policy:
                policy.touch(ids[depth], now)
            else:
                parent = ids[depth - 1] if depth else None
                policy.insert(ids[depth], size_bytes=1, parent=parent, now=now)
        evict(policy.victims(policy.total_bytes - capacity, now), policy)
    return hits / sum(map(len, requests))


def evict(victims: Iterator[list[int]], policy: EvictionPolicy[int]) -> None:
    for unit in victims:
        for key in unit:
            policy.remove(key)


@pytest.mark.parametrize(
    ("capacity", "reference"), [(5_000, 0.1118), (10_000, 0.2116), (30_000, 0.3257), (50_000, 0.3546)]
)
def test_reference_figures_of_the_conversation_trace(
    trace: list[list[int]], capacity: int, reference: float
) -> None:
    assert round(replay(LruLeafFirst(), trace, capacity), 4) == reference
