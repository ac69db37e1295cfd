"""Conditions of reads, writes, copies and deletions at the S3 door, and the ETags that they name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol import conditions, etag
from gateway.protocol.conditions import Conditions
from gateway.protocol.errors import S3Error
from tests.support.s3 import request
from tests.support.s3_refusals import FAILED, OK, SAME, status_of

BEFORE, THEN, AFTER = (
    "Fri, 02 Jan 2026 03:04:04 GMT",
    "Fri, 02 Jan 2026 03:04:05 GMT",
    "Fri, 02 Jan 2026 03:04:06 GMT",
)
THEN_S = 1767323045

READS = [
    ({}, OK),
    ({"if-match": '"e"'}, OK),
    ({"if-match": "e"}, OK),
    ({"if-match": "*"}, OK),
    ({"if-match": '"x", "e"'}, OK),
    ({"if-match": '"x"'}, FAILED),
    ({"if-none-match": '"x"'}, OK),
    ({"if-none-match": '"e"'}, SAME),
    ({"if-none-match": 'W/"e"'}, SAME),
    ({"if-none-match": "*"}, SAME),
    ({"if-modified-since": BEFORE}, OK),
    ({"if-modified-since": THEN}, SAME),
    ({"if-modified-since": AFTER}, SAME),
    ({"if-modified-since": "soon"}, OK),
    ({"if-unmodified-since": BEFORE}, FAILED),
    ({"if-unmodified-since": THEN}, OK),
    ({"if-unmodified-since": "never"}, OK),
    ({"if-match": '"e"', "if-unmodified-since": BEFORE}, OK),
    ({"if-match": '"x"', "if-unmodified-since": AFTER}, FAILED),
    ({"if-none-match": '"e"', "if-modified-since": BEFORE}, SAME),
    ({"if-none-match": '"x"', "if-modified-since": AFTER}, OK),
    ({"if-match": '"x"', "if-none-match": '"e"'}, FAILED),
    ({"if-match": '"e"', "if-none-match": '"e"'}, SAME),
    ({"if-unmodified-since": BEFORE, "if-none-match": '"e"'}, FAILED),
]


@pytest.mark.parametrize(("headers", "status"), READS, ids=str)
def test_conditions_of_reads(headers: dict[str, str], status: int) -> None:
    found = conditions.from_headers(request("/b/k", headers=headers))
    assert bool(found) == any(text not in ("soon", "never") for text in headers.values())
    assert status_of(conditions.check_read, found, "e", THEN_S) == status


@pytest.mark.parametrize(("headers", "status"), READS, ids=str)
def test_conditions_of_a_copy_source(headers: dict[str, str], status: int) -> None:
    named = {f"x-amz-copy-source-{name}": value for name, value in headers.items()}
    found = conditions.from_headers(request("/b/k", headers=named), b"x-amz-copy-source-")
    expected = FAILED if status == SAME else status
    assert status_of(conditions.check_source, found, "e", THEN_S) == expected
    assert not conditions.from_headers(request("/b/k", headers=named))


def test_not_modified_carries_the_etag() -> None:
    with pytest.raises(S3Error) as caught:
        conditions.check_read(Conditions(if_none_match=("e",)), "e", THEN_S)
    assert caught.value.headers == {"ETag": '"e"', "Last-Modified": THEN}


@pytest.mark.parametrize(
    ("headers", "present", "absent"),
    [
        ({}, OK, OK),
        ({"if-none-match": "*"}, FAILED, OK),
        ({"if-none-match": '"e"'}, FAILED, OK),
        ({"if-none-match": '"x"'}, OK, OK),
        ({"if-match": '"e"', "if-none-match": '"x"'}, OK, 404),
        ({"if-match": '"e"'}, OK, 404),
        ({"if-match": '"x"'}, FAILED, 404),
        ({"if-match": "*"}, OK, 404),
        ({"if-match": '"e"', "if-none-match": "*"}, FAILED, 404),
        ({"if-modified-since": THEN}, 501, 501),
        ({"if-unmodified-since": THEN}, 501, 501),
    ],
    ids=str,
)
def test_conditions_of_writes(headers: dict[str, str], present: int, absent: int) -> None:
    found = conditions.from_headers(request("/b/k", "PUT", headers=headers))
    assert status_of(conditions.check_write, found, "e") == present
    assert status_of(conditions.check_write, found, None) == absent


@pytest.mark.parametrize(
    ("headers", "present", "absent"),
    [
        ({}, OK, OK),
        ({"if-match": '"e"'}, OK, 404),
        ({"if-match": '"x"'}, FAILED, 404),
        ({"x-amz-if-match-size": "7"}, OK, OK),
        ({"x-amz-if-match-size": "8"}, FAILED, OK),
        ({"x-amz-if-match-size": "-1"}, 400, 400),
        ({"x-amz-if-match-last-modified-time": THEN}, OK, OK),
        ({"x-amz-if-match-last-modified-time": "2026-01-02T03:04:05Z"}, OK, OK),
        ({"x-amz-if-match-last-modified-time": BEFORE}, FAILED, OK),
        ({"x-amz-if-match-last-modified-time": "yesterday"}, 400, 400),
        ({"if-match": "*", "x-amz-if-match-size": "7", "x-amz-if-match-last-modified-time": THEN}, OK, 404),
        (
            {"if-match": "*", "x-amz-if-match-size": "8", "x-amz-if-match-last-modified-time": THEN},
            FAILED,
            404,
        ),
    ],
    ids=str,
)
def test_conditions_of_deletions(headers: dict[str, str], present: int, absent: int) -> None:
    def check(etag: str | None) -> None:
        found = conditions.of_deletion(request("/b/k", "DELETE", headers=headers))
        conditions.check_deletion(found, etag, 7, THEN_S)

    assert status_of(check, "e") == present
    assert status_of(check, None) == absent


def test_too_many_etags() -> None:
    with pytest.raises(S3Error):
        conditions.from_headers(request("/b/k", headers={"if-match": "," * 64}))


@given(st.text(st.characters(max_codepoint=0xFF), max_size=50), st.sampled_from([name for name, _ in (
    ("if-match", 0), ("if-none-match", 0), ("if-modified-since", 0), ("if-unmodified-since", 0))]))  # fmt: skip
def test_any_condition_is_read(text: str, name: str) -> None:
    found = conditions.from_headers(request("/b/k", headers={name: text}))
    assert status_of(conditions.check_read, found, "e", THEN_S) in (OK, FAILED, SAME)


# --- ETags -------------------------------------------------------------------------------------------------------
def test_etags() -> None:
    assert etag.multipart([bytes(16)]) == "4ae71336e44bf9bf79d2752e234818a5-1"
    assert etag.opaque(b"1") != etag.opaque(b"2")
    assert etag.opaque(b"1").endswith("-1")
    assert len(etag.opaque(b"1")) == 34
    for text in ('"e"', "e", 'W/"e"', ' "e" '):
        assert etag.unquote(text) == "e"
    assert etag.unquote(etag.quote("a-1")) == "a-1"
    assert etag.unquote('"') == '"'
