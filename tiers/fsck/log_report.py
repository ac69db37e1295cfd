"""Problems of the log: files of the pool, records, and durable objects that are not all there.

Responsibility: say of each damaged record what it costs, given what DRAM and the name index have.

Concurrency: values only.
"""

from __future__ import annotations

from kvfs.formats import RecordType, SegmentState
from kvfs.index.rows import NameRow
from tiers.fsck.findings import CheckedLog, Cost, Findings, loss_of
from tiers.fsck.object_report import ObjectReport
from tiers.fsck.pool_check import BadRecord, SegmentCheck
from tiers.model.tier import Kind
from tiers.nvme.stored import Stored


class LogReport:
    """Reports the problems of one log."""

    def __init__(self, findings: Findings, log: CheckedLog, objects: ObjectReport) -> None:
        self.findings = findings
        self.log = log
        self.index = findings.index
        self.objects = objects

    def run(self) -> None:
        """Report every problem of the pool and its records."""
        if self.log.pool.geometry_fault:
            where = f"{self.log.pool.pool.directory}/pool.json"
            self.findings.add(where, self.log.pool.geometry_fault, "written again as the segments say")
        for file, faults in self.log.pool.pool.endings.faults.items():
            for fault in faults:
                where = f"{self.log.pool.pool.directory}/{file}"
                self.findings.add(where, fault, "written again from the log")
        if self.log.is_short:
            where, what = f"{self.log.pool.pool.directory}", "the newest records are gone"
            self.findings.add(where, what, "what they held is lost", Cost.CACHED)
        for check in self.log.pool.checks:
            self._segment(check)
        self._torn_in_dram()
        self._torn_durables()

    def _segment(self, check: SegmentCheck) -> None:
        where = f"segment {check.place.name}"
        consequence, cost = "what it holds is moved to another segment", Cost.NOTHING
        if check.hopeless:
            consequence, cost = "set aside, all in it is lost", Cost.CACHED
        elif check.segment.state is SegmentState.FREE:
            consequence = "holds nothing"
        elif check.is_cut:
            consequence = "what is left of it is moved to another segment, the rest is lost"
            cost = Cost.CACHED
        for fault in check.faults:
            self.findings.add(where, fault, consequence, cost)
        for bad in check.bad:
            consequence, cost = self._consequence(check, bad)
            self.findings.add(f"{where} at {bad.offset}", bad.what, consequence, cost)

    def _consequence(self, check: SegmentCheck, bad: BadRecord) -> tuple[str, Cost]:
        if not bad.lost:
            return "the footer has it, nothing is lost", Cost.NOTHING
        if bad.header is None:
            return "what it was is not known", Cost.CACHED
        if bad.type is RecordType.DATA:
            return self._lost_extent(check, bad)
        if bad.type is RecordType.META:
            return self._lost_name(bad.header["object_id"], bad.header["bucket_id"])
        if self.index.rows_count:
            return "the name index knows what it said", Cost.NOTHING
        if bad.type is RecordType.TOMBSTONE and not self.log.pool.pool.endings.faults:
            return "what it removed is written a second time", Cost.NOTHING
        if bad.type is RecordType.RENAME:
            return "a directory whose rename was not finished may be in two places", Cost.NOTHING
        if bad.type is RecordType.TOMBSTONE:
            return "names that it removed may come back", Cost.NOTHING
        return "the bucket may have older attributes, or be lost with all in it", Cost.CACHED

    def _lost_extent(self, check: SegmentCheck, bad: BadRecord) -> tuple[str, Cost]:
        assert bad.header is not None
        object_id, number = bad.header["object_id"], bad.header["extent_number"]
        stored = self.log.tier.objects.get(object_id)
        piece = stored.pieces[number] if stored is not None and number < len(stored.pieces) else None
        here = check.segment.number, bad.offset
        if stored is None or piece is None or (piece.segment, piece.offset) != here:
            return "nothing refers to it any more", Cost.NOTHING
        what = f"extent {number} of object {object_id}{self.objects.suffix(object_id)}"
        if self.findings.slots.has(object_id, stored.size_bytes):
            self.log.weak.add(object_id)
            if not check.has_footer:
                self._tear(object_id)
            return f"{what} is in DRAM, and written again at the next start", Cost.NOTHING
        self.log.lost[object_id] = stored
        if not self._is_served(stored):
            return "nothing names it any more", Cost.NOTHING
        self.objects.miss(stored)
        consequence, cost = loss_of(self.log.tier.buckets.is_durable(stored.bucket_id))
        return f"{what}: {consequence}", cost

    def _is_served(self, stored: Stored) -> bool:
        """Return whether a start would restore the object: not where the index counts and does not name it."""
        listed, object_id = self.objects.listed, stored.object_id
        if stored.key.kind is Kind.BLOCK or listed is None:
            return True
        return object_id in listed or object_id in self.log.replay.found.snapshots

    def _lost_name(self, object_id: int, bucket_id: int) -> tuple[str, Cost]:
        if object_id in self.log.renamed:
            return f"object {object_id} has its name from the name index", Cost.NOTHING
        if self.objects.listed is not None or object_id in self.log.replay.dead:
            return "nothing refers to it any more", Cost.NOTHING
        if self.log.replay.known(object_id) is None and self.log.tier.buckets.is_durable(bucket_id):
            return f"{object_id}, a directory or symbolic link of a durable bucket, is lost", Cost.DURABLE
        if object_id not in self.log.unnamed:
            return "nothing refers to it any more", Cost.NOTHING
        if self.log.is_durable(object_id):
            return f"the durable object {object_id} has lost its name, and is lost", Cost.DURABLE
        return f"object {object_id} of the cache has lost its name: a miss", Cost.CACHED

    def _tear(self, object_id: int) -> None:
        """Count the object as torn: a start that scans a segment without a footer takes no record whose payload is
        damaged."""
        found = self.log.replay.found
        sequence, named = found.sequence(object_id), found.names.pop(object_id)
        if named is not None:
            found.torn[object_id] = (*named, sequence)

    def _torn_in_dram(self) -> None:
        """Keep the names of durable objects that DRAM has whole and the log in part; they are written again."""
        for object_id, (row, _, _) in self.log.replay.found.torn.items():
            if self.log.is_durable(object_id) and self.findings.slots.has(
                object_id, NameRow.decode(row).size_bytes
            ):
                self.log.weak.add(object_id)

    def _torn_durables(self) -> None:
        """Report durable objects with a name and without all of their bytes, where records are missing."""
        if not self.log.has_holes:
            return
        gone = self._superseded() | set(self.log.replay.found.losers)
        for stored in list(self.log.replay.others.values()):
            known = stored.object_id in self.log.tier.objects or stored.object_id in self.log.replay.dead
            if known or stored.object_id in gone or not self.log.tier.buckets.is_durable(stored.bucket_id):
                continue
            torn = stored.size_bytes and not (stored.pieces and stored.readable)
            has_name = self.log.replay.has_name(stored.object_id)
            if has_name and torn and stored.object_id not in self.findings.slots.whole:
                self.objects.drop(stored, "its bytes are not all there")

    def _superseded(self) -> set[int]:
        """Return objects that are not all there, and whose names later ones have."""
        found = self.log.replay.found
        holders = {name: each for each, (_, name) in found.names.items()}
        return {
            object_id
            for object_id, (_, name, sequence) in found.torn.items()
            if found.sequence(holders.get(name, 0)) > sequence
        }
