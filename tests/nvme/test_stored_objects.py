"""The NVMe tier's objects as native rows, and the native replay, each against what Python alone does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvfs import limits
from kvfs._native.catalog.object_names import ObjectNames
from kvfs.errors import InvalidRequest
from kvfs.formats import RECORD_HEADER, SEGMENT_DATA_START, EndingKind, RecordType, SegmentState
from kvfs.index.rows import PINNED, RETIRED, BucketRow, NameRow
from tiers.device.device import Device
from tiers.log.ending_pages import Ended, Ending
from tiers.log.pool import SegmentPool
from tiers.log.records import BucketBody, MetaBody, TombstoneBody
from tiers.log.segments import Listing, Segment
from tiers.model.tier import Kind, StoreKey, object_key
from tiers.nvme.stored import Piece, Stored, StoredObjects
from tiers.nvme.tier import NvmeTier
from tiers.places.segment_files import SegmentFiles
from tiers.recovery.log_replay import Replay

IDS = st.integers(1, 12)
SEGMENT_BYTES = 8 * limits.MIB


def values(stored: Stored) -> tuple[Any, ...]:
    """Return all that an object says, without what a start or a restart forgets."""
    return tuple(getattr(stored, name) for name in Stored.__slots__ if name not in ("ticket", "__weakref__"))


# --- the collection against a dictionary ---------------------------------------------------------------------
def small(bits: int) -> st.SearchStrategy[int]:
    return st.one_of(st.integers(0, 9), st.integers(0, (1 << bits) - 1))


pieces = st.builds(
    Piece,
    st.one_of(st.integers(0, 3), st.just(70_000)),
    st.one_of(st.integers(16, 4096).map(lambda units: units * 512), st.just(8193)),
    st.one_of(st.integers(1, 8193).map(lambda units: units * 512), st.just(1 << 26)),
    st.sampled_from((0, 100, 512)),
    small(64),
)


@st.composite
def objects(draw: st.DrawFn) -> Stored:
    """Make an object with any values that a record may have."""
    object_id = draw(IDS)
    is_block = draw(st.booleans())
    key = StoreKey(Kind.BLOCK, bytes([object_id]) * 16) if is_block else object_key(object_id)
    stored = Stored(key, object_id, draw(st.sampled_from((0, 100, 512, 1 << 33))), draw(small(32)))
    stored.parent = draw(st.sampled_from((bytes(16), b"p" * 16)))
    stored.uid, stored.sealed_at_ns = draw(small(32)), draw(st.integers(-(1 << 63), (1 << 63) - 1))
    stored.kept, stored.hits, stored.writing = draw(st.booleans()), draw(small(26)), draw(small(64))
    stored.first_sequence, stored.is_named = draw(small(64)), draw(st.booleans())
    stored.pieces = list(draw(st.lists(st.one_of(st.none(), pieces), max_size=2)))
    stored.holders, stored.ticket = draw(st.sampled_from((0, 0, 0, 1))), draw(st.integers(0, 2))
    if draw(st.booleans()):
        stored.meta = (draw(st.integers(0, 3)), draw(small(30))), draw(small(20))
    return stored


@dataclass(frozen=True)
class Step:
    """One thing that is done with the object of an id."""

    what: str
    object_id: int
    value: int


steps = st.one_of(
    objects(),
    st.builds(Step, st.sampled_from(("rename", "keep", "move", "hold", "remove", "settle")), IDS, small(20)),
)


def change(step: Step, stored: Stored) -> None:
    """Do to an object what the tier does to it."""
    if step.what == "rename":
        stored.meta, stored.bucket_id, stored.is_named = ((1, 512 * step.value), 700), step.value, True
    elif step.what == "keep":
        stored.kept = not stored.kept
    elif step.what == "move" and stored.pieces:
        stored.pieces[0] = Piece(2, 512 * step.value, 4608, stored.size_bytes, step.value)


@settings(max_examples=300, deadline=None)
@given(st.lists(steps, max_size=40))
def test_objects_are_what_a_dictionary_would_have(todo: list[Stored | Step]) -> None:
    durable, model, held = [0], dict[int, Stored](), dict[int, Stored]()
    kept = StoredObjects(lambda: durable[0])
    for step in todo:
        if isinstance(step, Stored):
            held.pop(step.object_id, None)
            model[step.object_id] = step
            kept[step.object_id] = copy_of(step)
        elif step.what == "remove":
            held.pop(step.object_id, None)
            found, known = kept.pop(step.object_id), model.pop(step.object_id, None)
            assert (found is None) == (known is None)
            assert found is None or known is None or values(found) == values(known)
        elif step.what == "settle":
            durable[0] += 1
        elif (known := model.get(step.object_id)) is not None:
            stored = kept[step.object_id]
            change(step, stored)
            change(step, known)
            if step.what == "hold":
                held[step.object_id] = stored
            del stored
        kept.store_unused()
        check(kept, model, held, durable[0])


def copy_of(stored: Stored) -> Stored:
    copy = Stored(stored.key, stored.object_id, stored.size_bytes)
    for name in Stored.__slots__:
        if name != "__weakref__":
            value = getattr(stored, name)
            setattr(copy, name, list(value) if name == "pieces" else value)
    return copy


def check(kept: StoredObjects, model: dict[int, Stored], held: dict[int, Stored], durable: int) -> None:
    assert len(kept) == len(model)
    assert sorted(kept) == sorted(model)
    for object_id in range(14):
        known = model.get(object_id)
        assert (object_id in kept) == (known is not None)
        assert kept.is_readable(object_id) == (known is not None and known.readable)
        assert kept.is_kept(object_id) == (known is not None and known.kept)
        is_unsettled = known is not None and known.kept and known.ticket > durable
        assert kept.is_unsettled(object_id) == is_unsettled
    for object_id, stored in held.items():
        assert kept.get(object_id) is stored, "who has an object has the one"
    oldest = [(first, each) for first, each in kept.rows.oldest((0, 0), 100)]
    assert oldest == sorted(oldest)
    found = {each.object_id: values(each) for each in kept.values()}
    assert found == {object_id: values(stored) for object_id, stored in model.items()}
    expendable = {each for each, stored in model.items() if stored.pieces and not stored.stays}
    assert {each.object_id for each in kept.expendable()} == expendable
    kept.store_unused()


def test_what_nobody_uses_is_a_row() -> None:
    kept = StoredObjects()
    for object_id in range(1, 3 * limits.STORED_IN_USE):
        kept[object_id] = stored = Stored(object_key(object_id), object_id, 100)
        stored.pieces = [Piece(1, 512 * object_id, 4608, 100, object_id)]
    assert len(kept.used) <= limits.STORED_IN_USE
    assert kept.rows.state_bytes < 120 * len(kept.rows) + (1 << 17)


# --- names against a dictionary --------------------------------------------------------------------------------
@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3000),
            st.one_of(st.none(), st.tuples(st.sampled_from((b"a", b"bb")), st.binary(max_size=40))),
        ),
        max_size=60,
    ),
    st.integers(0, 2000),
)
def test_names_are_what_a_dictionary_would_have(
    changes: list[tuple[int, tuple[bytes, bytes] | None]], before: int
) -> None:
    names, model = ObjectNames(), dict[int, tuple[bytes, bytes]]()
    todo = [(each, (b"first", b"%d" % each)) for each in range(before)] + changes
    for object_id, name in todo:
        digest = object_key(object_id).digest
        if name is None:
            assert names.remove(digest) == model.pop(object_id, None)
        else:
            names.set(digest, *name)
            model[object_id] = name
    assert len(names) == len(model)
    for object_id in range(3001):
        digest = object_key(object_id).digest
        assert (digest in names, names.get(digest)) == (object_id in model, model.get(object_id))


def test_a_block_has_no_name_here() -> None:
    names = ObjectNames()
    names.set(object_key(7).digest, b"a", b"k")
    assert (b"\1" + bytes(14) + b"\7") not in names
    with pytest.raises(InvalidRequest):
        names.set(b"\1" + bytes(14) + b"\7", b"a", b"k")


# --- the replay against itself without the native part ----------------------------------------------------------
def row_of(object_id: int, size: int, flags: int = 0) -> NameRow:
    return NameRow(object_id, object_id, size, 0o644, 0, 0, 7, 8, object_id, flags)


@st.composite
def records(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """Make a record as the log writes them, or with a value that makes no sense."""
    object_id, size = draw(IDS), draw(st.sampled_from((100, 100, 100, 5000, 2 * limits.MIB, 1 << 40)))
    what = draw(st.sampled_from(("block", "data", "data", "meta", "meta", "tombstone", "bucket")))
    header: dict[str, Any] = {
        "object_id": object_id,
        "kind": int(Kind.OBJECT),
        "key": object_key(object_id).digest,
    }
    header |= {"object_bytes": size, "bucket_id": draw(st.sampled_from((1, 2, 2, 3))), "body": b""}
    header |= {"origin_sequence": draw(st.sampled_from((0, 0, 3, 9))), "uid": 5, "sealed_at_ns": 6}
    if what in ("block", "data"):
        header |= {
            "type": RecordType.DATA,
            "payload_bytes": draw(st.sampled_from((size, size, 50))) % (1 << 22),
        }
        header["extent_number"] = draw(st.sampled_from((0, 0, 0, 1)))
        header["payload_checksum"] = draw(small(64))
        if what == "block":
            digest = bytes([draw(st.integers(1, 4))]) * 16
            header |= {
                "kind": int(Kind.BLOCK),
                "key": digest,
                "parent": draw(st.sampled_from((bytes(16), b"p" * 16))),
            }
    elif what == "meta":
        flags = draw(st.sampled_from((0, 0, PINNED, RETIRED)))
        name = draw(st.sampled_from((b"x", b"y", b"z")))
        body = MetaBody(b"b2", name, row_of(object_id, size, flags)).encode()
        header |= {"type": RecordType.META, "body": draw(st.sampled_from((body, body, body, body[:-3])))}
    elif what == "tombstone":
        header |= {"type": RecordType.TOMBSTONE, "body": TombstoneBody(50, (object_id,)).encode()}
    else:
        bucket = BucketRow(b"b2", 2, "durable", 0, 0, 0o755, 0, 0)
        header |= {"type": RecordType.BUCKET, "object_id": 2, "body": BucketBody(bucket).encode()}
    if draw(st.integers(0, 9)) == 0:
        header["key"] = b"?" * 16
    body = header.pop("body")
    return header, body


def replayed(
    items: list[tuple[dict[str, Any], bytes]], ended: Ended, path: Path, *, natively: bool
) -> Replay:
    no_device = cast(Device, None)
    pool = SegmentPool(no_device, path, SegmentFiles(no_device, path, SEGMENT_BYTES), bytes(16))
    pool.segments = [Segment(number, -1, 1 + number, SegmentState.IN_USE) for number in range(2)]
    replay = Replay(NvmeTier(pool), ended)
    for number, segment in enumerate(pool.segments):
        part = items[number :: len(pool.segments)]
        offset, offsets, headers, bodies = SEGMENT_DATA_START, list[int](), b"", b""
        for at, (fields, body) in enumerate(part):
            payload = -(-fields.get("payload_bytes", 0) // 4096) * 4096
            values = fields | {
                "record_bytes": 512 + payload,
                "body_bytes": len(body),
                "sequence": 10 + 2 * at + 100 * number,
            }
            blank = dict.fromkeys(RECORD_HEADER.names, 0) | dict.fromkeys(("key", "parent"), bytes(16))
            blank |= {"magic": b"KVFR", "reserved0": b"", "reserved1": b""}
            headers += RECORD_HEADER.encode(**(blank | values))
            bodies += body
            offsets.append(offset)
            offset += 512 + payload
        replay.take(segment, Listing(memoryview(headers), memoryview(bodies), None if natively else offsets))
    replay.finish()
    return replay


def outcome(replay: Replay) -> dict[str, Any]:
    """Return all that a start learns from a replay."""
    found = replay.found
    return {
        "objects": {each.object_id: values(each) for each in replay.tier.objects.values()},
        "names": dict(found.names.items()),
        "orphans": sorted(each.object_id for each in found.orphans),
        "nameless": sorted(found.nameless),
        "losers": sorted(found.losers),
        "torn": found.torn,
        "dead": found.dead,
        "highest": found.highest_id,
        "next": replay.next_sequence,
        "endings": sorted(replay.unrepeated()),
        "segments": [(each.live_bytes, each.kept_bytes) for each in replay.tier.pool.segments],
        "spent": [each.number for each in replay.spent()],
        "known": {each: values(stored) for each in range(14) if (stored := replay.known(each)) is not None},
        "sequences": {each: found.sequence(each) for each in found.names},
    }


BUCKET = (
    {"type": RecordType.BUCKET, "object_id": 2, "kind": 1},
    BucketBody(BucketRow(b"b2", 2, "durable", 0, 0, 0o755, 0, 0)).encode(),
)
endings = st.lists(
    st.builds(Ending, IDS, st.just(0), st.integers(0, 60), st.sampled_from(EndingKind)), max_size=2
)


@settings(max_examples=400, deadline=None)
@given(st.lists(records(), max_size=24), endings)
@example([BUCKET, BUCKET], [])
def test_a_replay_is_the_same_natively(items: list[tuple[dict[str, Any], bytes]], ends: list[Ending]) -> None:
    results = []
    for natively in (True, False):
        ended = Ended()
        for each in ends:
            ended.add(each)
        results.append(
            outcome(replayed([BUCKET, BUCKET, *items], ended, Path("/nowhere"), natively=natively))
        )
    assert results[0] == results[1]


def test_plain_records_are_taken_in_natively() -> None:
    items: list[tuple[dict[str, Any], bytes]] = []
    for object_id in range(2, 10):
        same: dict[str, Any] = {"object_id": object_id, "key": object_key(object_id).digest, "kind": 1}
        same |= {"object_bytes": 100, "bucket_id": 2}
        meta = MetaBody(b"b2", b"%d" % object_id, row_of(object_id, 100)).encode()
        data = same | {"type": RecordType.DATA, "payload_bytes": 100}
        items += [(data, b""), BUCKET, (same | {"type": RecordType.META}, meta), BUCKET]
    replay = replayed(items, Ended(), Path("/nowhere"), natively=True)
    assert len(replay.tier.objects.rows) == len(replay.found.names.plain) == 8
    assert not replay.others
