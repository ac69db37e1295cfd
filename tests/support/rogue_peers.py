"""Machines that break the rules: servers that say what a test wants, askers that send it, a proxy between honest ones.

Responsibility: the greeting as an honest machine does it, and everything after it by the test. Concurrency: trio tasks.
"""

from __future__ import annotations

import os
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import trio

from kvfs.errors import ProtocolError
from kvfs.keys import split_keys
from tests.support.certificates import ClusterTls
from tests.support.machines import SECRET
from tiers.remote.wire import BLOCKS, HELLO_BYTES, PROOF_BYTES, WELCOME_BYTES, Hello, Proofs, decode_hello

REQUEST = struct.Struct("<IHHIIQ16s")
WANT = struct.Struct("<16sQ")
ITEM = struct.Struct("<IIQIIQQ16sQ")
MATCHED = struct.Struct("<IIQ")
REQUEST_MAGIC, ITEM_MAGIC, MATCHED_MAGIC = 0x5152564B, 0x5449564B, 0x414D564B
READ, MATCH = 1, 2
STORE_ID = b"a rogue's store."

Serve = Callable[[trio.SocketStream], Awaitable[None]]
Answer = Callable[[trio.SocketStream, int, Sequence[bytes]], Awaitable[None]]
"""Answers a READ: stream, number, digests."""


async def receive(stream: trio.abc.ReceiveStream, count: int) -> bytes:
    """Receive exactly so many bytes, fewer at the end of the stream."""
    data = b""
    with suppress(trio.BrokenResourceError):  # closed with bytes unread
        while len(data) < count and (some := await stream.receive_some(count - len(data))):
            data += some
    return data


async def send_last(stream: trio.SocketStream, data: bytes) -> None:
    """Send the last bytes to who may have closed already."""
    with suppress(trio.BrokenResourceError):
        await stream.send_all(data)
        await stream.send_eof()


async def welcome(stream: trio.abc.Stream, secret: bytes = SECRET) -> Hello:
    """Greet an asker, as a server does that knows this secret."""
    hello = decode_hello(await receive(stream, HELLO_BYTES))
    proofs = Proofs(secret, hello, os.urandom(32))
    await stream.send_all(proofs.server_nonce)
    await receive(stream, PROOF_BYTES)
    await stream.send_all(proofs.welcome(STORE_ID))
    return hello


async def ask(address: str, secret: bytes = SECRET, purpose: int = BLOCKS) -> tuple[trio.SocketStream, bytes]:
    """Greet a server, as an asker does that knows this secret; return what it said last."""
    host, _, port = address.rpartition(":")
    stream = await trio.open_tcp_stream(host, int(port))
    return stream, await greet(stream, secret, purpose)


async def greet(stream: trio.abc.Stream, secret: bytes = SECRET, purpose: int = BLOCKS) -> bytes:
    """Greet a server over a stream; return what it said last."""
    hello = Hello(STORE_ID, os.urandom(32), purpose)
    await stream.send_all(hello.encode())
    proofs = Proofs(secret, hello, await receive(stream, 32))
    await stream.send_all(proofs.of_asker())
    return await receive(stream, WELCOME_BYTES)


async def next_request(stream: trio.SocketStream) -> tuple[int, int, list[tuple[bytes, int]]]:
    """Return (kind, number, wants) of the next request; a MATCH's wants have no room."""
    magic, kind, _, count, _, number, _ = REQUEST.unpack(await receive(stream, REQUEST.size))
    assert magic == REQUEST_MAGIC
    if kind == MATCH:
        body = await receive(stream, 16 * count)
        return kind, number, [(key, 0) for key in split_keys(body)]
    body = await receive(stream, WANT.size * count)
    return kind, number, list(WANT.iter_unpack(body))


def matched(number: int, *sizes_bytes: int) -> bytes:
    """Encode the answer to a MATCH."""
    sizes = b"".join(size_bytes.to_bytes(8, "little") for size_bytes in sizes_bytes)
    return MATCHED.pack(MATCHED_MAGIC, len(sizes_bytes), number) + sizes


def having_all(size_bytes: int, answer: Answer) -> Serve:
    """Make a server that says it has every block, all of one size, and answers reads as a test wants."""

    async def serve(stream: trio.SocketStream) -> None:
        await welcome(stream)
        while True:
            kind, number, wants = await next_request(stream)
            if kind == MATCH:
                await stream.send_all(matched(number, *[size_bytes] * len(wants)))
            else:
                await answer(stream, number, [digest for digest, _ in wants])

    return serve


def item(number: int, index: int, size_bytes: int, checksum: int, *, status: int = 0, **wrong: int) -> bytes:
    """Encode the head of an item, with some fields wrong."""
    magic, reserved = wrong.get("magic", ITEM_MAGIC), wrong.get("reserved", 0)
    return ITEM.pack(magic, status, number, index, 2, size_bytes, checksum, bytes(16), reserved)


def rogue_context(purpose: ssl.Purpose, tls: ClusterTls) -> ssl.SSLContext:
    """A context of Python's ssl with a machine's certificate."""
    context = ssl.create_default_context(purpose, cafile=tls.authorities)
    context.check_hostname = False
    context.load_cert_chain(tls.certificate, tls.key)
    return context


def serve_tls(tls: ClusterTls, serve: Callable[[trio.abc.Stream], Awaitable[None]]) -> Serve:
    """Make a server that is a rogue inside TLS."""
    context = rogue_context(ssl.Purpose.CLIENT_AUTH, tls)

    async def secure(stream: trio.SocketStream) -> None:
        await serve(trio.SSLStream(stream, context, server_side=True, https_compatible=True))

    return secure


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[str]:
    """Listen, and have `serve` attend to each connection; yield the address."""

    async def attend(stream: trio.SocketStream) -> None:
        try:
            async with stream:
                await serve(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError, struct.error, ProtocolError):
            pass  # who asks may be cancelled within the greeting

    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, attend, [listener])
        yield f"127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


class Proxy:
    """Stands between an asker and a server, and does to the server's bytes what the test says."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self.cut_after: int | None = None
        """Close when so many bytes of the server have passed."""
        self.flip_at: int | None = None
        """Change the byte at this place of what the server says."""
        self.stall_after: int | None = None
        """Pass nothing any more after so many bytes, and keep the connection."""

    async def serve(self, stream: trio.SocketStream) -> None:
        async with await trio.open_tcp_stream(self._host, self._port) as server, trio.open_nursery() as both:
            both.start_soon(self._forth, stream, server)
            await self._back(server, stream)
            both.cancel_scope.cancel()

    async def _forth(self, asker: trio.SocketStream, server: trio.SocketStream) -> None:
        async for data in asker:
            await server.send_all(data)
        await server.send_eof()

    async def _back(self, server: trio.SocketStream, asker: trio.SocketStream) -> None:
        passed = 0
        async for data in server:
            some = bytearray(data)
            if self.flip_at is not None and passed <= self.flip_at < passed + len(some):
                some[self.flip_at - passed] ^= 1
            for bound in (self.cut_after, self.stall_after):
                if bound is not None and passed + len(some) > bound:
                    await asker.send_all(some[: bound - passed])
                    if bound == self.stall_after:
                        await trio.sleep_forever()
                    return
            await asker.send_all(some)
            passed += len(some)
