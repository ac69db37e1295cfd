"""Room for drafts, in turn: bodies that come while the room for drafts is taken wait, instead of failing.

Responsibility: ask for a draft again, while the service says that the gateway's quota of open drafts is used up, or
that DRAM is full of what cannot be evicted: mostly parts that are still being written to NVMe. The bytes of a request
that waits stay in its socket, so memory is bounded by the quota, whatever clients send.

Invariants: first come, first served, so that a large body is not passed by small ones for ever. Nobody waits longer
than limits.GATEWAY_ROOM_WAIT_S; then the client is told to come again (SlowDown, which clients repeat), or, where DRAM
was full all the time, that it is. Who needs two drafts takes both within `pair`: no two of them wait for what the
other has.

Concurrency: one trio thread; one waiting task asks at a time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from gateway.drafts import Draft
from gateway.errors import S3Error
from kvfs import limits
from kvfs.errors import KvfsError, NoSpace, QuotaExceeded


class Turns:
    """The queue of one process."""

    def __init__(self) -> None:
        self._turn = trio.StrictFIFOLock()
        self._pair = trio.StrictFIFOLock()

    async def reserve(self, ask: Callable[[], Awaitable[Draft]]) -> Draft:
        """What `ask` gives. Raises S3Error SlowDown where its quota stays used up, NoSpace where DRAM stays full, and
        all else that it raises."""
        why: KvfsError | None = None
        if not self._turn.locked():
            try:
                return await ask()
            except (QuotaExceeded, NoSpace) as error:
                why = error
        with trio.move_on_after(limits.GATEWAY_ROOM_WAIT_S):
            async with self._turn:
                while True:
                    try:
                        return await ask()
                    except (QuotaExceeded, NoSpace) as error:
                        why = error
                    await trio.sleep(limits.GATEWAY_ROOM_POLL_S)
        raise why if isinstance(why, NoSpace) else _slow_down()

    @asynccontextmanager
    async def pair(self) -> AsyncIterator[None]:
        """Where two drafts are asked for, one after the other. Raises S3Error SlowDown."""
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
