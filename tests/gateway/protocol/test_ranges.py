"""Ranges of the S3 door: of reads, parts and copies, in tables, and properties on any input."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol import ranges
from gateway.protocol.errors import S3Error
from gateway.protocol.ranges import Span
from tests.support.s3_refusals import OK, status_of

WHOLE = "whole"
UNSATISFIABLE = "416"


@pytest.mark.parametrize(
    ("header", "size", "found"),
    [
        (None, 10, WHOLE),
        ("bytes=0-9", 10, Span(0, 10)),
        ("bytes=0-0", 10, Span(0, 1)),
        ("bytes=9-9", 10, Span(9, 10)),
        ("bytes=5-", 10, Span(5, 10)),
        ("bytes=-3", 10, Span(7, 10)),
        ("bytes=-30", 10, Span(0, 10)),
        ("bytes=0-52428799", 10, Span(0, 10)),
        ("bytes=0-" + "9" * 90, 10, Span(0, 10)),
        ("Bytes=01-2", 10, Span(1, 3)),
        ("bytes= -1", 10, WHOLE),
        ("bytes=0 -1", 10, WHOLE),
        ("bytes=10-", 10, UNSATISFIABLE),
        ("bytes=10-20", 10, UNSATISFIABLE),
        ("bytes=-0", 10, UNSATISFIABLE),
        ("bytes=0-", 0, UNSATISFIABLE),
        ("bytes=-1", 0, UNSATISFIABLE),
        ("bytes=0-0", 0, UNSATISFIABLE),
        ("bytes=5-2", 10, WHOLE),
        ("bytes=0-1,3-4", 10, WHOLE),
        ("bytes=-", 10, WHOLE),
        ("bytes=", 10, WHOLE),
        ("bytes=a-b", 10, WHOLE),
        ("bytes=1--2", 10, WHOLE),
        ("bytes=+1-2", 10, WHOLE),
        ("bytes=١-٢", 10, WHOLE),
        ("items=0-1", 10, WHOLE),
        ("0-1", 10, WHOLE),
        ("", 10, WHOLE),
    ],
)
def test_ranges(header: str | None, size: int, found: object) -> None:
    if found == UNSATISFIABLE:
        with pytest.raises(S3Error) as caught:
            ranges.parse(header, size)
        assert (caught.value.code, caught.value.status) == ("InvalidRange", 416)
        assert caught.value.headers == {"Content-Range": f"bytes */{size}"}
    else:
        assert ranges.parse(header, size) == (None if found == WHOLE else found)


@given(st.integers(0, 50), st.integers(0, 60), st.integers(0, 60))
def test_a_range_is_a_slice(size: int, first: int, last: int) -> None:
    data = bytes(range(size))
    for header, expected in (
        (f"bytes={first}-{last}", data[first : last + 1] if first <= last else data),
        (f"bytes={first}-", data[first:]),
        (f"bytes=-{last}", data[max(size - last, 0) :] if last else b""),
    ):
        try:
            span = ranges.parse(header, size)
        except S3Error:
            assert expected == b""
        else:
            assert (data if span is None else data[span.start : span.end]) == expected
            if span is not None:
                assert span.size_bytes == len(expected) > 0
                assert ranges.content_range(span, size) == f"bytes {span.start}-{span.end - 1}/{size}"


@given(st.text(max_size=30), st.integers(0, 100))
def test_any_range_lies_within_the_object(text: str, size: int) -> None:
    if status_of(ranges.parse, f"bytes={text}", size) == OK:
        span = ranges.parse(f"bytes={text}", size)
        assert span is None or 0 <= span.start < span.end <= size


def test_parts() -> None:
    assert ranges.of_part((5, 5, 3), 2, 13) == Span(5, 10)
    assert ranges.of_part((5, 5, 3), 3, 13) == Span(10, 13)
    assert ranges.of_part((), 1, 13) == Span(0, 13)
    assert ranges.of_part((), 1, 0) == Span(0, 0)
    for sizes, number in (((5, 5, 3), 4), ((), 2), ((), 0)):
        with pytest.raises(S3Error) as caught:
            ranges.of_part(sizes, number, 13)
        assert (caught.value.code, caught.value.status) == ("InvalidPartNumber", 416)


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (None, Span(0, 10)),
        ("bytes=0-9", Span(0, 10)),
        ("bytes=3-3", Span(3, 4)),
        ("bytes=0-10", None),
        ("bytes=10-10", None),
        ("bytes=3-2", None),
        ("bytes=3-", None),
        ("bytes=-3", None),
        ("bytes=0-1,2-3", None),
        ("0-1", None),
    ],
)
def test_ranges_of_copies(header: str | None, found: Span | None) -> None:
    if found is None:
        with pytest.raises(S3Error) as caught:
            ranges.of_copy(header, 10)
        assert caught.value.code == "InvalidArgument"
    else:
        assert ranges.of_copy(header, 10) == found
