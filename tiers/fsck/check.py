"""The examination of a data directory that no service uses.

Responsibility: verify segments, slots and name index (`tiers.fsck.segment_check`, `tiers.fsck.slot_check`,
`tiers.recovery.index_check`), compare them, and report of each problem what it is, where, and what it costs. Nothing
is changed and nothing printed; `tiers.fsck.repair` acts on the findings.

What decides where two disagree:
- A name index that is whole and the last one decides which names exist and what they stand for, as at a start
  (`tiers.recovery.index_rebuild`): the log is never ahead of it. With one exception: a durable object that only a
  complete log knows, after a clean stop, gets its name again.
- A damaged index is replaced: its rows that hold count, then the names of the log that they do not mention.
- An old index (a power failure, a copy) does not count at all.

A name in a cache bucket without bytes is no problem: DRAM is lost at a reboot, and the next start drops the name.

Concurrency: one task per segment, limits.FSCK_SEGMENTS at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import trio

from kvfs import limits
from kvfs.errors import Corrupt, NotFound
from kvfs.formats import RecordType, SegmentState
from kvfs.index.rows import LINK, ROW_ONLY
from tiers.data_dir import Home
from tiers.device.device import Device
from tiers.fsck.findings import CheckedLog, Findings
from tiers.fsck.index_report import add_index_problems, add_row_problems, add_slot_problems, complete_losses
from tiers.fsck.log_report import LogReport
from tiers.fsck.loss_note import add_noted
from tiers.fsck.name_report import NameReport
from tiers.fsck.object_report import ObjectReport
from tiers.fsck.pool_check import PoolCheck, SegmentCheck, look_at_pool
from tiers.fsck.segment_check import Tick, check_segment
from tiers.fsck.slot_check import check_slots
from tiers.log.bucket_files import BucketFiles
from tiers.log.ending_pages import Ended
from tiers.log.records import MetaBody
from tiers.log.segments import list_records
from tiers.model.tier import Kind
from tiers.nvme.stored import Stored
from tiers.nvme.tier import NvmeTier
from tiers.recovery.index_check import check_index
from tiers.recovery.index_rebuild import is_settled
from tiers.recovery.log_replay import Replay


class Progress(Protocol):
    """Follows an examination."""

    def begin(self, what: str, total_bytes: int) -> None:
        """Note that a part begins; it verifies at most so many bytes, 0 where that is not known."""

    def advance(self, size_bytes: int) -> None:
        """Note that so many further bytes were verified."""


async def examine(
    home: Home, device: Device, segments: Path, progress: Progress, devices: Sequence[Path] = ()
) -> Findings:
    """Verify everything in a data directory whose lock the caller has. `segments`: the directory of the NVMe tier;
    `devices`: its block devices, where they are not named as `pool.json` there says.

    Raises NotFound where durable objects have no segments, FormatMismatch for another store's segments and for newer
    formats, DeviceFailed, OSError.
    """
    index = check_index(home)  # forks: before there are threads
    pool = await look_at_pool(device, segments, home.store_id, devices)
    if pool is None and any(row.class_ == "durable" for row in index.buckets.values()):
        raise NotFound(f"{segments}: no segments there, but the store has durable buckets")
    verified = 0

    def tick(size_bytes: int) -> None:
        nonlocal verified
        verified += size_bytes
        progress.advance(size_bytes)

    progress.begin("DRAM", 0)
    slots = await trio.to_thread.run_sync(check_slots, home.dram, home.store_id, tick)
    findings = Findings(home, index, slots, None)
    if pool is not None:
        progress.begin("NVMe", pool.bytes_to_verify)
        await _check_segments(pool, tick)
        findings.log = _replay(findings, pool, await pool.pool.endings.load())
    findings.bytes_verified = verified
    add_index_problems(findings)
    add_slot_problems(findings)
    if findings.log is not None:
        objects = ObjectReport(findings, findings.log)
        LogReport(findings, findings.log, objects).run()
        if index.rows_count:
            NameReport(findings, findings.log, objects).run()
    if not index.fault:
        add_row_problems(findings)
    complete_losses(findings)
    add_noted(findings)
    return findings


async def _check_segments(pool: PoolCheck, tick: Tick) -> None:
    limiter = trio.CapacityLimiter(limits.FSCK_SEGMENTS)

    async def one(check: SegmentCheck) -> None:
        async with limiter:
            await check_segment(pool.pool, check, tick)

    async with trio.open_nursery() as nursery:
        for check in pool.checks:
            if check.segment.state is SegmentState.IN_USE:
                nursery.start_soon(one, check)


def _replay(findings: Findings, pool: PoolCheck, ended: Ended) -> CheckedLog:
    """Replay the records; objects whose names are damaged get those of the index."""
    tier = NvmeTier(pool.pool)
    replay = Replay(tier, ended)
    used = [check for check in pool.checks if check.segment.state is SegmentState.IN_USE]
    for check in sorted(used, key=lambda check: check.segment.sequence):
        try:
            replay.take(check.segment, list_records(check.records))
        except Corrupt as error:
            check.faults.append(str(error))
    is_short = ended.durable_sequence > pool.pool.last_sequence
    has_holes = is_short or any(check.has_holes for check in pool.checks)
    log = CheckedLog(pool, tier, replay, has_holes, is_short)
    _name_again(findings, log, _nameless(log))
    if log.has_holes:
        known = (
            findings.index.buckets if findings.index.rows_count else BucketFiles(findings.home.path).load()
        )
        for row in known.values():
            if row.bucket_id not in replay.bucket_places.keys() | replay.dead:
                replay.found.buckets[row.bucket_id] = row
                tier.put_bucket(row)
    replay.finish()
    return log


def _nameless(log: CheckedLog) -> set[int]:
    """Return the objects whose newest META is damaged."""
    found = set()
    for check in log.pool.checks:
        for bad in check.bad:
            if bad.lost and bad.header is not None and bad.type is RecordType.META:
                object_id = bad.header["object_id"]
                stored = log.replay.objects.get(object_id)
                if stored is not None and _meta_sequence(log, stored) < bad.header["sequence"]:
                    found.add(object_id)
    return found - log.replay.dead


def _meta_sequence(log: CheckedLog, stored: Stored) -> int:
    """Return the sequence of the newest META that holds."""
    if stored.meta is None:
        return 0
    number, offset = stored.meta[0]
    check = next(each for each in log.pool.checks if each.segment.number == number)
    return next(int(each.header["sequence"]) for each in check.records if each.offset == offset)


def _name_again(findings: Findings, log: CheckedLog, nameless: set[int]) -> None:
    """Name objects by the index whose names are missing in the log; others are `unnamed`."""
    named = log.replay.bodies.keys() | log.replay.dead
    wanted = nameless | {
        stored.object_id
        for stored in log.replay.objects.values()
        if stored.key.kind is Kind.OBJECT and stored.object_id not in named
    }
    for bucket, key, row in findings.index.rows() if wanted else ():
        if row is not None and row.object_id in wanted:
            stored, of = log.replay.objects[row.object_id], findings.index.buckets.get(bucket)
            kept = of is not None and of.class_ == "durable"
            killed = not findings.home.clean
            if not row.flags & ROW_ONLY and not is_settled(stored, kept=kept, killed=killed):
                continue
            meta = log.renamed[row.object_id] = MetaBody(bucket, key, row)
            log.replay.bodies[row.object_id] = meta.encode()
            log.replay.newest[row.object_id] = log.replay.next_sequence  # no name of the log is newer
            stored.size_bytes = 0 if row.flags & LINK else row.size_bytes
            stored.bucket_id = stored.bucket_id if of is None else of.bucket_id
    for object_id in nameless - log.renamed.keys():
        log.unnamed.add(object_id)
        log.replay.bodies.pop(object_id, None)
        log.replay.objects[object_id].meta = None
