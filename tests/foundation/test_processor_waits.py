"""Bounds that do not count waits for a processor, and count everything else."""

from __future__ import annotations

import os
import threading
import time

import pytest

from tests.support.processes import Helper
from tests.support.processor_waits import waited_s, within


def work(cpu_s: float) -> None:
    began_s = time.thread_time()
    while time.thread_time() - began_s < cpu_s:
        pass


def test_what_the_code_takes_itself_counts() -> None:
    with pytest.raises(AssertionError, match=r"the bound is 0\.1 s"), within(0.1):
        work(0.11)
    with pytest.raises(AssertionError, match=r"the bound is 0\.1 s"), within(0.1):
        threading.Event().wait(0.11)


def test_what_others_take_does_not() -> None:
    """Two processes on one processor: each waits for as long as it works."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with Helper("print('works', flush=True)\nwhile True: pass") as other:
            other.expect("works")
            before_s, began_s = waited_s(), time.monotonic()
            with within(0.6):
                work(0.4)
            assert time.monotonic() - began_s > 0.6
            assert waited_s() - before_s > 0.2
    finally:
        os.sched_setaffinity(0, allowed)
