"""The native policies: against the model of the calls, against naive replays, and decision by decision."""

from __future__ import annotations

import json
import os
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs._native.evict.policy import MAX_RANK_BINS, POLICIES, Policy, ranks, replay
from kvfs.config.settings import EvictionPolicyName
from kvfs.errors import InvalidRequest, NotFound
from kvfs.limits import MIN_DRAM_BYTES
from scheduler.simulation.cache_replay import PackedTrace, pack
from tests.support.eviction_model import EvictionAgainstModel
from tests.support.lru_leaf_first import LruLeafFirst
from tests.support.seeds import rounds
from tests.support.traces import small_trace
from tests.support.workloads import FAMILIES, chat
from tiers.eviction.policy import POLICY_NAMES, EvictionPolicy
from tiers.recovery.start import StoreOptions, open_store

GOLDEN = Path(__file__).parents[1] / "golden" / "policy_decisions.json"


# --- the calls ----------------------------------------------------------------------------------------------


class IntKeys:
    """A native policy over small integers."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def insert(
        self,
        key: int,
        *,
        size_bytes: int,
        parent: int | None,
        now: float,
        pinned: bool = False,
        group: int | None = None,
    ) -> None:
        above = None if parent is None else packed(parent)
        whole = None if group is None else b"group %d" % group
        self.policy.insert(
            packed(key), size_bytes=size_bytes, parent=above, now=now, pinned=pinned, group=whole
        )

    def touch(self, key: int, now: float) -> None:
        self.policy.touch(packed(key), now)

    def cool(self, key: int) -> None:
        self.policy.cool(packed(key))

    def remove(self, key: int) -> None:
        self.policy.remove(packed(key))

    def pin(self, key: int) -> None:
        self.policy.pin(packed(key))

    def unpin(self, key: int) -> None:
        self.policy.unpin(packed(key))

    def victims(self, bytes_needed: int, now: float) -> Iterator[list[int]]:
        for unit in self.policy.victims(bytes_needed, now):
            yield [int.from_bytes(key, "big") for key in unit]

    def __contains__(self, key: int) -> bool:
        return packed(key) in self.policy

    def __len__(self) -> int:
        return len(self.policy)

    @property
    def total_bytes(self) -> int:
        return self.policy.total_bytes


def packed(key: int) -> bytes:
    return key.to_bytes(16, "big")


class NativeAgainstModel(EvictionAgainstModel):
    kind: str

    def empty_policy(self) -> EvictionPolicy[int]:
        self.native = Policy(self.kind)
        return IntKeys(self.native)

    def is_empty(self) -> bool:
        return self.native.is_empty


class NativeLruAgainstModel(NativeAgainstModel):
    kind = "lru-leaf"


class DefaultAgainstModel(NativeAgainstModel):
    kind = "default"
    goes_by_last_use = False


for machine in (NativeLruAgainstModel, DefaultAgainstModel):
    machine.TestCase.settings = settings(max_examples=rounds(125, 250), stateful_step_count=40, deadline=None)
TestNativeLruAgainstModel = NativeLruAgainstModel.TestCase
TestDefaultAgainstModel = DefaultAgainstModel.TestCase


@pytest.mark.parametrize("kind", ["lru-leaf", "default"])
def test_bad_calls_are_refused(kind: str) -> None:
    policy = Policy(kind)
    key = packed(1)
    for call in (policy.remove, policy.pin, policy.unpin, lambda key: policy.touch(key, 0.0)):
        with pytest.raises(NotFound, match="does not know"):
            call(key)
        with pytest.raises(InvalidRequest, match="keys of 16 bytes"):
            call(b"short")
    for size_bytes in (-1, 1 << 40):
        with pytest.raises(InvalidRequest, match=f"{size_bytes} bytes"):
            policy.insert(key, size_bytes=size_bytes, parent=None, now=0.0)
    with pytest.raises(InvalidRequest, match="parent and a group"):
        policy.insert(key, size_bytes=1, parent=packed(2), now=0.0, group=b"g")
    assert len(policy) == 0
    assert policy.is_empty
    with pytest.raises(InvalidRequest, match="no policy of the store is called 'fifo'"):
        Policy("fifo")


@pytest.mark.parametrize("kind", ["lru-leaf", "default"])
def test_a_child_that_is_being_evicted_closes_a_cycle_too(kind: str) -> None:
    policy = IntKeys(Policy(kind))
    policy.insert(1, size_bytes=1, parent=None, now=0.0)
    policy.insert(2, size_bytes=1, parent=1, now=0.0)
    for unit in policy.victims(1, 0.0):
        assert unit == [2]
        policy.insert(1, size_bytes=1, parent=2, now=0.0)
    assert list(policy.victims(9, 0.0)) == [[2], [1]]


@pytest.mark.parametrize("kind", ["lru-leaf", "default"])
def test_a_parent_that_goes_while_its_child_is_being_evicted(kind: str) -> None:
    """The child stays a child of whoever comes under that key."""
    policy = IntKeys(Policy(kind))
    policy.insert(1, size_bytes=1, parent=None, now=0.0)
    policy.insert(2, size_bytes=1, parent=1, now=0.0)
    for _ in policy.victims(1, 0.0):
        policy.remove(1)
        policy.insert(3, size_bytes=1, parent=None, now=0.0)
    policy.insert(1, size_bytes=1, parent=None, now=0.0)
    policy.pin(2)
    assert list(policy.victims(9, 0.0)) == [[3]]


def test_sizes_are_exact() -> None:
    policy = Policy("default")
    policy.insert(packed(1), size_bytes=(1 << 40) - 1, parent=None, now=0.0)
    policy.insert(packed(2), size_bytes=7, parent=None, now=0.0)
    assert policy.total_bytes == (1 << 40) + 6
    policy.remove(packed(1))
    assert policy.total_bytes == 7


@pytest.mark.parametrize("kind", ["lru-leaf", "default"])
def test_state_is_small(kind: str) -> None:
    """Under 84 bytes for each block, chains of 24 blocks, where the constant 0.5 MB no longer weighs."""
    policy = Policy(kind)
    for key in range(200_000):
        parent = packed(key - 1) if key % 24 else None
        policy.insert(packed(key), size_bytes=1, parent=parent, now=0.0)
        if key >= 100_000:
            (unit,) = policy.victims(1, 0.0)
            policy.remove(unit[0])
    assert len(policy) == 100_000
    assert policy.state_bytes / len(policy) < 84


@pytest.mark.parametrize("together", [True, False])
def test_a_writer_whose_blocks_evict_each_other_is_still_one_run(together: bool) -> None:
    """The default policy learns the same whether a prompt's blocks come first to last, or last to first."""
    hits = 0
    policy = Policy("default")
    seen: set[int] = set()
    for request, blocks in enumerate(chat(references=150_000)):
        hits += next((at for at, key in enumerate(blocks) if key not in seen), len(blocks))
        for at in range(len(blocks)) if not together else reversed(range(len(blocks))):
            key = packed(blocks[at])
            if key in policy:
                policy.touch(key, request)
            else:
                parent = packed(blocks[at - 1]) if at else None
                policy.insert(key, size_bytes=1, parent=parent, now=request)
                seen.add(blocks[at])
            if not together:
                evict(policy, seen)
        evict(policy, seen)
    assert policy.follows_learned
    last_use = by_last_use(pack_blocks(chat(references=150_000)), 1200)
    assert hits > 1.07 * sum(last_use)


