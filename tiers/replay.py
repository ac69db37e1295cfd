"""What a start finds in the segments: objects, names, buckets and deletions, from the records alone.

Responsibility: read all segments (footers where there are any, else a scan), decide which records still count,
and build the tier from them. It changes nothing on the device.

What counts:
- Records apply in the order of segments' lives, and within one by offset: the order in which they were written.
- A TOMBSTONE ends every record of its ids, wherever it stands: an id is given out once.
- An object counts when all of its extents are there and, if it is no block, a META. A META without its extents
  means nothing, so a name whose newest object never arrived still stands for the one before it.
- A named object's size is its newest META's; extents past it, which a draft had once, mean nothing.
- Of several objects with one name, or one prefix hash, the one with the newest META (or extent) counts. The
  others are `losers`: their deletion was lost, and is written again by the caller.

Concurrency: the service's trio thread, before any door is open.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvfs.errors import KvfsError
from kvfs.formats import RecordType
from kvfs.name_rows import DIRECTORY, SNAPSHOT, BucketRow
from kvfs.records import BucketBody, MetaBody, TombstoneBody
from tiers.base import Kind, StoreKey
from tiers.device import Device
from tiers.log import Location
from tiers.nvme import NvmeTier, Piece, Stored
from tiers.segments import Found, Segment, open_pool

_log = logging.getLogger("kvfs.nvme")


@dataclass(slots=True)
class _Seen:
    """The records of one object so far."""

    stored: Stored
    sequence: int = 0
    """Of its newest record: of two objects with one name or hash the higher wins."""
    body: bytes = b""
    pieces: dict[int, Piece] = field(default_factory=dict)
    data_bytes: int = 0
    meta_bytes: int = 0
    """The object's size as its newest extent and its newest META say it."""


@dataclass(slots=True)
class Replayed:
    """What the records say, beside the tier itself."""

    buckets: dict[int, BucketRow] = field(default_factory=dict)
    names: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    """Object id -> encoded META body and the body's name, bucket NUL key; named objects and directories."""
    snapshots: set[int] = field(default_factory=set)
    """Ids of files that were still being written."""
    losers: list[int] = field(default_factory=list)
    """Ids whose records must be deleted (again)."""
    highest_id: int = 0
    records: int = 0
    segments: int = 0
    seconds: float = 0.0

    def metas(self) -> Iterator[MetaBody]:
        """Every name that counts. Decoded when asked: a start with a good name index does not need them."""
        for body, _ in self.names.values():
            yield MetaBody.decode(body)


