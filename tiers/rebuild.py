"""A start's names and copies from the log: the index built anew, or held against what the records say.

Responsibility: after a replay (`tiers.replay`) and with the name index open, make index, table, catalogue and log
agree. Three cases: an index that was lost, or part of it (`tiers.salvage`), gets buckets and names from the log; one
that is believed decides which names exist, since the log is never ahead of it; what only one of the two knows is
dropped or logged.

Invariants: nothing that the believed index has removed comes back: its records are deleted in the log, so that
a later start without the index does not see them either. What it has replaced comes back only where the
replacement is lost, which was then never settled.
Concurrency: before the store serves anybody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kvfs._native.table import TIER_NVME
from kvfs.name_rows import DIRECTORY, SNAPSHOT, BucketRow, NameRow, clear_flags, peek_row
from kvfs.names import NameIndex, is_name
from tiers.adoption import Survivor
from tiers.base import NO_SLOT, Kind
from tiers.blocks import Block
from tiers.journal import NvmeJournal
from tiers.log_entries import Barrier, Deletion
from tiers.model import Name
from tiers.nvme import NvmeTier, Stored, has_all
from tiers.replay import Replayed
from tiers.snapshots import OPEN, SnapshotIndex

if TYPE_CHECKING:
    from tiers.store import TieredStore


def known_buckets(found: Replayed, repeated: Mapping[int, BucketRow]) -> list[BucketRow]:
    """List the buckets of the log, one of a name. `repeated`: rows by id, as they were written beside it, which are
    never older than the log's."""
    buckets = found.buckets | {each: row for each, row in repeated.items() if each not in found.dead}
    return list({buckets[each].name: buckets[each] for each in sorted(buckets)}.values())


def rebuild_index(names: NameIndex, found: Replayed, repeated: Mapping[int, BucketRow]) -> int:
    """Fill an empty index with the buckets and names of the log; how many names."""
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
    """Whether what survived in DRAM is what this name stands for."""
    header = survivor.sealed.header
    return row.sequence == header.sequence and row.size_bytes == survivor.sealed.size_bytes


def name_survivors(
    names: NameIndex, found: Replayed, survivors: dict[int, Survivor], *, replace: bool
) -> None:
    """Give durable objects that DRAM has, and the log only in part, the names that the log knows: damage on the device
    costs nothing of what is in DRAM. The log may be behind the names of a cache's objects whose bytes it let go.

    `replace`: whether the names that are there are the log's as well, so that the newer one counts.
    """
    for object_id in found.torn.keys() & survivors.keys():
        data, name, sequence = found.torn[object_id]
        row = NameRow.decode(data)
        bucket, _, key = name.partition(b"\0")
        where = names.get_bucket(bucket)
        if where is None or where.class_ != "durable" or not agree(row, survivors[object_id]):
            continue
        known = names.get(bucket, key)
        if known is None or (replace and found.sequences.get(known.object_id, 0) < sequence):
            names.put(bucket, key, clear_snapshot(row))


def adopt_orphans(names: NameIndex, nvme: NvmeTier, found: Replayed) -> None:
    """Objects whose bucket only the index knows, since its record in the log is damaged, count as well. A bucket that
    neither knows was removed, which waits until it is empty: what is left of it is deleted again."""
    durable = {row.bucket_id: row.class_ == "durable" for row in names.buckets()}
    for stored in found.orphans:
        if stored.bucket_id in durable:
            stored.kept = durable[stored.bucket_id]
            nvme.adopt(stored)
        else:
            found.losers.append(stored.object_id)
            found.names.pop(stored.object_id, None)


def is_settled(stored: Stored, *, kept: bool, killed: bool) -> bool:
    """Whether the extents of an object without a name in the log are the last ones: of a file that was written extent
    by extent a killed service may have left only earlier ones, and without its META nothing says so. In a durable
    bucket the endings do, before its close is answered."""
    return kept or not killed or stored.sealed_at_ns != 0


def adopt_nameless(names: NameIndex, nvme: NvmeTier, found: Replayed, *, killed: bool) -> None:
    """Objects whose name in the log is lost have the one that a believed index knows. The others mean nothing; they are
    not deleted, since DRAM may have one of them whole, to be written again under its id."""
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
    """No id that the log knows is given out again."""
    names.skip_ids(found.highest_id)
    if found.buckets:
        names.skip_bucket_ids(max(found.buckets))


def settle_snapshots(names: NameIndex, found: Replayed) -> None:
    """A believed index knows which files were still being written, and what became of the others: their copies count
    only where the object that they were sealed as is lost."""
    rows = SnapshotIndex(names.environment).load()
    if rows is not None:
        found.sealed_as = {sealed_as: each for each, sealed_as in rows.items() if sealed_as != OPEN}
        found.snapshots &= {each for each, sealed_as in rows.items() if sealed_as == OPEN}


