"""A store over DRAM and NVMe is killed hundreds of times, its DRAM and its index damaged in between.

KVFS_TEST_SEED repeats a run, KVFS_TEST_KILLS says how many kills.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

import pytest

from kvfs.system import crashpoints
from tests.support.crash_harness import CHANGES, Forge, Harness, Tally
from tests.support.crash_load import CLIENTS
from tests.support.seeds import SEED, rounds

KILLS: Final = int(os.environ.get("KVFS_TEST_KILLS", rounds(64, 160)))
"""The gate's are the lives of six stores, three of them with a cold tier: among them each fate of DRAM with each of the
index, and every crash point."""
LIVES_OF_A_STORE: Final = 12
LINES: Final = CLIENTS * CHANGES * 3 // 2


@pytest.fixture(scope="module")
def forge() -> Iterator[Forge]:
    with Forge() as running:
        yield running


@pytest.mark.seeded
def test_what_was_acknowledged_outlives_kills_at_random_instants(forge: Forge) -> None:
    tally, seed = Tally(), SEED
    while tally.kills < KILLS:
        harness = Harness(forge, seed, tally, cold=seed % 2 == 1)
        try:
            for _ in range(LIVES_OF_A_STORE):
                harness.live(kill_after=harness.chance.randrange(1, LINES))
                harness.damage()
            check_emptied(harness)
        finally:
            harness.close()
        seed += 1
    print(tally)
    assert tally.found > tally.lives, "too little was found again for this to be a test"


def check_emptied(harness: Harness) -> None:
    """With everything removed, a start without DRAM and index finds nothing."""
    assert harness.live(empty=True).ended
    harness.model = type(harness.model)()
    harness.fate = "emptied"
    life = harness.live(empty=True)
    assert life.found == {}
    assert life.emptied is not None
    usage, left = life.emptied
    assert usage["objects"] == usage["blocks"] == left["objects"] == 0


@pytest.mark.seeded
@pytest.mark.parametrize("point", sorted(crashpoints.POINTS))
def test_what_was_acknowledged_outlives_a_kill_at(forge: Forge, point: str) -> None:
    tally = Tally()
    harness = Harness(forge, SEED, tally, cold=point.startswith("cold.") or SEED % 2 == 1)
    try:
        for _ in range(max(4, KILLS // 40)):
            starting = point.startswith("start.")
            rare = starting or point == "cold.after_delete"
            count = 1 if rare else harness.chance.randint(1, 12)
            harness.live(crash_at=f"{point}:{count}")
            harness.damage()
            if starting:
                harness.live(kill_after=harness.chance.randrange(1, LINES))
                harness.damage()
        harness.live(kill_after=1)
    finally:
        harness.close()
    print(tally)
    assert tally.killed_at[point], f"{point} was never reached"
