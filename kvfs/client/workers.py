"""Threads on which a client's futures run: few, bounded, started when they are first needed.

Invariants: at most limits.CLIENT_FUTURES calls are under way or wait; each ends within its own timeout, so that
closing does, too. Concurrency: any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kvfs import limits
from kvfs.errors import InvalidRequest, LimitExceeded

T = TypeVar("T")


class Workers:
    """Run calls in threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False
        self._room = threading.BoundedSemaphore(limits.CLIENT_FUTURES)

    def submit(self, do: Callable[[], T]) -> Future[T]:
        """Queue a call. Raises LimitExceeded where too many wait already, InvalidRequest after `close`."""
        if not self._room.acquire(blocking=False):
            raise LimitExceeded(f"{limits.CLIENT_FUTURES} calls are under way, which is the limit")
        try:
            with self._lock:
                if self._closed:
                    raise InvalidRequest("these blocks are closed")
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(limits.CLIENT_THREADS, thread_name_prefix="kvfs-blocks")
                future = self._pool.submit(do)
        except BaseException:
            self._room.release()
            raise
        future.add_done_callback(lambda _: self._room.release())
        return future

    def close(self) -> None:
        """Cancel the calls that wait; those under way go on."""
        with self._lock:
            self._closed = True
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)
