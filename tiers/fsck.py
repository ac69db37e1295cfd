"""What is wrong with a data directory that no service uses.

Responsibility: verify segments, slots and name index (`tiers.verify`, `tiers.slot_check`, `tiers.index_check`), hold
them against each other, and say of each problem what it is, where, and what it costs. Nothing is changed and nothing
printed; `tiers.repair` acts on what is found here.

What decides where two disagree:
- A name index that is whole and the last one decides which names exist and what they stand for, as at a start
  (`tiers.rebuild`): the log is never ahead of it. With one exception: a durable object that only a complete log
  knows, after a clean stop, is given back its name.
- A damaged index is replaced: its rows that hold count, then the names of the log that they do not mention.
- An old index (a power failure, a copy) does not count at all.

A name in a cache bucket without bytes is no problem: DRAM is lost at a reboot, and the next start drops the name.

Concurrency: one task per segment, limits.FSCK_SEGMENTS at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Protocol

import trio

from kvfs import limits
from kvfs.errors import Corrupt, NotFound
from kvfs.formats import RecordType, SegmentState
from kvfs.keys import block_name
from kvfs.name_rows import DIRECTORY, RETIRED, BucketRow, NameRow
from kvfs.records import MetaBody
from tiers.base import Kind
from tiers.bucket_files import BucketFiles
from tiers.device import Device
from tiers.endings import Ended
from tiers.fsck_losses import complete_losses, unnamed_rows
from tiers.home import Home
from tiers.index_check import IndexCheck, check_index
from tiers.nvme import NvmeTier, Stored
from tiers.rebuild import is_settled
from tiers.replay import Replay
from tiers.segments import list_records
from tiers.slot_check import SlotsCheck, check_slots
from tiers.verify import BadRecord, PoolCheck, SegmentCheck, Tick, check_segment, look_at_pool


class Cost(IntEnum):
    """What a problem has cost, or costs when it is repaired."""

    NOTHING = 0
    CACHED = 1
    """Objects of a cache: misses."""
    DURABLE = 2


@dataclass(slots=True)
class Problem:
    """One thing that is not as it should be."""

    where: str
    what: str
    consequence: str
    cost: Cost = Cost.NOTHING
    repaired: bool = False


class Progress(Protocol):
    """Told how an examination goes on."""

    def begin(self, what: str, total_bytes: int) -> None:
        """A part of it begins, which verifies at most so many bytes; 0 where that is not known."""

    def advance(self, size_bytes: int) -> None:
        """So many further bytes were verified."""


@dataclass(slots=True)
class Log:
    """The NVMe tier as its records say."""

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
        """Those that can be read."""
        gone = self.lost.keys() | self.weak | self.unnamed
        return (stored for stored in self.tier.objects.values() if stored.object_id not in gone)

    def names(self) -> Iterator[tuple[int, tuple[bytes, bytes]]]:
        """(object id, (encoded row, `bucket NUL key`)) of each name whose object has its bytes here or in DRAM."""
        found = self.replay.found
        for object_id, named in found.names.items():
            if self.holds(object_id) or object_id in self.weak:
                yield object_id, named
        for object_id in self.weak:
            # Of a cache's object that the log has in part a start believes the index alone (`name_survivors`).
            if object_id in found.torn and object_id not in found.names and self.is_durable(object_id):
                yield object_id, found.torn[object_id][:2]

    def is_durable(self, object_id: int) -> bool:
        """Whether a record that holds says that the object's bucket is."""
        return self.tier.is_durable(self.replay.objects[object_id].bucket_id)

    def holds(self, object_id: int) -> bool:
        stored = self.tier.objects.get(object_id)
        gone = object_id in self.lost or object_id in self.weak or object_id in self.unnamed
        return stored is not None and not gone


