"""Problems of the name index and of DRAM slots, and objects that a start will miss besides those of damaged segments.

Responsibility: report what each damaged row and slot costs, given what the log has; complete `Findings.lost` and set
`Findings.lost_unknown`. A name is unknown where a record without a header, or a slot without one, may have held a
block, whose hash nothing else has; where the index is gone and with it the names of what the log does not have; and
where a row that does not match its checksum may have had another key.

Concurrency: values only.
"""

from __future__ import annotations

from itertools import chain, pairwise

from kvfs.formats import SegmentState
from kvfs.index.rows import RETIRED, ROW_ONLY, BucketRow
from kvfs.keys import block_name
from tiers.fsck.findings import CheckedLog, Cost, Findings, printable
from tiers.fsck.pool_check import BadRecord, SegmentCheck
from tiers.fsck.slot_check import BadSlot
from tiers.model.tier import Kind


def add_index_problems(findings: Findings) -> None:
    """Report an index that is not there or not to be believed, and its damaged buckets."""
    index, log = findings.index, findings.log
    where = f"name index {index.path}"
    anew = "it is built anew from the log" if log is not None else "the names in it are lost"
    if not index.exists:
        if log is not None and log.tier.objects:
            findings.add(where, "is not there", f"{anew}; what only DRAM had is lost", Cost.CACHED)
        return
    if index.fault:
        findings.add(where, index.fault, f"{anew}; what only DRAM had is lost", Cost.CACHED)
        return
    if index.bad_format:
        findings.add(where, index.bad_format, "its format is written again")
    known = {} if log is None else log.replay.found.buckets
    logged = {row.name for row in known.values()}
    for name in index.bad_buckets:
        there = name in logged
        consequence = "written again from the log" if there else "the bucket and all in it are lost"
        cost = Cost.NOTHING if there else Cost.CACHED
        findings.add(f"bucket {printable(name)}", "its row does not match its checksum", consequence, cost)


def add_row_problems(findings: Findings) -> None:
    """Report damaged rows, once the log's names are checked: it may have those of the rows."""
    index, log = findings.index, findings.log
    known = {} if log is None else log.replay.found.buckets
    unnamed = unnamed_rows(findings, log)
    durable = {row.name for row in (*index.buckets.values(), *known.values()) if row.class_ == "durable"}
    for bucket, key in index.bad_names:
        what = "its row does not match its checksum, or cannot be found by its name"
        consequence, cost = "the object has the name that the log knows", Cost.NOTHING
        if (bucket, key) in unnamed:
            consequence, cost = "the object is lost", Cost.DURABLE if bucket in durable else Cost.CACHED
        findings.add(f"name {printable(bucket)}/{printable(key)}", what, consequence, cost)


def add_slot_problems(findings: Findings) -> None:
    """Report slots that a start would not take over."""
    slots = findings.slots
    if slots.table_fault:
        findings.add(f"table {slots.table}", slots.table_fault, "what only DRAM had is lost", Cost.CACHED)
    if slots.hidden:
        what = f"its header hides {slots.hidden} slots that are in use"
        findings.add(f"table {slots.table}", what, "they are found again")
    for bad in slots.bad:
        object_id, log = None if bad.whole is None else bad.whole.object_id, findings.log
        if object_id is not None and log is not None and log.tier.holds(object_id):
            consequence, cost = f"object {object_id} is on NVMe", Cost.NOTHING
        else:
            name = "an object" if object_id is None else f"object {object_id}"
            consequence, cost = f"{name} of the cache is a miss", Cost.CACHED
        findings.add(f"DRAM slot {bad.slot}", bad.what, consequence, cost)


def complete_losses(findings: Findings) -> None:
    """Complete `lost` and `lost_unknown`, after all else is checked."""
    index, slots, log = findings.index, findings.slots, findings.log
    buckets = _buckets(findings)
    _add_damaged_rows(findings, buckets)
    for bad in slots.bad:
        _add_damaged_block(findings, bad, buckets)
    _add_rows_without_bytes(findings)
    has_blocks = any(row.namespace is not None for row in buckets.values())
    blind = has_blocks and (
        (log is not None and has_blind_holes(log, was_clean=findings.was_stopped))
        or bool(slots.table_fault)
        or any(bad.whole is None for bad in slots.bad)
    )
    if blind or (not index.rows_count and _has_unnamed(findings)):
        findings.lost_unknown = True
    _add_unknown_durables(findings, buckets)


