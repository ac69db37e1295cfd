"""How long the file that a thread will open is kept: until it opens it, or can no longer do so."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import trio
from trio.testing import MockClock

from kvfs.limits import STALE_RETRY_MOST_S, STALE_RETRY_S
from mounts.kernel.backing import PlainBackings
from mounts.kernel.nodes import NodeTable
from mounts.kernel.stale_retries import StaleRetries, StaleRetry
from tests.support.processes import Helper

WAITS = "import sys; sys.stdin.read()"


async def kept_for(helper: Helper, meanwhile: Callable[[], None], passed_s: float) -> bool:
    """Whether a file is still kept for a process so long after `meanwhile`."""
    backings = PlainBackings()
    retries, released = StaleRetries(backings), []
    retry = StaleRetry(5, False, False, 0)
    retry.keep(NodeTable(backings).root, lambda: released.append(True))
    async with trio.open_nursery() as nursery:
        retries.run_in(nursery)
        retries.begin(helper.process.pid, retry)
        meanwhile()
        await trio.sleep(passed_s)
        kept = not released
        assert (retries.get(helper.process.pid) is retry) == kept
        retries.end(helper.process.pid)
        assert released == [True]
        nursery.cancel_scope.cancel()
    return kept


@pytest.mark.parametrize(("passed_s", "kept"), [(3.5 * STALE_RETRY_S, True), (STALE_RETRY_MOST_S + 1, False)])
async def test_a_thread_that_gets_no_processor_is_waited_for(
    passed_s: float, kept: bool, autojump_clock: MockClock
) -> None:
    with Helper(WAITS) as helper:
        assert await kept_for(helper, lambda: None, passed_s) == kept


@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
async def test_nothing_is_kept_for_one_that_does_not_return(
    end: signal.Signals, autojump_clock: MockClock
) -> None:
    def ended() -> None:
        os.kill(helper.process.pid, end)
        os.waitid(os.P_PID, helper.process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)

    with Helper(WAITS) as helper:
        assert not await kept_for(helper, ended, 1.5 * STALE_RETRY_S)
        os.kill(helper.process.pid, signal.SIGCONT)


def test_what_is_found_for_a_thread_that_is_no_longer_expected_is_not_kept() -> None:
    """It was killed while its object was loaded: nobody would release the object's bytes."""
    retry, released = StaleRetry(5, False, False, 0), []
    retry.end()
    retry.keep(NodeTable(PlainBackings()).root, lambda: released.append(True))
    assert released == [True]
