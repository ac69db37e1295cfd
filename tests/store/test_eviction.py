"""LRU leaf-first eviction against a naive model, and against reference figures on a public trace."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from hypothesis import settings

from kvfs.errors import InvalidRequest, NotFound
from tests.support.eviction_model import EvictionAgainstModel
from tests.support.lru_leaf_first import LruLeafFirst
from tiers.eviction.policy import EvictionPolicy

TRACE = "mooncake_conversation_trace.jsonl.zst"


# --- against the model --------------------------------------------------------------------------------------


class LruAgainstModel(EvictionAgainstModel):
    def empty_policy(self) -> EvictionPolicy[int]:
        self.lru: LruLeafFirst[int] = LruLeafFirst()
        return self.lru

    def is_empty(self) -> bool:
        return not (self.lru._order or self.lru._orphans or self.lru._groups)


LruAgainstModel.TestCase.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
TestLruAgainstModel = LruAgainstModel.TestCase


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


def test_a_child_that_is_being_evicted_closes_a_cycle_too() -> None:
    policy = policy_of("ab")
    for unit in policy.victims(1, 0.0):
        assert unit == ["b"]
        policy.insert("a", size_bytes=1, parent="b", now=0.0)
    assert order_of(policy) == "ba"


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
