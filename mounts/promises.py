"""Callers who were told to look a name up again, and what is kept for them until they have come back.

The kernel answers ESTALE by looking every name of the path up once more and opening what it finds; a second ESTALE
goes to the program. So whoever is told of the first one is promised the second: what his next LOOKUP finds (`hold`) is
kept as it is until his open arrives, whatever becomes of its name meanwhile.

Responsibility: who has such a promise, what is kept for him, and for how long. How a file is kept is `mounts.files`'s.

Invariants: one promise per thread, since a thread waits in its system call; at most limits.MAX_OPEN_PROMISES, past
which the second ESTALE is possible again. What is kept is let go of exactly once: by the open or when the time is over.
Nobody knows which system call a LOOKUP belongs to: what is made for it has the bytes that the name had, and a promise
ends with an open of other flags, which is another call.

Concurrency: the service's trio thread; a task of its own ends promises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trio

from kvfs import limits
from mounts.backing import Backings
from mounts.nodes import Node
from tiers.large import LargeReader


@dataclass(slots=True, eq=False)
class Promise:
    """Made to one thread."""

    told_of: int
    """The node that it wanted to open."""
    writes: bool
    empties: bool
    """Opened with O_TRUNC."""
    uid: int
    looked: bool = False
    """Its name was looked up again."""
    node: Node | None = None
    """What is kept for it."""
    let_go: Callable[[], None] | None = None
    """Ends what is kept of it."""
    reader: LargeReader | None = None
    """What is kept of an object that DRAM cannot take."""

    def keep(self, node: Node, let_go: Callable[[], None]) -> None:
        """Keep this, and no longer what was kept before."""
        self.end()
        self.node, self.let_go = node, let_go

    def take_reader(self) -> LargeReader | None:
        """For the open, which closes it."""
        reader, self.reader = self.reader, None
        return reader

    def close_reader(self) -> None:
        reader = self.take_reader()
        if reader is not None:
            reader.close()

    def end(self) -> None:
        let_go, self.let_go = self.let_go, None
        if let_go is not None:
            let_go()


class Promises:
    """All promises of one mount, by thread."""

    def __init__(self, backings: Backings) -> None:
        self._backings = backings
        self._by_thread: dict[int, Promise] = {}
        self._nursery: trio.Nursery | None = None

    def run_in(self, nursery: trio.Nursery | None) -> None:
        """Where promises wait for their end; None makes no more."""
        self._nursery = nursery

    def make(self, thread: int, promise: Promise) -> None:
        """Before the thread is answered ESTALE: its next look-ups and opens come to Python."""
        self.end(thread)
        if thread == 0 or self._nursery is None or len(self._by_thread) >= limits.MAX_OPEN_PROMISES:
            promise.end()
            return
        self._by_thread[thread] = promise
        self._backings.expect(thread, True)
        self._nursery.start_soon(self._expire, thread, promise)

    def of(self, thread: int) -> Promise | None:
        return self._by_thread.get(thread)

    def end(self, thread: int) -> None:
        """Its open is done: nothing is kept for it any more."""
        promise = self._by_thread.pop(thread, None)
        if promise is not None:
            self._backings.expect(thread, False)
            promise.end()

    async def _expire(self, thread: int, promise: Promise) -> None:
        await trio.sleep(limits.OPEN_PROMISE_S)
        if self._by_thread.get(thread) is promise:
            self.end(thread)
