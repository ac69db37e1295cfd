"""What the gateway knows of buckets and objects, however it was looked up. Concurrency: plain values."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvfs._native.table import TIER_DRAM, Entry
from kvfs.formats import tier_of
from kvfs.name_rows import DIRECTORY, PINNED, BucketRow, NameRow

NO_SLOT = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class BucketInfo:
    name: str
    bucket_id: int
    """0 where it was asked of a session, which does not say it."""
    created_ns: int
    namespace: bytes | None
    """The digest of the namespace that it is bound to."""


class Found(NamedTuple):
    """An object, a directory's marker or a block, as one look at the index saw it."""

    object_id: int
    """Of a block its sequence. Differs between any two objects that ever had one name."""
    size_bytes: int
    mtime_ns: int
    user_metadata: bytes
    store_key: bytes
    tier: str = "dram"
    hits: int = 0
    pinned: bool = False
    marker: bool = False
    """A directory's marker: what it has is in its user metadata."""
    block: bool = False
    slot: int = NO_SLOT
    generation: int = 0


class Listed(NamedTuple):
    """A page: keys, or common prefixes with None, in order; `after` continues it, None at the end."""

    entries: list[tuple[str, Found | None]]
    after: str | None


def bucket_of_row(row: BucketRow) -> BucketInfo:
    return BucketInfo(
        row.name.decode("utf-8", "surrogateescape"),
        row.bucket_id,
        row.created_ns,
        row.namespace,
    )


def bucket_of_object(values: dict[str, Any]) -> BucketInfo:
    namespace = values["namespace"]
    return BucketInfo(
        values["name"],
        0,
        values["created_ns"],
        None if namespace is None else bytes.fromhex(namespace),
    )


def found_of_row(row: NameRow, entry: Entry | None) -> Found:
    """`entry` is None for a marker."""
    if entry is None:
        return Found(
            row.object_id, 0, row.mtime_ns, row.user_metadata, _object_key(row.object_id), marker=True
        )
    in_dram = bool(entry.tiers & TIER_DRAM)
    return Found(
        row.object_id,
        row.size_bytes,
        row.mtime_ns,
        row.user_metadata,
        _object_key(row.object_id),
        tier_of(entry.tiers),
        entry.hits,
        bool(row.flags & PINNED),
        slot=entry.slot if in_dram else NO_SLOT,
        generation=entry.generation,
    )


def is_marker(row: NameRow) -> bool:
    return bool(row.flags & DIRECTORY)


def found_of_object(values: dict[str, Any]) -> Found | None:
    """Of a session's entry; None for a directory that is only a common prefix."""
    metadata = base64.b64decode(values["user_metadata"])
    if values["directory"]:
        identity = values["marker_id"]
        if not identity:
            return None
        return Found(identity, 0, values["mtime_ns"], metadata, _object_key(identity), marker=True)
    return Found(
        values["object_id"],
        values["size_bytes"],
        values["mtime_ns"],
        metadata,
        b"" if values["block"] else _object_key(values["object_id"]),
        values["tier"],
        values["hits"],
        values["pinned"],
        block=values["block"],
    )


def _object_key(object_id: int) -> bytes:
    return object_id.to_bytes(16, "big")