def evict(policy: Policy, seen: set[int]) -> None:
    for unit in policy.victims(len(policy) - 1200, 0.0):
        for key in unit:
            policy.remove(key)
            seen.discard(int.from_bytes(key, "big"))


def test_the_configuration_and_the_store_name_the_same_policies(tmp_path: Path) -> None:
    assert set(get_args(EvictionPolicyName)) == set(POLICY_NAMES)
    for name in POLICY_NAMES:
        open_store(
            StoreOptions(tmp_path / name, dram_bytes=MIN_DRAM_BYTES, backing="directory", policy=name)
        ).close()
    with pytest.raises(InvalidRequest, match="no policy of the store is called 'fifo'"):
        open_store(
            StoreOptions(tmp_path / "fifo", dram_bytes=MIN_DRAM_BYTES, backing="directory", policy="fifo")
        )
    assert not (tmp_path / "fifo").exists()


# --- ranks --------------------------------------------------------------------------------------------------


@given(chance=st.lists(st.floats(0, 0.95), min_size=1, max_size=12))
def test_a_rank_is_the_best_ratio_of_hits_to_time(chance: list[float]) -> None:
    edges = [4.0 * 1.5**at for at in range(len(chance) + 1)]
    for start, rank in enumerate(ranks(chance, edges)):
        best = 0.0
        for end in range(start + 1, len(chance) + 1):
            left, hits, time = 1.0, 0.0, 0.0
            for at in range(start, end):
                used = left * (1 - (1 - chance[at]) ** (0.5 if at == start else 1.0))
                time += (edges[at + 1] - edges[at]) * (0.5 if at == start else 1) * (left - used / 2)
                hits, left = hits + used, left - used
            best = max(best, hits / time)
        assert rank == pytest.approx(best)


def test_ranks_take_so_many_bins() -> None:
    for count, edges in ((0, 1), (MAX_RANK_BINS + 1, MAX_RANK_BINS + 2), (3, 3)):
        with pytest.raises(InvalidRequest, match="bins"):
            ranks([0.1] * count, list(range(edges)))


