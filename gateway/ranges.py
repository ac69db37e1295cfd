"""Byte ranges of reads and copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `start` to `end`, which is exclusive."""

    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.start


def parse(header: str | None, size_bytes: int) -> Span | None:
    """The span of a Range header; None: the whole object, 200 (no header, malformed, several ranges).
    Raises S3Error InvalidRange with `Content-Range: bytes */SIZE`."""
    raise NotImplementedError


def content_range(span: Span, size_bytes: int) -> str:
    """`bytes 0-9/100`"""
    raise NotImplementedError


def of_part(part_sizes: Sequence[int], number: int, size_bytes: int) -> Span:
    """The bytes of part `number`; `part_sizes` is empty for an object of one piece. Raises S3Error InvalidPartNumber."""
    raise NotImplementedError


def of_copy(header: str | None, size_bytes: int) -> Span:
    """`x-amz-copy-source-range`: `bytes=a-b` only. Raises S3Error InvalidArgument, InvalidRange."""
    raise NotImplementedError
