"""The door for other machines: greetings, and the native threads that serve who has proved the secret.

Responsibility: accept, verify, hand connections to `kvfs._native.remote.server`, or to `tiers.remote.pulls`; bring up
what only NVMe has and a peer asks for, and say whose it is there; keep the threads' list of namespaces as the store's
buckets are; count what peers have read as hits.

Invariants: limits.MAX_REMOTE_GREETINGS connections at most are not verified yet, limits.MAX_REMOTE_CONNECTIONS are
served. Each that is refused or ends badly is a count and a line in the log that names the peer.
Concurrency: the service's trio thread; the serving threads never run Python.
"""

from __future__ import annotations

import errno
import logging
import os
from typing import Any

import trio

from kvfs import limits
from kvfs._native.remote.server import Server
from kvfs.errors import ConfigError, DeadlinePassed, KvfsError, NotFound
from kvfs.keys import split_keys
from tiers.model.objects import Change
from tiers.model.tier import Kind, StoreKey
from tiers.remote.connections.connection import Connection
from tiers.remote.connections.fabric import Fabric, FabricWorker, decline
from tiers.remote.connections.identity import Identity
from tiers.remote.greeting import accept
from tiers.remote.pulls import Pulls
from tiers.remote.wire import FABRIC, PULLS
from tiers.store.store import Store

log = logging.getLogger("kvfs.remote")

_RETRY_PAUSE_S = 0.05
"""Out of descriptors or memory: the connection waits in the backlog meanwhile."""
_HITS_AT_ONCE = 256
"""Hits counted in one turn of the event loop: 0.7 ms of its time, at 2.6 us each (blocks in DRAM, no other tier)."""


async def listen(host: str, port: int) -> list[trio.SocketListener]:
    """Listen for other machines. Raises ConfigError."""
    try:
        return await trio.open_tcp_listeners(port, host=host or None)
    except OSError as error:
        raise ConfigError(f"[cluster] listen = '{host}:{port}': {error.strerror or error}") from None


