"""Slot headers in the shared table, to and from values (docs/formats.md).

Concurrency: the service's thread; the table has its own rules for readers.
"""

from __future__ import annotations

from kvfs._native.shared.table import Table
from tiers.model.tier import Extent, Kind, Sealed, SealHeader, StoreKey


def publish(
    table: Table, draft: Extent, header: SealHeader, size_bytes: int, checksum: int | None, sealed_at_ns: int
) -> Extent:
    """Make a draft's header that of a sealed slot; return the extent. Raises Superseded."""
    generation = table.publish(
        draft.slot,
        draft.generation,
        kind=header.key.kind,
        key=header.key.digest,
        size=size_bytes,
        object_id=header.object_id,
        sequence=header.sequence,
        flags=header.flags,
        checksum=checksum,
        parent=header.parent,
        uid=header.uid,
        bucket_id=header.bucket_id,
        sealed_at_ns=sealed_at_ns,
    )
    return Extent(draft.slot, generation)


def read(table: Table, slot: int) -> Sealed:
    """Read the header of a sealed slot."""
    raw = table.read_header(slot)
    header = SealHeader(
        key=StoreKey(Kind(raw.kind), raw.key),
        object_id=raw.object_id,
        sequence=raw.sequence,
        parent=raw.parent,
        flags=raw.flags,
        uid=raw.uid,
        bucket_id=raw.bucket_id,
    )
    return Sealed(Extent(slot, raw.generation), header, raw.size_bytes, raw.checksum, raw.sealed_at_ns)
