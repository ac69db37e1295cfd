"""Objects, parts and uploads as documents show them, and elements that several documents share.

Concurrency: plain values and pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.protocol.checksums import Algorithm, Checksum, ChecksumType
from gateway.xml.writer import element

STANDARD = "<StorageClass>STANDARD</StorageClass>"


@dataclass(frozen=True, slots=True)
class ObjectItem:
    """An object as listings show it; `etag` without quotes."""

    size_bytes: int
    etag: str
    modified_ns: int
    owner: str = ""
    checksum_algorithm: Algorithm | None = None
    checksum_type: ChecksumType | None = None


@dataclass(frozen=True, slots=True)
class PartItem:
    """A part as ListParts and GetObjectAttributes show it."""

    number: int
    size_bytes: int
    etag: str
    modified_ns: int
    checksum: Checksum | None = None


@dataclass(frozen=True, slots=True)
class UploadItem:
    """A multipart upload under way."""

    key: str
    upload_id: str
    initiated_ns: int
    owner: str
    checksum_algorithm: Algorithm | None = None
    checksum_type: ChecksumType | None = None


def owner_element(name: str, owner: str) -> str:
    """Render an owner, whose display name is the id."""
    return f"<{name}>{element('ID', owner)}{element('DisplayName', owner)}</{name}>"


def checksum_element(checksum: Checksum | None, *, with_type: bool = True) -> str:
    """Render a checksum; nothing for None."""
    if checksum is None:
        return ""
    kind = element("ChecksumType", checksum.type.value) if with_type else ""
    return element(checksum.algorithm.element, checksum.text) + kind
