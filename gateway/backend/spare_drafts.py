"""Drafts granted ahead of use, while there are many writes: a write then waits for the service once, at its seal.

Responsibility: a few empty drafts with room for limits.FIRST_ROOM_BYTES each, asked for in one batch.

Invariants: spares are held only while more than limits.SPARE_RATE writes a second took one lately, and at most
limits.GATEWAY_SPARE_DRAFTS: a quiet gateway holds nothing, a small tier is not used up.

Concurrency: one trio thread; one task refills.
"""

from __future__ import annotations

import logging
from collections import deque

import trio

from gateway.backend.body_budget import Draft
from gateway.backend.session import Session
from kvfs import limits
from kvfs.errors import KvfsError
from kvfs.protocol.messages import Abort, Reserve

log = logging.getLogger("kvfs.gateway")


class SpareDrafts:
    """The spares of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._spares: deque[Draft] = deque()
        self._taken = 0
        self._wanted = trio.Event()
        small = session.hello.details["limits"]["object_bytes"] < limits.SPARE_OBJECT_BYTES
        self._most = 0 if small else limits.GATEWAY_SPARE_DRAFTS

    def take(self, size_bytes: int) -> Draft | None:
        """Take a spare for so many bytes; return None where there is none. Every call counts as a write."""
        if size_bytes > limits.FIRST_ROOM_BYTES:
            return None
        self._taken += 1
        if 2 * len(self._spares) <= self._most and self._taken > limits.SPARE_RATE:
            self._wanted.set()
        return self._spares.popleft() if self._spares else None

    async def run(self) -> None:
        """Refill the spares while there are writes, and abort them when there are none, until cancelled."""
        while True:
            with trio.move_on_after(limits.SPARE_INTERVAL_S) as scope:
                await self._wanted.wait()
                self._wanted = trio.Event()
            try:
                if not scope.cancelled_caught:
                    await self._refill()
                    continue
                if self._taken <= limits.SPARE_RATE:
                    await self._abort_all()
                self._taken = 0
            except KvfsError as error:
                log.debug("no spare drafts: %s", error)
                await trio.sleep(limits.SPARE_INTERVAL_S)

    async def _refill(self) -> None:
        missing = self._most - len(self._spares)
        if missing <= 0:
            return
        hints = (limits.FIRST_ROOM_BYTES,) * missing
        for entry, descriptor in await self._session.opened(Reserve(hints)):
            if descriptor is not None:
                self._spares.append(Draft(self._session, entry.slot, entry.generation, descriptor))

    async def _abort_all(self) -> None:
        drafts, self._spares = list(self._spares), deque()
        for draft in drafts:
            draft.close()
        if drafts:
            await self._session.results(Abort(tuple((draft.slot, draft.generation) for draft in drafts)))

    def close(self) -> None:
        """Close the spares: the session has ended, and with it the drafts."""
        while self._spares:
            self._spares.popleft().close()
