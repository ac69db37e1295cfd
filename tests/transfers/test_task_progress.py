"""What the status of a task says, and how much at most."""

from __future__ import annotations

import json

from kvfs import limits
from tiers.transfers.progress import Progress


def test_reasons_are_few_and_short_and_all_blocks_count() -> None:
    progress = Progress("copy", clock=lambda: 0.0)
    for number in range(100):
        progress.fail(f"{number} " + "x" * 5000, 2)
    found = progress.status()
    assert found["failed_blocks"] == sum(blocks for _, blocks in found["failures"]) == 200
    assert len(found["failures"]) == limits.MAX_TASK_FAILURES + 1
    assert ["other reasons", 2 * (100 - limits.MAX_TASK_FAILURES)] in found["failures"]
    assert len(json.dumps(found)) < 2 * limits.MAX_TASK_FAILURES * limits.MAX_TASK_REASON


def test_the_rate_is_of_what_was_brought() -> None:
    now = [10.0]
    progress = Progress("copy", clock=lambda: now[0])
    progress.count(100, was_there=True)
    progress.count(300, was_there=False)
    assert progress.status()["bytes_s"] == 0
    now[0] = 12.0
    assert (progress.status()["bytes"], progress.status()["bytes_s"]) == (400, 150)
