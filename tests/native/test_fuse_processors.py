"""Which processors the threads of the native FUSE loop are on, on a machine of few."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.fuse_stand import GETATTR, GETATTR_IN, ROOT, Stand
from tests.support.waits import WAIT_S

PROCESSORS = os.sched_getaffinity(0)
pytestmark = pytest.mark.skipif(not 2 <= len(PROCESSORS) <= 4, reason="for machines of 2 to 4 processors")


def affinities() -> list[set[int]]:
    """Return the processors of each thread of this process."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            found.append(os.sched_getaffinity(int(task.name)))
        except ProcessLookupError:
            continue
    return found


def threads_off(processor: int) -> int:
    """Count the threads that may run on all processors but one."""
    return affinities().count(PROCESSORS - {processor})


def are_settled() -> bool:
    """Whether each thread that keeps a processor awake is on it."""
    return all({processor} in affinities() for processor in PROCESSORS)


def ask_until(stand: Stand, condition: Callable[[], bool]) -> None:
    """Have the reader take requests until something is so: it looks at it each time that it is done."""
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        stand.ask(GETATTR, ROOT, GETATTR_IN)


def test_the_reader_keeps_off_the_processor_of_whoever_watches_for_calls(stand: Stand) -> None:
    processor = min(PROCESSORS)
    ask_until(stand, are_settled)
    before = threads_off(processor)
    os.sched_setaffinity(0, {processor})
    try:
        stand.loop.watch_calls(True)
        ask_until(stand, lambda: threads_off(processor) == before + 1)
        stand.loop.watch_calls(False)
        ask_until(stand, lambda: threads_off(processor) == before)
    finally:
        os.sched_setaffinity(0, PROCESSORS)
