"""What a start finds in the segments: objects, names, buckets and deletions, from the records alone.

Responsibility: read all segments (footers where there are any, else a scan), decide which records still count,
and build the tier from them. On the device it changes nothing, but that segments of which nothing counts are freed.

What counts:
- Records apply in the order of segments' lives, and within one by offset: the order in which they were written.
- A TOMBSTONE ends every record of its ids, wherever it stands: an id is given out once.
- An object counts when all extents of its last writing are there and, if it is no block, a META. A META without its
  extents means nothing, so a name whose newest object never arrived still stands for the one before it.
- Of several objects with one name, or one prefix hash, the one with the newest META (or extent) counts, whatever
  reclaim moved since; a file that was being written counts before what it replaces. The others are `losers`:
  their deletion was lost, and is written again by the caller.
- A named object's size is its newest META's; extents past it, which a draft had once, mean nothing.

Concurrency: the service's trio thread, before any door is open.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from kvfs.errors import Corrupt, DeviceFailed, KvfsError, NoSpace
from kvfs.formats import RECORD_HEADER, SEGMENT_DATA_START, EndingKind, RecordType
from kvfs.name_env import highest_id
from kvfs.name_rows import DIRECTORY, RETIRED, SNAPSHOT, BucketRow, NameRow, is_name_row, peek_row
from kvfs.records import BucketBody, MetaBody, TombstoneBody, peek_meta
from tiers.base import Kind, StoreKey, object_key
from tiers.device import Device
from tiers.endings import Ended, Ending
from tiers.log_entries import Location
from tiers.nvme import NvmeTier, Piece, Stored, counted_bytes, has_all
from tiers.reclaiming import Reclaimer
from tiers.segments import Listing, Segment, SegmentPool, open_pool

_log = logging.getLogger("kvfs.nvme")


@dataclass(slots=True)
class Replayed:
    """What the records say, beside the tier itself."""

    buckets: dict[int, BucketRow] = field(default_factory=dict)
    names: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    """Object id -> encoded row and `bucket NUL key`; named objects and directories."""
    snapshots: set[int] = field(default_factory=set)
    """Ids of files that were still being written."""
    sealed_as: dict[int, int] = field(default_factory=dict)
    """Id of an object -> id of what was durable of it while it was written."""
    orphans: list[Stored] = field(default_factory=list)
    """Objects whose bucket the log does not have: it was removed, or its record is damaged."""
    torn: dict[int, tuple[bytes, bytes, int]] = field(default_factory=dict)
    """Id of an object that is not all there -> its row and name, as in `names`, and the sequence of the newest name."""
    sequences: dict[int, int] = field(default_factory=dict)
    """Id -> sequence of the newest name, or a block's newest extent."""
    nameless: dict[int, Stored] = field(default_factory=dict)
    """Objects with extents and without a name that counts: it is lost, or was never written."""
    unlogged: set[int] = field(default_factory=set)
    """Those of them that the name index has, so that their names are to be logged again."""
    dead: set[int] = field(default_factory=set)
    """Ids of what has ended: objects and buckets."""
    losers: list[int] = field(default_factory=list)
    """Ids whose records must be deleted (again)."""
    highest_id: int = 0
    records: int = 0
    segments: int = 0
    seconds: float = 0.0

    def meta(self, object_id: int) -> MetaBody:
        """The name of an object that has one in `names`, decoded. Raises Corrupt."""
        row, name = self.names[object_id]
        bucket, _, key = name.partition(b"\0")
        return MetaBody(bucket, key, NameRow.decode(row))


_FIELDS = RECORD_HEADER.only(
    "type", "kind", "body_bytes", "record_bytes", "payload_bytes", "sequence", "key", "parent", "object_id",
    "extent_number", "object_bytes", "sealed_at_ns", "uid", "bucket_id",
    "origin_sequence", "payload_checksum",
)  # fmt: skip
"""What a replay looks at: decoding every field of a million headers takes 4 s, these take 1 s."""
_Fields = tuple[Any, ...]
_NO_PARENT = bytes(16)