# --- naive replays ------------------------------------------------------------------------------------------


class NaiveLru:
    def __init__(self, capacity: int, future: list[list[int]]) -> None:
        self.capacity = capacity
        self.policy: LruLeafFirst[int] = LruLeafFirst()

    def __contains__(self, block: int) -> bool:
        return block in self.policy

    def use(self, block: int, parent: int | None) -> None:
        if block in self.policy:
            self.policy.touch(block, 0.0)
        else:
            self.policy.insert(block, size_bytes=1, parent=parent, now=0.0)

    def evict(self) -> Iterator[int]:
        for (block,) in self.policy.victims(len(self.policy) - self.capacity, 0.0):
            self.policy.remove(block)
            yield block


class NaiveS3Fifo:
    def __init__(self, capacity: int, future: list[list[int]]) -> None:
        self.capacity = capacity
        self.small_size = max(capacity // 10, 1)
        self.small: OrderedDict[int, int] = OrderedDict()
        self.main: OrderedDict[int, int] = OrderedDict()
        self.ghosts: list[int] = []

    def __contains__(self, block: int) -> bool:
        return block in self.small or block in self.main

    def use(self, block: int, parent: int | None) -> None:
        for queue in (self.small, self.main):
            if block in queue:
                queue[block] = min(queue[block] + 1, 3)
                return
        if block in self.ghosts:
            self.ghosts.remove(block)
            self.main[block] = 0
        else:
            self.small[block] = 0

    def evict(self) -> Iterator[int]:
        while len(self.small) + len(self.main) > self.capacity:
            if len(self.small) >= self.small_size or not self.main:
                block, uses = self.small.popitem(last=False)
                if uses > 1:
                    self.main[block] = 0
                    # A promotion goes on with the small queue, until it gave a block or is empty.
                    while self.small and next(iter(self.small.values())) > 1:
                        block, _ = self.small.popitem(last=False)
                        self.main[block] = 0
                    if not self.small:
                        yield self.evict_main()
                        continue
                    block, _ = self.small.popitem(last=False)
                self.ghosts.append(block)
                del self.ghosts[: max(len(self.ghosts) - max(self.capacity - self.small_size, 0), 0)]
                yield block
            else:
                yield self.evict_main()

    def evict_main(self) -> int:
        while True:
            block, uses = self.main.popitem(last=False)
            if not uses:
                return block
            self.main[block] = uses - 1


class NaiveArc:
    def __init__(self, capacity: int, future: list[list[int]]) -> None:
        self.capacity = capacity
        self.wanted = 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def __contains__(self, block: int) -> bool:
        return block in self.t1 or block in self.t2

    def use(self, block: int, parent: int | None) -> None:
        if block in self.b1:
            self.wanted = min(self.wanted + max(len(self.b2) / len(self.b1), 1), self.capacity)
        elif block in self.b2:
            self.wanted = max(self.wanted - max(len(self.b1) / len(self.b2), 1), 0)
        for known in (self.t1, self.t2, self.b1, self.b2):
            if block in known:
                known.remove(block)
                self.t2.append(block)
                return
        self.t1.append(block)

    def evict(self) -> Iterator[int]:
        while len(self.t1) + len(self.t2) > self.capacity:
            source, ghosts = self.t2, self.b2
            if self.t1 and (len(self.t1) > self.wanted or not self.t2):
                source, ghosts = self.t1, self.b1
            ghosts.append(source.pop(0))
            yield ghosts[-1]
        del self.b1[: max(len(self.t1) + len(self.b1) - self.capacity, 0)]
        del self.b2[: max(len(self.b1) + len(self.b2) - self.capacity, 0)]


class NaiveMin:
    def __init__(self, capacity: int, future: list[list[int]]) -> None:
        self.capacity = capacity
        self.future = future
        self.cached: dict[int, int] = {}
        self.now = 0

    def __contains__(self, block: int) -> bool:
        return block in self.cached

    def use(self, block: int, parent: int | None) -> None:
        self.cached[block] = self.future[self.now].index(block)

    def next_use(self, block: int) -> int:
        rest = range(self.now + 1, len(self.future))
        return next((at for at in rest if block in self.future[at]), len(self.future))

    def evict(self) -> Iterator[int]:
        while len(self.cached) > self.capacity:
            block = max(self.cached, key=lambda block: (self.next_use(block), self.cached[block], -block))
            del self.cached[block]
            yield block
        self.now += 1


NAIVE: dict[str, Callable[[int, list[list[int]]], NaiveLru | NaiveS3Fifo | NaiveArc | NaiveMin]] = {
    "lru-leaf": NaiveLru,
    "s3-fifo": NaiveS3Fifo,
    "arc": NaiveArc,
    "min": NaiveMin,
}


@st.composite
def traces(draw: st.DrawFn) -> list[list[int]]:
    """Paths from the root of one tree of at most 40 blocks, by each block's parent."""
    parents = [draw(st.integers(0, max(at - 1, 0))) for at in range(draw(st.integers(2, 40)))]
    requests = []
    for end in draw(st.lists(st.integers(0, len(parents) - 1), min_size=1, max_size=40)):
        path = [end]
        while path[-1]:
            path.append(parents[path[-1]])
        requests.append(path[::-1])
    return requests


@pytest.mark.parametrize("name", NAIVE)
@settings(max_examples=rounds(100, 200), deadline=None)
@given(requests=traces(), capacity=st.integers(1, 30))
def test_a_replay_is_what_a_naive_one_is(name: str, requests: list[list[int]], capacity: int) -> None:
    trace = pack_blocks(requests)
    numbered = [list(trace.blocks(at)) for at in range(len(requests))]
    naive = NAIVE[name](capacity, numbered)
    hits: list[int] = []
    victims: list[int] = []
    for blocks in numbered:
        hits.append(next((at for at, block in enumerate(blocks) if block not in naive), len(blocks)))
        for at in reversed(range(len(blocks))):
            naive.use(blocks[at], blocks[at - 1] if at else None)
        victims += naive.evict()
    found_hits, found_victims = decisions(trace, name, capacity)
    assert found_hits == hits
    if name != "min":  # blocks that no request uses again have no order among them but their depth
        assert found_victims == victims


def decisions(trace: PackedTrace, policy: str, capacity: int) -> tuple[list[int], list[int]]:
    hits = array("I", bytes(4 * trace.requests))
    victims = array("I", bytes(4 * len(trace.ids)))
    evicted = replay(policy, trace.start, trace.ids, trace.unique, capacity, hits, victims)
    return list(hits), list(victims[:evicted])


def pack_blocks(requests: list[list[int]] | list[tuple[int, ...]]) -> PackedTrace:
    return PackedTrace.of(requests)


def by_last_use(trace: PackedTrace, capacity: int) -> list[int]:
    return decisions(trace, "lru-leaf", capacity)[0]


@pytest.mark.parametrize("policy", ["lru-leaf", "min", "default"])
@pytest.mark.parametrize("family", ["chat", "agents", "branches"])
def test_a_replay_evicts_leaves_and_no_more_than_it_must(policy: str, family: str) -> None:
    requests = FAMILIES[family]()[:1500]
    trace = pack_blocks(requests)
    capacity = trace.unique // 15
    hits, victims = decisions(trace, policy, capacity)
    children = [0] * trace.unique
    parent: dict[int, int] = {}
    cached: set[int] = set()
    left = iter(victims)
    for at in range(trace.requests):
        blocks = list(trace.blocks(at))
        assert hits[at] == next((n for n, block in enumerate(blocks) if block not in cached), len(blocks))
        for above, block in zip([None, *blocks], blocks, strict=False):
            if block not in cached and above is not None:
                parent[block] = above
                children[above] += 1
            cached.add(block)
        while len(cached) > capacity:
            victim = next(left)
            cached.remove(victim)
            assert not children[victim]
            if victim in parent:
                children[parent[victim]] -= 1
    assert not list(left)


@pytest.mark.parametrize("policy", POLICIES)
def test_golden_decisions(policy: str) -> None:
    """Every block that a policy evicts from a generated trace, in order. KVFS_WRITE_GOLDEN=1 writes the file anew."""
    requests = 400 if policy == "default" else 40  # ranks are learned from 2,048 uses on
    capacity = 150
    _, victims = decisions(pack(small_trace(requests=requests)), policy, capacity)
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("KVFS_WRITE_GOLDEN"):
        golden[policy] = {"requests": requests, "capacity_blocks": capacity, "victims": victims}
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(json.dumps(golden) + "\n")
    assert golden[policy] == {"requests": requests, "capacity_blocks": capacity, "victims": victims}


# --- workloads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_loses_to_last_use_by_half_a_point_at_most(family: str) -> None:
    """At each share of the footprint, over all requests and over the second half."""
    trace = pack_blocks(FAMILIES[family]())
    half = trace.requests // 2
    for percent in (1, 2, 5, 10, 20, 50):
        capacity = trace.unique * percent // 100
        hits = [decisions(trace, policy, capacity)[0] for policy in ("default", "lru-leaf")]
        for since in (0, half):
            blocks = trace.start[-1] - trace.start[since]
            learned, last_use = (sum(found[since:]) / blocks for found in hits)
            assert learned > last_use - 0.005, (
                f"{percent} % of {trace.unique} blocks, from request {since} on"
            )
