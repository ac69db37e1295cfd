"""A PUT of nothing but bytes and their checksum, as `gateway.app.fast_path` recognised it. Concurrency: values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PlainPut:
    """A PUT that is rightly signed and allowed, into a bucket whose objects are sealed under names and get no MD5."""

    bucket: str
    key: str
    owner: str
    head_bytes: int
    target: bytes
    size_bytes: int
    checksum: bytes | None
    """CRC-64/NVME that the client states; None: none."""
    expects_continue: bool
