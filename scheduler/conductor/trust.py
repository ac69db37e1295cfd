"""Whether an instance has what the index says: predictions against what its answers report.

Responsibility: count shortfalls among the last answers. An instance that keeps falling short (its events stopped, it
restarted unnoticed, its store is gone) is distrusted: decisions leave its blocks out until its answers agree again.

Concurrency: one thread.
"""

from __future__ import annotations

from collections import deque

from kvfs.limits import TRUST_REMEMBERED, TRUST_SHARE, TRUST_SHORTFALLS


class Trust:
    """Judge one instance."""

    __slots__ = ("_short", "shortfalls")

    def __init__(self) -> None:
        self._short: deque[bool] = deque(maxlen=TRUST_REMEMBERED)
        self.shortfalls = 0
        """Since the instance joined."""

    @property
    def distrusted(self) -> bool:
        """Return whether the instance had less than the index said too often of late."""
        return sum(self._short) >= TRUST_SHORTFALLS

    def compare(self, predicted_tokens: int, cached_tokens: int) -> bool:
        """Compare one answer with its prediction; return whether the judgement changed. A prediction of 0 says
        nothing."""
        if predicted_tokens <= 0:
            return False
        before, short = self.distrusted, cached_tokens < predicted_tokens * TRUST_SHARE
        self.shortfalls += short
        self._short.append(short)
        return self.distrusted is not before

    def reset(self) -> None:
        """Begin anew: the instance's blocks are known afresh."""
        self._short.clear()
