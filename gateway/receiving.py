"""Bodies of requests: from the wire into a draft or memory, decoded, digested and checked.

Responsibility: one pass over the body: take the aws-chunked coding off, write, and compute every digest that is
wanted: the signed SHA-256, Content-MD5 and the MD5 of the ETag, the checksum of a header or trailer.

Invariants: a body counts only when `receive` returns: whatever mismatches, ends early or is too long raises, and the
caller gives the draft back. Bytes go through one buffer of the process, and no task waits between filling it and
emptying it, so slow uploads hold no memory. Where a body is above limits.INLINE_DIGEST_BYTES, digests that are slower
than the network (MD5, SHA) are taken by threads that follow behind, reading back what was written.

Measured per MiB: CRC64NVME and CRC32C 17 us, CRC32 153 us, SHA-256 523 us, MD5 1223 us.

Concurrency: one task per body, and a worker thread per digest that follows.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field, replace
from typing import Protocol

import trio
from xxhash import xxh3_64

from gateway import checksums
from gateway.bodies import Document
from gateway.body_plan import BodyPlan, plan_of
from gateway.calls import Call, Held
from gateway.checksums import Algorithm, Checksum, Digester
from gateway.chunked import ChunkedDecoder
from gateway.connection import write_all
from gateway.drafts import Draft
from gateway.errors import S3Error
from gateway.large import WindowSink
from gateway.transports import breathe
from kvfs import limits
from kvfs._native.receiver import Receiver

_SCRATCH = memoryview(bytearray(limits.RECEIVE_BYTES))
_FAST = frozenset((Algorithm.CRC32, Algorithm.CRC32C, Algorithm.CRC64NVME))
_NATIVE = frozenset((Algorithm.CRC64NVME.value,))
_threads = trio.CapacityLimiter(max(2, os.cpu_count() or 2))


class Sink(Protocol):
    """Where a body goes."""

    def write(self, piece: memoryview) -> None: ...

    def read(self, offset: int, into: memoryview) -> int:
        """What was written before; called by worker threads."""
        ...

    @property
    def full(self) -> bool:
        """Whether `settle` has to make room before more is written."""
        ...

    async def settle(self) -> None: ...


class DocumentSink:
    """A document that is read as it comes, with turns for all others. Raises S3Error, as the document does."""

    def __init__(self, document: Document[object], held: Held) -> None:
        self._document = document
        self._held = held
        self._piece = b""

    @property
    def full(self) -> bool:
        return bool(self._piece)

    def write(self, piece: memoryview) -> None:
        self._held.add(len(piece))
        self._piece = bytes(piece)

    def read(self, offset: int, into: memoryview) -> int:
        raise AssertionError("a document is not kept")

    async def settle(self) -> None:
        for at in range(0, len(self._piece), limits.DOCUMENT_TURN_BYTES):
            self._document.feed(self._piece[at : at + limits.DOCUMENT_TURN_BYTES])
            await breathe()
        self._piece = b""


class MemorySink:
    """Small bodies. Raises S3Error EntityTooLarge past `most`."""

    full = False

    async def settle(self) -> None:
        pass

    def __init__(self, most: int) -> None:
        self.data = bytearray()
        self._most = most

    def write(self, piece: memoryview) -> None:
        if len(self.data) + len(piece) > self._most:
            raise S3Error("EntityTooLarge", f"At most {self._most} bytes are taken here.")
        self.data += piece

    def read(self, offset: int, into: memoryview) -> int:
        piece = self.data[offset : offset + len(into)]
        into[: len(piece)] = piece
        return len(piece)


class DraftSink:
    """A granted draft, whose room grows. Raises NoSpace; S3Error SlowDown."""

    def __init__(self, draft: Draft) -> None:
        self.descriptor = draft.descriptor
        self.holding = draft.holding
        self._at = 0

    @property
    def full(self) -> bool:
        holding = self.holding
        return holding is not None and holding.held_bytes < min(
            holding.claim_bytes, self._at + limits.RECEIVE_BYTES
        )

    async def settle(self) -> None:
        while self.full:
            assert self.holding is not None
            await self.holding.grow()

    def write(self, piece: memoryview) -> None:
        write_all(self.descriptor, piece, self._at)
        self._at += len(piece)

    def read(self, offset: int, into: memoryview) -> int:
        return os.preadv(self.descriptor, [into], offset)


@dataclass(slots=True)
class Received:
    """What came, checked."""

    size_bytes: int
    md5: bytes | None
    """Where it was wanted."""
    checksum: Checksum | None
    xxh3: int
    """XXH3-64: taken here, while the bytes are in the processor's cache, it spares the service reading them again."""


class _Md5:
    def __init__(self) -> None:
        self._hash = hashlib.md5(usedforsecurity=False)

    def update(self, data: bytes | memoryview) -> None:
        self._hash.update(data)

    def digest(self) -> bytes:
        return self._hash.digest()


@dataclass(slots=True)
class _Digests:
    """Those of one body, by name: `md5`, `sha256` or an algorithm."""

    by_name: dict[str, Digester] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: BodyPlan, take_md5: bool) -> _Digests:
        found = cls()
        if take_md5 or plan.wanted.md5 is not None:
            found.by_name["md5"] = _Md5()
        if plan.sha256 is not None:
            found.by_name[Algorithm.SHA256.value] = checksums.digester(Algorithm.SHA256)
        if plan.wanted.algorithm is not None and plan.wanted.algorithm.value not in found.by_name:
            found.by_name[plan.wanted.algorithm.value] = checksums.digester(plan.wanted.algorithm)
        return found

    def split(self, size_bytes: int) -> tuple[list[Digester], list[Digester]]:
        """(taken as bytes come, taken by threads behind)."""
        if size_bytes <= limits.INLINE_DIGEST_BYTES:
            return list(self.by_name.values()), []
        fast = {algorithm.value for algorithm in _FAST}
        inline = [digester for name, digester in self.by_name.items() if name in fast]
        return inline, [digester for name, digester in self.by_name.items() if name not in fast]

    def get(self, name: str) -> bytes | None:
        digester = self.by_name.get(name)
        return None if digester is None else digester.digest()


