"""`kvfs conductor`: the parts put together, from settings to a stop.

Responsibility: sockets, tasks and signals: SIGTERM and SIGINT stop after the requests in flight, SIGHUP reads the
certificate again. Nothing is kept on disk: after a restart instances come from their file or from whoever registers
them, and blocks from the publishers' replays and manifests.

Concurrency: one trio thread.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from kvfs._native.cluster.index import ClusterIndex
from kvfs.config.server_urls import BY_NAME
from kvfs.config.settings import ConductorSettings
from kvfs.config.url_settings import host_and_port
from kvfs.errors import ConfigError, InvalidRequest
from kvfs.events.sockets import Subscriber
from kvfs.http.server import Certificate, Server, listen, take_signals
from kvfs.http.server_place import host_in_url
from kvfs.http.tls import client_context
from kvfs.limits import CONDUCTOR_TICK_S, MAX_INDEXED_BLOCKS
from kvfs.watch.hub import Hub
from kvfs.watch.panels import Snapshot
from kvfs.watch.window import Window
from scheduler.conductor.conductor import Conductor
from scheduler.conductor.door.api import Api
from scheduler.conductor.door.conductor_panels import conductor_snapshot
from scheduler.conductor.door.operations import Context
from scheduler.conductor.feeds.discovery import InstancesFile
from scheduler.conductor.feeds.engine_names import EngineNames, Resolve, system_addresses
from scheduler.conductor.feeds.engine_survey import EngineSurvey
from scheduler.conductor.feeds.feed import Feed
from scheduler.conductor.feeds.health import HealthWatch, connection_to
from scheduler.conductor.feeds.listener import Listener
from scheduler.conductor.planning.planner import Role
from scheduler.conductor.pool import Options
from scheduler.conductor.values import Instance
from scheduler.routing.admission import Mode, Slo
from scheduler.routing.cost import table_costs
from scheduler.routing.queues import Discipline
from scheduler.routing.roles import Rules

GC_THRESHOLD: Final = 50_000
"""Objects made and not freed between two collections of the youngest."""


def options_of(settings: ConductorSettings) -> Options:
    """Return how a Conductor of these settings decides. Raises ConfigError."""
    try:
        costs = table_costs(settings.cost_model, settings.cost_device, devices=settings.cost_devices)
    except InvalidRequest as error:
        raise ConfigError(f"[conductor] {error}") from None
    return Options(
        costs=costs,
        policy=settings.policy,
        discipline=Discipline(settings.queue),
        admission=Mode(settings.admission),
        slo=Slo(settings.ttft_slo_s, settings.tbt_slo_s),
        transfers=settings.transfers,
        fitted=settings.fitted,
        copies=settings.copies,
        relabels=Rules() if settings.relabel else None,
    )


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a Conductor answers and listens."""

    http: str
    port: int
    events: str


