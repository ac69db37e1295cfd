"""What the gateway keeps of an object in its name's user metadata (docs/formats.md)."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.checksums import Checksum
from gateway.request import Request


@dataclass(frozen=True, slots=True)
class PartMetadata:
    size_bytes: int
    checksum: bytes = b""


@dataclass(frozen=True, slots=True)
class ObjectMetadata:
    """Defaults are what an object has that another door wrote."""

    content_type: str = "binary/octet-stream"
    headers: dict[str, str] = field(default_factory=dict)
    """cache-control, content-disposition, content-encoding, content-language, expires."""
    user: dict[str, str] = field(default_factory=dict)
    """Without `x-amz-meta-`, lower case."""
    tags: dict[str, str] = field(default_factory=dict)
    etag: str = ""
    """Empty: opaque, see `gateway.etag.opaque`."""
    checksum: Checksum | None = None
    parts: tuple[PartMetadata, ...] = ()
    """Of a multipart object, in order."""
    owner: str = ""

    def encode(self) -> bytes:
        """Raises S3Error MetadataTooLarge."""
        raise NotImplementedError

    @classmethod
    def decode(cls, data: bytes) -> ObjectMetadata:
        """Empty bytes: the defaults. Raises Corrupt."""
        raise NotImplementedError


def from_request(request: Request) -> ObjectMetadata:
    """What a PUT, copy (REPLACE) or create-upload says. Raises S3Error MetadataTooLarge, InvalidTag."""
    raise NotImplementedError


def response_headers(metadata: ObjectMetadata) -> list[tuple[str, str]]:
    """Content-Type, the kept headers, x-amz-meta-*, x-amz-tagging-count; for GET and HEAD."""
    raise NotImplementedError
