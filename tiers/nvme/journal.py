"""The journal: changes of the store, reported to a tier that outlives it.

Responsibility: the interface, which `Journal` itself implements as the null object: a store that keeps its objects in
DRAM only, where nothing is written and everything is settled. `tiers.nvme.write_behind` is the one with the NVMe tier.
`Residents` is what that one asks of the store.

Concurrency: the service's trio thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import trio

from kvfs.errors import DeviceMissing, NotFound, Superseded
from kvfs.index.rows import BucketRow, NameRow
from tiers.model.objects import Bucket, Name, ObjectInfo
from tiers.model.tier import Extent, StoreKey
from tiers.nvme.large_objects import LargeObjects
from tiers.nvme.snapshots import Snapshots


@dataclass(frozen=True, slots=True)
class Resident:
    """Describes an object in DRAM, as a lower tier takes it."""

    key: StoreKey
    object_id: int
    extent: Extent
    size_bytes: int
    bucket: Bucket
    named: tuple[Name, NameRow] | None
    parent: bytes
    uid: int


class Residents(Protocol):
    """Finds objects of the store and notes their copies (`tiers.store.placement.Placement`)."""

    def in_dram(self, object_id: int) -> Resident | None:
        """Return an object of DRAM with all that a lower tier needs for a copy; None if it is not there."""

    @property
    def bucket(self) -> Callable[[bytes], Bucket]:
        """Return a function that returns a bucket by name."""

    @property
    def object_id_of(self) -> Callable[[bytes], int | None]:
        """Return a function that returns the object id of a key's digest, or None."""

    @property
    def key_of(self) -> Callable[[bytes], StoreKey]:
        """Return a function that returns the key of a digest."""

    def hits(self, digest: bytes) -> int:
        """Return how often the object of this key was read so far."""

    def note_copy(self, key: StoreKey, tier: int, location: int | None = None) -> None:
        """Record that a lower tier (TIER_NVME, at this place, or TIER_COLD) has the object."""

    def drop_copy(self, key: StoreKey, tier: int) -> list[int]:
        """Record that a lower tier has the object no more; return the ids of all that was evicted with the copy."""

    def drop_damaged(self, key: StoreKey) -> list[int]:
        """Record that the NVMe copy is damaged; return ids as `drop_copy` does."""

    def cascade_evict(self, key: StoreKey) -> list[int]:
        """Take an object out of all tiers, with what is of no use without it; return the ids of all of them."""


