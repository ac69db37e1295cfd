"""Objects of the log, under the names that a start will give them.

Responsibility: what an object is called, whether DRAM has it, and reporting its loss.

Concurrency: values only.
"""

from __future__ import annotations

from kvfs.index.rows import RETIRED
from kvfs.keys import block_name
from tiers.fsck.findings import CheckedLog, Findings, loss_of, printable
from tiers.model.tier import Kind
from tiers.nvme.stored import Stored


class ObjectReport:
    """Names objects of one log, and reports those that are lost."""

    def __init__(self, findings: Findings, log: CheckedLog) -> None:
        self.findings = findings
        self.log = log
        self.index = findings.index
        self.listed = self._list() if self.index.rows_count else None
        """Object id -> `bucket/key` of each name that a start has; None where the index's rows do not count."""

    def _list(self) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        retired: set[int] = set()
        for bucket, key, row in self.index.rows():
            if row is not None and row.flags & RETIRED:  # which a start drops
                retired.add(row.object_id)
            elif row is not None:
                found[row.object_id] = bucket + b"/" + key
        if self.index.is_damaged:
            taken = set(found.values())
            for object_id, (_, name) in self.log.replay.found.names.items():
                path = name.replace(b"\0", b"/", 1)
                if path not in taken and object_id not in retired:
                    found.setdefault(object_id, path)
        return found

    def miss(self, stored: Stored) -> None:
        """Note that a start will miss the object, by its name."""
        name = self.name_of(stored.object_id)
        bucket = self.log.replay.found.buckets.get(stored.bucket_id)
        if stored.key.kind is Kind.BLOCK and bucket is not None:
            name = bucket.name + b"/" + block_name(stored.key.digest)
        if name is not None:
            self.findings.lost.add(name)

    def name_of(self, object_id: int) -> bytes | None:
        """Return the `bucket/key` of an object, None where it has no name."""
        if self.listed is not None:
            return self.listed.get(object_id)
        found = self.log.replay.found
        known = found.names.get(object_id) or found.torn.get(object_id)
        return None if known is None else known[1].replace(b"\0", b"/", 1)

    def suffix(self, object_id: int) -> str:
        """Return the name in parentheses, for messages."""
        name = self.name_of(object_id)
        return "" if name is None else f" ({printable(name)})"

    def drop(self, stored: Stored, what: str) -> None:
        """Report an object of the log that is to be deleted."""
        self.log.lost[stored.object_id] = stored
        self.miss(stored)
        self.findings.add(
            f"object {stored.object_id}{self.suffix(stored.object_id)}",
            what,
            *loss_of(self.log.tier.buckets.is_durable(stored.bucket_id)),
        )
