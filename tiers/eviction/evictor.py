"""Eviction of what the policy chooses.

Responsibility: go through the policy's victims until enough came free. What somebody holds open is passed
over: nothing would come back, and being read is being used.

Invariants: a run asks of each object once whether somebody holds it, 8 us each.
Concurrency: the service's trio thread; one run is one step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvfs import limits
from tiers.eviction.policy import EvictionPolicy

MAX_HELD_SKIPS = 1024
"""Objects that somebody holds which one run passes over before it gives up, the same ones again among them."""


@dataclass(slots=True)
class Evictor:
    """Evicts by policy. `evict_group` evicts objects at once and returns the bytes that became free."""

    policy: EvictionPolicy[bytes]
    is_held: Callable[[bytes], bool]
    evict_group: Callable[[list[bytes]], int]
    before_choice: Callable[[], None]
    stuck_until_s: float = -math.inf
    """Until when nobody need look again who can do without room: the last run found none for what somebody holds."""

    def run(self, bytes_wanted: int, *, objects_wanted: int = 0) -> int:
        """Evict until so many bytes are free and so many objects are gone, if possible; return the bytes freed."""
        self.before_choice()
        self.stuck_until_s, began_s = -math.inf, time.monotonic()
        freed = gone = skipped = 0
        held: set[bytes] = set()
        while freed < bytes_wanted or gone < objects_wanted:
            found = False
            # Not all at once: a held block that was used in between keeps its ancestors from being chosen.
            for group in self.policy.victims(max(bytes_wanted - freed, 1), time.monotonic()):
                found = True
                if group[0] in held or any(self.is_held(digest) for digest in group):
                    skipped += 1
                    held.update(group)
                    for digest in group:
                        self.policy.touch(digest, time.monotonic())
                    if skipped >= MAX_HELD_SKIPS:
                        now_s = time.monotonic()
                        self.stuck_until_s = now_s + limits.HELD_LOOKS * (now_s - began_s)
                        return freed
                else:
                    gone += len(group)
                    freed += self.evict_group(group)
            if not found:
                break
        return freed
