"""One connection to another machine while the event loop has it: a socket, or a TLS session over one.

Responsibility: bytes there and back without blocking, and handing the descriptor, with its session, to native threads.

Invariants: a connection is closed, or handed over, by who made it; what took it closes it. A session that failed is
never used again. Concurrency: the service's trio thread; one task at a time.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

import trio

from kvfs.errors import ProtocolError

if TYPE_CHECKING:
    from typing_extensions import CapsuleType

T = TypeVar("T")


class Handed(Protocol):
    """Is made here, and taken by native threads."""

    @property
    def capsule(self) -> CapsuleType:
        """Return it as native takers want it."""

    def take(self) -> None:
        """Leave it to who has taken it."""


class TlsSession(Handed, Protocol):
    """Encrypts: `kvfs._native.remote.tls.Session`, whose module is loaded where machines have certificates."""

    def handshake(self) -> bool:
        """Return whether both sides have shown their certificates. Raises OSError, NotPermitted, ProtocolError."""

    def send(self, data: bytes) -> int | None:
        """Send some bytes; return how many, None where it would block. Raises OSError, ProtocolError."""

    def receive(self, most: int) -> bytes | None:
        """Return bytes that came, none at the end; None where it would block. Raises OSError, ProtocolError."""

    @property
    def wants_room(self) -> bool:
        """Return whether what would block waits for the socket to take bytes, and not for some to come."""


class TlsContext(Protocol):
    """Says what this machine shows, and whom it believes: `kvfs._native.remote.tls.Context`."""

    @property
    def ends_s(self) -> int:
        """Return until when the certificate counts, in seconds since 1970."""

    def session(self, socket: int, serves: bool) -> TlsSession:
        """Return a session over a connected socket."""


class Connection:
    """Sends and receives."""

    def __init__(self, peer: trio.socket.SocketType) -> None:
        """Take over a socket."""
        self._peer = peer
        self._session: TlsSession | None = None

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close the connection where the block raises or is cancelled; else it is whose the block made it."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    async def secure(self, context: TlsContext, *, serves: bool) -> None:
        """Have both sides show their certificates. Raises OSError, NotPermitted of one that the authority has not
        signed, ProtocolError."""
        session = context.session(self._peer.fileno(), serves)
        try:
            while not session.handshake():
                await self._ready(session)
        except ConnectionResetError:
            raise ProtocolError("it closed the connection within the TLS handshake") from None
        self._session = session

    async def send_all(self, data: bytes) -> None:
        """Send all bytes. Raises OSError, ProtocolError."""
        left = memoryview(data)
        while left:
            left = left[await self._send_some(left) :]

    async def receive_some(self, most: int) -> bytes:
        """Receive some bytes, none at the end of the stream. Raises OSError, ProtocolError."""
        if self._session is None:
            return await self._peer.recv(most)
        await trio.lowlevel.checkpoint()
        while (data := self._session.receive(most)) is None:
            await self._ready(self._session)
        return data

    async def receive_all(self, count: int, during: str = "within the greeting") -> bytes:
        """Receive exactly so many bytes. Raises OSError, ProtocolError where the peer ends before."""
        data = b""
        while len(data) < count:
            some = await self.receive_some(count - len(data))
            if not some:
                raise ProtocolError(f"it closed the connection {during}")
            data += some
        return data

    @property
    def is_encrypted(self) -> bool:
        """Return whether all bytes go through a session."""
        return self._session is not None

    def give_up_after(self, silence_s: float) -> None:
        """Have the kernel end the connection once what was sent is not acknowledged for so long."""
        self._peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence_s * 1000))

    def prepare_to_serve(self) -> None:
        """Set what the threads that serve set: nothing waits to be sent, and the kernel finds who is gone."""
        self._peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
            self._peer.setsockopt(socket.IPPROTO_TCP, option, value)

    def hand_over(
        self, taker: Callable[[int, CapsuleType | None, CapsuleType | None], T], fabric: Handed | None = None
    ) -> T:
        """Return what a native taker of descriptor, session and fabric returns; it has all from then on, unless it
        raises."""
        session = self._session
        parts = [None if part is None else part.capsule for part in (session, fabric)]
        taken = taker(self._peer.fileno(), *parts)
        self._peer.detach()
        if fabric is not None:
            fabric.take()
        if session is not None:
            session.take()
        return taken

    def close(self) -> None:
        """Close the connection. Closing twice is harmless."""
        self._peer.close()
        self._session = None

    async def _send_some(self, data: memoryview) -> int:
        if self._session is None:
            return await self._peer.send(data)
        some = bytes(data)
        while (sent := self._session.send(some)) is None:
            await self._ready(self._session)
        return sent

    async def _ready(self, session: TlsSession) -> None:
        if session.wants_room:
            await trio.lowlevel.wait_writable(self._peer)
        else:
            await trio.lowlevel.wait_readable(self._peer)
