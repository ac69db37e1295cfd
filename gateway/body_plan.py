"""What a request's headers say of its body. Concurrency: pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from gateway import checksums
from gateway.calls import Call
from gateway.checksums import Wanted
from gateway.chunked import encoded_bytes_limit
from gateway.errors import S3Error


@dataclass(frozen=True, slots=True)
class BodyPlan:
    """How many bytes of payload must come, in which coding, and what they must match."""

    size_bytes: int
    most_wire_bytes: int
    wanted: Wanted
    sha256: bytes | None
    trailer_names: frozenset[str] | None
    """What `x-amz-trailer` announces; None: the body is not aws-chunked."""


def plan_of(call: Call) -> BodyPlan:
    """Raises S3Error MissingContentLength, InvalidArgument, InvalidRequest, InvalidDigest."""
    wanted = checksums.wanted(call.request)
    if not call.verified.mode.is_streaming:
        size_bytes = payload_bytes(call)
        return BodyPlan(size_bytes, size_bytes, wanted, call.verified.payload_sha256, None)
    size_bytes = payload_bytes(call)
    trailer = call.request.header(b"x-amz-trailer") or ""
    names = frozenset(name.strip().lower() for name in trailer.split(",") if name.strip())
    return BodyPlan(size_bytes, encoded_bytes_limit(size_bytes), wanted, None, names)


def object_bytes(call: Call) -> int:
    """As `payload_bytes`, of a body that becomes an object or a part: that there is none has to be said."""
    if not call.verified.mode.is_streaming and call.request.header_bytes(b"content-length") is None:
        raise S3Error("MissingContentLength")
    return payload_bytes(call)


def payload_bytes(call: Call) -> int:
    """The size of the payload, from the headers alone. Raises S3Error MissingContentLength, InvalidArgument."""
    if not call.verified.mode.is_streaming:
        if call.content_length is None:
            raise S3Error("MissingContentLength")
        return call.content_length
    text = call.request.header(b"x-amz-decoded-content-length")
    if text is None:
        raise S3Error("MissingContentLength", "The header x-amz-decoded-content-length is missing.")
    if not text.isascii() or not text.isdigit() or len(text) > 16:
        raise S3Error(
            "InvalidArgument",
            "x-amz-decoded-content-length is not a number.",
            detail={"ArgumentName": "x-amz-decoded-content-length", "ArgumentValue": text},
        )
    return int(text)
