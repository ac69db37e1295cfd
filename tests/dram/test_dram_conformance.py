"""The DRAM tier has the ports of a writable and a readable tier, on its tmpfs and in a plain directory."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.tier_suite import MakeTier, TierSuite
from tiers.dram.tier import DramTier

MODES = [pytest.param("tmpfs", marks=pytest.mark.mount), "directory"]


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    if request.param == "tmpfs" and os.geteuid() != 0:
        pytest.skip("mounting needs root")
    return str(request.param)


@pytest.fixture
def make_tier(mode: str) -> Iterator[MakeTier]:
    base = Path(tempfile.mkdtemp(prefix="kvfs-dram-"))
    tiers: list[DramTier] = []
    numbers = itertools.count()

    def make(capacity_bytes: int, max_slots: int) -> DramTier:
        root = base / str(next(numbers))
        tiers.append(DramTier.open(root, capacity_bytes, store_id=bytes(16), max_slots=max_slots, mode=mode))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()
    shutil.rmtree(base)


class TestDramTier(TierSuite):
    """Everything in the suite."""
