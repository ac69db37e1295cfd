"""Byte ranges of reads and copies.

Responsibility: the span of bytes that a Range header, a part number or `x-amz-copy-source-range` means. Invariants: a
span lies within the object; of reads, what is malformed or asks for several ranges counts as no range at all (RFC 9110
section 14.2). Concurrency: pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.protocol.errors import S3Error, argument

_RANGE = re.compile(r"bytes=(\d{0,100})-(\d{0,100})\Z", re.ASCII | re.IGNORECASE)
_COPY_RANGE = re.compile(r"bytes=(\d{1,100})-(\d{1,100})\Z", re.ASCII)
_COPY_HEADER = "x-amz-copy-source-range"


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `start` to `end`, which is exclusive."""

    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        """Return how many bytes these are."""
        return self.end - self.start


def parse(header: str | None, size_bytes: int) -> Span | None:
    """Parse a Range header; return None for the whole object (no header, a malformed one, several ranges).

    Raises S3Error InvalidRange with `Content-Range: bytes */SIZE` where no byte of the object is asked for.
    """
    if header is None:
        return None
    found = _RANGE.match(header)
    if found is None:
        return None
    first, last = found.groups()
    if first:
        start = int(first)
        if last and int(last) < start:
            return None
        end = min(int(last) + 1, size_bytes) if last else size_bytes
    elif last:
        start, end = max(size_bytes - int(last), 0), size_bytes
    else:
        return None
    if start >= end:
        raise S3Error(
            "InvalidRange",
            detail={"RangeRequested": header, "ActualObjectSize": str(size_bytes)},
            headers={"Content-Range": f"bytes */{size_bytes}"},
        )
    return Span(start, end)


def content_range(span: Span, size_bytes: int) -> str:
    """Make a Content-Range, `bytes 0-9/100`."""
    return f"bytes {span.start}-{span.end - 1}/{size_bytes}"


def of_part(part_sizes: Sequence[int], number: int, size_bytes: int) -> Span:
    """Find the bytes of part `number`, from 1; `part_sizes` is empty for an object of one piece.

    Raises S3Error InvalidPartNumber. The span of a part without bytes is empty.
    """
    sizes = part_sizes or (size_bytes,)
    if not 1 <= number <= len(sizes):
        raise S3Error(
            "InvalidPartNumber",
            detail={"PartNumberRequested": str(number), "ActualPartCount": str(len(sizes))},
        )
    start = sum(sizes[: number - 1])
    return Span(start, start + sizes[number - 1])


def of_copy(header: str | None, size_bytes: int) -> Span:
    """Parse `x-amz-copy-source-range`, `bytes=FIRST-LAST` within the source; None: all of it.

    Raises S3Error InvalidArgument.
    """
    if header is None:
        return Span(0, size_bytes)
    found = _COPY_RANGE.match(header)
    first, last = (int(found[1]), int(found[2])) if found else (1, 0)
    if first > last:
        raise argument(_COPY_HEADER, header, "The range of a copy is bytes=FIRST-LAST")
    if last >= size_bytes:
        raise argument(_COPY_HEADER, header, f"The range is not within the source of {size_bytes} bytes")
    return Span(first, last + 1)
