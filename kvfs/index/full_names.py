"""Names as the index keeps them: `bucket NUL key`, checked.

Concurrency: pure functions.
"""

from __future__ import annotations

from kvfs.errors import InvalidRequest, NameTooLong
from kvfs.limits import MAX_BUCKET_NAME_BYTES, MAX_KEY_BYTES


def check_part(what: str, part: bytes, limit: int) -> None:
    """Raise NameTooLong for a part of a name over `limit` bytes, InvalidRequest for one with a NUL byte."""
    if len(part) > limit:
        raise NameTooLong(f"{what} {part[:40]!r}... has {len(part)} bytes, the limit is {limit}")
    if b"\0" in part:
        raise InvalidRequest(f"{what} {part!r} holds a NUL byte")


def bucket_base(bucket: bytes) -> bytes:
    """Return what every full name of a bucket starts with. Raises InvalidRequest, NameTooLong."""
    if not bucket:
        raise InvalidRequest("the bucket name is empty")
    check_part("bucket name", bucket, MAX_BUCKET_NAME_BYTES)
    return bucket + b"\0"


def full_name(bucket: bytes, key: bytes) -> bytes:
    """Join to `bucket NUL key`. Raises InvalidRequest, NameTooLong."""
    if not key:
        raise InvalidRequest(f"a key in bucket {bucket!r} is empty")
    check_part("key", key, MAX_KEY_BYTES)
    return bucket_base(bucket) + key


def check_name(name: bytes) -> bytes:
    """Check a `bucket NUL key`. Raises InvalidRequest, NameTooLong."""
    bucket, _, key = name.partition(b"\0")
    return full_name(bucket, key)


def is_name(name: bytes) -> bool:
    """Return whether the index takes this `bucket NUL key`."""
    try:
        check_name(name)
    except InvalidRequest:
        return False
    return True


def full_prefix(bucket: bytes, prefix: bytes) -> bytes:
    """Return what full names of a bucket under a key prefix start with. Raises InvalidRequest, NameTooLong."""
    check_part("key prefix", prefix, MAX_KEY_BYTES)
    return bucket_base(bucket) + prefix
