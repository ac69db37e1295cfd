"""How far a task is, and what failed.

Responsibility: counts, as status shows them. Invariants: a block counts once, as done, gone or failed; at most
limits.MAX_TASK_FAILURES reasons are kept. Concurrency: the service's trio thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import trio

from kvfs import limits

_OTHERS = "other reasons"


class State(StrEnum):
    """How a task stands."""

    RUNS = "runs"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class Progress:
    """Counts what one task has done."""

    kind: str
    to: str = ""
    """The machine that the blocks go to; empty where there are several."""
    number: int = 0
    of_blocks: int = 0
    of_bytes: int = 0
    blocks: int = 0
    """Done: brought, or there before."""
    bytes: int = 0
    there_blocks: int = 0
    """Part of them that was there before."""
    there_bytes: int = 0
    gone_blocks: int = 0
    """Went away before their turn came, or are in the cold tier alone."""
    failed_blocks: int = 0
    removed_blocks: int = 0
    """Went from here, of a move."""
    state: State = State.RUNS
    said: str = ""
    """The result, once the task has ended."""
    failures: Counter[str] = field(default_factory=Counter)
    """Blocks by the reason why they failed."""
    clock: Callable[[], float] = trio.current_time
    _began_s: float = 0.0
    _ended_s: float | None = None

    def __post_init__(self) -> None:
        self._began_s = self.clock()

    def count(self, size_bytes: int, *, was_there: bool) -> None:
        """Count a block that is done."""
        self.blocks += 1
        self.bytes += size_bytes
        if was_there:
            self.there_blocks += 1
            self.there_bytes += size_bytes

    def fail(self, reason: str, blocks: int) -> None:
        """Count blocks that failed for a reason."""
        self.failed_blocks += blocks
        reason = reason[: limits.MAX_TASK_REASON]
        if reason not in self.failures and len(self.failures) >= limits.MAX_TASK_FAILURES:
            reason = _OTHERS
        self.failures[reason] += blocks

    def add_brought(self, other: Progress) -> None:
        """Add what another walk of the same task has brought, and what failed then."""
        brought_blocks, brought_bytes = other.blocks - other.there_blocks, other.bytes - other.there_bytes
        self.blocks, self.bytes = self.blocks + brought_blocks, self.bytes + brought_bytes
        self.of_blocks, self.of_bytes = self.of_blocks + brought_blocks, self.of_bytes + brought_bytes
        for reason, blocks in other.failures.items():
            self.fail(reason, blocks)

    def pass_over_rest(self) -> None:
        """Count as gone what was neither done nor failed, after a walk through all blocks."""
        self.gone_blocks = max(self.gone_blocks, self.of_blocks - self.blocks - self.failed_blocks)

    def end(self, state: State, said: str) -> None:
        """Note the end, and its result."""
        self.state, self.said, self._ended_s = state, said, self.clock()

    def status(self) -> dict[str, Any]:
        """Describe the task, as JSON values."""
        seconds = (self.clock() if self._ended_s is None else self._ended_s) - self._began_s
        brought_bytes = self.bytes - self.there_bytes
        return {
            "name": self.kind,
            "number": self.number,
            "state": self.state.value,
            "to": self.to,
            "blocks": self.blocks,
            "bytes": self.bytes,
            "of_blocks": self.of_blocks,
            "of_bytes": self.of_bytes,
            "there_blocks": self.there_blocks,
            "gone_blocks": self.gone_blocks,
            "failed_blocks": self.failed_blocks,
            "removed_blocks": self.removed_blocks,
            "failures": [list(each) for each in self.failures.most_common()],
            "seconds": round(seconds, 3),
            "bytes_s": int(brought_bytes / seconds) if seconds > 0 else 0,
            "said": self.said,
        }
