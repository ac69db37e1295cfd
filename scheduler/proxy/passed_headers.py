"""Which headers go through the proxy: a client's to engines, an engine's to the client.

Responsibility: take out what is of one connection alone (RFC 9110, section 7.6.1), what the proxy says itself, and what
steers a request past the engine that the proxy chose.

Invariants: a header that a `Connection` header names goes no further, whatever it is.

Concurrency: pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

Headers = Iterable[tuple[bytes, bytes]]
"""Names in lower case."""

_OF_A_CONNECTION = frozenset(
    (
        *(b"connection", b"proxy-connection", b"keep-alive", b"te", b"trailer"),
        *(b"transfer-encoding", b"upgrade"),
        *(b"proxy-authorization", b"proxy-authenticate", b"proxy-authentication-info"),
    )
)
_NOT_TO_ENGINES = _OF_A_CONNECTION | {
    *(b"host", b"content-length", b"expect", b"x-request-id"),
    b"accept-encoding",  # a packed answer could not be read
}
_NEITHER_BEARER = _NOT_TO_ENGINES | {b"authorization"}
ROUTE_ID: Final = "x-kvfs-route"
"""The id of a Conductor's decision, which `GET /v1/explain/ID` there explains."""
_NOT_TO_CLIENTS = _OF_A_CONNECTION | {b"content-length", b"date", b"server", ROUTE_ID.encode()}
_STEERING = (
    b"x-override-",
    b"x-data-parallel-",
    *(b"x-prefiller-", b"x-encoder-hosts-ports", b"x-kv-cache-source-", b"x-gateway-destination-endpoint"),
)
"""What begins so tells an engine, or what stands before it, where the work is done: SGLang's overrides of members that
no client may set; which data-parallel rank, as the proxy says itself; llm-d's sidecar, which host has the blocks."""


def engine_lines(headers: Headers, *, has_bearer: bool) -> bytes:
    """Return the lines of a client's headers that go to engines. `has_bearer`: whether its token is one of them."""
    own = _NOT_TO_ENGINES if has_bearer else _NEITHER_BEARER
    named = _named_by_connection(headers)
    lines = b""
    for name, value in headers:
        if name not in own and name not in named and not name.startswith(_STEERING):
            lines += b"%b: %b\r\n" % (name, value)
    return lines


def client_headers(headers: Headers, route_id: str = "") -> list[tuple[str, str]]:
    """Return the headers of an engine's answer that go to the client, and that of its route."""
    named = _named_by_connection(headers)
    passed = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in headers
        if name not in _NOT_TO_CLIENTS and name not in named
    ]
    if route_id.isascii() and route_id.isprintable() and route_id:  # another process' word
        passed.append((ROUTE_ID, route_id))
    return passed


def _named_by_connection(headers: Headers) -> set[bytes]:
    named: set[bytes] = set()
    for name, value in headers:
        if name == b"connection":
            named |= {each.strip().lower() for each in value.split(b",")}
    return named
