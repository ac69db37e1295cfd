"""The one S3 error table: code -> HTTP status and default message; and what kvfs errors become there.

Responsibility: every request that the gateway fails on purpose fails with an `S3Error`, whose code is in `CODES`.
Which code a failure of the store has stands in `kvfs.errors`, beside its errno; which status a code has, only here.

Invariants: a message names the offending thing where the raiser knows it; a 5xx says nothing of the machine.

A full store is 507 InsufficientStorage: botocore (1.44, in each of its retry modes) repeats 500, 502, 503, 504, 429 and
the throttling codes, not 507, so that its user sees the refusal at once instead of after five attempts.

Concurrency: pure values.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from kvfs.errors import KvfsError

_NONE: Final[Mapping[str, str]] = MappingProxyType({})

CODES: Final[dict[str, tuple[int, str]]] = {
    # who asks
    "AccessControlListNotSupported": (400, "The bucket does not allow ACLs."),
    "AccessDenied": (403, "Access denied."),
    "AccessForbidden": (403, "CORS is not enabled for this bucket."),
    "AuthorizationHeaderMalformed": (400, "The Authorization header is malformed."),
    "AuthorizationQueryParametersError": (400, "The query parameters that authorize the request are wrong."),
    "InvalidAccessKeyId": (403, "No credential has this access key."),
    "InvalidToken": (400, "Session tokens are not issued here."),
    "RequestTimeTooSkewed": (403, "The request was signed too far from the time here."),
    "SignatureDoesNotMatch": (403, "The signature is not the one that this request has."),
    "XAmzContentSHA256Mismatch": (400, "The body does not have the SHA-256 that x-amz-content-sha256 says."),
    # what is meant
    "BucketAlreadyExists": (409, "The bucket exists and belongs to somebody else."),
    "BucketAlreadyOwnedByYou": (409, "The bucket exists and is yours."),
    "BucketNotEmpty": (409, "The bucket still holds objects."),
    "InvalidBucketAclWithObjectOwnership": (
        400,
        "A bucket here cannot have an ACL: its owner owns all in it.",
    ),
    "InvalidBucketName": (400, "This is no bucket name."),
    "InvalidObjectState": (403, "The object cannot be read now."),
    "KeyTooLongError": (400, "The key is longer than 1024 bytes."),
    "NoSuchBucket": (404, "There is no such bucket."),
    "NoSuchKey": (404, "There is no such key."),
    "NoSuchTagSet": (404, "There are no tags."),
    "NoSuchUpload": (404, "There is no such multipart upload: it was never begun, completed or aborted."),
    "NoSuchVersion": (404, "There is no such version: the only version of a key is `null`."),
    # configurations of buckets that nobody set
    "NoSuchBucketPolicy": (404, "The bucket has no policy."),
    "NoSuchCORSConfiguration": (404, "The bucket has no CORS rules."),
    "NoSuchLifecycleConfiguration": (404, "The bucket has no lifecycle rules."),
    "NoSuchPublicAccessBlockConfiguration": (404, "The bucket has no public access block."),
    "NoSuchWebsiteConfiguration": (404, "The bucket is no website."),
    "ObjectLockConfigurationNotFoundError": (404, "The bucket has no object lock."),
    "ReplicationConfigurationNotFoundError": (404, "The bucket is not replicated."),
    "ServerSideEncryptionConfigurationNotFoundError": (404, "The bucket has no encryption by default."),
    # conditions and ranges
    "ConditionalRequestConflict": (409, "Another request changed the key meanwhile."),
    "InvalidPartNumber": (416, "The object has no such part."),
    "InvalidRange": (416, "The range begins past the end of the object."),
    "NotModified": (304, "Not modified."),
    "OperationAborted": (409, "Another operation on the same thing is under way: try again."),
    "PreconditionFailed": (412, "A condition of the request does not hold."),
    # the request itself
    "BadDigest": (400, "The body does not have the checksum that the request says."),
    "BadRequest": (400, "The request is malformed."),
    "EntityTooLarge": (400, "The body is larger than what may be stored."),
    "EntityTooSmall": (400, "A part that is not the last is smaller than 5 MiB."),
    "IllegalLocationConstraintException": (400, "The location is not the one of this endpoint."),
    "IncompleteBody": (400, "The body ended before the length that the request says."),
    "InvalidArgument": (400, "An argument is invalid."),
    "InvalidChunkSizeError": (400, "A chunk before the last is smaller than 8 KiB."),
    "InvalidDigest": (400, "Content-MD5 is not the base64 form of 16 bytes."),
    "InvalidLocationConstraint": (400, "The location is not the one of this endpoint."),
    "InvalidPart": (400, "A part was not found, or has another ETag or checksum."),
    "InvalidPartOrder": (400, "The parts are not in ascending order."),
    "InvalidRequest": (400, "The request is invalid."),
    "InvalidStorageClass": (400, "STANDARD is the only storage class."),
    "InvalidTag": (400, "A tag is invalid."),
    "InvalidURI": (400, "The URI cannot be decoded."),
    "MalformedTrailerError": (400, "The trailer of the body is malformed."),
    "MalformedXML": (400, "The document is not well-formed XML, or not what this operation takes."),
    "MaxMessageLengthExceeded": (400, "The request is too long."),
    "MetadataTooLarge": (400, "The user metadata is longer than 2 KiB."),
    "MethodNotAllowed": (405, "The method is not allowed on this resource."),
    "MissingContentLength": (411, "Content-Length is missing."),
    "MissingRequestBodyError": (400, "The request needs a body."),
    "MissingSecurityHeader": (400, "A header that this request needs is missing."),
    "NotImplemented": (501, "The request implies functionality that is not implemented."),
    "RequestHeaderSectionTooLarge": (400, "The headers are too long."),
    "RequestTimeout": (400, "The connection was idle for too long."),
    "TooManyBuckets": (400, "There are as many buckets as there may be."),
    "UnexpectedContent": (400, "This request takes no body."),
    # the service
    "InsufficientStorage": (507, "The store is full and nothing more can be evicted."),
    "InternalError": (500, "An internal error; its request id is in the log."),
    "QuotaExceeded": (403, "A quota is used up."),
    "ServiceUnavailable": (503, "The service is not available now."),
    "SlowDown": (503, "Too many requests: slow down."),
}


class S3Error(Exception):
    """A failed request. `detail` are further elements of the error document, `headers` of the answer."""

    def __init__(
        self,
        code: str,
        message: str | None = None,
        *,
        detail: Mapping[str, str] = _NONE,
        headers: Mapping[str, str] = _NONE,
    ) -> None:
        """Make an error, with the table's message unless one is given. Raises KeyError for an unknown code."""
        self.status, default = CODES[code]
        self.code = code
        self.message = default if message is None else message
        self.detail = detail
        self.headers = headers
        super().__init__(code, self.message)

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


def argument(name: str, value: str, reason: str) -> S3Error:
    """Make an InvalidArgument as S3 words it; `reason` comes without its full stop."""
    return S3Error("InvalidArgument", f"{reason}.", detail={"ArgumentName": name, "ArgumentValue": value})


def from_kvfs(error: KvfsError, resource: str) -> S3Error:
    """Make the S3 error that a failure of the store becomes; `resource` is `bucket/key`.

    The store's own message goes to a client only with a 4xx about what the client sent: others name paths,
    devices and uids.
    """
    code = error.s3_code
    shown = code in (
        "InvalidArgument",
        "InvalidRequest",
        "KeyTooLongError",
        "EntityTooLarge",
        "NotImplemented",
    )
    bucket, _, key = resource.partition("/")
    detail = {"NoSuchBucket": {"BucketName": bucket}, "NoSuchKey": {"Key": key}}.get(code, _NONE)
    return S3Error(code, str(error) if shown else None, detail=detail)
