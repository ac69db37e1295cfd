"""If-Match, If-None-Match, If-Modified-Since, If-Unmodified-Since: RFC 9110 section 13, and S3 on writes, copies and
deletions.

Responsibility: which of a request's conditions counts, and the error where it fails. Invariants: If-Match beats
If-Unmodified-Since and If-None-Match beats If-Modified-Since (section 13.2.2); a date that is none is no condition.
Concurrency: pure functions; `check_write` is called where no other write of the name can come between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import format_datetime, parsedate_to_datetime

from gateway.protocol import etag as etags
from gateway.protocol.errors import S3Error, argument
from gateway.protocol.request import Request
from kvfs.limits import MAX_ETAG_CONDITIONS


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions of a request; all fields empty or None: none."""

    if_match: tuple[str, ...] = ()
    """Unquoted ETags, or `*`; empty: no such header."""
    if_none_match: tuple[str, ...] = ()
    modified_since_s: int | None = None
    unmodified_since_s: int | None = None
    size_bytes: int | None = None
    """S3's x-amz-if-match-size, in deletions."""
    modified_s: int | None = None
    """S3's x-amz-if-match-last-modified-time, in deletions."""

    def __bool__(self) -> bool:
        """Return whether there is any."""
        return self != _NOTHING


_NOTHING = Conditions()


def from_headers(request: Request, prefix: bytes = b"") -> Conditions:
    """Read conditions; `prefix` is `b"x-amz-copy-source-"` for a copy's source. Raises S3Error InvalidArgument."""
    headers = request.headers_by_name
    if prefix == b"" and not any(name.startswith(b"if-") for name in headers):
        return _NOTHING
    return Conditions(
        _tags(headers.get(prefix + b"if-match")),
        _tags(headers.get(prefix + b"if-none-match")),
        _seconds(headers.get(prefix + b"if-modified-since")),
        _seconds(headers.get(prefix + b"if-unmodified-since")),
    )


def of_deletion(request: Request) -> Conditions:
    """Read the conditions of a DeleteObject. Raises S3Error InvalidArgument."""
    found = from_headers(request)
    size, time = (request.header(b"x-amz-if-match-" + name) for name in (b"size", b"last-modified-time"))
    if size is None and time is None:
        return found
    return replace(
        found,
        size_bytes=None if size is None else parse_size(size, "x-amz-if-match-size"),
        modified_s=None if time is None else parse_time(time, "x-amz-if-match-last-modified-time"),
    )


def parse_size(text: str, name: str) -> int:
    """Parse a size that a deletion demands. Raises S3Error InvalidArgument."""
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise argument(name, text, f"{name} is to be a number of bytes")
    return int(text)


def parse_time(text: str, name: str) -> int:
    """Parse an HTTP date or `2026-01-02T03:04:05Z`, to seconds since 1970. Raises S3Error InvalidArgument."""
    seconds = _seconds(text.encode("latin-1", "replace"))
    if seconds is None:
        try:
            found = datetime.fromisoformat(text)
            seconds = int(found.replace(tzinfo=found.tzinfo or UTC).timestamp())
        except (ValueError, OverflowError):
            raise argument(name, text, f"{name} is to be a date") from None
    return seconds


def _tags(value: bytes | None) -> tuple[str, ...]:
    """Split ETags, which hold no comma: all of S3's are hex digits and a hyphen."""
    if value is None:
        return ()
    parts = value.decode("latin-1").split(",")
    if len(parts) > MAX_ETAG_CONDITIONS:
        raise S3Error("InvalidArgument", f"{len(parts)} ETags in a condition: at most {MAX_ETAG_CONDITIONS}.")
    return tuple(etags.unquote(part) for part in parts)


def _seconds(value: bytes | None) -> int | None:
    """Parse an HTTP date to seconds since 1970."""
    if value is None:
        return None
    try:
        found = parsedate_to_datetime(value.decode("latin-1"))
        return int(found.replace(tzinfo=found.tzinfo or UTC).timestamp())
    except (ValueError, OverflowError):
        return None


def _matches(wanted: tuple[str, ...], etag: str) -> bool:
    return "*" in wanted or etag in wanted


def _failed(name: str) -> S3Error:
    return S3Error("PreconditionFailed", detail={"Condition": name})


def _http_date(seconds: int) -> str:
    return format_datetime(datetime.fromtimestamp(seconds, UTC), usegmt=True)


def _check(
    conditions: Conditions, etag: str, modified_s: int, prefix: str, unchanged: Callable[[str], S3Error]
) -> None:
    """Check by section 13.2.2, steps 1 to 4; `unchanged` makes the error of the last two."""
    if conditions.if_match:
        if not _matches(conditions.if_match, etag):
            raise _failed(f"{prefix}If-Match")
    elif conditions.unmodified_since_s is not None and modified_s > conditions.unmodified_since_s:
        raise _failed(f"{prefix}If-Unmodified-Since")
    if conditions.if_none_match:
        if _matches(conditions.if_none_match, etag):
            raise unchanged(f"{prefix}If-None-Match")
    elif conditions.modified_since_s is not None and modified_s <= conditions.modified_since_s:
        raise unchanged(f"{prefix}If-Modified-Since")


def check_read(conditions: Conditions, etag: str, modified_s: int) -> None:
    """Check the conditions of a read. Raises S3Error PreconditionFailed, or NotModified with ETag and Last-Modified."""

    def unchanged(_: str) -> S3Error:
        return S3Error(
            "NotModified", headers={"ETag": etags.quote(etag), "Last-Modified": _http_date(modified_s)}
        )

    if conditions is not _NOTHING:
        _check(conditions, etag, modified_s, "", unchanged)


def check_source(conditions: Conditions, etag: str, modified_s: int) -> None:
    """Check the conditions of a copy's source. Raises S3Error PreconditionFailed."""
    _check(conditions, etag, modified_s, "x-amz-copy-source-", _failed)


def check_write(conditions: Conditions, etag: str | None) -> None:
    """Check the conditions of a write or deletion; `etag` is that of the object under the name; None: no object.

    Raises S3Error PreconditionFailed, NoSuchKey (If-Match of nothing), and NotImplemented for dates, which S3 does not
    take on writes. Of If-None-Match S3 takes only `*`; ETags mean here what RFC 9110 says.
    """
    if conditions is _NOTHING:
        return
    if conditions.modified_since_s is not None or conditions.unmodified_since_s is not None:
        raise S3Error("NotImplemented", "Writes take no condition on dates.")
    if conditions.if_none_match and etag is not None and _matches(conditions.if_none_match, etag):
        raise _failed("If-None-Match")
    if conditions.if_match:
        if etag is None:
            raise S3Error("NoSuchKey")
        if not _matches(conditions.if_match, etag):
            raise _failed("If-Match")


def check_deletion(conditions: Conditions, etag: str | None, size_bytes: int, modified_s: int) -> None:
    """Check the conditions of a deletion; a missing object meets those on size and time, as at S3."""
    check_write(conditions, etag)
    if etag is None:
        return
    if conditions.size_bytes not in (None, size_bytes):
        raise _failed("x-amz-if-match-size")
    if conditions.modified_s not in (None, modified_s):
        raise _failed("x-amz-if-match-last-modified-time")
