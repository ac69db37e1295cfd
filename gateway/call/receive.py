"""Bodies of requests: from the wire into a draft or memory, decoded, digested and checked.

Responsibility: one pass over the body: take the aws-chunked coding off, write, and compute every digest that is
wanted: the signed SHA-256, Content-MD5 and the MD5 of the ETag, the checksum of a header or trailer.

Invariants: a body counts only when `receive` returns: one that mismatches, ends early or is too long raises, and the
caller aborts the draft. Bytes go through one buffer of the process, and no task waits between filling and emptying it,
so slow uploads hold no memory. Of a body above limits.INLINE_DIGEST_BYTES, digests that are slower than the network
(MD5, SHA) are taken by threads that follow behind, reading back what was written.

Concurrency: one task per body; more in `gateway.call.digests`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import trio
from xxhash import xxh3_64

from gateway.call.aws_chunked import ChunkedDecoder
from gateway.call.body_plan import BodyPlan, plan_of
from gateway.call.call import Call
from gateway.call.digests import Digests, Followers
from gateway.call.large_transfer import WindowSink
from gateway.call.sinks import DocumentSink, DraftSink, Sink
from gateway.protocol import checksums
from gateway.protocol.checksums import Algorithm, Checksum, Digester
from gateway.protocol.errors import S3Error
from gateway.xml.requests import Document
from kvfs import limits
from kvfs._native.s3.receiver import Receiver

T = TypeVar("T")

_SCRATCH = memoryview(bytearray(limits.RECEIVE_BYTES))
_NATIVE = frozenset((Algorithm.CRC64NVME.value,))


@dataclass(slots=True)
class Received:
    """A body that came whole and was checked."""

    size_bytes: int
    md5: bytes | None
    """None where it was not wanted."""
    checksum: Checksum | None
    xxh3: int
    """XXH3-64: taken here, while the bytes are in the processor's cache, it spares the service reading them again."""


async def receive(
    call: Call, sink: Sink, *, take_md5: bool = False, algorithm: Algorithm | None = None
) -> Received:
    """Read the whole body of `call` into `sink`, taking an MD5 and a checksum where asked for.

    Raises S3Error IncompleteBody, BadDigest, XAmzContentSHA256Mismatch, MissingContentLength and what the aws-chunked
    decoder raises.
    """
    plan = plan_of(call)
    if plan.wanted.algorithm is None and algorithm is not None:
        plan = replace(plan, wanted=replace(plan.wanted, algorithm=algorithm))
    signed = None if plan.sha256 is None else Algorithm.SHA256
    digests = Digests.of(take_md5 or plan.wanted.md5 is not None, signed, plan.wanted.algorithm)
    if isinstance(sink, DraftSink) and plan.trailer_names is None and digests.by_name.keys() <= _NATIVE:
        received = await _receive_natively(call, sink, plan)
        if received is not None:
            return received
    inline, behind = digests.split(plan.size_bytes)
    decoder = None
    if plan.trailer_names is not None:
        decoder = ChunkedDecoder(call.verified, plan.size_bytes, plan.trailer_names)
    if isinstance(sink, WindowSink):
        sink.digesters, behind = behind, []
    elif isinstance(sink, DocumentSink):
        inline, behind = [*inline, *behind], []
    async with Followers(sink, behind) as followers:
        store_digest = xxh3_64()
        size_bytes = await _pump(call, sink, plan, decoder, [*inline, store_digest], followers)
        await followers.finish(size_bytes)
        await sink.settle()
    if size_bytes != plan.size_bytes:
        raise S3Error("IncompleteBody")
    trailers = {} if decoder is None else decoder.finish()
    md5, checksum = _checked(plan, digests, trailers)
    return Received(size_bytes, md5, checksum, store_digest.intdigest())


@asynccontextmanager
async def read_document(call: Call, document: Document[T]) -> AsyncIterator[T]:
    """Read the body's document; its memory counts until the context ends.

    Raises S3Error as the document does, SlowDown where others' documents take the memory there is for them, and what
    `receive` raises.
    """
    with call.documents.hold(call.owner) as held:
        await receive(call, DocumentSink(document, held))
        yield document.finish()


async def _receive_natively(call: Call, sink: DraftSink, plan: BodyPlan) -> Received | None:
    """Receive a body natively; return None, with nothing done, where that is not possible."""
    algorithm = plan.wanted.algorithm
    receiver = Receiver(algorithm is not None)
    if not await call.body.receive_file(sink.descriptor, receiver, sink.holding):
        return None
    checksum = None if algorithm is None else crc64nvme(receiver, plan.wanted.digest)
    return Received(receiver.size_bytes, None, checksum, receiver.xxh3)


def crc64nvme(receiver: Receiver, expected: bytes | None) -> Checksum:
    """Check the CRC of a body that came whole. Raises S3Error BadDigest."""
    algorithm = Algorithm.CRC64NVME
    found = receiver.crc64nvme.to_bytes(algorithm.digest_bytes, "big")
    if expected is not None:
        checksums.verify(algorithm.value, expected, found)
    return Checksum(algorithm, found)


async def _pump(
    call: Call,
    sink: Sink,
    plan: BodyPlan,
    decoder: ChunkedDecoder | None,
    inline: list[Digester | xxh3_64],
    followers: Followers,
) -> int:
    """Move the body into `sink` and the digests, and return the size of its payload."""
    size_bytes, wire_bytes, since_turn = 0, 0, 0
    into = _SCRATCH[: limits.DOCUMENT_PIECE_BYTES] if isinstance(sink, DocumentSink) else _SCRATCH
    while count := await call.body.receive_into(into):
        # Nothing may wait from here until the piece is written: the buffer is everybody's.
        wire_bytes += count
        since_turn += count
        if wire_bytes > plan.most_wire_bytes:
            raise S3Error("IncompleteBody", "The body is longer than its headers say.")
        if decoder is not None:
            count = decoder.compact(_SCRATCH[:count])
        piece = _SCRATCH[:count]
        for digester in inline:
            digester.update(piece)
        sink.write(piece)
        if sink.full:
            await sink.settle()
        size_bytes += count
        followers.wrote(size_bytes)
        if since_turn >= limits.MIB:
            since_turn = 0
            await trio.lowlevel.checkpoint()
    return size_bytes


def _checked(
    plan: BodyPlan, digests: Digests, trailers: dict[str, str]
) -> tuple[bytes | None, Checksum | None]:
    """Return the MD5 and the checksum that were wanted, once every digest is what was expected."""
    wanted = plan.wanted
    if plan.sha256 is not None and digests.get(Algorithm.SHA256.value) != plan.sha256:
        raise S3Error("XAmzContentSHA256Mismatch")
    md5 = digests.get("md5")
    if wanted.md5 is not None and md5 is not None:
        checksums.verify("Content-MD5", wanted.md5, md5)
    checksum = None
    if wanted.algorithm is not None:
        found = digests.get(wanted.algorithm.value)
        assert found is not None
        expected = wanted.digest
        if wanted.trailer:
            text = trailers.get(wanted.algorithm.header)
            if text is None:
                raise S3Error("MalformedTrailerError", f"The trailer {wanted.algorithm.header} did not come.")
            expected = checksums.parse(wanted.algorithm, text)
        if expected is not None:
            checksums.verify(wanted.algorithm.value, expected, found)
        checksum = Checksum(wanted.algorithm, found)
    return md5, checksum
