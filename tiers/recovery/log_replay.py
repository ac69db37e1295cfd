"""Replay of the log at a start: objects, names, buckets and deletions, from the records alone.

Responsibility: decide which records still count, and have the tier take over what they speak of. Reading the segments
is `tiers.recovery.open_nvme`.

What counts:
- Records apply in the order of segments' lives, and within one by offset: the order in which they were written.
- A TOMBSTONE ends every record of its ids, wherever it stands: an id is given out once.
- An object counts when all extents of its last writing are there and, if it is no block, a META. A META without its
  extents means nothing, so a name whose newest object never arrived still stands for the one before it.
- Of several objects with one name, or one prefix hash, the one with the newest META (or extent) counts, whatever
  reclaim moved since; a file that was being written counts before what it replaces. The others are `losers`:
  their deletion was lost, and is written again by the caller.
- A RENAME whose last name is older was not written to its end: it is finished here.
- A named object's size is its newest META's; extents past it, which a draft had once, mean nothing.

What is plain of them, which is nearly all, is taken in natively (`kvfs._native.catalog.logged_names`): objects with one
extent, and the first name of each. Whatever else a record says is decided here.

Concurrency: the service's trio thread, before any door is open.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from kvfs._native.catalog.logged_names import LoggedNames, count_rows, nameless, repeated_blocks, take_plain
from kvfs.errors import Corrupt, KvfsError
from kvfs.formats import RECORD_HEADER, SEGMENT_DATA_START, EndingKind, RecordType
from kvfs.index.environment import highest_id
from kvfs.index.rows import RETIRED, ROW_ONLY, SNAPSHOT, BucketRow, NameRow, is_name_row, peek_row
from tiers.log.ending_pages import Ended, Ending
from tiers.log.entries import Location
from tiers.log.records import BucketBody, MetaBody, RenameBody, TombstoneBody, peek_meta
from tiers.log.segments import Listing, Segment
from tiers.model.tier import Kind, StoreKey, object_key
from tiers.nvme.stored import Piece, Stored, counted_bytes, has_all
from tiers.nvme.tier import NvmeTier

_log = logging.getLogger("kvfs.nvme")


class FoundNames(Mapping[int, tuple[bytes, bytes]]):
    """Finds names by object id, as (encoded row, `bucket NUL key`): plain ones, and others."""

    def __init__(self) -> None:
        self.plain = LoggedNames()
        self.others: dict[int, tuple[bytes, bytes]] = {}

    def __getitem__(self, object_id: int) -> tuple[bytes, bytes]:
        found = self.others.get(object_id) or self.plain.get(object_id)
        if found is None:
            raise KeyError(object_id)
        return found

    def __setitem__(self, object_id: int, named: tuple[bytes, bytes]) -> None:
        self.others[object_id] = named

    def pop(self, object_id: int) -> tuple[bytes, bytes] | None:
        """Remove a name; return it, None where there is none."""
        plain = self.plain.get(object_id)
        self.plain.pop(object_id)
        return self.others.pop(object_id, None) or plain

    def __contains__(self, object_id: object) -> bool:
        return object_id in self.others or (isinstance(object_id, int) and object_id in self.plain)

    def __iter__(self) -> Iterator[int]:
        return iter([*self.plain.ids(), *self.others])

    def __len__(self) -> int:
        return len(self.plain) + len(self.others)


@dataclass(slots=True)
class Replayed:
    """Collects what the records say, beside the tier itself."""

    buckets: dict[int, BucketRow] = field(default_factory=dict)
    names: FoundNames = field(default_factory=FoundNames)
    """Object id -> encoded row and `bucket NUL key`; named objects, directories and symbolic links."""
    snapshots: set[int] = field(default_factory=set)
    """Ids of files that were still being written."""
    sealed_as: dict[int, int] = field(default_factory=dict)
    """Id of an object -> id of what was durable of it while it was written."""
    orphans: list[Stored] = field(default_factory=list)
    """Objects whose bucket the log does not have: it was removed, or its record is damaged."""
    torn: dict[int, tuple[bytes, bytes, int]] = field(default_factory=dict)
    """Id of an object that is not all there -> its row and name, as in `names`, and the sequence of the newest name."""
    sequences: dict[int, int] = field(default_factory=dict)
    """Id -> sequence of the newest name, or a block's newest extent, of what is not plain."""
    nameless: dict[int, Stored] = field(default_factory=dict)
    """Objects with extents and without a name that counts: the name is damaged, or was never written."""
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

    def sequence(self, object_id: int) -> int:
        """Return the sequence of an object's newest name, 0 without one; or of a block's newest extent."""
        return self.sequences.get(object_id, 0) or self.names.plain.sequence(object_id)

    def meta(self, object_id: int) -> MetaBody:
        """Decode the name of an object that has one in `names`. Raises Corrupt."""
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
_Place = tuple[int, int, int]
"""Number of a record of a segment, its offset, and that of its body among the bodies."""
_NO_PARENT = bytes(16)


