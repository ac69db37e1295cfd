"""Names and copies from the log at a start: the index built anew, or compared with the records.

Responsibility: after a replay (`tiers.recovery.log_replay`) and with the name index open, make index, table, catalogue
and log agree. Three cases: an index that was lost, or part of it (`tiers.recovery.index_salvage`), gets buckets and
names from the log; one that is believed decides which names exist, since the log is never ahead of it; what only one
of the two knows is dropped or logged.

Invariants: nothing that the believed index has removed comes back: its records are deleted in the log, so that
a later start without the index does not see them either. What it has replaced comes back only where the
replacement is lost, which was then never settled.
Concurrency: before the store serves anybody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from kvfs._native.catalog.restore import restore_blocks, restore_rows, unrestored
from kvfs._native.shared.table import TIER_NVME
from kvfs.index.draft_snapshots import OPEN, SnapshotIndex
from kvfs.index.names import NameIndex, is_name
from kvfs.index.rows import ROW_ONLY, SNAPSHOT, BucketRow, NameRow, clear_flags, peek_row
from tiers.log.entries import Barrier, Deletion
from tiers.model.blocks import Block
from tiers.model.objects import Name
from tiers.model.tier import Kind
from tiers.nvme.stored import Stored, has_all
from tiers.nvme.tier import NvmeTier
from tiers.nvme.write_behind import NvmeJournal
from tiers.recovery.log_replay import Replayed
from tiers.store.store import Parts


class Survivor(NamedTuple):
    """Describes a named object that DRAM may still have; `number` is the adoption's."""

    number: int
    object_id: int
    sequence: int
    size_bytes: int


def known_buckets(found: Replayed, repeated: Mapping[int, BucketRow]) -> list[BucketRow]:
    """List the buckets of the log, one of a name. `repeated`: rows by id, as they were written beside it, which are
    never older than the log's."""
    buckets = found.buckets | {each: row for each, row in repeated.items() if each not in found.dead}
    return list({buckets[each].name: buckets[each] for each in sorted(buckets)}.values())


def rebuild_index(names: NameIndex, found: Replayed, repeated: Mapping[int, BucketRow]) -> int:
    """Fill an empty index with the buckets and names of the log; return how many names."""
    buckets = known_buckets(found, repeated)
    for row in buckets:
        names.put_bucket(row)
    if buckets:
        names.skip_bucket_ids(max(row.bucket_id for row in buckets))
    bases = tuple(row.name + b"\0" for row in buckets)
    rows = (
        (name, clear_flags(row, SNAPSHOT))
        for row, name in found.names.values()
        if name.startswith(bases) and is_name(name)
    )
    return names.put_many(rows)


def agree(row: NameRow, survivor: Survivor) -> bool:
    """Return whether what survived in DRAM is what this name stands for."""
    return (row.sequence, row.size_bytes) == (survivor.sequence, survivor.size_bytes)


def name_survivors(
    names: NameIndex, found: Replayed, survivors: dict[int, Survivor], *, replace: bool
) -> None:
    """Give durable objects that DRAM has, and the log only in part, the names that the log knows: damage on the device
    costs nothing of what is in DRAM. The log may be behind the names of a cache's objects whose bytes it evicted.

    `replace`: whether the names that are there are the log's as well, so that the newer one counts.
    """
    for object_id in found.torn.keys() & survivors.keys():
        data, name, sequence = found.torn[object_id]
        row = NameRow.decode(data)
        bucket, _, key = name.partition(b"\0")
        where = names.get_bucket(bucket) if is_name(name) else None
        if where is None or where.class_ != "durable" or not agree(row, survivors[object_id]):
            continue
        known = names.get(bucket, key)
        if known is None or (replace and found.sequence(known.object_id) < sequence):
            names.put(bucket, key, clear_snapshot(row))


def adopt_orphans(names: NameIndex, nvme: NvmeTier, found: Replayed) -> None:
    """Adopt objects whose bucket only the index knows, since its record in the log is damaged. A bucket that
    neither knows was removed, which waits until it is empty: what is left of it is deleted again."""
    durable = {row.bucket_id: row.class_ == "durable" for row in names.buckets()}
    for stored in found.orphans:
        if stored.bucket_id in durable:
            stored.kept = durable[stored.bucket_id]
            nvme.adopt(stored)
        else:
            found.losers.append(stored.object_id)
            found.names.pop(stored.object_id)


