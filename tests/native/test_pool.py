"""Large batches shared out among threads: each block is taken once, and every one of several callers returns."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support import hammers

PROGRAM, SOURCES = "pool_hammer.c", ["blocks/pool.c"]


def test_every_caller_returns_when_its_batch_is_done(tmp_path: Path) -> None:
    word, helped = hammers.run(hammers.build(tmp_path, PROGRAM, SOURCES), 5000)
    assert word == "done"
    assert int(helped) > 0 or len(os.sched_getaffinity(0)) == 1, "no helper took a block"


def test_no_data_race(tmp_path: Path) -> None:
    """ThreadSanitizer sees a helper's last access to a batch ordered before its caller's return."""
    hammers.run_for_races(tmp_path, PROGRAM, SOURCES, 1000)
