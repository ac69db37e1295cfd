"""Digests of one body: some are taken as its bytes come, slow ones by worker threads that follow behind.

Measured per MiB: CRC64NVME and CRC32C 17 us, CRC32 153 us, SHA-256 523 us, MD5 1223 us.

Concurrency: one task per body, and a worker thread per digest that follows.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import trio

from gateway.call.sinks import Sink
from gateway.protocol import checksums
from gateway.protocol.checksums import Algorithm, Digester
from gateway.protocol.errors import S3Error
from kvfs import limits

_FAST = frozenset((Algorithm.CRC32, Algorithm.CRC32C, Algorithm.CRC64NVME))
_threads = trio.CapacityLimiter(max(2, os.cpu_count() or 2))


@dataclass(slots=True)
class Digests:
    """The digests of one body, by name: `md5`, `sha256` or an algorithm."""

    by_name: dict[str, Digester]

    @classmethod
    def of(cls, take_md5: bool, *algorithms: Algorithm | None) -> Digests:
        """Begin an MD5, if it is taken, and the checksums that are named."""
        found = {"md5": checksums.md5()} if take_md5 else {}
        for algorithm in algorithms:
            if algorithm is not None:
                found[algorithm.value] = checksums.digester(algorithm)
        return cls(found)

    def split(self, size_bytes: int) -> tuple[list[Digester], list[Digester]]:
        """Return the digests that are taken as bytes come, and those that threads take behind."""
        if size_bytes <= limits.INLINE_DIGEST_BYTES:
            return list(self.by_name.values()), []
        fast = {algorithm.value for algorithm in _FAST}
        inline = [digester for name, digester in self.by_name.items() if name in fast]
        return inline, [digester for name, digester in self.by_name.items() if name not in fast]

    def get(self, name: str) -> bytes | None:
        """Return the digest of this name as it is now; None where it is not taken."""
        digester = self.by_name.get(name)
        return None if digester is None else digester.digest()


class Followers:
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

    async def __aenter__(self) -> Followers:
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
        """Note that so many bytes are written in all, and let the digests go on."""
        if self._digesters and size_bytes - self._written >= limits.RECEIVE_BYTES:
            self._written = size_bytes
            self._wake()

    async def finish(self, size_bytes: int) -> None:
        """Wait until all digests are taken over this many bytes, which are all."""
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
    """Feed a range to a digest, in a worker thread; the interpreter lock is free while it reads and hashes."""
    memory = memoryview(bytearray(min(limits.RECEIVE_BYTES, end - start)))
    while start < end:
        count = sink.read(start, memory[: end - start])
        if count == 0:
            raise S3Error("InternalError")
        digester.update(memory[:count])
        start += count