class Replaced:
    """What may take back a name whose object is lost: the object that the log still has under it, or the copy of a
    draft that was sealed as the lost one.

    An object that was sealed over a durable one is in the index at once, and until it is on the device only DRAM has
    it: a process that is killed meanwhile must not take the earlier object with it, which nobody was told is gone.
    Once it is durable the earlier one has ended (`tiers.endings`), and is not in the tier.
    """

    def __init__(self, names: NameIndex, nvme: NvmeTier, found: Replayed) -> None:
        self._names, self._nvme, self._found = names, nvme, found
        self._claims: dict[bytes, int] | None = None
        self._taken: set[int] = set()
        self._rows: list[tuple[Name, NameRow]] = []

    def has_other(self, name: Name, object_id: int) -> bool:
        """Whether there is something to `put` under the name of this lost object."""
        other = self._found.sealed_as.get(object_id)
        if other is None or other not in self._nvme.objects or other not in self._found.names:
            other = self._claim(name)
        if other is None or other in self._taken:
            return False
        self._taken.add(other)
        self._rows.append((name, clear_snapshot(self._found.meta(other).row)))
        return True

    def _claim(self, name: Name) -> int | None:
        if self._claims is None:
            self._taken |= {row.object_id for _, row in _rows(self._names)}
            there = self._nvme.objects
            self._claims = {claim: each for each, (_, claim) in self._found.names.items() if each in there}
        return self._claims.get(name.bucket + b"\0" + name.key)

    def put(self) -> None:
        """Give the names back, each row in the place of the one that was there."""
        for name, row in self._rows:
            self._names.put(name.bucket, name.key, row)
            self._found.unlogged.add(row.object_id)


def restore_copies(store: TieredStore, nvme: NvmeTier, found: Replayed, *, compare: bool) -> NvmeJournal:
    """Have the store know what the log holds, and the log what the store has decided; the store's journal.

    `compare`: whether names and attributes in the log may be older than the index's (after a kill).
    """
    journal = NvmeJournal(store, nvme)
    for object_id in found.losers:
        nvme.log.append(Deletion(object_id))
    for row in store.names.buckets():
        if found.buckets.get(row.bucket_id) != row:
            journal.bucket(row)
    journal.buckets.complete(store.names.buckets())
    for row_id in found.buckets.keys() - {row.bucket_id for row in store.names.buckets()}:
        journal.bucket_removed(row_id)
    _restore_snapshots(store, nvme, found)
    restored = _restore_named(store, nvme, journal, found, compare=compare)
    buckets = {row.bucket_id: row.name for row in store.names.buckets() if row.namespace is not None}
    unknown = []
    for object_id, stored in nvme.objects.items():
        if stored.key.kind is Kind.BLOCK:
            known = _restore_block(store, stored, buckets.get(stored.bucket_id))
        else:
            known = object_id in restored
        if not known:
            unknown.append(object_id)
    journal.queue_unwritten()
    if unknown:  # durable objects stay until what took their names in DRAM is on the device
        nvme.log.append(Barrier())
    for object_id in unknown:
        nvme.drop(object_id, behind=nvme.objects[object_id].kept)
    journal.forget_snapshots()
    return journal


def _restore_snapshots(store: TieredStore, nvme: NvmeTier, found: Replayed) -> None:
    """Files that were being written, as their writers last made them durable: under their names from here on,
    unless a later object has that name."""
    names = store.names
    drafts = found.snapshots & found.names.keys()
    sealed = {row.object_id for _, row in _rows(names)} if drafts else set()
    for object_id in drafts - sealed:
        meta = found.meta(object_id)
        if object_id not in nvme.objects or names.get_bucket(meta.bucket) is None:
            continue
        known = names.get(meta.bucket, meta.key)
        if known is None or known.sequence < meta.row.sequence:
            if known is not None:
                store.drop_replaced(known)
            names.put(meta.bucket, meta.key, clear_snapshot(meta.row))


def clear_snapshot(row: NameRow) -> NameRow:
    return replace(row, flags=row.flags & ~SNAPSHOT)


def _rows(names: NameIndex) -> Iterator[tuple[Name, NameRow]]:
    for bucket, key, row in names.rows():
        if row is not None:
            yield Name(bucket, key), row


def _restore_named(
    store: TieredStore, nvme: NvmeTier, journal: NvmeJournal, found: Replayed, *, compare: bool
) -> set[int]:
    """Go through the index; the ids of what both it and the log have."""
    both: set[int] = set()
    for bucket, key, data in store.names.encoded_rows():
        if data is None:
            continue
        object_id, flags = peek_row(data)
        stored = nvme.objects.get(object_id)
        if stored is None:
            if flags & DIRECTORY:
                journal.directory(store.bucket(bucket), Name(bucket, key), NameRow.decode(data))
                both.add(object_id)
            continue
        both.add(object_id)
        known = found.names[object_id]
        differs = (compare or object_id in found.snapshots) and known != (data, bucket + b"\0" + key)
        if differs or object_id in found.unlogged:
            journal.named(object_id, Name(bucket, key), NameRow.decode(data))
        if not flags & DIRECTORY:
            _enter(store, stored)
            store.restore_name(stored.key.digest, Name(bucket, key))
    return both


def _enter(store: TieredStore, stored: Stored) -> None:
    """The table entry of an object that the log holds; beside the one of its copy in DRAM, if that was taken over."""
    key = stored.key
    if store.object_id_of(key.digest) is None:
        store.table.put(key.digest, int(key.kind), NO_SLOT, 0, stored.size_bytes, TIER_NVME, 0, stored.place)
    else:
        store.note_copy(key, TIER_NVME, stored.place)


def _restore_block(store: TieredStore, stored: Stored, bucket: bytes | None) -> bool:
    """False for a block whose bucket is gone, or of which DRAM has a later one."""
    digest = stored.key.digest
    known = store.object_id_of(digest)
    if bucket is None or known not in (None, stored.object_id):
        return False
    _enter(store, stored)
    if known is None:
        parent = stored.parent if any(stored.parent) else None
        block = Block(
            bucket, stored.uid, stored.size_bytes, stored.object_id, stored.sealed_at_ns, False, parent
        )
        store.restore_block(digest, block)
    return True
