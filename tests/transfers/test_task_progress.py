"""What the status of a task says, and how much at most."""

from __future__ import annotations

import json

import pytest

from kvfs import limits
from kvfs.cli.status_page import tasks_page
from tiers.transfers.progress import Progress, State


def test_reasons_are_few_and_short_and_all_blocks_count() -> None:
    progress = Progress("copy", clock=lambda: 0.0)
    for number in range(100):
        progress.fail(f"{number} " + "x" * 5000, 2)
    found = progress.status()
    assert found["failed_blocks"] == sum(blocks for _, blocks in found["failures"]) == 200
    assert len(found["failures"]) == limits.MAX_TASK_FAILURES + 1
    assert ["other reasons", 2 * (100 - limits.MAX_TASK_FAILURES)] in found["failures"]
    assert len(json.dumps(found)) < 2 * limits.MAX_TASK_FAILURES * limits.MAX_TASK_REASON


def test_a_reason_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("copy", "127.0.0.1:1", clock=lambda: 0.0)
    progress.fail("it is neither of [cluster] peers nor a member", 2)
    tasks_page([progress.status()])
    assert "2 blocks: it is neither of [cluster] peers nor a member\n" in capsys.readouterr().out


def test_what_a_move_has_removed_is_shown_however_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("move", "127.0.0.1:1", removed_blocks=3, clock=lambda: 0.0)
    progress.end(State.CANCELLED, "cancelled")
    tasks_page([progress.status()])
    assert ", 3 removed here; cancelled\n" in capsys.readouterr().out


def test_the_rate_is_of_what_was_brought() -> None:
    now = [10.0]
    progress = Progress("copy", clock=lambda: now[0])
    progress.count(100, was_there=True)
    progress.count(300, was_there=False)
    assert progress.status()["bytes_s"] == 0
    now[0] = 12.0
    assert (progress.status()["bytes"], progress.status()["bytes_s"]) == (400, 150)
