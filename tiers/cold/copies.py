"""Copies of objects in a bucket elsewhere: what the store reports and asks, and the null object.

Responsibility: the interface, which `ColdCopies` itself implements as a store without the cold tier;
`tiers.cold.tier` is the one with it. `ColdStore` is what that one asks of the store.

Concurrency: the service's trio thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import trio

from kvfs.errors import NotFound
from kvfs.index.rows import BucketRow
from tiers.cold.format import ColdName
from tiers.model.blocks import Block
from tiers.model.objects import Bucket, ObjectInfo
from tiers.model.tier import StoreKey
from tiers.nvme.journal import Residents


class ColdStore(Residents, Protocol):
    """Finds objects of the store for the cold tier (`tiers.store.placement.Placement`)."""

    @property
    def lookup_object(self) -> Callable[[StoreKey], ObjectInfo | None]:
        """Return a function that returns the object of a key, or None."""

    @property
    def cold_name(self) -> Callable[[bytes], ColdName | None]:
        """Return a function that returns an object's name in the cold tier by the digest of its key, or None."""

    @property
    def is_large(self) -> Callable[[ObjectInfo], bool]:
        """Return a function that says of an object whether it is too large for DRAM and read in place."""

    def adopt_cold_block(self, digest: bytes, block: Block) -> bool:
        """Enter a block that only the cold tier has; return False where it is known already, or there is no room."""
        ...


class ColdCopies:
    """Keeps no copies: a store without a cold tier."""

    def attach(self, store: ColdStore, adopt_bucket: Callable[[BucketRow], None]) -> None:
        """Use this store; before anything else is called."""

    def usage(self) -> list[dict[str, Any]]:
        """Return what status shows of the tier."""
        return []

    def sealed(self, key: StoreKey, bucket: Bucket) -> None:
        """Note that an object was sealed."""

    def touched(self, key: StoreKey) -> None:
        """Note that an object was read."""

    def removed(self, name: ColdName) -> None:
        """Delete the copy of an object; twice is harmless."""

    def block_removed(self, digest: bytes) -> None:
        """Note that a user removed a block."""

    def expendable(self) -> Iterable[StoreKey]:
        """Return objects that the tier has, in the order in which they are evicted."""
        return ()

    async def fetch(self, info: ObjectInfo, descriptor: int) -> int:
        """Fill a draft with an object's bytes; return their XXH3-64. Raises NotFound, NoSpace."""
        raise NotFound(f"object {info.object_id} is gone")

    async def run(self) -> None:
        """Do the tier's work, until cancelled."""
        await trio.sleep_forever()
