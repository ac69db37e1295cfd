"""AWS Signature Version 4: which credential signed a request, and what its body must be.

Pure: no clock, no socket. Canonical requests are built from the raw target.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gateway.credentials import Credentials
from gateway.request import Request
from kvfs.credentials import Credential


class PayloadMode(Enum):
    """What `x-amz-content-sha256` says of the body."""

    UNSIGNED = "UNSIGNED-PAYLOAD"
    SHA256 = "sha256"
    STREAMING_SIGNED = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
    STREAMING_SIGNED_TRAILER = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"
    STREAMING_UNSIGNED_TRAILER = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"

    @property
    def is_streaming(self) -> bool:
        """Whether the body is aws-chunked."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Verified:
    credential: Credential
    mode: PayloadMode
    payload_sha256: bytes | None
    """The digest that the body must have, where mode is SHA256."""
    seed_signature: str
    """Of the request: the first link of a chunk chain."""
    signing_key: bytes
    timestamp: str
    """`20260102T030405Z`, as in the string to sign."""
    scope: str
    """`date/region/s3/aws4_request`"""
    presigned: bool


def verify(request: Request, credentials: Credentials, now: float, region: str) -> Verified:
    """`now` in seconds since 1970. Raises S3Error AccessDenied (anonymous, expired), InvalidAccessKeyId,
    SignatureDoesNotMatch, RequestTimeTooSkewed, AuthorizationHeaderMalformed, AuthorizationQueryParametersError,
    InvalidRequest (SigV2, SigV4A), InvalidToken, InvalidArgument."""
    raise NotImplementedError
