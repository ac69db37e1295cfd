"""Headers of writes that ask for what is not done here: such requests are refused.

Concurrency: pure functions.
"""

from __future__ import annotations

from typing import Final

from gateway.protocol.errors import S3Error, argument
from gateway.protocol.request import Request

NO_ACLS: Final = "AccessControlListNotSupported"

_REFUSED_HEADERS: Final = (
    b"x-amz-bucket-object-lock-token",
    b"x-amz-copy-source-server-side-encryption-customer-algorithm",
    b"x-amz-object-lock-legal-hold",
    b"x-amz-object-lock-mode",
    b"x-amz-object-lock-retain-until-date",
    b"x-amz-server-side-encryption",
    b"x-amz-server-side-encryption-aws-kms-key-id",
    b"x-amz-server-side-encryption-customer-algorithm",
    b"x-amz-website-redirect-location",
    b"x-amz-write-offset-bytes",
)
"""Headers that ask for what is not done here: encryption, locks, redirects, appends."""

_GRANTS: Final = (
    b"x-amz-grant-full-control",
    b"x-amz-grant-read",
    b"x-amz-grant-read-acp",
    b"x-amz-grant-write",
    b"x-amz-grant-write-acp",
)

_HARMLESS_ACLS: Final = frozenset({b"private", b"bucket-owner-full-control"})
"""Canned ACLs under which nobody may do more than the credentials already say. AWS refuses `private` where ACLs are
disabled; clients that are set to send it, as rclone's configurations do, mean by it that nobody else may look."""

_OTHER_ACLS: Final = frozenset(
    {
        b"bucket-owner-read",
        b"public-read",
        b"public-read-write",
        b"authenticated-read",
        b"aws-exec-read",
        b"log-delivery-write",
    }
)

_OWNERSHIPS: Final = frozenset({b"BucketOwnerEnforced", b"ObjectWriter"})
"""The first says that ACLs are disabled; all that the second can mean then is that an object's writer is kept with it,
which is so here."""

_OTHER_OWNERSHIPS: Final = frozenset({b"BucketOwnerPreferred"})


def check_supported(request: Request, *, creates_bucket: bool = False) -> None:
    """Refuse a write whose headers ask for what is not done here.

    Raises S3Error NotImplemented, AccessControlListNotSupported, InvalidBucketAclWithObjectOwnership (of a new bucket),
    InvalidStorageClass, InvalidArgument (no such canned ACL, no such ownership).
    """
    if request.method not in ("PUT", "POST"):
        return
    headers = request.headers_by_name
    for name in _REFUSED_HEADERS:
        if name in headers:
            raise _header(name)
    acl = headers.get(b"x-amz-acl", b"private")
    if acl in _OTHER_ACLS or any(name in headers for name in _GRANTS):
        raise S3Error("InvalidBucketAclWithObjectOwnership" if creates_bucket else NO_ACLS)
    if acl not in _HARMLESS_ACLS:
        raise argument("x-amz-acl", acl.decode("latin-1"), "There is no such canned ACL")
    ownership = headers.get(b"x-amz-object-ownership", b"BucketOwnerEnforced")
    if ownership in _OTHER_OWNERSHIPS:
        raise _header(b"x-amz-object-ownership")
    if ownership not in _OWNERSHIPS:
        raise argument("x-amz-object-ownership", ownership.decode("latin-1"), "There is no such ownership")
    if headers.get(b"x-amz-bucket-object-lock-enabled", b"false").lower() != b"false":
        raise _header(b"x-amz-bucket-object-lock-enabled")
    storage_class = headers.get(b"x-amz-storage-class", b"STANDARD")
    if storage_class != b"STANDARD":
        raise S3Error(
            "InvalidStorageClass", detail={"StorageClassRequested": storage_class.decode("latin-1")}
        )


def _header(name: bytes) -> S3Error:
    text = name.decode()
    return S3Error("NotImplemented", f"The header {text} is not implemented.", detail={"Header": text})
