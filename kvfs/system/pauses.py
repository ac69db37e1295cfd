"""Pauses after failures: each twice as long as the one before, up to a bound.

Responsibility: how long whatever has failed is left alone, however often it fails; who waits does so himself.
Invariants: a pause has at most `most_s`, but for its spread; a success makes the next one short again.
Concurrency: one thread; times are the caller's clock.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field


@dataclass(slots=True)
class Pause:
    """Counts failures in a row, and says until when nothing is asked.

    `spread` is the part of a pause by which chance shortens or lengthens it, so that not everybody asks at once.
    """

    first_s: float
    most_s: float
    spread: float = 0.0
    until_s: float = field(default=-math.inf, init=False)
    _next_s: float = field(default=0.0, init=False)

    def is_over(self, now_s: float) -> bool:
        """Return whether something may be asked again. `now_s` is of the clock that `failed` was given."""
        return now_s >= self.until_s

    def failed(self, now_s: float) -> float:
        """Begin a pause, twice as long as the last one; return its length in seconds."""
        wait_s = self._next_s or self.first_s
        self._next_s = min(2 * wait_s, self.most_s)
        pause_s = wait_s * random.uniform(1 - self.spread, 1 + self.spread)
        self.until_s = now_s + pause_s
        return pause_s

    def succeeded(self) -> None:
        """Let the next pause be the shortest again."""
        self._next_s = 0.0
