"""How long a test waits for what must come, and the two ways to wait for it.

Invariants: a bound ends a hang and judges no speed. A machine that runs several suites at once answers in seconds what
a quiet one answers in milliseconds (seen: ten seconds missed by tests that take two), so the bound is one, and far.
Concurrency: `eventually` blocks its thread, `until` its trio task.
"""

import time
from collections.abc import Callable

import trio

WAIT_S = 60.0


def eventually(
    condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S, *, every_s: float = 0.002
) -> None:
    """Wait until `condition` holds: for what the kernel, a thread or a process does in its own time.

    `every_s`: longer where a look takes the processor from what is waited for. Raises AssertionError with `what` after
    `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"after {timeout_s} s still not: {what}"
        time.sleep(every_s)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds: for what another task, thread or process does.

    Raises trio.TooSlowError after WAIT_S.
    """
    pause_s = 0.0003
    with trio.fail_after(WAIT_S):
        while not condition():  # sockets, threads and processes say nothing
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.005)
