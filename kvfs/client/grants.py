"""Spare drafts of a session, granted ahead of use, and its channel to the service's sealing thread.

Invariants:
- A seal channel has one user at a time; a session that loses an answer on it is closed.
- A forked child closes every writable descriptor: an open one would keep its draft from being sealed.

Concurrency: the thread in `Grants.held` uses the channel and the spares. A put holds it for its copy and round trip;
others wait until their own deadlines.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from kvfs._native.blocks.writer import Put
from kvfs._native.shared.table import Table
from kvfs.client.transport import Deadline, Transport, close_all
from kvfs.errors import DeadlinePassed

Spare = tuple[int, int, int, int]
"""Slot, generation, writable descriptor, and how many bytes of an earlier object it has."""
_CHANNEL_TICK_S = 0.1
"""A wait on the channel looks at its deadline this often."""


class Grants:
    """Keep what one session was granted ahead of use."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self.spares: deque[Spare] = deque()
        self.wanted = int(transport.hello.details["quota"]["spare_drafts"])
        """How many spare drafts the service lets a client have."""
        self.size_bytes = 0
        """Size of the block that was put last: spares are asked for that have such pages."""
        self._channel: int | None = None
        self._refused = False

    @contextmanager
    def held(self, deadline: Deadline) -> Iterator[None]:
        """Keep the channel and the spares for one thread. Raises DeadlinePassed."""
        if not self._lock.acquire(timeout=deadline.left_s):
            raise DeadlinePassed(f"other threads put blocks for {deadline.limit_s:g} s")
        try:
            yield
        finally:
            self._lock.release()

    @property
    def is_new(self) -> bool:
        """Return whether nobody has asked for the channel yet."""
        return self._channel is None and not self._refused

    @property
    def has_channel(self) -> bool:
        """Return whether the service's sealing thread is connected."""
        return self._channel is not None

    def channel(self, ask: Callable[[], int | None], deadline: Deadline) -> int | None:
        """Return the seal channel, which the first caller asks for; None where the service offers none."""
        if self._channel is None and not self._refused:
            with self.held(deadline):
                if self._channel is None:
                    self._channel = ask()
                    self._refused = self._channel is None
                    _limit_waits(self._channel)
        return self._channel

    def put(self, put: Put, table: Table | None, deadline: Deadline) -> bool | None:
        """Put all blocks with the spares at hand, without waiting for another thread.

        Return whether all are new; None where nothing was done. A lost answer closes the session.
        """
        self.size_bytes = put.size_bytes
        if self._channel is None or not self._lock.acquire(blocking=False):
            return None
        try:
            if self._channel is None:
                return None
            new = put.at_once(self._channel, self.spares, table, deadline.left_s)
        finally:
            self._lock.release()
        if new is False and put.statuses is None:
            self._transport.close()
        return new

    def close(self) -> None:
        """Close every descriptor when nobody uses it; the service aborts the drafts. REQUIRES one caller at a time."""
        if self._channel is not None:  # a put under way ends at once, whatever its deadline
            with socket.socket(fileno=os.dup(self._channel)) as end, suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self.after_fork()

    def after_fork(self) -> None:
        """Close every descriptor in a forked child, where the lock may stay a parent's thread's for ever."""
        self._refused = True
        if self._channel is not None:
            os.close(self._channel)
            self._channel = None
        while self.spares:
            os.close(self.spares.pop()[2])

    def add(self, drafts: Sequence[Spare], deadline: Deadline) -> None:
        """Add spare drafts; close them where the session has ended, and on failure. Raises DeadlinePassed."""
        kept = False
        try:
            with self.held(deadline):
                kept = self._channel is not None
                if kept:
                    self.spares.extendleft(drafts)
        finally:
            if not kept:
                close_all([spare[2] for spare in drafts])

    def take(self, count: int, deadline: Deadline) -> list[Spare]:
        """Take spare drafts, as many as there are. Raises DeadlinePassed."""
        with self.held(deadline):
            return [self.spares.pop() for _ in range(min(count, len(self.spares)))]


def _limit_waits(channel: int | None) -> None:
    if channel is not None:
        tick = struct.pack("ll", 0, int(_CHANNEL_TICK_S * 1e6))
        with socket.socket(fileno=os.dup(channel)) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