@dataclass(slots=True)
class Findings:
    """All that an examination found."""

    home: Home
    index: IndexCheck
    slots: SlotsCheck
    log: Log | None
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

    @property
    def cost(self) -> Cost:
        return max((problem.cost for problem in self.problems), default=Cost.NOTHING)

    def add(self, where: str, what: str, consequence: str, cost: Cost = Cost.NOTHING) -> None:
        self.problems.append(Problem(where, what, consequence, cost))

    def close(self) -> None:
        """Let go of the data directory, which stays as clean as it was."""
        if self.log is not None:
            self.log.pool.pool.close_files()
        self.home.close(clean=self.marked and self.home.clean)

    def counts(self) -> dict[str, int]:
        """How much was looked at."""
        checks = [] if self.log is None else self.log.pool.checks
        return {
            "segments": len(checks),
            "records": sum(len(check.records) for check in checks),
            "objects": 0 if self.log is None else sum(1 for each in self.log.objects() if each.pieces),
            "slots": len(self.slots.whole) + len(self.slots.bad),
            "names": self._count_names(),
            "buckets": self._count_buckets(),
            "bytes_verified": self.bytes_verified,
        }

    def _count_names(self) -> int:
        """Those that count: of an index that does not, the log's."""
        if self.index.rows_count or self.log is None:
            return self.index.names
        return sum(1 for _ in self.log.names())

    def _count_buckets(self) -> int:
        if self.index.rows_count or self.log is None:
            return len(self.index.buckets)
        return len(self.log.replay.found.buckets)


async def examine(home: Home, device: Device, segments: Path, progress: Progress) -> Findings:
    """Verify everything in a data directory whose lock the caller has.

    Raises NotFound where durable objects have no segments, FormatMismatch for another store's segments and for newer
    formats, DeviceFailed, OSError.
    """
    index = check_index(home)  # forks: before there are threads
    pool = look_at_pool(device, segments, home.store_id)
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
    _judge_index(findings)
    _judge_slots(findings)
    if findings.log is not None:
        _Judge(findings, findings.log).run()
    if not findings.index.doubt:
        _judge_rows(findings)
    complete_losses(findings)
    return findings


async def _check_segments(pool: PoolCheck, tick: Tick) -> None:
    turns = trio.CapacityLimiter(limits.FSCK_SEGMENTS)

    async def one(check: SegmentCheck) -> None:
        async with turns:
            await check_segment(pool.pool, check, tick)

    async with trio.open_nursery() as nursery:
        for check in pool.checks:
            if check.segment.state is SegmentState.IN_USE:
                nursery.start_soon(one, check)


def _replay(findings: Findings, pool: PoolCheck, ended: Ended) -> Log:
    """What the records say; the names of those whose own are damaged come from the index."""
    tier = NvmeTier(pool.pool, 1)
    replay = Replay(tier, ended)
    used = [check for check in pool.checks if check.segment.state is SegmentState.IN_USE]
    for check in sorted(used, key=lambda check: check.segment.sequence):
        try:
            replay.take(check.segment, list_records(check.records))
        except Corrupt as error:
            check.faults.append(str(error))
    is_short = ended.durable_sequence > pool.pool.last_sequence
    has_holes = is_short or any(check.has_holes for check in pool.checks)
    log = Log(pool, tier, replay, has_holes, is_short)
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


def _nameless(log: Log) -> set[int]:
    """Objects whose newest META is damaged."""
    found = set()
    for check in log.pool.checks:
        for bad in check.bad:
            if bad.lost and bad.header is not None and bad.type is RecordType.META:
                object_id = bad.header["object_id"]
                stored = log.replay.objects.get(object_id)
                if stored is not None and _meta_sequence(log, stored) < bad.header["sequence"]:
                    found.add(object_id)
    return found - log.replay.dead


def _meta_sequence(log: Log, stored: Stored) -> int:
    """Of the newest META that holds."""
    if stored.meta is None:
        return 0
    number, offset = stored.meta[0]
    check = next(each for each in log.pool.checks if each.segment.number == number)
    return next(int(each.header["sequence"]) for each in check.records if each.offset == offset)


