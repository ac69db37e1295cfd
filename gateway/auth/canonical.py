"""The canonical request of AWS Signature Version 4, as S3 has it.

Responsibility: the bytes that a signature is over. Invariants: see `gateway.auth.sigv4`; the path is never decoded,
collapsed or normalised, the query only sorted, unless `escape` asks for S3's own encoding of what they mean.
Concurrency: pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Final
from urllib.parse import quote, unquote_to_bytes

from gateway.protocol.request import Request

ALGORITHM: Final = "AWS4-HMAC-SHA256"
_SPACES: Final = re.compile(rb" {2,}")


def canonical_request(
    request: Request,
    raw_query: bytes,
    names: Sequence[bytes],
    signed_headers: bytes,
    payload: bytes,
    *,
    escape: bool = False,
) -> bytes:
    """Return the canonical request, which is hashed and signed.

    `names` are those in `signed_headers`; `payload` is what stands for the body's hash. `escape`: path and query in
    S3's own percent-encoding and headers taken as Latin-1 and signed as UTF-8, instead of as they came.
    """
    headers = request.headers_by_name
    lines = b"\n".join([name + b":" + headers.get(name, b"") for name in names])
    if b"  " in lines:
        lines = _SPACES.sub(b" ", lines)
    if escape:
        lines = lines.decode("latin-1").encode()
    if raw_query:
        raw_query = _canonical_query(_escaped_query(raw_query) if escape else raw_query)
    return b"\n".join(
        (
            request.method.encode(),
            _escaped_path(request.raw_path) if escape else request.raw_path,
            raw_query,
            lines,
            b"",
            signed_headers,
            payload,
        )
    )


def string_to_sign(timestamp: str, scope: str, canonical: bytes) -> str:
    """Return the text whose HMAC a request's signature is."""
    return f"{ALGORITHM}\n{timestamp}\n{scope}\n{sha256(canonical).hexdigest()}"


def _canonical_query(raw: bytes) -> bytes:
    """Sort parameters by their encoded names, then values."""
    pairs = raw.split(b"&")
    if len(pairs) == 1:
        return raw if b"=" in raw else raw + b"="
    split = sorted(pair.partition(b"=")[::2] for pair in pairs if pair)
    return b"&".join([name + b"=" + value for name, value in split])


def _escaped_path(raw: bytes) -> bytes:
    return quote(unquote_to_bytes(raw), safe="/~").encode()


def _escaped_query(raw: bytes) -> bytes:
    def escaped(part: bytes) -> bytes:
        return quote(unquote_to_bytes(part.replace(b"+", b" ")), safe="~").encode()

    pairs = (pair.partition(b"=") for pair in raw.split(b"&") if pair)
    return b"&".join(escaped(name) + b"=" + escaped(value) for name, _, value in pairs)
