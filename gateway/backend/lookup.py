"""Buckets and objects as the gateway sees them, whichever way they were looked up. Concurrency: plain values."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvfs._native.shared.table import TIER_DRAM, Entry
from kvfs.formats import tier_of
from kvfs.index.rows import LINK, PINNED, ROW_ONLY, BucketRow, NameRow
from kvfs.protocol.messages import untext

NO_SLOT = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class BucketInfo:
    """A bucket, as the gateway needs to know it."""

    name: str
    bucket_id: int
    """0 where a session was asked, which does not answer it."""
    created_ns: int
    namespace: bytes | None
    """The digest of the namespace that it is bound to."""
    durable: bool = False


class ObjectLookup(NamedTuple):
    """An object, a symbolic link, a directory's marker or a block, as one look at the index saw it."""

    object_id: int
    """Differs between any two objects that ever had one name; of a block its sequence."""
    size_bytes: int
    mtime_ns: int
    user_metadata: bytes
    store_key: bytes
    tier: str = "dram"
    hits: int = 0
    pinned: bool = False
    marker: bool = False
    """Whether it is a directory's marker, whose body is in its user metadata."""
    block: bool = False
    slot: int = NO_SLOT
    generation: int = 0
    target: bytes = b""
    """Where a symbolic link leads, which is its body; of anything else empty."""


class ListedPage(NamedTuple):
    """A page: keys, or common prefixes with None, in order; `after` continues it, None at the end."""

    entries: list[tuple[str, ObjectLookup | None]]
    after: str | None


def bucket_of_row(row: BucketRow) -> BucketInfo:
    """Make a bucket from its row in the name index."""
    return BucketInfo(
        row.name.decode("utf-8", "surrogateescape"),
        row.bucket_id,
        row.created_ns,
        row.namespace,
        row.class_ == "durable",
    )


def bucket_of_values(values: dict[str, Any]) -> BucketInfo:
    """Make a bucket from a session's JSON object."""
    namespace = values["namespace"]
    return BucketInfo(
        values["name"],
        0,
        values["created_ns"],
        None if namespace is None else bytes.fromhex(namespace),
        values["durable"],
    )


def lookup_of_row(row: NameRow, entry: Entry | None) -> ObjectLookup:
    """Describe an object by its row and table entry, which is None for a marker or symbolic link."""
    if row.flags & LINK:
        key = _object_key(row.object_id)
        return ObjectLookup(
            row.object_id, row.size_bytes, row.mtime_ns, row.user_metadata, key, "index", target=row.target
        )
    if entry is None:
        return ObjectLookup(
            row.object_id, 0, row.mtime_ns, row.user_metadata, _object_key(row.object_id), marker=True
        )
    in_dram = bool(entry.tiers & TIER_DRAM)
    return ObjectLookup(
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


def is_in_row(row: NameRow) -> bool:
    """Return whether the row is all that there is: of a directory's marker, or a symbolic link."""
    return bool(row.flags & ROW_ONLY)


def lookup_of_values(values: dict[str, Any]) -> ObjectLookup | None:
    """Describe an object by a session's answer; return None for a directory that is only a common prefix."""
    metadata = base64.b64decode(values["user_metadata"])
    if values["directory"]:
        identity = values["marker_id"]
        if not identity:
            return None
        return ObjectLookup(identity, 0, values["mtime_ns"], metadata, _object_key(identity), marker=True)
    return ObjectLookup(
        values["object_id"],
        values["size_bytes"],
        values["mtime_ns"],
        metadata,
        b"" if values["block"] else _object_key(values["object_id"]),
        values["tier"],
        values["hits"],
        values["pinned"],
        block=values["block"],
        target=untext(values.get("target", "")),
    )


def _object_key(object_id: int) -> bytes:
    return object_id.to_bytes(16, "big")
