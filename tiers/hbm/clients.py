"""Processes that have a pool's segments mapped, and when what they had may be reused.

Responsibility: one record for each, and the decision about one whose session has ended.

Invariants: leases end with the process, as what a dead process reads harms nobody. What it may still *write*, its
drafts, ends later: when it is off the device, too, or where nobody knows that, HBM_DRAIN_S after its end. A process
that is still there HBM_HANG_S after its session is hung: nothing of it is ever reused before it has ended.
Concurrency: the service's thread only; no call waits.
"""

from __future__ import annotations

import os
import select
from dataclasses import dataclass, field
from enum import Enum

from kvfs import limits
from kvfs._native.hbm.hazards import Hazards


class Standing(Enum):
    """Says what may be reused of a client."""

    ACTIVE = "active"
    DRAINING = "draining"
    """Its session has ended; its drafts wait."""
    HUNG = "hung"
    """Its drafts' segments are out of use."""
    OFF_DEVICE = "off the device"
    """Its drafts are free."""


def standing(
    *, ended_s: float | None, exited_s: float | None, on_device: bool | None, now_s: float
) -> Standing:
    """Decide about a client whose session ended, and whose process exited, at these times."""
    if ended_s is None:
        return Standing.ACTIVE
    if exited_s is not None:
        waited = on_device is None and now_s - exited_s >= limits.HBM_DRAIN_S
        if waited or on_device is False:
            return Standing.OFF_DEVICE
    return Standing.HUNG if now_s - ended_s >= limits.HBM_HANG_S else Standing.DRAINING


@dataclass(slots=True, eq=False)
class PoolClient:
    """Describes one process; made and closed by the tier."""

    pid: int
    pidfd: int
    token: int = 0
    """By which the process names this place after it has left it (`HbmTier.detach_left`)."""
    hazards: Hazards = field(default_factory=Hazards)
    drafts: set[int] = field(default_factory=set)
    """Slots that it may write, in quarantine once its session has ended."""
    blocked: set[int] = field(default_factory=set)
    """Segments that are out of use for it."""
    ended_s: float | None = None
    exited_s: float | None = None

    def look(self, now_s: float) -> None:
        """Note whether the process has exited: then its session has ended, too."""
        if self.exited_s is None:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            if poll.poll(0):
                self.exited_s = now_s
        if self.exited_s is not None and self.ended_s is None:
            self.ended_s = self.exited_s

    def has_leased(self, slot: int, generation: int) -> bool:
        """Return whether it has a retired slot leased."""
        return self.exited_s is None and self.hazards.name(slot, generation)

    def standing(self, holders: frozenset[int] | None, now_s: float) -> Standing:
        """Decide what may be reused, with those who are on the device."""
        on_device = None if holders is None else self.pid in holders
        return standing(ended_s=self.ended_s, exited_s=self.exited_s, on_device=on_device, now_s=now_s)

    def close(self) -> None:
        """Close the descriptor of the process."""
        os.close(self.pidfd)
