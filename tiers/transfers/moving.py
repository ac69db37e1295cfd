"""`kvfs cluster move`: the blocks of caches to one machine, and out of this one.

Invariants:
- A block goes from here once the machine has said, after all were brought, that it has it. A block of a durable bucket
  never does, nor a pinned one.
- No block that is here then loses its parent, whatever bucket it is in: children go first, and what stays keeps those
  before it. What the cold tier alone has, which is not brought, keeps none.
- Meanwhile this machine takes no blocks of others (`tiers.remote.pulls`): of two that move to each other, each would
  remove what the other one counts on.

Concurrency: the service's trio thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import trio
import trio.lowlevel

from kvfs import limits
from kvfs.errors import KvfsError
from tiers.model.objects import Bucket
from tiers.store.store import Store
from tiers.transfers.block_batches import Found, is_served, look
from tiers.transfers.copying import Copy
from tiers.transfers.other_machines import THERE, Cause, Target
from tiers.transfers.progress import Progress


class Move:
    """Moves the blocks of some buckets, which are caches, to one machine."""

    def __init__(self, store: Store, target: Target, buckets: Sequence[Bucket], progress: Progress) -> None:
        self._store, self._target, self._progress = store, target, progress
        self._copy = Copy(store, target, buckets, progress)
        self._buckets = {each.name: each for each in buckets if each.namespace is not None}
        self._followed: set[bytes] = set()
        """Blocks that the machine has, and that others here follow: they go behind these."""
        self._cold_children: Counter[bytes] = Counter()
        """By parent, the blocks that the cold tier alone has."""
        self._missing = 0
        """Blocks that the machine was asked for, and had not."""

    async def run(self) -> str:
        """Move; return the result. Raises KvfsError where the machine takes nothing any more, or does not answer."""
        try:
            await self._copy.bring_all()
            await self._remove_all()
        finally:
            self._target.close()
        stay = sum(map(self._store.catalog.blocks.count, self._buckets))
        went = self._progress.removed_blocks
        return f"{went} blocks went from here; {stay} stay, of which {self._missing} are not there"

    async def _remove_all(self) -> None:
        """Remove here what the machine has."""
        for some in look(self._store, newest_first=True):
            there = await self._there([each for each in some if is_served(self._store, each.digest)])
            for each in some:
                if each.digest in there:
                    await self._remove(each.digest)
                elif each.parent is not None and not is_served(self._store, each.digest):
                    self._cold_children[each.parent] += 1
                    if each.parent in self._followed:
                        await self._remove(each.parent)
            await trio.lowlevel.checkpoint()

    async def _there(self, some: Sequence[Found]) -> set[bytes]:
        """Ask which blocks of the buckets the machine has. Raises KvfsError."""
        there: set[bytes] = set()
        for name, bucket in self._buckets.items():
            digests = [each.digest for each in some if each.bucket == name]
            if digests:
                assert bucket.namespace is not None
                there.update(await self._asked(bucket.namespace, digests))
                self._missing += len(digests) - len(there.intersection(digests))
        return there

    async def _asked(self, namespace: bytes, digests: Sequence[bytes]) -> list[bytes]:
        for tries in range(1, limits.PULL_TRIES + 1):
            pulled = await self._target.ask(namespace, digests)
            if pulled.cause not in (Cause.PASSING, Cause.REFUSED):
                return [
                    each for each, status in zip(digests, pulled.statuses, strict=True) if status == THERE
                ]
            if pulled.cause is Cause.REFUSED or tries == limits.PULL_TRIES:
                break
            await trio.sleep(limits.PULL_PAUSE_S)
        raise KvfsError(f"{self._target.address}: {pulled.reason}")

    async def _remove(self, digest: bytes | None) -> None:
        """Remove a block that the machine has, and before it those that only this one followed."""
        catalog = self._store.catalog
        while digest is not None:
            catalog.native_seals.catch_up()  # a child that has come
            block = catalog.blocks.get(digest)
            if block is None or block.pinned or not self._is_moved(block.bucket):
                return
            if catalog.blocks.children(digest) > self._cold_children[digest]:
                self._followed.add(digest)
                return
            self._store.remove_block(digest)
            self._followed.discard(digest)
            self._progress.removed_blocks += 1
            if self._progress.removed_blocks % limits.MOVE_REMOVALS == 0:
                await trio.lowlevel.checkpoint()
            digest = block.parent if block.parent in self._followed else None

    def _is_moved(self, bucket: bytes) -> bool:
        """Return whether a bucket is one of those that are moved, and not another one that has its name by now."""
        known = self._buckets.get(bucket)
        return known is not None and self._store.bucket(bucket).bucket_id == known.bucket_id
