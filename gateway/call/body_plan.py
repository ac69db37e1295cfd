"""Size, coding and digests of a body, as a request's headers state them. Concurrency: pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.call.aws_chunked import encoded_bytes_limit
from gateway.call.call import Call
from gateway.protocol import checksums
from gateway.protocol.checksums import Wanted
from gateway.protocol.errors import S3Error, argument


@dataclass(frozen=True, slots=True)
class BodyPlan:
    """The size of a body's payload, its coding, and the digests that it must match."""

    size_bytes: int
    most_wire_bytes: int
    wanted: Wanted
    sha256: bytes | None
    trailer_names: frozenset[str] | None
    """What `x-amz-trailer` announces; None: the body is not aws-chunked."""


def plan_of(call: Call) -> BodyPlan:
    """Read the plan from the headers.

    Raises S3Error MissingContentLength, InvalidArgument, InvalidRequest, InvalidDigest.
    """
    wanted = checksums.wanted(call.request)
    size_bytes = payload_bytes(call)
    if not call.verified.mode.is_streaming:
        return BodyPlan(size_bytes, size_bytes, wanted, call.verified.payload_sha256, None)
    trailer = call.request.header(b"x-amz-trailer") or ""
    names = frozenset(name.strip().lower() for name in trailer.split(",") if name.strip())
    return BodyPlan(size_bytes, encoded_bytes_limit(size_bytes), wanted, None, names)


def object_bytes(call: Call) -> int:
    """Return the size of a body that becomes an object or a part, of which Content-Length is required even if empty."""
    if not call.verified.mode.is_streaming and call.request.header_bytes(b"content-length") is None:
        raise S3Error("MissingContentLength")
    return payload_bytes(call)


def payload_bytes(call: Call) -> int:
    """Return the size of the payload, from the headers alone. Raises S3Error MissingContentLength, InvalidArgument."""
    if not call.verified.mode.is_streaming:
        if call.content_length is None:
            raise S3Error("MissingContentLength")
        return call.content_length
    text = call.request.header(b"x-amz-decoded-content-length")
    if text is None:
        raise S3Error("MissingContentLength", "The header x-amz-decoded-content-length is missing.")
    if not text.isascii() or not text.isdigit() or len(text) > 16:
        name = "x-amz-decoded-content-length"
        raise argument(name, text, f"{name} is not a number")
    return int(text)
