"""The gateway's worker processes: started, watched, started again, stopped.

Responsibility: `supervise` runs as a task of the service, or of `kvfs gateway`. A worker that ends is started again
after a pause; the service drops what it held with its session.

Invariants: a worker that cannot start at all fails `supervise`; later failures never do. A worker outlives neither
`supervise` nor its process: its standard input is a pipe from here.

Concurrency: a task per worker.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import trio

from gateway.app.worker_settings import WorkerSettings
from kvfs import limits
from kvfs.config.load import load
from kvfs.errors import ConfigError, KvfsError
from kvfs.http.server_place import host_in_url

log = logging.getLogger("kvfs.gateway")


@dataclass(frozen=True, slots=True)
class Listening:
    """The addresses of the workers."""

    host: str
    port: int
    admin_host: str | None
    admin_port: int
    """The port of the first worker, the others have those after it; 0: none."""
    workers: int
    secure: bool

    @property
    def page(self) -> str | None:
        """Return where the first worker's page is; None without an admin port."""
        return f"http://{host_in_url(self.admin_host or '*')}:{self.admin_port}/" if self.admin_port else None

    def __str__(self) -> str:
        scheme = "https" if self.secure else "http"
        many = f", {self.workers} workers" if self.workers > 1 else ""
        return f"{scheme}://{host_in_url(self.host or '*')}:{self.port}{many}"


class Workers:
    """See the module's header."""

    def __init__(self, settings: WorkerSettings, count: int) -> None:
        self._settings = settings
        self._credentials = settings.credentials
        self._count = count
        self._processes: dict[int, trio.Process] = {}

    def reload(self) -> None:
        """Have all workers, and those started later, read certificates and credentials again."""
        if self._settings.config is not None:
            try:
                self._credentials = load(self._settings.config).s3.credentials
            except KvfsError as error:
                log.debug("the configuration cannot be read again, which the workers log too: %s", error)
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGHUP)

    async def supervise(self, task_status: trio.TaskStatus[Listening] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the workers running until cancelled; `started` is called once all answer. Raises ConfigError."""
        port, admin_port = self._settings.port, self._settings.admin_port
        # 0: each takes any free port, since the one after a free port may be taken.
        first_admin_port = admin_port
        async with trio.open_nursery() as nursery:
            for index in range(self._count):
                settings = self._settings.model_copy(
                    update={
                        "port": port,
                        "processes": self._count,
                        "admin_port": first_admin_port + index if first_admin_port else 0,
                    }
                )
                found = await nursery.start(self._keep, index, settings)
                port = found[0]
                admin_port = admin_port or found[1]
            secure = self._settings.certificate is not None
            task_status.started(
                Listening(
                    self._settings.host, port, self._settings.admin_host, admin_port, self._count, secure
                )
            )

    async def _keep(
        self, index: int, settings: WorkerSettings, task_status: trio.TaskStatus[tuple[int, int]]
    ) -> None:
        """Keep one worker and its successors running."""
        process, ports = await self._start(index, settings)
        settings = settings.model_copy(update={"port": ports[0], "admin_port": ports[1]})
        task_status.started(ports)
        pause_s = limits.WORKER_RESTART_MIN_S
        while True:
            began_s = trio.current_time()
            try:
                await process.wait()
            finally:
                with trio.CancelScope(shield=True):
                    await self._stop(process)
            log.error("gateway worker %d ended with code %s; starting another", index, process.returncode)
            if trio.current_time() - began_s > limits.WORKER_RESTART_MAX_S:
                pause_s = limits.WORKER_RESTART_MIN_S
            while True:
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, limits.WORKER_RESTART_MAX_S)
                try:
                    process, _ = await self._start(index, settings)
                    break
                except ConfigError as error:
                    log.error("gateway worker %d does not start: %s", index, error)

    async def _start(self, index: int, settings: WorkerSettings) -> tuple[trio.Process, tuple[int, int]]:
        """Start a worker, and return it with its ports once it answers. Raises ConfigError."""
        try:
            process = await trio.lowlevel.open_process(
                [sys.executable, "-m", "gateway"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_environment(),
                start_new_session=True,
            )
        except OSError as error:  # no descriptors, processes or memory now
            raise ConfigError(f"a gateway worker cannot be started: {error.strerror}") from None
        self._processes[index] = process
        try:
            assert process.stdin is not None
            given = settings.model_copy(update={"credentials": self._credentials})
            with trio.fail_after(limits.WORKER_START_WAIT_S):
                await process.stdin.send_all(given.to_json().encode() + b"\n")
                word, _, rest = (await _line(process)).partition(" ")
            if word != "ready":
                raise ConfigError(rest or "a gateway worker ended at its start; the log says why")
        except BaseException as error:
            with trio.CancelScope(shield=True):
                await self._stop(process)
            if isinstance(error, trio.TooSlowError | trio.BrokenResourceError):
                raise ConfigError(f"a gateway worker does not start: {type(error).__name__}") from None
            raise
        port, admin_port = map(int, rest.split())
        return process, (port, admin_port)

    async def _stop(self, process: trio.Process) -> None:
        """Stop a worker by ending its input, after its requests in flight; kill one that stays."""
        assert process.stdin is not None
        assert process.stdout is not None
        await process.stdin.aclose()
        with trio.move_on_after(limits.DRAIN_WAIT_S + 1):
            await process.wait()
        if process.poll() is None:
            process.kill()
            await process.wait()
        await process.stdout.aclose()


async def _line(process: trio.Process) -> str:
    assert process.stdout is not None
    data = b""
    while not data.endswith(b"\n"):
        some = await process.stdout.receive_some(4096)
        if not some:
            break
        data += some
    return data.decode(errors="replace").strip()


def _environment() -> dict[str, str]:
    """Return an environment with this process's modules and without the service manager's variables."""
    path = os.pathsep.join(part for part in sys.path if part)
    kept = {
        name: value for name, value in os.environ.items() if name not in ("NOTIFY_SOCKET", "WATCHDOG_PID")
    }
    return {**kept, "PYTHONPATH": path}


async def run_alone(settings: WorkerSettings, count: int, started: Callable[[Listening], None]) -> None:
    """Run `kvfs gateway`: supervise until SIGTERM or SIGINT. Raises ConfigError."""
    workers = Workers(settings, count)
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async with trio.open_nursery() as nursery:
            started(await nursery.start(workers.supervise))
            async for number in signals:
                if number != signal.SIGHUP:
                    break
                workers.reload()
            nursery.cancel_scope.cancel()
