"""Tasks that LMCache submits and asks for later: done on threads, each result kept until it is taken.

Invariants: every task has a result, `otherwise` where it fails, and LMCache is notified of it. Concurrency: any thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from kvfs.limits import CONNECTOR_THREADS


class Notifier(Protocol):
    """LMCache's event descriptor."""

    def notify(self) -> None:
        """Wake up who waits for results."""


class Results:
    """Results of one kind of tasks; `done` is notified of each."""

    def __init__(self, done: Notifier) -> None:
        self._done = done
        self._lock = threading.Lock()
        self._results: dict[int, Any] = {}

    def put(self, task: int, result: Any) -> None:
        """Keep a result, and notify LMCache."""
        with self._lock:
            self._results[task] = result
        self._done.notify()

    def take(self, task: int) -> Any:
        """Return the result of a task, once; None before."""
        with self._lock:
            return self._results.pop(task, None)

    def take_all(self) -> dict[int, Any]:
        """Return all results by task, each once."""
        with self._lock:
            results, self._results = self._results, {}
        return results


class Tasks:
    """Do tasks on CONNECTOR_THREADS threads."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._next = 0
        self._workers = ThreadPoolExecutor(CONNECTOR_THREADS, thread_name_prefix="kvfs-l2")

    def submit(self, do: Callable[[], Any], otherwise: Any, results: Results) -> int:
        """Begin a task; return its number, which its result is taken by."""
        with self._lock:
            task = self._next
            self._next += 1

        def run() -> None:
            try:
                result = do()
            except Exception:
                self._log.exception("a task of LMCache failed")
                result = otherwise
            results.put(task, result)

        self._workers.submit(run)
        return task

    def close(self) -> None:
        """Wait for the tasks that have begun; the others end without a result."""
        self._workers.shutdown(wait=True, cancel_futures=True)
