"""One gateway process: a session of the store, the S3 port and the admin port, from start to stop.

Responsibility: put the parts together and take signals: SIGTERM and SIGINT stop after the requests in flight, SIGHUP
reads the certificate and the credentials again. `gateway.app.supervisor` starts the process and sends it its settings
on standard input, so that no secret is ever on a command line; when that pipe ends, so does the process.

Concurrency: one trio thread, and trio's worker threads for digests and copies.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from contextlib import suppress

import trio

from gateway.app.admin import Admin
from gateway.app.fast_path import FastPath
from gateway.app.handler import Handler
from gateway.app.metrics import Counters
from gateway.app.worker_settings import WorkerSettings
from gateway.auth.credentials import Credentials
from gateway.backend.backend import Backend
from gateway.backend.bucket_owners import Owners
from gateway.backend.reconnect import first_error
from gateway.call.settings import GatewaySettings
from gateway.operations.uploads import expire_for_ever
from kvfs.config.credentials import Credential
from kvfs.config.load import load
from kvfs.errors import KvfsError
from kvfs.http.server import Certificate, Server, listen, take_signals
from kvfs.system.linux import raise_file_limit
from kvfs.system.notify import set_up_logging

log = logging.getLogger("kvfs.gateway")


class Worker:
    """See the module's header."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Put the parts together. Raises ConfigError."""
        self._settings = settings
        self._backend = Backend(settings.socket, processes=settings.processes)
        counters = Counters()
        owners = Owners(self._backend)
        fast_path = FastPath(self._backend, counters, owners)
        self._handler = Handler(
            self._backend,
            self._gateway_settings(settings.credentials),
            fast_path=fast_path,
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
            front=fast_path,
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
        """Serve until stopped. Prints the port once requests are answered. Raises ConfigError, SessionClosed."""
        settings = self._settings
        sockets = listen(settings.host, settings.port, shared=settings.processes > 1)
        admin_sockets = []
        if settings.admin_host is not None:
            admin_sockets = listen(settings.admin_host, settings.admin_port, shared=False)
        async with trio.open_nursery() as background:
            await background.start(take_signals, self._server.stop, self._reload)
            await background.start(self._backend.sessions.run)
            background.start_soon(expire_for_ever, self._backend, settings.upload_expiry_s)
            background.start_soon(self._stop_with_parent)
            if admin_sockets:
                background.start_soon(self._admin.server.serve, admin_sockets)
                background.start_soon(self._admin.run)
            ports = [sock[0].getsockname()[1] if sock else 0 for sock in (sockets, admin_sockets)]
            _calm_gc()
            _report(f"ready {ports[0]} {ports[1]}")
            await self._server.serve(sockets)
            background.cancel_scope.cancel()

    async def _stop_with_parent(self) -> None:
        """Stop when the pipe from the supervisor ends; nothing more comes through it."""
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
            found = load(self._settings.config)
            self._handler.replace_settings(self._gateway_settings(found.s3.credentials))
        except KvfsError as error:
            log.error("credentials were not read again, the old ones stay in use: %s", error)
        else:
            log.info("%d credentials were read again", len(found.s3.credentials))


def _report(line: str) -> None:
    """Send a line to the supervisor; if that is gone, `_stop_with_parent` ends the worker."""
    with suppress(BrokenPipeError):
        os.write(1, line.encode() + b"\n")


def _calm_gc() -> None:
    """Make the collector look for cycles rarely: it took a third of a small request's time, and finds next to none."""
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 10, 10)


_GC_THRESHOLD = 50_000
"""Objects made and not freed between two collections of the youngest."""


def main() -> None:
    """Run the process: settings come as one line of JSON on standard input."""
    line = sys.stdin.buffer.readline()
    # The supervisor died meanwhile; nothing is printed, since settings hold secrets.
    if not line.endswith(b"\n"):
        sys.exit(1)
    settings = WorkerSettings.model_validate_json(line)
    set_up_logging(settings.log_level)
    raise_file_limit()
    try:
        worker = Worker(settings)
        trio.run(worker.run)
    except* KvfsError as group:
        _report("failed " + str(first_error(group)).replace("\n", " "))
        sys.exit(1)
