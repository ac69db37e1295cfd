"""Byte formats: offsets of both sides, records and their bodies, round trips and damage."""

from __future__ import annotations

import dataclasses
import re
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs import limits
from kvfs._native.shared import table as native
from kvfs.errors import Corrupt, FormatMismatch, InvalidRequest
from kvfs.formats import (
    COLD_HEADER,
    ENDING,
    ENDINGS_HEADER,
    INDEX_ENTRY,
    PAYLOAD_ALIGNMENT,
    RECORD_ALIGNMENT,
    RECORD_HEADER,
    SLOT_HEADER,
    TABLE_HEADER,
    EntryState,
    RecordHeader,
    RecordType,
    SlotState,
    TierBit,
    record_extent,
)
from kvfs.index.rows import LINK, BucketRow, NameRow
from tiers.log.records import BucketBody, MetaBody, TombstoneBody

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
KEYS = st.binary(min_size=16, max_size=16)


def test_the_c_side_has_the_same_offsets() -> None:
    structures = {
        "kvfs_table_header": TABLE_HEADER,
        "kvfs_slot_header": SLOT_HEADER,
        "kvfs_index_entry": INDEX_ENTRY,
    }
    found: dict[str, dict[str, tuple[int, int]]] = {name: {} for name in structures}
    for structure, field, offset, size in native.native_fields():
        found[structure][field] = (offset, size)
    assert found == {name: layout.offsets for name, layout in structures.items()}
    assert (TABLE_HEADER.size, SLOT_HEADER.size, INDEX_ENTRY.size) == (4096, 128, 64)


def test_the_c_side_has_the_same_values() -> None:
    assert (native.FREE, native.DRAFT, native.SEALED) == (SlotState.FREE, SlotState.DRAFT, SlotState.SEALED)
    bits = (
        native.TIER_DRAM,
        native.TIER_HBM,
        native.TIER_NVME,
        native.TIER_REMOTE,
        native.TIER_COLD,
        native.TIER_UNVERIFIED,
    )
    assert bits == tuple(TierBit)
    assert [int(state) for state in EntryState] == [0, 1], "zeroed memory is an empty index"


