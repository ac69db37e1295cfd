"""What damage has cost, noted in the data directory before a repair changes anything.

Responsibility: a repair deletes what is lost and writes again what is left, after which nothing shows what was there.
So its losses stand in a file until it is done and they were told; an examination adds what a killed repair has left
there.

Invariants: the file is replaced as a whole, durably. What has its name again is not said to be lost.

Concurrency: the caller has the lock of the data directory.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kvfs.index.rows import RETIRED
from kvfs.keys import block_name
from tiers.device.files import sync_directory
from tiers.fsck.findings import LOSS_NOTE, Cost, Findings, Problem
from tiers.model.tier import Kind


def write_losses(findings: Findings) -> None:
    """Note durably what the findings say is lost, and that a repair has begun. Raises OSError."""
    costly = [problem for problem in findings.problems if problem.cost]
    said = {
        "problems": [[each.where, each.what, each.consequence, int(each.cost)] for each in costly],
        "lost": sorted(name.decode("latin-1") for name in findings.lost),
        "lost_unknown": findings.lost_unknown,
        "durables_unknown": findings.durables_unknown,
    }
    path = findings.home.path / LOSS_NOTE
    scratch = path.with_suffix(".new")
    with scratch.open("w") as file:
        json.dump(said, file)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
    sync_directory(path.parent)


def add_noted(findings: Findings) -> None:
    """Add what a repair that was killed had found lost. After everything else is examined."""
    path = findings.home.path / LOSS_NOTE
    try:
        said: dict[str, Any] = json.loads(path.read_text())
        problems = [Problem(where, what, then, Cost(cost)) for where, what, then, cost in said["problems"]]
        lost = {name.encode("latin-1") for name in said["lost"]}
        unknown, durables_unknown = bool(said["lost_unknown"]), bool(said["durables_unknown"])
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError) as error:
        findings.add(
            str(path), f"cannot be read: {error}", "what a killed repair found is not known", Cost.CACHED
        )
        findings.lost_unknown = True
        return
    noted = {(problem.where, problem.what) for problem in problems}  # what they cost may not show any more
    findings.problems = [*problems, *(e for e in findings.problems if (e.where, e.what) not in noted)]
    findings.lost |= lost - _there(findings)
    findings.lost_unknown |= unknown
    findings.durables_unknown |= durables_unknown


def drop_losses(data: Path) -> None:
    """Remove the note, once a repair is done and its losses were told."""
    (data / LOSS_NOTE).unlink(missing_ok=True)


def _there(findings: Findings) -> set[bytes]:
    """Return the `bucket/key` of each name and block that a start has."""
    log, slots = findings.log, findings.slots
    found = {
        bucket + b"/" + key
        for bucket, key, row in findings.index.rows()
        if row is not None and not row.flags & RETIRED
    }
    buckets = {row.bucket_id: row.name for row in findings.index.buckets.values()}
    blocks = {(each.bucket_id, each.key) for each in slots.whole.values() if each.is_block}
    if log is not None:
        buckets |= {row.bucket_id: row.name for row in log.replay.found.buckets.values()}
        blocks |= {(each.bucket_id, each.key.digest) for each in log.objects() if each.key.kind is Kind.BLOCK}
        if not findings.index.rows_count:
            found |= {name.replace(b"\0", b"/", 1) for _, (_, name) in log.names()}
    found |= {buckets[bucket] + b"/" + block_name(digest) for bucket, digest in blocks if bucket in buckets}
    return found - findings.lost
