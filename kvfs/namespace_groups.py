"""What a namespace says of the layers whose blocks it names, where a model has several kinds of attention.

Responsibility: the names of these fields of `extra`, and what they mean to those who follow a store. A connector gives
each cache group of such a model a namespace of its own; the fields say what sets one apart from the others.

Invariants: namespaces of one cache have one `model`, whatever their groups are; so have those of a cache whose layers
another release of the engine has grouped otherwise. A namespace without these fields is of all layers. Concurrency:
pure functions.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from kvfs.limits import MAX_WINDOW_TOKENS
from kvfs.namespaces import DIGEST_BYTES, Namespace

KIND: Final = "group_kind"
"""The name of vLLM's class that describes the layers' cache."""
WINDOW: Final = "group_window"
"""Tokens of a sliding window, or `none`."""
LAYERS: Final = "group_layers"
FULL_TOKENS: Final = "full_tokens"
"""Tokens of a block of full attention, of the first group of it; said where groups have blocks of different sizes."""
FURTHER: Final = "group_further"
"""Said of groups of full attention beside the first one, by whose keys prompts are looked up: `full`."""
CHUNK: Final = "group_chunk"
"""Tokens of a chunk of chunked local attention."""
STATE: Final = "group_state"
CACHE: Final = "cache"
"""How a layer's blocks lie in the engine's memory."""
BACKEND: Final = "backend"
"""Who computes the layers."""

_SPOKEN_KINDS: Final = {
    "FullAttentionSpec": "full_attention",
    "MLAAttentionSpec": "mla_attention",
    "SlidingWindowSpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "chunked_local_attention",
    "MambaSpec": "mamba",
}
FULL_KINDS: Final = frozenset(("full_attention", "mla_attention"))
"""Of layers that read everything before a token, by the names that KV events have for them."""
_OF_GROUPS: Final = frozenset(
    ("dtype", "layout", KIND, WINDOW, LAYERS, FURTHER, CHUNK, STATE, CACHE, BACKEND)
)
"""In what the groups of one cache may differ; in their number of tokens, too, where they say that of full attention."""


class NamespaceGroup(NamedTuple):
    """A cache group whose blocks a namespace names."""

    model: bytes
    """16 bytes, the same for all groups of one cache."""
    kind: str
    """By the name that KV events have for it, vLLM's KVCacheSpecKind."""
    window_tokens: int | None
    layers: str
    """Which layers it has."""
    chunk_tokens: int | None
    is_further: bool
    """Whether it is of full attention, and prompts are looked up by another such group."""

    @property
    def is_full(self) -> bool:
        """Return whether its layers read everything before a token."""
        return self.kind in FULL_KINDS

    @property
    def number(self) -> int | None:
        """Return the number that its layers have in KV events, from 1 on, in every store; None of the first group whose
        layers read everything."""
        return number_of(self.kind, self.window_tokens, self.layers, is_further=self.is_further)


def number_of(kind: str, window_tokens: int | None, layers: str, *, is_further: bool) -> int | None:
    """Return the number of a cache group in a store's KV events, as `NamespaceGroup` has these fields."""
    is_first = kind in FULL_KINDS and not is_further
    return None if is_first else 1 + zlib.crc32(f"{kind} {window_tokens} {layers}".encode())


def describe_groups(namespaces: Mapping[int, Namespace]) -> list[dict[str, Any]]:
    """Return what a Conductor is told of an engine's cache groups, as JSON values; nothing where one is of all layers.

    `namespaces`: of one worker, by the engine's number of the group. `scheduler.conductor.values.CacheGroup` reads it.
    """
    found = {group: group_in(namespace) for group, namespace in sorted(namespaces.items())}
    described = [
        {
            "group": group,
            "kind": each.kind,
            "block_tokens": namespaces[group].block_tokens,
            "layers": each.layers,
            "window_tokens": each.window_tokens,
            "chunk_tokens": each.chunk_tokens,
        }
        for group, each in found.items()
        if each is not None
    ]
    return described if len(described) == len(found) else []


def group_in(namespace: Namespace) -> NamespaceGroup | None:
    """Return the cache group of a namespace; None where it is of all layers."""
    kind = _SPOKEN_KINDS.get(namespace.extra.get(KIND, ""))
    if kind is None:
        return None
    fields = namespace.as_mapping()
    apart = _OF_GROUPS | {"extra"} | ({"block_tokens"} if FULL_TOKENS in namespace.extra else set())
    shared = [{name: some[name] for name in some.keys() - apart} for some in (fields, fields["extra"])]
    canonical = json.dumps(shared, sort_keys=True, separators=(",", ":")).encode("ascii")
    return NamespaceGroup(
        hashlib.sha256(canonical).digest()[:DIGEST_BYTES],
        kind,
        _tokens_in(namespace, WINDOW),
        namespace.extra.get(LAYERS, ""),
        _tokens_in(namespace, CHUNK),
        kind in FULL_KINDS and FURTHER in namespace.extra,
    )


def _tokens_in(namespace: Namespace, name: str) -> int | None:
    """Return a number of tokens, None where a field is none."""
    value = namespace.extra.get(name, "")
    is_number = value.isascii() and value.isdecimal() and len(value) <= len(str(MAX_WINDOW_TOKENS))
    return int(value) if is_number else None
