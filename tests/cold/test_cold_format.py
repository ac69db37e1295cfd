"""Names and headers of the cold tier: round trips, order, damage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs._native.shared.slots import xxh3_64
from kvfs.errors import Corrupt, FormatMismatch
from kvfs.formats import COLD_HEADER
from tiers.cold.format import (
    HEADER_BYTES,
    ColdHeader,
    ColdName,
    check_payload,
    decode_header,
    parse_name,
)
from tiers.model.tier import Kind, StoreKey, object_key

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
DIGESTS = st.binary(min_size=16, max_size=16)
BUCKETS = st.text("abcXYZ019._-", min_size=1, max_size=63).map(str.encode)
BLOCK_NAMES = st.builds(
    lambda digest, number, parent, bucket: ColdName(StoreKey(Kind.BLOCK, digest), number, parent, bucket),
    DIGESTS,
    U64,
    DIGESTS,
    BUCKETS,
)
OBJECT_NAMES = U64.map(lambda number: ColdName(object_key(number), number))
NAMES = BLOCK_NAMES | OBJECT_NAMES


@given(NAMES)
def test_a_name_says_which_object_it_is_of(name: ColdName) -> None:
    assert parse_name(str(name)) == name
    assert len(str(name)) <= 160


@given(st.lists(BLOCK_NAMES) | st.lists(OBJECT_NAMES))
def test_names_sort_as_their_keys(names: list[ColdName]) -> None:
    by_text = sorted(names, key=str)
    assert [each.key.digest for each in by_text] == sorted(each.key.digest for each in names)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "owner.json",
        "objects/",
        "objects/00000000000000001",
        "objects/000000000000000G",
        "objects/0000000000000001/",
        "blocks/ab/" + "cd" * 16 + "-" + "0" * 32 + "-" + "0" * 16 + "-b",
        "blocks/ab/" + "ab" * 16 + "-" + "0" * 32 + "-" + "0" * 16 + "-",
        "blocks/ab/" + "AB" * 16 + "-" + "0" * 32 + "-" + "0" * 16 + "-b",
        "blocks/ab/" + "ab" * 16 + "-" + "0" * 32 + "-" + "0" * 16 + "-b/c",
    ],
)
def test_what_is_no_name_is_none(text: str) -> None:
    assert parse_name(text) is None


@given(NAMES, st.binary(max_size=100), I64, U32, DIGESTS)
def test_a_header_says_what_was_encoded(
    name: ColdName, payload: bytes, sealed_at_ns: int, uid: int, store_id: bytes
) -> None:
    header = ColdHeader(name, len(payload), xxh3_64(payload), sealed_at_ns, uid)
    data = header.encode(store_id)
    assert len(data) == HEADER_BYTES == 128
    assert decode_header(data, name, len(payload)) == header
    check_payload(memoryview(payload), header)


NAME = ColdName(StoreKey(Kind.BLOCK, b"k" * 16), 7, b"p" * 16, b"bucket")
HEADER = ColdHeader(NAME, 5, xxh3_64(b"bytes"), 1, 2)


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_a_flipped_bit_of_a_header_is_found(bit: int) -> None:
    data = bytearray(HEADER.encode(b"s" * 16))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises((Corrupt, FormatMismatch)):
        decode_header(bytes(data), NAME, 5)


@given(st.integers(0, HEADER_BYTES - 1))
def test_a_header_that_is_cut_off_is_found(length: int) -> None:
    with pytest.raises(Corrupt):
        decode_header(HEADER.encode(b"s" * 16)[:length], NAME, 5)


@pytest.mark.parametrize(
    "other",
    [
        ColdName(StoreKey(Kind.BLOCK, b"K" * 16), 7, b"p" * 16, b"bucket"),
        ColdName(StoreKey(Kind.BLOCK, b"k" * 16), 8, b"p" * 16, b"bucket"),
        ColdName(StoreKey(Kind.BLOCK, b"k" * 16), 7, b"P" * 16, b"bucket"),
        ColdName(object_key(7), 7),
    ],
)
def test_another_objects_header_is_refused(other: ColdName) -> None:
    with pytest.raises(Corrupt, match="another object"):
        decode_header(HEADER.encode(b"s" * 16), other, 5)


def test_another_size_is_refused() -> None:
    with pytest.raises(Corrupt, match="another object"):
        decode_header(HEADER.encode(b"s" * 16), NAME, 6)


def test_a_newer_version_is_told_apart_from_damage() -> None:
    data = HEADER.encode(b"s" * 16)
    start, size = COLD_HEADER.offsets["version"]
    newer = data[:start] + (2).to_bytes(size, "little") + data[start + size : -8]
    with pytest.raises(FormatMismatch, match="version 2"):
        decode_header(newer + xxh3_64(newer).to_bytes(8, "little"), NAME, 5)


@pytest.mark.parametrize("payload", [b"", b"byte", b"Bytes", b"bytes!"])
def test_other_bytes_are_found(payload: bytes) -> None:
    with pytest.raises(Corrupt):
        check_payload(memoryview(payload), HEADER)