def is_settled(stored: Stored, *, kept: bool, killed: bool) -> bool:
    """Return whether the extents of an object without a name in the log are the last ones: of a file that was written
    extent by extent a killed service may have left only earlier ones, and without its META nothing says so. In a
    durable bucket the endings do, before its close is answered."""
    return kept or not killed or stored.sealed_at_ns != 0


def adopt_nameless(names: NameIndex, nvme: NvmeTier, found: Replayed, *, killed: bool) -> None:
    """Name objects by a believed index whose names in the log are lost. The others mean nothing; they are not deleted,
    since DRAM may have one of them whole, to be written again under its id."""
    nameless = found.nameless
    for bucket, key, data in names.encoded_rows() if nameless else ():
        stored = None if data is None else nameless.get(peek_row(data)[0])
        where = names.get_bucket(bucket)
        if data is None or stored is None or where is None:
            continue
        row, kept = NameRow.decode(data), where.class_ == "durable"
        if not is_settled(stored, kept=kept, killed=killed):
            continue
        stored.size_bytes = row.size_bytes
        if has_all(stored, nvme.extent_count(row.size_bytes)):
            del nameless[row.object_id]
            stored.bucket_id, stored.kept = where.bucket_id, kept
            nvme.adopt(stored)
            found.names[row.object_id] = (data, bucket + b"\0" + key)
            found.unlogged.add(row.object_id)


def skip_ids(names: NameIndex, found: Replayed) -> None:
    """Skip all ids that the log has, so that none is given out again."""
    names.skip_ids(found.highest_id)
    if found.buckets:
        names.skip_bucket_ids(max(found.buckets))


def settle_snapshots(names: NameIndex, found: Replayed) -> None:
    """Apply what a believed index knows of files that were being written, and of what became of the others: their
    copies count only where the object that they were sealed as is lost."""
    rows = SnapshotIndex(names.environment).load()
    if rows is not None:
        found.sealed_as = {sealed_as: each for each, sealed_as in rows.items() if sealed_as != OPEN}
        found.snapshots &= {each for each, sealed_as in rows.items() if sealed_as == OPEN}


class Replaced:
    """Finds what may take the name of a lost object: the object that the log still has under it, or the copy of the
    draft that was sealed as the lost one.

    An object that was sealed over a durable one is in the index at once, and until it is on the device only DRAM has
    it. The earlier object must outlive a kill meanwhile: no seal was answered that replaced it. Once the later one is
    durable the earlier one has ended (`tiers.log.endings`), and is not in the tier. In a cache the seal was answered,
    and its name is a miss.
    """

    def __init__(self, names: NameIndex, nvme: NvmeTier, found: Replayed) -> None:
        self._names, self._nvme, self._found = names, nvme, found
        self._named: dict[bytes, int] | None = None
        self._taken: set[int] = set()
        self._rows: list[tuple[Name, NameRow]] = []

    def has_other(self, name: Name, object_id: int) -> bool:
        """Find another object for the name of this lost one; return whether there is one. `put` gives it the name."""
        other = self._found.sealed_as.get(object_id)
        if other is None or other not in self._nvme.objects or other not in self._found.names:
            other = self._named_so(name) if self._is_durable(name) else None
        if other is None or other in self._taken:
            return False
        self._taken.add(other)
        self._rows.append((name, clear_snapshot(self._found.meta(other).row)))
        return True

    def _is_durable(self, name: Name) -> bool:
        bucket = self._names.get_bucket(name.bucket)
        return bucket is not None and bucket.class_ == "durable"

    def _named_so(self, name: Name) -> int | None:
        if self._named is None:
            self._taken |= {row.object_id for _, row in _rows(self._names)}
            there = self._nvme.objects
            self._named = {name: each for each, (_, name) in self._found.names.items() if each in there}
        return self._named.get(name.bucket + b"\0" + name.key)

    def put(self) -> None:
        """Put the rows that `has_other` found, each in the place of the lost object's."""
        for name, row in self._rows:
            self._names.put(name.bucket, name.key, row)
            self._found.unlogged.add(row.object_id)


