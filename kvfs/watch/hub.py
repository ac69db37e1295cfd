"""One stream of Server-Sent Events for all who watch.

Responsibility: look at what is shown once in limits.WATCH_INTERVAL_S while somebody watches, and send the same bytes
to everybody: `snapshot` with a `Snapshot` as JSON. An event is whole by itself, so whoever connects anew misses
nothing that matters, and Last-Event-ID is not looked at.

Invariants: nothing is looked at while nobody watches. At most limits.MAX_WATCHERS watch. Each has
limits.WATCHER_EVENTS events waiting and limits.WATCHER_SOCKET_BYTES in the kernel; who takes less than is made is
dropped. While a look takes long, comments show that the stream lives.

Concurrency: one trio thread; a task that looks, and the task of each connection.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec
import trio

from kvfs.http.http_exchange import Exchange
from kvfs.limits import (
    MAX_WATCHERS,
    WATCH_HEARTBEAT_S,
    WATCH_INTERVAL_S,
    WATCHER_EVENTS,
    WATCHER_SOCKET_BYTES,
)
from kvfs.watch.panels import Snapshot
from kvfs.watch.window import Window

log = logging.getLogger("kvfs.watch")

_HEADERS: Final = [
    ("Content-Type", "text/event-stream"),
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
]
_NO_MORE: Final = f"it stops, or {MAX_WATCHERS} streams of events are open, which is the limit\n".encode()
_COMMENT: Final = b":\n\n"
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True, eq=False)
class _Watcher:
    """One connection. `scope` ends it at once, `events` after what waits."""

    events: trio.MemorySendChannel[bytes]
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class Hub:
    """See the module's header."""

    def __init__(self, look: Callable[[Window], Awaitable[Snapshot]]) -> None:
        """Show what `look` returns; it begins a sample of the window that it is given."""
        self._look = look
        self._window = Window()
        self._watchers: set[_Watcher] = set()
        self._wanted = trio.Event()
        self._last: bytes | None = None
        self._process = secrets.token_hex(4)
        self._stopping = False
        self.dropped = 0
        """Watchers that did not read."""

    def __len__(self) -> int:
        return len(self._watchers)

    async def run(self) -> None:
        """Look and send until cancelled."""
        while True:
            if not self._watchers:
                self._last, self._wanted = None, trio.Event()
                self._window.clear()
                await self._wanted.wait()
            began_s = trio.current_time()
            await self._send_one()
            await trio.sleep_until(began_s + WATCH_INTERVAL_S)

    def stop(self) -> None:
        """End all streams, after what waits, and take no more."""
        self._stopping = True
        for watcher in self._watchers:
            watcher.events.close()

    async def serve(self, exchange: Exchange) -> None:
        """Answer with the stream until the client is gone or dropped, or `stop`. Raises Gone, Stalled."""
        if self._stopping or len(self._watchers) >= MAX_WATCHERS:
            await exchange.respond(503, [("Content-Type", "text/plain"), ("Retry-After", "5")], _NO_MORE)
            return
        events, waiting = trio.open_memory_channel[bytes](WATCHER_EVENTS)
        watcher = _Watcher(events)
        self._watchers.add(watcher)
        self._wanted.set()
        try:
            with watcher.scope, waiting:
                bound_socket(exchange.fileno())
                await exchange.begin_slowly(200, _HEADERS, self._last or _COMMENT)
                await _relay(waiting, exchange)
        finally:
            exchange.keep_alive = False
            self._watchers.discard(watcher)
            events.close()

    async def _send_one(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._comment)
            try:
                snapshot = await self._look(self._window)
            except Exception:
                log.exception("what runs cannot be shown")
                self._offer(_COMMENT)
            else:
                body = _encode(msgspec.structs.replace(snapshot, process=self._process))
                self._last = b"event: snapshot\ndata: " + body + b"\n\n"
                self._offer(self._last)
            nursery.cancel_scope.cancel()

    async def _comment(self) -> None:
        while True:
            await trio.sleep(WATCH_HEARTBEAT_S)
            self._offer(_COMMENT)

    def _offer(self, event: bytes) -> None:
        for watcher in list(self._watchers):
            with suppress(trio.ClosedResourceError):
                try:
                    watcher.events.send_nowait(event)
                except trio.WouldBlock:
                    self.dropped += 1
                    log.info("a watcher that does not read its events was dropped")
                    watcher.scope.cancel()


async def _relay(waiting: trio.MemoryReceiveChannel[bytes], exchange: Exchange) -> None:
    async for event in waiting:
        await exchange.send_part(event)
    await exchange.end_slowly()


def bound_socket(descriptor: int) -> None:
    """Bound what the kernel keeps for a client that does not read."""
    with socket.socket(fileno=os.dup(descriptor)) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, WATCHER_SOCKET_BYTES)
