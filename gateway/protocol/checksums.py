"""Checksums of S3: streaming digests, what a request says of them, and objects' checksums out of their parts'.

Responsibility: the five algorithms and MD5; base64 in and out; the rules on which of them go together.

Invariants: a digest is its bytes, big-endian for the CRCs; a request states at most one checksum beside Content-MD5.
Full-object checksums of multipart objects exist for CRCs only, which combine; composite ones for all but CRC64NVME.

Concurrency: a digester belongs to one task. hashlib, zlib and awscrt leave the interpreter lock for large buffers,
so that updates may run in a thread. Measured per MiB: CRC64NVME and CRC32C (awscrt) 17 us, CRC32 166 us by zlib and
369 us by awscrt, SHA-256 523 us, MD5 1223 us.
Source: S3 User Guide, "Checking object integrity"; CRC-64/NVME: NVM Express NVM Command Set, 64b CRC.
"""

from __future__ import annotations

import hashlib
import zlib
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from hmac import compare_digest
from typing import Final, Protocol

from awscrt import checksums as crt

from gateway.protocol.errors import S3Error
from gateway.protocol.request import Request
from kvfs.limits import MAX_PARTS


class Algorithm(Enum):
    """Checksum algorithms, by the names that requests use."""

    CRC32 = "CRC32"
    CRC32C = "CRC32C"
    CRC64NVME = "CRC64NVME"
    SHA1 = "SHA1"
    SHA256 = "SHA256"

    @property
    def header(self) -> str:
        """Return the name of its header, or trailer: `x-amz-checksum-...`."""
        return f"x-amz-checksum-{self.value.lower()}"

    @property
    def element(self) -> str:
        """Return the name of its element in documents: `ChecksumCRC32`, ..."""
        return f"Checksum{self.value}"

    @property
    def digest_bytes(self) -> int:
        """Return the length of a digest in bytes."""
        return _DIGEST_BYTES[self]

    @property
    def is_crc(self) -> bool:
        """Return whether this is a CRC, whose parts' checksums combine to that of the whole."""
        return self in _CRCS


class ChecksumType(Enum):
    """What a multipart object's checksum is over: its bytes, or its parts' checksums."""

    FULL_OBJECT = "FULL_OBJECT"
    COMPOSITE = "COMPOSITE"


class Digester(Protocol):
    """A digest that is taken as bytes come."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Take in the next bytes."""

    def digest(self) -> bytes:
        """Return the digest of all bytes so far, big endian."""


_Crc = Callable[[bytes | memoryview, int], int]
_Combine = Callable[[int, int, int], int]

_CRCS: Final[dict[Algorithm, tuple[_Crc, _Combine]]] = {
    Algorithm.CRC32: (zlib.crc32, crt.combine_crc32),
    Algorithm.CRC32C: (crt.crc32c, crt.combine_crc32c),
    Algorithm.CRC64NVME: (crt.crc64nvme, crt.combine_crc64nvme),
}
_DIGEST_BYTES: Final = {
    Algorithm.CRC32: 4,
    Algorithm.CRC32C: 4,
    Algorithm.CRC64NVME: 8,
    Algorithm.SHA1: 20,
    Algorithm.SHA256: 32,
}
_BY_NAME: Final = {algorithm.value: algorithm for algorithm in Algorithm}
_BY_HEADER: Final = {algorithm.header.encode(): algorithm for algorithm in Algorithm}
_NO_DIGESTS: Final = frozenset({b"x-amz-checksum-mode", b"x-amz-checksum-type", b"x-amz-checksum-algorithm"})


class _CrcDigester:
    """A CRC with the interface of hashlib's digests."""

    __slots__ = ("_bytes", "_crc", "_value")

    def __init__(self, algorithm: Algorithm) -> None:
        self._crc = _CRCS[algorithm][0]
        self._bytes = algorithm.digest_bytes
        self._value = 0

    def update(self, data: bytes | memoryview, /) -> None:
        self._value = self._crc(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._bytes, "big")


def digester(algorithm: Algorithm) -> Digester:
    """Make a new streaming digest."""
    if algorithm.is_crc:
        return _CrcDigester(algorithm)
    return hashlib.new(algorithm.value, usedforsecurity=False)


