"""The small values that cross a tier's interface: keys, extents, headers, usage.

Invariants: an `Extent` names its slot *and generation*: once freed it raises `Superseded`, it never shows other bytes.
Concurrency: plain values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Kind(IntEnum):
    """Says what a 16-byte store key is: the prefix hash of a block, or the id of a named object."""

    OBJECT = 1
    BLOCK = 2


@dataclass(frozen=True, slots=True)
class StoreKey:
    """Identifies an object in the index by 16 bytes, a prefix hash or `object_key(object_id)`."""

    kind: Kind
    digest: bytes


def object_digest(object_id: int) -> bytes:
    """Return the digest of a named object's store key."""
    return object_id.to_bytes(16, "big")


def object_key(object_id: int) -> StoreKey:
    """Make the store key of a named object: eight zero bytes, then the id, big-endian."""
    return StoreKey(Kind.OBJECT, object_digest(object_id))


@dataclass(frozen=True, slots=True)
class Extent:
    """Says where something is in a tier: slot and generation. Odd generations are drafts, even ones are sealed."""

    slot: int
    generation: int


NO_SLOT = (1 << 32) - 1
"""`slot` of a table entry whose object is not in DRAM."""


@dataclass(frozen=True, slots=True)
class SealHeader:
    """Holds what the slot header records at the seal, enough to take the slot over without any index."""

    key: StoreKey
    object_id: int
    sequence: int
    parent: bytes = bytes(16)
    """Prefix hash of the block before this one; zeros for named objects and first blocks."""
    flags: int = 0
    uid: int = 0
    """Who wrote it."""
    bucket_id: int = 0
    """Of the bucket that a block was sealed into; 0 for named objects, whose rows say it."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """Describes a sealed extent as its header does."""

    extent: Extent
    header: SealHeader
    size_bytes: int
    checksum: int | None
    """XXH3-64 of the payload; None until it has been computed."""
    sealed_at_ns: int = 0
    """Realtime clock."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Measures one tier, in physical bytes."""

    capacity_bytes: int
    used_bytes: int
    held_bytes: int
    """Part of used_bytes: unlinked, but still open or mapped by somebody."""
    slots: int
    max_slots: int
    largest_object_bytes: int
