"""The values that cross the store's interface: names, attributes, objects, drafts, changes.

Responsibility: plain immutable data, no behaviour but derivation. `Draft` alone changes: it is a grant
that ends by seal or abort. Concurrency: used on the service's trio thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import trio

from tiers.base import Extent, StoreKey


@dataclass(frozen=True, slots=True, order=True)
class Name:
    """`bucket` and `key` as S3 sees them, UTF-8 bytes; a directory marker's key ends in `/`."""

    bucket: bytes
    key: bytes

    def __str__(self) -> str:
        return f"{self.bucket.decode(errors='replace')}/{self.key.decode(errors='replace')}"


@dataclass(frozen=True, slots=True)
class Attributes:
    """What the writer decides about an object besides its bytes. Times in nanoseconds since the epoch."""

    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime_ns: int | None = None
    """None: the moment of the seal."""
    ino: int | None = None
    """Keep this file id (a file rewritten in place); None: a new one."""
    pinned: bool = False
    user_metadata: bytes = b""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """A sealed object as one look at the index saw it."""

    name: Name | None
    """None for a block that was looked up by its prefix hash."""
    key: StoreKey
    extent: Extent | None
    """Where it is in DRAM; None while only a lower tier has it (`TieredStore.load` brings it up)."""
    tier: str
    """The highest tier that has it: `dram`, `nvme` or `cold`."""
    object_id: int
    ino: int
    size_bytes: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    ctime_ns: int
    sequence: int
    pinned: bool
    hits: int
    user_metadata: bytes = b""


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory of the path view: a marker, or only a common prefix (then the attributes are the bucket's)."""

    name: Name
    """The key ends in `/`, or is empty for the bucket itself."""
    ino: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    marker_id: int = 0
    """The id of its marker; 0: none."""
    user_metadata: bytes = b""
    ctime_ns: int = 0
    """0: as `mtime_ns`."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket and, where it is bound, the namespace whose blocks appear in it as `kv/<2 hex>/<32 hex>`."""

    name: bytes
    bucket_id: int
    """Never 0, never another bucket's."""
    durable: bool
    uid: int
    gid: int
    mode: int
    created_ns: int
    mtime_ns: int
    namespace: bytes | None
    """The 16-byte digest of the bound namespace."""
    admits_all: bool = True
    """Whether every object is written to NVMe; else only what was wanted before (`tiers.admission`)."""
    large: bool = False
    """Whether files made on the mount go to NVMe extent by extent, so that they may be larger than DRAM takes."""


@dataclass(slots=True)
class Draft:
    """An unsealed extent granted to one writer."""

    extent: Extent
    uid: int
    size_hint_bytes: int
    open: bool = field(default=True)


class ChangeKind(Enum):
    SEALED = "sealed"
    MOVED = "moved"
    """To or from DRAM: the same object, elsewhere."""
    REMOVED = "removed"
    RENAMED = "renamed"
    ATTRIBUTES = "attributes"


@dataclass(frozen=True, slots=True)
class Change:
    """What listeners of the store are told, after the fact. `evicted` tells a removal by policy from one asked for."""

    kind: ChangeKind
    name: Name | None
    key: StoreKey | None
    new_name: Name | None = None
    evicted: bool = False


@dataclass(frozen=True, slots=True)
class Unpublished:
    """A file of the mount that other doors do not see under its name yet, though a descriptor of it was closed."""

    ended: trio.Event
    """Set once it is published, or dropped."""
    was_answered: bool
    """A close of its writer was, or its rename: what had the name before must not be shown any more."""


@dataclass(frozen=True, slots=True)
class BlockPlaced:
    """A block came to a tier or left one; `before` and `after` are bits of the shared table (`TIER_DRAM`, ...)."""

    digest: bytes
    parent: bytes | None
    bucket: bytes
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Page:
    """One page of an ordered listing; `next_after` continues it, None at the end."""

    entries: list[tuple[bytes, ObjectInfo | Directory]]
    """Keys, or common prefixes ending in the delimiter, each with what it names."""
    next_after: bytes | None


@dataclass(frozen=True, slots=True)
class NamePage:
    """One page of a directory's names alone: tails, which end in `/` where they are directories, with inode numbers."""

    entries: list[tuple[bytes, int]]
    next_after: bytes | None
