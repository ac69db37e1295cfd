"""Greetings over TCP: a connection to another machine that both sides have proved.

Responsibility: the exchange of `tiers.remote.wire`'s messages, at both ends. Whoever does not prove the secret is told
nothing but a nonce.

Invariants: a greeting ends within limits.REMOTE_GREETING_S; a socket that was not returned is closed. A machine with
this one's store id is this one only where its own door has seen the greeting.
Concurrency: the service's trio thread.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field

import trio

from kvfs import limits
from kvfs.errors import DeadlinePassed, NotPermitted, ProtocolError, Unsupported
from tiers.remote.wire import (
    BLOCKS,
    HELLO_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    WELCOME_BYTES,
    Hello,
    Proofs,
    decode_hello,
)


@dataclass(frozen=True, slots=True)
class Identity:
    """Says what this machine proves, and as whom."""

    store_id: bytes
    secret: bytes
    unseen: set[bytes] = field(default_factory=set, compare=False)
    """Nonces of the greetings that this machine makes now and its own door has not seen."""


async def connect(host: str, port: int, own: Identity, purpose: int = BLOCKS) -> tuple[socket.socket, bytes]:
    """Connect to a machine that knows the secret; return the socket and its store's id.

    Raises OSError, DeadlinePassed, ProtocolError, NotPermitted; Unsupported where it has no such connections.
    """
    with trio.move_on_after(limits.REMOTE_GREETING_S):
        stream = await trio.open_tcp_stream(host, port)
        try:
            store_id = await _ask(stream.socket, own, purpose)
            stream.socket.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.REMOTE_SILENCE_S * 1000)
            )
            return _taken(stream.socket), store_id
        except BaseException:
            stream.socket.close()
            raise
    raise DeadlinePassed(f"no greeting within {limits.REMOTE_GREETING_S:g} s")


async def _ask(peer: trio.socket.SocketType, own: Identity, purpose: int) -> bytes:
    hello = Hello(own.store_id, os.urandom(NONCE_BYTES), purpose)
    own.unseen.add(hello.nonce)
    try:
        await send_all(peer, hello.encode())
        proofs = Proofs(own.secret, hello, await _receive_nonce(peer, purpose))
        await send_all(peer, proofs.of_asker())
        store_id = proofs.check_welcome(await receive_all(peer, WELCOME_BYTES))
        if store_id == own.store_id and hello.nonce in own.unseen:
            raise NotPermitted("its data directory is a copy of this machine's: give it one of its own")
        return store_id
    finally:
        own.unseen.discard(hello.nonce)


async def _receive_nonce(peer: trio.socket.SocketType, purpose: int) -> bytes:
    """Receive what a machine answers a greeting with. Raises Unsupported where it ends one for pulls instead."""
    try:
        return await receive_all(peer, NONCE_BYTES)
    except ProtocolError:
        if purpose == BLOCKS:
            raise
        raise Unsupported(
            "it fetches nothing when asked: its kvfs is of an earlier version, or it has no room for a connection"
        ) from None


async def accept(peer: trio.socket.SocketType, own: Identity) -> tuple[socket.socket, Hello]:
    """Verify who has connected; return the socket and the greeting. Raises as `connect`, and FormatMismatch."""
    with trio.move_on_after(limits.REMOTE_GREETING_S):
        try:
            hello = decode_hello(await receive_all(peer, HELLO_BYTES))
            proofs = Proofs(own.secret, hello, os.urandom(NONCE_BYTES))
            await send_all(peer, proofs.server_nonce)
            proofs.check_asker(await receive_all(peer, PROOF_BYTES))
            own.unseen.discard(hello.nonce)
            await send_all(peer, proofs.welcome(own.store_id))
            return _taken(peer), hello
        except BaseException:
            peer.close()
            raise
    raise DeadlinePassed(f"no greeting within {limits.REMOTE_GREETING_S:g} s")


def _taken(peer: trio.socket.SocketType) -> socket.socket:
    """Take a socket out of trio's hands."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return socket.socket(fileno=peer.detach())


async def send_all(peer: trio.socket.SocketType, data: bytes) -> None:
    """Send all bytes. Raises OSError."""
    left = memoryview(data)
    while left:
        left = left[await peer.send(left) :]


async def receive_all(peer: trio.socket.SocketType, count: int, during: str = "within the greeting") -> bytes:
    """Receive exactly so many bytes. Raises OSError, ProtocolError where the peer ends before."""
    data = b""
    while len(data) < count:
        some = await peer.recv(count - len(data))
        if not some:
            raise ProtocolError(f"it closed the connection {during}")
        data += some
    return data
