"""The cold tier at a start: rows of its index that the store's names and buckets still want.

Responsibility: the tier, and table entries for its objects; rows that nothing wants are removed, with their remote
objects.

Invariants: nothing is asked of the bucket; a row alone brings nothing back: a named object needs its name, with the
same id and size, and a block its bucket.
Concurrency: before the store serves anybody.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvfs._native.shared.table import TIER_COLD
from kvfs.index.names import NameIndex
from tiers.cold.bucket import ColdOptions
from tiers.cold.format import HEADER_BYTES, ColdName, parse_name
from tiers.cold.health import keep_up
from tiers.cold.index import ColdIndex, ColdRow, block_of
from tiers.cold.tier import ColdTier
from tiers.cold.uploader import upload
from tiers.dram.tier import DramTier
from tiers.model.objects import Name
from tiers.model.tier import Kind
from tiers.nvme.journal import Journal
from tiers.store.store import Parts

log = logging.getLogger("kvfs.cold")


class ColdRecovery:
    """Sorts the rows out for one start."""

    def __init__(self, names: NameIndex, options: ColdOptions) -> None:
        self.options = options
        self.index = ColdIndex(names.environment)
        self.blocks: list[tuple[ColdName, ColdRow]] = []
        self.objects: dict[int, tuple[ColdName, ColdRow]] = {}
        """By object id."""
        self.unwanted: dict[str, int] = {}
        """Remote names and their bytes."""
        if not self.index.bind(options.bucket.place):
            log.warning("cold tier: what an earlier start kept elsewhere stays there, and is not used")
        for text, row in self.index.rows():
            name = parse_name(text)
            if name is None or row is None:
                self.unwanted[text] = 0
            elif name.key.kind is Kind.BLOCK:
                self.blocks.append((name, row))
            else:
                self.objects[name.object_id] = (name, row)

    def __len__(self) -> int:
        return len(self.blocks) + len(self.objects)

    def make_tier(self, names: NameIndex, dram: DramTier, journal: Journal, store_id: bytes) -> ColdTier:
        """Make the tier, still empty."""
        return ColdTier(self.index, self.options, names, dram, journal, store_id, [keep_up, upload])

    def restore(self, tier: ColdTier, parts: Parts, named: Mapping[int, Name]) -> None:
        """Enter the tier's objects in the store. `named`: names by object id, of those that the name index has."""
        for object_id, (name, row) in sorted(self.objects.items()):
            if object_id in named and _enter_object(parts, name, row, named[object_id]):
                tier.enter(name, row.size_bytes)
            else:
                self._refuse(name, row)
        buckets = {row.name for row in parts.catalog.names.buckets() if row.namespace is not None}
        for name, row in sorted(self.blocks, key=lambda each: each[0].object_id):
            if name.bucket in buckets and parts.placement.restore_block(
                name.key.digest, block_of(name, row), TIER_COLD
            ):
                tier.enter(name, row.size_bytes)
            else:
                self._refuse(name, row)
        for text, size_bytes in self.unwanted.items():
            self.index.remove(text)
            tier.delete(text, size_bytes)

    def _refuse(self, name: ColdName, row: ColdRow) -> None:
        self.unwanted[str(name)] = row.size_bytes + HEADER_BYTES


def _enter_object(parts: Parts, cold: ColdName, row: ColdRow, name: Name) -> bool:
    found = parts.catalog.names.get(name.bucket, name.key)
    if found is None or found.object_id != cold.object_id or found.size_bytes != row.size_bytes:
        return False
    parts.placement.restore_copy(cold.key, row.size_bytes, TIER_COLD)
    parts.catalog.name_of[cold.key.digest] = name
    return True