def _name_again(findings: Findings, log: Log, nameless: set[int]) -> None:
    """Give objects whose names are missing in the log those of the index; what has none there is `unnamed`."""
    named = log.replay.bodies.keys() | log.replay.dead
    wanted = nameless | {
        object_id
        for object_id, stored in log.replay.objects.items()
        if stored.key.kind is Kind.OBJECT and object_id not in named
    }
    for bucket, key, row in findings.index.rows() if wanted else ():
        if row is not None and row.object_id in wanted:
            stored, of = log.replay.objects[row.object_id], findings.index.buckets.get(bucket)
            kept = of is not None and of.class_ == "durable"
            if not is_settled(stored, kept=kept, killed=not findings.home.clean):
                continue
            meta = log.renamed[row.object_id] = MetaBody(bucket, key, row)
            log.replay.bodies[row.object_id] = meta.encode()
            log.replay.newest[row.object_id] = log.replay.next_sequence  # no name of the log is newer
            stored.size_bytes = row.size_bytes
            stored.bucket_id = stored.bucket_id if of is None else of.bucket_id
    for object_id in nameless - log.renamed.keys():
        log.unnamed.add(object_id)
        log.replay.bodies.pop(object_id, None)
        log.replay.objects[object_id].meta = None


# --- index and slots -----------------------------------------------------------------------------------------
def _judge_index(findings: Findings) -> None:
    index, log = findings.index, findings.log
    where = f"name index {index.path}"
    anew = "it is built anew from the log" if log is not None else "the names in it are lost"
    if not index.exists:
        if log is not None and log.tier.objects:
            findings.add(where, "is not there", f"{anew}; what only DRAM had is lost", Cost.CACHED)
        return
    if index.doubt:
        findings.add(where, index.doubt, f"{anew}; what only DRAM had is lost", Cost.CACHED)
        return
    known = {} if log is None else log.replay.found.buckets
    logged = {row.name for row in known.values()}
    for name in index.bad_buckets:
        there = name in logged
        consequence = "written again from the log" if there else "the bucket and all in it are lost"
        cost = Cost.NOTHING if there else Cost.CACHED
        findings.add(f"bucket {_text(name)}", "its row does not match its checksum", consequence, cost)


def _judge_rows(findings: Findings) -> None:
    """After the log's names are judged: it may have those of damaged rows."""
    index, log = findings.index, findings.log
    known = {} if log is None else log.replay.found.buckets
    unnamed = unnamed_rows(findings, log)
    durable = {row.name for row in (*index.buckets.values(), *known.values()) if row.class_ == "durable"}
    for bucket, key in index.bad_names:
        what = "its row does not match its checksum, or cannot be found by its name"
        consequence, cost = "the object has the name that the log knows", Cost.NOTHING
        if (bucket, key) in unnamed:
            consequence, cost = "the object is lost", Cost.DURABLE if bucket in durable else Cost.CACHED
        findings.add(f"name {_text(bucket)}/{_text(key)}", what, consequence, cost)


def _judge_slots(findings: Findings) -> None:
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


