"""The scheduler's half of the hybrid connector: stores, loads, fetches and hand-overs of several cache groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs import prefix_hashes
from kvfs.connectors.vllm_group_planner import NULL_BLOCK, GroupPlanner
from kvfs.connectors.vllm_scheduler import Plan, Planner, Rank, Step
from kvfs.errors import DeadlinePassed
from kvfs.groups import Group, Kept, checkpoint_every, longest_prefix
from kvfs.keys import split_keys
from kvfs.limits import CONNECTOR_RETRY_S, CONNECTOR_WINDOWS
from kvfs.namespaces import Namespace
from tests.support.stores import NAMESPACE
from tests.support.vllm_planners import (
    Clock,
    FakeLink,
    FakeRequest,
    keys_of,
    namespaces,
    read_back,
    tokens_of,
)

BLOCK = NAMESPACE.block_tokens
GROUPS = [
    Group.of_window(2 * BLOCK, BLOCK),
    Group.of_window(3 * BLOCK + 1, BLOCK),
    Group(),
    Group.of_state(),
    Group.of_chunks(4 * BLOCK, BLOCK),
]
MIXED = [
    Group.of_window(2 * BLOCK, BLOCK // 2, 2),
    Group.of_window(BLOCK // 4 + 1, BLOCK // 4, 4),
    Group(stride=2),
    Group.of_window(3 * BLOCK + 1, BLOCK),
    Group.of_state(2),
    Group.of_chunks(3 * BLOCK // 2, BLOCK // 2, 2),
]
"""Of blocks of several sizes: one window is shorter than the largest, and chunks end within these."""
LARGER_FULL = [Group(), Group.of_window(2 * BLOCK, BLOCK // 4, 4), Group.of_chunks(4 * BLOCK, BLOCK // 2, 2)]
TWO_FULL = [Group.of_window(2 * BLOCK, BLOCK), Group(), Group(stride=2)]
RANKS: list[tuple[int, int]] = [(0, 0), (0, 1)]


def group_namespaces(groups: Sequence[Group] = GROUPS) -> dict[Rank, Namespace]:
    return {
        (*rank, index): Namespace.from_mapping(
            {
                **NAMESPACE.as_mapping(),
                "tensor_shards": 2,
                "tensor_rank": rank[1],
                "block_tokens": BLOCK // group.stride,
                "extra": {"group": str(index)},
            }
        )
        for rank in RANKS
        for index, group in enumerate(groups)
    }


def group_keys(tokens: Sequence[int], groups: Sequence[Group] = GROUPS) -> dict[Rank, list[bytes]]:
    return {
        rank: list(split_keys(prefix_hashes(namespace, list(tokens))))
        for rank, namespace in group_namespaces(groups).items()
    }


@pytest.fixture(autouse=True)
def _no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "_extra", lambda self, tracked, first, last, size: [None] * (last - first))


def hybrid(link: FakeLink, groups: Sequence[Group] = GROUPS, *, clock: Clock | None = None) -> GroupPlanner:
    made = GroupPlanner(link, BLOCK, groups, store_generated=True, clock=clock or Clock())  # type: ignore[arg-type]
    made.set_namespaces(group_namespaces(groups))
    return made


class FakeEngine:
    """vLLM's block tables: one for each group, with the null block where a window has passed.

    The table of recurrent layers has the state that a step begins and the one that it ends with.
    """

    def __init__(self, groups: Sequence[Group] = GROUPS) -> None:
        self._groups = groups
        self.tables: list[list[int]] = [[] for _ in groups]
        self._last = 0

    def extend(self, computed: int, total: int) -> list[list[int]]:
        """The tables of a request with `computed` tokens, once it has room for `total`."""
        for group, table in zip(self._groups, self.tables, strict=True):
            size = BLOCK // group.stride
            done = computed // size
            skipped = 0 if group.is_full else max(0, done - read_back(group, done))
            while len(table) < -(-total // size):
                self._last += 1
                table.append(self._last)
            table[:skipped] = [NULL_BLOCK] * skipped
        return [list(table) for table in self.tables]

    def states(self, total: int) -> list[tuple[int, int, int]]:
        """The states that a step up to `total` tokens leaves: at the end of a whole block."""
        sizes = [BLOCK // group.stride if group.is_state else 0 for group in self._groups]
        return [
            (index, self.tables[index][total // size - 1], total)
            for index, size in enumerate(sizes)
            if size and total % size == 0
        ]


def take(link: FakeLink, plan: Plan, groups: Sequence[Group]) -> None:
    """Store what a plan says; blocks of all groups follow those of the first of full attention."""
    assert link.store is not None
    keyed = next((index for index, group in enumerate(groups) if group.is_full), None)
    for run in plan.stores:
        assert NULL_BLOCK not in run.block_ids
        assert (run.anchors is None) == any(keyed in (None, rank[-1]) for rank in run.keys)
        for rank, anchors in (run.anchors or {}).items():
            link.parents.update(zip(split_keys(run.keys[rank]), split_keys(anchors), strict=True))
        for keys in run.keys.values():
            link.store.keys.update(split_keys(keys))


def compute(
    made: GroupPlanner, link: FakeLink, request: Any, chunks: Sequence[int], computed: int = 0
) -> set[int]:
    """Compute a request in steps of these sizes, then what is left, with a stop at its last whole block, as vLLM does
    for recurrent layers. Return where steps ended."""
    engine, sizes, ends = FakeEngine(made.groups), iter(chunks), set[int]()
    stop = (request.num_tokens - 1) // BLOCK * BLOCK
    while computed < request.num_tokens:
        after = min(computed + next(sizes, request.num_tokens), request.num_tokens)
        after = stop if computed < stop < after else after
        tables, states = engine.extend(computed, after), engine.states(after)
        plan = made.plan([Step(request.request_id, computed, after, tables[0], tables, states)])
        take(link, plan, made.groups)
        computed = after
        ends.add(after)
    return ends


def present_in(link: FakeLink, keys: dict[Rank, list[bytes]]) -> Callable[[int, int, int], list[bool]]:
    store = link.store
    assert store is not None

    def present(group: int, first: int, last: int) -> list[bool]:
        return [all(keys[(*rank, group)][i] in store.keys for rank in RANKS) for i in range(first, last)]

    return present


@pytest.mark.parametrize(
    "groups",
    [GROUPS, MIXED, LARGER_FULL, TWO_FULL],
    ids=["one size", "sizes", "larger full", "two of full attention"],
)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_one_request_stores_another_one_loads_in_all_groups_or_not_at_all(
    groups: list[Group], data: st.DataObject
) -> None:
    """Chunks of any size; blocks of any group that are evicted."""
    link = FakeLink()
    made = hybrid(link, groups)
    assert link.store is not None
    tokens = tokens_of(data.draw(st.integers(1, 12 * BLOCK)))
    request = FakeRequest("first", tokens)
    assert made.match(request, 0) == (0, False)
    sizes = st.integers(1, 5 * BLOCK) | st.integers(1, 5).map(lambda blocks: blocks * BLOCK)
    ends = compute(made, link, request, data.draw(st.lists(sizes, max_size=6)))
    keys = group_keys(tokens, groups)
    whole, end = len(tokens) // BLOCK, (len(tokens) - 1) // BLOCK
    kept = Kept(end, 0, checkpoint_every(groups, CONNECTOR_WINDOWS))
    full = next(index for index, group in enumerate(groups) if group.is_full)
    for index, group in enumerate(groups):
        size, full_size = BLOCK // group.stride, BLOCK // groups[full].stride
        stored = [i for i in range(whole * group.stride) if keys[0, 0, index][i] in link.store.keys]
        has_state = [(i + 1) * size in ends or not group.is_state for i in range(whole * group.stride)]
        assert stored == [i for i, there in enumerate(has_state) if there and kept.has(group, i)]
        for rank in RANKS:
            followed = [link.parents.get(keys[(*rank, index)][i]) for i in stored]
            anchors = [keys[(*rank, full)][((i + 1) * size - 1) // full_size] for i in stored]
            assert followed == (anchors if index != full else [None] * len(anchors))
    for _ in range(data.draw(st.integers(0, 3))):
        link.store.keys.discard(
            data.draw(st.sampled_from([key for each in keys.values() for key in each] or [b""]))
        )
    again = FakeRequest("again", tokens)
    first = data.draw(st.integers(0, end))
    hits, is_async = made.match(again, first * BLOCK)
    expected = longest_prefix(groups, first, end, present_in(link, keys)).boundary - first
    assert (hits, is_async) == (expected * BLOCK, expected > 0)
    tables = FakeEngine(groups).extend((first + expected) * BLOCK, len(tokens))
    made.allocated(again, tables, hits or 0)
    loads = made.plan([]).loads
    for index, group in enumerate(groups):
        runs = [run for run in loads if (0, 0, index) in run.keys]
        needed = group.needed(first, first + expected)
        assert [id for run in runs for id in run.block_ids] == tables[index][needed.start : needed.stop]
        for rank in RANKS:
            wanted = keys[(*rank, index)][needed.start : needed.stop]
            assert [key for run in runs for key in split_keys(run.keys[(*rank, index)])] == wanted


def test_a_request_that_leaves_what_is_stored_keeps_the_window_before_that() -> None:
    link = FakeLink()
    made, root = hybrid(link), tokens_of(20 * BLOCK)
    request = FakeRequest("root", root)
    made.match(request, 0)
    compute(made, link, request, [])
    branches = [
        FakeRequest(f"branch {i}", root[: 9 * BLOCK + 1] + tokens_of(5 * BLOCK, seed=i)) for i in (1, 2)
    ]
    assert made.match(branches[0], 0) == (0, False)
    compute(made, link, branches[0], [9 * BLOCK, 2 * BLOCK + 3])
    assert made.match(branches[1], 0) == (9 * BLOCK, True)


def test_a_load_that_failed_is_a_miss_for_its_request() -> None:
    link = FakeLink()
    made, tokens = hybrid(link), tokens_of(6 * BLOCK + 2)
    request = FakeRequest("r", tokens)
    made.match(request, 0)
    compute(made, link, request, [])
    again = FakeRequest("again", tokens)
    assert made.match(again, 0) == (6 * BLOCK, True)
    made.allocated(again, FakeEngine().extend(6 * BLOCK, len(tokens)), 6 * BLOCK)
    made.failed_requests({"again"})
    assert made.match(again, 0) == (0, False)
    made.finished(again)
    assert made.match(again, 0) == (6 * BLOCK, True), "another request of that name"


def test_lower_tiers_are_a_miss_in_all_groups_until_they_work_again() -> None:
    """One block of a window, on one rank, that does not come up; what is in DRAM whole is still a hit."""
    link, clock = FakeLink(), Clock()
    made, prompts = hybrid(link, clock=clock), [tokens_of(6 * BLOCK + 2, seed) for seed in (1, 2)]
    store = link.store
    assert store is not None
    for i, tokens in enumerate(prompts):
        request = FakeRequest(f"r{i}", tokens)
        made.match(request, 0)
        compute(made, link, request, [])
    store.below = {group_keys(prompts[0])[0, 1, 1][5]}
    assert store.below < store.keys

    def hits(name: str, tokens: Sequence[int]) -> int | None:
        return made.match(FakeRequest(name, tokens), 0)[0]

    assert hits("failing", prompts[0]) == 6 * BLOCK
    made.allocated(
        FakeRequest("failing", prompts[0]), FakeEngine().extend(6 * BLOCK, len(prompts[0])), 6 * BLOCK
    )
    made.failed_requests({"failing"})
    [trial] = store.trials
    for name in "ab":
        assert hits(name, prompts[0]) == 0
        assert hits(f"{name} in DRAM", prompts[1]) == 6 * BLOCK
    trial.set_exception(DeadlinePassed("no answer"))
    assert hits("c", prompts[0]) == 0
    clock.now_s += CONNECTOR_RETRY_S
    assert hits("d", prompts[0]) == 0
    assert len(store.trials) == 2
    store.trials[1].set_result(1)
    assert hits("e", prompts[0]) == 6 * BLOCK
    assert hits("failing", prompts[0]) == 0, "its request asks no more"


def test_what_each_group_needs_of_a_prompt_is_fetched_from_the_machine_that_has_it() -> None:
    """That machine has what an engine there has stored: of a window, and of states, no more than its end."""
    here, there, tokens = FakeLink(), FakeLink(), tokens_of(6 * BLOCK + 2)
    prefill, made = hybrid(there), hybrid(here)
    request = FakeRequest("r", tokens)
    prefill.match(request, 0)
    compute(prefill, there, request, [])
    assert here.store is not None
    assert there.store is not None
    again = FakeRequest("again", tokens, {"kvfs": {"source": "10.0.0.1:9400"}})
    assert made.match(again, 0) == (None, False)
    assert len(here.store.fetches) == len(RANKS) * len(GROUPS)
    for asked in here.store.fetches:
        assert there.store.keys.issuperset(asked.keys)
        here.store.bring(asked)
    assert made.match(again, 0) == (6 * BLOCK, True)
    assert made.counts == {**made.counts, "fetches": 1, "fetched_blocks": 6, "failed_fetches": 0}


@pytest.mark.parametrize("groups", [GROUPS, MIXED, LARGER_FULL], ids=["one size", "sizes", "larger full"])
def test_a_hand_over_names_the_last_block_before_which_each_group_has_what_it_needs(
    groups: list[Group],
) -> None:
    there, here, tokens = FakeLink(), FakeLink(), tokens_of(6 * BLOCK + 2)
    prefill, decode = hybrid(there, groups), hybrid(here, groups)
    request = FakeRequest("r", tokens, {"do_remote_decode": True})
    prefill.match(request, 0)
    compute(prefill, there, request, [])
    said = prefill.finished(request)
    assert said is not None
    assert said["kvfs"]["last_block"] == group_keys(tokens, groups)[0, 0, 0][6 * groups[0].stride - 1].hex()
    again = FakeRequest("again", tokens, said)
    assert decode.match(again, 0) == (None, False), "it waits for what is being stored"
    assert here.store is not None
    assert there.store is not None
    here.store.keys = there.store.keys
    assert decode.match(again, 0) == (6 * BLOCK, True)
    assert decode.counts == {**decode.counts, "handovers": 1, "late_handovers": 0}


def test_one_group_of_full_attention_has_the_keys_of_the_plain_planner() -> None:
    tokens, plans = tokens_of(5 * BLOCK + 3), []
    for is_hybrid in (False, True):
        link = FakeLink()
        plain = namespaces()
        if is_hybrid:
            made: Planner = GroupPlanner(link, BLOCK, [Group()], store_generated=True)  # type: ignore[arg-type]
            made.set_namespaces({(*rank, 0): namespace for rank, namespace in plain.items()}, "weights")
        else:
            made = Planner(link, BLOCK, store_generated=True, is_async=True)  # type: ignore[arg-type]
            made.set_namespaces(plain, "weights")
        request = FakeRequest("r", tokens)
        made.match(request, 0)
        ids = [7, 8, 9, 10, 11, 12]
        [run] = made.plan([Step("r", 0, len(tokens), ids, [ids])]).stores
        plans.append((run.block_ids, list(run.keys.values()), list(run.parents.values())))
    assert plans[0] == plans[1]
    assert list(split_keys(plans[0][1][0])) != keys_of(tokens)[0, 0], "the weights are in the keys"
