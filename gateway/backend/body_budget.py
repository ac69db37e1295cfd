"""The room that bodies under way have in the tier, in one process: it grows as they come.

Responsibility: who holds how much, whether a body may be admitted or have more, and which one ends when others wait.
A body holds a little at first, and twice as much whenever that is full; its announced size counts only in the check
that all can be finished.

Invariants:
- All that is held fits into the process's part of the quota, and an owner's into limits.OWNER_ROOM_PERCENT of that.
- What is held stays finishable (the banker's algorithm, of one resource): in some order each body can have its total
  out of what is free and what those before it release. So bodies that wait for more never all wait.
- While a request waits, a body must move at the rate that its room asks for (`Holding.is_slow`), else it ends, the one
  with the most room first. While none waits, the limits of every connection are the only ones.

Concurrency: one trio thread.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import trio

from gateway.backend.session import Session
from kvfs import limits
from kvfs.errors import QuotaExceeded


class Arriving(Protocol):
    """A body that a client is sending."""

    @property
    def received_bytes(self) -> int:
        """Return how many bytes of the body have come."""

    @property
    def body_done(self) -> bool:
        """Return whether the whole body has come."""

    def give_up(self) -> None:
        """End the body as if it had stalled."""
        ...


@dataclass(slots=True)
class Draft:
    """A granted draft and its writable descriptor."""

    session: Session
    slot: int
    generation: int
    descriptor: int
    open: bool = True
    holding: Holding | None = None
    """The room of the draft; None where no owner reserved it."""

    def close(self) -> None:
        """Close the descriptor, as the seal wants it, and release the room: nothing more is written."""
        if self.holding is not None:
            self.holding.release()
            self.holding.draft = None
            self.holding = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


@dataclass(slots=True, eq=False)
class Holding:
    """The room of one body, or of a copy, which has no body and all of its room at once."""

    _budget: BodyBudget
    owner: str
    total_bytes: int
    """The size of the whole body."""
    body: Arriving | None
    held_bytes: int = 0
    draft: Draft | None = None
    """The draft that the room is for, whose `close` releases the room."""
    _began_s: float = field(default_factory=trio.current_time)
    _waits_s: float | None = None

    async def grow(self) -> None:
        """Double the room, up to the whole body's. Raises S3Error SlowDown, NoSpace, SessionClosed."""
        self._waits_s = trio.current_time()
        try:
            await self._budget.more(self)
        finally:
            self._began_s += trio.current_time() - self._waits_s
            self._waits_s = None

    @property
    def next_bytes(self) -> int:
        """Return the room after the next growth: twice what there is, at most all that the body needs."""
        return min(self.total_bytes, 2 * self.held_bytes)

    def is_slow(self, now_s: float) -> bool:
        """Return whether the body comes slower than its room in limits.ROOM_TURN_S and limits.ENOUGH_RATE_BYTES_S."""
        age_s = now_s - self._began_s
        if self.body is None or self._waits_s is not None or age_s < limits.ROOM_GRACE_S:
            return False
        rate = min(self.held_bytes / limits.ROOM_TURN_S, limits.ENOUGH_RATE_BYTES_S)
        return not self.body.body_done and self.body.received_bytes < rate * age_s

    def release(self) -> None:
        """Release the room; twice is harmless."""
        self._budget.release(self)


