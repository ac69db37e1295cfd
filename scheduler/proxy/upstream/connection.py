"""One HTTP/1.1 connection to an engine or a Conductor: a request out, its answer in.

Responsibility: connect, by TLS where the URL says https, send, parse answers with httptools (llhttp), and know whether
the connection can be used again.

Invariants:
- Every failure is an `EngineFailed`, so that no failure of an engine is taken for one of a client.
- A head has at most limits.MAX_HEAD_BYTES. A body is handed over as it comes: what one receive gave is one piece.
- A connection is used again only after a whole answer with nothing behind it.

Concurrency: one task for each connection. All receive into one buffer, which is parsed before any other task runs.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic

import httptools
import trio

from kvfs import limits
from kvfs.http.server_place import Place
from kvfs.http.tls import TlsTransport, client_context
from kvfs.http.transports import Buffer, Gone, PlainTransport, Stalled, Sweeper, Transport

_scratch = memoryview(bytearray(limits.PROXY_BODY_PIECE_BYTES))


class EngineFailed(Exception):
    """An engine died, stalled, or sent what is no answer. `alive`: it may serve other requests."""

    def __init__(self, message: str, *, alive: bool = False) -> None:
        super().__init__(message)
        self.alive = alive


class _Parser:
    """Parse the answers of one connection, one after the other.

    It and llhttp's parser hold each other, so that only the collector of cycles frees them: a pair for each answer
    would have the collector take 7 us of a request with both legs.
    """

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.restart()

    def restart(self) -> None:
        """Begin with the next answer. REQUIRES that the last one, if there is one, `persists`."""
        self.headers: list[tuple[bytes, bytes]] = []
        self.head_done = self.done = self.surplus = self.keeps_alive = False
        self.head_bytes = self.status = 0
        self.pieces: list[bytes] = []

    def on_message_begin(self) -> None:
        self.surplus = self.done

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.head_done, self.status = True, self._parser.get_status_code()
        self.keeps_alive = bool(
            self._parser.should_keep_alive()
        )  # at the end of a message llhttp has it no more

    def on_body(self, data: bytes) -> None:
        if not self.surplus:
            self.pieces.append(data)

    def on_message_complete(self) -> None:
        self.done = True

    def feed(self, data: memoryview) -> None:
        """Parse what was received. Raises EngineFailed."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.done:
                raise EngineFailed(f"it answered what is no HTTP: {error}") from None
            self.surplus = True
        self.head_bytes += 0 if self.head_done else len(data)
        if self.head_bytes > limits.MAX_HEAD_BYTES:
            raise EngineFailed(f"its answer has a head of over {limits.MAX_HEAD_BYTES} bytes")

    def feed_end(self) -> None:
        """Take the end of the stream. Raises EngineFailed unless it is what ends the body."""
        names = {name for name, _ in self.headers}
        if not self.head_done or names & {b"content-length", b"transfer-encoding"}:
            raise EngineFailed("it closed the connection before its answer was whole")
        self.done = self.surplus = True

    @property
    def persists(self) -> bool:
        return self.done and not self.surplus and self.keeps_alive


class UpstreamConnection:
    """A connection to one engine; see the module's header."""

    def __init__(self, sock: socket.socket, transport: Transport) -> None:
        self._socket, self._transport = sock, transport
        self._arrivals = select.poll()
        self._arrivals.register(sock, select.POLLIN)
        self._parser = _Parser()
        self.used_s = monotonic()
        self._answers = 0
        self._reason = ""
        self._ended = False

    @property
    def ended_unused(self) -> bool:
        """Return whether the engine closed a connection that was kept, as the next request went out."""
        return self._ended and not self._reason and self._answers > 0 and self._parser.head_bytes == 0

    @property
    def is_whole(self) -> bool:
        """Return whether the answer has ended and every piece of it was taken."""
        return self._parser.done and not self._parser.pieces

    @property
    def reusable(self) -> bool:
        """Return whether the connection may take another request after this answer."""
        return self._parser.persists

    @property
    def status(self) -> int:
        """Return the answer's status."""
        return self._parser.status

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the answer's headers, names in lower case."""
        return self._parser.headers

    def is_open(self) -> bool:
        """Return whether the engine has neither closed the connection nor sent anything unasked."""
        return not self._arrivals.poll(0)

    async def begin(self, parts: Sequence[Buffer], timeout_s: float) -> None:
        """Send a request and receive its answer's head. Raises EngineFailed."""
        parser = self._parser
        parser.restart()
        try:
            await self._transport.send(parts)
        except (Gone, Stalled) as error:
            self._ended = isinstance(error, Gone)
            raise EngineFailed(self._reason or f"it takes no request: {error}") from None
        while not parser.head_done:
            await self._receive(timeout_s)
        self._answers += 1

    async def read(self, timeout_s: float) -> bytes:
        """Receive the next piece of the body, b"" at its end. Raises EngineFailed."""
        parser = self._parser
        while not parser.pieces:
            if parser.done:
                return b""
            await self._receive(timeout_s)
        pieces, parser.pieces = parser.pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _receive(self, timeout_s: float) -> None:
        try:
            count = await self._transport.receive_into(_scratch, timeout_s, idle=True)
        except Gone as error:
            self._ended = True
            raise EngineFailed(self._reason or f"its connection broke: {error}") from None
        except Stalled:
            raise EngineFailed(f"nothing came for {timeout_s:g} s") from None
        if count:
            self._parser.feed(_scratch[:count])
        else:
            self._ended = True
            if self._reason:
                raise EngineFailed(self._reason)
            self._parser.feed_end()

    def end(self, reason: str) -> None:
        """Have whoever waits here for the engine fail with `reason`."""
        self._reason = reason
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    async def close(self) -> None:
        """Close at once, which ends what the engine does for the request."""
        await self._transport.close(linger=False)


class Dialer:
    """Connects to servers. Its waits end only while `sweeper` runs."""

    def __init__(self, authorities: Path | None = None) -> None:
        """`authorities`: a PEM file of who may sign a server's certificate; None: whom the system trusts.

        Raises ConfigError for a file that is none."""
        self._authorities = authorities
        self.sweeper = Sweeper()
        if authorities is not None:
            client_context(authorities)

    async def connect(self, place: Place) -> UpstreamConnection:
        """Connect to a server. Raises EngineFailed."""
        peer = f"{place.host}:{place.port}"
        try:
            with trio.fail_after(limits.ENGINE_CONNECT_S):
                stream = await trio.open_tcp_stream(
                    place.host, place.port, happy_eyeballs_delay=limits.ENGINE_CONNECT_S / 4
                )
                sock = socket.socket(fileno=stream.socket.detach())
                if not place.secure:
                    return UpstreamConnection(sock, PlainTransport(sock, peer, self.sweeper))
                context = client_context(self._authorities)
                return UpstreamConnection(sock, await _secure(sock, peer, context, place.host))
        except (OSError, UnicodeError, trio.TooSlowError, Gone, Stalled) as error:
            raise EngineFailed(f"it takes no connection: {str(error) or 'no answer'}") from None


async def _secure(sock: socket.socket, peer: str, context: ssl.SSLContext, name: str) -> TlsTransport:
    """Do the handshake with the server of that name; the socket is closed if it fails. Raises Gone, Stalled."""
    transport = TlsTransport(sock, peer, context, name)
    try:
        await transport.handshake()
    except BaseException:
        with trio.CancelScope(shield=True):
            await transport.close(linger=False)
        raise
    return transport
