"""XML documents that the gateway sends. Every function returns the whole body, UTF-8."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gateway.checksums import Algorithm, Checksum, ChecksumType
from gateway.errors import S3Error
from gateway.listing import Listing, ListRequest


@dataclass(frozen=True, slots=True)
class ObjectItem:
    """What a listing shows of a key."""

    size_bytes: int
    etag: str
    modified_ns: int
    owner: str = ""
    checksum_algorithm: Algorithm | None = None
    checksum_type: ChecksumType | None = None


@dataclass(frozen=True, slots=True)
class PartItem:
    number: int
    size_bytes: int
    etag: str
    modified_ns: int
    checksum: Checksum | None = None


@dataclass(frozen=True, slots=True)
class UploadItem:
    key: str
    upload_id: str
    initiated_ns: int
    owner: str
    checksum_algorithm: Algorithm | None = None
    checksum_type: ChecksumType | None = None


def timestamp(ns: int) -> str:
    """`2026-01-02T03:04:05.678Z`"""
    raise NotImplementedError


def http_date(ns: int) -> str:
    """`Fri, 02 Jan 2026 03:04:05 GMT`"""
    raise NotImplementedError


def error(failure: S3Error, resource: str, request_id: str) -> bytes:
    raise NotImplementedError


def list_buckets(
    buckets: Iterable[tuple[str, int]], owner: str, *, prefix: str = "", token: str = ""
) -> bytes:
    """`buckets`: (name, created_ns)."""
    raise NotImplementedError


def list_objects_v1(bucket: str, request: ListRequest, listing: Listing[ObjectItem]) -> bytes:
    raise NotImplementedError


def list_objects_v2(bucket: str, request: ListRequest, listing: Listing[ObjectItem]) -> bytes:
    raise NotImplementedError


def list_object_versions(bucket: str, request: ListRequest, listing: Listing[ObjectItem]) -> bytes:
    raise NotImplementedError


def list_parts(
    bucket: str,
    key: str,
    upload_id: str,
    owner: str,
    parts: Sequence[PartItem],
    *,
    marker: int,
    max_parts: int,
    truncated: bool,
    encoding_url: bool = False,
    checksum_algorithm: Algorithm | None = None,
    checksum_type: ChecksumType | None = None,
) -> bytes:
    raise NotImplementedError


def list_multipart_uploads(
    bucket: str,
    request: ListRequest,
    uploads: Sequence[UploadItem],
    prefixes: Sequence[str],
    *,
    key_marker: str,
    upload_id_marker: str,
    truncated: bool,
) -> bytes:
    raise NotImplementedError


def initiate_multipart_upload(bucket: str, key: str, upload_id: str) -> bytes:
    raise NotImplementedError


def complete_multipart_upload(
    location: str, bucket: str, key: str, etag: str, checksum: Checksum | None
) -> bytes:
    raise NotImplementedError


def copy_object(etag: str, modified_ns: int, checksum: Checksum | None) -> bytes:
    raise NotImplementedError


def copy_part(etag: str, modified_ns: int, checksum: Checksum | None) -> bytes:
    raise NotImplementedError


def delete_result(
    deleted: Iterable[tuple[str, str | None]], errors: Iterable[tuple[str, str | None, S3Error]]
) -> bytes:
    """`deleted`: (key, version id asked for); leave it empty for Quiet."""
    raise NotImplementedError


def tagging(tags: Mapping[str, str]) -> bytes:
    raise NotImplementedError


def location_constraint(region: str) -> bytes:
    raise NotImplementedError


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
    """`wanted`: names of `x-amz-object-attributes`; `total_parts` 0: no multipart object."""
    raise NotImplementedError