class BodyBudget:
    """See the module's header."""

    def __init__(self, more: Callable[[Holding], Awaitable[None]]) -> None:
        """Make an empty budget; `more` reserves `next_bytes` of the tier for a holding."""
        self.more = more
        self._capacity = 0
        self._share = 0
        self._held = 0
        self._owners: Counter[str] = Counter()
        self._transfers: Counter[str] = Counter()
        self._bodies: set[Holding] = set()
        self._growing: set[Holding] = set()
        """Bodies that hold less than they need in all."""
        self._hurried_s = -1.0
        self.given_up = 0
        """Bodies that ended because others waited."""

    def resize(self, capacity_bytes: int, largest_bytes: int) -> None:
        """Set the capacity; an owner's share is never less than one object of the largest size."""
        self._capacity = capacity_bytes
        share = max(capacity_bytes * limits.OWNER_ROOM_PERCENT // 100, largest_bytes)
        self._share = min(share, capacity_bytes)

    def admit(
        self, owner: str, total_bytes: int, body: Arriving | None = None, *, whole: bool = False
    ) -> Holding:
        """Admit a body, or a copy, which has none; `whole`: with all of its room at once. Raises QuotaExceeded."""
        first = total_bytes if body is None or whole else min(total_bytes, limits.FIRST_ROOM_BYTES)
        holding = Holding(self, owner, total_bytes, body)
        self.set(holding, first)
        if body is not None:
            self._bodies.add(holding)
        return holding

    def set(self, holding: Holding, held_bytes: int) -> None:
        """Set what a holding has. Raises QuotaExceeded, with nothing changed."""
        before = holding.held_bytes
        self._put(holding, held_bytes)
        if held_bytes > before and not self._is_safe(holding):
            self._put(holding, before)
            raise QuotaExceeded(f"{holding.owner}: no room for {held_bytes} bytes of a body")

    def _put(self, holding: Holding, held_bytes: int) -> None:
        self._held += held_bytes - holding.held_bytes
        self._owners[holding.owner] += held_bytes - holding.held_bytes
        holding.held_bytes = held_bytes
        if 0 < held_bytes < holding.total_bytes:
            self._growing.add(holding)
        else:
            self._growing.discard(holding)

    def _is_safe(self, holding: Holding) -> bool:
        own_bytes = self._owners[holding.owner]
        if self._held > self._capacity or own_bytes > self._share:
            return False
        if holding not in self._growing:  # it ends by itself, and then all is as before
            return True
        own = [each for each in self._growing if each.owner == holding.owner]
        return _can_end(self._growing, self._capacity) and _can_end(own, self._share)

    def release(self, holding: Holding) -> None:
        """Free the room of a body that is over."""
        self._put(holding, 0)
        self._bodies.discard(holding)
        if not self._owners[holding.owner]:
            del self._owners[holding.owner]

    # --- transfers -----------------------------------------------------------------------------------------
    def begin_transfer(self, owner: str) -> None:
        """Begin to move an object larger than DRAM takes. Raises QuotaExceeded."""
        most = limits.MAX_TRANSFERS
        if (
            self._transfers.total() >= most
            or self._transfers[owner] >= most * limits.OWNER_ROOM_PERCENT // 100
        ):
            raise QuotaExceeded(f"{owner}: {most} large objects are on their way, which is the limit")
        self._transfers[owner] += 1

    def end_transfer(self, owner: str) -> None:
        """Count a transfer of this owner as ended."""
        self._transfers[owner] -= 1
        if not self._transfers[owner]:
            del self._transfers[owner]

    # --- pressure ------------------------------------------------------------------------------------------
    def hurry(self, owner: str) -> None:
        """End the slow body with the most room, since a request of `owner` waits.

        Where the owner's share is used up, it is one of the owner's bodies.
        """
        now_s = trio.current_time()
        if now_s - self._hurried_s < limits.ROOM_HURRY_S:
            return
        self._hurried_s = now_s
        used_up = self._owners[owner] + limits.FIRST_ROOM_BYTES > self._share
        slow = [each for each in self._bodies if each.is_slow(now_s) and (not used_up or each.owner == owner)]
        if slow:
            worst = max(slow, key=lambda each: each.held_bytes)
            self._bodies.discard(worst)
            self.given_up += 1
            assert worst.body is not None
            worst.body.give_up()


def _can_end(growing: Iterable[Holding], limit_bytes: int) -> bool:
    """Return whether all can have their totals one after the other, as those before them end."""
    waiting = sorted(growing, key=lambda each: each.total_bytes - each.held_bytes)
    free = limit_bytes - sum(each.held_bytes for each in waiting)
    for each in waiting:
        if min(each.total_bytes, limit_bytes) - each.held_bytes > free:
            return False
        free += each.held_bytes
    return True
