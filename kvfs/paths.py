"""Names as text and paths, and their limits.

Responsibility: split `bucket/key` text into the two byte strings of a name, check every limit on names, and tell keys
that are paths from others. Pure functions; no state.

Keys that are no path (an empty component, `.`, `..`, a component over 255 bytes) exist for S3 only.
"""

from __future__ import annotations

import re

from kvfs.errors import InvalidRequest, NameTooLong
from kvfs.limits import MAX_BUCKET_NAME_BYTES, MAX_COMPONENT_BYTES, MAX_KEY_BYTES

_BUCKET = re.compile(rb"[A-Za-z0-9._-]+\Z")
_HASH_NAME = re.compile(rb"[0-9a-f]{32,128}\Z")


def check_bucket(bucket: bytes) -> None:
    """Raise InvalidRequest or NameTooLong unless `bucket` may be a bucket's name."""
    if len(bucket) > MAX_BUCKET_NAME_BYTES:
        raise NameTooLong(f"bucket name of {len(bucket)} bytes: the limit is {MAX_BUCKET_NAME_BYTES}")
    if not _BUCKET.match(bucket) or bucket in (b".", b".."):
        raise InvalidRequest(
            f"bucket name {bucket.decode(errors='replace')!r}: only letters, digits, '.', '_' and '-' are allowed"
        )


def check_key(key: bytes) -> None:
    """Raise InvalidRequest or NameTooLong unless `key` may be an object's key."""
    if len(key) > MAX_KEY_BYTES:
        raise NameTooLong(f"key of {len(key)} bytes: the limit is {MAX_KEY_BYTES}")
    if not key:
        raise InvalidRequest("an empty key: a key has at least one byte")
    if b"\0" in key:
        raise InvalidRequest("a key with a NUL byte: keys may hold every byte but NUL")
    try:
        key.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"key {key!r} is not UTF-8: {error.reason} at byte {error.start}") from None


def check_component(component: bytes) -> None:
    """Raise NameTooLong unless `component` fits in one level of a path."""
    if len(component) > MAX_COMPONENT_BYTES:
        raise NameTooLong(f"file name of {len(component)} bytes: the limit is {MAX_COMPONENT_BYTES}")


def is_path(key: bytes) -> bool:
    """Return whether the mount can show this key; a directory marker's trailing `/` does not count."""
    components = key.removesuffix(b"/").split(b"/")
    return all(part not in (b"", b".", b"..") and len(part) <= MAX_COMPONENT_BYTES for part in components)


def parse(text: str) -> tuple[bytes, bytes]:
    """Split `bucket/key` or `bucket` into (bucket, key); the key is empty for a bucket alone."""
    bucket, _, key = text.strip("/").partition("/") if not text.endswith("/") else text.partition("/")
    check_bucket(bucket.encode())
    if key:
        check_key(key.encode())
    return bucket.encode(), key.encode()


def parent_prefix(key: bytes) -> bytes:
    """Return the directory that holds `key`, with its trailing `/`; empty for the bucket itself."""
    head, slash, _ = key.removesuffix(b"/").rpartition(b"/")
    return head + slash


def unit_prefix(key: bytes) -> bytes | None:
    """Return the directory above `key` whose files are useful only together; None without one.

    A directory named by a hash (32 to 128 hex digits) is such a unit: path connectors keep one file per layer in it
    and take the directory's existence for a hit, so a part of it would be a hit that cannot be loaded.
    """
    parent = parent_prefix(key)
    if parent and _HASH_NAME.match(parent[:-1].rpartition(b"/")[2]):
        return parent
    return None
