"""Slow reads, asked of another holder as well: when, how many, and which of the two counts.

Responsibility: what a peer's reads take, the share of bytes that may be asked twice, and the race of the two reads.

Invariants: what is asked twice is never more than limits.REMOTE_HEDGE_SHARE of what is asked, at any moment: a cluster
that is slow as a whole does not double its own load. Samples are bounded in number for each octave of bytes.
Concurrency: pure, but for `race`, which is the service's trio thread's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from math import ceil

import trio

from kvfs import limits


def hedge_after_s(samples: Sequence[float]) -> float | None:
    """Return how long a read goes on before another holder is asked as well; None where too little is known.

    Of the samples, which are times that such reads took, limits.REMOTE_HEDGE_SHARE at most are longer.
    """
    if len(samples) < limits.REMOTE_LEAST_LATENCIES:
        return None
    quick = ceil(len(samples) * (1 - limits.REMOTE_HEDGE_SHARE))
    return max(sorted(samples)[quick - 1], limits.REMOTE_HEDGE_FLOOR_S)


class Latencies:
    """Keeps the times that the latest reads of one peer took, for each octave of their bytes."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}

    def note(self, size_bytes: int, took_s: float) -> None:
        """Keep the time that a read took."""
        samples = self._samples.setdefault(size_bytes.bit_length(), deque(maxlen=limits.REMOTE_LATENCIES))
        samples.append(took_s)

    def hedge_after_s(self, size_bytes: int) -> float | None:
        """Return when to hedge a read of so many bytes, as the function of this name does."""
        return hedge_after_s(self._samples.get(size_bytes.bit_length(), ()))


class Allowance:
    """Says which reads may be asked twice."""

    def __init__(self) -> None:
        self._left_bytes = 0.0

    def earn(self, size_bytes: int) -> None:
        """Count bytes that are asked for once."""
        left_bytes = self._left_bytes + size_bytes * limits.REMOTE_HEDGE_SHARE
        self._left_bytes = min(left_bytes, limits.MAX_REMOTE_BYTES)

    def take(self, size_bytes: int) -> bool:
        """Return whether so many bytes may be asked for once more now, and count them if so."""
        if size_bytes > self._left_bytes:
            return False
        self._left_bytes -= size_bytes
        return True


async def race(
    first: Callable[[trio.Event], Awaitable[None]],
    second: Callable[[], Awaitable[None]],
    after_s: float,
    is_done: Callable[[], bool],
) -> float | None:
    """Run `first`, and once it has gone on for `after_s` from its event on, `second` beside it; when all is done, end
    the one that has not ended. Return how long `first` had then gone on, if it was that one."""
    began, began_s, is_hedged = trio.Event(), 0.0, False

    async def hedge(of: trio.CancelScope) -> None:
        nonlocal began_s, is_hedged
        await began.wait()
        began_s = trio.current_time()
        await trio.sleep(after_s)
        is_hedged = True
        await second()
        if is_done():
            of.cancel()

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            nursery.start_soon(hedge, scope)
            await first(began)
        if is_done() or not is_hedged:
            nursery.cancel_scope.cancel()
    return trio.current_time() - began_s if scope.cancelled_caught else None
