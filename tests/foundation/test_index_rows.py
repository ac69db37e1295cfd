"""The rows of the name index: their bytes, their bounds, and what is no row."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.errors import Corrupt, InvalidRequest, LimitExceeded
from kvfs.index.names import DIRECTORY, PINNED, BucketRow, NameRow
from kvfs.index.rows import LINK, is_name_row
from kvfs.limits import MAX_LINK_TARGET_BYTES, MAX_USER_METADATA_BYTES
from tests.support.small_index import bucket, row

u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
i64 = st.integers(-(2**63), 2**63 - 1)
digests = st.one_of(st.just(b""), st.binary(min_size=16, max_size=16))


targets = st.binary(min_size=1, max_size=99).map(lambda target: target.replace(b"\0", b"/"))


@given(
    st.builds(NameRow, u64, u64, u64, u32, u32, u32, i64, i64, u64, u32, digests, st.binary(max_size=99)),
    targets,
)
def test_name_rows_come_back(value: NameRow, target: bytes) -> None:
    """With the flag of a symbolic link, which has a target, and without."""
    plain = dataclasses.replace(value, flags=value.flags & ~LINK)
    link = dataclasses.replace(value, flags=value.flags | LINK, target=target, size_bytes=len(target))
    for each in (plain, link):
        assert NameRow.decode(each.encode()) == each
        assert is_name_row(each.encode())


@given(st.binary(max_size=300))
def test_a_quick_look_takes_what_decoding_takes(data: bytes) -> None:
    """Of rows that begin as one, and of any bytes."""
    for each in (data, row().encode()[:4] + data, b"\x01\x00\x00\x00\x10" + data):
        try:
            NameRow.decode(each)
        except Corrupt:
            assert not is_name_row(each)
        else:
            assert is_name_row(each)


@pytest.mark.parametrize(
    "target", [b"", b"a\0b", bytes(MAX_LINK_TARGET_BYTES + 1), b"n" * (MAX_LINK_TARGET_BYTES + 1)]
)
def test_no_row_has_a_target_that_no_link_can_have(target: bytes) -> None:
    link = row(flags=LINK, size_bytes=len(target), target=target)
    with pytest.raises(InvalidRequest, match="target"):
        link.encode()
    good = row(flags=LINK, size_bytes=3, target=b"abc").encode()
    with pytest.raises(Corrupt):
        NameRow.decode(good[:36] + len(target).to_bytes(8, "little") + good[44:-3] + target)


def test_only_links_have_targets_as_long_as_they_say() -> None:
    for changes in ({"target": b"abc"}, {"flags": LINK}, {"flags": LINK, "target": b"abc", "size_bytes": 4}):
        with pytest.raises(InvalidRequest, match="target"):
            row(**changes).encode()


def test_name_row_bytes() -> None:
    link = NameRow(1, 2, 3, 4, 5, 6, 7, -8, 9, LINK, b"", b"meta", b"../")
    assert link.encode()[4:8].hex() == "10000000"
    assert link.encode()[68:] == b"../meta"
    value = NameRow(1, 2, 3, 4, 5, 6, 7, -8, 9, PINNED | DIRECTORY, bytes(range(16)), b"meta")
    assert value.encode().hex() == (
        "01100000" "03000000" "04000000" "05000000" "06000000"
        "0100000000000000" "0200000000000000" "0300000000000000" "0900000000000000"
        "0700000000000000" "f8ffffffffffffff"
        "000102030405060708090a0b0c0d0e0f" "6d657461"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"uid": -1}, InvalidRequest, "NameRow.uid is -1"),
        ({"mtime_ns": 1 << 63}, InvalidRequest, "mtime_ns"),
        ({"digest": b"x"}, InvalidRequest, "digest has 1 bytes"),
        ({"user_metadata": bytes(MAX_USER_METADATA_BYTES + 1)}, LimitExceeded, "65536"),
    ],
)
def test_rows_out_of_range_are_named(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        row(**changes).encode()


@pytest.mark.parametrize("damage", [b"", b"\x02", b"\x01\x05", b"\x01\x10\x00\x01"])
def test_damaged_rows_are_corrupt(damage: bytes) -> None:
    good = row().encode()
    with pytest.raises(Corrupt, match="name row"):
        NameRow.decode(damage + good[len(damage) :] if damage else good[:-1])
    with pytest.raises(Corrupt, match="'models'"):
        BucketRow.decode(b"models", damage[:1] or b"short")


def test_bucket_rows_are_checked() -> None:
    with pytest.raises(InvalidRequest, match="'warm'"):
        bucket(class_="warm").encode()
    with pytest.raises(InvalidRequest, match="3 bytes"):
        bucket(namespace=b"abc").encode()
    with pytest.raises(InvalidRequest, match="gid"):
        bucket(gid=1 << 32).encode()
