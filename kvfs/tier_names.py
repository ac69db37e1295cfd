"""What people call the tiers whose bits the shared table has.

Responsibility: one name for each tier, the highest first. Concurrency: plain values.
"""

from __future__ import annotations

from typing import Final

from kvfs._native.table import TIER_COLD, TIER_DRAM, TIER_NVME

TIER_NAMES: Final = {TIER_DRAM: "dram", TIER_NVME: "nvme", TIER_COLD: "cold"}


def tier_of(tiers: int) -> str:
    """The name of the highest tier among these bits; empty for none."""
    return next((name for bit, name in TIER_NAMES.items() if tiers & bit), "")
