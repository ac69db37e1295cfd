"""A PUT that says nothing but its bytes and their checksum, as `gateway.front` recognised it. Concurrency: values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PlainPut:
    """Rightly signed, allowed, and of a bucket whose objects are sealed under names and get no MD5."""

    bucket: str
    key: str
    owner: str
    head_bytes: int
    target: bytes
    size_bytes: int
    checksum: bytes | None
    """CRC-64/NVME, as the client says."""
    expects_continue: bool
