"""A real service is ended in the middle of its work in many ways and places, and started again.

KVFS_TEST_SEED repeats a run, KVFS_TEST_KILLS scales how many lives there are, KVFS_TEST_PLACES names the places
(`tests.support.service_crash.PLACES`).
"""

from __future__ import annotations

import os
from typing import Final

import pytest

from tests.support.door import ON_DIRECTORY, need_mount
from tests.support.seeds import SEED, rounds
from tests.support.service_crash import PLACES, Harness, Tally

pytestmark = [pytest.mark.mount, pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")]

KILLS: Final = int(os.environ.get("KVFS_TEST_KILLS", rounds(108, 160)))
LIVES: Final = max(4, KILLS // 27)
LIVES_OF_A_SERVICE: Final = 6


@pytest.mark.seeded
@pytest.mark.timeout(max(240, LIVES * 20))
@pytest.mark.parametrize("place", os.environ.get("KVFS_TEST_PLACES", ",".join(PLACES)).split(","))
def test_what_was_answered_outlives_the_service(place: str) -> None:
    need_mount()
    tally, seed = Tally(), SEED
    try:
        while tally.lives < LIVES:
            harness = Harness(PLACES[place], seed, tally)
            try:
                for _ in range(min(LIVES_OF_A_SERVICE, LIVES - tally.lives)):
                    harness.live()
                harness.look_once_more()
            finally:
                harness.close()
            seed += 1
    finally:
        print(tally)
    assert tally.right > tally.lives, "too little was found again for this to be a test"
