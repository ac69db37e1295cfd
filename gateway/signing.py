"""AWS Signature Version 4: which credential signed a request, and what its body must be.

Responsibility: the signature of a request, in its Authorization header or its query, checked against the raw target and
headers, the credentials and an explicit clock. The bodies of chunk-signed uploads are `gateway.chunked`'s.

Invariants:
- The path that is signed is the one that came: nothing is decoded, collapsed or normalised. A client that sends
  characters which S3's encoding escapes, or headers in Latin-1 (as botocore does), may have signed either form; the
  second is tried after the first, and since both mean the same, neither lets a signature stand for another request.
- `host` and every `x-amz-*` header must be signed (`x-amz-content-sha256` is part of what is signed anyway).
- Signatures are compared in constant time. No secret, signing key or expected signature leaves in a message.

Concurrency: pure functions; MAX_SIGNING_KEYS keys and MAX_SIGNERS scopes are memoised. Measured: 9 us for a GET of nine
headers, 3 of them SHA-256 and HMAC, where botocore takes 47 us to sign it.
Source: AWS General Reference, "Signature Version 4 signing process"; S3 API Reference, "Authenticating requests".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum
from functools import lru_cache
from hmac import compare_digest
from hmac import digest as hmac_digest
from typing import Final, NamedTuple, NoReturn

from gateway.canonical import ALGORITHM, canonical_request, string_to_sign
from gateway.credentials import Credentials
from gateway.errors import S3Error
from gateway.request import Request
from kvfs.credentials import Credential
from kvfs.limits import (
    MAX_CLOCK_SKEW_S,
    MAX_PRESIGN_EXPIRY_S,
    MAX_SIGNED_HEADERS,
    MAX_SIGNER_BYTES,
    MAX_SIGNERS,
    MAX_SIGNING_KEYS,
)


class PayloadMode(Enum):
    """What `x-amz-content-sha256` says of the body."""

    UNSIGNED = "UNSIGNED-PAYLOAD"
    SHA256 = "sha256"
    STREAMING_SIGNED = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
    STREAMING_SIGNED_TRAILER = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"
    STREAMING_UNSIGNED_TRAILER = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"

    @property
    def is_streaming(self) -> bool:
        """Whether the body is aws-chunked."""
        return self not in (PayloadMode.UNSIGNED, PayloadMode.SHA256)

    @property
    def signs_chunks(self) -> bool:
        return self in (PayloadMode.STREAMING_SIGNED, PayloadMode.STREAMING_SIGNED_TRAILER)

    @property
    def has_trailer(self) -> bool:
        return self in (PayloadMode.STREAMING_SIGNED_TRAILER, PayloadMode.STREAMING_UNSIGNED_TRAILER)


class Verified(NamedTuple):
    """A request whose signature is right."""

    credential: Credential
    mode: PayloadMode
    payload_sha256: bytes | None
    """The digest that the body must have, where mode is SHA256."""
    seed_signature: str
    """Of the request: the first link of a chunk chain."""
    signing_key: bytes
    timestamp: str
    """`20260102T030405Z`, as in the string to sign."""
    scope: str
    """`date/region/s3/aws4_request`"""
    presigned: bool

    def __repr__(self) -> str:
        return f"Verified({self.credential.access_key}, {self.mode.value}, presigned={self.presigned})"


class _Signer(NamedTuple):
    """Credential and SignedHeaders, taken apart."""

    access_key: str
    date: str
    region: str
    service: str
    terminator: str
    scope: str
    signed_headers: bytes
    names: tuple[bytes, ...]
    """Of the signed headers, in the client's order."""
    name_set: frozenset[bytes]


class _Claim(NamedTuple):
    """What a request says of its signature."""

    signer: _Signer
    signature: str
    timestamp: str
    payload: str
    query: bytes
    """The raw query that is signed."""
    code: str
    """Of an error in it."""


_MODES: Final = {mode.value: mode for mode in PayloadMode if mode is not PayloadMode.SHA256}
_HEX_DIGEST: Final = re.compile(r"[0-9a-f]{64}\Z")
_TIMESTAMP: Final = re.compile(r"\d{8}T\d{6}Z\Z", re.ASCII)


