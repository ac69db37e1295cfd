"""What a start will miss besides what the segments' own damage costs: names of damaged rows and slots, and what nothing
that is left can name.

Responsibility: complete `Findings.lost` and set `Findings.lost_unknown`. A name is unknown where a record without a
header, or a slot without one, may have held a block, whose hash nothing else has; where the index is gone and with it
the names of what the log does not have; and where a row that does not match its checksum may have had another key.

Concurrency: values only.
"""

from __future__ import annotations

from itertools import chain, pairwise
from typing import TYPE_CHECKING

from kvfs.formats import SegmentState
from kvfs.keys import block_name
from kvfs.name_rows import DIRECTORY, RETIRED, BucketRow
from tiers.base import Kind
from tiers.slot_check import BadSlot

if TYPE_CHECKING:
    from tiers.fsck import Findings, Log


def complete_losses(findings: Findings) -> None:
    """After all else is judged."""
    index, slots, log = findings.index, findings.slots, findings.log
    buckets = _buckets(findings)
    _lose_rows(findings, buckets)
    for bad in slots.bad:
        _lose_block(findings, bad, buckets)
    _lose_without_bytes(findings)
    has_blocks = any(row.namespace is not None for row in buckets.values())
    blind = has_blocks and (
        (log is not None and has_blind_holes(log, was_clean=findings.home.clean))
        or bool(slots.table_fault)
        or any(bad.whole is None for bad in slots.bad)
    )
    if blind or (not index.rows_count and _has_unnamed(findings)):
        findings.lost_unknown = True


def unnamed_rows(findings: Findings, log: Log | None) -> set[tuple[bytes, bytes]]:
    """Damaged rows whose names the log does not have, so that a start drops them."""
    bad = set(findings.index.bad_names)
    if bad and log is not None:
        there = {row.object_id for _, _, row in findings.index.rows() if row is not None}
        for object_id, (_, name) in chain(log.replay.found.names.items(), log.names()):
            bucket, _, key = name.partition(b"\0")
            if object_id not in there:
                bad.discard((bucket, key))
    return bad


def _buckets(findings: Findings) -> dict[int, BucketRow]:
    """Those that a start knows, by id."""
    found = {} if findings.log is None else dict(findings.log.replay.found.buckets)
    if findings.index.rows_count:
        found |= {row.bucket_id: row for row in findings.index.buckets.values()}
    return found


def _lose_rows(findings: Findings, buckets: dict[int, BucketRow]) -> None:
    if not findings.index.is_damaged or not findings.index.rows_count:
        return
    unnamed = unnamed_rows(findings, findings.log)
    findings.lost |= {b"/".join(name) for name in unnamed if all(name)}
    gone = set(findings.index.bad_buckets) - {row.name for row in buckets.values()}
    for bucket, key, row in findings.index.rows() if gone else ():
        if bucket in gone and row is not None and not row.flags & RETIRED:
            findings.lost.add(bucket + b"/" + key)
    if unnamed or gone:
        findings.lost_unknown = True


def _lose_block(findings: Findings, bad: BadSlot, buckets: dict[int, BucketRow]) -> None:
    of, log = bad.whole, findings.log
    if of is None or not of.is_block or of.bucket_id not in buckets:
        return
    below = () if log is None else log.objects()
    if not any(each.key.kind is Kind.BLOCK and each.key.digest == of.key for each in below):
        findings.lost.add(buckets[of.bucket_id].name + b"/" + block_name(of.key))


def _lose_without_bytes(findings: Findings) -> None:
    """Names that have no bytes anywhere, be it that DRAM is gone."""
    index, log = findings.index, findings.log
    for bucket, key, row in index.rows():
        if row is None or row.flags & (DIRECTORY | RETIRED) or (bucket, key) in findings.replaced:
            continue
        of = index.buckets.get(bucket)
        is_cold = row.object_id in index.cold and of is not None and of.class_ != "durable"
        slot = findings.slots.whole.get(row.object_id)
        in_dram = slot is not None and slot.size_bytes == row.size_bytes
        if not (is_cold or in_dram or (log is not None and log.holds(row.object_id))):
            findings.lost.add(bucket + b"/" + key)


def _has_unnamed(findings: Findings) -> bool:
    """Whether there may be objects that nothing but the lost index named."""
    log, slots = findings.log, findings.slots
    if log is None:
        return bool(slots.whole)
    named = {object_id for object_id, _ in log.names()}
    holes = log.has_holes or has_blind_holes(log, was_clean=findings.home.clean)
    return holes or any(not slot.is_block and slot.object_id not in named for slot in slots.whole.values())


def has_blind_holes(log: Log, *, was_clean: bool) -> bool:
    """Whether something is gone of which not even the header is left, or may be: the end of a segment, which its footer
    would name. A segment that was open at a kill has none, and then nothing tells what came last."""
    if log.is_short or any(
        check.hopeless or check.is_cut or any(bad.lost and bad.header is None for bad in check.bad)
        for check in log.pool.checks
    ):
        return True
    used = [check for check in log.pool.checks if check.segment.state is SegmentState.IN_USE]
    used.sort(key=lambda check: check.segment.sequence)
    if was_clean and used and not used[-1].has_footer:
        return True
    return any(
        not one.has_footer and one.segment.last_sequence + 1 < other.segment.first_sequence
        for one, other in pairwise(used)
    )
