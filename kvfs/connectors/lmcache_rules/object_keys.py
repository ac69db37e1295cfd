"""What an object of LMCache is stored under: all that makes its bytes differ, as far as LMCache says it.

    b"\\xff" + JSON [model, rank, object group, salt, layout] + b"\\0" + hash
    model \\0 rank \\0 object group \\0 salt \\0 hash                           a bare key: it has no layout

Responsibility: make the keys of an object that is stored, looked up, loaded or removed. LMCache's ObjectKey names the
model, the rank of so many, the object group, the user's salt and a hash over the prefix and the chunk; it does not say
which shapes and element types the parts of an object have. A store and a load have these with the object, a look-up by
group; a removal has none, so that layouts which were seen are remembered. Where LMCache transforms objects on their way
(`serde`), stores and loads have buffers of bytes, and look-ups the layouts of what becomes of them: such objects have a
key that says so, and no layout.

Invariants: no two different objects have one key. Nothing is stored under a bare key; what a store has under some is
read where a model has one object group, if it has the size of the layout. Concurrency: any thread.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

from kvfs.limits import CONNECTOR_LAYOUTS

_SERIALISED: Final = "serialised"
_NOT_TEXT: Final = b"\xff"
"""No byte of UTF-8, with which bare keys begin."""


class Layout(NamedTuple):
    """The memory of an object."""

    name: str
    """Element type and shape of each of its parts."""
    size_bytes: int
    is_serialised: bool = False
    """Whether it is a buffer of bytes, whose size says nothing."""


class Name(NamedTuple):
    """A digest that an object may be stored under."""

    digest: bytes
    size_bytes: int | None
    """What an object has that is stored under it; None where that is not known."""


def layout_of(described: Any) -> Layout:
    """Return the layout that LMCache describes by `shapes` and `dtypes`."""
    return _layout(tuple(map(tuple, described.shapes)), tuple(described.dtypes))


def object_layout(memory: Any) -> Layout:
    """Return the layout of an object in LMCache's memory."""
    return _layout(tuple(map(tuple, memory.get_shapes())), tuple(memory.get_dtypes()))


@lru_cache(maxsize=CONNECTOR_LAYOUTS)
def _layout(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[Any, ...]) -> Layout:
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    if None in dtypes or (names == ["uint8"] and len(shapes[0]) == 1):
        return Layout(_SERIALISED, 0, True)
    size_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    parts = (f"{name}{list(shape)}" for name, shape in zip(names, shapes, strict=True))
    return Layout(" ".join(parts), size_bytes)


def key_bytes(key: Any, layout: str) -> bytes:
    """Encode all fields of an ObjectKey, and the name of a layout; the hash, which may hold any byte, comes last."""
    fields = [key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, layout]
    return b"".join((_NOT_TEXT, json.dumps(fields).encode(), b"\0", bytes(key.chunk_hash)))


def bare_key_bytes(key: Any) -> bytes:
    """Encode an ObjectKey without a layout."""
    fields = f"{key.model_name}\0{key.kv_rank}\0{key.object_group_id}\0{key.cache_salt}\0"
    return fields.encode() + bytes(key.chunk_hash)


@dataclass(frozen=True)
class _Known:
    """Layouts that were seen; replaced as a whole, so that it is read without a lock."""

    layouts: Mapping[tuple[str, int], tuple[Layout, ...]]
    """By model and object group."""
    several: frozenset[str]
    """Models that have more than one object group."""


class ObjectKeys:
    """Make digests of objects by `digest`, and remember the layouts of CONNECTOR_LAYOUTS groups."""

    def __init__(self, digest: Callable[[bytes], bytes]) -> None:
        self._digest = digest
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, int, str], Layout] = {}
        self._known = _Known({}, frozenset())
        self._serialised: bool | None = None
        """Whether LMCache transforms objects; None before the first one was stored or loaded."""

    def stored(self, key: Any, layout: Layout) -> bytes:
        """Return the digest to store an object under."""
        self._serialised = layout.is_serialised
        if not layout.is_serialised:
            self._note(key, layout)
        return self._digest(key_bytes(key, layout.name))

    def loaded(self, key: Any, layout: Layout) -> list[bytes]:
        """Return the digests that an object may be loaded from."""
        digest = self.stored(key, layout)
        return [digest, self._bare(key)] if self._is_single(key) else [digest]

    def looked_up(self, key: Any, layouts: Mapping[int, Layout]) -> list[Name]:
        """Return what an object may be stored under; `layouts` are those of the object groups, as far as known."""
        given = layouts.get(key.object_group_id)
        some = self._known_layouts(key) if given is None else (given,)
        names = []
        if not self._serialised:
            names += [Name(self._digest(key_bytes(key, each.name)), each.size_bytes) for each in some]
        if self._serialised is not False:
            names.append(Name(self._digest(key_bytes(key, _SERIALISED)), None))
        if self._is_single(key):
            size_bytes = given.size_bytes if given is not None and self._serialised is False else None
            names.append(Name(self._bare(key), size_bytes))
        return names

    def removed(self, key: Any) -> list[bytes]:
        """Return all digests that an object may be stored under, as far as known."""
        names = [*(each.name for each in self._known_layouts(key)), _SERIALISED]
        return [*(self._digest(key_bytes(key, name)) for name in names), self._bare(key)]

    def note_groups(self, keys: Sequence[Any], layouts: Mapping[int, Layout]) -> None:
        """Remember the layouts of the object groups of the keys' models."""
        for key in {(key.model_name, key.object_group_id): key for key in keys}.values():
            if (layout := layouts.get(key.object_group_id)) is not None:
                self._note(key, layout)

    def _note(self, key: Any, layout: Layout) -> None:
        place = (key.model_name, key.object_group_id, layout.name)
        if place in self._seen:
            return
        with self._lock:
            self._seen[place] = layout
            while len(self._seen) > CONNECTOR_LAYOUTS:
                del self._seen[next(iter(self._seen))]
            groups: dict[tuple[str, int], tuple[Layout, ...]] = {}
            for (model, group, _), each in self._seen.items():
                groups[model, group] = (*groups.get((model, group), ()), each)
            self._known = _Known(groups, frozenset(model for model, group in groups if group > 0))

    def _known_layouts(self, key: Any) -> tuple[Layout, ...]:
        return self._known.layouts.get((key.model_name, key.object_group_id), ())

    def _is_single(self, key: Any) -> bool:
        return key.object_group_id == 0 and key.model_name not in self._known.several

    def _bare(self, key: Any) -> bytes:
        return self._digest(bare_key_bytes(key))
