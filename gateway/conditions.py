"""If-Match, If-None-Match, If-Modified-Since, If-Unmodified-Since: RFC 9110 section 13, and S3 on writes and copies."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.request import Request


@dataclass(frozen=True, slots=True)
class Conditions:
    if_match: tuple[str, ...] = ()
    """Unquoted ETags, or `*`; empty: no such header."""
    if_none_match: tuple[str, ...] = ()
    modified_since_s: int | None = None
    unmodified_since_s: int | None = None

    def __bool__(self) -> bool:
        """Whether there is any."""
        raise NotImplementedError


def from_headers(request: Request, prefix: bytes = b"") -> Conditions:
    """`prefix` is `b"x-amz-copy-source-"` for a copy's source. A date that is none is no condition."""
    raise NotImplementedError


def check_read(conditions: Conditions, etag: str, modified_s: int) -> None:
    """Raises S3Error PreconditionFailed, or NotModified (304; without body, with `etag` in its headers)."""
    raise NotImplementedError


def check_source(conditions: Conditions, etag: str, modified_s: int) -> None:
    """Of a copy: raises S3Error PreconditionFailed whatever failed."""
    raise NotImplementedError


def check_write(conditions: Conditions, etag: str | None) -> None:
    """`etag` of what has the name (None: nothing). Raises S3Error PreconditionFailed, NoSuchKey (If-Match of nothing),
    NotImplemented for what S3 does not take on writes. Must be called where no other write can come between."""
    raise NotImplementedError
