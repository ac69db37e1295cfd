"""Findings of an examination: problems, and what each of them costs.

Responsibility: the state that the parts of `tiers.fsck.check` fill in, and `tiers.fsck.repair` acts on.

Concurrency: values of one task.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from kvfs.index.rows import BucketRow
from tiers.data_dir import Home
from tiers.fsck.pool_check import PoolCheck
from tiers.fsck.slot_check import SlotsCheck
from tiers.log.records import MetaBody
from tiers.nvme.stored import Stored
from tiers.nvme.tier import NvmeTier
from tiers.recovery.index_check import IndexCheck
from tiers.recovery.log_replay import Replay

LOSS_NOTE: Final = "fsck.losses"
"""In the data directory while a repair is under way, and after one that was killed (`tiers.fsck.loss_note`)."""


def printable(name: bytes) -> str:
    """Return a name as a message shows it."""
    return name.decode(errors="backslashreplace")


def loss_of(durable: bool) -> tuple[str, Cost]:
    """Return what the loss of an object means, and what it costs."""
    if durable:
        return "the durable object is lost", Cost.DURABLE
    return "the object of the cache is a miss", Cost.CACHED


class Cost(IntEnum):
    """Says what a problem has cost, or costs when it is repaired."""

    NOTHING = 0
    CACHED = 1
    """Objects of a cache: misses."""
    DURABLE = 2


@dataclass(slots=True)
class Problem:
    """Describes one thing that is not as it should be."""

    where: str
    what: str
    consequence: str
    cost: Cost = Cost.NOTHING
    repaired: bool = False


@dataclass(slots=True)
class CheckedLog:
    """Describes the NVMe tier as its records say."""

    pool: PoolCheck
    tier: NvmeTier
    replay: Replay
    has_holes: bool
    is_short: bool = False
    """It was durable to a later record than its last one."""
    lost: dict[int, Stored] = field(default_factory=dict)
    """Objects whose bytes on NVMe are damaged and which are nowhere else: to be deleted."""
    weak: set[int] = field(default_factory=set)
    """The same, but DRAM has the bytes: their records count no more, and are written again."""
    unnamed: set[int] = field(default_factory=set)
    """Objects whose newest name cannot be read and is not known: to be deleted."""
    renamed: dict[int, MetaBody] = field(default_factory=dict)
    """Names that are to be logged again."""
    rebucketed: list[BucketRow] = field(default_factory=list)

    def objects(self) -> Iterator[Stored]:
        """Yield the objects that can be read."""
        return (stored for stored in self.tier.objects.values() if self.holds(stored.object_id))

    def names(self) -> Iterator[tuple[int, tuple[bytes, bytes]]]:
        """Yield (object id, (encoded row, `bucket NUL key`)) of each name whose bytes are here or in DRAM."""
        found = self.replay.found
        for object_id, named in found.names.items():
            if self.holds(object_id) or object_id in self.weak:
                yield object_id, named
        for object_id in self.weak:
            # Of a cache's object that the log has in part a start believes the index alone (`name_survivors`).
            if object_id in found.torn and object_id not in found.names and self.is_durable(object_id):
                yield object_id, found.torn[object_id][:2]

    def is_durable(self, object_id: int) -> bool:
        """Return whether a record that holds says that the object's bucket is durable."""
        return self.tier.buckets.is_durable(self.bucket_of(object_id))

    def bucket_of(self, object_id: int) -> int:
        """Return the id of the bucket that the records say; 0 where none speaks of the object."""
        stored = self.replay.known(object_id)
        return 0 if stored is None else stored.bucket_id

    def holds(self, object_id: int) -> bool:
        """Return whether the object can be read."""
        gone = object_id in self.lost or object_id in self.weak or object_id in self.unnamed
        return object_id in self.tier.objects and not gone


@dataclass(slots=True)
class Findings:
    """Collects what an examination finds."""

    home: Home
    index: IndexCheck
    slots: SlotsCheck
    log: CheckedLog | None
    marked: bool = False
    """Whether a repair has given the index the mark of a start."""
    problems: list[Problem] = field(default_factory=list)
    bytes_verified: int = 0
    dropped_names: set[tuple[bytes, bytes]] = field(default_factory=set)
    """Rows that are to go."""
    restored_ids: set[int] = field(default_factory=set)
    """Objects of the log that get their rows back."""
    replaced: dict[tuple[bytes, bytes], int] = field(default_factory=dict)
    """Name whose object is lost -> id of what a start has it stand for: what was durable before."""
    lost: set[bytes] = field(default_factory=set)
    """`bucket/key` of each name and block that a start will miss because of the damage."""
    lost_unknown: bool = False
    """Whether damage may have cost others, which nothing that is left names."""
    durables_unknown: bool = False
    """Whether these may be durable."""

    @property
    def cost(self) -> Cost:
        """Return the highest cost of all problems."""
        return max((problem.cost for problem in self.problems), default=Cost.NOTHING)

    @property
    def was_stopped(self) -> bool:
        """Return whether the last to write was a service that was stopped, which closes its last segment with a
        footer."""
        return self.home.clean and not (self.home.path / LOSS_NOTE).exists()

    def add(self, where: str, what: str, consequence: str, cost: Cost = Cost.NOTHING) -> None:
        """Note a problem: where it is, what is wrong, what follows from it, and what that costs."""
        self.problems.append(Problem(where, what, consequence, cost))

    def close(self) -> None:
        """Release the data directory, which stays as clean as it was."""
        if self.log is not None:
            self.log.pool.pool.close_files()
        self.home.close(clean=self.marked and self.home.clean)

    def counts(self) -> dict[str, int]:
        """Count what was examined."""
        checks = [] if self.log is None else self.log.pool.checks
        return {
            "segments": len(checks),
            "records": sum(len(check.records) for check in checks),
            "objects": 0 if self.log is None else sum(1 for each in self.log.objects() if each.pieces),
            "slots": len(self.slots.whole) + len(self.slots.bad),
            **self._count_names(),
            "bytes_verified": self.bytes_verified,
        }

    def _count_names(self) -> dict[str, int]:
        """Count names and buckets of the index, or of the log where the index does not count."""
        if self.index.rows_count or self.log is None:
            return {"names": self.index.names, "buckets": len(self.index.buckets)}
        buckets = len(self.log.replay.found.buckets)
        return {"names": sum(1 for _ in self.log.names()), "buckets": buckets}
