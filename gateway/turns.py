"""Room for drafts, in turn: bodies that come while the room for drafts is taken wait, instead of failing.

Responsibility: ask for a draft again, while the service says that the gateway's quota of open drafts is used up, or
that DRAM is full of what cannot be evicted: mostly parts that are still being written to NVMe; or `gateway.room` that
there is none. The bytes of a request that waits stay in its socket, so memory is bounded by the quota, whatever clients
send.

Invariants: of one owner first come, first served, so that a large body is not passed by small ones for ever; no owner
waits behind another. Who waits for more room does not wait behind those who have none yet: they wait for him. Nobody
waits longer than limits.GATEWAY_ROOM_WAIT_S; then the client is told to come again (SlowDown, which clients repeat),
or, where DRAM was full all the time, that it is. Who needs two drafts takes both within `pair`: no two of them wait for
what the other has.

Concurrency: one trio thread; one waiting task of each owner asks at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from typing import TypeVar

import trio

from gateway.errors import S3Error
from kvfs import limits
from kvfs.errors import NoSpace, QuotaExceeded

T = TypeVar("T")


class Turns:
    """The queue of one process."""

    def __init__(self, hurry: Callable[[str], None] | None = None) -> None:
        """`hurry` is told whose request waits, again and again."""
        self._hurry = hurry
        self._turns: defaultdict[str, trio.StrictFIFOLock] = defaultdict(trio.StrictFIFOLock)
        self._pair = trio.StrictFIFOLock()

    async def reserve(self, ask: Callable[[], Awaitable[T]], owner: str = "") -> T:
        """What `ask` gives. Raises S3Error SlowDown where its quota stays used up, NoSpace where DRAM stays full, and
        all else that it raises."""
        turn = self._turns[owner]
        if not turn.locked():
            with suppress(QuotaExceeded, NoSpace):
                return await ask()
        return await self._ask_again(ask, owner, limits.GATEWAY_ROOM_POLL_S, turn)

    async def grow(self, ask: Callable[[], Awaitable[T]], owner: str) -> T:
        """The same for who has room already, and waits for more."""
        return await self._ask_again(ask, owner, limits.GATEWAY_GROW_POLL_S, nullcontext())

    async def _ask_again(
        self,
        ask: Callable[[], Awaitable[T]],
        owner: str,
        poll_s: float,
        turn: AbstractAsyncContextManager[None],
    ) -> T:
        full = ""
        with trio.move_on_after(limits.GATEWAY_ROOM_WAIT_S):
            async with turn:
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
