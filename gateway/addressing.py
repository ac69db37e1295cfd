"""Which bucket and key a request means: path style, virtual host, or the default bucket of unknown hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.request import Request


@dataclass(frozen=True, slots=True)
class Address:
    bucket: str | None
    """None: the service itself (ListBuckets)."""
    key: str | None
    """None: the bucket itself. Decoded once, normalisation kept."""


def resolve(request: Request, domains: Sequence[str] = (), default_bucket: str | None = None) -> Address:
    """Raises S3Error InvalidURI, InvalidBucketName, KeyTooLongError.

    A host `BUCKET.DOMAIN` of a domain in `domains` names the bucket; an IP address, `localhost` or a domain itself
    is path style; any other host means `default_bucket` where one is configured, else path style too.
    """
    raise NotImplementedError
