"""Checksums of S3: streaming digests, what a request says of them, and how parts' checksums make an object's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from gateway.request import Request


class Algorithm(Enum):
    CRC32 = "CRC32"
    CRC32C = "CRC32C"
    CRC64NVME = "CRC64NVME"
    SHA1 = "SHA1"
    SHA256 = "SHA256"

    @property
    def header(self) -> str:
        """`x-amz-checksum-...`; the same name as a trailer."""
        raise NotImplementedError

    @property
    def element(self) -> str:
        """`ChecksumCRC32`, ... in documents."""
        raise NotImplementedError

    @property
    def digest_bytes(self) -> int:
        raise NotImplementedError


class ChecksumType(Enum):
    FULL_OBJECT = "FULL_OBJECT"
    COMPOSITE = "COMPOSITE"


class Digester(Protocol):
    """Not thread-safe; `update` of large views leaves the interpreter lock where the library does."""

    def update(self, data: bytes | memoryview) -> None: ...
    def digest(self) -> bytes: ...


def digester(algorithm: Algorithm) -> Digester:
    """A new streaming digest."""
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Checksum:
    """Of an object or part. `parts` is not 0 for a composite one."""

    algorithm: Algorithm
    digest: bytes
    type: ChecksumType = ChecksumType.FULL_OBJECT
    parts: int = 0

    @property
    def text(self) -> str:
        """Base64, with `-N` for a composite one."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a PUT or a part promises of its body."""

    algorithm: Algorithm | None
    digest: bytes | None
    """None: it comes in a trailer, or (with an algorithm) only the algorithm was asked for."""
    trailer: bool
    md5: bytes | None
    """Of `Content-MD5`."""


def wanted(request: Request) -> Wanted:
    """From headers. Raises S3Error InvalidRequest (two checksums, a malformed value), InvalidDigest (Content-MD5)."""
    raise NotImplementedError


def parse(algorithm: Algorithm, text: str) -> bytes:
    """The digest in a header, trailer or element. Raises S3Error InvalidRequest naming the header."""
    raise NotImplementedError


def default_type(algorithm: Algorithm) -> ChecksumType:
    """Of a multipart upload that names an algorithm only."""
    raise NotImplementedError


def check_type(algorithm: Algorithm, type_: ChecksumType) -> None:
    """Raises S3Error InvalidRequest for CRC64NVME composite, and SHA full-object."""
    raise NotImplementedError


def combine(algorithm: Algorithm, parts: Iterable[tuple[bytes, int]]) -> bytes:
    """The checksum of the concatenation, of (digest, length) in order; CRCs only."""
    raise NotImplementedError


def composite(algorithm: Algorithm, digests: Sequence[bytes]) -> Checksum:
    """The checksum of the parts' checksums."""
    raise NotImplementedError


def verify(what: str, wanted: bytes, found: bytes) -> None:
    """Raises S3Error BadDigest; `what` is `Content-MD5` or an algorithm's name."""
    raise NotImplementedError


def headers(checksum: Checksum) -> Mapping[str, str]:
    """`x-amz-checksum-...` and `x-amz-checksum-type` of an answer."""
    raise NotImplementedError
