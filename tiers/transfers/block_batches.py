"""The blocks of a store in batches for one pull each, parents before children.

Responsibility: walk all blocks, or those that other machines can be given, and gather them by where they go.

Invariants: a walk goes in the order of the seals, or back, and keeps a hash of 16 bytes for each block; what goes
meanwhile is passed over. A batch has limits.PULL_BLOCKS blocks and limits.PULL_BYTES at most, or one larger block.

Concurrency: the service's trio thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from kvfs import limits
from kvfs._native.shared.table import TIER_DRAM, TIER_NVME, TIER_UNVERIFIED
from tiers.store.store import Store

_SERVED = TIER_DRAM | TIER_NVME | TIER_UNVERIFIED
"""Tiers whose blocks other machines are given; one that is still to be verified is, before it is given."""


class Place(NamedTuple):
    """Names where blocks go: a machine's address, and their bucket here."""

    address: str
    bucket: bytes


class Found(NamedTuple):
    """Names a block of this machine."""

    digest: bytes
    bucket: bytes
    size_bytes: int
    parent: bytes | None


@dataclass(slots=True)
class Batch:
    """Holds blocks that go to one place together."""

    place: Place
    blocks: list[Found] = field(default_factory=list)
    size_bytes: int = 0


class Batches:
    """Gathers blocks, by their places."""

    def __init__(self) -> None:
        self._filling: dict[Place, Batch] = {}

    def add(self, place: Place, found: Found) -> Batch | None:
        """Add a block to those of its place; return the batch that had no room for it."""
        filling = self._filling.get(place)
        full = None
        if filling is not None and not _takes(filling, found):
            filling, full = None, filling
        if filling is None:
            filling = self._filling[place] = Batch(place)
        filling.blocks.append(found)
        filling.size_bytes += found.size_bytes
        return full

    def rest(self) -> Iterator[Batch]:
        """Take out what is left."""
        while self._filling:
            yield self._filling.pop(next(iter(self._filling)))


def _takes(batch: Batch, found: Found) -> bool:
    return len(batch.blocks) < limits.PULL_BLOCKS and batch.size_bytes + found.size_bytes <= limits.PULL_BYTES


def is_served(store: Store, digest: bytes) -> bool:
    """Return whether other machines can be given a block."""
    return bool(store.catalog.tiers_of(digest) & _SERVED)


def walk(store: Store, buckets: Collection[bytes]) -> Iterator[list[Found]]:
    """Yield the blocks of these buckets that other machines can be given, as `look` does."""
    for some in look(store):
        yield [each for each in some if each.bucket in buckets and is_served(store, each.digest)]


def look(store: Store, *, newest_first: bool = False) -> Iterator[list[Found]]:
    """Yield all blocks, a list for each limits.TASK_LOOKS that were looked at: it may be empty."""
    catalog = store.catalog
    catalog.native_seals.catch_up()
    digests = catalog.blocks.digests(newest_first=newest_first)
    while some := list(islice(digests, limits.TASK_LOOKS)):
        blocks = zip(some, map(catalog.blocks.get, some), strict=True)
        yield [Found(digest, b.bucket, b.size_bytes, b.parent) for digest, b in blocks if b is not None]
