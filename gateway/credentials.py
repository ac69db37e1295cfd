"""Who may do what at the S3 door: access keys, and rights on buckets by glob."""

from __future__ import annotations

from collections.abc import Iterable

from kvfs.credentials import Credential


class Credentials:
    """All credentials of a configuration; immutable, shared by all connections."""

    def __init__(self, credentials: Iterable[Credential]) -> None:
        """Raises ConfigError when two have one access key."""
        raise NotImplementedError

    def get(self, access_key: str) -> Credential | None:
        raise NotImplementedError
