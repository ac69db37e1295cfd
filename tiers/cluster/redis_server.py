"""The server that the directory is on: scripts called with bounded waits, over one connection that is kept.

Responsibility: a connection of coredis, made anew after a failure; pauses.

Invariants: a call ends within its wait, and raises at once while the server is not asked. A connection on which an
answer is late or wrong is closed, but for lookups: their wait is short on purpose, and they only pause themselves.

Concurrency: the service's trio thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import trio
from coredis.connection import BaseConnection
from coredis.exceptions import ClusterDownError, RedisClusterError, RedisError, TryAgainError
from coredis.pool import ConnectionPool

from kvfs import limits
from kvfs.errors import DeadlinePassed, KvfsError, TierUnreachable
from kvfs.system.pauses import Pause
from tiers.cluster.scripts import ALL, PREFIX

log = logging.getLogger("kvfs.cluster")
logging.getLogger("coredis").setLevel(logging.CRITICAL)  # it logs each failed connection with a traceback

_FAILURES = (RedisError, OSError, ExceptionGroup, ValueError, trio.BrokenResourceError)
_MOVED = (RedisClusterError, ClusterDownError, TryAgainError)
"""The keys are elsewhere, or on their way: the connection is as good as it was."""
_IS_CLUSTER = "it is one of a Redis Cluster, which is used as redis+cluster://HOST:PORT"


class _KeysElsewhere(TierUnreachable):
    """Says that one script's keys are not on the server, which answers others."""


def _pause() -> Pause:
    return Pause(limits.DIRECTORY_BACKOFF_S, limits.MAX_DIRECTORY_BACKOFF_S, spread=0.5)


async def _run_to_end(
    connection: BaseConnection, ended: trio.Event, task_status: trio.TaskStatus[None]
) -> None:
    try:
        await connection.run(task_status=task_status)
    finally:
        ended.set()


class RedisServer:
    """Calls scripts of one server."""

    def __init__(self, url: str, on_lost: Callable[[], None] | None = None) -> None:
        """`on_lost` is called where other servers of a Redis Cluster may have the keys: they say so, or the connection
        has ended. Raises ValueError for a URL that coredis does not take."""
        parts, self._on_lost = urlsplit(url), on_lost
        self.shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        """The URL without user and password."""
        self._pool: ConnectionPool[Any] = ConnectionPool.from_url(
            url, connect_timeout=limits.DIRECTORY_CALL_S
        )
        self._connection: BaseConnection | None = None
        self._digests: dict[str, bytes] = {}
        self._failed = trio.Event()
        self._pause, self._lookups = _pause(), _pause()
        self.trouble = "not connected yet"
        self.counts: Counter[str] = Counter()
        """`connections`, `failures`, `deadlines`."""

    @property
    def is_up(self) -> bool:
        """Return whether there is a connection."""
        return self._connection is not None

    def connection(self, prefix: bytes) -> object:
        """Return what stands for the connection over which keys of this prefix are reached, to be compared."""
        return self._connection

    async def run(self) -> None:
        """Keep a connection until cancelled."""
        while True:
            try:
                await self._run_connection()
            except _FAILURES as error:
                self._note(str(error.exceptions[0] if isinstance(error, ExceptionGroup) else error))
            finally:
                self._connection = None
            if self._on_lost is not None:
                self._on_lost()
            await trio.sleep(self._pause.failed(trio.current_time()))

    async def call(self, script: str, *arguments: bytes, prefix: bytes = PREFIX) -> Any:
        """Run a script within limits.DIRECTORY_CALL_S. Raises TierUnreachable, DeadlinePassed."""
        answer = await self._run_script(script, prefix, arguments, limits.DIRECTORY_CALL_S)
        self._pause.succeeded()
        return answer

    async def ask(self, command: bytes) -> Any:
        """Send a command without arguments within limits.DIRECTORY_CALL_S. Raises TierUnreachable, DeadlinePassed."""
        return await self._request((command,), limits.DIRECTORY_CALL_S)

    async def look_up(self, script: str, argument: bytes, wait_s: float, *, prefix: bytes = PREFIX) -> Any:
        """Run a script that others wait for. Raises TierUnreachable, DeadlinePassed."""
        if not self._lookups.is_over(trio.current_time()):
            raise TierUnreachable("the directory did not answer a moment ago")
        try:
            answer = await self._run_script(script, prefix, (argument,), wait_s, closes=False)
        except _KeysElsewhere:
            raise
        except KvfsError:
            self._lookups.failed(trio.current_time())
            raise
        self._lookups.succeeded()
        return answer

    def close(self, trouble: str) -> None:
        """Close the connection; another is made after a pause."""
        self._note(trouble)
        self._connection = None
        self._failed.set()

    async def _run_connection(self) -> None:
        """Connect, and stay so until the connection ends. Raises one of _FAILURES where it cannot be made."""
        self._failed = failed = trio.Event()
        async with trio.open_nursery() as nursery:
            with trio.move_on_after(limits.DIRECTORY_CALL_S):
                # coredis does not close all that it made for a connection that is refused
                location = self._pool.location
                if location is None or not await location.check():
                    raise OSError("nobody listens there")
                connection = self._pool.connection_class(location, **self._pool.connection_kwargs)
                await nursery.start(_run_to_end, connection, failed)
                for script in ALL:
                    self._digests[script] = await connection.create_request(b"SCRIPT LOAD", script)
                self._connection = connection
            if self._connection is None:
                raise OSError(f"no answer within {limits.DIRECTORY_CALL_S:g} s")
            log.info("%s: the directory answers", self.shown)
            self.counts["connections"] += 1
            self.trouble = ""
            await failed.wait()
            if not self.trouble:
                self._note("the connection ended")
            nursery.cancel_scope.cancel()

    async def _run_script(
        self, script: str, prefix: bytes, arguments: tuple[bytes, ...], wait_s: float, *, closes: bool = True
    ) -> Any:
        words = (b"EVALSHA", self._digests.get(script, b""), b"1", prefix, *arguments)
        return await self._request(words, wait_s, closes=closes)

    async def _request(self, words: tuple[bytes, ...], wait_s: float, *, closes: bool = True) -> Any:
        connection = self._connection
        if connection is None:
            raise TierUnreachable(f"the directory is not asked now: {self.trouble}")
        with trio.move_on_after(wait_s):
            try:
                return await connection.create_request(*words)
            except _FAILURES as error:
                if isinstance(error, _MOVED) and self._on_lost is not None:
                    self._on_lost()
                    raise _KeysElsewhere(f"the directory's keys are not there now: {error}") from None
                if self._connection is connection:
                    self.close(_IS_CLUSTER if isinstance(error, _MOVED) else str(error))
                raise TierUnreachable(f"the directory failed: {error}") from None
        late = DeadlinePassed(f"no answer of the directory within {wait_s:g} s")
        self.counts["deadlines"] += 1
        if closes and self._connection is connection:
            self.close(str(late))
        raise late

    def _note(self, trouble: str) -> None:
        self.counts["failures"] += 1
        if trouble != self.trouble:
            log.warning("%s: %s", self.shown, trouble, extra={"cause": self.shown})
        self.trouble = trouble
