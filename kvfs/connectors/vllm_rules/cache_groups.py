"""The cache groups of vLLM's models, and which settings go with several of them.

Responsibility: read vLLM's KVCacheConfig as `kvfs.groups` has it, refuse what cannot be served, and say what sets the
blocks of a group apart from those of another.

Invariants: vLLM cannot compute single blocks of several groups again (0.32 raises where a connector reports some), so a
request of which one load failed begins anew, between steps: nothing is served that may fail within one. Concurrency:
pure functions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from kvfs.errors import InvalidRequest
from kvfs.groups import Group

_FULL = ("FullAttentionSpec", "MLAAttentionSpec")
_STATE = "MambaSpec"
"""Of all recurrent layers: Mamba, linear attention, short convolutions."""
_CHUNKED = "ChunkedLocalAttentionSpec"
_ONE_CACHE = "--disable-hybrid-kv-cache-manager gives all layers one cache, which supports it"


def is_plain(groups: Sequence[Any]) -> bool:
    """Return whether all layers have one cache, of full attention."""
    return len(groups) == 1 and type(groups[0].kv_cache_spec).__name__ in _FULL


def groups_of(kv_cache_config: Any) -> list[Group]:
    """Return the cache groups. Raises InvalidRequest for those that are not supported."""
    if is_plain(kv_cache_config.kv_cache_groups):  # with a draft model's layers, where there are any
        return [Group()]
    groups = [_group_of(group) for group in kv_cache_config.kv_cache_groups]
    sizes = sorted({group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups})
    if len(sizes) > 1:
        raise InvalidRequest(f"cache groups with blocks of {sizes} tokens: different sizes are not supported")
    if not groups:
        raise InvalidRequest("the engine has no KV cache")
    return groups


def _group_of(group: Any) -> Group:
    spec, kind = group.kv_cache_spec, type(group.kv_cache_spec).__name__
    if group.is_eagle_group or getattr(spec, "extra_retained_tokens", 0):
        raise InvalidRequest("a cache group of a draft model (EAGLE, MTP) is not supported")
    if kind in _FULL:
        return Group()
    if kind == _STATE:
        if spec.mamba_cache_mode != "align":
            raise InvalidRequest(
                f"mamba_cache_mode = {spec.mamba_cache_mode!r} is not supported, only 'align' with prefix caching on, "
                "which keeps recurrent layers' state at ends of blocks"
            )
        return Group.of_state()
    if kind == _CHUNKED:
        if spec.attention_chunk_size % spec.block_size:
            raise InvalidRequest(
                f"chunks of {spec.attention_chunk_size} tokens are no whole blocks of {spec.block_size}; {_ONE_CACHE}"
            )
        return Group.of_chunks(spec.attention_chunk_size, spec.block_size)
    if kind != "SlidingWindowSpec":
        raise InvalidRequest(
            f"KV cache of kind {kind} is not supported, only full attention, MLA, sliding windows, chunked local "
            "attention and recurrent state are"
        )
    if spec.sliding_window < 2:
        raise InvalidRequest(f"a sliding window of {spec.sliding_window} tokens has no blocks to load")
    return Group.of_window(spec.sliding_window, spec.block_size)


def extra_of(group: Any, groups: Sequence[Any]) -> dict[str, str]:
    """Return what sets the blocks of a group apart from those of the same model's others, for their namespace; nothing
    for the only one of full attention."""
    spec, kind = group.kv_cache_spec, type(group.kv_cache_spec).__name__
    if is_plain(groups):
        return {}
    extra = {
        "group_kind": kind,
        "group_window": str(getattr(spec, "sliding_window", None) or "none"),
        "group_layers": hashlib.sha256("\0".join(group.layer_names).encode()).hexdigest()[:32],
    }
    if kind == _CHUNKED:
        extra["group_chunk"] = str(spec.attention_chunk_size)
    if kind == _STATE:
        parts = (f"{dtype} {tuple(shape)}" for dtype, shape in zip(spec.dtypes, spec.shapes, strict=True))
        extra["group_state"] = f"{spec.mamba_type.name} {', '.join(parts)}"
    return extra


def check_settings(groups: Sequence[Group], vllm_config: Any, load: str) -> None:
    """Check settings of an engine with several groups. Raises InvalidRequest naming the setting."""
    has_states = any(group.is_state for group in groups)
    advice = "" if has_states else f"; {_ONE_CACHE}"
    if load != "async":
        raise InvalidRequest(
            f"load = {load!r} is not supported for several cache groups, only 'async' is{advice}"
        )
    if vllm_config.lora_config is not None:
        raise InvalidRequest(f"adapters (LoRA) are not supported for several cache groups{advice}")
    speculative = vllm_config.speculative_config
    if speculative is not None and (has_states or speculative.use_eagle()):
        raise InvalidRequest(
            f"speculative decoding by {speculative.method} is not supported for several cache groups: its layers read "
            f"blocks before a window, and a recurrent state is one behind drafts{advice}"
        )