class Journal:
    """Reports to no tier: nothing is written, everything is settled."""

    is_finished = True
    """Whether the lower tiers know all that the store does."""
    snapshots: Snapshots | None = None
    """What was made durable of drafts; None without the NVMe tier."""
    durable_losses = 0
    """Durable objects that were sealed, and could not be written since their bytes had changed in DRAM."""

    def attach(self, residents: Residents) -> None:
        """Use these as the objects in DRAM; before anything else is called."""

    @property
    def large(self) -> LargeObjects:
        """Return objects larger than DRAM takes. Raises DeviceMissing."""
        raise DeviceMissing("objects larger than DRAM takes need the NVMe tier, and this store has none")

    @property
    def largest_object_bytes(self) -> int:
        """Return the limit of objects larger than DRAM takes; 0: none."""
        return 0

    def usage(self) -> list[dict[str, Any]]:
        """Return what status shows of the tiers below DRAM."""
        return []

    async def run(self) -> None:
        """Write behind, until cancelled."""
        await trio.sleep_forever()

    async def finish(self) -> None:
        """Write what is queued. Raises NoSpace, DeviceFailed."""

    def check_queue(self) -> None:
        """Raise NoSpace or DeviceFailed while too much waits to be written for more to be queued."""

    def check_durable(self, size_bytes: int) -> None:
        """Check that so many durable bytes can be written. Raises NoSpace, DeviceFailed, DeviceMissing."""
        raise DeviceMissing("a durable bucket needs the NVMe tier, and this store has none")

    def check_keepable(self, rows: Iterable[NameRow]) -> None:
        """Check that these objects can all become durable. Raises NoSpace."""

    def holds(self, object_id: int) -> bool:
        """Return whether a copy outside of DRAM can be read."""
        return False

    def is_writing(self, object_id: int) -> bool:
        """Return whether an object is queued for a device, and not yet readable there."""
        return False

    def expendable(self) -> Iterable[StoreKey]:
        """Return objects below DRAM that may be evicted from the store, the oldest first."""
        return ()

    def is_needed(self, object_id: int) -> bool:
        """Return whether the copy in DRAM may not go yet, since the object is durable and not on the device."""
        return False

    def is_kept(self, object_id: int) -> bool:
        """Return whether changes of an object wait for a device, whatever its bucket and row say."""
        return False

    def sealed(self, found: Resident, *, replaced: int | None = None, snapshot: int | None = None) -> None:
        """Note that an object was sealed into DRAM, in the place of object `replaced`. `snapshot`: the id of the
        durable copy of its draft, None without one."""

    def named(self, object_id: int, name: Name, row: NameRow) -> None:
        """Note that an object or directory has other attributes."""

    def renamed(
        self,
        object_id: int,
        name: Name,
        row: NameRow,
        *,
        source: Name | None = None,
        replaced: int | None = None,
    ) -> None:
        """Note that an object or directory has another name than `source`; `replaced` had it before."""

    def directory_renamed(self, source: Name, target: Name, object_ids: Sequence[int]) -> None:
        """Note that these objects, in this order, are going to be `renamed`, and that a start is to finish it."""

    def retired(self, object_id: int, name: Name, row: NameRow) -> None:
        """Note that no start may restore this name of the object."""

    def directory(self, bucket: Bucket, name: Name, row: NameRow) -> None:
        """Note that a directory was made."""

    def check_link(self) -> None:
        """Check that the record of a symbolic link, which stays as long as the link, has room. Raises NoSpace,
        DeviceFailed."""

    def linked(self, bucket: Bucket, name: Name, row: NameRow, replaced: int | None = None) -> None:
        """Note that a symbolic link was made, in the place of object `replaced`."""

    def removed(self, object_id: int, *, behind: bool = False) -> None:
        """Note that an object or directory was removed. `behind`: it was replaced, and is deleted once what has its
        name is durable."""

    def block_removed(self, object_id: int) -> None:
        """Note that a block was removed."""

    def detached(self, key: StoreKey) -> None:
        """Note that an object was evicted from the store, as a cache's may be."""

    def touched(self, key: StoreKey) -> None:
        """Note that an object in DRAM was read."""

    def promoted(self, key: StoreKey) -> None:
        """Note that an object was promoted that NVMe does not have."""

    def pinned(self, object_id: int, pinned: bool) -> None:
        """Note that an object was pinned or unpinned."""

    def bucket(self, row: BucketRow) -> None:
        """Note that a bucket was made or changed."""

    def bucket_removed(self, bucket_id: int) -> None:
        """Note that a bucket was removed."""

    @property
    def awaited_ticket(self) -> int:
        """Return the ticket that `settle` waits for now; read before a change, it is what `since` takes."""
        return 0

    def has_settled(self, ticket: int) -> bool:
        """Return whether everything up to this ticket is durable."""
        return True

    async def settle(self, since: int = -1) -> None:
        """Wait until everything so far is durable that has to be before an answer, if anything of it is newer than the
        ticket `since`. Raises NoSpace, DeviceFailed for durable objects."""

    @asynccontextmanager
    async def settling(self) -> AsyncIterator[None]:
        """Settle what the block adds to what is waited for, once it has ended without an error. Raises as `settle`."""
        before = self.awaited_ticket
        yield
        await self.settle(before)

    def checksum(self, object_id: int) -> int | None:
        """Return the XXH3-64 of an object that has one extent; None without it."""
        return None

    async def read_into(self, object_id: int, into: memoryview) -> None:
        """Read an object from below DRAM. Raises Superseded, Corrupt, DeviceFailed."""
        raise Superseded(f"object {object_id} is in no tier below DRAM")

    async def fetch(self, info: ObjectInfo, descriptor: int) -> int | None:
        """Fill a draft's file with an object's bytes; return their checksum where that of the whole is known.

        Raises NotFound, also while the drive is away, but for a durable named object: DeviceAway; DeviceFailed.
        """
        raise NotFound(f"object {info.object_id} is gone")

    async def settle_start(self) -> None:
        """Make durable what this start has decided, before anybody is served and before `run`."""

    async def settle_names(self) -> None:
        """Wait until every change of names so far is durable. Raises NoSpace, DeviceFailed."""

    async def persist(self, object_id: int) -> None:
        """Wait until a sealed object is durable, whatever its bucket. Raises NoSpace, DeviceFailed."""
