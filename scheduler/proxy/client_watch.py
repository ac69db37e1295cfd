"""Clients that go away while nothing is sent to them.

Responsibility: end the connection of a client as soon as the kernel says that it was closed, also while an engine
is silent. What a client sends ahead stays unread in its socket.

Invariants:
- A client that ended its sending half alone is not gone. Both look alike until something is sent, which a closed socket
  resets: such a client is sent what it passes over, once (`Exchange.probe`).
- A client of HTTP/1.0 that ended its sending half before its answer begins cannot be asked so. Over TLS,
  where no half can be ended alone, it is gone.

Concurrency: one trio thread; one task waits for all clients, on an epoll descriptor of its own: a task or a second wait
for each request would cost 20 us, a cancel scope 8.
"""

from __future__ import annotations

import select

import trio

from kvfs.http.http_exchange import Exchange

_AT_ONCE = 64
"""Clients looked at before the event loop has a turn."""
_CLOSED = select.EPOLLHUP | select.EPOLLERR
_ENDS = select.EPOLLRDHUP | select.EPOLLONESHOT


class ClientWatch:
    """See the module's header."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._exchanges: dict[int, Exchange] = {}
        self._armed: dict[int, object] = {}
        """By descriptor, the connection whose end is still to come: a closed one leaves its descriptor to another."""

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            while True:
                await trio.lowlevel.wait_readable(self._epoll.fileno())
                for descriptor, events in self._epoll.poll(0, _AT_ONCE):
                    self._armed.pop(descriptor, None)
                    exchange = self._exchanges.get(descriptor)
                    if exchange is not None:
                        self._look_at(descriptor, exchange, events)
        finally:
            self._epoll.close()

    def _look_at(self, descriptor: int, exchange: Exchange, events: int) -> None:
        if events & _CLOSED or exchange.secure:
            exchange.abandon()
            return
        self._epoll.modify(descriptor, select.EPOLLONESHOT)  # the kernel adds what a reset gives
        exchange.probe()

    def add(self, exchange: Exchange) -> int:
        """Abandon the exchange when its client goes away; return the descriptor, for `remove`."""
        descriptor = exchange.fileno()
        self._exchanges[descriptor] = exchange
        if self._armed.get(descriptor) is not exchange.connection:
            self._armed[descriptor] = exchange.connection
            try:
                self._epoll.modify(descriptor, _ENDS)
            except FileNotFoundError:
                self._epoll.register(descriptor, _ENDS)  # takes the kernel several times as long
        return descriptor

    def remove(self, descriptor: int) -> None:
        """Look at a client no more. It stays registered until its connection closes, for its next request."""
        del self._exchanges[descriptor]