class Serving:
    """Serves the blocks of one store to other machines."""

    def __init__(self, store: Store, own: Identity, pulls: Pulls, fabric: Fabric | None = None) -> None:
        self._store, self._own, self._pulls, self._fabric = store, own, pulls, fabric
        self._server = Server(store.table, store.dram.directory)
        self._connections: dict[int, str] = {}
        """The peer's address, by the native connection's number."""
        self._greetings = trio.CapacityLimiter(limits.MAX_REMOTE_GREETINGS)
        self._refused = self._lifts = 0
        self._namespaces: dict[bytes, bytes | None] = {}
        """The buckets that the threads' list was made of, and what each is bound to."""
        self._bind()
        store.listeners.append(self._on_change)

    async def run(self, listeners: list[trio.SocketListener]) -> None:
        """Serve until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._attend, nursery)
                nursery.start_soon(self._count_hits)
                for listener in listeners:
                    nursery.start_soon(self._accept_loop, listener, nursery)
        finally:
            self._store.listeners.remove(self._on_change)
            self._server.close()
            for listener in listeners:
                listener.socket.close()

    def status(self) -> dict[str, Any]:
        """Describe what was served, as JSON values."""
        return {
            "connections": len(self._connections),
            "refused": self._refused,
            "lifts": self._lifts,
            **self._pulls.status(),
            **{f"served_{name}": count for name, count in self._server.counts().items()},
        }

    async def _accept_loop(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        while True:
            await self._greetings.acquire_on_behalf_of(token := object())
            try:
                peer, address = await listener.socket.accept()
            except OSError as error:  # of the connection, or of this process's descriptors
                self._greetings.release_on_behalf_of(token)
                log.warning("cannot accept a machine: %s", error)
                await trio.sleep(_RETRY_PAUSE_S)
                continue
            nursery.start_soon(self._greet, nursery, peer, f"{address[0]}:{address[1]}", address[0], token)

    async def _greet(
        self, nursery: trio.Nursery, peer: trio.socket.SocketType, name: str, host: str, token: object
    ) -> None:
        try:
            if len(self._connections) >= limits.MAX_REMOTE_CONNECTIONS:
                peer.close()
                raise KvfsError(f"{len(self._connections)} connections are open, which is the limit")
            connection = Connection(peer)
            hello = await accept(connection, self._own)
            if hello.purpose == PULLS:
                nursery.start_soon(self._pulls.serve, connection, hello.store_id, name)
                return
            with connection.closed_on_error():
                fabric = await self._offer(connection) if hello.purpose == FABRIC else None
                number = connection.hand_over(self._server.open, fabric)
            self._connections[number] = name
        except (KvfsError, OSError) as error:
            self._refused += 1
            log.warning("%s: refused: %s", name, error, extra={"cause": host})
        finally:
            self._greetings.release_on_behalf_of(token)

    async def _offer(self, connection: Connection) -> FabricWorker | None:
        """Tell a peer that asks for it how bytes go to it by this machine's fabric, or that there is none."""
        with trio.move_on_after(limits.REMOTE_GREETING_S):
            if self._fabric is not None:
                return await self._fabric.serve(connection)
            await decline(connection)
            return None
        raise DeadlinePassed(f"it took no offer within {limits.REMOTE_GREETING_S:g} s")

    async def _attend(self, nursery: trio.Nursery) -> None:
        """Bring up what peers wait for, answer questions, and close connections that have ended."""
        while True:
            await trio.lowlevel.wait_readable(self._server.fileno())
            for digest, namespace in self._server.take_lifts():
                nursery.start_soon(self._lift, digest, namespace)
            for number in list(self._connections):
                if (asked := self._server.take_question(number)) is not None:
                    question, namespace, digests = asked
                    self._server.answer(number, question, self._leading(digests, namespace))
                if (error := self._server.reap(number)) is not None:
                    self._ended(self._connections.pop(number), error)

    async def _count_hits(self) -> None:
        """Count blocks that peers have read as hits: each is one as much as a client's, since a block that many
        machines ask this one for is worth keeping here."""
        while True:
            await trio.sleep(limits.REMOTE_HITS_S)
            while digests := self._server.take_hits(_HITS_AT_ONCE):
                for digest in split_keys(digests):
                    if self._store.block_bucket(digest) is not None:
                        self._store.touch(StoreKey(Kind.BLOCK, digest))
                await trio.lowlevel.checkpoint()

    def _ended(self, name: str, error: int) -> None:
        if error == errno.EPROTO:
            log.warning("%s: cut off: it broke the protocol", name, extra={"cause": name.rpartition(":")[0]})
        elif error:
            log.info("%s: connection ended: %s", name, os.strerror(error))

    def _leading(self, digests: bytes, namespace: bytes) -> int:
        """Return how many blocks, from the first on, are in the bucket of a namespace."""
        each = split_keys(digests)
        return next((at for at, digest in enumerate(each) if not self._is_of(digest, namespace)), len(each))

    def _is_of(self, digest: bytes, namespace: bytes) -> bool:
        bucket = self._store.block_bucket(digest)
        return bucket is not None and self._namespaces.get(bucket) == namespace

    async def _lift(self, digest: bytes, namespace: bytes) -> None:
        """Bring a block up while a peer waits for it."""
        self._lifts += 1
        try:
            if not self._is_of(digest, namespace):
                raise NotFound(f"no block {digest.hex()} in the namespace {namespace.hex()}")
            with trio.move_on_after(limits.REMOTE_LIFT_WAIT_S):
                await self._store.load(self._store.lookup_block(digest), uid=os.geteuid())
        except (KvfsError, OSError) as error:
            log.debug("block %s was not brought up: %s", digest.hex(), error)
        finally:
            self._lifts -= 1
            self._server.lifted(digest, namespace)

    def _on_change(self, change: Change) -> None:
        """Follow the buckets: what is new shows with its first block, what changes or goes says so itself."""
        if change.name is not None and (not change.name.key or change.name.bucket not in self._namespaces):
            self._bind()

    def _bind(self) -> None:
        buckets = self._store.buckets()
        self._namespaces = {bucket.name: bucket.namespace for bucket in buckets}
        self._server.bind([(b.namespace, b.bucket_id) for b in buckets if b.namespace is not None])
