"""XML documents that answer one operation, but for listings. Every function returns the whole body, UTF-8.

Responsibility: one function for each document, in the order of elements that S3 documents. Invariants: every text
passes `gateway.xml.writer.escape`.
Concurrency: pure functions.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence

from gateway.protocol.checksums import Checksum, ChecksumType
from gateway.protocol.errors import S3Error
from gateway.protocol.etag import quote
from gateway.xml.items import STANDARD, PartItem, checksum_element
from gateway.xml.writer import document, element, escape, optional, timestamp

_DEFAULT_REGION = "us-east-1"


def error(failure: S3Error, resource: str, request_id: str) -> bytes:
    """Describe an error; `resource` is `/bucket/key`."""
    parts = [element("Code", failure.code), element("Message", failure.message)]
    parts += [element(name, value) for name, value in failure.detail.items()]
    parts += [element("Resource", resource), element("RequestId", request_id), element("HostId", request_id)]
    return document("Error", parts, namespace="")


def initiate_multipart_upload(bucket: str, key: str, upload_id: str) -> bytes:
    """Return the answer to CreateMultipartUpload."""
    return document(
        "InitiateMultipartUploadResult",
        (element("Bucket", bucket), element("Key", key), element("UploadId", upload_id)),
    )


def complete_multipart_upload(
    location: str, bucket: str, key: str, etag: str, checksum: Checksum | None
) -> bytes:
    """Return the answer to CompleteMultipartUpload."""
    return document(
        "CompleteMultipartUploadResult",
        (
            element("Location", location),
            element("Bucket", bucket),
            element("Key", key),
            element("ETag", quote(etag)),
            checksum_element(checksum),
        ),
    )


def copy_result(etag: str, modified_ns: int, checksum: Checksum | None, *, of_part: bool = False) -> bytes:
    """Describe a copy; one that is a part is shown without its checksum's type."""
    return document(
        "CopyPartResult" if of_part else "CopyObjectResult",
        (
            element("LastModified", timestamp(modified_ns)),
            element("ETag", quote(etag)),
            checksum_element(checksum, with_type=not of_part),
        ),
    )


def delete_result(
    deleted: Iterable[tuple[str, str | None]], errors: Iterable[tuple[str, str | None, S3Error]]
) -> bytes:
    """List outcomes by key and the version id that was asked for; `deleted` is empty for Quiet."""
    gone = (
        f"<Deleted>{element('Key', key)}{optional('VersionId', version)}</Deleted>"
        for key, version in deleted
    )
    failed = (
        f"<Error>{element('Key', key)}{optional('VersionId', version)}"
        f"{element('Code', failure.code)}{element('Message', failure.message)}</Error>"
        for key, version, failure in errors
    )
    return document("DeleteResult", (*gone, *failed))


def tagging(tags: Mapping[str, str]) -> bytes:
    """Return the answer to GetObjectTagging and GetBucketTagging."""
    rows = (f"<Tag>{element('Key', key)}{element('Value', value)}</Tag>" for key, value in tags.items())
    return document("Tagging", ("<TagSet>", *rows, "</TagSet>"))


def location_constraint(region: str) -> bytes:
    """Describe a bucket's region; us-east-1 is empty, as at S3."""
    text = "" if region == _DEFAULT_REGION else region
    return document("LocationConstraint", (escape(text),))


def object_attributes(
    wanted: Iterable[str],
    *,
    etag: str,
    size_bytes: int,
    checksum: Checksum | None,
    parts: Sequence[PartItem],
    total_parts: int,
    marker: int = 0,
    max_parts: int = 1000,
    truncated: bool = False,
) -> bytes:
    """Describe what `wanted` (`x-amz-object-attributes`) names; `total_parts` 0: an object of one piece.

    As at S3, the checksum of a composite object is without `-N` here, and only such an object's parts are shown.
    """
    shown = ""
    if checksum is not None:
        plain = element(checksum.algorithm.element, b64encode(checksum.digest).decode())
        shown = f"<Checksum>{plain}{element('ChecksumType', checksum.type.value)}</Checksum>"
    piece = element("PartsCount", total_parts)
    if checksum is not None and checksum.type is ChecksumType.COMPOSITE:
        piece += _object_parts(parts, marker, max_parts, truncated)
    found = {
        "ETag": element("ETag", etag),
        "Checksum": shown,
        "ObjectParts": f"<ObjectParts>{piece}</ObjectParts>" if total_parts else "",
        "StorageClass": STANDARD,
        "ObjectSize": element("ObjectSize", size_bytes),
    }
    names = set(wanted)
    return document("GetObjectAttributesOutput", (text for name, text in found.items() if name in names))


def _object_parts(parts: Sequence[PartItem], marker: int, max_parts: int, truncated: bool) -> str:
    rows = (
        f"<Part>{element('PartNumber', part.number)}{element('Size', part.size_bytes)}"
        f"{checksum_element(part.checksum, with_type=False)}</Part>"
        for part in parts
    )
    return (
        element("PartNumberMarker", marker)
        + element("NextPartNumberMarker", parts[-1].number if parts else 0)
        + element("MaxParts", max_parts)
        + element("IsTruncated", truncated)
        + "".join(rows)
    )


def match_result(hits: int) -> bytes:
    """Encode the JSON of `?match`: `{"hits": N}`, the length of the contiguous run that is stored."""
    return json.dumps({"hits": hits}).encode()
