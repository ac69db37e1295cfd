"""Bounds on time that do not count what a busy machine kept a process waiting for a processor.

Linux counts for each thread how long it was ready to run and did not. What is left of the clock is what the code took
and what it waited for by itself: timers, peers, locks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Waits:
    """How long this thread, and all threads of the processes, are kept waiting for a processor from here on.

    A thread that ends takes its count along.
    """

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._before_ns = self._counts_ns()

    def kept_s(self) -> float:
        now_ns = self._counts_ns()
        return sum(count - self._before_ns.get(task, 0) for task, count in now_ns.items()) / 1e9

    def _counts_ns(self) -> dict[Path, int]:
        tasks = [Path(f"/proc/self/task/{threading.get_native_id()}")]
        for pid in self._pids:
            with suppress(FileNotFoundError, ProcessLookupError):  # ended since
                tasks += Path(f"/proc/{pid}/task").iterdir()
        found = {}
        for task in tasks:
            with suppress(FileNotFoundError, ProcessLookupError):
                found[task] = int((task / "schedstat").read_text().split()[1])
        return found


@contextmanager
def within(bound_s: float, *pids: int) -> Iterator[None]:
    """Assert that the body ends in time; `pids`: processes that take part in it."""
    waits, began_s = Waits(*pids), time.monotonic()
    try:
        yield
    finally:
        took_s = time.monotonic() - began_s
        kept_s = waits.kept_s()
        said = f"{took_s:.2f} s, {kept_s:.2f} s of it for a processor; the bound is {bound_s} s"
        assert took_s - kept_s < bound_s, said