# --- the log -------------------------------------------------------------------------------------------------
class _Judge:
    """The problems of the log, and of log and index together."""

    def __init__(self, findings: Findings, log: Log) -> None:
        self.findings = findings
        self.log = log
        self.index = findings.index
        self.complete = findings.home.clean and not log.has_holes
        """Whether the log must know all that the index does."""
        self._there: set[int] = set()
        """Ids of the index's rows."""
        self._claims: dict[bytes, int] | None = None
        logged = {row.name: row for row in log.replay.found.buckets.values()}
        bad = self.index.bad_buckets
        self._buckets_of = self.index.buckets | {name: logged[name] for name in bad if name in logged}
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

    def run(self) -> None:
        if self.log.pool.geometry_fault:
            where = f"{self.log.pool.pool.directory}/pool.json"
            self.findings.add(where, self.log.pool.geometry_fault, "written again as the segments say")
        endings = self.log.pool.pool.endings.faults
        for file, faults in endings.items():
            for fault in faults:
                self.findings.add(
                    f"{self.log.pool.pool.directory}/{file}", fault, "written again from the log"
                )
        if self.log.is_short:
            where, what = f"{self.log.pool.pool.directory}", "the newest records are gone"
            self.findings.add(where, what, "what they held is lost", Cost.CACHED)
        for check in self.log.pool.checks:
            self._segment(check)
        self._torn_in_dram()
        self._torn_durables()
        if self.index.rows_count:
            self._names()
            self._buckets()

    def _segment(self, check: SegmentCheck) -> None:
        where = f"segment {check.path.name}"
        for fault in check.faults:
            if check.hopeless:
                consequence = "set aside as *.bad, all in it is lost"
                self.findings.add(where, fault, consequence, Cost.CACHED)
            elif check.segment.state is SegmentState.FREE:
                self.findings.add(where, fault, "holds nothing")
            elif check.is_cut:
                consequence = "what is left of it is moved to another segment, the rest is lost"
                self.findings.add(where, fault, consequence, Cost.CACHED)
            else:
                self.findings.add(where, fault, "what it holds is moved to another segment")
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
            return self._lost_name(bad.header["object_id"])
        if self.index.rows_count:
            return "the name index knows what it said", Cost.NOTHING
        if bad.type is RecordType.TOMBSTONE and not self.log.pool.pool.endings.faults:
            return "what it removed is written a second time", Cost.NOTHING
        if bad.type is RecordType.TOMBSTONE:
            return "names that it removed may come back", Cost.NOTHING
        return "the bucket may have older attributes, or be lost with all in it", Cost.CACHED

    def _lost_extent(self, check: SegmentCheck, bad: BadRecord) -> tuple[str, Cost]:
        assert bad.header is not None
        object_id, number = bad.header["object_id"], bad.header["extent_number"]
        stored = self.log.tier.objects.get(object_id)
        piece = stored.pieces[number] if stored is not None and number < len(stored.pieces) else None
        if (
            stored is None
            or piece is None
            or (piece.segment, piece.offset)
            != (
                check.segment.number,
                bad.offset,
            )
        ):
            return "nothing refers to it any more", Cost.NOTHING
        what = f"extent {number} of object {object_id}{self._called(object_id)}"
        if self._in_dram(object_id, stored.size_bytes):
            self.log.weak.add(object_id)
            if not check.has_footer:
                self._tear(object_id)
            return f"{what} is in DRAM, and written again at the next start", Cost.NOTHING
        self.log.lost[object_id] = stored
        if not self._is_served(stored):
            return "nothing names it any more", Cost.NOTHING
        self._lose(stored)
        if self.log.tier.is_durable(stored.bucket_id):
            return f"{what}: the durable object is lost", Cost.DURABLE
        return f"{what}: the object of the cache is a miss", Cost.CACHED

    def _in_dram(self, object_id: int, size_bytes: int) -> bool:
        slot = self.findings.slots.whole.get(object_id)
        return slot is not None and slot.size_bytes == size_bytes

    def _is_served(self, stored: Stored) -> bool:
        """Whether a start would show the object: it does not, where the index counts and does not name it."""
        snapshots = self.log.replay.found.snapshots
        named = self.listed is None or stored.object_id in self.listed or stored.object_id in snapshots
        return stored.key.kind is Kind.BLOCK or named

    def _lose(self, stored: Stored) -> None:
        """A start will miss the object, by its name."""
        name = self._name_of(stored.object_id)
        bucket = self.log.replay.found.buckets.get(stored.bucket_id)
        if stored.key.kind is Kind.BLOCK and bucket is not None:
            name = bucket.name + b"/" + block_name(stored.key.digest)
        if name is not None:
            self.findings.lost.add(name)

    def _name_of(self, object_id: int) -> bytes | None:
        """`bucket/key`."""
        if self.listed is not None:
            return self.listed.get(object_id)
        found = self.log.replay.found
        known = found.names.get(object_id) or found.torn.get(object_id)
        return None if known is None else known[1].replace(b"\0", b"/", 1)

    def _called(self, object_id: int) -> str:
        name = self._name_of(object_id)
        return "" if name is None else f" ({_text(name)})"

    def _lost_name(self, object_id: int) -> tuple[str, Cost]:
        if object_id in self.log.renamed:
            return f"object {object_id} has its name from the name index", Cost.NOTHING
        if object_id not in self.log.unnamed or self.listed is not None:
            return "nothing refers to it any more", Cost.NOTHING
        if self.log.tier.is_durable(self.log.replay.objects[object_id].bucket_id):
            return f"the durable object {object_id} has lost its name, and is lost", Cost.DURABLE
        return f"object {object_id} of the cache has lost its name: a miss", Cost.CACHED

    def _drop(self, stored: Stored, what: str) -> None:
        durable = self.log.tier.is_durable(stored.bucket_id)
        self.log.lost[stored.object_id] = stored
        self._lose(stored)
        self.findings.add(
            f"object {stored.object_id}{self._called(stored.object_id)}",
            what,
            "the durable object is lost" if durable else "the object of the cache is a miss",
            Cost.DURABLE if durable else Cost.CACHED,
        )

    def _tear(self, object_id: int) -> None:
        """Take the object for one that is not all there: a start that scans a segment, for want of a footer, takes no
        record whose payload does not hold."""
        found = self.log.replay.found
        named = found.names.pop(object_id, None)
        if named is not None:
            found.torn[object_id] = (*named, self.log.replay.newest.get(object_id, 0))

    def _torn_in_dram(self) -> None:
        """What the log has only in part and DRAM whole keeps its name in a durable bucket, and is written again."""
        for object_id, (row, _, _) in self.log.replay.found.torn.items():
            if self.log.is_durable(object_id) and self._in_dram(object_id, NameRow.decode(row).size_bytes):
                self.log.weak.add(object_id)

    def _torn_durables(self) -> None:
        """Durable objects with a name and without all of their bytes, where records are missing."""
        if not self.log.has_holes:
            return
        gone = self._superseded() | set(self.log.replay.found.losers)
        for stored in self.log.replay.objects.values():
            known = stored.object_id in self.log.tier.objects or stored.object_id in self.log.replay.dead
            if known or stored.object_id in gone or not self.log.tier.is_durable(stored.bucket_id):
                continue
            torn = stored.size_bytes and not (stored.pieces and stored.readable)
            has_name = stored.object_id in self.log.replay.bodies
            if has_name and torn and stored.object_id not in self.findings.slots.whole:
                self._drop(stored, "its bytes are not all there")

    def _superseded(self) -> set[int]:
        """Objects that are not all there, and whose names later ones have."""
        found = self.log.replay.found
        holders = {claim: each for each, (_, claim) in found.names.items()}
        return {
            object_id
            for object_id, (_, name, sequence) in found.torn.items()
            if found.sequences.get(holders.get(name, 0), 0) > sequence
        }

    # --- and the index ------------------------------------------------------------------------------------

    def _names(self) -> None:
        self._there = {row.object_id for _, _, row in self.index.rows() if row is not None}
        for bucket, key, row in self.index.rows():
            if row is not None and not row.flags & RETIRED:
                self._name(bucket, key, row)
        for stored in list(self.log.objects()):
            if stored.key.kind is Kind.OBJECT and stored.object_id not in self._there:
                self._unlisted(stored)

    def _name(self, bucket: bytes, key: bytes, row: NameRow) -> None:
        where = f"name {_text(bucket)}/{_text(key)}"
        stored = self.log.tier.objects.get(row.object_id)
        of = self._buckets_of.get(bucket)
        if of is None:
            self.findings.add(where, "its bucket is not there", "the name is dropped", Cost.CACHED)
            self.findings.dropped_names.add((bucket, key))
        elif row.flags & DIRECTORY:
            return
        elif not self.log.holds(row.object_id):
            self._without_bytes(where, (bucket, key), row, of)
        elif stored is not None and stored.size_bytes != row.size_bytes:
            self._drop(stored, f"has {stored.size_bytes} bytes, its name says {row.size_bytes}")
            self.findings.dropped_names.add((bucket, key))
        elif row.object_id in self.log.renamed:
            if self.complete:
                self.findings.add(where, "the log has lost it", "logged again")
        elif row.object_id not in self.log.replay.found.snapshots:
            meta = MetaBody(bucket, key, row)
            if self.log.replay.found.names[row.object_id] != (row.encode(), bucket + b"\0" + key):
                self._misnamed(where, row.object_id, meta)

    def _misnamed(self, where: str, object_id: int, meta: MetaBody) -> None:
        """After a kill the log may be behind, and a start makes up for it."""
        if self.complete or self.log.has_holes:
            self.log.renamed[object_id] = meta
        if self.complete:
            self.findings.add(where, "the log has another name or other attributes", "logged again")

    def _without_bytes(self, where: str, name: tuple[bytes, bytes], row: NameRow, bucket: BucketRow) -> None:
        cold = row.object_id in self.index.cold and bucket.class_ != "durable"
        if cold or self._in_dram(row.object_id, row.size_bytes):
            return
        durable = bucket.class_ == "durable"
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
            what = "the durable object is lost" if durable else "the object of the cache is a miss"
            self.findings.add(where, "has no bytes", what, Cost.DURABLE if durable else Cost.CACHED)

    def _other(self, name: tuple[bytes, bytes], object_id: int) -> int | None:
        """What takes the place of a lost object: see `tiers.rebuild.Replaced`."""
        if self._claims is None:
            assert self.listed is not None
            found = self.log.replay.found
            self._claims = {
                claim: each
                for each, (_, claim) in found.names.items()
                if self.log.holds(each) and each not in self._there
            }
        other = self.index.sealed_as.get(object_id)
        if other is None or not self.log.holds(other) or other not in self.log.replay.found.names:
            other = self._claims.get(b"\0".join(name))
        return None if other in self.findings.replaced.values() else other

    def _unlisted(self, stored: Stored) -> None:
        """An object of the log without a row: a start deletes it, unless it is of a file still being written."""
        if stored.object_id in self.log.replay.found.snapshots | set(self.findings.replaced.values()):
            return
        if self.index.is_damaged or not (self.complete or self.log.has_holes):
            return
        if self.log.has_holes:  # what removed it may be what is damaged
            self.log.lost[stored.object_id] = stored
            return
        where = f"object {stored.object_id}{self._called(stored.object_id)}"
        what = "the name index does not have it"
        if self.log.tier.is_durable(stored.bucket_id):
            self.findings.restored_ids.add(stored.object_id)
            self.findings.add(where, what, "the durable object is given its name back")
        else:
            self.findings.add(where, what, "the object of the cache is dropped", Cost.CACHED)
            self.log.lost[stored.object_id] = stored

    def _buckets(self) -> None:
        """Those of the index are in the log; but when names last came to one, the index alone knows."""
        logged = self.log.replay.found.buckets
        for row in self.index.buckets.values():
            found = logged.get(row.bucket_id)  # a change of its names moves its time in the index alone
            if self.complete and (found is None or replace(found, mtime_ns=row.mtime_ns) != row):
                self.log.rebucketed.append(row)
                where = f"bucket {_text(row.name)}"
                self.findings.add(where, "the log has it not, or otherwise", "logged again")


def _text(name: bytes) -> str:
    return name.decode(errors="backslashreplace")
