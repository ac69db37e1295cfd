"""Entity tags, without quotes inside the gateway.

Responsibility: the three kinds of ETag: MD5 of the body (hex), MD5 of the parts' MD5s with `-N`, opaque. Clients take
an ETag with a hyphen for one that is no MD5 of the body, so an opaque one ends in `-1`. Concurrency: pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import md5

from xxhash import xxh3_128_digest


def multipart(md5s: Sequence[bytes]) -> str:
    """Make the ETag of a multipart object: MD5 of the parts' 16-byte MD5s, then `-` and their number."""
    return f"{md5(b''.join(md5s), usedforsecurity=False).hexdigest()}-{len(md5s)}"


def opaque(identity: bytes) -> str:
    """Make `<32 hex>-1` for an object without an MD5; `identity` differs between any two objects of one name."""
    return f"{xxh3_128_digest(identity).hex()}-1"


def of_object(taken: str, object_id: int) -> str:
    """Return the ETag of an object: the one `taken` of its bytes, or where that is empty an opaque one."""
    return taken or opaque(object_id.to_bytes(16, "big"))


def quote(etag: str) -> str:
    """Quote an ETag as headers and documents have it."""
    return f'"{etag}"'


def unquote(text: str) -> str:
    """Read a client's ETag, with quotes or without; a weak tag without its `W/`."""
    text = text.strip()
    if text.startswith("W/"):
        text = text[2:]
    if len(text) >= 2 and text[0] == text[-1] == '"':
        return text[1:-1]
    return text
