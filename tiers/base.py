"""The interface that every tier implements, and the small values that cross it.

Responsibility: say what a tier promises; hold no behaviour of its own. `tests/conformance` runs the same
suite over every implementation.

Invariants (each has a conformance test):
- Nothing is readable before `seal`; after `abort` nothing is left.
- `Usage.used_bytes` counts physical bytes and never passes `capacity_bytes`.
- An `Extent` names its slot *and generation*: once freed it raises `Superseded`, it never shows other bytes.
- `free` never waits for a lease holder: held bytes are detached and stay charged until the kernel frees them.

Concurrency: a tier is called from the service's trio thread only. Calls that may wait for a device are
async; all others return at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Protocol, Self


class Kind(IntEnum):
    """What a 16-byte store key is: the prefix hash of a block, or the id of a named object."""

    OBJECT = 1
    BLOCK = 2


@dataclass(frozen=True, slots=True)
class StoreKey:
    """The key of an object in the index: 16 bytes, a prefix hash or `object_key(object_id)`."""

    kind: Kind
    digest: bytes


def object_digest(object_id: int) -> bytes:
    """The digest of a named object's store key."""
    return object_id.to_bytes(16, "big")


def object_key(object_id: int) -> StoreKey:
    """The store key of a named object: eight zero bytes, then the id, big-endian."""
    return StoreKey(Kind.OBJECT, object_digest(object_id))


@dataclass(frozen=True, slots=True)
class Extent:
    """A place in a tier: slot number and its generation. Odd generations are drafts, even ones are sealed."""

    slot: int
    generation: int


NO_SLOT = (1 << 32) - 1
"""`slot` of a table entry whose object is not in DRAM."""


@dataclass(frozen=True, slots=True)
class SealHeader:
    """What the slot header records at the seal, enough to adopt the slot without any index."""

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
    """A sealed extent as its header describes it."""

    extent: Extent
    header: SealHeader
    size_bytes: int
    checksum: int | None
    """XXH3-64 of the payload; None until it has been computed."""
    sealed_at_ns: int = 0
    """Realtime clock."""


@dataclass(frozen=True, slots=True)
class Usage:
    """One tier's capacity, in physical bytes."""

    capacity_bytes: int
    used_bytes: int
    held_bytes: int
    """Part of used_bytes: unlinked, but still open or mapped by somebody."""
    slots: int
    max_slots: int
    largest_object_bytes: int


class Lease(Protocol):
    """The right to read a sealed extent in place, until closed. Closing twice is harmless."""

    size_bytes: int

    def fileno(self) -> int:
        """A read-only descriptor of the payload, which starts at offset 0."""
        ...

    async def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from `offset`; the count read, short only at the end."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Tier(Protocol):
    """One kind of storage with one capacity."""

    name: str

    def usage(self) -> Usage: ...

    def reserve(self, size_bytes: int = 0) -> Extent:
        """An empty draft. `size_bytes` is a hint of what will be written. Raises NoSpace, ObjectTooLarge."""
        ...

    def open_draft(self, draft: Extent) -> int:
        """A read-write descriptor of the draft's payload; the caller closes it. Raises Superseded."""
        ...

    def seal(self, draft: Extent, header: SealHeader) -> Sealed:
        """Make the draft immutable. Raises WriterActive while anyone can still write it, Superseded."""
        ...

    def abort(self, draft: Extent) -> None:
        """Give the draft back, whoever still has it open."""
        ...

    def lease(self, extent: Extent) -> Lease:
        """Raises Superseded when the extent is no longer that object."""
        ...

    def held(self, extent: Extent) -> bool:
        """Whether anyone but the service has the extent open or mapped now."""
        ...

    def free(self, extent: Extent, *, charge_uid: int = 0) -> int:
        """Give a sealed extent back. The bytes that stay held, charged to `charge_uid`; 0 when all are free."""
        ...

    def charged_bytes(self, uid: int) -> int:
        """Held bytes charged to `uid`."""
        ...

    def sweep(self) -> int:
        """Drop what holders have let go since; the bytes that became free."""
        ...

    def checksum(self, extent: Extent) -> int | None:
        """The payload's XXH3-64; None while it is still being computed."""
        ...

    def sealed(self) -> Iterator[Sealed]:
        """Every sealed extent, in slot order."""
        ...

    def close(self) -> None: ...
