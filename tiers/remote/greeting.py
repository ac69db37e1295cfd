"""Greetings over TCP: a connection to another machine that both sides have proved.

Responsibility: the exchange of `tiers.remote.wire`'s messages, at both ends, inside TLS where this machine has a
certificate. Whoever does not prove the secret is told nothing but a nonce.

Invariants: a greeting ends within limits.REMOTE_GREETING_S; a connection that was not returned is closed. A machine
with this one's store id is this one only where its own door has seen the greeting.
Concurrency: the service's trio thread.
"""

from __future__ import annotations

import os

import trio

from kvfs import limits
from kvfs.errors import DeadlinePassed, NotPermitted, ProtocolError, Unsupported
from tiers.remote.connections.connection import Connection
from tiers.remote.connections.identity import Identity
from tiers.remote.wire import (
    BLOCKS,
    HELLO_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    PULLS,
    WELCOME_BYTES,
    Hello,
    Proofs,
    decode_hello,
)


async def connect(host: str, port: int, own: Identity, purpose: int = BLOCKS) -> tuple[Connection, bytes]:
    """Connect to a machine that knows the secret; return the connection and its store's id.

    Raises OSError, DeadlinePassed, ProtocolError, NotPermitted; Unsupported where it has no such connections.
    """
    with trio.move_on_after(limits.REMOTE_GREETING_S):
        connection = Connection((await trio.open_tcp_stream(host, port)).socket)
        with connection.closed_on_error():
            if own.certificates is not None:
                await connection.secure(own.certificates.context, serves=False)
            store_id = await _ask(connection, own, purpose)
            connection.give_up_after(limits.REMOTE_SILENCE_S)
            return connection, store_id
    raise DeadlinePassed(f"no greeting within {limits.REMOTE_GREETING_S:g} s")


async def _ask(peer: Connection, own: Identity, purpose: int) -> bytes:
    hello = Hello(own.store_id, os.urandom(NONCE_BYTES), purpose)
    own.unseen.add(hello.nonce)
    try:
        await peer.send_all(hello.encode())
        proofs = Proofs(own.secret, hello, await _receive_nonce(peer, purpose))
        await peer.send_all(proofs.of_asker())
        store_id = proofs.check_welcome(await peer.receive_all(WELCOME_BYTES))
        if store_id == own.store_id and hello.nonce in own.unseen:
            raise NotPermitted("its data directory is a copy of this machine's: give it one of its own")
        return store_id
    finally:
        own.unseen.discard(hello.nonce)


async def _receive_nonce(peer: Connection, purpose: int) -> bytes:
    """Receive what a machine answers a greeting with. Raises Unsupported where it ends one instead that is not known to
    older ones."""
    try:
        return await peer.receive_all(NONCE_BYTES)
    except ProtocolError:
        if purpose == BLOCKS:
            raise
        what = "it fetches nothing when asked" if purpose == PULLS else "it has no UCX"
        raise Unsupported(
            f"{what}: its kvfs is of an earlier version, or it has no room for a connection"
        ) from None


async def accept(peer: Connection, own: Identity) -> Hello:
    """Verify who has connected; return the greeting. Raises as `connect`, and FormatMismatch."""
    with trio.move_on_after(limits.REMOTE_GREETING_S):
        with peer.closed_on_error():
            if own.certificates is not None:
                await peer.secure(own.certificates.context, serves=True)
            hello = decode_hello(await peer.receive_all(HELLO_BYTES))
            proofs = Proofs(own.secret, hello, os.urandom(NONCE_BYTES))
            await peer.send_all(proofs.server_nonce)
            proofs.check_asker(await peer.receive_all(PROOF_BYTES))
            own.unseen.discard(hello.nonce)
            await peer.send_all(proofs.welcome(own.store_id))
            return hello
    raise DeadlinePassed(f"no greeting within {limits.REMOTE_GREETING_S:g} s")