def verify(request: Request, credentials: Credentials, now: float, region: str) -> Verified:
    """The credential that signed `request`; `now` in seconds since 1970.

    Raises S3Error AccessDenied (anonymous, expired, unsigned headers), InvalidAccessKeyId, SignatureDoesNotMatch,
    RequestTimeTooSkewed, AuthorizationHeaderMalformed, AuthorizationQueryParametersError, InvalidRequest (SigV2,
    SigV4A, no x-amz-content-sha256), InvalidToken, InvalidArgument.
    """
    headers = request.headers_by_name
    raw = headers.get(b"authorization")
    in_query = b"X-Amz-" in request.raw_query or b"Signature=" in request.raw_query
    if raw is not None:
        if in_query and "X-Amz-Signature" in request.query:
            raise S3Error("InvalidArgument", "Sign either in the Authorization header or in the query.")
        claim = _header_claim(request, headers, raw.decode("latin-1"))
        _check_skew(claim, now)
    elif in_query:
        claim = _query_claim(request)
        _check_expiry(claim, request.query["X-Amz-Expires"], now)
    else:
        raise S3Error("AccessDenied", "Anonymous requests are refused.")
    signer = claim.signer
    _check_scope(claim, region)
    mode, payload_sha256 = _payload(claim.payload)
    _check_signed(request, signer.name_set)
    credential = credentials.get(signer.access_key)
    if credential is None:
        raise S3Error("InvalidAccessKeyId", detail={"AWSAccessKeyId": signer.access_key})
    key = signing_key(credential.secret, signer.date, signer.region)
    _check_signature(request, claim, key)
    return Verified(
        credential,
        mode,
        payload_sha256,
        claim.signature,
        key,
        claim.timestamp,
        signer.scope,
        raw is None,
    )


@lru_cache(maxsize=MAX_SIGNING_KEYS)
def signing_key(secret: str, date: str, region: str) -> bytes:
    """The key that signs requests of `secret` on `date` (`20260102`) in `region`."""
    key = f"AWS4{secret}".encode()
    for part in (date, region, "s3", "aws4_request"):
        key = hmac_digest(key, part.encode(), "sha256")
    return key


# --- what the request says ---------------------------------------------------------------------------------
_HEADER: Final = "AuthorizationHeaderMalformed"
_QUERY: Final = "AuthorizationQueryParametersError"


def _header_claim(request: Request, headers: Mapping[bytes, bytes], authorization: str) -> _Claim:
    if b"x-amz-security-token" in headers:
        raise S3Error("InvalidToken")
    payload = headers.get(b"x-amz-content-sha256")
    # Of the requests of one client only what follows `Signature=` differs, if that comes last.
    before, name, signature = authorization.rpartition("Signature=")
    if not name or "," in signature:
        before, signature = _without_signature(authorization)
    signer = _header_signer(before)
    if payload is None:
        raise S3Error("InvalidRequest", "The header x-amz-content-sha256 is missing.")
    stamp = headers.get(b"x-amz-date")
    return _Claim(
        signer,
        signature,
        _date(headers) if stamp is None else stamp.decode("latin-1"),
        payload.decode("latin-1"),
        request.raw_query,
        _HEADER,
    )


def _without_signature(authorization: str) -> tuple[str, str]:
    """An Authorization header less its Signature, and that."""
    algorithm, _, rest = authorization.partition(" ")
    parts = [part.strip() for part in rest.split(",")]
    signatures = [part for part in parts if part.startswith("Signature=")]
    if algorithm == ALGORITHM and len(signatures) != 1:
        raise S3Error(_HEADER, "Signature is to be given once.")
    others = ",".join(part for part in parts if part not in signatures)
    return f"{algorithm} {others}", "".join(signatures)[len("Signature=") :]


@lru_cache(maxsize=MAX_SIGNERS)
def _header_signer(text: str) -> _Signer:
    """Of `AWS4-HMAC-SHA256 Credential=..., SignedHeaders=...,`, with or without spaces after the commas."""
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
def _signer(credential: str, signed_headers: str, code: str) -> _Signer:
    """`credential` is `key/date/region/service/aws4_request`; an access key holds no slash."""
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
    return _Signer(key, date, region, service, terminator, scope, raw, names, frozenset(names))


def _date(headers: Mapping[bytes, bytes]) -> str:
    """The time of a request without x-amz-date."""
    date = headers.get(b"date")
    if date is None:
        raise S3Error("AccessDenied", "The header x-amz-date is missing.")
    text = date.decode("latin-1")
    if _TIMESTAMP.match(text):
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


def _query_claim(request: Request) -> _Claim:
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
    return _Claim(
        _signer(query["X-Amz-Credential"], signed_headers, _QUERY),
        query["X-Amz-Signature"],
        query["X-Amz-Date"],
        payload or PayloadMode.UNSIGNED.value,
        signed,
        _QUERY,
    )


