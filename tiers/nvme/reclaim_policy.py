"""Which segment of the NVMe tier is reclaimed, and what of it is moved: pure policy.

Responsibility: two decisions over explicit state, which `tiers.nvme.reclaimer` carries out.

The oldest segment goes first, so that a cache evicts what is oldest and a deletion's record outlives what it
deletes. A segment that durable objects fill, so that most of it would be moved, is passed over for the one with the
least to move. What may be evicted is moved only if it was read since it was written, and of that at most
1/REAPPEND_SHARE of the segment: so each segment frees most of its bytes, and write amplification stays below
1 / (1 - 1/REAPPEND_SHARE) as long as durable objects do not fill the tier.

Concurrency: pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kvfs import limits

FULL_OF_KEPT = 0.75
"""A segment with more durable bytes than this fraction is passed over while another one has fewer."""
WORTHLESS = 0.95
"""Moving more than this fraction of a segment gains nothing."""


@dataclass(frozen=True, slots=True)
class SegmentView:
    """Describes a segment as the choice needs it."""

    number: int
    sequence: int
    size_bytes: int
    kept_bytes: int
    """Of durable and pinned objects: they must be moved."""


class Fate(Enum):
    """Says what becomes of one record of a reclaimed segment."""

    DEAD = auto()
    """Nothing refers to it."""
    MOVE = auto()
    EVICT = auto()
    """The object is evicted from the tier."""


def choose_segment(segments: Sequence[SegmentView], *, short: bool = False) -> SegmentView | None:
    """Return the segment to reclaim, of those closed; None when none would gain anything.

    `short`: there is hardly room to move anything, as after kills during reclaim: a copy stays of each.
    """
    if not segments:
        return None
    oldest = min(segments, key=lambda view: view.sequence)
    if not short and oldest.kept_bytes <= FULL_OF_KEPT * oldest.size_bytes:
        return oldest
    emptiest = min(segments, key=lambda view: (view.kept_bytes / view.size_bytes, view.sequence))
    return emptiest if emptiest.kept_bytes <= WORTHLESS * emptiest.size_bytes else None


@dataclass(slots=True)
class MoveBudget:
    """Counts how much of one segment may still be moved because it is hot."""

    left_bytes: int
    everything: bool = False
    """Whether nothing may be evicted."""

    @classmethod
    def of_segment(cls, size_bytes: int, kept_bytes: int) -> MoveBudget:
        """Allow half of what need not be moved anyway, so that every reclaimed segment gains something."""
        return cls(min(size_bytes // limits.REAPPEND_SHARE, max(0, size_bytes - kept_bytes) // 2))

    def data_fate(self, *, live: bool, kept: bool, hot: bool, record_bytes: int) -> Fate:
        """Decide the fate of a DATA record. `kept`: durable or pinned; `hot`: read since it was written."""
        if not live:
            return Fate.DEAD
        if kept or self.everything:
            return Fate.MOVE
        if hot and record_bytes <= self.left_bytes:
            self.left_bytes -= record_bytes
            return Fate.MOVE
        return Fate.EVICT


def tombstone_counts(deleted_sequence: int, other_first_sequences: Sequence[int]) -> bool:
    """Return whether any other segment may hold a record that a TOMBSTONE deletes."""
    return any(0 < first < deleted_sequence for first in other_first_sequences)
