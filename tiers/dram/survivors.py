"""What a tier begins with: the slots of an earlier service that it takes over, and what of the rest is still held.

Concurrency: values of one start.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from kvfs._native.catalog.adoption import Adoption
from tiers.dram.accounting import Held

ENTRY_PINNED = 1
"""`flags` of an index entry: the block is pinned (a named object's row says it of itself)."""

Choose = Callable[[Adoption], None]
"""Wants those of these objects that names and buckets know."""


@dataclass(slots=True)
class Recovered:
    """Collects what a tier begins with."""

    adoption: Adoption
    held: list[Held] = field(default_factory=list)
    verify_s: float = 0.0
    """How long hashing payloads took."""
    zombies: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Slots whose files are held but could not be detached -> (uid, physical bytes)."""

    def close(self) -> None:
        """Close what is held, for a start that failed."""
        for held in self.held:
            os.close(held.fd)
        self.held.clear()
