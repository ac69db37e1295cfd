"""Processes that have a pool's segments mapped, and when what they had may be reused.

Responsibility: one record for each, and the decision about one whose session has ended.

Invariants: leases end with the process, as what a dead process reads harms nobody. What it may still *write*, its
drafts, ends later: when it is off the device, too, or where nobody knows that, HBM_DRAIN_S after its end, or after it
was last seen on the device. A process that is still there HBM_HANG_S after its session is hung: nothing of it is ever
reused before it has ended. A listing without a process says something only if another had it, by its pid, while it
lived (`PoolClient.was_listed`), and if it was asked for after the end.
Concurrency: the service's thread only; no call waits.
"""

from __future__ import annotations

import math
import os
import select
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from kvfs import limits
from kvfs._native.hbm.hazards import Hazards
from tiers.hbm.driver_ports import Listing


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
    """Decide about a client whose session ended, and whose process exited, or was last listed after that, at these
    times."""
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

    was_listed: bool = False
    """Whether a listing had it while it lived: then it is known there by its pid."""
    unlisted: int = 0
    """How many listings came while it lived before one had it."""
    heard_s: float = -math.inf
    """When the last listing was asked for that it was looked for in."""
    listed_s: float = -math.inf
    """The same of the last one that had it."""

    @property
    def wants_listing(self) -> bool:
        """Return whether it matters who is on the device: to know how it is listed, or when it has gone."""
        if self.exited_s is not None:
            return True
        return not self.was_listed and self.unlisted < limits.HBM_LISTINGS

    def look(self, listing: Listing | None, clock: Callable[[], float]) -> None:
        """Note whether the process has exited: then its session has ended, too. `listing`: taken before, so that who
        lives now has lived since it was asked for."""
        if self.exited_s is None:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            if poll.poll(0):
                self.exited_s = clock()  # after the look: what is asked for later is asked after the exit
        if self.exited_s is not None and self.ended_s is None:
            self.ended_s = self.exited_s
        if listing is not None and listing.asked_s > self.heard_s:
            self._learn(listing)

    def _learn(self, listing: Listing) -> None:
        self.heard_s = listing.asked_s
        listed = self.pid in listing.pids
        if listed:
            self.listed_s = listing.asked_s
        if self.exited_s is None and not self.was_listed:
            self.was_listed = listed and listing.is_ours
            self.unlisted += not self.was_listed

    def has_leased(self, slot: int, generation: int) -> bool:
        """Return whether it has a retired slot leased."""
        return self.exited_s is None and self.hazards.name(slot, generation)

    def standing(self, listing: Listing | None, now_s: float) -> Standing:
        """Decide what may be reused, with what is known of who is on the device."""
        known_s = self.exited_s if self.exited_s is None else max(self.exited_s, self.listed_s)
        return standing(
            ended_s=self.ended_s, exited_s=known_s, on_device=self._is_on_device(listing), now_s=now_s
        )

    def _is_on_device(self, listing: Listing | None) -> bool | None:
        """Return whether it is there. A pid that is listed is taken for its own, whoever has it: that only waits."""
        if listing is None or self.exited_s is None:
            return None
        if self.pid in listing.pids:
            return True
        says = self.was_listed and listing.is_ours and listing.asked_s > self.exited_s
        return False if says else None

    def close(self) -> None:
        """Close the descriptor of the process."""
        os.close(self.pidfd)