# --- checks ------------------------------------------------------------------------------------------------
@lru_cache(maxsize=64)
def _seconds(timestamp: str) -> float | None:
    """Seconds since 1970 of `20260102T030405Z`."""
    if not _TIMESTAMP.match(timestamp):
        return None
    try:
        return datetime.strptime(timestamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _time(claim: _Claim) -> float:
    seconds = _seconds(claim.timestamp)
    if seconds is None:
        raise S3Error("AccessDenied", "The time of the signature is not of the form YYYYMMDDTHHMMSSZ.")
    return seconds


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _check_skew(claim: _Claim, now: float) -> None:
    seconds = _time(claim)
    if abs(now - seconds) > MAX_CLOCK_SKEW_S:
        raise S3Error(
            "RequestTimeTooSkewed",
            detail={
                "RequestTime": claim.timestamp,
                "ServerTime": _iso(now),
                "MaxAllowedSkewMilliseconds": str(MAX_CLOCK_SKEW_S * 1000),
            },
        )


def _check_expiry(claim: _Claim, text: str, now: float) -> None:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and 1 <= int(text) <= MAX_PRESIGN_EXPIRY_S):
        raise S3Error(_QUERY, f"X-Amz-Expires is to be an integer from 1 to {MAX_PRESIGN_EXPIRY_S}.")
    begin = _time(claim)
    if begin > now + MAX_CLOCK_SKEW_S:
        raise S3Error("AccessDenied", "The request is not valid yet.", detail={"ServerTime": _iso(now)})
    if now >= begin + int(text):
        raise S3Error(
            "AccessDenied",
            "The request has expired.",
            detail={"X-Amz-Expires": text, "Expires": _iso(begin + int(text)), "ServerTime": _iso(now)},
        )


def _check_scope(claim: _Claim, region: str) -> None:
    signer = claim.signer
    if signer.region != region:
        raise S3Error(
            claim.code,
            f"The region {signer.region!r} is wrong: expecting {region!r}.",
            detail={"Region": region},
        )
    if signer.service != "s3" or signer.terminator != "aws4_request":
        raise S3Error(claim.code, "The scope of the credential is to end in /s3/aws4_request.")
    if signer.date != claim.timestamp[:8]:
        raise S3Error(claim.code, f"The date {signer.date!r} is not the one of {claim.timestamp}.")


@lru_cache(maxsize=64)
def _payload(text: str) -> tuple[PayloadMode, bytes | None]:
    mode = _MODES.get(text)
    if mode is not None:
        return mode, None
    if not _HEX_DIGEST.match(text):
        raise S3Error(
            "InvalidArgument",
            "x-amz-content-sha256 is to be a SHA-256 in lower-case hex, UNSIGNED-PAYLOAD or STREAMING-...",
            detail={"ArgumentName": "x-amz-content-sha256", "ArgumentValue": text},
        )
    return PayloadMode.SHA256, bytes.fromhex(text)


def _check_signed(request: Request, signed: frozenset[bytes]) -> None:
    missing = [
        name
        for name, _ in request.headers
        if name not in signed and name.startswith(b"x-amz-") and name != b"x-amz-content-sha256"
    ]
    if b"host" not in signed:
        missing.append(b"host")
    if missing:
        names = ", ".join(name.decode("latin-1") for name in missing)
        raise S3Error("AccessDenied", "Headers are not signed.", detail={"HeadersNotSigned": names})


def _check_signature(request: Request, claim: _Claim, key: bytes) -> None:
    signer, given = claim.signer, claim.signature
    payload = claim.payload.encode("latin-1", "replace")
    canonical = canonical_request(request, claim.query, signer.names, signer.signed_headers, payload)
    text = string_to_sign(claim.timestamp, signer.scope, canonical)
    if _is_signed(key, text, given):
        return
    escaped = canonical_request(
        request, claim.query, signer.names, signer.signed_headers, payload, escape=True
    )
    if escaped != canonical:
        second = string_to_sign(claim.timestamp, signer.scope, escaped)
        if _is_signed(key, second, given):
            return
    raise S3Error(
        "SignatureDoesNotMatch",
        detail={
            "AWSAccessKeyId": signer.access_key,
            "StringToSign": text,
            "SignatureProvided": claim.signature,
            "CanonicalRequest": canonical.decode("latin-1"),
        },
    )


def _is_signed(key: bytes, text: str, given: str) -> bool:
    return given.isascii() and compare_digest(hmac_digest(key, text.encode("latin-1"), "sha256").hex(), given)
