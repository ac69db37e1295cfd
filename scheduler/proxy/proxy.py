"""The proxy's process: the parts put together, its port, signals, start and stop.

Responsibility: SIGTERM and SIGINT stop after the requests in flight, SIGHUP reads the certificate again.

Concurrency: one trio thread.
"""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import trio

from kvfs import limits
from kvfs.config.settings import HandOver
from kvfs.http.server import Certificate, Server, listen, take_signals
from kvfs.system.linux import raise_file_limit
from kvfs.system.metrics import exposition
from scheduler.conductor.conductor import Conductor
from scheduler.conductor.pool import Member
from scheduler.conductor.values import Router
from scheduler.proxy.completion import Legs
from scheduler.proxy.handler import Handler
from scheduler.proxy.model_lists import ModelLists
from scheduler.proxy.proxy_metrics import Counts, ProxyCollector, Snapshot
from scheduler.proxy.routers.balance import LoadRouter
from scheduler.proxy.routers.fallback import FallbackRouter, LocalRouter, RequestRouter
from scheduler.proxy.routers.remote_router import RemoteRouter
from scheduler.proxy.tokens import Tokenizer
from scheduler.proxy.upstream.engines import EngineAddress, Engines
from scheduler.proxy.waiting_line import WaitingLine

_GC_THRESHOLD = 50_000
"""Objects made and not freed between two collections of the youngest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyOptions:
    """What a proxy is made of."""

    engines: Sequence[EngineAddress] = ()
    """Engines known from the start; a router may name others."""
    hand_over: HandOver = "store"
    bootstraps: Mapping[str, str] = field(default_factory=dict)
    """By URL of a prefill engine, `HOST:PORT` of its bootstrap server."""
    bearer_tokens: Sequence[str] = ()
    """Tokens of clients; empty: what clients send goes on to the engines."""
    certificate: Certificate | None = None
    connections: int = limits.MAX_PROXY_REQUESTS
    conductor: str = ""
    """The URL of a Conductor elsewhere that routes."""
    conductor_token: str = ""
    authorities: Path | None = None
    """PEM file of who may sign what https:// engines and Conductors show. None: whom the system trusts."""


class Proxy:
    """See the module's header."""

    def __init__(self, options: ProxyOptions, router: Router | None = None) -> None:
        """`router`: one in the process. Without any it goes by load, without tokens. Raises ConfigError."""
        self.engines = Engines(
            options.engines,
            lambda name: self.router.unreachable(name),
            options.authorities,
            options.bootstraps,
        )
        self.load = LoadRouter(self.engines)
        self.remote: RemoteRouter | None = None
        if options.conductor:
            self.remote = RemoteRouter(
                options.conductor,
                options.conductor_token,
                self.engines,
                options.authorities,
                lambda: self.line.ids,
            )
        chosen = self.remote or _local(router or self.load, self.engines, lambda: self.line.ids)
        self.router = FallbackRouter(chosen, self.load)
        by_load = router is None and self.remote is None
        self.tokenizer = None if by_load else Tokenizer(self.engines)
        self.models = ModelLists(self.engines)
        self.counts = Counts()
        self.line = WaitingLine(self.router, self.counts)
        self.legs = Legs(self.engines, self.router, self.line, self.counts, options.hand_over)
        self.handler = Handler(
            self.engines, self.legs, self.tokenizer, self.models, self.metrics, options.bearer_tokens
        )
        self.server = Server(
            self.handler.serve,
            self.handler.refuse,
            certificate=options.certificate,
            most=options.connections,
        )

    def metrics(self) -> bytes:
        """Return all numbers in Prometheus's text format."""
        numbers: dict[str, float] = {
            "in_flight": self.handler.in_flight - 1,
            "waiting": len(self.line),
            "held_bytes": self.handler.memory.size_bytes,
            "routed_by_load": self.router.counts["by_load"],
            "tokenized": 0 if self.tokenizer is None else self.tokenizer.asked,
            "tokenize_failures": 0 if self.tokenizer is None else self.tokenizer.failed,
        }
        if self.remote is not None:
            numbers |= {"conductor_up": not self.remote.down, **self.remote.counts}
        return exposition(ProxyCollector(Snapshot(self.counts, self.engines, numbers))).encode()

    async def serve(
        self, sockets: list[socket.socket], task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until `server.stop`. Owns the sockets."""
        async with trio.open_nursery() as background:
            background.start_soon(self.engines.run)
            background.start_soon(self.handler.watch.run)
            background.start_soon(self.line.run)
            await background.start(self.router.run)
            await background.start(self.models.run)
            if self.tokenizer is not None:
                background.start_soon(self.tokenizer.run)
            task_status.started()
            await self.server.serve(sockets)
            background.cancel_scope.cancel()


def _local(router: Router, engines: Engines, waiting: Callable[[], list[str]]) -> RequestRouter:
    """Return a router in the process; a Conductor's instances are the engines. `waiting`: ids of what it deferred."""
    if not isinstance(router, Conductor):
        return LocalRouter(router, engines)
    registry = router.registry
    engines.awaited = registry.awaited  # of which the Conductor takes each that answers
    return LocalRouter(
        router,
        engines,
        lambda: [_address_of(each) for _, each in registry.members()],
        lambda: router.heard(engines.take_heard(), waiting()),
    )


def _address_of(member: Member) -> EngineAddress:
    known = member.instance
    draining = member.draining or member.relabels_to is not None or not known.routable
    return EngineAddress(
        *(known.url, member.role, known.name),
        draining=draining,
        model=known.model,
        rank=known.data_parallel_rank,
    )


class Service(Protocol):
    """A Conductor in the process, with its door and the streams of its instances."""

    @property
    def conductor(self) -> Conductor:
        """Return the Conductor."""

    async def run(self, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve the Conductor's parts until cancelled."""

    def reload(self) -> None:
        """Read certificates again."""


async def run(
    options: ProxyOptions,
    host: str,
    port: int,
    started: Callable[[int], None],
    service: Service | None = None,
) -> None:
    """Run `kvfs proxy` until SIGTERM or SIGINT; `started` is called with the port. Raises ConfigError.

    `service`: a Conductor that runs as long, and routes.
    """
    raise_file_limit()
    proxy = Proxy(options, None if service is None else service.conductor)
    sockets = listen(host, port, shared=False)

    def reload() -> None:
        proxy.server.reload()
        if service is not None:
            service.reload()

    async with trio.open_nursery() as background:
        await background.start(take_signals, proxy.server.stop, reload)
        if service is not None:
            await background.start(service.run)
        async with trio.open_nursery() as serving:
            port = sockets[0].getsockname()[1]
            await serving.start(proxy.serve, sockets)
            calm_gc()
            started(port)
        background.cancel_scope.cancel()


def calm_gc() -> None:
    """Make the collector look for cycles rarely: it took a fifth of a request's time, and finds next to none."""
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 10, 10)
