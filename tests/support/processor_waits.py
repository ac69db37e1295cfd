"""Bounds on time that do not count what a busy machine kept a process waiting for a processor.

Linux counts for each thread how long it was ready to run and did not. What is left of the clock is what the code took
and what it waited for by itself: timers, peers, locks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


def waited_s(pids: Sequence[int] = ()) -> float:
    """Return how long this thread, and all threads of the processes, were kept waiting for a processor."""
    tasks = [Path(f"/proc/self/task/{threading.get_native_id()}")]
    for pid in pids:
        tasks += Path(f"/proc/{pid}/task").iterdir()
    found = 0
    for task in tasks:
        with suppress(FileNotFoundError, ProcessLookupError):  # ended since
            found += int((task / "schedstat").read_text().split()[1])
    return found / 1e9


@contextmanager
def within(bound_s: float, *pids: int) -> Iterator[None]:
    """Assert that the body ends in time; `pids`: processes that take part in it."""
    began_s, before_s = time.monotonic(), waited_s(pids)
    try:
        yield
    finally:
        took_s, kept_s = time.monotonic() - began_s, waited_s(pids) - before_s
        said = f"{took_s:.2f} s, {kept_s:.2f} s of it for a processor; the bound is {bound_s} s"
        assert took_s - kept_s < bound_s, said
