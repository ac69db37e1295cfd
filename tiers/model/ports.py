"""The ports of a tier: what callers may expect of it, each port for what it is used for.

A conformance suite (tests/conformance) runs over every tier that has the port.

Invariants (each has a conformance test):
- `WritableTier`: nothing is readable before `seal`; after `abort` nothing stays.
- `ReadableTier`: an `Extent` names its slot *and generation*: once freed it raises `Superseded`, it never shows other
  bytes. `free` never waits for a lease holder: held bytes are detached and stay charged until the kernel frees them.
- Used bytes are physical, and never pass the capacity.

Concurrency: a tier is called from the service's trio thread only. Calls that may wait for a device are
async; all others return at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, Self

from tiers.model.tier import Extent, Sealed, SealHeader, Usage


class Lease(Protocol):
    """The right to read a sealed extent in place, until closed. Closing twice is harmless."""

    size_bytes: int

    def fileno(self) -> int:
        """Return a read-only descriptor of the payload, which starts at offset 0."""
        ...

    async def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from `offset`; return the count read, short only at the end."""
        ...

    def close(self) -> None:
        """End the lease."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class WritableTier(Protocol):
    """Grants drafts, and seals them."""

    def usage(self) -> Usage:
        """Measure what is used."""
        ...

    def reserve(self, size_bytes: int = 0) -> Extent:
        """Reserve an empty draft, and `size_bytes` for it until it is sealed. Raises NoSpace, ObjectTooLarge."""
        ...

    def open_draft(self, draft: Extent) -> int:
        """Open the draft's payload for writing; the caller closes the descriptor. Raises Superseded."""
        ...

    def seal(self, draft: Extent, header: SealHeader) -> Sealed:
        """Make the draft immutable. Raises WriterActive while anyone can still write it, Superseded."""
        ...

    def abort(self, draft: Extent) -> None:
        """Free the draft, whoever still has it open."""
        ...


class ReadableTier(Protocol):
    """Shows sealed extents in place, and frees them."""

    def lease(self, extent: Extent) -> Lease:
        """Lease a sealed extent. Raises Superseded when it is no longer that object."""
        ...

    def held(self, extent: Extent) -> bool:
        """Return whether anyone but the service has the extent open or mapped now."""
        ...

    def free(self, extent: Extent, *, charge_uid: int = 0) -> int:
        """Free a sealed extent; return the bytes that stay held, charged to `charge_uid`, 0 if all are free."""
        ...

    def charged_bytes(self, uid: int) -> int:
        """Return the held bytes that are charged to `uid`."""
        ...

    def sweep(self) -> int:
        """Free what holders have closed since; return the bytes that became free."""
        ...

    def checksum(self, extent: Extent) -> int | None:
        """Return the payload's XXH3-64; None while it is still being computed."""
        ...

    def sealed(self) -> Iterator[Sealed]:
        """Yield every sealed extent, in slot order."""
        ...


class LowerTier(Protocol):
    """Keeps copies of sealed objects, and evicts some for others."""

    @property
    def capacity_bytes(self) -> int:
        """Return the limit of `used_bytes`."""

    @property
    def used_bytes(self) -> int:
        """Physical bytes in use, of copies on their way out, too."""
        ...

    @property
    def largest_object_bytes(self) -> int:
        """Size above which an object is not taken."""
        ...
