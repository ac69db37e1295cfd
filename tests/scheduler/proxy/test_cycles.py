"""The collector of cycles, which `calm_gc` lets run rarely, has next to nothing to do for the proxy's requests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.stub_engines import PROMPT, proxy_stand

REQUESTS = 20
OURS = ("kvfs.", "scheduler.")


@contextmanager
def kept_garbage() -> Iterator[list[object]]:
    """Yield what the collector found at the end."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    found: list[object] = []
    try:
        yield found
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def test_requests_leave_no_cycles_of_their_own() -> None:
    async with proxy_stand("prefill", "decode") as stand:
        await stand.ask("/v1/completions", {"prompt": PROMPT})  # opens the connections to the engines
        with kept_garbage() as found:
            for number in range(REQUESTS):
                await stand.ask("/v1/completions", {"prompt": PROMPT, "stream": number % 2 == 0})
        kinds = [type(each) for each in found]
        ours = [kind for kind in kinds if kind.__module__.startswith(OURS)]
        assert len(ours) < REQUESTS  # a connection that ended, such as a probe's, leaves one
