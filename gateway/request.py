"""An HTTP request as the pure modules see it: raw target, headers, and the query decoded once."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Request:
    method: str
    raw_path: bytes
    """Of the request line, up to `?`, as it came."""
    raw_query: bytes
    """After `?`, without it, as it came."""
    headers: list[tuple[bytes, bytes]]
    """(lower-case name, value without surrounding white space), in order; a name may repeat."""
    host: str
    """Of the Host header, as it came (with the port, if there is one)."""
    peer: str = field(default="", compare=False)

    def header(self, name: bytes) -> str | None:
        """The value of a header, Latin-1; repeats joined with ", "; None without it. `name` in lower case."""
        raise NotImplementedError

    def header_bytes(self, name: bytes) -> bytes | None:
        """The same, undecoded."""
        raise NotImplementedError

    @property
    def query(self) -> dict[str, str]:
        """Parameters, percent-decoded once ('+' is a space); the first of a repeated name. Raises S3Error InvalidURI."""
        raise NotImplementedError


def decode_component(raw: bytes) -> str:
    """A percent-encoded path component as text, decoded once ('+' stays '+'). Raises S3Error InvalidURI."""
    raise NotImplementedError
