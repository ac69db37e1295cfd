"""Operations that are served, the right that each takes, and the one that a request asks for.

Concurrency: plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvfs.config.credentials import RightName


class Operation(Enum):
    """S3's name of each operation that is served."""

    LIST_BUCKETS = "ListBuckets"
    CREATE_BUCKET = "CreateBucket"
    HEAD_BUCKET = "HeadBucket"
    DELETE_BUCKET = "DeleteBucket"
    GET_BUCKET_LOCATION = "GetBucketLocation"
    LIST_OBJECTS = "ListObjects"
    LIST_OBJECTS_V2 = "ListObjectsV2"
    LIST_OBJECT_VERSIONS = "ListObjectVersions"
    LIST_MULTIPART_UPLOADS = "ListMultipartUploads"
    DELETE_OBJECTS = "DeleteObjects"
    MATCH = "Match"
    GET_OBJECT = "GetObject"
    HEAD_OBJECT = "HeadObject"
    PUT_OBJECT = "PutObject"
    COPY_OBJECT = "CopyObject"
    DELETE_OBJECT = "DeleteObject"
    GET_OBJECT_ATTRIBUTES = "GetObjectAttributes"
    GET_OBJECT_TAGGING = "GetObjectTagging"
    PUT_OBJECT_TAGGING = "PutObjectTagging"
    DELETE_OBJECT_TAGGING = "DeleteObjectTagging"
    CREATE_MULTIPART_UPLOAD = "CreateMultipartUpload"
    UPLOAD_PART = "UploadPart"
    UPLOAD_PART_COPY = "UploadPartCopy"
    COMPLETE_MULTIPART_UPLOAD = "CompleteMultipartUpload"
    ABORT_MULTIPART_UPLOAD = "AbortMultipartUpload"
    LIST_PARTS = "ListParts"
    GET_BUCKET_CONFIGURATION = "GetBucketConfiguration"
    """All configurations in `gateway.operations.bucket_configurations`."""
    GET_BUCKET_ACL = "GetBucketAcl"
    PUT_BUCKET_ACL = "PutBucketAcl"
    GET_BUCKET_TAGGING = "GetBucketTagging"
    PUT_BUCKET_TAGGING = "PutBucketTagging"
    DELETE_BUCKET_TAGGING = "DeleteBucketTagging"
    GET_OBJECT_ACL = "GetObjectAcl"
    PUT_OBJECT_ACL = "PutObjectAcl"

    @property
    def right(self) -> RightName | None:
        """Return the right on the bucket in the address that it takes; a copy needs "read" on its source too."""
        return _RIGHTS.get(self, "write")


_RIGHTS: Final[dict[Operation, RightName | None]] = {
    Operation.LIST_BUCKETS: None,
    Operation.HEAD_BUCKET: "list",
    Operation.GET_BUCKET_LOCATION: "list",
    Operation.LIST_OBJECTS: "list",
    Operation.LIST_OBJECTS_V2: "list",
    Operation.LIST_OBJECT_VERSIONS: "list",
    Operation.LIST_MULTIPART_UPLOADS: "list",
    Operation.LIST_PARTS: "list",
    Operation.MATCH: "read",
    Operation.GET_OBJECT: "read",
    Operation.HEAD_OBJECT: "read",
    Operation.GET_OBJECT_ATTRIBUTES: "read",
    Operation.GET_OBJECT_TAGGING: "read",
    Operation.GET_BUCKET_CONFIGURATION: "list",
    Operation.GET_BUCKET_ACL: "list",
    Operation.GET_BUCKET_TAGGING: "list",
    Operation.GET_OBJECT_ACL: "read",
}


@dataclass(frozen=True, slots=True)
class CopySource:
    """`x-amz-copy-source`, decoded."""

    bucket: str
    key: str


@dataclass(frozen=True, slots=True)
class Action:
    """One operation and what it is about; the names are checked."""

    operation: Operation
    bucket: str | None = None
    key: str | None = None
    upload_id: str | None = None
    part_number: int | None = None
    """1 to 10,000: of UploadPart and UploadPartCopy, or of a GET or HEAD with `partNumber`."""
    source: CopySource | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)
    """The query, decoded: parameters that the operation reads (prefix, response-*, max-parts, ...) and all others."""
