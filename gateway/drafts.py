"""Drafts granted ahead of use, while there are many writes: a write then waits for the service once, at its seal.

Responsibility: a few empty drafts with room for limits.SPARE_DRAFT_BYTES each, asked for in one batch.

Invariants: spares are held only while more than limits.SPARE_RATE writes a second took one lately, and at most
limits.GATEWAY_SPARE_DRAFTS: a quiet gateway holds nothing, a small tier is not promised away.

Concurrency: one trio thread; one task refills.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from dataclasses import dataclass, field

import trio

from gateway.room import Holding
from gateway.session import Session
from kvfs import limits
from kvfs.errors import KvfsError
from kvfs.messages import Abort, Reserve

log = logging.getLogger("kvfs.gateway")


@dataclass(slots=True)
class Draft:
    """A granted draft and its writable descriptor."""

    session: Session
    slot: int
    generation: int
    descriptor: int
    open: bool = field(default=True)
    holding: Holding | None = None
    """Its room, where it was asked for by an owner."""

    def close(self) -> None:
        """Close the descriptor, as the seal wants it, and give the room back: nothing more is written."""
        if self.holding is not None:
            self.holding.release()
            self.holding.draft = None
            self.holding = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class SpareDrafts:
    """Of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._spares: deque[Draft] = deque()
        self._taken = 0
        self._wanted = trio.Event()
        small = session.hello.details["limits"]["object_bytes"] < limits.SPARE_OBJECT_BYTES
        self._most = 0 if small else limits.GATEWAY_SPARE_DRAFTS

    def take(self, size_bytes: int) -> Draft | None:
        """A spare for so many bytes, if there is one; counts the want."""
        if size_bytes > limits.SPARE_DRAFT_BYTES:
            return None
        self._taken += 1
        if 2 * len(self._spares) <= self._most and self._taken > limits.SPARE_RATE:
            self._wanted.set()
        return self._spares.popleft() if self._spares else None

    async def run(self) -> None:
        """Refill while there are writes, give back when there are none; until cancelled."""
        while True:
            with trio.move_on_after(limits.SPARE_INTERVAL_S) as scope:
                await self._wanted.wait()
                self._wanted = trio.Event()
            try:
                if not scope.cancelled_caught:
                    await self._refill()
                    continue
                if self._taken <= limits.SPARE_RATE:
                    await self._give_back()
                self._taken = 0
            except KvfsError as error:
                log.debug("no spare drafts: %s", error)
                await trio.sleep(limits.SPARE_INTERVAL_S)

    async def _refill(self) -> None:
        missing = self._most - len(self._spares)
        if missing <= 0:
            return
        hints = (limits.SPARE_DRAFT_BYTES,) * missing
        for entry, descriptor in await self._session.opened(Reserve(hints)):
            if descriptor is not None:
                self._spares.append(Draft(self._session, entry.slot, entry.generation, descriptor))

    async def _give_back(self) -> None:
        drafts, self._spares = list(self._spares), deque()
        for draft in drafts:
            draft.close()
        if drafts:
            await self._session.results(Abort(tuple((draft.slot, draft.generation) for draft in drafts)))

    def close(self) -> None:
        """The session has ended, and with it the drafts."""
        while self._spares:
            self._spares.popleft().close()
