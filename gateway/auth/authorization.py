"""Signatures of requests: the Authorization header or the presigned query, taken apart.

Responsibility: text in, an `Authorization` out, of the right form but not verified: `gateway.auth.sigv4` does that.
Other signature versions are refused by name. Invariants: the memory that strangers can fill here is bounded by
MAX_SIGNERS and MAX_SIGNER_BYTES.

Concurrency: pure functions; signers are memoised: all requests of a client have the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Final, NamedTuple, NoReturn

from gateway.auth.canonical import ALGORITHM
from gateway.protocol.errors import S3Error
from gateway.protocol.request import Request
from kvfs.limits import MAX_SIGNED_HEADERS, MAX_SIGNER_BYTES, MAX_SIGNERS

UNSIGNED_PAYLOAD: Final = "UNSIGNED-PAYLOAD"
TIMESTAMP: Final = re.compile(r"\d{8}T\d{6}Z\Z", re.ASCII)


class Signer(NamedTuple):
    """Credential and SignedHeaders, taken apart."""

    access_key: str
    date: str
    region: str
    service: str
    terminator: str
    scope: str
    signed_headers: bytes
    names: tuple[bytes, ...]
    """The names of the signed headers, in the client's order."""
    name_set: frozenset[bytes]


class Authorization(NamedTuple):
    """The parts of a request's signature."""

    signer: Signer
    signature: str
    timestamp: str
    payload: str
    query: bytes
    """The raw query that is signed."""
    code: str
    """The S3 error code for a mistake in these parts."""


_HEADER: Final = "AuthorizationHeaderMalformed"
_QUERY: Final = "AuthorizationQueryParametersError"


def header_authorization(
    request: Request, headers: Mapping[bytes, bytes], authorization: str
) -> Authorization:
    """Parse an Authorization header. Raises S3Error AuthorizationHeaderMalformed, AccessDenied (no date), InvalidToken,
    InvalidRequest (another signature version, no x-amz-content-sha256), InvalidArgument."""
    if b"x-amz-security-token" in headers:
        raise S3Error("InvalidToken")
    payload = headers.get(b"x-amz-content-sha256")
    # Of the requests of one client only what follows `Signature=` differs, if that comes last.
    before, name, signature = authorization.rpartition("Signature=")
    if not name or "," in signature:
        before, signature = _without_signature(authorization)
    signer = header_signer(before)
    if payload is None:
        raise S3Error("InvalidRequest", "The header x-amz-content-sha256 is missing.")
    stamp = headers.get(b"x-amz-date")
    return Authorization(
        signer,
        signature,
        _date(headers) if stamp is None else stamp.decode("latin-1"),
        payload.decode("latin-1"),
        request.raw_query,
        _HEADER,
    )


def _without_signature(authorization: str) -> tuple[str, str]:
    """Split an Authorization header into the rest and its Signature."""
    algorithm, _, rest = authorization.partition(" ")
    parts = [part.strip() for part in rest.split(",")]
    signatures = [part for part in parts if part.startswith("Signature=")]
    if algorithm == ALGORITHM and len(signatures) != 1:
        raise S3Error(_HEADER, "Signature is to be given once.")
    others = ",".join(part for part in parts if part not in signatures)
    return f"{algorithm} {others}", "".join(signatures)[len("Signature=") :]


@lru_cache(maxsize=MAX_SIGNERS)
def header_signer(text: str) -> Signer:
    """Parse `AWS4-HMAC-SHA256 Credential=..., SignedHeaders=...,`, with or without spaces after the commas."""
    _check_length(text, _HEADER)
    algorithm, _, rest = text.partition(" ")
    if algorithm != ALGORITHM:
        _refuse_algorithm(algorithm)
    found = {}
    for part in rest.split(","):
        name, equals, value = part.strip().partition("=")
        if equals:
            if name in found:
                raise S3Error(_HEADER, f"{name} is given twice.")
            found[name] = value
    for name in ("Credential", "SignedHeaders"):
        if name not in found:
            raise S3Error(_HEADER, f"{name} is missing.")
    return _signer(found["Credential"], found["SignedHeaders"], _HEADER)


