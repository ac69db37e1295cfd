"""The connections to one engine: kept for the next request, bounded, waited for.

Invariants: at most limits.ENGINE_CONNECTIONS are open or being opened. An unused one is kept for limits.ENGINE_IDLE_S,
and used again only if the engine has not closed it. Whoever waits has a deadline, and is served in order.

Concurrency: one trio thread.
"""

from __future__ import annotations

from collections import deque
from time import monotonic

import trio

from kvfs import limits
from kvfs.http.server_place import Place
from scheduler.proxy.upstream.connection import Dialer, EngineFailed, UpstreamConnection


class Pool:
    """See the module's header."""

    def __init__(self, place: Place, dialer: Dialer, most: int = limits.ENGINE_CONNECTIONS) -> None:
        self._place, self._dialer = place, dialer
        self._free = most
        self._idle: list[UpstreamConnection] = []
        self._waiting: deque[trio.Event] = deque()
        self._closed = False

    @property
    def idle(self) -> int:
        """Return how many connections wait for a request."""
        return len(self._idle)

    async def take(self, *, fresh: bool = False) -> UpstreamConnection:
        """Take a connection; `fresh`: a new one. Raises EngineFailed."""
        if self._free:
            self._free -= 1
        else:
            await self._wait()
        try:
            connection = None if fresh else await self._kept()
            return connection or await self._dialer.connect(self._place)
        except BaseException:
            self._release()
            raise

    async def put(self, connection: UpstreamConnection) -> None:
        """Return a connection: it is kept if it can be used again."""
        self._release()
        if connection.reusable and not self._closed:
            connection.used_s = monotonic()
            self._idle.append(connection)
        else:
            await connection.close()

    async def expire(self, age_s: float = limits.ENGINE_IDLE_S) -> None:
        """Close connections that were unused for `age_s`."""
        before_s = monotonic() - age_s
        while self._idle and self._idle[0].used_s <= before_s:
            await self._idle.pop(0).close()

    async def close(self) -> None:
        """Close unused connections, and others when they are returned."""
        self._closed = True
        await self.expire(0.0)

    async def _kept(self) -> UpstreamConnection | None:
        """Return the connection used last, if one is still open."""
        before_s = monotonic() - limits.ENGINE_IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.used_s > before_s and connection.is_open():
                return connection
            await connection.close()
        return None

    async def _wait(self) -> None:
        """Wait for one of the connections that there may be. Raises EngineFailed."""
        if len(self._waiting) >= limits.ENGINE_WAITERS:
            raise EngineFailed("all its connections are taken, and many requests wait", alive=True)
        granted = trio.Event()
        self._waiting.append(granted)
        try:
            with trio.move_on_after(limits.ENGINE_WAIT_S):
                await granted.wait()
                return
        except BaseException:
            self._withdraw(granted)
            raise
        self._withdraw(granted)
        raise EngineFailed(f"no connection was free for {limits.ENGINE_WAIT_S:g} s", alive=True)

    def _withdraw(self, granted: trio.Event) -> None:
        if granted.is_set():
            self._release()
        else:
            self._waiting.remove(granted)

    def _release(self) -> None:
        """Pass the place of a connection to who waited longest."""
        if self._waiting:
            self._waiting.popleft().set()
        else:
            self._free += 1
