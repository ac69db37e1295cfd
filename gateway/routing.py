"""What a request asks for: a pure function from request to action.

Responsibility: method, address, query and the headers that change the operation in; one `Action` out. Everything that
is not served is refused here, as S3 says it: NotImplemented for what S3 has and this gateway has not, MethodNotAllowed
for what S3 has not either.

Invariants: a request that would mean something else at S3 is never taken for a plain PUT, POST or DELETE: there, a
query parameter that nobody knows is refused, where a GET or HEAD ignores it. Concurrency: pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from gateway import unset
from gateway.addressing import Address, check_bucket, check_key
from gateway.errors import S3Error, argument
from gateway.promises import NO_ACLS, check_promises
from gateway.request import Request, decode_component, is_escaped
from kvfs.limits import MAX_PARTS


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
    GET_BUCKET_CONFIGURATION = "GetBucketConfiguration"
    """Whichever of `gateway.configurations` is asked for."""
    GET_BUCKET_ACL = "GetBucketAcl"
    PUT_BUCKET_ACL = "PutBucketAcl"
    GET_BUCKET_TAGGING = "GetBucketTagging"
    PUT_BUCKET_TAGGING = "PutBucketTagging"
    DELETE_BUCKET_TAGGING = "DeleteBucketTagging"
    GET_OBJECT_ACL = "GetObjectAcl"
    PUT_OBJECT_ACL = "PutObjectAcl"

    @property
    def right(self) -> Right:
        """Of the bucket in the address; a copy needs READ on its source too."""
        return _RIGHTS.get(self, Right.WRITE)


_RIGHTS: Final = {
    Operation.LIST_BUCKETS: Right.NONE,
    Operation.HEAD_BUCKET: Right.LIST,
    Operation.GET_BUCKET_LOCATION: Right.LIST,
    Operation.LIST_OBJECTS: Right.LIST,
    Operation.LIST_OBJECTS_V2: Right.LIST,
    Operation.LIST_OBJECT_VERSIONS: Right.LIST,
    Operation.LIST_MULTIPART_UPLOADS: Right.LIST,
    Operation.LIST_PARTS: Right.LIST,
    Operation.MATCH: Right.READ,
    Operation.GET_OBJECT: Right.READ,
    Operation.HEAD_OBJECT: Right.READ,
    Operation.GET_OBJECT_ATTRIBUTES: Right.READ,
    Operation.GET_OBJECT_TAGGING: Right.READ,
    Operation.GET_BUCKET_CONFIGURATION: Right.LIST,
    Operation.GET_BUCKET_ACL: Right.LIST,
    Operation.GET_BUCKET_TAGGING: Right.LIST,
    Operation.GET_OBJECT_ACL: Right.READ,
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
    """The query, decoded: what the operation reads of it (prefix, response-*, max-parts, ...) and the rest."""


_Table = dict[str, dict[str, Operation]]

_SERVICE: Final[_Table] = {"GET": {"": Operation.LIST_BUCKETS}}
_BUCKET: Final[_Table] = {
    "GET": {
        **dict.fromkeys(unset.NAMES, Operation.GET_BUCKET_CONFIGURATION),
        "": Operation.LIST_OBJECTS,
        "acl": Operation.GET_BUCKET_ACL,
        "list-type": Operation.LIST_OBJECTS_V2,
        "location": Operation.GET_BUCKET_LOCATION,
        "tagging": Operation.GET_BUCKET_TAGGING,
        "uploads": Operation.LIST_MULTIPART_UPLOADS,
        "versions": Operation.LIST_OBJECT_VERSIONS,
    },
    "HEAD": {"": Operation.HEAD_BUCKET},
    "PUT": {
        "": Operation.CREATE_BUCKET,
        "acl": Operation.PUT_BUCKET_ACL,
        "tagging": Operation.PUT_BUCKET_TAGGING,
    },
    "POST": {"delete": Operation.DELETE_OBJECTS, "match": Operation.MATCH},
    "DELETE": {"": Operation.DELETE_BUCKET, "tagging": Operation.DELETE_BUCKET_TAGGING},
}
_OBJECT: Final[_Table] = {
    "GET": {
        "": Operation.GET_OBJECT,
        "acl": Operation.GET_OBJECT_ACL,
        "attributes": Operation.GET_OBJECT_ATTRIBUTES,
        "tagging": Operation.GET_OBJECT_TAGGING,
        "uploadId": Operation.LIST_PARTS,
    },
    "HEAD": {"": Operation.HEAD_OBJECT},
    "PUT": {
        "": Operation.PUT_OBJECT,
        "acl": Operation.PUT_OBJECT_ACL,
        "tagging": Operation.PUT_OBJECT_TAGGING,
        "uploadId": Operation.UPLOAD_PART,
    },
    "POST": {
        "uploadId": Operation.COMPLETE_MULTIPART_UPLOAD,
        "uploads": Operation.CREATE_MULTIPART_UPLOAD,
    },
    "DELETE": {
        "": Operation.DELETE_OBJECT,
        "tagging": Operation.DELETE_OBJECT_TAGGING,
        "uploadId": Operation.ABORT_MULTIPART_UPLOAD,
    },
}
"""By method, then by the query parameter that selects the operation ("": none of them)."""

_COPIES: Final = {
    Operation.PUT_OBJECT: Operation.COPY_OBJECT,
    Operation.UPLOAD_PART: Operation.UPLOAD_PART_COPY,
}

_NOT_SERVED: Final = frozenset(
    {
        "abac",
        "accelerate",
        "acl",
        "analytics",
        "annotation",
        "cors",
        "encryption",
        "intelligent-tiering",
        "inventory",
        "legal-hold",
        "lifecycle",
        "logging",
        "metadataConfiguration",
        "metadataInventoryTable",
        "metadataJournalTable",
        "metadataTable",
        "metrics",
        "notification",
        "object-lock",
        "ownershipControls",
        "policy",
        "policyStatus",
        "publicAccessBlock",
        "renameObject",
        "replication",
        "requestPayment",
        "restore",
        "retention",
        "select",
        "session",
        "torrent",
        "versioning",
        "website",
    }
)
"""Query parameters that select operations of S3 which are not served, but for what a table above names."""

_SET_ACLS: Final = (Operation.PUT_BUCKET_ACL, Operation.PUT_OBJECT_ACL)

_NO_FORMS: Final = "Uploads by HTML form are not implemented."

_SELECTORS: Final = (
    frozenset(name for table in (_BUCKET, _OBJECT) for row in table.values() for name in row if name)
    | _NOT_SERVED
)

_WRITE_PARAMETERS: Final = frozenset({"versionId", "partNumber", "x-id", "select-type"})
"""Parameters of PUT, POST and DELETE that select nothing."""

_VERSIONED: Final = frozenset(
    {
        Operation.GET_OBJECT,
        Operation.HEAD_OBJECT,
        Operation.DELETE_OBJECT,
        Operation.GET_OBJECT_ATTRIBUTES,
        Operation.GET_OBJECT_TAGGING,
        Operation.PUT_OBJECT_TAGGING,
        Operation.DELETE_OBJECT_TAGGING,
        Operation.GET_OBJECT_ACL,
        Operation.PUT_OBJECT_ACL,
    }
)


def route(request: Request, address: Address) -> Action:
    """What `request` asks of `address`.

    Raises S3Error NotImplemented, MethodNotAllowed, InvalidArgument, InvalidRequest (two operations at once),
    InvalidStorageClass, NoSuchVersion, and what the names of a copy's source raise.
    """
    query = request.query
    operation = _select(request, address, query)
    source = None
    if operation in _COPIES and request.header_bytes(b"x-amz-copy-source") is not None:
        operation = _COPIES[operation]
        source = copy_source(request)
    check_promises(request, creates_bucket=operation is Operation.CREATE_BUCKET)
    if operation in _SET_ACLS and request.header_bytes(b"x-amz-acl") is None:
        raise S3Error(NO_ACLS)
    if "versionId" in query and address.key is not None:
        if operation not in _VERSIONED:
            raise argument("versionId", query["versionId"], "This operation takes no version id")
        check_version(query["versionId"])
    upload_id = query.get("uploadId")
    if upload_id == "":
        raise argument("uploadId", "", "The upload id is empty")
    return Action(
        operation,
        address.bucket,
        address.key,
        upload_id,
        _part_number(operation, query),
        source,
        query,
    )


def _select(request: Request, address: Address, query: Mapping[str, str]) -> Operation:
    """The operation by method and query parameters."""
    table = _OBJECT
    if address.key is None:
        table = _SERVICE if address.bucket is None else _BUCKET
    found = [name for name in query if name in _SELECTORS]
    if len(found) > 1:
        raise S3Error("InvalidRequest", f"Conflicting query parameters: {', '.join(sorted(found))}.")
    name = found[0] if found else ""
    row = table.get(request.method)
    if row is not None and name in row:
        if name == "list-type" and query[name] != "2":
            raise argument(name, query[name], "The only value is 2")
        if request.method not in ("GET", "HEAD"):
            _refuse_unknown(query)
        return row[name]
    unset_only = table is _BUCKET and name in unset.NAMES
    if name in _NOT_SERVED or unset_only or (name and not any(name in other for other in table.values())):
        raise S3Error("NotImplemented", f"?{name} is not implemented on this resource.")
    if request.method == "POST" and table is _BUCKET and not name:
        raise S3Error("NotImplemented", _NO_FORMS)
    allowed = ", ".join(method for method, row in table.items() if name in row)
    raise S3Error(
        "MethodNotAllowed",
        detail={"Method": request.method, "ResourceType": name.upper() or "OBJECT"},
        headers={"Allow": allowed},
    )


def refuse_unsigned(request: Request) -> None:
    """What browsers send without a signature in headers or query: forms, and OPTIONS, though no bucket has CORS rules.

    Raises S3Error NotImplemented, BadRequest, AccessForbidden.
    """
    if request.method == "POST" and not request.raw_query:
        kind = request.header(b"content-type") or ""
        if kind.lower().startswith("multipart/form-data") and request.header_bytes(b"authorization") is None:
            raise S3Error("NotImplemented", _NO_FORMS)
    if request.method != "OPTIONS":
        return
    for name in (b"origin", b"access-control-request-method"):
        if not request.header_bytes(name):
            raise S3Error("BadRequest", f"A preflight request needs the header {name.decode()}.")
    raise S3Error("AccessForbidden")


def _refuse_unknown(query: Mapping[str, str]) -> None:
    for name in query:
        if name in _SELECTORS or name in _WRITE_PARAMETERS or name.lower().startswith("x-"):
            continue
        raise S3Error("NotImplemented", f"The query parameter {name} is not implemented.")


def _part_number(operation: Operation, query: Mapping[str, str]) -> int | None:
    """`partNumber` where the operation has one."""
    text = query.get("partNumber")
    if operation in (Operation.UPLOAD_PART, Operation.UPLOAD_PART_COPY):
        if text is None:
            raise argument("partNumber", "", "An upload of a part needs a part number")
    elif operation in (Operation.PUT_OBJECT, Operation.COPY_OBJECT):
        if text is not None:
            raise argument("partNumber", text, "A part number needs an upload id")
    elif operation not in (Operation.GET_OBJECT, Operation.HEAD_OBJECT):
        return None
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and 1 <= int(text) <= MAX_PARTS):
        raise argument("partNumber", text, f"A part number is an integer from 1 to {MAX_PARTS}")
    return int(text)


def check_version(version: str) -> None:
    """Raises S3Error unless `version` is `null`, the only version that a key has."""
    if version == "":
        raise argument("versionId", "", "The version id is empty")
    if version != "null":
        raise S3Error("NoSuchVersion", detail={"VersionId": version})


def copy_source(request: Request) -> CopySource:
    """`x-amz-copy-source`: `[/]bucket/key[?versionId=null]`, percent-encoded.

    Raises S3Error InvalidArgument, NoSuchVersion, InvalidURI (of the version).
    """
    raw = request.header_bytes(b"x-amz-copy-source") or b""
    path, mark, version = raw.partition(b"?versionId=")
    text = raw.decode("latin-1")
    try:
        bucket, slash, key = decode_component(path).removeprefix("/").partition("/")
        if not slash or not bucket or not key or bucket.startswith("arn:") or not is_escaped(text):
            raise argument("x-amz-copy-source", text, "A copy source is BUCKET/KEY, percent-encoded")
        check_bucket(bucket)
        check_key(key)
    except S3Error as error:
        raise argument("x-amz-copy-source", text, error.message.removesuffix(".")) from None
    if mark:
        check_version(decode_component(version))
    return CopySource(bucket, key)
