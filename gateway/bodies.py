"""XML documents that clients send: read strictly, by a parser that takes no DTD and no entities."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.checksums import Algorithm


@dataclass(frozen=True, slots=True)
class PartClaim:
    number: int
    etag: str
    """Unquoted."""
    checksums: dict[Algorithm, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeleteClaim:
    key: str
    version_id: str | None = None
    etag: str | None = None


@dataclass(frozen=True, slots=True)
class DeleteRequest:
    objects: list[DeleteClaim]
    quiet: bool


def complete_multipart_upload(body: bytes) -> list[PartClaim]:
    """Raises S3Error MalformedXML, InvalidPartOrder, InvalidArgument."""
    raise NotImplementedError


def delete(body: bytes) -> DeleteRequest:
    """Raises S3Error MalformedXML (also for none, or more than 1,000 objects)."""
    raise NotImplementedError


def tagging(body: bytes) -> dict[str, str]:
    """Raises S3Error MalformedXML, InvalidTag, BadRequest (more than 10)."""
    raise NotImplementedError


def tagging_header(text: str) -> dict[str, str]:
    """`x-amz-tagging: a=1&b=2`. Raises S3Error InvalidArgument, InvalidTag."""
    raise NotImplementedError


def create_bucket_configuration(body: bytes) -> str | None:
    """The LocationConstraint. An empty body: None. Raises S3Error MalformedXML."""
    raise NotImplementedError
