"""A real Redis or Valkey server for tests of the directory, and machines that share it.

Responsibility: start it on a free port, kill, pause and empty it. Concurrency: the server is a process of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence, Set
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trio

from tests.support.machines import Machine, digest_of, machine
from tests.support.own_ports import own_port
from tests.support.waits import WAIT_S, until
from tiers.cluster.redis_server import RedisServer

PROGRAM = shutil.which("valkey-server") or shutil.which("redis-server")
needs_server = pytest.mark.skipif(
    PROGRAM is None, reason="no redis-server or valkey-server: the directory is not tested"
)


class DirectoryServer:
    """Runs the server on one port, which it keeps over its ends."""

    def __init__(self, folder: Path, host: str = "127.0.0.1", arguments: Sequence[str] = ()) -> None:
        self._folder, self._host, self.port = folder, host, own_port()
        self._arguments = arguments
        self.url = f"redis://{host}:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, empty, and wait until it answers."""
        assert PROGRAM is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [
                *(PROGRAM, "--port", str(self.port), "--bind", self._host, "--protected-mode", "no"),
                *("--save", "", "--appendonly", "no"),
                *self._arguments,
            ],
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
        )
        end = time.monotonic() + WAIT_S
        while self._ping() != b"+PONG\r\n":
            assert time.monotonic() < end, "the server does not answer"
            time.sleep(0.01)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the process until the end of the block."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self._process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def ask(self, command: str) -> bytes:
        """Return the start of the answer to an inline command."""
        with socket.create_connection((self._host, self.port), 5) as connection:
            connection.sendall(command.encode() + b"\r\n")
            return connection.recv(65536)

    def empty(self) -> None:
        assert self.ask("FLUSHALL") == b"+OK\r\n"

    def _ping(self) -> bytes:
        try:
            return self.ask("PING")
        except OSError:
            return b""


@contextmanager
def directory_server(folder: Path) -> Iterator[DirectoryServer]:
    server = DirectoryServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[RedisServer]:
    """Call the directory's scripts beside the machines."""
    server = RedisServer(url)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        await until(lambda: server.is_up)
        yield server
        nursery.cancel_scope.cancel()


def agreed(running: list[Machine]) -> bool:
    """Whether all machines are members that see each other and have written what they hold."""
    return all(
        each.directory()["state"] == "joined"
        and each.directory()["is_up"]
        and each.directory()["members_count"] == len(running)
        and each.directory()["manifests"] > 0
        and each.directory()["pending"] == 0
        for each in running
    )


async def until_directory_knows(
    running: list[Machine], has: Sequence[Set[int]], numbers: Sequence[int]
) -> None:
    """Wait until each machine is told for each block, by its number, which of the others have it, and nobody else."""
    for at, asking in enumerate(running):
        expected = [
            {each.address for n, each in enumerate(running) if n != at and number in has[n]}
            for number in numbers
        ]
        with trio.fail_after(WAIT_S):
            while True:
                holders = await asking.cluster._directory.holders([digest_of(number) for number in numbers])
                if holders is not None and list(map(set, holders)) == expected:
                    break
                await trio.sleep(0.005)


@asynccontextmanager
async def directed_machines(
    folder: Path, count: int, url: str, match_wait_s: float = 1.0
) -> AsyncIterator[list[Machine]]:
    """Run machines that know each other by the directory alone."""
    async with AsyncExitStack() as stack:
        running = []
        for number in range(count):
            host = f"127.0.0.{number + 1}"
            listen = f"{host}:{own_port()}"
            running.append(
                await stack.enter_async_context(
                    machine(folder / f"m{number}", listen=listen, directory=url, match_wait_s=match_wait_s)
                )
            )
        await until(lambda: agreed(running))
        yield running
