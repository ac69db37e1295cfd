"""Prefixes of models with several cache groups, against plain models; which groups of vLLM are taken, which refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.errors import InvalidRequest
from kvfs.groups import Group, Kept, checkpoint_every, longest_prefix
from kvfs.namespace_groups import FULL_TOKENS, FURTHER
from tests.support.vllm_planners import read_back

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
            if group.is_full or block >= end - read_back(group, end)
        )

    found = longest_prefix(groups, first, last, present)
    assert found.boundary == max(filter(is_hit, range(first, last + 1)))
    full = [i for i, group in enumerate(groups) if group.is_full]
    holes = [block // groups[i].stride for i in full for block in missing[i]]
    holes = [boundary for boundary in holes if first <= boundary < last]
    assert found.reach == (min(holes, default=last) if full else found.boundary)


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
