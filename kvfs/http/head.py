"""The head of an HTTP/1.1 request: request line and headers, from bytes to values.

Responsibility: find the end of a head, parse it with httptools (llhttp), and decide how its body is framed. What
servers and proxies in a row read differently is refused, not repaired: a bare CR or LF, folded lines, a repeated
or signed Content-Length, Content-Length beside Transfer-Encoding, any transfer coding but `chunked` (RFC 9112,
sections 2.2, 5.2, 6.1 to 6.3).

Invariants: a head is at most limits.MAX_HEAD_BYTES with at most limits.MAX_HEADERS fields. The target stays as it
was sent: signatures cover the raw path.

Concurrency: pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import httptools
import msgspec

from kvfs.limits import MAX_HEAD_BYTES, MAX_HEADERS

END = b"\r\n\r\n"
_LENGTH = re.compile(rb"[0-9]{1,18}\Z")
_TARGET = re.compile(rb"[\x21-\x7e]+\Z")


class BadHead(Exception):
    """A request is malformed: it is answered with `status`, and the connection closes."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Head(msgspec.Struct, frozen=True):  # a NamedTuple takes five times as long to make
    """A parsed head. Names of headers are in lower case, values stripped of white space, in the order of arrival."""

    method: str
    target: bytes
    headers: list[tuple[bytes, bytes]]
    content_length: int
    """0 where there is no body, and where it is chunked."""
    chunked: bool
    expects_continue: bool
    keep_alive: bool
    takes_chunks: bool = True
    """Whether the answer may be chunked; not in HTTP/1.0."""


class _Fields:
    """Collect target and headers while httptools parses."""

    __slots__ = ("headers", "target")

    def __init__(self) -> None:
        self.target = b""
        self.headers: list[tuple[bytes, bytes]] = []

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.strip(b" \t")))


def parse_head(data: bytes) -> Head:
    """Parse a head, with the empty line that ends it. Raises BadHead."""
    _check_lines(data)
    fields = _Fields()
    parser = httptools.HttpRequestParser(fields)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        pass  # an upgrade that is not taken up is ignored (RFC 9110, section 7.8)
    except httptools.HttpParserError as error:
        raise BadHead(400, f"not an HTTP/1.1 request: {error}") from None
    version = parser.get_http_version()
    if version not in ("1.1", "1.0"):
        raise BadHead(505, f"HTTP/{version} is not served, HTTP/1.1 is")
    if not _TARGET.match(fields.target):
        raise BadHead(400, "the request target holds bytes that must be escaped")
    return _framed(parser.get_method().decode("ascii"), fields, version)


def _check_lines(data: bytes) -> None:
    if len(data) > MAX_HEAD_BYTES:
        raise BadHead(431, f"headers of {len(data)} bytes, the limit is {MAX_HEAD_BYTES}")
    lines = data.count(b"\n")
    if lines - 2 > MAX_HEADERS:
        raise BadHead(431, f"more than {MAX_HEADERS} headers")
    if lines != data.count(b"\r\n") or lines != data.count(b"\r") or b"\0" in data:
        raise BadHead(400, "a bare CR, a bare LF or a NUL in the headers")
    if b"\n " in data or b"\n\t" in data:
        raise BadHead(400, "a folded header line")


def _framed(method: str, fields: _Fields, version: str) -> Head:
    lengths: list[bytes] = []
    codings: list[bytes] = []
    expectations: list[bytes] = []
    options: list[bytes] = []
    hosts = 0
    for name, value in fields.headers:
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            lengths.append(value)
        elif name == b"transfer-encoding":
            codings.append(value)
        elif name == b"expect":
            expectations.append(value.lower())
        elif name == b"connection":
            options.append(value)
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        raise BadHead(400, f"{hosts} Host headers where one is wanted")
    if codings and (lengths or version == "1.0"):
        raise BadHead(400, "Transfer-Encoding beside Content-Length, or in HTTP/1.0")
    if codings and (len(codings) > 1 or codings[0].lower() != b"chunked"):
        raise BadHead(501, "a transfer coding other than chunked")
    if len(lengths) > 1 or (lengths and not _LENGTH.match(lengths[0])):
        raise BadHead(400, "a Content-Length that is not one number")
    # Any other expectation may be passed over (RFC 9110, section 10.1.1), and S3 does.
    expects_continue = b"100-continue" in expectations
    return Head(
        method,
        fields.target,
        fields.headers,
        int(lengths[0]) if lengths else 0,
        bool(codings),
        expects_continue and version == "1.1",
        _keeps_alive(options, version),
        version == "1.1",
    )


def _keeps_alive(said: Sequence[bytes], version: str) -> bool:
    """Return whether the connection persists (RFC 9112, section 9.3); llhttp lacks it at the end of a message."""
    if not said:
        return version == "1.1"
    options = {option.strip() for option in b",".join(said).lower().split(b",")}
    return b"close" not in options and (version == "1.1" or b"keep-alive" in options)
