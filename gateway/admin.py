"""The admin port: `/healthz` and `/metrics`, on a port of its own and without signatures.

`/healthz` answers 200 while there is a session with the service, else 503. `/metrics` is the service's own status
(`kvfs.metrics`) and this process's counters. Concurrency: one task per connection.
"""

from __future__ import annotations

from gateway.backend import Backend
from gateway.connection import Exchange, Headers
from gateway.counters import Counters
from gateway.server import Server
from kvfs.errors import KvfsError
from kvfs.metrics import exposition

_TEXT = ("Content-Type", "text/plain; charset=utf-8")
_EXPOSITION = ("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
_CONNECTIONS = 64
"""Scrapers and probes."""


class Admin:
    """See the module's header."""

    def __init__(self, backend: Backend, counters: Counters, gateway: Server) -> None:
        self._backend = backend
        self._counters = counters
        self._gateway = gateway
        self.server = Server(self._serve, _refuse, most=_CONNECTIONS)

    async def _serve(self, exchange: Exchange) -> None:
        path = exchange.head.target.partition(b"?")[0]
        if exchange.head.method not in ("GET", "HEAD"):
            await exchange.respond(405, [_TEXT, ("Allow", "GET, HEAD")], b"GET only\n")
        elif path == b"/healthz":
            connected = self._backend.is_connected
            body = b"ok\n" if connected else b"no session with the service\n"
            await exchange.respond(200 if connected else 503, [_TEXT], body)
        elif path == b"/metrics":
            await exchange.respond(200, [_EXPOSITION], (await self._metrics()).encode())
        else:
            await exchange.respond(404, [_TEXT], b"there are /healthz and /metrics\n")

    async def _metrics(self) -> str:
        own = self._counters.exposition(
            connections=self._gateway.open_connections,
            accepted=self._gateway.accepted,
            closed_silent=self._gateway.places.closed_silent,
            refused=self._gateway.places.refused,
            given_up=self._backend.room.given_up,
            connected=self._backend.is_connected,
        )
        try:
            return exposition(await self._backend.status()) + own
        except KvfsError:
            return own


def _refuse(status: int, message: str) -> tuple[Headers, bytes]:
    return [_TEXT], f"{message}\n".encode()
