"""The store that all doors share: names, objects and blocks over the tiers.

Responsibility: the parts of one store, its life, and their methods as the doors call them. What is there is
`tiers.store.catalog`; room and eviction are `tiers.store.residency`, copies below DRAM `tiers.store.placement`, seals
`tiers.store.sealing`, names `tiers.store.name_ops`. A store is made by `tiers.recovery.start`.

Invariants:
- An object is in the table exactly while a tier has its sealed bytes; a name row without a table entry is stale
  and reads as NotFound.
- The table entry goes before the slot is touched, so no reader can find a slot that is being recycled.

Concurrency: every method runs on the service's trio thread; those that change something do not await, so each
is atomic towards all others. Native threads only read the table and count hits in it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import trio

from kvfs.index.names import NameIndex
from tiers.cold.copies import ColdCopies
from tiers.data_dir import Home
from tiers.dram.tier import DramTier
from tiers.dram.verification import Verifier
from tiers.eviction.policy import EvictionPolicy
from tiers.eviction.quota import SpaceBook
from tiers.nvme.journal import Journal
from tiers.store.bucket_ops import BucketOps
from tiers.store.catalog import Catalog
from tiers.store.context import Context, Listeners
from tiers.store.drafts import Drafts
from tiers.store.large import LargeNames
from tiers.store.listings import Listings
from tiers.store.name_ops import NameOps
from tiers.store.placement import Placement
from tiers.store.promotion import Promoter
from tiers.store.reading import Reading
from tiers.store.residency import Residency
from tiers.store.sealing import Sealing


class Parts:
    """Builds the parts of one store over its tiers, still empty, and attaches the lower tiers to them."""

    def __init__(
        self,
        names: NameIndex,
        dram: DramTier,
        journal: Journal,
        cold: ColdCopies,
        *,
        quota_bytes: int,
        policy: EvictionPolicy[bytes],
    ) -> None:
        usage = dram.usage()
        self.catalog = Catalog(names, dram.table)
        listeners = Listeners([self.catalog.directory_times.note])
        space = SpaceBook(usage.capacity_bytes, quota_bytes, usage.max_slots)
        self.context = context = Context(self.catalog, dram, space, listeners, journal, cold)
        self.residency = Residency(context, policy)
        self.drafts = Drafts(context, self.residency)
        self.verifier = Verifier(dram, self.residency.note_verified)
        self.placement = Placement(context, self.residency, self.drafts, self.verifier)
        self.bucket_ops = BucketOps(context)
        self.name_ops = NameOps(context, self.bucket_ops, self.residency)
        journal.attach(self.placement)
        cold.attach(self.placement, self.bucket_ops.adopt_bucket)


class Store:
    """Binds the methods of its parts that doors call: a hit pays for no other call."""

    def __init__(self, home: Home, parts: Parts, recovery: dict[str, Any]) -> None:
        """Bind the parts. `recovery`: what the start took over, and how long that took."""
        self.home, self.recovery = home, recovery
        self.store_id, self.data_dir = home.store_id, home.path
        self._residency = parts.residency
        self._bind_context(parts.context)
        self._bind_residency(parts.residency, parts.drafts, parts.placement)
        self._bind_changes(parts.bucket_ops, parts.name_ops)
        self._bind_objects(parts)

    def _bind_context(self, context: Context) -> None:
        self.dram, self.journal = context.dram, context.journal
        self.cold, self.space = context.cold, context.space
        self.catalog = catalog = context.catalog
        self.names, self.table, self.directory_times = catalog.names, catalog.table, catalog.directory_times
        self.bucket, self.buckets, self.bound = catalog.bucket, catalog.buckets, catalog.bound
        self.lookup, self.lookup_object = catalog.lookup, catalog.lookup_object
        self.lookup_block, self.block_bucket = catalog.lookup_block, catalog.block_bucket
        self.find_path, self.match = catalog.find_path, catalog.match
        self.object_id_of, self.placed_blocks = catalog.object_id_of, catalog.placed_blocks
        listings = Listings(catalog)
        self.list, self.list_names = listings.list, listings.list_names
        listeners = context.listeners
        self.listeners, self.block_listeners = listeners.changes, listeners.blocks
        self.quota_listeners, self.share_listeners = listeners.quota, listeners.shares
        self.before_eviction, self.publishers = listeners.before_eviction, listeners.publishers

    def _bind_residency(self, residency: Residency, drafts: Drafts, placement: Placement) -> None:
        self.evict, self.make_room = residency.evict, residency.make_room
        self.note_reader, self.cool = residency.note_reader, residency.cool
        self.cold_name, self.is_large = residency.cold_name, residency.is_large
        self.reserve, self.prepare, self.grant = drafts.reserve, drafts.prepare, drafts.grant
        self.promise, self.open_draft, self.abort = drafts.promise, drafts.open, drafts.abort
        self.drop_slot = placement.drop_slot

    def _bind_changes(self, buckets: BucketOps, names: NameOps) -> None:
        self.create_bucket, self.set_bucket = buckets.create_bucket, buckets.set_bucket
        self.remove_bucket = buckets.remove_bucket
        self.make_directory, self.mark_directory = names.make_directory, names.mark_directory
        self.make_link = names.make_link
        self.put_marker, self.check_marker = names.put_marker, names.check_marker
        self.remove_marker = names.remove_marker
        self.remove_directory, self.remove = names.remove_directory, names.remove
        self.remove_block, self.rename = names.remove_block, names.rename
        self.retire, self.reinstate = names.retire, names.reinstate
        self.set_attributes = names.set_attributes

    def _bind_objects(self, parts: Parts) -> None:
        context, residency, placement = parts.context, parts.residency, parts.placement
        self.verifier = parts.verifier
        self._promoter = Promoter(context, parts.drafts, placement, parts.verifier)
        reading = Reading(context, residency, self._promoter)
        self.open_read, self.touch = reading.open_read, reading.touch
        self.load, self.lease, self.checksum = reading.load, reading.lease, reading.checksum
        self.read_into, self.note_misses = reading.read_into, reading.note_misses
        self.wait_published, self.wait_all_published = reading.wait_published, reading.wait_all_published
        sealing = Sealing(context, residency, parts.drafts, placement)
        self.seal, self.seal_block = sealing.seal, sealing.seal_block
        self.put_snapshot, self.rename_snapshot = sealing.put_snapshot, sealing.rename_snapshot
        self.is_snapshot, self.settle_snapshot = sealing.is_snapshot, sealing.settle_snapshot
        self.drop_unindexed = sealing.drop_unindexed
        self.sealed_natively, self.replace_cold_block = sealing.sealed_natively, sealing.replace_cold_block
        large = LargeNames(context, residency, placement, reading.touch)
        self.open_large, self.begin_large = large.open_large, large.begin_large
        self.persist_large, self.rename_large = large.persist_large, large.rename_large
        self.seal_large, self.abort_large = large.seal_large, large.abort_large

    @property
    def object_count(self) -> int:
        """Return objects and blocks, without directories."""
        return self.catalog.object_count

    @property
    def over_quota(self) -> bool:
        """Return whether some uid is charged for more than its quota."""
        return self._residency.over_quota

    async def run(self) -> None:
        """Write to the lower tiers and verify what the start took over, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.journal.run)
            nursery.start_soon(self.cold.run)
            nursery.start_soon(self.verifier.run)

    def maintain(self) -> None:
        """Free what holders have closed, and evict down to the headroom. Cheap when there is nothing to do."""
        self._residency.maintain()
        self._promoter.around.sweep()

    async def finish(self) -> None:
        """Write what is queued, with its footer, before `close`. Raises NoSpace, DeviceFailed."""
        await self.journal.finish()

    def close(self, *, keep: bool = False) -> None:
        """End the store. With `keep`, what is sealed stays in DRAM for the next start."""
        self._promoter.around.close()
        self.dram.close(keep=keep)
        self.directory_times.write()
        whole = self.names.close()
        self.home.close(clean=whole and self.journal.is_finished)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def capacity(self) -> tuple[int, int]:
        """Return (capacity, used) in bytes of the largest tier: what a smaller one has, it has too, or will have."""
        dram = self.dram.usage()
        tiers = [(tier["capacity_bytes"], tier["live_bytes"]) for tier in self.journal.usage()]
        return max([(dram.capacity_bytes, dram.used_bytes), *tiers])

    def usage(self) -> dict[str, Any]:
        """Return what `kvfs status` shows; every value is JSON-able."""
        return {
            "store_id": self.store_id.hex(),
            "data_dir": str(self.data_dir),
            "objects": len(self.catalog.name_of),
            "blocks": len(self.catalog.blocks),
            "buckets": len(self.names.buckets()),
            "open_drafts": self.space.open_drafts,
            "quota_bytes": self.space.quota_bytes,
            "headroom_bytes": self.space.headroom_bytes(),
            "unverified": self.verifier.left,
            "read_around": self._promoter.around.reads,
            "read_around_bytes": self._promoter.around.held_bytes,
            **self.catalog.counts,
            "recovery": self.recovery,
            "tiers": [
                {"name": self.dram.name, "backing": self.dram.backing, **asdict(self.dram.usage())},
                *self.journal.usage(),
                *self.cold.usage(),
            ],
        }
