"""An HTTP request as the pure modules see it: raw target, headers, and the query decoded once.

Responsibility: hold what came, and decode it in one place. Invariants: `raw_path` and `raw_query` are never changed,
since signatures are over them; what is decoded is decoded once. Concurrency: one request, one task.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes

from gateway.protocol.errors import S3Error
from kvfs.limits import MAX_QUERY_PARAMETERS

_NO_ESCAPE = re.compile("%(?![0-9A-Fa-f]{2})")
_NO_ESCAPE_BYTES = re.compile(rb"%(?![0-9A-Fa-f]{2})")


@dataclass(slots=True)
class Request:
    """A request, whose headers and target were bounded by the connection loop."""

    method: str
    raw_path: bytes
    """The path of the request line, up to `?`, as it came."""
    raw_query: bytes
    """The request line after `?`, as it came."""
    headers: list[tuple[bytes, bytes]]
    """(lower-case name, value without surrounding white space), in order; a name may repeat."""
    host: str
    """The Host header, as it came (with the port, if there is one)."""
    peer: str = field(default="", compare=False)
    _by_name: dict[bytes, bytes] | None = field(default=None, init=False, repr=False, compare=False)
    _query: dict[str, str] | None = field(default=None, init=False, repr=False, compare=False)

    def header(self, name: bytes) -> str | None:
        """Return the value of a header, Latin-1; repeats joined with ","; None without it. `name` in lower case."""
        value = self.header_bytes(name)
        return None if value is None else value.decode("latin-1")

    def header_bytes(self, name: bytes) -> bytes | None:
        """Return the value of a header, undecoded."""
        return self.headers_by_name.get(name)

    @property
    def headers_by_name(self) -> dict[bytes, bytes]:
        """Return every header once, repeats joined with "," (RFC 9110 section 5.3, and as SigV4 signs them).

        In a presigned request the parameters `x-amz-*` count as headers too: some SDKs move them there.
        """
        found = self._by_name
        if found is None:
            found = dict(self.headers)
            if len(found) != len(self.headers):
                found = {}
                for name, value in self.headers:
                    found[name] = found[name] + b"," + value if name in found else value
            if b"X-Amz-Signature=" in self.raw_query:
                for parameter, text in self.query.items():
                    if parameter.startswith("x-amz-"):
                        found.setdefault(parameter.encode(), text.encode())
            self._by_name = found
        return found

    @property
    def query(self) -> dict[str, str]:
        """Return the parameters, percent-decoded once ('+' is a space). Raises S3Error InvalidURI, InvalidArgument."""
        if self._query is None:
            self._query = _parse_query(self.raw_query) if self.raw_query else {}
        return self._query


def _parse_query(raw: bytes) -> dict[str, str]:
    pairs = [pair for pair in raw.split(b"&") if pair]
    if len(pairs) > MAX_QUERY_PARAMETERS:
        raise S3Error(
            "InvalidArgument", f"{len(pairs)} query parameters: at most {MAX_QUERY_PARAMETERS} are allowed"
        )
    found: dict[str, str] = {}
    for pair in pairs:
        name, _, value = pair.partition(b"=")
        text = decode_component(name.replace(b"+", b" "))
        if text in found:
            raise S3Error("InvalidArgument", f"query parameter {text} is given twice")
        found[text] = decode_component(value.replace(b"+", b" "))
    return found


def is_escaped(text: str) -> bool:
    """Return whether every % begins an escape."""
    return not _NO_ESCAPE.search(text)


def decode_component(raw: bytes) -> str:
    """Decode a percent-encoded component once ('+' stays '+'). Raises S3Error InvalidURI."""
    if b"%" not in raw:
        data = raw
    elif _NO_ESCAPE_BYTES.search(raw):
        raise S3Error("InvalidURI", "A % in the URI is not followed by two hexadecimal digits.")
    else:
        data = unquote_to_bytes(raw)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise S3Error("InvalidURI", "The URI is not percent-encoded UTF-8.") from None
