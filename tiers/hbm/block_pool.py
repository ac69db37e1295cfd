"""Blocks in one device's memory: found by prefix hash, evicted for others.

Responsibility: the index over a tier, and room for drafts. A block is here beside its copies in DRAM or below, so it is
evicted by dropping it.

Invariants: a prefix hash has one extent, the one sealed first. HBM_EVICTIONS bounds what one draft evicts.
Concurrency: the service's thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence

from kvfs import limits
from kvfs.errors import NoSpace
from tiers.eviction.policy import EvictionPolicy
from tiers.hbm.clients import PoolClient
from tiers.hbm.handover import ExpectedChecksum, HandedBlock
from tiers.hbm.tier import HbmTier
from tiers.model.tier import Extent, Kind, Sealed, SealHeader


class BlockPool:
    """Keeps the blocks of one pool."""

    def __init__(
        self, tier: HbmTier, policy: EvictionPolicy[bytes], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.tier = tier
        self._policy = policy
        self._clock = clock
        self._extents: dict[bytes, Sealed] = {}
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._extents)

    def find(self, digests: Sequence[bytes], bucket_id: int) -> list[Sealed | None]:
        """Return for each digest the block of this bucket, None where there is none, and note its use."""
        now = self._clock()
        found = [self._extents.get(digest) for digest in digests]
        found = [each if each and each.header.bucket_id == bucket_id else None for each in found]
        for digest, sealed in zip(digests, found, strict=True):
            if sealed is not None:
                self._policy.touch(digest, now)
        return found

    def reserve(self, size_bytes: int, client: PoolClient) -> Extent:
        """Reserve a draft; others are evicted for it. Raises NoSpace, ObjectTooLarge, Superseded."""
        for _ in range(limits.HBM_EVICTIONS):
            try:
                return self.tier.reserve(size_bytes, client)
            except NoSpace:
                if not self._evict(size_bytes):
                    raise
        return self.tier.reserve(size_bytes, client)

    def _evict(self, size_bytes: int) -> int:
        """Evict what the policy names until so many bytes are evicted; return how many blocks that were."""
        victims = [digest for group in self._policy.victims(size_bytes, self._clock()) for digest in group]
        for digest in victims:
            self.remove(digest)
        self.evicted += len(victims)
        return len(victims)

    def seal(
        self, draft: Extent, client: PoolClient, header: SealHeader, checksum: int | None = None
    ) -> Sealed:
        """Seal a draft as a block; where the block is here already, that stays and the draft is aborted. Raises
        Superseded."""
        assert header.key.kind is Kind.BLOCK
        if (first := self._extents.get(header.key.digest)) is not None:
            self.tier.abort(draft, client)
            return first
        sealed = self.tier.seal(draft, client, header, checksum)
        self._insert(sealed)
        return sealed

    def _insert(self, sealed: Sealed) -> None:
        header = sealed.header
        self._extents[header.key.digest] = sealed
        self._policy.insert(
            header.key.digest,
            size_bytes=self.tier.place(sealed.extent).slot_bytes,
            parent=header.parent if any(header.parent) else None,
            now=self._clock(),
        )

    def remove_other_buckets(self, bucket_ids: Container[int]) -> None:
        """Drop the blocks of buckets that are not among these."""
        others = [digest for digest, each in self._extents.items() if each.header.bucket_id not in bucket_ids]
        for digest in others:
            self.remove(digest)

    def remove(self, digest: bytes) -> bool:
        """Drop a block; return whether it was here."""
        if (sealed := self._extents.pop(digest, None)) is None:
            return False
        self._policy.remove(digest)
        self.tier.free(sealed.extent, charge_uid=sealed.header.uid)
        return True

    def resize(self, capacity_bytes: int) -> int:
        """Set the capacity; return how many blocks were evicted for it."""
        freed = self.tier.resize(capacity_bytes)
        for sealed in freed:
            del self._extents[sealed.header.key.digest]
            self._policy.remove(sealed.header.key.digest)
        return len(freed)

    def adopt(
        self,
        client: PoolClient,
        fd: int,
        token: bytes,
        blocks: Sequence[HandedBlock],
        expected: ExpectedChecksum,
    ) -> list[Extent | None]:
        """Take over a segment that a client has had mapped since before a restart; the descriptor is then the tier's.
        Return the blocks' new extents, None for each that is dropped. Raises NoSpace, InvalidRequest, Superseded."""
        adopted = self.tier.adopt(client, fd, token, blocks, expected)
        return [None if sealed is None else self._adopt_block(sealed) for sealed in adopted]

    def _adopt_block(self, sealed: Sealed) -> Extent | None:
        """Index a block that was taken over, unless it is here in another slot."""
        first = self._extents.get(sealed.header.key.digest)
        if first is None:
            self._insert(sealed)
        elif first.extent != sealed.extent:
            self.tier.free(sealed.extent)
            return None
        return sealed.extent
