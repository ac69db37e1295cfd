"""The cache groups of vLLM's models, and which settings go with several of them.

Responsibility: read vLLM's KVCacheConfig as `kvfs.groups` has it, refuse what cannot be served, say of which models
nothing can be kept, and what sets the blocks of a group apart from those of another.

Invariants: vLLM cannot compute single blocks of several groups again (0.32 raises where a connector reports some), so a
request of which one load failed begins anew, between steps: nothing is served that may fail within one. Concurrency:
pure functions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

from kvfs.errors import InvalidRequest
from kvfs.groups import Group
from kvfs.namespace_groups import CHUNK, FULL_TOKENS, FURTHER, KIND, LAYERS, STATE, WINDOW

_FULL = ("FullAttentionSpec", "MLAAttentionSpec")
_STATE = "MambaSpec"
"""Of all recurrent layers: Mamba, linear attention, short convolutions."""
_OF_EACH = "UniformTypeKVCacheSpecs"
_CHUNKED = "ChunkedLocalAttentionSpec"
_ONE_CACHE = "--disable-hybrid-kv-cache-manager gives all layers one cache, which supports it"


def is_plain(groups: Sequence[Any]) -> bool:
    """Return whether all layers have one cache, of full attention."""
    return len(groups) == 1 and all(kind_of(spec) in _FULL for spec in _specs_of(groups[0]))


def spec_of(group: Any) -> Any:
    """Return vLLM's description of a group's layers, of the first one where their sizes differ."""
    return _specs_of(group)[0]


def kind_of(spec: Any) -> str:
    """Return the name of a kind of cache."""
    return type(spec).__name__


def _specs_of(group: Any) -> list[Any]:
    """Return the descriptions of a group's layers: a worker has one for each, where their sizes may differ."""
    spec = group.kv_cache_spec
    return list(spec.kv_cache_specs.values()) if kind_of(spec) == _OF_EACH else [spec]


def block_tokens_of(groups: Sequence[Any]) -> int:
    """Return how far boundaries are apart at which a request may go on: a block of each group ends there."""
    return math.lcm(*(spec_of(group).block_size for group in groups))


def groups_of(kv_cache_config: Any) -> list[Group]:
    """Return the cache groups. Raises InvalidRequest for those that are not supported."""
    vllm_groups = kv_cache_config.kv_cache_groups
    if is_plain(vllm_groups):  # with a draft model's layers, where there are any
        return [Group()]
    apart = block_tokens_of(vllm_groups)
    groups = [_group_of(group, apart // spec_of(group).block_size) for group in vllm_groups]
    if not groups:
        raise InvalidRequest("the engine has no KV cache")
    return groups


def why_unkept(kv_cache_config: Any, vllm_config: Any) -> str:
    """Return why the states of recurrent layers cannot be kept, without which nothing of a prompt is a hit; empty where
    they can, and where there are none."""
    specs = [spec_of(group) for group in kv_cache_config.kv_cache_groups]
    mode = next((spec.mamba_cache_mode for spec in specs if kind_of(spec) == _STATE), None)
    if mode is None:
        return ""
    if mode != "align":
        return (
            f"mamba_cache_mode is {mode!r}: only with 'align', and prefix caching on, are states of recurrent layers "
            "kept at the ends of blocks and named"
        )
    sizes = sorted({spec.block_size for spec in specs})
    if len(sizes) > 1:
        return f"cache groups have blocks of {sizes} tokens beside recurrent state"
    speculative = vllm_config.speculative_config
    if speculative is not None:
        return f"with speculative decoding by {speculative.method} a recurrent state is one behind drafts"
    return ""


def _group_of(group: Any, stride: int) -> Group:
    spec, kind = spec_of(group), kind_of(spec_of(group))
    if group.is_eagle_group or getattr(spec, "extra_retained_tokens", 0):
        raise InvalidRequest("a cache group of a draft model (EAGLE, MTP) is not supported")
    if kind in _FULL:
        return Group(stride=stride)
    if kind == _STATE:
        return Group.of_state(stride)
    if kind == _CHUNKED:
        if spec.attention_chunk_size % spec.block_size:
            raise InvalidRequest(
                f"chunks of {spec.attention_chunk_size} tokens are no whole blocks of {spec.block_size}; {_ONE_CACHE}"
            )
        return Group.of_chunks(spec.attention_chunk_size, spec.block_size, stride)
    if kind != "SlidingWindowSpec":
        raise InvalidRequest(
            f"KV cache of kind {kind} is not supported, only full attention, MLA, sliding windows, chunked local "
            "attention and recurrent state are"
        )
    if spec.sliding_window < 2:
        raise InvalidRequest(f"a sliding window of {spec.sliding_window} tokens has no blocks to load")
    return Group.of_window(spec.sliding_window, spec.block_size, stride)


def extra_of(group: Any, groups: Sequence[Any]) -> dict[str, str]:
    """Return what sets the blocks of a group apart from those of the same model's others, for their namespace; nothing
    for the only one of full attention."""
    spec, kind = spec_of(group), kind_of(spec_of(group))
    if is_plain(groups):
        return {}
    extra = {
        KIND: kind,
        WINDOW: str(getattr(spec, "sliding_window", None) or "none"),
        LAYERS: hashlib.sha256("\0".join(group.layer_names).encode()).hexdigest()[:32],
    }
    full = next((each for each in groups if kind_of(spec_of(each)) in _FULL), None)
    if full is not None and len({spec_of(each).block_size for each in groups}) > 1:
        extra[FULL_TOKENS] = str(spec_of(full).block_size)
    if kind in _FULL and group is not full:
        extra[FURTHER] = "full"
    if kind == _CHUNKED:
        extra[CHUNK] = str(spec.attention_chunk_size)
    if kind == _STATE:
        parts = (f"{dtype} {tuple(shape)}" for dtype, shape in zip(spec.dtypes, spec.shapes, strict=True))
        extra[STATE] = f"{spec.mamba_type.name} {', '.join(parts)}"
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
    if speculative is not None and speculative.use_eagle():
        raise InvalidRequest(
            f"speculative decoding by {speculative.method} is not supported for several cache groups: its layers read "
            f"blocks before a window{advice}"
        )
