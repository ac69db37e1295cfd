"""One gateway process: a session of the store, the S3 port and the admin port, from start to stop.

Responsibility: put the parts together, take signals: SIGTERM and SIGINT stop after the requests in flight, SIGHUP reads
the certificate and the credentials again. It is started by `gateway.supervisor`, which hands it its settings on its
standard input, so that no secret is ever on a command line; when that pipe ends, so does the process.

Concurrency: one trio thread, and trio's worker threads for digests and copies.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import trio
from pydantic import BaseModel, ConfigDict

from gateway.admin import Admin
from gateway.backend import Backend
from gateway.counters import Counters
from gateway.credentials import Credentials
from gateway.front import Front
from gateway.handler import Handler
from gateway.owners import Owners
from gateway.server import Certificate, Server, listen
from gateway.settings import GatewaySettings
from gateway.uploads import expire_for_ever
from kvfs import config
from kvfs.credentials import Credential
from kvfs.errors import KvfsError
from kvfs.linux import raise_file_limit
from kvfs.notify import set_up_logging

log = logging.getLogger("kvfs.gateway")


class WorkerSettings(BaseModel):
    """All that a worker is told; see `kvfs.config.S3Settings`."""

    model_config = ConfigDict(frozen=True)

    socket: Path
    """Of the service's sessions."""
    host: str
    port: int
    shared: bool = False
    """Whether other workers listen on the same port."""
    processes: int = 1
    """Workers in all."""
    admin_host: str | None = None
    admin_port: int = 0
    certificate: Path | None = None
    key: Path | None = None
    region: str = "us-east-1"
    domains: tuple[str, ...] = ()
    default_bucket: str | None = None
    opaque_etags: tuple[str, ...] = ()
    large_buckets: tuple[str, ...] = ()
    upload_expiry_s: float
    connections: int
    config: Path | None = None
    """Where SIGHUP reads credentials again."""
    log_level: str = "info"
    credentials: tuple[Credential, ...] = ()

    def to_json(self) -> str:
        """With the secrets: for the worker's pipe alone."""
        values = self.model_dump(mode="json", exclude={"credentials"})
        values["credentials"] = [
            {**each.model_dump(mode="json"), "secret_key": each.secret} for each in self.credentials
        ]
        return json.dumps(values)


class Worker:
    """See the module's header."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Raises ConfigError."""
        self._settings = settings
        self._backend = Backend(settings.socket, processes=settings.processes)
        counters = Counters()
        owners = Owners(self._backend)
        front = Front(self._backend, counters, owners)
        self._handler = Handler(
            self._backend,
            self._gateway_settings(settings.credentials),
            front=front,
            owners=owners,
            counters=counters,
        )
        certificate = None
        if settings.certificate is not None and settings.key is not None:
            certificate = Certificate(settings.certificate, settings.key)
        self._server = Server(
            self._handler.serve,
            self._handler.refuse,
            certificate=certificate,
            front=front,
            most=settings.connections,
        )
        self._admin = Admin(self._backend, self._handler.counters, self._server)

    def _gateway_settings(self, credentials: tuple[Credential, ...]) -> GatewaySettings:
        settings = self._settings
        return GatewaySettings(
            Credentials(credentials),
            settings.region,
            settings.domains,
            settings.default_bucket,
            settings.opaque_etags,
            settings.large_buckets,
            settings.upload_expiry_s,
        )

    async def run(self) -> None:
        """Until told to stop. Prints the port once requests are answered. Raises ConfigError, SessionClosed."""
        settings = self._settings
        sockets = listen(settings.host, settings.port, shared=settings.shared)
        admin_sockets = []
        if settings.admin_host is not None:
            admin_sockets = listen(settings.admin_host, settings.admin_port, shared=False)
        async with trio.open_nursery() as background:
            await background.start(self._take_signals)
            await background.start(self._backend.run)
            background.start_soon(expire_for_ever, self._backend, settings.upload_expiry_s)
            background.start_soon(self._stop_with_parent)
            if admin_sockets:
                background.start_soon(self._admin.server.serve, admin_sockets)
            ports = [sock[0].getsockname()[1] if sock else 0 for sock in (sockets, admin_sockets)]
            _calm_gc()
            _tell_supervisor(f"ready {ports[0]} {ports[1]}")
            await self._server.serve(sockets)
            background.cancel_scope.cancel()

    async def _take_signals(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            task_status.started()
            async for number in signals:
                if number == signal.SIGHUP:
                    self._reload()
                else:
                    self._server.stop()

    async def _stop_with_parent(self) -> None:
        """The pipe from the supervisor says nothing more; its end is the supervisor's."""
        while True:
            await trio.lowlevel.wait_readable(0)
            if not os.read(0, 4096):
                log.info("the supervisor is gone: stopping")
                self._server.stop()
                return

    def _reload(self) -> None:
        self._server.reload()
        if self._settings.config is None:
            return
        try:
            found = config.load(self._settings.config)
            self._handler.replace_settings(self._gateway_settings(found.s3.credentials))
        except KvfsError as error:
            log.error("the old credentials stay in use: %s", error)
        else:
            log.info("%d credentials were read again", len(found.s3.credentials))


def _tell_supervisor(line: str) -> None:
    """One that is gone hears nothing; `_stop_with_parent` ends the worker then."""
    with suppress(BrokenPipeError):
        os.write(1, line.encode() + b"\n")


def _calm_gc() -> None:
    """Requests leave next to no cycles: looking for them at the usual rate took a third of a small request's time."""
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 10, 10)


_GC_THRESHOLD = 50_000
"""Objects made and not freed between two looks at the youngest."""


def main() -> None:
    """The process's entry: settings as one line of JSON on standard input."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):  # the supervisor died before it had said all; what it said has secrets
        sys.exit(1)
    settings = WorkerSettings.model_validate_json(line)
    set_up_logging(settings.log_level)
    raise_file_limit()
    try:
        worker = Worker(settings)
        trio.run(worker.run)
    except* KvfsError as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        _tell_supervisor("failed " + str(error).replace("\n", " "))
        sys.exit(1)