class ConductorService:
    """Implement `Registrar`; see the module's header. Use it as a context manager, which owns the sockets of events."""

    def __init__(
        self,
        settings: ConductorSettings,
        subscriber_type: Callable[..., Subscriber] = Subscriber,
        resolve: Resolve = system_addresses,
    ) -> None:
        """Put the parts together and bind the endpoint of events. Raises ConfigError."""
        self._settings, self._resolve = settings, resolve
        if settings.authorities is not None:
            client_context(settings.authorities)
        certificate = None
        if settings.certificate is not None and settings.key is not None:
            certificate = Certificate(settings.certificate, settings.key)
        self.conductor = Conductor(ClusterIndex(MAX_INDEXED_BLOCKS), options_of(settings), time.monotonic)
        self.conductor.registry.awaited.update(settings.asked)
        feed = Feed(self.conductor.registry, time.monotonic)
        self._subscriber = subscriber_type(feed, settings.events)
        self._listener = Listener(
            self.conductor.registry, feed, self._subscriber, time.monotonic, settings.authorities
        )
        self._hub = Hub(self._look)
        tokens = [token.get_secret_value() for token in settings.tokens]
        self._api = Api(Context(self.conductor, self._listener), tokens, self._hub)
        self._server = Server(
            self._api.serve, self._api.refuse, certificate=certificate, most=settings.connections
        )

    def __enter__(self) -> ConductorService:
        return self

    def __exit__(self, *_: object) -> None:
        self._subscriber.__exit__()

    # --- what a file of instances and engines ask for -----------------------------------------------------
    def add(self, instance: Instance) -> None:
        """Add an instance and follow its streams. Raises what `Registry.add` does."""
        self.conductor.registry.add(instance)
        self._listener.follow(instance)

    def remove(self, name: str) -> None:
        """Remove an instance and follow its streams no more. Raises NotFound."""
        self.conductor.remove(name)
        self._listener.sync()

    def role(self, name: str) -> Role:
        return self.conductor.registry.member(name)[1].role

    def set_role(self, name: str, role: Role) -> None:
        """Label an instance. Raises NotFound."""
        self.conductor.registry.set_role(name, role)

    def awaits(self, url: str) -> None:
        """Note that an engine at this URL has not said yet what it is, so that it may have a model that nobody has."""
        self.conductor.registry.awaited.add(url)

    def answered(self, url: str) -> None:
        """Note that an engine at this URL has said what it is, or is asked no more: nobody waits for it any more."""
        self.conductor.registry.awaited.discard(url)

    # --- tasks --------------------------------------------------------------------------------------------
    async def run(self, task_status: trio.TaskStatus[Addresses] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until stopped. Raises ConfigError."""
        host, port = host_and_port(self._settings.listen)
        sockets = listen(host, port, shared=False)
        async with trio.open_nursery() as background:
            background.start_soon(self._tick)
            background.start_soon(self._listener.run)
            authorities = self._settings.authorities
            connect = partial(connection_to, authorities=authorities)
            background.start_soon(HealthWatch(self.conductor.registry, connect).run)
            background.start_soon(self._hub.run)
            if self._settings.instances is not None:
                background.start_soon(InstancesFile(self._settings.instances, self).run)
            asked = self._settings.asked
            names = {url: role for url, role in asked.items() if url.startswith(BY_NAME)}
            engines = {url: role for url, role in asked.items() if url not in names}
            token = self._settings.engine_token.get_secret_value()
            survey = EngineSurvey(engines, self, token, authorities)
            await background.start(survey.run)
            background.start_soon(EngineNames(names, survey, self.answered, self._resolve).run)
            port = sockets[0].getsockname()[1]
            scheme = "http" if self._settings.certificate is None else "https"
            url = f"{scheme}://{host_in_url(host or '*')}:{port}"
            task_status.started(Addresses(url, port, self._subscriber.endpoint))
            await self._server.serve(sockets)
            background.cancel_scope.cancel()

    def stop(self) -> None:
        """Accept no more, and end `run` after the requests in flight."""
        self._hub.stop()
        self._server.stop()

    def reload(self) -> None:
        """Read the certificate again."""
        self._server.reload()

    async def _look(self, window: Window) -> Snapshot:
        return conductor_snapshot(self.conductor, window, changed=True)

    async def _tick(self) -> None:
        while True:
            await trio.sleep(CONDUCTOR_TICK_S)
            self.conductor.tick()


async def run_conductor(settings: ConductorSettings, started: Callable[[Addresses], None]) -> None:
    """Run `kvfs conductor run` until SIGTERM or SIGINT. Raises ConfigError."""
    with ConductorService(settings) as service:
        async with trio.open_nursery() as nursery:
            await nursery.start(take_signals, service.stop, service.reload)
            addresses = await nursery.start(_served, service, nursery.cancel_scope)
            # Looking for cycles, of which requests leave none, would take a third of a request's time.
            gc.freeze()
            gc.set_threshold(GC_THRESHOLD, 10, 10)
            started(addresses)


async def _served(
    service: ConductorService,
    scope: trio.CancelScope,
    task_status: trio.TaskStatus[Addresses] = trio.TASK_STATUS_IGNORED,
) -> None:
    await service.run(task_status)
    scope.cancel()