def _check_length(text: str, code: str) -> None:
    if len(text) > MAX_SIGNER_BYTES:
        raise S3Error(
            code, f"Credential and signed headers of {len(text)} bytes: at most {MAX_SIGNER_BYTES}."
        )


@lru_cache(maxsize=MAX_SIGNERS)
def _signer(credential: str, signed_headers: str, code: str) -> Signer:
    """Take apart `key/date/region/service/aws4_request`, where an access key holds no slash, and the signed headers."""
    _check_length(credential + signed_headers, code)
    parts = credential.split("/")
    if len(parts) != 5:
        raise S3Error(code, "Credential is to be KEY/YYYYMMDD/REGION/s3/aws4_request.")
    raw = signed_headers.encode("latin-1", "replace")
    names = tuple(raw.split(b";"))
    if len(names) > MAX_SIGNED_HEADERS:
        raise S3Error(code, f"{len(names)} signed headers: at most {MAX_SIGNED_HEADERS}.")
    key, date, region, service, terminator = parts
    scope = credential[len(key) + 1 :]
    return Signer(key, date, region, service, terminator, scope, raw, names, frozenset(names))


def _date(headers: Mapping[bytes, bytes]) -> str:
    """Return the signing time of a request without x-amz-date. Raises S3Error AccessDenied."""
    date = headers.get(b"date")
    if date is None:
        raise S3Error("AccessDenied", "The header x-amz-date is missing.")
    text = date.decode("latin-1")
    if TIMESTAMP.match(text):
        return text
    try:
        return parsedate_to_datetime(text).astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
    except (ValueError, OverflowError):
        raise S3Error("AccessDenied", "The header Date is no date.") from None


def _refuse_algorithm(algorithm: str) -> NoReturn:
    if algorithm in ("AWS", "AWS4-ECDSA-P256-SHA256"):
        raise S3Error(
            "InvalidRequest", f"Signatures of the kind {algorithm} are not supported: use {ALGORITHM}."
        )
    raise S3Error("InvalidArgument", f"Unsupported authorization type: use {ALGORITHM}.")


_REQUIRED: Final = (
    "X-Amz-Credential",
    "X-Amz-Date",
    "X-Amz-Expires",
    "X-Amz-SignedHeaders",
    "X-Amz-Signature",
)


def query_authorization(request: Request) -> Authorization:
    """Parse a presigned query. Raises S3Error AuthorizationQueryParametersError, AccessDenied (no signature),
    InvalidToken, InvalidRequest (another signature version), InvalidArgument."""
    query = request.query
    if "AWSAccessKeyId" in query:
        _refuse_algorithm("AWS")
    algorithm = query.get("X-Amz-Algorithm")
    if algorithm is None and "X-Amz-Signature" not in query:
        raise S3Error("AccessDenied", "Anonymous requests are refused.")
    if algorithm != ALGORITHM:
        _refuse_algorithm(algorithm or "")
    for name in _REQUIRED:
        if not query.get(name):
            raise S3Error(_QUERY, f"{name} is missing.")
    if "X-Amz-Security-Token" in query:
        raise S3Error("InvalidToken")
    pairs = request.raw_query.split(b"&")
    signed = b"&".join(pair for pair in pairs if not pair.startswith(b"X-Amz-Signature="))
    signed_headers = query["X-Amz-SignedHeaders"]
    payload = query.get("X-Amz-Content-Sha256")
    if payload is None and "x-amz-content-sha256" in signed_headers.split(";"):
        payload = request.header(b"x-amz-content-sha256")
    return Authorization(
        _signer(query["X-Amz-Credential"], signed_headers, _QUERY),
        query["X-Amz-Signature"],
        query["X-Amz-Date"],
        payload or UNSIGNED_PAYLOAD,
        signed,
        _QUERY,
    )
