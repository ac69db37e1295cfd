"""The admin port: `/healthz`, `/metrics` and the page of the store, on a port of its own and without signatures.

`/healthz` answers 200 while there is a session with the service, else 503. `/metrics` is the service's own status
(`kvfs.system.metrics`) and this process's counters, and so is the page at `/`, with its stream of events
(`kvfs.watch`). Concurrency: one task per connection, and the one of the stream.
"""

from __future__ import annotations

import time

import msgspec
import trio
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from gateway.app.latest_status import LatestStatus
from gateway.app.metrics import Connections, Counters, WorkerCollector
from gateway.app.worker_panels import with_worker
from gateway.backend.backend import Backend
from kvfs.errors import KvfsError
from kvfs.http.http_exchange import Exchange, Headers
from kvfs.http.server import Server
from kvfs.system.metrics import StatusCollector, exposition
from kvfs.watch.hub import Hub
from kvfs.watch.page import page_file
from kvfs.watch.panels import Snapshot
from kvfs.watch.store_panels import store_snapshot, unreachable_store
from kvfs.watch.window import Window

_TEXT = ("Content-Type", "text/plain; charset=utf-8")
_EXPOSITION = ("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)
_JSON = ("Content-Type", "application/json")
_CONNECTIONS = 64
"""The most connections, which are scrapers', probes' and watchers'."""


class Admin:
    """See the module's header."""

    def __init__(self, backend: Backend, counters: Counters, gateway: Server) -> None:
        self._backend = backend
        self._counters = counters
        self._status = LatestStatus(backend)
        self._hub = Hub(self._look)
        self._own = WorkerCollector(counters, self._connections)
        self._gateway = gateway
        self.server = Server(self._serve, _refuse, most=_CONNECTIONS)

    async def run(self) -> None:
        """Show what runs to those who watch, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._status.run)
            nursery.start_soon(self._hub.run)

    async def _serve(self, exchange: Exchange) -> None:
        path = exchange.head.target.partition(b"?")[0]
        page = page_file(path.decode("ascii"))
        if exchange.head.method not in ("GET", "HEAD"):
            await exchange.respond(405, [_TEXT, ("Allow", "GET, HEAD")], b"GET only\n")
        elif path == b"/healthz":
            connected = self._backend.sessions.is_connected
            body = b"ok\n" if connected else b"no session with the service\n"
            await exchange.respond(200 if connected else 503, [_TEXT], body)
        elif path == b"/metrics":
            await exchange.respond(200, [_EXPOSITION], (await self._metrics()).encode())
        elif page is not None:
            await exchange.respond(200, *page)
        elif path == b"/v1/panels":
            await exchange.respond(200, [_JSON], msgspec.json.encode(await self._look(Window())))
        elif path == b"/v1/events" and exchange.head.method == "GET":
            await self._hub.serve(exchange)
        else:
            await exchange.respond(
                404, [_TEXT], b"there are /, /healthz, /metrics, /v1/panels and /v1/events\n"
            )

    async def _look(self, window: Window) -> Snapshot:
        now_s = time.time()
        window.begin(now_s)
        status = await self._status.ask()
        if isinstance(status, str):
            return unreachable_store(status, window, now_s)
        return with_worker(store_snapshot(status, window, now_s), self._counters, self._connections(), window)

    async def _metrics(self) -> str:
        try:
            return exposition(StatusCollector(await self._backend.status()), self._own)
        except KvfsError:
            return exposition(self._own)

    def _connections(self) -> Connections:
        return Connections(
            open=self._gateway.open_connections,
            accepted=self._gateway.accepted,
            closed_silent=self._gateway.places.closed_silent,
            refused=self._gateway.places.refused,
            bodies_given_up=self._backend.drafts.budget.given_up,
            connected=self._backend.sessions.is_connected,
        )


def _refuse(status: int, message: str) -> tuple[Headers, bytes]:
    return [_TEXT], f"{message}\n".encode()