class Replay:
    """Takes the records of segments, oldest life first; `finish` then says what counts."""

    def __init__(self, tier: NvmeTier, ended: Ended) -> None:
        """`ended`: what is known of ends besides the records."""
        self.tier = tier
        self.ended = ended
        self.found = Replayed()
        self.objects: dict[int, Stored] = {}
        self.bodies: dict[int, bytes] = {}
        """Object id -> its newest META."""
        self.newest: dict[int, int] = {}
        """Object id -> sequence of its newest name, or a block's newest extent: of two objects with one name or
        hash the higher wins."""
        self.found.sequences = self.newest
        self.dead = self.found.dead
        self.dead.update(ended.objects)
        self.bucket_places: dict[int, tuple[BucketRow, tuple[Location, int]]] = {}
        self.next_sequence = 1 + max(ended.highest_sequence, ended.durable_sequence)
        self.renamed: set[int] = set()
        """Objects of which the log had a name before the one that counts."""
        self._deleted: dict[int, int] = {}
        """Id -> `deleted_sequence` of its TOMBSTONE."""
        self._tombstones: dict[int, list[bytes]] = {}
        """Segment number -> bodies of its TOMBSTONE records."""

    def take(self, segment: Segment, listing: Listing) -> None:
        """The records of one segment. Raises Corrupt."""
        offset, body_at = SEGMENT_DATA_START, 0
        sequence = 0
        for number, fields in enumerate(_FIELDS.iter_unpack(listing.headers)):
            type_, _, body_bytes, record_bytes, _, sequence = fields[:6]
            if listing.offsets is not None:
                offset = listing.offsets[number]
            try:
                if type_ == RecordType.DATA:
                    self._take_data(segment.number, offset, fields)
                else:
                    body = bytes(listing.bodies[body_at : body_at + body_bytes])
                    self._take_other(segment.number, offset, fields, body)
            except KvfsError as error:  # it holds, and makes no sense: what it speaks of is a miss
                _log.error("segment %d, record at %d: %s", segment.number, offset, error)
            offset += record_bytes
            body_at += body_bytes
        self.found.records += len(listing.headers) // RECORD_HEADER.size
        self._go_past(sequence)

    def _go_past(self, sequence: int) -> None:
        """Records from here on have higher sequences."""
        if sequence < _NO_SEQUENCE:
            self.next_sequence = max(self.next_sequence, sequence + 1)

    def _take_data(self, segment: int, offset: int, fields: _Fields) -> None:
        (
            _, kind, _, record_bytes, payload_bytes, sequence, key, parent, object_id,
            number, size_bytes, sealed_at_ns, uid, bucket_id, writing, checksum,
        ) = fields  # fmt: skip
        floors = self.ended.extents.get(object_id)
        if floors is not None and sequence < floors.get(number, 0):
            return
        if parent == _NO_PARENT:
            parent = _NO_PARENT  # one for all
        count = self.tier.extent_count(min(size_bytes, self.tier.capacity_bytes))
        if number >= count or size_bytes > self.tier.capacity_bytes or payload_bytes > record_bytes:
            raise Corrupt(f"extent {number}, {payload_bytes} bytes, of an object of {size_bytes} bytes")
        stored = self.objects.get(object_id)
        if stored is None:
            stored = Stored(
                _key(kind, key, object_id), object_id, size_bytes, bucket_id, parent, uid, sealed_at_ns
            )
            stored.first_sequence = sequence
            self.objects[object_id] = stored
        else:
            stored.parent, stored.uid, stored.sealed_at_ns = parent, uid, sealed_at_ns
            if object_id not in self.bodies:
                stored.size_bytes = size_bytes
        piece = Piece(segment, offset, record_bytes, payload_bytes, checksum)
        if stored.writing != writing:
            stored.pieces, stored.writing = [], writing
            self._go_past(writing)
        if len(stored.pieces) < count:
            stored.pieces += [None] * (count - len(stored.pieces))
        stored.pieces[number] = piece
        if kind == Kind.BLOCK:  # an object's META says where it belongs: reclaim may move ahead of it
            self.newest[object_id] = sequence
            stored.bucket_id = bucket_id

    def _take_other(self, segment: int, offset: int, fields: _Fields, body: bytes) -> None:
        type_, record_bytes = fields[0], fields[3]
        place = ((segment, offset), counted_bytes(record_bytes, len(body)))
        if type_ == RecordType.META:
            self._take_meta(place, fields, body)
        elif type_ == RecordType.TOMBSTONE:
            tombstone = TombstoneBody.decode(body)
            self.dead.update(tombstone.object_ids)
            self._deleted.update(dict.fromkeys(tombstone.object_ids, tombstone.deleted_sequence))
            self._tombstones.setdefault(place[0][0], []).append(body)
        elif type_ == RecordType.BUCKET:
            row = BucketBody.decode(body).row
            self.bucket_places[row.bucket_id] = (row, place)

    def _take_meta(self, place: tuple[Location, int], fields: _Fields, body: bytes) -> None:
        _, kind, _, _, _, sequence, key, _, object_id, _, size_bytes, _, _, bucket_id, origin, _ = fields
        sequence = origin or sequence
        stored = self.objects.get(object_id)
        if stored is None:
            stored = Stored(_key(kind, key, object_id), object_id, size_bytes, bucket_id)
            stored.first_sequence = fields[5]
            self.objects[object_id] = stored
        stored.is_named = True
        if sequence < self.newest.get(object_id, 0):
            return
        if sequence < self.ended.names.get(object_id, 0):
            return
        if object_id in self.bodies:
            self.renamed.add(object_id)
        stored.meta = place
        stored.bucket_id, stored.size_bytes = bucket_id, size_bytes
        self.newest[object_id] = sequence
        self.bodies[object_id] = body

    def finish(self) -> None:
        """Decide what counts, and have the tier adopt it."""
        found = self.found
        known = chain(self.bucket_places, self.dead, self.objects, self.ended.names, self.ended.extents)
        found.highest_id = highest_id(known)
        for bucket_id, (row, place) in self.bucket_places.items():
            if bucket_id not in self.dead:
                found.buckets[bucket_id] = row
                self.tier.adopt_bucket(row, place)
        kept = {bucket_id: row.class_ == "durable" for bucket_id, row in found.buckets.items()}
        for stored in self._holders():
            if stored.bucket_id not in kept:
                found.orphans.append(stored)
                continue
            stored.kept = kept[stored.bucket_id]
            self.tier.adopt(stored)
        found.losers += [
            each for each in self.ended.objects if each in self.objects and each not in self._deleted
        ]

    def unrepeated(self) -> Iterator[Ending]:
        """What the records say has ended, and nothing besides them."""
        for object_id, sequence in self._deleted.items():
            if object_id not in self.ended.objects:
                stored = self.objects.get(object_id)
                yield Ending(object_id, stored.first_sequence if stored is not None else 0, sequence)
        for object_id in self.renamed:
            if object_id not in self.dead and object_id not in self.ended.names:
                first, sequence = self.objects[object_id].first_sequence, self.newest[object_id]
                yield Ending(object_id, first, sequence, EndingKind.NAME)

    def spent(self) -> list[Segment]:
        """Segments that may be freed as they are, after `finish`: nothing in them counts, and what they say of
        deletions others say too. A kill between reclaim's copy and its end leaves one, and takes the room that
        reclaiming it again would need."""
        losers = (self.objects[object_id] for object_id in self.found.losers)
        others = [*losers, *self.found.orphans, *self.found.nameless.values()]
        needed = {piece.segment for stored in others for piece in stored.pieces if piece is not None}
        needed |= {stored.meta[0][0] for stored in others if stored.meta is not None}
        readable = [segment for segment in self.tier.pool.used() if not segment.bad]
        said = Counter(body for each in readable for body in set(self._tombstones.get(each.number, ())))
        found = []
        for segment in readable:
            bodies = set(self._tombstones.get(segment.number, ()))
            if segment.live_bytes or segment.number in needed:
                continue
            if all(said[body] > 1 for body in bodies):
                said.subtract(bodies)
                found.append(segment)
        return found

    def _holders(self) -> Iterable[Stored]:
        """Of the objects that can be read, one for each prefix hash and name."""
        blocks: dict[bytes, Stored] = {}
        named: dict[bytes, Stored] = {}
        for object_id, stored in self.objects.items():
            if object_id in self.dead:
                continue
            if stored.pieces and stored.key.kind is Kind.OBJECT and object_id not in self.bodies:
                self.found.nameless[object_id] = stored
                continue
            whole = has_all(stored, self.tier.extent_count(stored.size_bytes))
            if stored.key.kind is Kind.BLOCK:
                if stored.pieces and whole:
                    self._contend(blocks, stored.key.digest, stored)
                continue
            body = self.bodies.get(object_id)
            if body is None:
                continue
            try:
                name, row = peek_meta(body)
                _, flags = peek_row(row)
            except Corrupt:
                continue
            if not is_name_row(row):
                continue
            if flags & RETIRED:
                self.found.losers.append(object_id)
                continue
            if not (whole and stored.pieces) and not flags & DIRECTORY:
                self.found.torn[object_id] = (row, name, self.newest.get(object_id, 0))
                continue
            if flags & SNAPSHOT:
                self.found.snapshots.add(object_id)
            self.found.names[object_id] = (row, name)
            self._contend(named, name, stored)
        return chain(blocks.values(), named.values())

    def _is_newer(self, stored: Stored, rival: Stored) -> bool:
        """Of two with one name or hash. What a file being written replaces may have been written behind only after
        the file was made durable: of those two the later sequence of their rows counts."""
        snapshots = self.found.snapshots
        if (stored.object_id in snapshots) != (rival.object_id in snapshots):
            mine, other = (self.found.meta(each.object_id).row for each in (stored, rival))
            return mine.sequence > other.sequence
        return self.newest.get(rival.object_id, 0) <= self.newest.get(stored.object_id, 0)

    def _contend(self, holders: dict[bytes, Stored], claim: bytes, stored: Stored) -> None:
        rival = holders.setdefault(claim, stored)
        if rival is stored:
            return
        loser = stored
        if self._is_newer(stored, rival):
            holders[claim], loser = stored, rival
        self.found.losers.append(loser.object_id)
        self.found.names.pop(loser.object_id, None)


