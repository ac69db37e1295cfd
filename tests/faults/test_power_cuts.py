"""A store's machine loses power, again and again: durable objects stay, and nothing that is gone comes back.

KVFS_TEST_SEED repeats a run, KVFS_TEST_CUTS says how many cuts.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Final

import pytest

from tests.support.crash_power import Machine
from tests.support.seeds import SEED, rounds

CUTS: Final = int(os.environ.get("KVFS_TEST_CUTS", rounds(60, 150)))
CUTS_OF_A_MACHINE: Final = 10


@pytest.mark.seeded
def test_what_was_acknowledged_outlives_power_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEED, SEED + -(-CUTS // CUTS_OF_A_MACHINE)):
        machine = Machine(seed, monkeypatch)
        try:
            for _ in range(CUTS_OF_A_MACHINE):
                machine.run(cut_at=machine.chance.choice([None, *[machine.chance.randrange(1, 400)] * 6]))
            machine.run(changes=0)
        finally:
            counts += machine.counts
            machine.close()
    print(dict(counts))
    assert counts["sectors lost"] > CUTS
    assert counts["found"] > CUTS
