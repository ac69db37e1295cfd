"""Which blocks are worth a slot: pure policy.

Responsibility: count how often each prefix hash was asked for and was not there. A block gets a slot when it is missed
for the second time: most blocks are never read again (`tiers.eviction.admission`), and each would take a slot from one
that is.

Invariants: HBM_WANTED bounds what is remembered; what was missed longest ago is forgotten first. Concurrency: the
service's thread only.
"""

from __future__ import annotations

from collections import OrderedDict

from kvfs import limits

_MISSES = 2


class Wanted:
    """Remembers prefix hashes that were missed."""

    def __init__(self, capacity: int = limits.HBM_WANTED) -> None:
        self._capacity = capacity
        self._misses: OrderedDict[bytes, int] = OrderedDict()

    def missed(self, digest: bytes) -> None:
        """Count a miss."""
        self._misses[digest] = self._misses.pop(digest, 0) + 1
        if len(self._misses) > self._capacity:
            self._misses.popitem(last=False)

    def admits(self, digest: bytes) -> bool:
        """Return whether the block was missed often enough."""
        return self._misses.get(digest, 0) >= _MISSES

    def forget(self, digest: bytes) -> None:
        """Forget a block that has its slot."""
        self._misses.pop(digest, None)
