"""S3 requests for tests: built by hand, or signed by botocore's signers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import urlsplit

from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as BotoCredentials

from gateway.auth.credentials import Credentials
from gateway.protocol.request import Request
from kvfs.config.credentials import Credential

REGION = "us-east-1"
HOST = "127.0.0.1:9000"
CREDENTIAL = Credential.model_validate(
    {"access_key": "AKIAIOSFODNN7EXAMPLE", "secret_key": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"}
)
"""The pair in the examples of the S3 API Reference."""
CREDENTIALS = Credentials([CREDENTIAL])
_BOTO = BotoCredentials(CREDENTIAL.access_key, CREDENTIAL.secret)


def request(
    target: str, method: str = "GET", *, host: str = HOST, headers: Mapping[str, str | bytes] | None = None
) -> Request:
    """A request of a raw target; header values in Latin-1, trimmed as the connection loop does."""
    path, _, query = target.encode("latin-1").partition(b"?")
    pairs = [(b"host", host.encode())]
    for name, value in (headers or {}).items():
        raw = value.encode("latin-1") if isinstance(value, str) else value
        pairs.append((name.lower().encode(), raw.strip()))
    return Request(method, path, query, pairs, host)


def signed(
    url: str,
    method: str = "GET",
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
    payload: str | None = None,
) -> Request:
    """What boto3 sends: signed in the Authorization header; `payload` instead of the body's SHA-256."""
    made = AWSRequest(method, url, headers=dict(headers or {}), data=body)
    signer = S3SigV4Auth(_BOTO, "s3", REGION)
    if payload is not None:
        signer.payload = lambda _: payload
    signer.add_auth(made)
    return _received(made)


def presigned(
    url: str, method: str = "GET", *, headers: Mapping[str, str] | None = None, expires_s: int = 600
) -> Request:
    """What follows a URL of boto3's `generate_presigned_url` with Signature Version 4."""
    made = AWSRequest(method, url, headers=dict(headers or {}))
    S3SigV4QueryAuth(_BOTO, "s3", REGION, expires=expires_s).add_auth(made)
    return _received(made)


def _received(made: AWSRequest) -> Request:
    parts = urlsplit(made.url)
    target = parts.path + ("?" + parts.query if parts.query else "")
    headers = {
        name: value if isinstance(value, str) else value.decode() for name, value in made.headers.items()
    }
    return request(target, made.method, host=parts.netloc, headers=headers)


def signing_time(signed_request: Request) -> float:
    """The `now` at which a request was signed, in seconds."""
    stamp = signed_request.header(b"x-amz-date") or signed_request.query["X-Amz-Date"]
    return datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
