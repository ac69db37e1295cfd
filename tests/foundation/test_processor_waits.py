"""Bounds that do not count waits for a processor, and count everything else."""

from __future__ import annotations

import os
import threading
import time

import pytest

from tests.support.processes import Helper
from tests.support.processor_waits import Waits, within


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
            waits, began_s = Waits(), time.monotonic()
            with within(0.6):
                work(0.4)
            assert time.monotonic() - began_s > 0.6
            assert waits.kept_s() > 0.2
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_thread_that_ends_makes_no_bound_shorter() -> None:
    """Its count, of all its life, is gone with it."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    ends = threading.Event()
    try:
        with Helper("print('works', flush=True)\nwhile True: pass") as other:
            other.expect("works")

            def live() -> None:
                work(0.4)
                ends.wait()

            thread = threading.Thread(target=live)
            thread.start()
            waits = Waits()
            work(0.4)
            assert waits.kept_s() > 0.2
            with within(0.6, os.getpid()):
                ends.set()
                thread.join()
    finally:
        os.sched_setaffinity(0, allowed)