def restore_copies(parts: Parts, journal: NvmeJournal, found: Replayed, *, compare: bool) -> None:
    """Enter what the log has in the store, and log what the start has decided.

    `compare`: whether names and attributes in the log may be older than the index's (after a kill).
    """
    nvme, names = journal.nvme, parts.catalog.names
    for object_id in found.losers:
        nvme.log.append(Deletion(object_id))
    for row in names.buckets():
        if found.buckets.get(row.bucket_id) != row:
            journal.bucket(row)
    journal.buckets.complete(names.buckets())
    for row_id in found.buckets.keys() - {row.bucket_id for row in names.buckets()}:
        journal.bucket_removed(row_id)
    _restore_snapshots(parts, nvme, found)
    unknown = _restore_named(parts, journal, found, compare=compare)
    unknown += _restore_blocks(parts, nvme)
    journal.queue_unwritten()
    if unknown:  # durable objects stay until what took their names in DRAM is on the device
        nvme.log.append(Barrier())
    for object_id in unknown:
        nvme.drop(object_id, behind=nvme.objects[object_id].kept)
    journal.snapshots.index.clear()


def _restore_snapshots(parts: Parts, nvme: NvmeTier, found: Replayed) -> None:
    """Name files that were being written, as their writers last made them durable, unless a later object has the
    name."""
    names = parts.catalog.names
    drafts = found.snapshots & found.names.keys()
    sealed = {row.object_id for _, row in _rows(names)} if drafts else set()
    for object_id in drafts - sealed:
        meta = found.meta(object_id)
        if object_id not in nvme.objects or names.get_bucket(meta.bucket) is None:
            continue
        known = names.get(meta.bucket, meta.key)
        if known is None or known.sequence < meta.row.sequence:
            parts.residency.detach_replaced(known)
            names.put(meta.bucket, meta.key, clear_snapshot(meta.row))


def clear_snapshot(row: NameRow) -> NameRow:
    """Return the row as that of a sealed object, no longer of a draft's snapshot."""
    return replace(row, flags=row.flags & ~SNAPSHOT)


def _rows(names: NameIndex) -> Iterator[tuple[Name, NameRow]]:
    for bucket, key, row in names.rows():
        if row is not None:
            yield Name(bucket, key), row


def _restore_named(parts: Parts, journal: NvmeJournal, found: Replayed, *, compare: bool) -> list[int]:
    """Restore what both index and log have; return the ids of the other named objects of the log."""
    both: set[int] = set()
    catalog, objects = parts.catalog, journal.nvme.objects
    sift = partial(
        restore_rows,
        rows=objects.rows,
        logged=found.names.plain,
        apart=found.snapshots | found.unlogged,
        table=catalog.table,
        names=catalog.name_of.native,
        compare=compare,
    )
    for bucket, key, data in catalog.names.encoded_rows(sift):
        if data is None:
            continue
        object_id, flags = peek_row(data)
        stored = objects.get(object_id)
        if stored is None:
            if flags & ROW_ONLY:
                journal.directory(catalog.bucket(bucket), Name(bucket, key), NameRow.decode(data))
                both.add(object_id)
            continue
        both.add(object_id)
        known = found.names[object_id]
        differs = (compare or object_id in found.snapshots) and known != (data, bucket + b"\0" + key)
        if differs or object_id in found.unlogged:
            journal.named(object_id, Name(bucket, key), NameRow.decode(data))
        if not flags & ROW_ONLY:
            parts.placement.restore_copy(stored.key, stored.size_bytes, TIER_NVME, stored.place)
            catalog.name_of[stored.key.digest] = Name(bucket, key)
    used = [each.object_id for each in objects.used.values() if each.key.kind is Kind.OBJECT]
    return [each for each in (*used, *unrestored(objects.rows)) if each not in both]


def _restore_blocks(parts: Parts, nvme: NvmeTier) -> list[int]:
    """Restore the blocks of the log; return the ids of those whose bucket is gone, or of which DRAM has a later one."""
    buckets = {row.bucket_id: row.name for row in parts.catalog.names.buckets() if row.namespace is not None}
    blocks, objects = parts.catalog.blocks, nvme.objects
    unknown = [
        each.object_id
        for each in objects.used.values()
        if each.key.kind is Kind.BLOCK and not _restore_block(parts, each, buckets.get(each.bucket_id))
    ]
    numbers = {each: blocks.bucket_number(name) for each, name in buckets.items()}
    return unknown + restore_blocks(objects.rows, parts.catalog.table, blocks.index, numbers)


def _restore_block(parts: Parts, stored: Stored, bucket: bytes | None) -> bool:
    """Enter a block; return False for one whose bucket is gone, or of which DRAM has a later one."""
    if bucket is None:
        return False
    parent = stored.parent if any(stored.parent) else None
    block = Block(bucket, stored.uid, stored.size_bytes, stored.object_id, stored.sealed_at_ns, False, parent)
    return parts.placement.restore_block(stored.key.digest, block, TIER_NVME, stored.place)
