"""The order of requests for drafts: those that find no room wait, instead of failing.

Responsibility: ask for a draft again, while the service says that the gateway's quota of open drafts is used up, or
that DRAM is full of what cannot be evicted (mostly parts that are still being written to NVMe), or while
`gateway.backend.body_budget` has no room. The bytes of a request that waits stay in its socket, so memory is bounded by
the quota, whatever clients send.

Invariants: requests of one owner are served first come, first served, so that small bodies do not pass a large one for
ever; no owner waits behind another. A body that waits for more room does not wait behind those that have none yet: they
wait for it. No request waits longer than limits.GATEWAY_ROOM_WAIT_S; then the client gets SlowDown (which clients
repeat), or, where DRAM was full all the time, NoSpace. A request for two drafts reserves both within `pair`: so no two
requests wait for each other's.

Concurrency: one trio thread; one waiting task of each owner asks at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from typing import TypeVar

import trio

from gateway.protocol.errors import S3Error
from kvfs import limits
from kvfs.errors import NoSpace, QuotaExceeded

T = TypeVar("T")


class DraftQueue:
    """The queue of one process."""

    def __init__(self, hurry: Callable[[str], None] | None = None) -> None:
        """Make an empty queue; `hurry` is called with the owner of a request that waits, again and again."""
        self._hurry = hurry
        self._locks: defaultdict[str, trio.StrictFIFOLock] = defaultdict(trio.StrictFIFOLock)
        self._pair = trio.StrictFIFOLock()

    async def reserve(self, ask: Callable[[], Awaitable[T]], owner: str = "") -> T:
        """Return what `ask` gives, asking again while it raises QuotaExceeded or NoSpace.

        Raises S3Error SlowDown where the quota stays used up, NoSpace where DRAM stays full, else what `ask` raises.
        """
        lock = self._locks[owner]
        if not lock.locked():
            with suppress(QuotaExceeded, NoSpace):
                return await ask()
        return await self._ask_again(ask, owner, limits.GATEWAY_ROOM_POLL_S, lock)

    async def grow(self, ask: Callable[[], Awaitable[T]], owner: str) -> T:
        """Return what `ask` gives to a body that has room already and waits for more; as `reserve`."""
        return await self._ask_again(ask, owner, limits.GATEWAY_GROW_POLL_S, nullcontext())

    async def _ask_again(
        self,
        ask: Callable[[], Awaitable[T]],
        owner: str,
        poll_s: float,
        lock: AbstractAsyncContextManager[None],
    ) -> T:
        full = ""
        with trio.move_on_after(limits.GATEWAY_ROOM_WAIT_S):
            async with lock:
                while True:
                    try:
                        return await ask()
                    except NoSpace as error:
                        full = str(error)
                    except QuotaExceeded:
                        full = ""
                    if self._hurry is not None:
                        self._hurry(owner)
                    await trio.sleep(poll_s)
        raise NoSpace(full) if full else _slow_down()

    @asynccontextmanager
    async def pair(self) -> AsyncIterator[None]:
        """Hold the right to reserve two drafts, one after the other. Raises S3Error SlowDown."""
        with trio.move_on_after(limits.GATEWAY_ROOM_WAIT_S) as waiting:
            await self._pair.acquire()
        if waiting.cancelled_caught:
            raise _slow_down()
        try:
            yield
        finally:
            self._pair.release()


def _slow_down() -> S3Error:
    return S3Error("SlowDown", "Requests under way take all the room there is for new ones.")
