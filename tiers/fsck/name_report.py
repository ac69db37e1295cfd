"""Names and buckets on which the name index and the log disagree.

Responsibility: which of the two a start follows, name by name, and what is written again for that.

Concurrency: values only.
"""

from __future__ import annotations

from dataclasses import replace

from kvfs.index.rows import DIRECTORY, LINK, RETIRED, BucketRow, NameRow
from tiers.fsck.findings import CheckedLog, Cost, Findings, loss_of, printable
from tiers.fsck.object_report import ObjectReport
from tiers.log.records import MetaBody
from tiers.model.tier import Kind
from tiers.nvme.stored import Stored


class NameReport:
    """Compares the log with an index whose rows count, and reports differences."""

    def __init__(self, findings: Findings, log: CheckedLog, objects: ObjectReport) -> None:
        self.findings = findings
        self.log = log
        self.index = findings.index
        self.objects = objects
        self.complete = findings.home.clean and not log.has_holes
        """Whether the log must know all that the index does."""
        self._there: set[int] = set()
        """Ids of the index's rows."""
        self._holders: dict[bytes, int] | None = None
        """`bucket NUL key` -> object of the log that has the name, and no row."""
        logged = {row.name: row for row in log.replay.found.buckets.values()}
        bad = self.index.bad_buckets
        self._buckets_of = self.index.buckets | {name: logged[name] for name in bad if name in logged}

    def run(self) -> None:
        """Report every name and bucket on which index and log disagree."""
        self._names()
        self._buckets()

    def _names(self) -> None:
        self._there = {row.object_id for _, _, row in self.index.rows() if row is not None}
        for bucket, key, row in self.index.rows():
            if row is not None and not row.flags & RETIRED:
                self._name(bucket, key, row)
        for stored in list(self.log.objects()):
            if stored.key.kind is Kind.OBJECT and stored.object_id not in self._there:
                self._unlisted(stored)

    def _name(self, bucket: bytes, key: bytes, row: NameRow) -> None:
        where = f"name {printable(bucket)}/{printable(key)}"
        stored = self.log.tier.objects.get(row.object_id)
        of = self._buckets_of.get(bucket)
        if of is None:
            self.findings.add(where, "its bucket is not there", "the name is dropped", Cost.CACHED)
            self.findings.dropped_names.add((bucket, key))
        elif row.flags & DIRECTORY:
            return
        elif row.flags & LINK and stored is None:
            if self.complete:
                self.findings.add(where, "the log does not have the link", "logged again at the next start")
        elif not self.log.holds(row.object_id):
            self._without_bytes(where, (bucket, key), row, of)
        elif stored is not None and stored.size_bytes != _logged_bytes(row):
            self.objects.drop(stored, f"has {stored.size_bytes} bytes, its name says {row.size_bytes}")
            self.findings.dropped_names.add((bucket, key))
        elif row.object_id in self.log.renamed:
            # Beside the segments that of a name has ended which reclaim let go before its stop: nothing is wrong.
            if self.complete and row.object_id not in self.log.replay.ended.names:
                self.findings.add(where, "the log has lost it", "logged again")
        elif row.object_id not in self.log.replay.found.snapshots:
            meta = MetaBody(bucket, key, row)
            if self.log.replay.found.names[row.object_id] != (row.encode(), bucket + b"\0" + key):
                self._misnamed(where, row.object_id, meta)

    def _misnamed(self, where: str, object_id: int, meta: MetaBody) -> None:
        """Have a name logged again. After a kill the log may be behind, which a start mends."""
        if self.complete or self.log.has_holes:
            self.log.renamed[object_id] = meta
        if self.complete:
            self.findings.add(where, "the log has another name or other attributes", "logged again")

    def _without_bytes(self, where: str, name: tuple[bytes, bytes], row: NameRow, bucket: BucketRow) -> None:
        durable = bucket.class_ == "durable"
        if (row.object_id in self.index.cold and not durable) or self.findings.slots.has(
            row.object_id, row.size_bytes
        ):
            return
        reported = row.object_id in self.log.lost or row.object_id in self.log.unnamed
        by_damage = self.log.has_holes or (durable and self.complete)
        other = self._other(name, row.object_id)
        if other is not None:
            self.findings.replaced[name] = other
            # A file that was being rewritten when all ended has nothing damaged.
            is_rewritten = other in self.log.replay.found.snapshots
            if by_damage and not reported and not is_rewritten:
                self.findings.add(where, "has no bytes", "what was durable before takes its place")
            return
        if reported or by_damage:
            self.findings.dropped_names.add(name)
            self.findings.lost.add(b"/".join(name))
        if by_damage and not reported:
            self.findings.add(where, "has no bytes", *loss_of(durable))

    def _other(self, name: tuple[bytes, bytes], object_id: int) -> int | None:
        """Find what takes the place of a lost object: see `tiers.recovery.index_rebuild.Replaced`."""
        if self._holders is None:
            assert self.objects.listed is not None
            found = self.log.replay.found
            self._holders = {
                name: each
                for each, (_, name) in found.names.items()
                if self.log.holds(each) and each not in self._there
            }
        other = self.index.sealed_as.get(object_id)
        if other is None or not self.log.holds(other) or other not in self.log.replay.found.names:
            other = self._holders.get(b"\0".join(name))
        return None if other in self.findings.replaced.values() else other

    def _unlisted(self, stored: Stored) -> None:
        """Report an object of the log without a row: a start deletes it, unless it is of a file still being written."""
        if stored.object_id in self.log.replay.found.snapshots | set(self.findings.replaced.values()):
            return
        if self.index.is_damaged or not (self.complete or self.log.has_holes):
            return
        if self.log.has_holes:  # what removed it may be what is damaged
            self.log.lost[stored.object_id] = stored
            return
        where = f"object {stored.object_id}{self.objects.suffix(stored.object_id)}"
        what = "the name index does not have it"
        if self.log.tier.buckets.is_durable(stored.bucket_id):
            self.findings.restored_ids.add(stored.object_id)
            self.findings.add(where, what, "the durable object is given its name back")
        else:
            self.findings.add(where, what, "the object of the cache is dropped", Cost.CACHED)
            self.log.lost[stored.object_id] = stored

    def _buckets(self) -> None:
        """Report buckets of the index that differ in the log, besides their times, which the index alone keeps up."""
        logged = self.log.replay.found.buckets
        for row in self.index.buckets.values():
            found = logged.get(row.bucket_id)  # a change of its names moves its time in the index alone
            if self.complete and (found is None or replace(found, mtime_ns=row.mtime_ns) != row):
                self.log.rebucketed.append(row)
                where = f"bucket {printable(row.name)}"
                self.findings.add(where, "the log has it not, or otherwise", "logged again")


def _logged_bytes(row: NameRow) -> int:
    """Return the size that the log has of the object of a row."""
    return 0 if row.flags & LINK else row.size_bytes
