"""Calls that the native loop has queued for Python, handled in the kernel's order before what depends on them.

Responsibility: take calls from the loop and hand them to their handler, one after the other.

Invariants: while a call is handled, or there is no handler, `catch_up` does nothing, and calls stay queued.

Concurrency: the service's trio thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvfs._native.fuse.loop import Call, FuseLoop


class NoCalls:
    """The queue of a mount without the native loop."""

    def catch_up(self) -> None:
        """Do nothing."""

    def is_behind(self) -> bool:
        """Return False: there are no calls."""
        return False


class LoopCalls:
    """The calls of one loop."""

    def __init__(self, loop: FuseLoop) -> None:
        self._loop = loop
        self._handle: Callable[[Call], None] | None = None
        self._caught_up: Callable[[], None] = lambda: None
        self._handling = False

    @contextmanager
    def handled_by(self, handle: Callable[[Call], None], caught_up: Callable[[], None]) -> Iterator[None]:
        """Hand calls to `handle`, which does not raise, until the context ends; `caught_up` follows the last one."""
        self._handle, self._caught_up = handle, caught_up
        try:
            yield
        finally:
            self._handle = None

    def catch_up(self, limit: int = 1 << 20) -> None:
        """Handle the calls that are queued, `limit` or a few more at most."""
        handle, handled = self._handle, 0
        if self._handling or handle is None or not self._loop.calls_waiting:
            return
        self._handling = True
        while handled < limit and (calls := self._loop.take_calls()):
            for call in calls:
                handle(call)
            handled += len(calls)
        self._handling = False
        if not self._loop.calls_waiting:
            self._caught_up()

    def is_behind(self) -> bool:
        """Return whether there are calls, so that the tree may lack what the loop did by itself."""
        return self._handling or self._loop.calls_waiting


CallQueue = LoopCalls | NoCalls
