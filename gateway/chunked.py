"""The aws-chunked decoder: framing, chunk signatures, trailers; incremental, without I/O and without copies.

It decodes what is inside HTTP's own transfer coding, if there is one.
"""

from __future__ import annotations

from gateway.signing import Verified


class ChunkedDecoder:
    """Bytes of an aws-chunked body in, views of its payload out. The payload counts only after `finish`."""

    def __init__(self, verified: Verified, decoded_bytes: int, trailer_names: frozenset[str]) -> None:
        """`decoded_bytes`: `x-amz-decoded-content-length`; `trailer_names`: what `x-amz-trailer` announces."""
        raise NotImplementedError

    def feed(self, data: memoryview) -> list[memoryview]:
        """Views into `data` that are payload, in order. Raises S3Error: IncompleteBody, InvalidChunkSizeError,
        SignatureDoesNotMatch, InvalidRequest, MalformedTrailerError; then the connection cannot go on."""
        raise NotImplementedError

    def compact(self, data: memoryview) -> int:
        """Move the payload in `data` to its front, in place; how many bytes. Raises as `feed` does."""
        raise NotImplementedError

    def finish(self) -> dict[str, str]:
        """The trailers, by lower-case name, once the body has ended. Raises S3Error IncompleteBody."""
        raise NotImplementedError

    @property
    def complete(self) -> bool:
        """Whether the last chunk and the trailers have come; more bytes are an error."""
        raise NotImplementedError


def encoded_bytes_limit(decoded_bytes: int) -> int:
    """The most bytes that an aws-chunked body of this payload may have on the wire."""
    raise NotImplementedError
