"""Buckets: create, list, head, location, delete.

Responsibility: S3's view of buckets. A bucket's owner is kept in the gateway's own bucket
(`gateway.backend.reserved_bucket`); a bucket that another door made belongs to nobody, and nobody can create it.

Names that begin with a dot are no S3 buckets. Concurrency: one task per call.
"""

from __future__ import annotations

import re

from gateway.backend.reserved_bucket import bucket_owner, note_owner, remove_notes
from gateway.call.call import Answer, Call, document_answer
from gateway.call.receive import read_document
from gateway.operations.uploads import uploads_of
from gateway.protocol import list_pages
from gateway.protocol.errors import S3Error, argument
from gateway.xml import listings, requests, responses
from kvfs import limits
from kvfs.config.credentials import RIGHTS
from kvfs.errors import BucketNotFound, Exists
from kvfs.protocol.messages import Op

_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]\Z")
_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+\Z")
_RESERVED = re.compile(r"xn--|sthree-|amzn-s3-demo-|.*(-s3alias|--ol-s3|\.mrap|--x-s3|--table-s3)\Z")
"""Prefixes and suffixes that S3 keeps for itself (User Guide, "General purpose bucket naming rules")."""


async def list_buckets(call: Call) -> Answer:
    """List the buckets that the caller may do anything with, by name."""
    arguments = call.action.arguments
    prefix = arguments.get("prefix", "")
    most = list_pages.parse_limit(arguments, "max-buckets", limits.MAX_LIST_BUCKETS + 1)
    if not 1 <= most <= limits.MAX_LIST_BUCKETS and arguments.get("max-buckets"):
        reason = f"max-buckets is to be from 1 to {limits.MAX_LIST_BUCKETS}"
        raise argument("max-buckets", arguments["max-buckets"], reason)
    most = min(most, limits.MAX_LIST_BUCKETS)
    token = arguments.get("continuation-token")
    after = list_pages.decode_token(token) if token else ""
    if arguments.get("bucket-region", call.settings.region) != call.settings.region:
        raise argument("bucket-region", arguments["bucket-region"], "All buckets here are in one region")
    found: list[tuple[str, int]] = []
    for bucket in sorted(await call.backend.buckets(), key=lambda each: each.name):
        if bucket.name > after and bucket.name.startswith(prefix) and await _is_shown(call, bucket.name):
            found.append((bucket.name, bucket.created_ns))
            if len(found) > most:
                break
    shown = found[:most]
    token = list_pages.encode_token(shown[-1][0]) if len(found) > most else ""
    body = listings.list_buckets(shown, call.owner, region=call.settings.region, prefix=prefix, token=token)
    return document_answer(200, (), body)


async def _is_shown(call: Call, name: str) -> bool:
    credential = call.verified.credential
    if name.startswith(".") or not any(credential.may(right, name) for right in RIGHTS):
        return False
    return await call.owners.may_enter(credential, name)


async def create_bucket(call: Call) -> Answer:
    """Answer CreateBucket. Raises S3Error for a bucket of another owner, a bad name or location."""
    async with read_document(call, requests.create_bucket_configuration()) as location:
        _check_location(call, location)
    check_name(call.bucket)
    try:
        large = call.settings.makes_large(call.bucket)
        await call.backend.sessions.control(Op.BUCKET_CREATE, bucket=call.bucket, large=large)
    except Exists:
        if await bucket_owner(call.backend, call.bucket) != call.owner:
            raise S3Error("BucketAlreadyExists", detail={"BucketName": call.bucket}) from None
        if call.settings.region != "us-east-1":
            raise S3Error("BucketAlreadyOwnedByYou", detail={"BucketName": call.bucket}) from None
    else:
        await note_owner(call.backend, call.bucket, call.owner)
        call.owners.invalidate(call.bucket)
    return Answer(200, [("Location", f"/{call.bucket}")])


def _check_location(call: Call, location: str | None) -> None:
    region = call.settings.region
    if location is None or location in (region, ""):
        return
    if location in ("us-east-1", "EU") and region in ("us-east-1", "eu-west-1"):
        return
    raise S3Error(
        "IllegalLocationConstraintException",
        f"The {location} location constraint is not the one of {region}.",
    )


def check_name(name: str) -> None:
    """Check a name by S3's rules for new buckets, which are narrower than kvfs's. Raises S3Error InvalidBucketName."""
    dotted = ".." in name or ".-" in name or "-." in name
    if not _NAME.match(name) or dotted or _ADDRESS.match(name) or _RESERVED.match(name):
        raise S3Error(
            "InvalidBucketName",
            "A bucket's name has 3 to 63 lower-case letters, digits, dots and hyphens, and is no IP address.",
            detail={"BucketName": name},
        )


async def head_bucket(call: Call) -> Answer:
    """Answer HeadBucket."""
    await call.backend.bucket(call.bucket)
    return Answer(200, [("x-amz-bucket-region", call.settings.region)])


async def get_location(call: Call) -> Answer:
    """Answer GetBucketLocation."""
    await call.backend.bucket(call.bucket)
    return document_answer(200, (), responses.location_constraint(call.settings.region))


async def delete_bucket(call: Call) -> Answer:
    """Delete a bucket and its uploads under way, which are in no listing of its keys."""
    await call.backend.bucket(call.bucket)
    owner = await bucket_owner(call.backend, call.bucket)
    await call.backend.sessions.control(Op.BUCKET_REMOVE, bucket=call.bucket)
    call.owners.invalidate(call.bucket)
    await _remove_notes(call, owner)
    for upload in await uploads_of(call.backend, call.bucket):
        await upload.remove(call.backend)
    return Answer(204)


async def _remove_notes(call: Call, owner: str | None) -> None:
    """Remove the notes of a bucket that was removed, where none was made in its place meanwhile."""
    try:
        await call.backend.bucket(call.bucket)
    except BucketNotFound:
        if await bucket_owner(call.backend, call.bucket) == owner:
            await remove_notes(call.backend, call.bucket)
