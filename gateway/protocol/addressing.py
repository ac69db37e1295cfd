"""Addresses: the bucket and key that a request means by its path, a virtual host, or the default bucket.

Responsibility: host and raw path in, names out. Invariants: the path is split before it is decoded, so that `%2F` is
part of a name, and decoded once; nothing is normalised (`//`, `.` and `..` are parts of keys).
Concurrency: pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from gateway.protocol.errors import S3Error
from gateway.protocol.request import Request, decode_component
from kvfs import paths
from kvfs.errors import InvalidRequest, NameTooLong
from kvfs.limits import MAX_KEY_BYTES

_PORT = re.compile(r":\d*\Z")


@dataclass(frozen=True, slots=True)
class Address:
    """A bucket and key; without a bucket the service itself (ListBuckets), without a key the bucket itself."""

    bucket: str | None
    key: str | None


def resolve(request: Request, domains: Sequence[str] = (), default_bucket: str | None = None) -> Address:
    """Resolve where a request goes. Raises S3Error InvalidURI, InvalidBucketName, KeyTooLongError, InvalidArgument.

    A host `BUCKET.DOMAIN` of a domain (lower case) in `domains` names the bucket; an IP address, `localhost` or a
    domain itself is path style; any other host means `default_bucket` where one is configured, else path style too.
    """
    path = request.raw_path
    if path[:1] != b"/":
        raise S3Error("InvalidURI", "The path does not begin with a slash.")
    bucket = bucket_of_host(request.host, domains, default_bucket)
    if bucket is None:
        raw_bucket, slash, raw_key = path[1:].partition(b"/")
        if not raw_bucket and slash:
            raise S3Error("InvalidBucketName", "The bucket name is empty.")
        if not raw_bucket:
            return Address(None, None)
        bucket = decode_component(raw_bucket)
    else:
        raw_key = path[1:]
    check_bucket(bucket)
    if not raw_key:
        return Address(bucket, None)
    key = decode_component(raw_key)
    check_key(key)
    return Address(bucket, key)


def check_bucket(bucket: str) -> None:
    """Check a bucket's name. Raises S3Error InvalidBucketName."""
    try:
        paths.check_bucket(bucket.encode())
    except InvalidRequest as error:
        raise S3Error("InvalidBucketName", str(error), detail={"BucketName": bucket}) from None


def check_key(key: str) -> None:
    """Check an object's key. Raises S3Error KeyTooLongError, InvalidArgument (NUL)."""
    try:
        paths.check_key(key.encode())
    except NameTooLong as error:
        size = len(key.encode())
        raise S3Error(
            "KeyTooLongError", str(error), detail={"Size": str(size), "MaxSizeAllowed": str(MAX_KEY_BYTES)}
        ) from None
    except InvalidRequest as error:
        raise S3Error("InvalidArgument", str(error)) from None


def bucket_of_host(host: str, domains: Sequence[str], default_bucket: str | None) -> str | None:
    """Find the bucket that the host names; None: path style."""
    name = _PORT.sub("", host).lower().rstrip(".")
    for domain in domains:
        if name == domain:
            return None
        if name.endswith(domain) and name[-len(domain) - 1] == ".":
            return name[: -len(domain) - 1]
    if default_bucket is None or name in ("localhost", "") or _is_ip_address(name):
        return None
    return default_bucket


def _is_ip_address(name: str) -> bool:
    try:
        ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
