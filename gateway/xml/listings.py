"""XML documents that list buckets, objects, uploads and parts. Every function returns the whole body, UTF-8.

Responsibility: one function for each document, in the order of elements that S3 documents. Invariants: every text
passes `gateway.xml.writer.escape`; with `encoding-type=url` keys, prefixes, delimiters and markers are
percent-encoded first.
Concurrency: pure functions; 1,000 keys take 5 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gateway.protocol.etag import quote
from gateway.protocol.list_pages import Listing, ListRequest
from gateway.xml.items import STANDARD, ObjectItem, PartItem, UploadItem, checksum_element, owner_element
from gateway.xml.writer import document, element, is_xml, optional, timestamp, url_encoded


def list_buckets(
    buckets: Iterable[tuple[str, int]], owner: str, *, region: str, prefix: str = "", token: str = ""
) -> bytes:
    """List `buckets`, (name, created_ns); `token` is the next page's, empty at the end."""
    end = f"{element('BucketRegion', region)}</Bucket>"
    rows = (
        f"<Bucket>{element('Name', name)}{element('CreationDate', timestamp(created_ns))}{end}"
        for name, created_ns in buckets
    )
    return document(
        "ListAllMyBucketsResult",
        (
            owner_element("Owner", owner),
            f"<Buckets>{''.join(rows)}</Buckets>",
            optional("Prefix", prefix or None),
            optional("ContinuationToken", token or None),
        ),
    )


def list_objects_v1(bucket: str, request: ListRequest, listing: Listing[ObjectItem]) -> bytes:
    """List keys, with NextMarker only where there is a delimiter, as at S3: else the last key is the next marker.

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
    """List keys; KeyCount counts common prefixes too."""
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
    """List each key with its one version, `null`."""
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
                f"{_item(item)}{owner_element('Owner', item.owner)}</Version>"
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
    """List `uploads`, which are in order of key, then upload id."""
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
                f"{owner_element('Initiator', upload.owner)}{owner_element('Owner', upload.owner)}{STANDARD}"
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
    """List `parts`, which are in order of their numbers, all greater than `marker`."""
    return document(
        "ListPartsResult",
        (
            element("Bucket", bucket),
            optional("EncodingType", "url" if encoding_url else None),
            element("Key", url_encoded(upload.key) if encoding_url else upload.key),
            element("UploadId", upload.upload_id),
            owner_element("Initiator", upload.owner),
            owner_element("Owner", upload.owner),
            STANDARD,
            element("PartNumberMarker", marker),
            element("NextPartNumberMarker", parts[-1].number if parts else 0),
            element("MaxParts", max_parts),
            element("IsTruncated", truncated),
            _algorithm(upload),
            *(
                f"<Part>{element('PartNumber', part.number)}"
                f"{element('LastModified', timestamp(part.modified_ns))}"
                f"{element('ETag', quote(part.etag))}{element('Size', part.size_bytes)}"
                f"{checksum_element(part.checksum, with_type=False)}</Part>"
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
        owner = owner_element("Owner", item.owner) if with_owner else ""
        yield f"<Contents>{element('Key', text(key))}{_item(item)}{owner}</Contents>"


def _item(item: ObjectItem) -> str:
    return (
        f"<LastModified>{timestamp(item.modified_ns)}</LastModified>{element('ETag', quote(item.etag))}"
        f"{_algorithm(item)}<Size>{item.size_bytes}</Size>{STANDARD}"
    )


def _algorithm(item: ObjectItem | UploadItem) -> str:
    if item.checksum_algorithm is None:
        return ""
    return element("ChecksumAlgorithm", item.checksum_algorithm.value) + optional(
        "ChecksumType", item.checksum_type and item.checksum_type.value
    )


def _common_prefixes(prefixes: Iterable[str], text: Callable[[str], str]) -> Iterable[str]:
    return (f"<CommonPrefixes>{element('Prefix', text(prefix))}</CommonPrefixes>" for prefix in prefixes)
