"""The blocks that the processes of one uid share on one device.

Responsibility: who gets a slot, and which seals are accepted, over `tiers.hbm.block_pool`.

Invariants: a block is sealed only with the checksum that the store has for its key and its client has computed on the
device, so a copy that went wrong gets no slot. Concurrency: the service's thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvfs.errors import NotFound, QuotaExceeded, WrongChecksum
from tiers.eviction.policy import EvictionPolicy
from tiers.hbm.allocator import Place
from tiers.hbm.block_pool import BlockPool
from tiers.hbm.clients import PoolClient
from tiers.hbm.handover import ExpectedChecksum, HandedBlock
from tiers.hbm.tier import HbmTier
from tiers.hbm.wanted import Wanted
from tiers.model.tier import Extent, Sealed, SealHeader


@dataclass(slots=True)
class PoolCounts:
    """Counts what the pools did since the service's start."""

    hits: int = 0
    misses: int = 0
    promoted: int = 0
    refused: int = 0
    """Seals without the store's checksum."""
    damaged: int = 0
    """Blocks whose checksum was wrong on the device."""
    evicted: int = 0
    adopted: int = 0
    """Blocks that were taken over from an earlier service."""


class UidPool:
    """See the module's header."""

    def __init__(
        self, tier: HbmTier, policy: EvictionPolicy[bytes], expected: ExpectedChecksum, counts: PoolCounts
    ) -> None:
        self.tier, self.blocks = tier, BlockPool(tier, policy)
        self._expected, self._counts = expected, counts
        self._wanted = Wanted()

    @property
    def is_idle(self) -> bool:
        """Return whether no process is attached, or still waited for."""
        return self.tier.clients == 0

    def find(self, digests: Sequence[bytes], bucket_id: int) -> list[tuple[Sealed, Place] | None]:
        """Return the blocks of a bucket that are here, each with its place; count hits and misses."""
        found: list[tuple[Sealed, Place] | None] = []
        for digest, sealed in zip(digests, self.blocks.find(digests, bucket_id), strict=True):
            if sealed is None:
                self._wanted.missed(digest)
                self._counts.misses += 1
            else:
                self._counts.hits += 1
            found.append(None if sealed is None else (sealed, self.tier.place(sealed.extent)))
        return found

    def reserve(
        self, client: PoolClient, digest: bytes, size_bytes: int, most_drafts: int
    ) -> tuple[Extent, Place] | None:
        """Reserve a draft for a block that is wanted, evicting others; None for another block.

        Raises NoSpace, ObjectTooLarge, Superseded, QuotaExceeded.
        """
        if not self._wanted.admits(digest):
            return None
        if len(client.drafts) >= most_drafts:
            raise QuotaExceeded(f"process {client.pid} has {most_drafts} drafts of GPU memory, the limit")
        before = self.blocks.evicted
        try:
            draft = self.blocks.reserve(size_bytes, client)
        finally:
            self._counts.evicted += self.blocks.evicted - before
        return draft, self.tier.place(draft)

    def seal(self, draft: Extent, client: PoolClient, header: SealHeader, checksum: int) -> Sealed:
        """Seal a draft that the client has completed. Raises NotFound, WrongChecksum where the store has no such block
        or another checksum for it (the draft is aborted then), Superseded."""
        expected, digest = self._expected(header.key), header.key.digest
        if expected != checksum:
            self.refuse(draft, client)
            if expected is None:
                raise NotFound(f"the store knows no checksum of block {digest.hex()}")
            raise WrongChecksum(
                f"block {digest.hex()} has XXH3-64 {expected:016x} in the store, {checksum:016x} on the device"
            )
        [known] = self.blocks.find([digest], header.bucket_id)
        if known is None:
            self.blocks.remove(digest)  # of the bucket that had the block before
        sealed = self.blocks.seal(draft, client, header, checksum)
        self._wanted.forget(digest)
        self._counts.promoted += known is None
        return sealed

    def refuse(self, draft: Extent, client: PoolClient) -> None:
        """Abort a draft that is not sealed as its client wants, and count that. Raises Superseded."""
        self.tier.abort(draft, client)
        self._counts.refused += 1

    def adopt(
        self, client: PoolClient, fd: int, token: bytes, blocks: Sequence[HandedBlock]
    ) -> list[tuple[Extent, Place] | None]:
        """Take over what a client hands back of an earlier service's segment; the descriptor is then the tier's. Return
        where the blocks are, None for each that is dropped: without any the client unmaps the segment. Raises NoSpace,
        InvalidRequest, Superseded."""
        before = len(self.blocks)
        extents = self.blocks.adopt(client, fd, token, blocks, self._expected)
        self._counts.adopted += len(self.blocks) - before
        number = self.tier.segment_of(token)
        if number is not None and not any(extents):
            self.tier.unmapped(client, number)
        return [None if extent is None else (extent, self.tier.place(extent)) for extent in extents]

    def drop_damaged(self, digest: bytes, extent: Extent, bucket_id: int) -> bool:
        """Drop a block whose bytes are wrong on the device, if it is still the same one; return whether it was."""
        [sealed] = self.blocks.find([digest], bucket_id)
        if sealed is None or sealed.extent != extent:
            return False
        self._counts.damaged += 1
        return self.blocks.remove(digest)

    def describe(self, uid: int) -> dict[str, Any]:
        """Return what `status` shows."""
        return {"uid": uid, "blocks": len(self.blocks), **self.tier.describe()}
