"""Entity tags, without quotes inside the gateway."""

from __future__ import annotations

from collections.abc import Sequence


def multipart(md5s: Sequence[bytes]) -> str:
    """MD5 of the parts' MD5s, `-N`."""
    raise NotImplementedError


def opaque(identity: bytes) -> str:
    """`<32 hex>-1`: of an object that nobody took an MD5 of; `identity` differs between any two of one name."""
    raise NotImplementedError


def quote(etag: str) -> str:
    raise NotImplementedError


def unquote(text: str) -> str:
    """Of a client: with quotes or without."""
    raise NotImplementedError
