"""Bytes to and from one peer over TLS, whichever of both connected.

Invariants: those of `kvfs.http.transports`. Concurrency: one task reads and writes.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import trio

from kvfs import limits
from kvfs.errors import ConfigError
from kvfs.http.transports import Buffer, Gone, Pace, Stalled


@cache
def client_context(authorities: Path | None = None) -> ssl.SSLContext:
    """Return the context of connections to servers, read once: what the system trusts takes 36 ms.

    `authorities`: a PEM file of who may sign a server's certificate; None: whom the system trusts. Raises ConfigError.
    """
    try:
        return ssl.create_default_context(cafile=authorities)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"authorities {authorities}: {error.strerror or error}") from None


class TlsTransport:
    """Implement `Transport` over trio's SSLStream; call `handshake` first."""

    secure = True
    answered_s = 0.0

    def __init__(
        self, sock: socket.socket, peer: str, context: ssl.SSLContext, server_name: str | None = None
    ) -> None:
        """Transfer over `sock`; `server_name`: the peer is a server, and its certificate must be of that name."""
        self.peer = peer
        sock.setblocking(False)
        self._socket = sock
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        self._stream = trio.SSLStream(
            stream,
            context,
            server_hostname=server_name,
            server_side=server_name is None,
            https_compatible=True,
        )
        self.quiet_s = limits.FIRST_BYTE_S
        self._receiving: trio.CancelScope | None = None
        self._woken = False
        self._given_up = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def wake(self) -> None:
        self._woken = True
        if self._receiving is not None:
            self._receiving.cancel()

    def give_up(self) -> None:
        self._given_up = True
        if self._receiving is not None:
            self._receiving.cancel()

    def try_send(self, data: bytes) -> bool:
        return False

    async def handshake(self) -> None:
        """Do the TLS handshake. Raises Gone, Stalled."""
        with trio.move_on_after(limits.HEAD_TIMEOUT_S) as scope:
            try:
                await self._stream.do_handshake()
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise Gone(f"TLS handshake: {error.__cause__ or error}") from None
        if scope.cancelled_caught:
            raise Stalled("no TLS handshake")

    async def receive_into(self, into: memoryview, timeout_s: float, *, idle: bool = False) -> int:
        if self._given_up:
            raise Stalled("nothing came in time")
        with trio.move_on_after(timeout_s) as self._receiving:
            try:
                data = await self._stream.receive_some(min(len(into), limits.TLS_RECORDS_BYTES))
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise Gone(str(error)) from None
            into[: len(data)] = data
            return len(data)
        if self._woken:
            return 0
        raise Stalled("nothing came")

    async def send(self, parts: Sequence[Buffer]) -> None:
        pace = Pace()
        for part in _joined(parts):
            view = memoryview(part)
            for at in range(0, len(view), limits.TLS_RECORDS_BYTES):
                await self._send_some(view[at : at + limits.TLS_RECORDS_BYTES], pace)

    async def _send_some(self, data: memoryview, pace: Pace) -> None:
        with trio.move_on_after(pace.timeout_s()):
            try:
                await self._stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise Gone(str(error)) from None
            pace.moved += len(data)
            return
        raise Stalled("the client takes nothing")

    async def send_file(self, head: bytes, descriptor: int, offset: int, count: int) -> None:
        first, end = head, offset + count
        pace = Pace()
        while offset < end:
            data = os.pread(descriptor, min(end - offset, limits.TLS_RECORDS_BYTES), offset)
            if not data:
                raise Gone("the slot is shorter than its object")
            offset += len(data)
            await self._send_some(memoryview(first + data), pace)
            first = b""
        if first:
            await self.send([first])

    async def close(self, *, linger: bool) -> None:
        with trio.move_on_after(limits.LINGER_S if linger else 0.1), suppress(Exception):
            await self._stream.aclose()
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(self._stream.transport_stream)


def _joined(parts: Sequence[Buffer]) -> list[Buffer]:
    """Return small parts as one record."""
    if len(parts) > 1 and sum(map(len, parts)) <= limits.TLS_RECORDS_BYTES:
        return [b"".join(parts)]
    return list(parts)