_KINDS = {int(kind): kind for kind in Kind}
_NO_SEQUENCE = 1 << 63
"""None is so high in the life of a store; from a damaged one no record's sequence goes on."""


def _key(kind: int, key: bytes, object_id: int) -> StoreKey:
    """Raises Corrupt."""
    known = _KINDS.get(kind)
    if known is None or (known is Kind.OBJECT and key != object_key(object_id).digest):
        raise Corrupt(f"object {object_id} of kind {kind} with key {key.hex()}")
    return StoreKey(known, key)


async def _sync_scanned(pool: SegmentPool, segment: Segment) -> None:
    """Make durable what a killed service may have written and not synced, before anything that it replaces is ended."""
    try:
        await pool.device.sync(segment.fd)
    except (NoSpace, DeviceFailed) as error:
        _log.error("segment %d: what was found in it may not be durable: %s", segment.number, error)


async def _release_spent(pool: SegmentPool, replay: Replay) -> None:
    try:
        for segment in replay.spent():
            await pool.release(segment)
    except (NoSpace, DeviceFailed) as error:  # reclaim comes by again
        _log.error("segments of which nothing counts are not freed: %s", error)


async def _repeat_endings(pool: SegmentPool, replay: Replay) -> None:
    for name, faults in pool.endings.faults.items():
        _log.error("%s: %s; written again from the log", pool.directory / name, "; ".join(faults[:3]))
    pool.endings.durable_sequence = pool.last_sequence
    try:
        await pool.endings.begin(list(replay.unrepeated()))
    except (NoSpace, DeviceFailed) as error:  # the log's next write tries again
        _log.error("what has ended is not repeated beside the segments: %s", error)


