"""Whose end the proxy's watch of clients notices, request after request and connection after connection."""

from __future__ import annotations

import socket

import trio
import trio.testing

from kvfs.http.head import parse_head
from kvfs.http.http_exchange import Exchange
from kvfs.http.input_buffer import InputBuffer
from kvfs.http.transports import PlainTransport, Sweeper
from scheduler.proxy.client_watch import ClientWatch
from tests.support.waits import until

HEAD = parse_head(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\n\r\n")


class Served:
    """One connection of a client, and what the proxy has of it."""

    def __init__(self, listener: socket.socket) -> None:
        self.client = socket.create_connection(listener.getsockname())
        self._socket = listener.accept()[0]
        self._transport = PlainTransport(self._socket, "test", Sweeper())
        self._scope = trio.CancelScope()

    def exchange(self) -> Exchange:
        """Return its next request."""
        return Exchange(HEAD, self._transport, InputBuffer(self._transport), scope=self._scope)

    def close(self) -> None:
        self._socket.close()
        self.client.close()


async def test_clients_that_go_away_are_noticed_whoever_had_their_descriptors_before() -> None:
    watch = ClientWatch()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = Served(listener)
        descriptor = watch.add(before.exchange())
        watch.remove(descriptor)
        before.close()
        served = Served(listener)
        for _ in range(2):
            exchange = served.exchange()
            assert watch.add(exchange) == descriptor, "the kernel gives the lowest one that is free"
            watch.remove(descriptor)
        watch.add(exchange)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.run)
            served.client.close()
            await until(lambda: exchange.abandoned)
            nursery.cancel_scope.cancel()
        served.close()


async def test_an_end_that_is_noticed_between_two_requests_counts_in_the_next() -> None:
    """A client may end its sending half behind requests that it sent ahead: it is asked in each whether it is there."""
    watch = ClientWatch()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        served = Served(listener)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.run)
            watch.remove(watch.add(served.exchange()))
            served.client.shutdown(socket.SHUT_WR)
            served.client.settimeout(10)
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(2):
                descriptor = watch.add(served.exchange())
                said = await trio.to_thread.run_sync(served.client.recv, 100)
                assert said == b"HTTP/1.1 100 Continue\r\n\r\n"
                watch.remove(descriptor)
            nursery.cancel_scope.cancel()
        served.close()
