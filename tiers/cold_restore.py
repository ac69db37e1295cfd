"""A start's view of the cold tier: rows of its index that the store's names and buckets still want.

Responsibility: give the store its cold tier, with table entries for what is there; rows that nothing wants any more go,
and so do their remote objects.

Invariants: nothing is asked of the bucket; a row alone brings nothing back: a named object needs its name, with the
same id and size, and a block its bucket.
Concurrency: before the store serves anybody.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvfs._native.table import TIER_COLD
from kvfs.names import NameIndex
from tiers.base import NO_SLOT, Kind
from tiers.cold import ColdTier
from tiers.cold_bucket import ColdOptions
from tiers.cold_format import HEADER_BYTES, ColdName, parse_name
from tiers.cold_index import ColdIndex, ColdRow, block_of
from tiers.model import Name

if TYPE_CHECKING:
    from tiers.store import TieredStore

log = logging.getLogger("kvfs.cold")


class ColdHeritage:
    """The rows of one start."""

    def __init__(self, names: NameIndex, options: ColdOptions) -> None:
        self.options = options
        self.index = ColdIndex(names.environment)
        self.blocks: list[tuple[ColdName, ColdRow]] = []
        self.objects: dict[int, tuple[ColdName, ColdRow]] = {}
        """By object id."""
        self.unwanted: dict[str, int] = {}
        """Remote names and their bytes."""
        if not self.index.claim(options.bucket.place):
            log.warning("cold tier: what an earlier start kept elsewhere is forgotten, not deleted")
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

    def has(self, object_id: int) -> bool:
        """Whether a named object's bytes are there."""
        return object_id in self.objects

    def restore(self, store: TieredStore, named: Mapping[int, Name]) -> ColdTier:
        """The tier, and the store's knowledge of what is in it. `named`: names of objects by id, of those that the
        index has."""
        tier = ColdTier(store, self.index, self.options)
        for object_id, (name, row) in sorted(self.objects.items()):
            if object_id in named and _enter_object(store, name, row, named[object_id]):
                tier.know(name, row.size_bytes)
            else:
                self._refuse(name, row)
        buckets = {row.name for row in store.names.buckets() if row.namespace is not None}
        for name, row in sorted(self.blocks, key=lambda each: each[0].object_id):
            if name.bucket in buckets and _enter_block(store, name, row):
                tier.know(name, row.size_bytes)
            else:
                self._refuse(name, row)
        for text, size_bytes in self.unwanted.items():
            self.index.remove(text)
            tier.delete(text, size_bytes)
        return tier

    def _refuse(self, name: ColdName, row: ColdRow) -> None:
        self.unwanted[str(name)] = row.size_bytes + HEADER_BYTES


def _enter_object(store: TieredStore, cold: ColdName, row: ColdRow, name: Name) -> bool:
    found = store.names.get(name.bucket, name.key)
    if found is None or found.object_id != cold.object_id or found.size_bytes != row.size_bytes:
        return False
    _enter(store, cold, row)
    store.restore_name(cold.key.digest, name)
    return True


def _enter_block(store: TieredStore, cold: ColdName, row: ColdRow) -> bool:
    """False for a block of which another tier has a later one."""
    digest = cold.key.digest
    known = store.object_id_of(digest)
    if known not in (None, cold.object_id):
        return False
    _enter(store, cold, row)
    if known is None:
        store.restore_block(digest, block_of(cold, row))
    return True


def _enter(store: TieredStore, cold: ColdName, row: ColdRow) -> None:
    digest = cold.key.digest
    if store.table.get(digest) is None:
        store.table.put(digest, int(cold.key.kind), NO_SLOT, 0, row.size_bytes, tiers=TIER_COLD)
    else:
        store.note_copy(cold.key, TIER_COLD)
