"""Names and buckets as the client returns them: immutable values made from the service's JSON objects.

Concurrency: plain values.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """One name: an object, a symbolic link, or a directory (then `size_bytes` is 0 and the key ends in `/` or is
    empty)."""

    bucket: str
    key: str
    is_directory: bool
    size_bytes: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    ino: int
    is_block: bool = False
    pinned: bool = False
    tier: str = ""
    hits: int = 0
    user_metadata: bytes = b""
    target: str = ""
    """Where a symbolic link leads, in the form of a name; empty for anything else."""

    @property
    def name(self) -> str:
        """Return `bucket/key`."""
        return f"{self.bucket}/{self.key}"


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket; `namespace` is the digest of the namespace whose blocks it holds, if any."""

    name: str
    durable: bool
    uid: int
    gid: int
    mode: int
    created_ns: int
    mtime_ns: int
    namespace: bytes | None
    admits_all: bool = True
    """Whether every object is written to NVMe; else only one that is read, or written again."""
    large: bool = False
    """Whether files written on the mount may be larger than DRAM takes."""
    model: str | None = None
    """The model of the namespace; like the counts of its blocks, `Client.buckets` alone gives it."""
    blocks: int = 0
    block_bytes: int = 0


def entry_of(bucket: str, values: dict[str, Any]) -> Entry:
    """Make an entry of a bucket from the service's JSON object."""
    common = {key: values[key] for key in ("key", "mode", "uid", "gid", "mtime_ns", "ino")}
    if values["directory"]:
        return Entry(bucket=bucket, is_directory=True, size_bytes=0, **common)
    return Entry(
        bucket=bucket,
        is_directory=False,
        size_bytes=values["size_bytes"],
        is_block=values["block"],
        pinned=values["pinned"],
        tier=values["tier"],
        hits=values["hits"],
        user_metadata=base64.b64decode(values["user_metadata"]),
        target=values.get("target", ""),
        **common,
    )


def bucket_of(values: dict[str, Any]) -> Bucket:
    """Make a bucket from the service's JSON object."""
    namespace = values["namespace"]
    return Bucket(**{**values, "namespace": None if namespace is None else bytes.fromhex(namespace)})
