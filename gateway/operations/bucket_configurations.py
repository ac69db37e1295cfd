"""Configurations of buckets, of which none can be set, and the one ACL that there is.

Responsibility: clients read a bucket's versioning, policy, CORS rules and so on before they use it, or to show it. None
of them can be set here (their PUT is NotImplemented), so S3's answer for a bucket that never had one is right. ACLs are
disabled, as in every bucket that S3 makes now (`BucketOwnerEnforced`): the owner may do everything, and beyond that
only credentials give rights. An ACL that says so changes nothing, and is accepted.

Concurrency: one task per call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.call.call import Answer, Call, document_answer
from gateway.call.object_view import find_stored
from gateway.protocol.errors import S3Error
from gateway.protocol.unsupported_headers import NO_ACLS
from gateway.xml.writer import document, element

MISSING: Final[Mapping[str, str]] = {
    "cors": "NoSuchCORSConfiguration",
    "encryption": "ServerSideEncryptionConfigurationNotFoundError",
    "lifecycle": "NoSuchLifecycleConfiguration",
    "object-lock": "ObjectLockConfigurationNotFoundError",
    "policy": "NoSuchBucketPolicy",
    "publicAccessBlock": "NoSuchPublicAccessBlockConfiguration",
    "replication": "ReplicationConfigurationNotFoundError",
    "website": "NoSuchWebsiteConfiguration",
}
"""Query parameter to the error that says there is no such configuration."""

EMPTY: Final[Mapping[str, bytes]] = {
    "accelerate": document("AccelerateConfiguration", ()),
    "logging": document("BucketLoggingStatus", ()),
    "notification": document("NotificationConfiguration", ()),
    "ownershipControls": document(
        "OwnershipControls", ("<Rule>", element("ObjectOwnership", "BucketOwnerEnforced"), "</Rule>")
    ),
    "requestPayment": document("RequestPaymentConfiguration", (element("Payer", "BucketOwner"),)),
    "versioning": document("VersioningConfiguration", ()),
}
"""Query parameter to the document."""


async def get_configuration(call: Call) -> Answer:
    """Answer as S3 does for a configuration that nobody set.

    Raises the S3Error that MISSING names.
    """
    await call.backend.bucket(call.bucket)
    for name, code in MISSING.items():
        if name in call.action.arguments:
            raise S3Error(code, detail={"BucketName": call.bucket})
    [name] = [name for name in EMPTY if name in call.action.arguments]
    return document_answer(200, (), EMPTY[name])


async def get_bucket_acl(call: Call) -> Answer:
    """Answer GetBucketAcl: full control for the owner."""
    await call.backend.bucket(call.bucket)
    return document_answer(200, (), _access_control_policy(await call.owners.of(call.bucket) or ""))


async def put_bucket_acl(call: Call) -> Answer:
    """Accept a harmless canned ACL; `routing` passes no other. Raises S3Error AccessControlListNotSupported for grants
    in a body."""
    await call.backend.bucket(call.bucket)
    _refuse_grants(call)
    return Answer(200)


async def get_object_acl(call: Call) -> Answer:
    """Answer GetObjectAcl: full control for the owner."""
    return document_answer(200, (), _access_control_policy((await find_stored(call)).metadata.owner))


async def put_object_acl(call: Call) -> Answer:
    """Accept a harmless canned ACL, as `put_bucket_acl`."""
    await find_stored(call)
    _refuse_grants(call)
    return Answer(200)


def _refuse_grants(call: Call) -> None:
    if call.content_length != 0:
        raise S3Error(NO_ACLS)


def _access_control_policy(owner: str) -> bytes:
    """Describe S3's canned ACL `private`; an empty owner is nobody, and has no grant."""
    who = element("ID", owner) + element("DisplayName", owner)
    grant = (
        '<Grant><Grantee xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" xsi:type="CanonicalUser">'
        f"{who}</Grantee>"
        f"{element('Permission', 'FULL_CONTROL')}</Grant>"
    )
    return document(
        "AccessControlPolicy",
        (f"<Owner>{who}</Owner>", f"<AccessControlList>{grant if owner else ''}</AccessControlList>"),
    )
