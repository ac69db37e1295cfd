"""Listening, accepting and stopping: the connections of one gateway process.

Responsibility: bind (with SO_REUSEPORT where several processes share a port), accept up to a limit, hand each
connection to `kvfs.http.connection` (over TLS where there is a certificate), and drain at the end.

Invariants: past the limit silent connections are closed for new ones (`kvfs.http.connection_slots`); while none is
silent, new ones wait in the kernel's backlog. A connection's failure ends that connection alone. A new certificate
counts for connections that begin after it; one that cannot be loaded does not replace the old one.

Concurrency: one task accepts per listener, one serves per connection.
"""

from __future__ import annotations

import logging
import signal
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import trio

from kvfs import limits
from kvfs.errors import ConfigError
from kvfs.http.connection import Application, Connection, Refusal
from kvfs.http.connection_slots import Place, Places
from kvfs.http.http_exchange import Recognised
from kvfs.http.tls import TlsTransport
from kvfs.http.transports import Gone, PlainTransport, Stalled, Sweeper, Transport

log = logging.getLogger("kvfs.http")

_RETRY_PAUSE_S = 0.05
"""Between two attempts to accept while descriptors or memory are missing; connections wait in the backlog."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """The PEM files of a certificate and its key."""

    certificate: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """Make the TLS context. Raises ConfigError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"certificate {self.certificate}, key {self.key}: {reason}") from None
        return context


def listen(host: str, port: int, *, shared: bool) -> list[socket.socket]:
    """Listen on each address of `host`, on a port `shared` with other processes. Raises ConfigError."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            sock = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, protocol)
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # Port 0 means a free port, the same for every address.
            sock.bind((address[0], port or (sockets[0].getsockname()[1] if sockets[1:] else 0), *address[2:]))
            sock.listen(limits.GATEWAY_BACKLOG)
    except OSError as error:
        for sock in sockets:
            sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return sockets


async def take_signals(
    stop: Callable[[], None],
    reload: Callable[[], None],
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Stop on SIGTERM and SIGINT and reload on SIGHUP, until cancelled."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        task_status.started()
        async for number in signals:
            if number == signal.SIGHUP:
                reload()
            else:
                stop()


class Front(Protocol):
    """Watch plain connections between two requests, and answer some requests itself."""

    async def run(self) -> None:
        """Run until cancelled."""
        ...

    async def wait(self, transport: PlainTransport) -> tuple[bytes, Recognised | None]:
        """Return the first bytes of a request for the connection's task, see `Connection`."""
        ...

    def stop(self) -> None:
        """Answer nothing more: pass every request to its connection's task."""
        ...


class Server:
    """Serve the connections of listening sockets with one application."""

    def __init__(
        self,
        application: Application,
        refuse: Refusal,
        *,
        certificate: Certificate | None = None,
        front: Front | None = None,
        most: int = limits.MAX_GATEWAY_CONNECTIONS,
    ) -> None:
        """Serve at most `most` connections. Raises ConfigError for a certificate that cannot be loaded."""
        self._application = application
        self._refuse = refuse
        self._front = front
        self._certificate = certificate
        self._context = None if certificate is None else certificate.context()
        self.places = Places(most)
        self._connections: set[Connection] = set()
        self._accepting = trio.CancelScope()
        self._sweeper = Sweeper()
        self.accepted = 0

    @property
    def open_connections(self) -> int:
        """Return how many connections are open."""
        return len(self._connections)

    def reload(self) -> None:
        """Read the certificate again."""
        if self._certificate is None:
            return
        try:
            self._context = self._certificate.context()
        except ConfigError as error:
            log.error("the old certificate stays in use: %s", error)
        else:
            log.info("certificate %s was read again", self._certificate.certificate)

    def stop(self) -> None:
        """Accept no more; end each connection after its request under way."""
        self._accepting.cancel()
        if self._front is not None:
            self._front.stop()
        for connection in list(self._connections):
            connection.stop()

    async def serve(self, sockets: list[socket.socket]) -> None:
        """Serve until `stop`, and then for limits.DRAIN_WAIT_S at most. Owns the sockets."""
        async with trio.open_nursery() as background:
            background.start_soon(self._sweeper.run)
            if self._front is not None:
                background.start_soon(self._front.run)
            await self._serve_connections(sockets)
            background.cancel_scope.cancel()

    async def _serve_connections(self, sockets: list[socket.socket]) -> None:
        async with trio.open_nursery() as connections:
            try:
                with self._accepting:
                    async with trio.open_nursery() as accepting:
                        for sock in sockets:
                            accepting.start_soon(self._accept, sock, connections)
            finally:
                for sock in sockets:
                    sock.close()
            connections.cancel_scope.deadline = trio.current_time() + limits.DRAIN_WAIT_S

    async def _accept(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        while True:
            connection, address = await self._next(listener)
            self.accepted += 1
            try:
                await self.places.wait()
            except trio.Cancelled:
                connection.close()
                raise
            place = self.places.take(address[0])
            if place is None:
                connection.close()
            else:
                nursery.start_soon(self._serve, connection, f"{address[0]}:{address[1]}", place)

    async def _next(self, listener: socket.socket) -> tuple[socket.socket, tuple[str, int]]:
        while True:
            await trio.lowlevel.wait_readable(listener)
            try:
                return listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue
            except OSError as error:
                log.warning("cannot accept a connection: %s", error)
                await trio.sleep(_RETRY_PAUSE_S)

    async def _serve(self, sock: socket.socket, peer: str, place: Place) -> None:
        try:
            with place.scope:
                await self._serve_connection(sock, peer, place)
        except Exception:
            log.exception("%s: the connection was closed by an internal error", peer)
        finally:
            self.places.release(place)
            sock.close()

    async def _serve_connection(self, sock: socket.socket, peer: str, place: Place) -> None:
        transport = await self._transport(sock, peer)
        if transport is None:
            return
        wait = None
        if self._front is not None and isinstance(transport, PlainTransport):
            wait = partial(self._front.wait, transport)
        connection = Connection(transport, self._application, self._refuse, wait, place)
        self._connections.add(connection)
        try:
            await connection.serve()
        finally:
            self._connections.discard(connection)

    async def _transport(self, sock: socket.socket, peer: str) -> Transport | None:
        if self._context is None:
            return PlainTransport(sock, peer, self._sweeper)
        transport = TlsTransport(sock, peer, self._context)
        try:
            await transport.handshake()
        except (Gone, Stalled) as error:
            log.debug("%s: %s", peer, error)
            with trio.CancelScope(shield=True):
                await transport.close(linger=False)
            return None
        return transport
