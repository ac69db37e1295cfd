"""What a bucket's configurations say where there can be none: reads of them, and the one ACL that there is.

Responsibility: clients look at a bucket's versioning, policy, CORS rules and so on before they use it, or to show it.
None of them can be set here (their PUT is NotImplemented), so S3's answer of a bucket that never had one is the truth.
ACLs are disabled, as in every bucket that S3 makes now (`BucketOwnerEnforced`): the owner may do everything, and beside
that only credentials say who may what. To set an ACL that says so changes nothing, and is taken.

Concurrency: one task per call.
"""

from __future__ import annotations

from gateway.calls import Answer, Call, Document, no_such_key
from gateway.errors import S3Error
from gateway.promises import NO_ACLS
from gateway.stored import stored
from gateway.unset import EMPTY, MISSING
from gateway.xml import document, element


async def get_configuration(call: Call) -> Answer:
    """Raises S3Error of `unset.MISSING`."""
    await call.backend.bucket(call.bucket)
    for name, code in MISSING.items():
        if name in call.action.arguments:
            raise S3Error(code, detail={"BucketName": call.bucket})
    [name] = [name for name in EMPTY if name in call.action.arguments]
    return Document(200, (), EMPTY[name])


async def get_bucket_acl(call: Call) -> Answer:
    await call.backend.bucket(call.bucket)
    return Document(200, (), _access_control_policy(await call.owners.of(call.bucket) or ""))


async def put_bucket_acl(call: Call) -> Answer:
    """`gateway.routing` let only a harmless canned ACL through. Raises S3Error AccessControlListNotSupported for grants
    in a body."""
    await call.backend.bucket(call.bucket)
    _refuse_grants(call)
    return Answer(200)


async def get_object_acl(call: Call) -> Answer:
    return Document(200, (), _access_control_policy(await _object_owner(call)))


async def put_object_acl(call: Call) -> Answer:
    """As `put_bucket_acl`."""
    await _object_owner(call)
    _refuse_grants(call)
    return Answer(200)


async def _object_owner(call: Call) -> str:
    """Empty where another door wrote it. Raises S3Error NoSuchKey."""
    found = await call.backend.find(call.bucket, call.key)
    if found is None:
        raise no_such_key(call.key)
    return stored(found).metadata.owner


def _refuse_grants(call: Call) -> None:
    if call.content_length != 0:
        raise S3Error(NO_ACLS)


def _access_control_policy(owner: str) -> bytes:
    """Of S3's canned ACL `private`; an empty owner is nobody, and has no grant."""
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
