"""The values that cross the store's interface: names, attributes, objects, drafts, changes.

Responsibility: plain immutable data, no behaviour but derivation. `Draft` alone changes: it is a grant
that ends by seal or abort. Concurrency: used on the service's trio thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import NamedTuple

import trio

from kvfs import paths
from tiers.model.tier import Extent, StoreKey


@dataclass(frozen=True, slots=True, order=True)
class Name:
    """Names an object by `bucket` and `key` as S3 does, UTF-8 bytes; a directory marker's key ends in `/`."""

    bucket: bytes
    key: bytes

    def __str__(self) -> str:
        return f"{self.bucket.decode(errors='replace')}/{self.key.decode(errors='replace')}"


def unit_of(name: Name) -> bytes | None:
    """Return the eviction group of a name: the directory whose files are useful only together."""
    unit = paths.unit_prefix(name.key)
    return name.bucket + b"\0" + unit if unit else None


@dataclass(frozen=True, slots=True)
class Attributes:
    """Holds what the writer decides about an object besides its bytes. Times in nanoseconds since the epoch."""

    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime_ns: int | None = None
    """None: the moment of the seal."""
    ctime_ns: int | None = None
    """None: the moment of the seal."""
    ino: int | None = None
    """Keep this file id (a file rewritten in place); None: a new one."""
    pinned: bool = False
    user_metadata: bytes = b""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Describes a sealed object as one look at the index saw it."""

    name: Name | None
    """None for a block that was looked up by its prefix hash."""
    key: StoreKey
    extent: Extent | None
    """Where it is in DRAM; None while only a lower tier has it (`Store.load` brings it up)."""
    tier: str
    """The highest tier that has it: `dram`, `nvme` or `cold`; of a symbolic link `index`."""
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
    target: bytes = b""
    """Where it leads, if it is a symbolic link, which has no bytes in any tier; else empty."""

    def renamed(self, name: Name) -> ObjectInfo:
        """Return it under another name, in a third of the time that dataclasses.replace takes."""
        return ObjectInfo(name, *_FIELDS_BEHIND_NAME(self))


_FIELDS_BEHIND_NAME = attrgetter(*ObjectInfo.__slots__[1:])


@dataclass(frozen=True, slots=True)
class Directory:
    """Describes a directory of the path view: a marker, or a common prefix with the bucket's attributes."""

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
    """Describes a bucket and, where it is bound, the namespace whose blocks are in it as `kv/<2 hex>/<32 hex>`."""

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
    """Whether every object is written to NVMe; else only what was wanted before (`tiers.eviction.admission`)."""
    large: bool = False
    """Whether files made on the mount go to NVMe extent by extent, so that they may be larger than DRAM takes."""


class Bound(NamedTuple):
    """What a bucket of a namespace holds."""

    model: str
    blocks: int
    size_bytes: int


@dataclass(slots=True)
class Draft:
    """Grants an unsealed extent to one writer."""

    extent: Extent
    uid: int
    size_hint_bytes: int
    open: bool = field(default=True)


class ChangeKind(Enum):
    """Says what happened to an object or a name."""

    SEALED = "sealed"
    MOVED = "moved"
    """To or from DRAM: the same object, elsewhere."""
    REMOVED = "removed"
    RENAMED = "renamed"
    ATTRIBUTES = "attributes"


@dataclass(frozen=True, slots=True)
class Change:
    """Notifies listeners of the store, after the fact. `evicted`: removed by policy, not by a user."""

    kind: ChangeKind
    name: Name | None
    key: StoreKey | None
    new_name: Name | None = None
    evicted: bool = False


@dataclass(frozen=True, slots=True)
class Unpublished:
    """Describes a file of the mount that was closed, and that other doors do not see under its name yet."""

    ended: trio.Event
    """Set once it is published, or dropped."""
    was_answered: bool
    """Whether its close or rename was answered: what had the name before must not be shown any more."""


@dataclass(frozen=True, slots=True)
class BlockPlaced:
    """Says that a block came to a tier or went from one; `before` and `after` are bits of the shared table."""

    digest: bytes
    parent: bytes | None
    bucket: bytes
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Page:
    """Holds one page of an ordered listing; `next_after` continues it, None at the end."""

    entries: list[tuple[bytes, ObjectInfo | Directory]]
    """Keys, or common prefixes ending in the delimiter, each with what it names."""
    next_after: bytes | None


ListedName = tuple[bytes, int, bool]
"""Tail, which ends in `/` for a directory, inode number, and whether it is a symbolic link."""


@dataclass(frozen=True, slots=True)
class NamePage:
    """Holds one page of a directory's names."""

    entries: list[ListedName]
    next_after: bytes | None