def md5() -> Digester:
    """Make a new streaming MD5, of an ETag or Content-MD5."""
    return hashlib.md5(usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class Checksum:
    """The checksum of an object or part. `parts` is their number for a composite one, else 0."""

    algorithm: Algorithm
    digest: bytes
    type: ChecksumType = ChecksumType.FULL_OBJECT
    parts: int = 0

    @property
    def text(self) -> str:
        """Return the checksum in base64, with `-N` for a composite one."""
        encoded = b64encode(self.digest).decode()
        return f"{encoded}-{self.parts}" if self.type is ChecksumType.COMPOSITE else encoded


@dataclass(frozen=True, slots=True)
class Wanted:
    """The digests that a PUT or a part states of its body."""

    algorithm: Algorithm | None
    digest: bytes | None
    """None where it comes in a trailer, or there is none."""
    trailer: bool
    md5: bytes | None
    """The digest in `Content-MD5`."""


def wanted(request: Request) -> Wanted:
    """Read what the headers of a request say of its body.

    Raises S3Error InvalidRequest (two checksums, one that contradicts `x-amz-sdk-checksum-algorithm`, a malformed
    value, a trailer that is no checksum), NotImplemented (another algorithm), InvalidDigest (Content-MD5).
    """
    headers = request.headers_by_name
    digests = [name for name in headers if name.startswith(b"x-amz-checksum-") and name not in _NO_DIGESTS]
    trailer = headers.get(b"x-amz-trailer")
    names = digests if trailer is None else [*digests, trailer.strip().lower()]
    if trailer is not None and not headers.get(b"x-amz-content-sha256", b"").endswith(b"-TRAILER"):
        raise S3Error(
            "InvalidRequest", "x-amz-trailer needs an x-amz-content-sha256 of STREAMING-...-TRAILER."
        )
    if len(names) > 1:
        raise S3Error("InvalidRequest", "A request has at most one checksum, in a header or in a trailer.")
    algorithm = _of_header(names[0]) if names else None
    asked = headers.get(b"x-amz-sdk-checksum-algorithm")
    if asked is not None and _named(asked, b"x-amz-sdk-checksum-algorithm") is not algorithm:
        raise S3Error(
            "InvalidRequest", "There is no checksum of the kind that x-amz-sdk-checksum-algorithm names."
        )
    value = None
    if algorithm is not None and digests:
        value = parse(algorithm, headers[digests[0]].decode("latin-1"))
    return Wanted(algorithm, value, trailer is not None, _content_md5(headers.get(b"content-md5")))


def asked(request: Request) -> tuple[Algorithm | None, ChecksumType | None]:
    """Read `x-amz-checksum-algorithm` and `-type` of a copy, or of a request that creates a multipart upload.

    Without a type it is the algorithm's default. Raises S3Error InvalidRequest.
    """
    headers = request.headers_by_name
    name, type_text = headers.get(b"x-amz-checksum-algorithm"), headers.get(b"x-amz-checksum-type")
    if name is None:
        if type_text is not None:
            raise S3Error("InvalidRequest", "x-amz-checksum-type needs x-amz-checksum-algorithm.")
        return None, None
    algorithm = _named(name, b"x-amz-checksum-algorithm")
    if type_text is None:
        return algorithm, default_type(algorithm)
    type_ = parse_type(type_text.decode("latin-1"))
    check_type(algorithm, type_)
    return algorithm, type_


def of_object(request: Request) -> tuple[Checksum | None, ChecksumType | None]:
    """Read what the headers of a completion say of the object. Raises S3Error InvalidRequest, NotImplemented."""
    headers = request.headers_by_name
    names = [name for name in headers if name.startswith(b"x-amz-checksum-") and name not in _NO_DIGESTS]
    if len(names) > 1:
        raise S3Error("InvalidRequest", "An object has one checksum.")
    found = None
    if names:
        found = parse_object(_of_header(names[0]), headers[names[0]].decode("latin-1"))
    type_text = headers.get(b"x-amz-checksum-type")
    return found, None if type_text is None else parse_type(type_text.decode("latin-1"))


def _of_header(name: bytes) -> Algorithm:
    algorithm = _BY_HEADER.get(name)
    if algorithm is None:
        text = name.decode("latin-1")
        if name.startswith(b"x-amz-checksum-"):
            raise S3Error("NotImplemented", f"The checksum {text} is not implemented.")
        raise S3Error("InvalidRequest", f"The trailer {text!r} is not one that x-amz-trailer may name.")
    return algorithm


def _named(name: bytes, header: bytes) -> Algorithm:
    algorithm = _BY_NAME.get(name.decode("latin-1").upper())
    if algorithm is None:
        known = ", ".join(_BY_NAME)
        raise S3Error("InvalidRequest", f"{header.decode()} is to be one of {known}.")
    return algorithm


def _content_md5(value: bytes | None) -> bytes | None:
    if value is None:
        return None
    found = _decoded(value, 16)
    if found is None:
        raise S3Error("InvalidDigest")
    return found


def _decoded(text: str | bytes, size_bytes: int) -> bytes | None:
    """Decode base64; None where it is none of so many bytes."""
    try:
        found = b64decode(text, validate=True)
    except (Base64Error, ValueError):
        return None
    return found if len(found) == size_bytes else None


def parse(algorithm: Algorithm, text: str) -> bytes:
    """Parse the digest in a header, trailer or element. Raises S3Error InvalidRequest naming the header."""
    found = _decoded(text, algorithm.digest_bytes)
    if found is None:
        raise S3Error("InvalidRequest", f"The value of {algorithm.header} is invalid.")
    return found


def parse_object(algorithm: Algorithm, text: str) -> Checksum:
    """Parse an object's checksum, where `-N` marks a composite one. Raises S3Error InvalidRequest."""
    encoded, hyphen, count = text.partition("-")
    digest = parse(algorithm, encoded)
    if not hyphen:
        return Checksum(algorithm, digest)
    if not (count.isascii() and count.isdigit() and len(count) <= 10 and 1 <= int(count) <= MAX_PARTS):
        raise S3Error("InvalidRequest", f"The value of {algorithm.header} is invalid.")
    return Checksum(algorithm, digest, ChecksumType.COMPOSITE, int(count))


def parse_type(text: str) -> ChecksumType:
    """Parse `x-amz-checksum-type`, in upper or lower case. Raises S3Error InvalidRequest."""
    try:
        return ChecksumType(text.upper())
    except ValueError:
        raise S3Error("InvalidRequest", "x-amz-checksum-type is to be FULL_OBJECT or COMPOSITE.") from None


def default_type(algorithm: Algorithm) -> ChecksumType:
    """Return the type for a multipart upload that names an algorithm only."""
    return ChecksumType.FULL_OBJECT if algorithm is Algorithm.CRC64NVME else ChecksumType.COMPOSITE


def check_type(algorithm: Algorithm, type_: ChecksumType) -> None:
    """Refuse a composite CRC64NVME and a full-object SHA. Raises S3Error InvalidRequest."""
    possible = algorithm.is_crc if type_ is ChecksumType.FULL_OBJECT else algorithm is not Algorithm.CRC64NVME
    if not possible:
        raise S3Error(
            "InvalidRequest", f"The type {type_.value} cannot be used with the algorithm {algorithm.value}."
        )


def combine(algorithm: Algorithm, parts: Iterable[tuple[bytes, int]]) -> bytes:
    """Combine the checksums of pieces, (digest, length in bytes) in order; CRCs only."""
    join = _CRCS[algorithm][1]
    value = 0
    for digest, length in parts:
        value = join(value, int.from_bytes(digest, "big"), length)
    return value.to_bytes(algorithm.digest_bytes, "big")


def composite(algorithm: Algorithm, digests: Sequence[bytes]) -> Checksum:
    """Compute the checksum of the parts' checksums."""
    over = digester(algorithm)
    over.update(b"".join(digests))
    return Checksum(algorithm, over.digest(), ChecksumType.COMPOSITE, len(digests))


def verify(what: str, wanted: bytes, found: bytes) -> None:
    """Compare digests; `what`, `Content-MD5` or an algorithm, names them in the error. Raises S3Error BadDigest."""
    if not compare_digest(wanted, found):
        raise S3Error(
            "BadDigest",
            f"The body does not have the {what} that the request says.",
            detail={
                "ExpectedDigest": b64encode(wanted).decode(),
                "CalculatedDigest": b64encode(found).decode(),
            },
        )


def headers(checksum: Checksum) -> Mapping[str, str]:
    """Make the headers of an answer that has this checksum."""
    return {checksum.algorithm.header: checksum.text, "x-amz-checksum-type": checksum.type.value}
