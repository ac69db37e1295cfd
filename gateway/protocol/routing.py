"""Routing of requests: a pure function from a request to the action that it asks for.

Responsibility: method, address, query and the headers that change the operation in; one `Action` out. Everything that
is not served is refused here, as S3 says it: NotImplemented for what S3 has and this gateway has not, MethodNotAllowed
for what S3 has not either.

Invariants: a request that would mean something else at S3 is never taken for a plain PUT, POST or DELETE: of those, an
unknown query parameter is refused, where a GET or HEAD ignores it. Concurrency: pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.protocol.action import Action, CopySource, Operation
from gateway.protocol.addressing import Address, check_bucket, check_key
from gateway.protocol.errors import S3Error, argument
from gateway.protocol.request import Request, decode_component, is_escaped
from gateway.protocol.unsupported_headers import NO_ACLS, check_supported
from kvfs.limits import MAX_PARTS

_Table = dict[str, dict[str, Operation]]

BUCKET_CONFIGURATIONS: Final = (
    "accelerate",
    "cors",
    "encryption",
    "lifecycle",
    "logging",
    "notification",
    "object-lock",
    "ownershipControls",
    "policy",
    "publicAccessBlock",
    "replication",
    "requestPayment",
    "versioning",
    "website",
)
"""Query parameters of a bucket's configurations that are read, though nobody can set them."""

_SERVICE: Final[_Table] = {"GET": {"": Operation.LIST_BUCKETS}}
_BUCKET: Final[_Table] = {
    "GET": {
        **dict.fromkeys(BUCKET_CONFIGURATIONS, Operation.GET_BUCKET_CONFIGURATION),
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
        *BUCKET_CONFIGURATIONS,
        "abac",
        "acl",
        "analytics",
        "annotation",
        "intelligent-tiering",
        "inventory",
        "legal-hold",
        "metadataConfiguration",
        "metadataInventoryTable",
        "metadataJournalTable",
        "metadataTable",
        "metrics",
        "policyStatus",
        "renameObject",
        "restore",
        "retention",
        "select",
        "session",
        "torrent",
    }
)
"""Query parameters that select operations of S3 which are not served, except where a table above names them."""

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
    """Find what `request` asks of `address`.

    Raises S3Error NotImplemented, MethodNotAllowed, InvalidArgument, InvalidRequest (two operations at once),
    InvalidStorageClass, NoSuchVersion, and what the names of a copy's source raise.
    """
    query = request.query
    operation = _select(request, address, query)
    source = None
    if operation in _COPIES and request.header_bytes(b"x-amz-copy-source") is not None:
        operation = _COPIES[operation]
        source = copy_source(request)
    check_supported(request, creates_bucket=operation is Operation.CREATE_BUCKET)
    if operation in _SET_ACLS and request.header_bytes(b"x-amz-acl") is None:
        raise S3Error(NO_ACLS)
    if "versionId" in query and address.key is not None:
        if operation not in _VERSIONED:
            raise argument("versionId", query["versionId"], "This operation takes no version id")
        check_version(query["versionId"])
    upload_id = query.get("uploadId")
    if upload_id == "":
        raise argument("uploadId", "", "The upload id is empty")
    part = _part_number(operation, query)
    return Action(operation, address.bucket, address.key, upload_id, part, source, query)


def _select(request: Request, address: Address, query: Mapping[str, str]) -> Operation:
    """Select the operation by method and query parameters."""
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
    if name in _NOT_SERVED or (name and not any(name in other for other in table.values())):
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
    """Refuse what browsers send without a signature: forms, and OPTIONS, though no bucket has CORS rules.

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
    """Read `partNumber` where the operation has one."""
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
    """Check that `version` is `null`, the only version that a key has. Raises S3Error."""
    if version == "":
        raise argument("versionId", "", "The version id is empty")
    if version != "null":
        raise S3Error("NoSuchVersion", detail={"VersionId": version})


def copy_source(request: Request) -> CopySource:
    """Parse `x-amz-copy-source`: `[/]bucket/key[?versionId=null]`, percent-encoded.

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
