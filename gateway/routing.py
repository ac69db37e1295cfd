"""What a request asks for: a pure function from request to action.

Everything that is not served is refused here, as S3 says it: NotImplemented, MethodNotAllowed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from gateway.addressing import Address
from gateway.request import Request


class Right(Enum):
    """What a credential must be allowed on the bucket."""

    NONE = "none"
    READ = "read"
    WRITE = "write"
    LIST = "list"


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

    @property
    def right(self) -> Right:
        """Of the bucket in the address; a copy needs READ on its source too."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class CopySource:
    """`x-amz-copy-source`, decoded."""

    bucket: str
    key: str


@dataclass(frozen=True, slots=True)
class Action:
    operation: Operation
    bucket: str | None = None
    key: str | None = None
    upload_id: str | None = None
    part_number: int | None = None
    """1 to 10,000: of UploadPart(Copy), or a GET or HEAD with `partNumber`."""
    source: CopySource | None = None
    arguments: dict[str, str] = field(default_factory=dict)
    """Further query parameters of the operation (list-type's, response-*, max-parts, ...), decoded."""


def route(request: Request, address: Address) -> Action:
    """Raises S3Error: NotImplemented, MethodNotAllowed, InvalidArgument, NoSuchVersion, ..."""
    raise NotImplementedError
