"""One connection to a peer, at the end that asks.

Responsibility: jobs of the native stream (`kvfs._native.remote.stream`) as calls that can be cancelled.

Invariants: descriptors of drafts are closed when a call returns or raises. A call that was cancelled, or that the peer
has failed, leaves the link closed. Concurrency: the service's trio thread; one call at a time.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import trio

from kvfs._native.remote.stream import Stream
from kvfs.errors import DeadlinePassed, KvfsError, ProtocolError
from tiers.remote.connections.connection import Connection
from tiers.remote.connections.fabric import FabricWorker


@dataclass(frozen=True, slots=True)
class Want:
    """Names a block to read, and the draft for it."""

    digest: bytes
    room_bytes: int
    open_draft: Callable[[], int]


class Read(NamedTuple):
    """Says what became of a want: `status` is one of `kvfs._native.remote.stream`."""

    status: int
    size_bytes: int
    checksum: int
    parent: bytes


class PeerLink(Protocol):
    """Moves blocks from one peer, whatever the transport. Waits are bounded by `wait_s`."""

    @property
    def transport(self) -> str:
        """Return what bytes go by: tcp, tls or ucx."""

    @property
    def is_usable(self) -> bool:
        """Return whether another call may be made."""

    async def match(self, namespace: bytes, digests: bytes, wait_s: float) -> list[int]:
        """Return the sizes of the blocks that the peer has, without a gap from the first on. Raises KvfsError."""

    async def read(
        self, namespace: bytes, wants: Sequence[Want], wait_s: float, *, urgent: bool
    ) -> tuple[list[Read], KvfsError | None]:
        """Read blocks into their drafts; return what became of each, and what ended the link, if anything has."""

    def close(self) -> None:
        """End the link. Closing twice is harmless."""


class TcpLink:
    """Implements `PeerLink` over one TCP connection, plain or with TLS, or with a fabric beside it for the bytes."""

    def __init__(self, connection: Connection, fabric: FabricWorker | None = None) -> None:
        """Take over a connection whose peer was verified. Raises OSError."""
        plain = "tls" if connection.is_encrypted else "tcp"
        self._transport = plain if fabric is None else "ucx"
        self._stream = connection.hand_over(Stream, fabric)
        self._is_open = True

    @property
    def transport(self) -> str:
        return self._transport

    @property
    def is_usable(self) -> bool:
        return self._is_open and self._stream.is_quiet

    def close(self) -> None:
        self._is_open = False
        self._stream.close()

    async def match(self, namespace: bytes, digests: bytes, wait_s: float) -> list[int]:
        self._stream.begin_match(namespace, digests, wait_s)
        error = await self._finish(wait_s)
        if error is not None:
            raise error
        return self._stream.sizes()

    async def read(
        self, namespace: bytes, wants: Sequence[Want], wait_s: float, *, urgent: bool
    ) -> tuple[list[Read], KvfsError | None]:
        jobs: list[tuple[bytes, int, int]] = []
        try:
            for want in wants:
                jobs.append((want.digest, want.room_bytes, want.open_draft()))
            self._stream.begin_read(namespace, jobs, wait_s, urgent)
        except BaseException:
            for _, _, descriptor in jobs:
                os.close(descriptor)
            raise
        error = await self._finish(wait_s)
        return [Read(*read) for read in self._stream.reads()], error

    async def _finish(self, wait_s: float) -> KvfsError | None:
        try:
            while not self._stream.take():
                await trio.lowlevel.wait_readable(self._stream.fileno())
        except BaseException:
            self.close()
            raise
        error = _error(self._stream.error, wait_s)
        if error is not None:
            self.close()
        return error


def _error(number: int, wait_s: float) -> KvfsError | None:
    if number == 0:
        return None
    if number == errno.ETIMEDOUT:
        return DeadlinePassed(f"no whole answer within {wait_s:g} s")
    if number == errno.EPROTO:
        return ProtocolError("its answer is not one to what was asked")
    return KvfsError(f"the connection ended: {os.strerror(number)}")
