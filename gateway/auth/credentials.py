"""Credentials of the S3 door: the access keys of the configuration, and their rights.

Responsibility: access key -> credential, and the refusal where one lacks a right; the model and its file are
`kvfs.config.credentials`. Invariants: no secret in a message. Concurrency: immutable; all connections share it, and a
reload makes a new one.
"""

from __future__ import annotations

from collections.abc import Iterable

from gateway.protocol.errors import S3Error
from kvfs.config.credentials import Credential, RightName
from kvfs.errors import ConfigError


class Credentials:
    """All credentials of a configuration."""

    def __init__(self, credentials: Iterable[Credential]) -> None:
        """Index credentials by access key. Raises ConfigError where two have the same."""
        self._by_key: dict[str, Credential] = {}
        for credential in credentials:
            if credential.access_key in self._by_key:
                raise ConfigError(f"[[s3.credentials]] access_key = {credential.access_key!r}: given twice")
            self._by_key[credential.access_key] = credential

    def get(self, access_key: str) -> Credential | None:
        """Return the credential of an access key, or None."""
        return self._by_key.get(access_key)

    def __len__(self) -> int:
        return len(self._by_key)


def check_right(credential: Credential, right: RightName, bucket: str) -> None:
    """Check that a credential has a right on a bucket. Raises S3Error AccessDenied."""
    if not credential.may(right, bucket):
        raise S3Error("AccessDenied", f"{credential.access_key} has no right to {right} in {bucket}.")