class Replay:
    """Takes the records of segments, oldest life first; `finish` then says what counts."""

    def __init__(self, tier: NvmeTier, ended: Ended) -> None:
        """Begin a replay. `ended`: endings that the files beside the segments have."""
        self.tier = tier
        self.ended = ended
        self.found = Replayed()
        self.objects = tier.objects
        """What the records speak of; after `finish` what counts of it."""
        self.others: dict[int, Stored] = {}
        """After `finish`: what does not count."""
        self.bodies: dict[int, bytes] = {}
        """Object id -> its newest META, of what is not plain."""
        self.newest: dict[int, int] = {}
        """Object id -> sequence of its newest name, or a block's newest extent: of two objects with one name or
        hash the higher wins."""
        self.found.sequences = self.newest
        self.dead = self.found.dead
        self.dead.update(ended.objects)
        self.bucket_places: dict[int, tuple[BucketRow, tuple[Location, int]]] = {}
        # A removal may be repeated under the sequence of its record before that is written: it is not skipped.
        self.next_sequence = max(ended.highest_sequence, 1 + ended.durable_sequence)
        self.renamed: set[int] = set()
        """Objects of which the log had a name before the one that counts."""
        self._deleted: dict[int, int] = {}
        """Id -> `deleted_sequence` of its TOMBSTONE."""
        self._tombstones: dict[int, list[bytes]] = {}
        """Segment number -> bodies of its TOMBSTONE records."""
        self._renames: dict[int, tuple[int, RenameBody, int]] = {}
        """Sequence of a directory's rename -> id of the object that is renamed last, what it says, and its segment."""
        self._plain = self.found.names.plain
        self._apart = ended.extents.keys() | ended.names.keys()

    def take(self, segment: Segment, listing: Listing) -> None:
        """Take the records of one segment. Raises Corrupt."""
        count, number, offset, body_at = len(listing.headers) // RECORD_HEADER.size, 0, SEGMENT_DATA_START, 0
        sequence = 0
        while number < count:
            if listing.offsets is None:
                number, offset, body_at = self._take_plain(segment.number, listing, (number, offset, body_at))
                if number == count:
                    break
            else:
                offset = listing.offsets[number]
            fields = _FIELDS.unpack_from(listing.headers, number * RECORD_HEADER.size)
            body_bytes, record_bytes = fields[2:4]
            try:
                if fields[0] == RecordType.DATA:
                    self._take_data(segment.number, offset, fields)
                else:
                    body = bytes(listing.bodies[body_at : body_at + body_bytes])
                    self._take_other(segment.number, offset, fields, body)
            except KvfsError as error:  # it holds, and makes no sense: what it speaks of is a miss
                _log.error("segment %d, record at %d: %s", segment.number, offset, error)
            number, offset, body_at = number + 1, offset + record_bytes, body_at + body_bytes
        if count:
            sequence = _FIELDS.unpack_from(listing.headers, (count - 1) * RECORD_HEADER.size)[5]
        self.found.records += count
        self._go_past(sequence)

    def _take_plain(self, segment: int, listing: Listing, place: _Place) -> _Place:
        """Take records in natively, up to the next one that is not plain; return where that is."""
        objects, extent_bytes = self.objects, min(self.tier.pool.extent_bytes, self.tier.capacity_bytes)
        number, offset, body_at, writing = take_plain(
            objects.rows, self._plain, objects.used, self._apart, listing.headers, listing.bodies, place, segment,
            extent_bytes,
        )  # fmt: skip
        self._go_past(writing)
        return number, offset, body_at

    def known(self, object_id: int) -> Stored | None:
        """Return what the records speak of, whether it counts or not."""
        return self.others.get(object_id) or self.objects.get(object_id)

    def has_name(self, object_id: int) -> bool:
        """Return whether the log has a name of an object."""
        return object_id in self.bodies or object_id in self._plain

    def _unfold(self, object_id: int) -> Stored | None:
        """Return an object, with its name where the others are that are not plain."""
        stored = self.objects.get(object_id)
        if (plain := self._plain.pop(object_id)) is not None:
            self.bodies[object_id], self.newest[object_id] = plain
        elif stored is not None and stored.key.kind is Kind.BLOCK:
            self.newest.setdefault(object_id, stored.first_sequence)
        return stored

    def _go_past(self, sequence: int) -> None:
        """Have records from here on get higher sequences."""
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
        stored = self._unfold(object_id)
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
        elif type_ == RecordType.RENAME:
            self._renames[fields[14] or fields[5]] = (fields[8], RenameBody.decode(body), segment)
        elif type_ == RecordType.BUCKET:
            row = BucketBody.decode(body).row
            self.bucket_places[row.bucket_id] = (row, place)

    def _take_meta(self, place: tuple[Location, int], fields: _Fields, body: bytes) -> None:
        _, kind, _, _, _, sequence, key, _, object_id, _, size_bytes, _, _, bucket_id, origin, _ = fields
        if size_bytes > self.tier.capacity_bytes:
            raise Corrupt(f"the name of an object of {size_bytes} bytes")
        sequence = origin or sequence
        stored = self._unfold(object_id)
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
        """Decide what counts, and have the tier take it over."""
        found = self.found
        for bucket_id, (row, place) in self.bucket_places.items():
            if bucket_id not in self.dead:
                found.buckets[bucket_id] = row
                self.tier.buckets.adopt(row, place)
        self._finish_renames()
        kept = {bucket_id: row.class_ == "durable" for bucket_id, row in found.buckets.items()}
        self._take_out()
        orphans, counts, highest_row = count_rows(self.objects.rows, kept)
        holders = list(self._holders())
        found.orphans += [self.others.setdefault(each, stored) for each, stored in self._pop(orphans)]
        for number, live_bytes, kept_bytes in counts:
            self.tier.count(number, live_bytes, kept_bytes)
        known = chain(self.bucket_places, self.dead, self.others, self.ended.names, self.ended.extents)
        found.highest_id = highest_id(chain(known, (highest_row,)))
        for stored in holders:
            if stored.bucket_id not in kept:
                found.orphans.append(stored)
                continue
            stored.kept = kept[stored.bucket_id]
            del self.others[stored.object_id]
            self.tier.adopt(stored)
        found.losers += [
            each for each in self.ended.objects if each in self.others and each not in self._deleted
        ]

    def _finish_renames(self) -> None:
        """Finish renames of directories that were not written to their end; the log gets the names once the store is
        restored."""
        for sequence, (last, rename, _) in sorted(self._renames.items()):
            if last in self.dead or not 0 < self._newest(last) < sequence:
                del self._renames[sequence]
                continue
            taken: set[bytes] = set()
            for object_id in sorted(self._below(rename), key=self._newest, reverse=True):
                self._rename(object_id, sequence, rename, taken)

    def _newest(self, object_id: int) -> int:
        return self.newest.get(object_id, 0) or self._plain.sequence(object_id)

    def _below(self, rename: RenameBody) -> list[int]:
        """List objects with a name in the directory as it was called before."""
        prefix, found = b"\0".join(rename.source), []
        for object_id in self._plain.ids():
            named = self._plain.get(object_id)
            if named is not None and named[1].startswith(prefix):
                found.append(object_id)
        for object_id, body in self.bodies.items():
            with suppress(Corrupt):
                if peek_meta(body)[0].startswith(prefix):
                    found.append(object_id)
        return found

    def _rename(self, object_id: int, sequence: int, rename: RenameBody, taken: set[bytes]) -> None:
        """Give an object the name that it has by a rename, unless it got its name later. Of several with one name only
        the newest, which has not `taken` it yet, counts as that new."""
        stored = self._unfold(object_id)
        try:
            moved = rename.moved(MetaBody.decode(self.bodies[object_id]))
        except Corrupt:
            return
        if stored is None or self.newest[object_id] > sequence:
            return
        self.bodies[object_id] = moved.encode()
        if moved.key not in taken:
            taken.add(moved.key)
            self.newest[object_id] = sequence
        for bucket in self.found.buckets.values():
            if bucket.name == moved.bucket:
                stored.bucket_id = bucket.bucket_id
        self.found.unlogged.add(object_id)

    def _pop(self, object_ids: Iterable[int]) -> Iterator[tuple[int, Stored]]:
        """Take objects out of those that count, which keep their names."""
        for object_id in object_ids:
            if (stored := self.objects.pop(object_id)) is not None:
                yield object_id, stored

    def _set_aside(self, object_id: int) -> Stored | None:
        """Take an object out of those that count, until it is decided."""
        stored = self._unfold(object_id)
        if stored is not None:
            self.objects.pop(object_id)
            self.others[object_id] = stored
        return stored

    def _take_out(self) -> None:
        """Leave in the tier what counts without a closer look: readable objects that have a hash or a name alone."""
        for object_id in chain(self.dead, list(self.objects.used), list(self.bodies), self._plain.contended):
            self._set_aside(object_id)
        for body in list(self.bodies.values()):
            with suppress(Corrupt):
                rival = self._plain.find(peek_meta(body)[0])
                if rival is not None:
                    self._set_aside(rival)
        blocks = [each.key.digest for each in self.others.values() if each.key.kind is Kind.BLOCK]
        for object_id in chain(repeated_blocks(self.objects.rows, blocks), nameless(self.objects.rows)):
            self._set_aside(object_id)

    def unrepeated(self) -> Iterator[Ending]:
        """Yield what the records alone say has ended."""
        for object_id, sequence in self._deleted.items():
            if object_id not in self.ended.objects:
                stored = self.known(object_id)
                yield Ending(object_id, stored.first_sequence if stored is not None else 0, sequence)
        for object_id in self.renamed:
            if object_id not in self.dead and object_id not in self.ended.names:
                stored, sequence = self.known(object_id), self.newest[object_id]
                first = stored.first_sequence if stored is not None else 0
                yield Ending(object_id, first, sequence, EndingKind.NAME)

    def spent(self) -> list[Segment]:
        """List segments that may be freed as they are, after `finish`: nothing in them counts, and other segments
        repeat their deletions. One stays after a kill between reclaim's copy and its end, and takes the room that
        reclaiming it again would need."""
        losers = [stored for each in self.found.losers if (stored := self.known(each)) is not None]
        others = [*losers, *self.found.orphans, *self.found.nameless.values()]
        needed = {piece.segment for stored in others for piece in stored.pieces if piece is not None}
        needed |= {stored.meta[0][0] for stored in others if stored.meta is not None}
        needed |= {segment for _, _, segment in self._renames.values()}
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
        """Choose one of the readable objects that were set aside for each prefix hash and name."""
        blocks: dict[bytes, Stored] = {}
        named: dict[bytes, Stored] = {}
        for object_id, stored in self.others.items():
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
            if not (whole and stored.pieces) and not flags & ROW_ONLY:
                self.found.torn[object_id] = (row, name, self.newest.get(object_id, 0))
                continue
            if flags & SNAPSHOT:
                self.found.snapshots.add(object_id)
            self.found.names[object_id] = (row, name)
            self._contend(named, name, stored)
        return chain(blocks.values(), named.values())

    def _is_newer(self, stored: Stored, rival: Stored) -> bool:
        """Return whether an object counts before another of its name or hash.

        What a file being written replaces may have been written behind only after the file was made durable: of those
        two the later sequence of their rows counts.
        """
        snapshots = self.found.snapshots
        if (stored.object_id in snapshots) != (rival.object_id in snapshots):
            mine, other = (self.found.meta(each.object_id).row for each in (stored, rival))
            return mine.sequence > other.sequence
        return self.newest.get(rival.object_id, 0) <= self.newest.get(stored.object_id, 0)

    def _contend(self, holders: dict[bytes, Stored], name: bytes, stored: Stored) -> None:
        rival = holders.setdefault(name, stored)
        if rival is stored:
            return
        loser = stored
        if self._is_newer(stored, rival):
            holders[name], loser = stored, rival
        self.found.losers.append(loser.object_id)
        self.found.names.pop(loser.object_id)


_KINDS = {int(kind): kind for kind in Kind}
_NO_SEQUENCE = 1 << 63
"""None is so high in the life of a store; from a damaged one no record's sequence goes on."""


def _key(kind: int, key: bytes, object_id: int) -> StoreKey:
    """Make a store key. Raises Corrupt."""
    known = _KINDS.get(kind)
    is_right = any(key[:8]) if known is Kind.BLOCK else key == object_key(object_id).digest
    if known is None or not is_right:
        raise Corrupt(f"object {object_id} of kind {kind} with key {key.hex()}")
    return StoreKey(known, key)
