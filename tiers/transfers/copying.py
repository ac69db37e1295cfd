"""`kvfs cluster copy`: the blocks of namespaces that are bound to buckets here, to one machine.

Invariants: one pull is under way at a time. A namespace that the machine takes no blocks of is a failure, and others go
on; where it takes nothing any more, or cannot be reached, the task ends. Concurrency: the service's trio thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio.lowlevel

from kvfs.errors import KvfsError
from tiers.model.objects import Bucket
from tiers.store.store import Store
from tiers.transfers.block_batches import Batch, Batches, Place, walk
from tiers.transfers.bringing import bring
from tiers.transfers.other_machines import Cause, Target
from tiers.transfers.progress import Progress


class Copy:
    """Copies the blocks of some buckets to one machine."""

    def __init__(self, store: Store, target: Target, buckets: Sequence[Bucket], progress: Progress) -> None:
        self._store, self._target, self._progress = store, target, progress
        self._namespaces = {each.name: each.namespace for each in buckets if each.namespace is not None}
        self._refused: dict[bytes, str] = {}
        """By bucket, why the machine takes no blocks of it."""

    async def run(self) -> str:
        """Copy; return the result. Raises KvfsError where the machine takes nothing any more."""
        try:
            await self.bring_all()
        finally:
            self._target.close()
        progress = self._progress
        return f"{progress.blocks} blocks are there, {progress.there_blocks} of them were before"

    async def bring_all(self) -> None:
        """Have the machine fetch what it has not. Raises KvfsError where it takes nothing any more."""
        progress, blocks = self._progress, self._store.catalog.blocks
        progress.of_blocks = sum(map(blocks.count, self._namespaces))
        progress.of_bytes = sum(map(blocks.size_bytes, self._namespaces))
        batches = Batches()
        for some in walk(self._store, self._namespaces):
            for found in some:
                full = batches.add(Place(self._target.address, found.bucket), found)
                if full is not None:
                    await self._bring(full)
            await trio.lowlevel.checkpoint()
        for batch in batches.rest():
            await self._bring(batch)
        progress.pass_over_rest()

    async def _bring(self, batch: Batch) -> None:
        bucket = batch.place.bucket
        if bucket in self._refused:
            self._progress.fail(self._refused[bucket], len(batch.blocks))
            return
        left = await bring(self._store, self._target, self._namespaces[bucket], batch.blocks, self._progress)
        if not left.blocks:
            return
        self._progress.fail(left.reason, len(left.blocks))
        if left.cause is Cause.NAMESPACE:
            self._refused[bucket] = left.reason
        elif left.cause is not Cause.NONE:
            raise KvfsError(f"{self._target.address}: {left.reason}")
