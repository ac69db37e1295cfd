"""Prefixes of models with several cache groups, against plain models; the scheduler's half of the hybrid connector."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs import prefix_hashes
from kvfs.connectors.vllm_group_planner import NULL_BLOCK, GroupPlanner
from kvfs.connectors.vllm_scheduler import Plan, Planner, Rank, Step
from kvfs.errors import DeadlinePassed, InvalidRequest
from kvfs.groups import Group, Kept, checkpoint_every, longest_prefix
from kvfs.keys import split_keys
from kvfs.limits import CONNECTOR_RETRY_S, CONNECTOR_WINDOWS
from kvfs.namespace_groups import FULL_TOKENS, FURTHER
from kvfs.namespaces import Namespace
from tests.support.stores import NAMESPACE
from tests.support.vllm_planners import Clock, FakeLink, FakeRequest, keys_of, namespaces, tokens_of

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

strides = st.integers(1, 3)
some_groups = st.lists(
    st.builds(Group, st.none() | st.integers(0, 5), stride=strides)
    | st.builds(Group.of_chunks, st.integers(1, 6), st.just(1), strides)
    | st.builds(Group.of_state, strides),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize(("window_tokens", "blocks"), [(1, 0), (2, 1), (17, 1), (18, 2), (33, 2), (34, 3)])
def test_a_window_needs_the_blocks_of_all_tokens_that_its_next_one_reads(
    window_tokens: int, blocks: int
) -> None:
    group = Group.of_window(window_tokens, 16)
    assert group == Group(blocks)
    read = {token // 16 for token in range(160 - window_tokens + 1, 160)}
    assert set(group.needed(0, 10)) == read


@pytest.mark.parametrize("boundary", range(20))
def test_a_chunk_needs_the_blocks_that_its_next_token_reads(boundary: int) -> None:
    group = Group.of_chunks(64, 16)
    tokens = boundary * 16
    read = {token // 16 for token in range(tokens) if token // 64 == tokens // 64}
    assert set(group.needed(0, boundary)) == read


# --- the look-up -------------------------------------------------------------------------------------------------
@settings(max_examples=400, deadline=None)
@given(st.data())
def test_the_longest_prefix_is_that_of_a_model_that_tries_every_length(data: st.DataObject) -> None:
    groups = data.draw(some_groups)
    last = data.draw(st.integers(0, 14) | st.integers(250, 530))
    first = data.draw(st.integers(0, last))
    missing = [data.draw(st.sets(st.integers(0, last * group.stride), max_size=6)) for group in groups]

    def present(group: int, start: int, stop: int) -> list[bool]:
        stride = groups[group].stride
        assert first * stride <= start < stop <= last * stride
        return [block not in missing[group] for block in range(start, stop)]

    def is_hit(boundary: int) -> bool:
        return all(
            block not in missing[i]
            for i, group in enumerate(groups)
            for end in [boundary * group.stride]
            for block in range(first * group.stride, end)
            if group.is_full or block >= end - _read_back(group, end)
        )

    found = longest_prefix(groups, first, last, present)
    assert found.boundary == max(filter(is_hit, range(first, last + 1)))
    full = [i for i, group in enumerate(groups) if group.is_full]
    holes = [block // groups[i].stride for i in full for block in missing[i]]
    holes = [boundary for boundary in holes if first <= boundary < last]
    assert found.reach == (min(holes, default=last) if full else found.boundary)


def _read_back(group: Group, end: int) -> int:
    """Return how many of the blocks before the block `end` layers read from there on that do not read all."""
    assert group.window_blocks is not None
    return end % group.window_blocks if group.is_chunked else group.window_blocks


# --- what is kept ------------------------------------------------------------------------------------------------
@settings(max_examples=300, deadline=None)
@given(some_groups, st.integers(0, 60), st.integers(0, 60), st.integers(1, 4))
def test_each_kept_boundary_is_a_hit_and_nothing_else_is_kept(
    groups: list[Group], tail: int, junction: int, windows: int
) -> None:
    last = 70
    every = checkpoint_every(groups, windows)
    kept = Kept(tail, junction, every)
    boundaries = {*range(tail, last + 1), junction, *(range(every, last + 1, every) if every else ())}
    for group in groups:
        of_group = range(last + 1) if group.is_full or group.is_state else boundaries
        needed = {block for boundary in of_group for block in group.needed(0, boundary)}
        assert {block for block in range(last * group.stride) if kept.has(group, block)} == needed


# --- the planner -------------------------------------------------------------------------------------------------
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
            skipped = 0 if group.is_full else max(0, done - _read_back(group, done))
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


# --- vLLM's groups -----------------------------------------------------------------------------------------------
def spec_group(kind: str, layers: Sequence[str], **fields: Any) -> Any:
    spec = type(kind, (), {"block_size": 16, **fields})()
    return SimpleNamespace(
        kv_cache_spec=spec, layer_names=list(layers), is_eagle_group=fields.get("eagle", False)
    )


def state_group(**fields: Any) -> Any:
    form = {"dtypes": ("float32",), "shapes": ((4, 128),), "mamba_type": SimpleNamespace(name="SHORT_CONV")}
    return spec_group("MambaSpec", "d", **{"mamba_cache_mode": "align", **form, **fields})


def test_groups_of_vllm_are_those_of_windows_chunks_full_attention_and_states() -> None:
    pytest.importorskip("torch")
    from kvfs.connectors.vllm_rules.cache_groups import extra_of, groups_of

    window, other = (spec_group("SlidingWindowSpec", [name], sliding_window=64) for name in "ab")
    full, further = (spec_group("FullAttentionSpec", [name]) for name in "cf")
    state = state_group()
    chunked, larger = (
        spec_group("ChunkedLocalAttentionSpec", "e", attention_chunk_size=tokens) for tokens in (64, 128)
    )
    groups = [window, other, full, state, chunked]
    found = groups_of(SimpleNamespace(kv_cache_groups=groups))
    assert found == [Group(4), Group(4), Group(), Group.of_state(), Group(4, is_chunked=True)]
    groups += [state_group(shapes=((128, 4),)), state_group(dtypes=("bfloat16",)), larger, further]
    extras = [tuple(extra_of(group, groups).items()) for group in groups]
    assert len({*extras}) == 9, "two groups of equal bytes have two namespaces"
    assert [group for group in groups if FURTHER in extra_of(group, groups)] == [further]
    assert extra_of(full, [full]) == {}
    assert extra_of(window, [window]) != {}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "no KV cache"),
        (
            [spec_group("ChunkedLocalAttentionSpec", "a", attention_chunk_size=100)],
            "chunks of 100 tokens are no whole blocks of 16.*--disable-hybrid-kv-cache-manager gives",
        ),
        ([spec_group("CrossAttentionSpec", "a")], "CrossAttentionSpec is not supported.*state are$"),
        (
            [spec_group("FullAttentionSpec", "a"), spec_group("FullAttentionSpec", "b", eagle=True)],
            "draft model",
        ),
        (
            [spec_group("SlidingWindowSpec", "a", sliding_window=64, extra_retained_tokens=3)],
            "draft model",
        ),
        ([spec_group("SlidingWindowSpec", "a", sliding_window=1)], "sliding window of 1 tokens"),
    ],
)
def test_other_groups_are_refused(groups: list[Any], message: str) -> None:
    pytest.importorskip("torch")
    from kvfs.connectors.vllm_rules.cache_groups import groups_of

    with pytest.raises(InvalidRequest, match=message):
        groups_of(SimpleNamespace(kv_cache_groups=groups))


@pytest.mark.parametrize(
    ("groups", "method", "reason"),
    [
        ([state_group(mamba_cache_mode="none")], None, "mamba_cache_mode is 'none': only with 'align'"),
        ([state_group(mamba_cache_mode="all")], None, "mamba_cache_mode is 'all': only with 'align'"),
        (
            [spec_group("FullAttentionSpec", "a", block_size=32), state_group()],
            None,
            r"blocks of \[16, 32\] tokens beside recurrent state",
        ),
        ([spec_group("FullAttentionSpec", "a"), state_group()], "ngram", "by ngram a recurrent state is one"),
        ([spec_group("FullAttentionSpec", "a"), state_group()], None, "^$"),
        ([spec_group("SlidingWindowSpec", "a", sliding_window=64)], "ngram", "^$"),
        (
            [spec_group("FullAttentionSpec", "a", block_size=32), spec_group("FullAttentionSpec", "b")],
            None,
            "^$",
        ),
        ([], None, "^$"),
    ],
)
def test_states_that_cannot_be_kept_have_a_reason(groups: list[Any], method: str | None, reason: str) -> None:
    from kvfs.connectors.vllm_rules.cache_groups import why_unkept

    config = SimpleNamespace(speculative_config=method and SimpleNamespace(method=method))
    assert re.search(reason, why_unkept(SimpleNamespace(kv_cache_groups=groups), config))


def test_groups_with_blocks_of_different_sizes_have_boundaries_where_all_of_them_end() -> None:
    from kvfs.connectors.vllm_rules.cache_groups import block_tokens_of, extra_of, groups_of

    window = spec_group("SlidingWindowSpec", "a", sliding_window=65, block_size=32)
    full = spec_group("FullAttentionSpec", "b", block_size=16)
    chunked = spec_group("ChunkedLocalAttentionSpec", "c", attention_chunk_size=48, block_size=24)
    groups = [window, full, chunked]
    assert block_tokens_of(groups) == 96
    assert [extra_of(group, groups)[FULL_TOKENS] for group in groups] == ["16"] * 3
    assert FULL_TOKENS not in extra_of(full, [full, spec_group("SlidingWindowSpec", "a", sliding_window=65)])
    assert FULL_TOKENS not in extra_of(window, [window, chunked])
    found = groups_of(SimpleNamespace(kv_cache_groups=groups))
    assert found == [Group(2, stride=3), Group(stride=6), Group(2, is_chunked=True, stride=4)]


def test_a_group_whose_layers_a_worker_describes_one_by_one_is_that_of_the_first() -> None:
    """As vLLM's workers have it where a block lies in one piece; its scheduler has the first layer's description."""
    from kvfs.connectors.vllm_rules.cache_groups import extra_of, groups_of, is_plain

    window, full = (
        spec_group("SlidingWindowSpec", "ab", sliding_window=64),
        spec_group("FullAttentionSpec", "cd"),
    )
    each = [
        spec_group(
            "UniformTypeKVCacheSpecs",
            group.layer_names,
            kv_cache_specs=dict.fromkeys(group.layer_names, group.kv_cache_spec),
        )
        for group in (window, full)
    ]
    assert groups_of(SimpleNamespace(kv_cache_groups=each)) == [Group(4), Group()]
    assert [extra_of(group, each) for group in each] == [
        extra_of(group, [window, full]) for group in (window, full)
    ]
    assert is_plain(each[1:])
    assert not is_plain(each[:1])


def test_one_group_of_full_attention_may_have_a_draft_models_layers() -> None:
    from kvfs.connectors.vllm_rules.cache_groups import groups_of, is_plain

    groups = [spec_group("FullAttentionSpec", "ab", eagle=True)]
    assert is_plain(groups)
    assert groups_of(SimpleNamespace(kv_cache_groups=groups)) == [Group()]


@pytest.mark.parametrize("state", [False, True], ids=["windows", "states"])
@pytest.mark.parametrize(
    ("load", "setting", "message"),
    [
        ("layers", {}, "load = 'layers' is not supported for several cache groups"),
        ("async", {"lora_config": object()}, r"adapters \(LoRA\) are not supported"),
        ("async", {"speculative_config": "eagle"}, "speculative decoding by eagle is not supported"),
        ("async", {"speculative_config": "ngram"}, ""),
        ("async", {}, ""),
    ],
)
def test_settings_that_do_not_go_with_several_groups_are_refused(
    load: str, setting: dict[str, Any], message: str, state: bool
) -> None:
    from kvfs.connectors.vllm_rules.cache_groups import check_settings

    method = setting.get("speculative_config")
    speculative = method and SimpleNamespace(method=method, use_eagle=lambda: method == "eagle")
    config = SimpleNamespace(**{"lora_config": None, **setting, "speculative_config": speculative})
    groups = [Group.of_state() if state else Group(4), Group()]
    if not message:
        check_settings(groups, config, load)
        return
    with pytest.raises(InvalidRequest, match=message) as refused:
        check_settings(groups, config, load)
    assert ("--disable-hybrid-kv-cache-manager" in str(refused.value)) != state
