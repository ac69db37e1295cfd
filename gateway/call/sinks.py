"""Destinations of bodies: memory, a document that is read as it comes, a draft. That of a large object is in
`gateway.call.large_transfer`.

Concurrency: one task for each sink; `read` is called by worker threads.
"""

from __future__ import annotations

import os
from typing import Protocol

from gateway.backend.body_budget import Draft
from gateway.call.document_budget import Held
from gateway.protocol.errors import S3Error
from gateway.xml.requests import Document
from kvfs import limits
from kvfs.http.http_exchange import write_all
from kvfs.http.transports import breathe


class Sink(Protocol):
    """A destination of a body."""

    def write(self, piece: memoryview) -> None:
        """Write the next piece of the body, which has to fit: see `full`."""

    def read(self, offset: int, into: memoryview) -> int:
        """Read what was written before; called by worker threads."""
        ...

    @property
    def full(self) -> bool:
        """Return whether `settle` has to make room before more is written."""
        ...

    async def settle(self) -> None:
        """Make room for the next piece."""


class DocumentSink:
    """Implements `Sink` for a document that is read as it comes, with pauses for all others. Raises S3Error."""

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
    """Implements `Sink` for small bodies. Raises S3Error EntityTooLarge past `most`."""

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
    """Implements `Sink` for a granted draft, whose room grows. Raises NoSpace; S3Error SlowDown."""

    def __init__(self, draft: Draft) -> None:
        self.descriptor = draft.descriptor
        self.holding = draft.holding
        self._at = 0

    @property
    def full(self) -> bool:
        holding = self.holding
        return holding is not None and holding.held_bytes < min(
            holding.total_bytes, self._at + limits.RECEIVE_BYTES
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