class _Replay:
    def __init__(self, tier: NvmeTier) -> None:
        self.tier = tier
        self.found = Replayed()
        self.seen: dict[int, _Seen] = {}
        self.dead: set[int] = set()
        self.bucket_places: dict[int, tuple[BucketRow, tuple[Location, int]]] = {}
        self.next_sequence = 1

    def take(self, segment: Segment, records: list[Found]) -> None:
        for found in records:
            header = found.header
            self.found.records += 1
            self.next_sequence = max(self.next_sequence, header["sequence"] + 1)
            kind = header["type"]
            if kind == RecordType.DATA:
                self._take_data(segment, found)
            elif kind == RecordType.META:
                self._take_meta(segment, found)
            elif kind == RecordType.TOMBSTONE:
                self.dead.update(TombstoneBody.decode(found.body).object_ids)
            elif kind == RecordType.BUCKET:
                self._take_bucket(segment, found)

    def _of(self, header: dict[str, int | bytes]) -> _Seen:
        object_id = int(header["object_id"])
        seen = self.seen.get(object_id)
        if seen is None:
            key = StoreKey(Kind(int(header["kind"])), bytes(header["key"]))
            size, bucket_id = int(header["object_bytes"]), int(header["bucket_id"])
            seen = self.seen[object_id] = _Seen(Stored(key, object_id, size, bucket_id))
            self.found.highest_id = max(self.found.highest_id, object_id)
        seen.sequence = int(header["sequence"])
        return seen

    def _take_data(self, segment: Segment, found: Found) -> None:
        header = found.header
        seen = self._of(header)
        stored = seen.stored
        seen.pieces[header["extent_number"]] = Piece(
            segment.number,
            found.offset,
            header["record_bytes"],
            header["payload_bytes"],
            header["payload_checksum"],
        )
        seen.data_bytes = header["object_bytes"]
        stored.bucket_id = header["bucket_id"]
        stored.parent, stored.uid = header["parent"], header["uid"]
        stored.sealed_at_ns = header["sealed_at_ns"]

    def _take_meta(self, segment: Segment, found: Found) -> None:
        seen = self._of(found.header)
        seen.stored.meta = ((segment.number, found.offset), found.header["record_bytes"])
        seen.stored.bucket_id = found.header["bucket_id"]
        seen.meta_bytes = found.header["object_bytes"]
        seen.body = found.body

    def _take_bucket(self, segment: Segment, found: Found) -> None:
        row = BucketBody.decode(found.body).row
        place = ((segment.number, found.offset), found.header["record_bytes"])
        self.bucket_places[row.bucket_id] = (row, place)
        self.found.highest_id = max(self.found.highest_id, row.bucket_id)

    def finish(self) -> None:
        """Decide what counts, and have the tier adopt it."""
        self.found.highest_id = max([self.found.highest_id, *self.dead])
        for bucket_id, (row, place) in self.bucket_places.items():
            if bucket_id not in self.dead:
                self.found.buckets[bucket_id] = row
                self.tier.adopt_bucket(row, place)
        holders: dict[bytes, _Seen] = {}
        for seen in self.seen.values():
            if seen.stored.object_id not in self.dead and self._whole(seen):
                self._contend(holders, seen)
        for seen in holders.values():
            bucket = self.found.buckets.get(seen.stored.bucket_id)
            if bucket is None:  # the bucket's removal waits until it is empty: these were removed before
                self.found.losers.append(seen.stored.object_id)
                continue
            seen.stored.kept = bucket.class_ == "durable"
            self.tier.adopt(seen.stored)

    def _whole(self, seen: _Seen) -> bool:
        """Whether the object can be read, under some name."""
        stored = seen.stored
        is_block = stored.key.kind is Kind.BLOCK
        if not is_block and not seen.body:
            return False
        if not seen.pieces:
            return not is_block and bool(MetaBody.decode(seen.body).row.flags & DIRECTORY)
        stored.size_bytes = seen.data_bytes if is_block else seen.meta_bytes
        count = self.tier.extent_count(stored.size_bytes)
        if len(seen.pieces) < count:
            return False
        stored.pieces = [seen.pieces.get(number) for number in range(count)]
        return stored.readable

    def _contend(self, holders: dict[bytes, _Seen], seen: _Seen) -> None:
        """One object of each name or prefix hash counts."""
        stored = seen.stored
        if stored.key.kind is Kind.BLOCK:
            claim = b"\0" + stored.key.digest
        else:
            meta = MetaBody.decode(seen.body)
            claim = meta.bucket + b"\0" + meta.key
            if meta.row.flags & SNAPSHOT:
                self.found.snapshots.add(stored.object_id)
            self.found.names[stored.object_id] = (seen.body, claim)
        rival = holders.get(claim)
        loser = seen if rival is not None and rival.sequence > seen.sequence else rival
        if loser is not seen:
            holders[claim] = seen
        if loser is not None:
            self.found.losers.append(loser.stored.object_id)
            self.found.names.pop(loser.stored.object_id, None)


async def open_nvme(
    device: Device, directory: Path, *, store_id: bytes, capacity_bytes: int, segment_bytes: int | None = None
) -> tuple[NvmeTier, Replayed]:
    """The tier in `directory` with all that its records say. Raises what `open_pool` does.

    A segment that the device fails, or whose records make no sense, is set aside: its objects are misses.
    """
    started = time.monotonic()
    pool = await open_pool(
        device, directory, store_id=store_id, capacity_bytes=capacity_bytes, segment_bytes=segment_bytes
    )
    try:
        tier = NvmeTier(pool, 1)
        replay = _Replay(tier)
        for segment in pool.used():
            try:
                replay.take(segment, await pool.records(segment))
            except KvfsError as error:
                _log.error("segment %d is set aside: %s", segment.number, error)
                segment.bad = True
            segment.closed = True
        replay.finish()
    except BaseException:
        pool.close_files()
        raise
    tier.log.start_at(replay.next_sequence)
    found = replay.found
    found.segments = len(pool.segments)
    found.seconds = time.monotonic() - started
    return tier, found
