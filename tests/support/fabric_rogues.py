"""Machines that break the rules of bytes by a fabric, and a proxy that changes or holds back what honest ones say.

Responsibility: the messages of both ends as a test wants them; pieces themselves are those of honest workers.
Concurrency: trio tasks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from struct import Struct

import trio

from tests.support.machines import Machine
from tests.support.rogue_peers import READ, Serve, ask, item, matched, next_request, receive, welcome
from tiers.remote.connections.fabric import Fabric, FabricWorker, Offer
from tiers.remote.wire import FABRIC

OFFER = Struct("<4sHHIIQQ")
PIECES = Struct("<IIQ")
TAKEN = 0x5450564B
PIECE_BYTES = 256 << 10
IN_PIECES = 4
BY_FABRIC = 2


def taken(count: int, magic: int = TAKEN, reserved: int = 0) -> bytes:
    """Say how many pieces are here."""
    return PIECES.pack(magic, reserved, count)


async def receive_offer(stream: trio.SocketStream) -> bytes:
    """Receive what a machine offers."""
    head = await receive(stream, OFFER.size)
    return head + await receive(stream, OFFER.unpack(head)[3])


@asynccontextmanager
async def offered(server: Machine) -> AsyncIterator[tuple[trio.SocketStream, bytes]]:
    """Greet a machine, as an asker does that has a fabric; yield the connection and what is offered."""
    stream, _ = await ask(server.address, purpose=FABRIC)
    async with stream:
        yield stream, await receive_offer(stream)


@asynccontextmanager
async def asking(server: Machine, fabric: Fabric) -> AsyncIterator[tuple[trio.SocketStream, FabricWorker]]:
    """Greet a machine, and take what it offers."""
    async with offered(server) as (stream, offer):
        worker = fabric.context.worker()
        worker.connect(offer[OFFER.size :], 1 << 20)
        await stream.send_all(Offer(fabric.version, worker.address, 1 << 20).encode())
        await trio.to_thread.run_sync(worker.await_greeting, 5)
        try:
            yield stream, worker
        finally:
            worker.close()


def offering(offer: bytes) -> Serve:
    """Make a server that offers these bytes, has no blocks, and counts as up."""

    async def serve(stream: trio.SocketStream) -> None:
        hello = await welcome(stream)
        if hello.purpose == FABRIC:
            await stream.send_all(offer)
            await receive_offer(stream)
        while True:
            kind, number, wants = await next_request(stream)
            if kind == READ:
                await stream.send_all(b"".join(item(number, at, 0, 0, status=1) for at in range(len(wants))))
            else:
                await stream.send_all(matched(number))

    return serve


class Gate:
    """Stands between an asker and a machine, and passes what the asker says of its pieces once it may."""

    def __init__(self, target: str, change: Callable[[bytes], bytes] = bytes) -> None:
        """`change` does what a test wants to what the machine says."""
        self._host, _, port = target.rpartition(":")
        self._port, self._change = int(port), change
        self.may_pass = trio.Event()
        self.may_pass.set()
        self.held = trio.Event()
        """Set once something is held back."""
        self.ends = trio.Event()
        """Ends both connections."""

    def shut(self) -> None:
        """Hold back what the asker says of its pieces."""
        self.may_pass = trio.Event()

    async def serve(self, stream: trio.SocketStream) -> None:
        async with await trio.open_tcp_stream(self._host, self._port) as server, trio.open_nursery() as both:
            both.start_soon(self._forth, stream, server)
            both.start_soon(self._back, server, stream)
            await self.ends.wait()
            both.cancel_scope.cancel()

    async def _back(self, server: trio.SocketStream, asker: trio.SocketStream) -> None:
        async for data in server:
            await asker.send_all(self._change(bytes(data)))
        if self.may_pass.is_set():
            self.ends.set()

    async def _forth(self, asker: trio.SocketStream, server: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):  # the machine may have ended it meanwhile
            async for data in asker:
                if data[:4] == TAKEN.to_bytes(4, "little") and not self.may_pass.is_set():
                    self.held.set()
                    await self.may_pass.wait()
                await server.send_all(data)
        self.ends.set()