def _add_unknown_durables(findings: Findings, buckets: dict[int, BucketRow]) -> None:
    """Report that records may have held durable objects that nothing else names: blocks, and without the index all."""
    log, index = findings.log, findings.index
    if (
        log is None
        or not findings.problems
        or not has_blind_holes(log, was_clean=findings.was_stopped, torn=findings.was_stopped)
    ):
        return
    if any(row.class_ == "durable" and (row.namespace or not index.rows_count) for row in buckets.values()):
        findings.durables_unknown = True
        what = "records are gone with their headers"
        consequence = "durable objects that nothing else names may be lost"
        findings.add(f"{log.pool.pool.directory}", what, consequence, Cost.DURABLE)


def unnamed_rows(findings: Findings, log: CheckedLog | None) -> set[tuple[bytes, bytes]]:
    """Return the damaged rows whose names the log does not have, so that a start drops them."""
    bad = set(findings.index.bad_names)
    if bad and log is not None:
        there = {row.object_id for _, _, row in findings.index.rows() if row is not None}
        for object_id, (_, name) in chain(log.replay.found.names.items(), log.names()):
            bucket, _, key = name.partition(b"\0")
            if object_id not in there:
                bad.discard((bucket, key))
    return bad


def _buckets(findings: Findings) -> dict[int, BucketRow]:
    """Return the buckets that a start knows, by id."""
    found = {} if findings.log is None else dict(findings.log.replay.found.buckets)
    if findings.index.rows_count:
        found |= {row.bucket_id: row for row in findings.index.buckets.values()}
    return found


def _add_damaged_rows(findings: Findings, buckets: dict[int, BucketRow]) -> None:
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


def _add_damaged_block(findings: Findings, bad: BadSlot, buckets: dict[int, BucketRow]) -> None:
    of, log = bad.whole, findings.log
    if of is None or not of.is_block or of.bucket_id not in buckets:
        return
    below = () if log is None else log.objects()
    if not any(each.key.kind is Kind.BLOCK and each.key.digest == of.key for each in below):
        findings.lost.add(buckets[of.bucket_id].name + b"/" + block_name(of.key))


def _add_rows_without_bytes(findings: Findings) -> None:
    """Add names whose objects have no bytes anywhere, as after a loss of DRAM."""
    index, log = findings.index, findings.log
    for bucket, key, row in index.rows():
        if row is None or row.flags & (ROW_ONLY | RETIRED) or (bucket, key) in findings.replaced:
            continue
        of = index.buckets.get(bucket)
        is_cold = row.object_id in index.cold and of is not None and of.class_ != "durable"
        in_dram = findings.slots.has(row.object_id, row.size_bytes)
        if not (is_cold or in_dram or (log is not None and log.holds(row.object_id))):
            findings.lost.add(bucket + b"/" + key)


def _has_unnamed(findings: Findings) -> bool:
    """Return whether there may be objects that nothing but the lost index named."""
    log, slots = findings.log, findings.slots
    if log is None:
        return bool(slots.whole)
    named = {object_id for object_id, _ in log.names()}
    holes = log.has_holes or has_blind_holes(log, was_clean=findings.was_stopped)
    return holes or any(not slot.is_block and slot.object_id not in named for slot in slots.whole.values())


def _is_torn(check: SegmentCheck, bad: BadRecord) -> bool:
    """Return whether a kill in a write may have left the record so."""
    return not check.has_footer and all(bad.offset > each.offset for each in check.records)


def has_blind_holes(log: CheckedLog, *, was_clean: bool, torn: bool = True) -> bool:
    """Return whether a record is gone with its header, or may be: at the end of a segment, which its footer would list.
    A segment that was open at a kill has none, and then its last record is not known. Without `torn` what a kill may
    have torn does not count: nobody was told of it."""
    if log.is_short or any(
        check.hopeless
        or check.is_cut
        or any(bad.lost and bad.header is None and (torn or not _is_torn(check, bad)) for bad in check.bad)
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
