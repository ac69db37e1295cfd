"""Threads that were answered ESTALE and will look the name up again, and the files that are kept for them until then.

The kernel answers ESTALE by looking every name of the path up once more and opening what it finds; a second ESTALE
goes to the program. So a thread that gets the first one gets no second: the file that its next LOOKUP finds
(`StaleRetry.keep`) is kept as it is until its open arrives, whatever becomes of the name meanwhile.

Responsibility: which threads are expected back, what is kept for each, and for how long. How a file is kept is
`mounts.tree.opener`'s.

Invariants: one retry per thread, since a thread waits in its system call; at most limits.MAX_STALE_RETRIES, past
which the second ESTALE is possible again. A file that is kept is released exactly once: by the open or when the time is
over. Which system call a LOOKUP belongs to is not known: a draft made for it has the bytes that the name had, and a
retry ends with an open of other flags, which is another call.

Concurrency: the service's trio thread; a task of its own ends retries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trio

from kvfs import limits
from kvfs.system.linux import is_going
from mounts.kernel.backing import Backings
from mounts.kernel.nodes import Node
from tiers.nvme.large_objects import LargeReader


@dataclass(slots=True, eq=False)
class StaleRetry:
    """The file that one thread will open when it comes back."""

    stale_id: int
    """The node that it wanted to open."""
    writes: bool
    empties: bool
    """Opened with O_TRUNC."""
    uid: int
    looked_up: bool = False
    """Its name was looked up again."""
    node: Node | None = None
    """The node that is kept for it."""
    release: Callable[[], None] | None = None
    """Releases what is kept."""
    reader: LargeReader | None = None
    """The lease of an object that DRAM cannot take."""
    has_ended: bool = False

    def keep(self, node: Node, release: Callable[[], None], reader: LargeReader | None = None) -> None:
        """Keep a node in place of what was kept before; release it where the thread has ceased to be expected while the
        node was found."""
        self._release_kept()
        self.node, self.release, self.reader = node, release, reader
        if self.has_ended:
            self._release_kept()

    def take_reader(self) -> LargeReader | None:
        """Return the reader to the open, which closes it."""
        reader, self.reader = self.reader, None
        return reader

    def close_reader(self) -> None:
        """Close the file that is kept, if there is one."""
        reader = self.take_reader()
        if reader is not None:
            reader.close()

    def end(self) -> None:
        """Release what is kept, and what would be kept from here on."""
        self.has_ended = True
        self._release_kept()

    def _release_kept(self) -> None:
        release, self.release = self.release, None
        if release is not None:
            release()


class StaleRetries:
    """All retries of one mount, by thread."""

    def __init__(self, backings: Backings) -> None:
        self._backings = backings
        self._by_thread: dict[int, StaleRetry] = {}
        self._nursery: trio.Nursery | None = None

    def run_in(self, nursery: trio.Nursery | None) -> None:
        """Set the nursery in which retries wait for their end; None: no more begin."""
        self._nursery = nursery

    def begin(self, thread: int, retry: StaleRetry) -> None:
        """Expect a thread that is about to be answered ESTALE, whose next look-ups and opens come to Python."""
        self.end(thread)
        if thread == 0 or self._nursery is None or len(self._by_thread) >= limits.MAX_STALE_RETRIES:
            retry.end()
            return
        self._by_thread[thread] = retry
        self._backings.expect(thread, True)
        self._nursery.start_soon(self._expire, thread, retry)

    def get(self, thread: int) -> StaleRetry | None:
        """Return the retry of a thread, or None."""
        return self._by_thread.get(thread)

    def end(self, thread: int) -> None:
        """End a thread's retry: its open is done."""
        retry = self._by_thread.pop(thread, None)
        if retry is not None:
            self._backings.expect(thread, False)
            retry.end()

    async def _expire(self, thread: int, retry: StaleRetry) -> None:
        deadline = trio.current_time() + limits.STALE_RETRY_MOST_S
        while self._by_thread.get(thread) is retry:
            await trio.sleep(limits.STALE_RETRY_S)
            if trio.current_time() < deadline and is_going(thread):
                continue
            if self._by_thread.get(thread) is retry:
                self.end(thread)
