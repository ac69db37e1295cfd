"""Repairs what `tiers.fsck.check` found, so that it is neither served nor found again.

Responsibility: the changes, in an order in which a kill does no more damage than there was.

What is done, in this order:
- What is lost is noted (`tiers.fsck.loss_note`): the steps below end the records that tell.
- Segment files whose header is gone are renamed `*.bad`, and so are files that are short or that the device fails
  to read, once what counts in them is elsewhere. They are kept for inspection; the next start makes others. Segments on
  a block device are emptied instead.
- Objects that are lost get a TOMBSTONE; names and buckets that the log lacks are written to it.
- What counts in a segment with any fault is written again elsewhere, durably; then the segment is freed. So every
  damaged header, footer and payload is gone with it.
- Bad slots are marked free, and their files unlinked.
- Single rows of the name index are removed and put if it is whole; else another one takes its place.

Concurrency: the caller has the lock of the data directory; nothing else runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from kvfs import limits
from kvfs.formats import SegmentState
from kvfs.index.environment import highest_id
from kvfs.index.names import NameIndex
from kvfs.index.rows import BucketRow
from tiers.fsck.findings import CheckedLog, Findings
from tiers.fsck.loss_note import write_losses
from tiers.fsck.pool_check import SegmentCheck
from tiers.fsck.slot_check import free_slots
from tiers.log.entries import Deletion
from tiers.nvme.reclaimer import Reclaimer
from tiers.places.geometry import write_geometry
from tiers.recovery.index_check import MARK, IndexReader
from tiers.recovery.index_rebuild import clear_snapshot, skip_ids
from tiers.recovery.index_salvage import add_logged, clear_index, keep_cold, keep_rows, replace_index


async def repair(findings: Findings) -> None:
    """Repair every problem. Afterwards `findings.close` releases the directory.

    Raises NoSpace, DeviceFailed, OSError where something could not be done; what was is not undone.
    """
    write_losses(findings)
    if findings.log is not None:
        await _repair_log(findings.log)
    free_slots(findings.slots)
    _repair_index(findings)
    for problem in findings.problems:
        problem.repaired = True


async def _repair_log(log: CheckedLog) -> None:
    tier = log.tier
    tier.log.writer.next_sequence = log.replay.next_sequence
    for check in log.pool.checks:  # as a start does: what is ended below is replaced durably
        if check.segment.state is SegmentState.IN_USE and not check.has_footer and not check.hopeless:
            await tier.pool.device.sync(check.segment.fd)
    endings = tier.pool.endings
    endings.size_for(tier.pool.capacity_bytes)
    endings.durable_sequence = tier.pool.last_sequence
    await endings.begin(list(log.replay.unrepeated()))
    if log.pool.geometry_fault:
        write_geometry(tier.pool.directory, log.pool.geometry)
    for check in log.pool.checks:
        if check.hopeless:
            _set_aside(log, check)
    faulty = [check for check in log.pool.checks if not check.is_clean and not check.hopeless]
    if not tier.pool.free:
        await tier.grow()
    _queue_changes(log)
    await tier.log.drain()
    for check in faulty:
        await _clear(log, check)
    await tier.log.drain()
    endings.durable_sequence = tier.pool.last_sequence
    await tier.log.close()


def _queue_changes(log: CheckedLog) -> None:
    tier = log.tier
    for object_id in log.replay.found.losers:
        tier.log.append(Deletion(object_id))
    for object_id in log.lost.keys() | log.unnamed:
        if tier.drop(object_id) is None:
            tier.log.append(Deletion(object_id))
    for object_id in log.weak:
        tier.detach(object_id)
    for row in log.rebucketed:
        tier.put_bucket(row)
    for object_id, meta in log.renamed.items():
        stored = tier.objects.get(object_id)
        if stored is not None:
            tier.put_name(stored, meta)


async def _clear(log: CheckedLog, check: SegmentCheck) -> None:
    """Empty a segment: move what counts elsewhere, then free it or set it aside."""
    tier, segment = log.tier, check.segment
    if segment in tier.pool.free:
        tier.pool.free.remove(segment)
    if segment.state is SegmentState.IN_USE:
        if not tier.pool.free:
            await tier.grow()
        await Reclaimer(tier).evacuate(segment, check.records)
    if check.worn:
        _set_aside(log, check)
    else:
        await tier.pool.release(segment)


def _set_aside(log: CheckedLog, check: SegmentCheck) -> None:
    pool = log.pool.pool
    pool.places.set_aside(check.segment.number)
    check.segment.bad = True
    check.segment.state = SegmentState.FREE
    with suppress(ValueError):
        pool.free.remove(check.segment)


def _repair_index(findings: Findings) -> None:
    index, home = findings.index, findings.home
    if index.is_damaged or not index.exists:
        _replace_index(findings)
    elif findings.dropped_names or findings.restored_ids or findings.replaced:
        names = NameIndex.open(home.index, map_size_bytes=limits.DEFAULT_NAME_MAP_BYTES)
        try:
            _mark(findings, names)
            names.remove_many(sorted(findings.dropped_names))
            _restore(findings, names)
        finally:
            names.close()


def _mark(findings: Findings, names: NameIndex) -> None:
    """Mark the index as a start does: after a kill from here on it is believed only if it is whole."""
    home, findings.marked = findings.home, True
    home.begin((names.get_meta(MARK) or b"").decode(errors="replace"))
    names.put_meta(MARK, home.start.encode())
    home.begun()


def _restore(findings: Findings, names: NameIndex) -> None:
    """Put rows that only the log has, where their names are free; and have rows of lost objects stand for what was
    durable before them, as a start does."""
    if findings.log is None:
        return
    found = findings.log.replay.found
    for object_id in findings.restored_ids:
        meta = found.meta(object_id)
        if names.get_bucket(meta.bucket) and names.get(meta.bucket, meta.key) is None:
            names.put(meta.bucket, meta.key, meta.row)
    for (bucket, key), object_id in findings.replaced.items():
        names.put(bucket, key, clear_snapshot(found.meta(object_id).row))


def _replace_index(findings: Findings) -> None:
    """Build another index in the place of the old one."""
    home, log = findings.home, findings.log
    if log is None and not findings.index.rows_count:
        clear_index(home.index)
        return

    def fill(names: NameIndex) -> None:
        kept = (each for each in findings.index.rows() if each[:2] not in findings.dropped_names)
        keep_rows(names, _bucket_rows(findings), kept)
        if log is not None:
            add_logged(names, log.names())
            skip_ids(names, log.replay.found)
        if findings.index.rows_count:
            with IndexReader(findings.index.path) as old:
                keep_cold(names, old)
        if findings.slots.whole:
            names.skip_ids(highest_id(findings.slots.whole))
        _mark(findings, names)

    replace_index(home, fill)


def _bucket_rows(findings: Findings) -> Iterator[BucketRow]:
    """Yield the rows of buckets, of the old index first, where they count."""
    if findings.index.rows_count:
        yield from findings.index.buckets.values()
    if findings.log is not None:
        yield from findings.log.replay.found.buckets.values()