async def receive(
    call: Call, sink: Sink, *, take_md5: bool = False, algorithm: Algorithm | None = None
) -> Received:
    """Read the whole body of `call` into `sink`, taking an MD5 and a checksum if told so.

    Raises S3Error IncompleteBody, BadDigest, XAmzContentSHA256Mismatch, MissingContentLength and what the aws-chunked
    decoder raises.
    """
    plan = plan_of(call)
    if plan.wanted.algorithm is None and algorithm is not None:
        plan = replace(plan, wanted=replace(plan.wanted, algorithm=algorithm))
    digests = _Digests.of(plan, take_md5)
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
    async with _Followers(sink, behind) as followers:
        store_digest = xxh3_64()
        size_bytes = await _pump(call, sink, plan, decoder, [*inline, store_digest], followers)
        await followers.finish(size_bytes)
        await sink.settle()
    if size_bytes != plan.size_bytes:
        raise S3Error("IncompleteBody")
    trailers = {} if decoder is None else decoder.finish()
    md5, checksum = _checked(plan, digests, trailers)
    return Received(size_bytes, md5, checksum, store_digest.intdigest())


async def _receive_natively(call: Call, sink: DraftSink, plan: BodyPlan) -> Received | None:
    """None where the body has to go through Python, and nothing was done."""
    algorithm = plan.wanted.algorithm
    receiver = Receiver(algorithm is not None)
    if not await call.body.receive_file(sink.descriptor, receiver, sink.holding):
        return None
    checksum = None if algorithm is None else crc64nvme(receiver, plan.wanted.digest)
    return Received(receiver.size_bytes, None, checksum, receiver.xxh3)


def crc64nvme(receiver: Receiver, promised: bytes | None) -> Checksum:
    """Of a body that came whole. Raises S3Error BadDigest."""
    algorithm = Algorithm.CRC64NVME
    found = receiver.crc64nvme.to_bytes(algorithm.digest_bytes, "big")
    if promised is not None:
        checksums.verify(algorithm.value, promised, found)
    return Checksum(algorithm, found)


async def _pump(
    call: Call,
    sink: Sink,
    plan: BodyPlan,
    decoder: ChunkedDecoder | None,
    inline: list[Digester | xxh3_64],
    followers: _Followers,
) -> int:
    """Move the body; how many bytes of payload there were."""
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
    plan: BodyPlan, digests: _Digests, trailers: dict[str, str]
) -> tuple[bytes | None, Checksum | None]:
    """The MD5 and the checksum that were wanted, once every digest is what was promised."""
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
        promised = wanted.digest
        if wanted.trailer:
            text = trailers.get(wanted.algorithm.header)
            if text is None:
                raise S3Error("MalformedTrailerError", f"The trailer {wanted.algorithm.header} did not come.")
            promised = checksums.parse(wanted.algorithm, text)
        if promised is not None:
            checksums.verify(wanted.algorithm.value, promised, found)
        checksum = Checksum(wanted.algorithm, found)
    return md5, checksum


class _Followers:
    """Digests taken by worker threads behind the writer, one job at a time for each."""

    def __init__(self, sink: Sink, digesters: list[Digester]) -> None:
        self._sink = sink
        self._digesters = digesters
        self._written = 0
        self._final = False
        self._more = trio.Event()
        self._done = trio.Event()
        self._left = len(digesters)
        self._manager = trio.open_nursery() if digesters else None
        self._nursery: trio.Nursery | None = None

    async def __aenter__(self) -> _Followers:
        if self._manager is not None:
            self._nursery = await self._manager.__aenter__()
            for digester in self._digesters:
                self._nursery.start_soon(self._follow, digester)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._manager is None or self._nursery is None:
            return
        self._nursery.cancel_scope.cancel()
        await self._manager.__aexit__(None, None, None)

    def wrote(self, size_bytes: int) -> None:
        if self._digesters and size_bytes - self._written >= limits.RECEIVE_BYTES:
            self._written = size_bytes
            self._wake()

    async def finish(self, size_bytes: int) -> None:
        if self._digesters:
            self._written, self._final = size_bytes, True
            self._wake()
            await self._done.wait()

    def _wake(self) -> None:
        self._more.set()
        self._more = trio.Event()

    async def _follow(self, digester: Digester) -> None:
        at = 0
        while not (self._final and at == self._written):
            if at == self._written:
                await self._more.wait()
                continue
            end = self._written
            await trio.to_thread.run_sync(_digest_range, self._sink, digester, at, end, limiter=_threads)
            at = end
        self._left -= 1
        if self._left == 0:
            self._done.set()


def _digest_range(sink: Sink, digester: Digester, start: int, end: int) -> None:
    """In a worker thread; the interpreter lock is free while it reads and hashes."""
    memory = memoryview(bytearray(min(limits.RECEIVE_BYTES, end - start)))
    while start < end:
        count = sink.read(start, memory[: end - start])
        if count == 0:
            raise S3Error("InternalError")
        digester.update(memory[:count])
        start += count