async def open_nvme(
    device: Device,
    directory: Path,
    *,
    store_id: bytes,
    capacity_bytes: int,
    segment_bytes: int | None = None,
    trim: bool = False,
) -> tuple[NvmeTier, Replayed]:
    """The tier in `directory` with all that its records say. Raises what `open_pool` does.

    A segment that the device fails, or whose records make no sense, is set aside: its objects are misses.
    """
    started = time.monotonic()
    pool = await open_pool(
        device, directory, store_id=store_id, capacity_bytes=capacity_bytes, segment_bytes=segment_bytes
    )
    pool.trims = trim
    try:
        tier = NvmeTier(pool, 1)
        tier.log.reclaim = Reclaimer(tier).reclaim
        replay = Replay(tier, await pool.endings.load())
        for segment in pool.used():
            try:
                listing = await pool.listing(segment)
                if listing.offsets:
                    await _sync_scanned(pool, segment)
                replay.take(segment, listing)
            except KvfsError as error:
                _log.error("segment %d is set aside: %s", segment.number, error)
                segment.bad = True
            segment.closed = True
        replay.finish()
        await _release_spent(pool, replay)
        await _repeat_endings(pool, replay)
    except BaseException:
        pool.close_files()
        raise
    tier.log.start_at(replay.next_sequence)
    found = replay.found
    found.segments = len(pool.segments)
    found.seconds = time.monotonic() - started
    return tier, found