def test_the_page_has_the_same_offsets() -> None:
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    headings = {"Table header": TABLE_HEADER, "Slot header": SLOT_HEADER, "Index entry": INDEX_ENTRY}
    headings |= {"Record header": RECORD_HEADER, "Cold header": COLD_HEADER}
    headings |= {"Endings page": ENDINGS_HEADER, "Ending,": ENDING}
    for heading, layout in headings.items():
        section = page.split(f"### {heading}")[1].split("\n#")[0]
        assert f"{layout.size} bytes" in section
        rows = re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)` \|", section, re.MULTILINE)
        assert {name: (int(offset), int(size)) for offset, size, name in rows} == layout.offsets


def test_every_field_is_aligned() -> None:
    for layout in (TABLE_HEADER, SLOT_HEADER, INDEX_ENTRY, RECORD_HEADER, ENDINGS_HEADER, ENDING):
        for name, (offset, size) in layout.offsets.items():
            if size in (2, 4, 8):
                assert offset % size == 0, f"{layout.name}.{name}"


def test_a_layout_names_what_does_not_fit() -> None:
    with pytest.raises(InvalidRequest, match="no field 'colour'"):
        SLOT_HEADER.encode(colour=1)
    with pytest.raises(InvalidRequest, match="slot header"):
        SLOT_HEADER.encode(uid=-1)
    with pytest.raises(Corrupt, match="127 bytes where 128"):
        SLOT_HEADER.decode(bytes(127))


RECORDS = st.builds(
    lambda start, body, payload, **fields: RecordHeader(
        body_bytes=body,
        payload_bytes=payload,
        payload_offset=record_extent(start * RECORD_ALIGNMENT, body, payload)[0],
        record_bytes=record_extent(start * RECORD_ALIGNMENT, body, payload)[1],
        **fields,
    ),
    st.integers(0, 1 << 20),
    st.integers(0, 70_000),
    st.integers(0, 4 * limits.MIB),
    type=st.sampled_from(RecordType),
    sequence=U64,
    segment_sequence=U64,
    kind=st.integers(0, 255),
    key=KEYS,
    parent=KEYS,
    object_id=U64,
    extent_number=U32,
    generation=U32,
    object_bytes=U64,
    uid=U32,
    bucket_id=U32,
    payload_checksum=U64,
    body_checksum=U64,
)


@given(RECORDS)
def test_record_headers_round_trip(header: RecordHeader) -> None:
    data = header.encode()
    assert len(data) == RECORD_HEADER.size == 192
    assert RecordHeader.decode(data + b"body") == header


@given(RECORDS, st.integers(0, 191), st.integers(1, 255))
def test_a_damaged_record_header_is_never_believed(header: RecordHeader, at: int, flip: int) -> None:
    data = bytearray(header.encode())
    data[at] ^= flip
    with pytest.raises((Corrupt, FormatMismatch)):
        RecordHeader.decode(bytes(data))


@given(st.integers(0, 1 << 20), st.integers(0, 70_000), st.integers(1, 4 * limits.MIB))
def test_payloads_are_aligned_in_their_segment(start: int, body_bytes: int, payload_bytes: int) -> None:
    start *= RECORD_ALIGNMENT
    payload_offset, record_bytes = record_extent(start, body_bytes, payload_bytes)
    assert (start + payload_offset) % PAYLOAD_ALIGNMENT == 0
    assert payload_offset >= RECORD_HEADER.size + body_bytes
    assert (start + record_bytes) % RECORD_ALIGNMENT == 0
    assert record_bytes >= payload_offset + payload_bytes


def test_a_record_of_another_version_is_told_apart() -> None:
    from kvfs._native.shared.slots import xxh3_64

    header = RecordHeader(RecordType.META, 1, 1, 512)
    data = bytearray(header.encode())
    data[4] = 9
    data[-8:] = xxh3_64(bytes(data[:-8])).to_bytes(8, "little")
    with pytest.raises(FormatMismatch, match="version 9"):
        RecordHeader.decode(bytes(data))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"record_bytes": 500}, "multiple of 512"),
        ({"payload_bytes": 10, "payload_offset": 100}, "inside"),
        ({"body_bytes": 400}, "longer"),
        ({"key": b"short"}, "16 bytes"),
    ],
)
def test_an_impossible_record_is_refused(change: dict[str, object], message: str) -> None:
    header = dataclasses.replace(RecordHeader(RecordType.DATA, 1, 1, 512), **change)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=message):
        header.encode()


def with_target(row: NameRow) -> NameRow:
    """The same as a symbolic link, where the flags say that it is one."""
    if not row.flags & LINK:
        return row
    target = b"../" * (1 + row.size_bytes % 1365)
    return dataclasses.replace(row, target=target, size_bytes=len(target))


ROWS = st.builds(
    NameRow,
    object_id=U64,
    ino=U64,
    size_bytes=U64,
    mode=U32,
    uid=U32,
    gid=U32,
    mtime_ns=st.integers(-(2**63), 2**63 - 1),
    ctime_ns=st.integers(-(2**63), 2**63 - 1),
    sequence=U64,
    flags=U32,
    user_metadata=st.binary(max_size=200),
).map(with_target)
BUCKETS = st.builds(
    BucketRow,
    name=st.binary(max_size=63),
    class_=st.sampled_from(["cache", "durable"]),
    uid=U32,
    gid=U32,
    mode=U32,
    created_ns=st.integers(-(2**63), 2**63 - 1),
    mtime_ns=st.integers(-(2**63), 2**63 - 1),
    bucket_id=st.integers(1, 2**32 - 1),
)
BODIES = st.one_of(
    st.builds(MetaBody, st.binary(max_size=63), st.binary(max_size=1024), ROWS),
    st.builds(BucketBody, BUCKETS),
    st.builds(TombstoneBody, U64, st.lists(U64, min_size=1, max_size=50).map(tuple)),
)


@given(BODIES, st.data())
def test_bodies_round_trip_and_cut_ones_do_not(
    body: MetaBody | BucketBody | TombstoneBody, data: st.DataObject
) -> None:
    encoded = body.encode()
    assert type(body).decode(encoded) == body
    cut = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(Corrupt):
        type(body).decode(encoded[:cut])
    with pytest.raises(Corrupt, match=r"after its end|ids in \d+ bytes"):
        type(body).decode(encoded + b"x")


@given(st.binary(max_size=300))
def test_any_bytes_are_a_body_or_corrupt(data: bytes) -> None:
    for kind in (MetaBody, BucketBody, TombstoneBody):
        with suppress(Corrupt):
            assert kind.decode(data).encode() == data


EMPTY_ROW = NameRow(1, 1, 0, 0, 0, 0, 0, 0, 1, 0)


def test_a_body_keeps_the_limits_of_names() -> None:
    with pytest.raises(InvalidRequest, match="bucket of 64 bytes, the limit is 63"):
        MetaBody(b"b" * 64, b"k", EMPTY_ROW).encode()
