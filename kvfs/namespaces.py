"""Namespaces: the typed scope of prefix hashes, and its canonical bytes.

Responsibility: describe everything that decides the bytes of a block, refuse a missing or unknown field, and digest the
description to 128 bits. docs/keys.md specifies the encoding to the byte.

Invariants: two namespaces are equal exactly if their canonical bytes are; no field has a default that stands for
"unknown". Concurrency: immutable values.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final

from kvfs.errors import InvalidNamespace
from kvfs.limits import MAX_BLOCK_TOKENS, MAX_NAMESPACE_BYTES, MAX_SHARDS

NAMESPACE_TAG: Final = b"kvfs namespace 1"
"""Domain tag of the digest; its last byte is the version of the encoding."""
DIGEST_BYTES: Final = 16

DTYPES: Final = frozenset(
    (
        "bfloat16",
        "float16",
        "float32",
        "float4_e2m1",
        "float8_e4m3",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "int4",
        "int8",
    )
)
"""Element types of a block. Scales of quantised types belong to the block; an extra field describes their place."""

LAYOUT_AXES: Final = ("LKTHD", "LTC")
"""A layout is one of these sets of axes in the order of memory, outermost first: L layer, K key then value,
T token, H key-value head, D element of a head; C the compressed latent of MLA, which has neither K nor H."""

HASHES: Final = frozenset(("sha256", "xxh3_128"))

_EXTRA_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")


def _check_text(name: str, value: object, *, empty: bool) -> None:
    if not isinstance(value, str):
        raise InvalidNamespace(f"namespace field {name} is {value!r}, not a string")
    if not value and not empty:
        raise InvalidNamespace(f"namespace field {name} is empty")
    if found := _UNPRINTABLE.search(value):
        raise InvalidNamespace(f"namespace field {name} holds {found[0]!r}; control characters are refused")


def _check_number(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise InvalidNamespace(f"namespace field {name} is {value!r}, not a number from {low} to {high}")


def _check_choice(name: str, value: object, choices: frozenset[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise InvalidNamespace(
            f"namespace field {name} is {value!r}, not one of {', '.join(sorted(choices))}"
        )


def _check_layout(value: object) -> None:
    if not isinstance(value, str) or "".join(sorted(value)) not in {"".join(sorted(a)) for a in LAYOUT_AXES}:
        raise InvalidNamespace(
            f"namespace field layout is {value!r}, not the axes {' or '.join(LAYOUT_AXES)} in some order"
        )


def _check_extra(extra: object) -> Mapping[str, str]:
    if not isinstance(extra, Mapping):
        raise InvalidNamespace(f"namespace field extra is {extra!r}, not a mapping of names to strings")
    for name, value in extra.items():
        if not isinstance(name, str) or not _EXTRA_NAME.fullmatch(name):
            raise InvalidNamespace(
                f"name {name!r} in namespace field extra does not match {_EXTRA_NAME.pattern}"
            )
        _check_text(f"extra.{name}", value, empty=True)
    return MappingProxyType(dict(sorted(extra.items())))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Namespace:
    """Everything that decides a block's bytes besides its tokens and the tokens before it.

    Raises InvalidNamespace naming a field whose value is unknown or malformed.
    """

    model: str
    """The model's name, as its engine knows it."""
    revision: str
    """The weights: a commit or a checksum, not a name that may change its meaning."""
    dtype: str
    """One of DTYPES."""
    layout: str
    """The order of the axes in a block, see LAYOUT_AXES."""
    block_tokens: int
    tensor_shards: int
    tensor_rank: int
    pipeline_shards: int
    pipeline_rank: int
    lora: str
    """The adapter and its revision; empty for none."""
    salt: str
    """Separates tenants or experiments; empty for none."""
    hash: str
    """The prefix hash: `sha256`, or `xxh3_128` inside one trust domain."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Whatever else decides the bytes, as strings."""

    canonical: bytes = field(init=False, repr=False)
    """The canonical encoding, ASCII JSON."""
    digest: bytes = field(init=False, repr=False)
    """16 bytes: the parent of every first block."""

    def __post_init__(self) -> None:
        _check_text("model", self.model, empty=False)
        _check_text("revision", self.revision, empty=False)
        _check_choice("dtype", self.dtype, DTYPES)
        _check_layout(self.layout)
        _check_number("block_tokens", self.block_tokens, 1, MAX_BLOCK_TOKENS)
        for axis in ("tensor", "pipeline"):
            shards = getattr(self, f"{axis}_shards")
            _check_number(f"{axis}_shards", shards, 1, MAX_SHARDS)
            _check_number(f"{axis}_rank", getattr(self, f"{axis}_rank"), 0, shards - 1)
        _check_text("lora", self.lora, empty=True)
        _check_text("salt", self.salt, empty=True)
        _check_choice("hash", self.hash, HASHES)
        object.__setattr__(self, "extra", _check_extra(self.extra))
        canonical = json.dumps(self.as_mapping(), sort_keys=True, separators=(",", ":")).encode("ascii")
        if len(canonical) > MAX_NAMESPACE_BYTES:
            raise InvalidNamespace(f"namespace of {len(canonical)} bytes, the limit is {MAX_NAMESPACE_BYTES}")
        object.__setattr__(self, "canonical", canonical)
        object.__setattr__(self, "digest", hashlib.sha256(NAMESPACE_TAG + canonical).digest()[:DIGEST_BYTES])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.canonical == other.canonical

    def __hash__(self) -> int:
        return hash(self.digest)

    def as_mapping(self) -> dict[str, Any]:
        """Return the fields as plain values, for JSON; `from_mapping` takes them back."""
        return {name: getattr(self, name) for name in _REQUIRED} | {"extra": dict(self.extra)}

    @classmethod
    def of_one_device(cls, **fields: Any) -> Namespace:
        """Make a namespace of blocks that hold all of a model's heads and layers, without adapter or salt, named by
        SHA-256; `fields` are the others. Raises InvalidNamespace naming the field."""
        whole = {"tensor_shards": 1, "tensor_rank": 0, "pipeline_shards": 1, "pipeline_rank": 0}
        return cls.from_mapping({**whole, "lora": "", "salt": "", "hash": "sha256", **fields})

    @classmethod
    def from_mapping(cls, description: Mapping[str, Any]) -> Namespace:
        """Make a namespace of a mapping, which has every field (`extra` is optional) and no other. Raises
        InvalidNamespace naming the field."""
        for name in _REQUIRED:
            if name not in description:
                raise InvalidNamespace(f"namespace field {name} is missing")
        for name in description:
            if name not in _REQUIRED and name != "extra":
                raise InvalidNamespace(
                    f"namespace field {name!r} is unknown; fields of your own go into extra"
                )
        return cls(**description)

    @classmethod
    def from_json(cls, text: bytes | str) -> Namespace:
        """Make a namespace of a JSON object, canonical or not. Raises InvalidNamespace."""
        if len(text) > MAX_NAMESPACE_BYTES:
            raise InvalidNamespace(f"namespace of {len(text)} bytes, the limit is {MAX_NAMESPACE_BYTES}")
        try:
            description = json.loads(text, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise InvalidNamespace(f"namespace is no JSON: {error}") from None
        if not isinstance(description, dict):
            raise InvalidNamespace("namespace is no JSON object")
        return cls.from_mapping(description)


_REQUIRED: Final = tuple(each.name for each in fields(Namespace) if each.init and each.name != "extra")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a mapping of a JSON object; refuse a repeated field, since parsers differ in which one they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidNamespace(f"namespace field {twice!r} is given twice")
    return found
