"""XML documents that the gateway sends. Every function returns the whole body, UTF-8.

Responsibility: one function for each document, in the order of elements that S3 documents. Invariants: every text
passes `gateway.xml.escape`; with `encoding-type=url` keys, prefixes, delimiters and markers are percent-encoded first.
Concurrency: pure functions; 1,000 keys take 5 ms.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gateway.checksums import Algorithm, Checksum, ChecksumType
from gateway.errors import S3Error
from gateway.etag import quote
from gateway.listing import Listing, ListRequest
from gateway.xml import document, element, escape, http_date, is_xml, optional, timestamp, url_encoded

__all__ = ["ObjectItem", "PartItem", "UploadItem", "http_date", "timestamp"]

_STANDARD = "<StorageClass>STANDARD</StorageClass>"
_DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class ObjectItem:
    """What a listing shows of a key; `etag` without quotes."""

    size_bytes: int
    etag: str
    modified_ns: int
    owner: str = ""
    checksum_algorithm: Algorithm | None = None
    checksum_type: ChecksumType | None = None


@dataclass(frozen=True, slots=True)
class PartItem:
    """What ListParts and GetObjectAttributes show of a part."""

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


def error(failure: S3Error, resource: str, request_id: str) -> bytes:
    """`resource` is `/bucket/key`."""
    parts = [element("Code", failure.code), element("Message", failure.message)]
    parts += [element(name, value) for name, value in failure.detail.items()]
    parts += [element("Resource", resource), element("RequestId", request_id), element("HostId", request_id)]
    return document("Error", parts, namespace="")


# --- listings ------------------------------------------------------------------------------------------------
def list_buckets(
    buckets: Iterable[tuple[str, int]], owner: str, *, region: str, prefix: str = "", token: str = ""
) -> bytes:
    """`buckets`: (name, created_ns); `token` of the next page, empty at the end."""
    end = f"{element('BucketRegion', region)}</Bucket>"
    rows = (
        f"<Bucket>{element('Name', name)}{element('CreationDate', timestamp(created_ns))}{end}"
        for name, created_ns in buckets
    )
    return document(
        "ListAllMyBucketsResult",
        (
            _owner("Owner", owner),
            f"<Buckets>{''.join(rows)}</Buckets>",
            optional("Prefix", prefix or None),
            optional("ContinuationToken", token or None),
        ),
    )


def list_objects_v1(bucket: str, request: ListRequest, listing: Listing[ObjectItem]) -> bytes:
    """NextMarker stands there only with a delimiter, as at S3: without, the last key is the next marker.

    Prefix stays plain where XML can hold it: boto3, which always asks for `encoding-type=url`, decodes it in version 2
    but not here.
    """
    text = _encoding(request)
    prefix = request.prefix if is_xml(request.prefix) else text(request.prefix)
    next_marker = text(listing.last) if listing.truncated and request.delimiter else None
    return document(
        "ListBucketResult",
        (
            element("Name", bucket),
            element("Prefix", prefix),
            element("Marker", text(request.marker or "")),
            optional("NextMarker", next_marker),
            _limits(request, "MaxKeys", listing.truncated),
            *_contents(listing, text, with_owner=True),
            *_common_prefixes(listing.prefixes, text),
        ),
    )


def list_objects_v2(bucket: str, request: ListRequest, listing: Listing[ObjectItem]) -> bytes:
    """KeyCount counts common prefixes too."""
    text = _encoding(request)
    return document(
        "ListBucketResult",
        (
            element("Name", bucket),
            element("Prefix", text(request.prefix)),
            optional("ContinuationToken", request.token),
            optional("NextContinuationToken", listing.token),
            optional("StartAfter", None if request.start_after is None else text(request.start_after)),
            element("KeyCount", len(listing.keys) + len(listing.prefixes)),
            _limits(request, "MaxKeys", listing.truncated),
            *_contents(listing, text, with_owner=request.fetch_owner),
            *_common_prefixes(listing.prefixes, text),
        ),
    )


def list_object_versions(bucket: str, request: ListRequest, listing: Listing[ObjectItem]) -> bytes:
    """Each key with its one version, `null`."""
    text = _encoding(request)
    last_is_key = bool(listing.keys) and listing.keys[-1][0] == listing.last
    return document(
        "ListVersionsResult",
        (
            element("Name", bucket),
            element("Prefix", text(request.prefix)),
            element("KeyMarker", text(request.marker or "")),
            element("VersionIdMarker", ""),
            optional("NextKeyMarker", text(listing.last) if listing.truncated else None),
            optional("NextVersionIdMarker", "null" if listing.truncated and last_is_key else None),
            _limits(request, "MaxKeys", listing.truncated),
            *(
                f"<Version>{element('Key', text(key))}<VersionId>null</VersionId><IsLatest>true</IsLatest>"
                f"{_item(item)}{_owner('Owner', item.owner)}</Version>"
                for key, item in listing.keys
            ),
            *_common_prefixes(listing.prefixes, text),
        ),
    )


def list_multipart_uploads(
    bucket: str,
    request: ListRequest,
    uploads: Sequence[UploadItem],
    prefixes: Sequence[str],
    *,
    upload_id_marker: str,
    truncated: bool,
) -> bytes:
    """`uploads` in order of key, then upload id."""
    text = _encoding(request)
    last_key = max([upload.key for upload in uploads[-1:]] + list(prefixes[-1:]), default="")
    last_id = uploads[-1].upload_id if uploads and uploads[-1].key == last_key else ""
    return document(
        "ListMultipartUploadsResult",
        (
            element("Bucket", bucket),
            element("KeyMarker", text(request.marker or "")),
            element("UploadIdMarker", upload_id_marker),
            optional("NextKeyMarker", text(last_key) if truncated else None),
            optional("NextUploadIdMarker", last_id if truncated else None),
            element("Prefix", text(request.prefix)),
            _limits(request, "MaxUploads", truncated),
            *(
                f"<Upload>{element('Key', text(upload.key))}{element('UploadId', upload.upload_id)}"
                f"{_owner('Initiator', upload.owner)}{_owner('Owner', upload.owner)}{_STANDARD}"
                f"{element('Initiated', timestamp(upload.initiated_ns))}{_algorithm(upload)}</Upload>"
                for upload in uploads
            ),
            *_common_prefixes(prefixes, text),
        ),
    )


def list_parts(
    bucket: str,
    upload: UploadItem,
    parts: Sequence[PartItem],
    *,
    marker: int,
    max_parts: int,
    truncated: bool,
    encoding_url: bool = False,
) -> bytes:
    """`parts` in order of their numbers, all greater than `marker`."""
    return document(
        "ListPartsResult",
        (
            element("Bucket", bucket),
            optional("EncodingType", "url" if encoding_url else None),
            element("Key", url_encoded(upload.key) if encoding_url else upload.key),
            element("UploadId", upload.upload_id),
            _owner("Initiator", upload.owner),
            _owner("Owner", upload.owner),
            _STANDARD,
            element("PartNumberMarker", marker),
            element("NextPartNumberMarker", parts[-1].number if parts else 0),
            element("MaxParts", max_parts),
            element("IsTruncated", truncated),
            _algorithm(upload),
            *(
                f"<Part>{element('PartNumber', part.number)}"
                f"{element('LastModified', timestamp(part.modified_ns))}"
                f"{element('ETag', quote(part.etag))}{element('Size', part.size_bytes)}"
                f"{_checksum(part.checksum, with_type=False)}</Part>"
                for part in parts
            ),
        ),
    )


def _encoding(request: ListRequest) -> Callable[[str], str]:
    return url_encoded if request.encoding_url else str


def _limits(request: ListRequest, limit_name: str, truncated: bool) -> str:
    text = _encoding(request)
    return (
        element(limit_name, request.max_keys)
        + optional("Delimiter", text(request.delimiter) if request.delimiter else None)
        + optional("EncodingType", "url" if request.encoding_url else None)
        + element("IsTruncated", truncated)
    )


def _contents(listing: Listing[ObjectItem], text: Callable[[str], str], *, with_owner: bool) -> Iterable[str]:
    for key, item in listing.keys:
        owner = _owner("Owner", item.owner) if with_owner else ""
        yield f"<Contents>{element('Key', text(key))}{_item(item)}{owner}</Contents>"


def _item(item: ObjectItem) -> str:
    return (
        f"<LastModified>{timestamp(item.modified_ns)}</LastModified>{element('ETag', quote(item.etag))}"
        f"{_algorithm(item)}<Size>{item.size_bytes}</Size>{_STANDARD}"
    )


def _algorithm(item: ObjectItem | UploadItem) -> str:
    if item.checksum_algorithm is None:
        return ""
    return element("ChecksumAlgorithm", item.checksum_algorithm.value) + optional(
        "ChecksumType", item.checksum_type and item.checksum_type.value
    )


def _common_prefixes(prefixes: Iterable[str], text: Callable[[str], str]) -> Iterable[str]:
    return (f"<CommonPrefixes>{element('Prefix', text(prefix))}</CommonPrefixes>" for prefix in prefixes)


def _owner(name: str, owner: str) -> str:
    return f"<{name}>{element('ID', owner)}{element('DisplayName', owner)}</{name}>"


def _checksum(checksum: Checksum | None, *, with_type: bool = True) -> str:
    if checksum is None:
        return ""
    kind = element("ChecksumType", checksum.type.value) if with_type else ""
    return element(checksum.algorithm.element, checksum.text) + kind


# --- results -------------------------------------------------------------------------------------------------
def initiate_multipart_upload(bucket: str, key: str, upload_id: str) -> bytes:
    return document(
        "InitiateMultipartUploadResult",
        (element("Bucket", bucket), element("Key", key), element("UploadId", upload_id)),
    )


def complete_multipart_upload(
    location: str, bucket: str, key: str, etag: str, checksum: Checksum | None
) -> bytes:
    return document(
        "CompleteMultipartUploadResult",
        (
            element("Location", location),
            element("Bucket", bucket),
            element("Key", key),
            element("ETag", quote(etag)),
            _checksum(checksum),
        ),
    )


def copy_object(etag: str, modified_ns: int, checksum: Checksum | None) -> bytes:
    return document(
        "CopyObjectResult",
        (
            element("LastModified", timestamp(modified_ns)),
            element("ETag", quote(etag)),
            _checksum(checksum),
        ),
    )


def copy_part(etag: str, modified_ns: int, checksum: Checksum | None) -> bytes:
    return document(
        "CopyPartResult",
        (
            element("LastModified", timestamp(modified_ns)),
            element("ETag", quote(etag)),
            _checksum(checksum, with_type=False),
        ),
    )


def delete_result(
    deleted: Iterable[tuple[str, str | None]], errors: Iterable[tuple[str, str | None, S3Error]]
) -> bytes:
    """Both with (key, version id that was asked for); `deleted` is empty for Quiet."""
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
    rows = (f"<Tag>{element('Key', key)}{element('Value', value)}</Tag>" for key, value in tags.items())
    return document("Tagging", ("<TagSet>", *rows, "</TagSet>"))


def location_constraint(region: str) -> bytes:
    """us-east-1 is empty, as at S3."""
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
    """`wanted`: names of `x-amz-object-attributes`; `total_parts` 0: an object of one piece.

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
        "StorageClass": _STANDARD,
        "ObjectSize": element("ObjectSize", size_bytes),
    }
    names = set(wanted)
    return document("GetObjectAttributesOutput", (text for name, text in found.items() if name in names))


def _object_parts(parts: Sequence[PartItem], marker: int, max_parts: int, truncated: bool) -> str:
    rows = (
        f"<Part>{element('PartNumber', part.number)}{element('Size', part.size_bytes)}"
        f"{_checksum(part.checksum, with_type=False)}</Part>"
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
    """JSON of `?match`: `{"hits": N}`, the length of the contiguous run that is stored."""
    return json.dumps({"hits": hits}).encode()
