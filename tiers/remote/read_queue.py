"""The order of reads at one peer: urgent ones first, and no more bytes under way than a bound.

Invariants: who was let in leaves exactly once; a read larger than the bound goes alone; reads that are not urgent take
half of the bound at most, so that an urgent one need not wait for all of them. One that becomes urgent while it waits
goes behind those that are. Concurrency: the service's trio thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import trio

from kvfs import limits
from kvfs.errors import Busy


class Urgency:
    """Says whether somebody waits for a read, which may come to be so while it is queued."""

    def __init__(self, is_urgent: bool) -> None:
        self.is_urgent = is_urgent
        self.on_raise: Callable[[], None] = _nothing
        """Called when it becomes urgent; the queue's that the read waits in."""

    def raise_(self) -> None:
        """Make it urgent."""
        if not self.is_urgent:
            self.is_urgent = True
            self.on_raise()


def _nothing() -> None:
    return


@dataclass(slots=True, eq=False)
class _Waiting:
    size_bytes: int
    admitted: trio.Event = field(default_factory=trio.Event)


class ReadQueue:
    """Let reads in, `at_once` at a time."""

    def __init__(self, at_once: int, most_bytes: int = limits.MAX_REMOTE_BYTES) -> None:
        self._at_once = self._left = at_once
        self._most_bytes = most_bytes
        self._bytes = 0
        self._urgent: deque[_Waiting] = deque()
        self._others: deque[_Waiting] = deque()

    @property
    def under_way_bytes(self) -> int:
        """Return the bytes of all reads that were let in and have not ended."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._urgent) + len(self._others)

    @asynccontextmanager
    async def entered(self, size_bytes: int, urgency: Urgency) -> AsyncIterator[None]:
        """Wait until a read of so many bytes may begin; it ends with the block. Raises Busy where too many wait."""
        if len(self) >= limits.MAX_REMOTE_WAITING:
            raise Busy(f"{len(self)} reads wait for this peer, which is the limit")
        waiting = _Waiting(size_bytes)
        (self._urgent if urgency.is_urgent else self._others).append(waiting)
        urgency.on_raise = partial(self._raise, waiting)
        self._admit()
        try:
            await waiting.admitted.wait()
            yield
        finally:
            urgency.on_raise = _nothing
            if waiting.admitted.is_set():
                self._left += 1
                self._bytes -= size_bytes
            else:
                (self._urgent if urgency.is_urgent else self._others).remove(waiting)
            self._admit()

    def resize(self, at_once: int) -> None:
        """Let in so many at a time from now on; those that are more end as they would."""
        self._left += at_once - self._at_once
        self._at_once = at_once
        self._admit()

    def _raise(self, waiting: _Waiting) -> None:
        if not waiting.admitted.is_set():
            self._others.remove(waiting)
            self._urgent.append(waiting)
            self._admit()

    def _admit(self) -> None:
        for line, most_bytes in ((self._urgent, self._most_bytes), (self._others, self._most_bytes // 2)):
            while (
                line
                and self._left > 0
                and (not self._bytes or self._bytes + line[0].size_bytes <= most_bytes)
            ):
                waiting = line.popleft()
                self._left -= 1
                self._bytes += waiting.size_bytes
                waiting.admitted.set()
            if line:
                return
