"""Slow and silent clients at the S3 endpoint, on a clock that runs as fast as the test."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest
import trio
from trio.testing import MockClock

from kvfs import limits
from kvfs._native.s3.receiver import Receiver
from kvfs.http.connection import Connection
from kvfs.http.http_exchange import BodyLost, Exchange
from kvfs.http.transports import Gone, PlainTransport, Stalled, Sweeper

Outcome = list[str]


@asynccontextmanager
async def served(
    application: Callable[[Exchange], Awaitable[None]],
) -> AsyncIterator[tuple[trio.SocketStream, trio.Event]]:
    """A client's stream, and the event of the connection's end."""
    ours, theirs = socket.socketpair()
    tcp = _Pair(ours)
    ended = trio.Event()

    async def serve() -> None:
        await Connection(PlainTransport(tcp, "test", sweeper), application, lambda *_: ([], b"")).serve()
        ended.set()

    sweeper = Sweeper()
    theirs.setblocking(False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sweeper.run)
        nursery.start_soon(serve)
        client = trio.SocketStream(trio.socket.from_stdlib_socket(theirs))
        yield client, ended
        await client.aclose()
        nursery.cancel_scope.cancel()


class _Pair(socket.socket):
    """A Unix pair that takes TCP's options."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(fileno=sock.detach())

    def setsockopt(self, level: int, *_: object) -> None:
        assert level == socket.IPPROTO_TCP


async def read_in_pieces(exchange: Exchange) -> None:
    memory = memoryview(bytearray(65536))
    while await exchange.receive_into(memory):
        pass


async def read_into_a_file(exchange: Exchange) -> None:
    with tempfile.TemporaryFile() as file:
        assert await exchange.receive_file(file.fileno(), Receiver(True))


Read = Callable[[Exchange], Awaitable[None]]
both_ways = pytest.mark.parametrize("read", [read_in_pieces, read_into_a_file])


async def read_all(exchange: Exchange, read: Read = read_in_pieces) -> None:
    try:
        await read(exchange)
    except (Stalled, BodyLost) as error:
        exchange.keep_alive = False
        await exchange.respond(400, [], type(error).__name__.encode())
    else:
        await exchange.respond(200, [])


@pytest.mark.parametrize(
    ("sent", "at_least_s"),
    [(b"", limits.FIRST_BYTE_S), (b"GET / HT", limits.HEAD_TIMEOUT_S), (b"\r\n\r\n", limits.FIRST_BYTE_S)],
)
async def test_a_silent_client_is_cut_off(sent: bytes, at_least_s: float, autojump_clock: MockClock) -> None:
    async with served(read_all) as (client, ended):
        if sent:
            await client.send_all(sent)
        began = trio.current_time()
        await ended.wait()
        assert at_least_s <= trio.current_time() - began <= at_least_s + 4


async def test_a_connection_is_kept_after_its_first_request(autojump_clock: MockClock) -> None:
    async with served(read_all) as (client, ended):
        await client.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await client.receive_some()).startswith(b"HTTP/1.1 200")
        began = trio.current_time()
        await ended.wait()
        assert limits.KEEP_ALIVE_S <= trio.current_time() - began <= limits.KEEP_ALIVE_S + 4


async def test_a_head_a_byte_at_a_time_has_one_deadline(autojump_clock: MockClock) -> None:
    async with served(read_all) as (client, ended):
        began = trio.current_time()
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while True:
                await client.send_all(b"X")
                await trio.sleep(2)
        await ended.wait()
        assert trio.current_time() - began < limits.HEAD_TIMEOUT_S + 6


@both_ways
async def test_a_body_that_stops_gets_an_error(autojump_clock: MockClock, read: Read) -> None:
    async with served(partial(read_all, read=read)) as (client, _):
        await client.send_all(b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc")
        began = trio.current_time()
        answer = await client.receive_some()
        assert answer.startswith(b"HTTP/1.1 400")
        assert answer.endswith(b"Stalled")
        assert limits.BODY_STALL_S <= trio.current_time() - began <= limits.BODY_STALL_S + 2


@both_ways
async def test_a_body_that_ends_early_gets_an_error(autojump_clock: MockClock, read: Read) -> None:
    async with served(partial(read_all, read=read)) as (client, _):
        await client.send_all(b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc")
        await client.send_eof()
        answer = await client.receive_some()
        assert answer.endswith(b"BodyLost")


@both_ways
async def test_a_trickle_ends_at_the_least_rate(autojump_clock: MockClock, read: Read) -> None:
    async with served(partial(read_all, read=read)) as (client, _):
        await client.send_all(b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
        began = trio.current_time()
        answer = b""

        async def trickle() -> None:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                while True:
                    await client.send_all(b"x" * 100)
                    await trio.sleep(5)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trickle)
            answer = await client.receive_some()
            nursery.cancel_scope.cancel()
        assert answer.endswith(b"Stalled")
        assert limits.BODY_GRACE_S <= trio.current_time() - began < 2 * limits.BODY_GRACE_S


async def test_a_reader_that_takes_nothing_is_cut_off(autojump_clock: MockClock) -> None:
    seen: Outcome = []

    async def much(exchange: Exchange) -> None:
        try:
            await exchange.respond(200, [], bytes(64 << 20))
        except (Stalled, Gone) as error:
            seen.append(type(error).__name__)
            raise

    async with served(much) as (client, ended):
        await client.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        began = trio.current_time()
        await ended.wait()
        assert seen == ["Stalled"]
        assert trio.current_time() - began <= limits.BODY_STALL_S + 2
