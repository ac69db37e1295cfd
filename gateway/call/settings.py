"""Settings of one gateway process. Concurrency: plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gateway.auth.credentials import Credentials


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Names of settings as in `kvfs.config.settings.S3Settings`."""

    credentials: Credentials
    region: str = "us-east-1"
    domains: Sequence[str] = ()
    default_bucket: str | None = None
    opaque_etags: Sequence[str] = ()
    """Globs of buckets whose objects get no MD5."""
    large_buckets: Sequence[str] = ()
    """Globs of buckets that are made so that the mount writes their files to NVMe, however large."""
    upload_expiry_s: float = 7 * 86400.0
    """An upload that was idle for so long is aborted."""

    def takes_md5(self, bucket: str) -> bool:
        """Return whether objects of this bucket get MD5 as ETag."""
        return not any(fnmatchcase(bucket, glob) for glob in self.opaque_etags)

    def makes_large(self, bucket: str) -> bool:
        """Return whether this bucket is made for objects larger than DRAM takes."""
        return any(fnmatchcase(bucket, glob) for glob in self.large_buckets)
