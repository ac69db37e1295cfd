"""Log lines are bounded per cause, and none is lost from the count."""

from __future__ import annotations

import io
import logging
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs import limits
from kvfs.system.bounded_log import BoundedLines
from kvfs.system.notify import set_up_logging
from tiers.recovery.start import StoreOptions, open_store
from tiers.sessions.server import SessionServer
from tiers.sessions.state import SessionQuota

log = logging.getLogger("kvfs.test")


class _Lines:
    """A log under the filter, with a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._out = io.StringIO()
        self.handler = logging.StreamHandler(self._out)
        self.bounds = BoundedLines(self.handler, lambda: self.now_s)
        self.handler.addFilter(self.bounds)

    def take(self) -> list[str]:
        found = self._out.getvalue().splitlines()
        self._out.seek(0)
        self._out.truncate()
        return found


@pytest.fixture
def lines() -> Iterator[_Lines]:
    made = _Lines()
    log.addHandler(made.handler)
    before, log.level = log.level, logging.DEBUG
    yield made
    made.bounds.report(everything=True)
    log.removeHandler(made.handler)
    log.level = before


def _refused(number: int, cause: object = None) -> None:
    log.warning("refused %d", number, extra={"cause": cause})


def test_the_first_lines_of_a_cause_are_shown_and_the_rest_counted(lines: _Lines) -> None:
    for number in range(5_000):
        _refused(number)
    assert lines.take() == [f"refused {number}" for number in range(limits.LOG_LINES)]
    log.warning("another cause")
    assert lines.take() == ["another cause"]
    lines.now_s += limits.LOG_INTERVAL_S
    _refused(5_000)
    held = 5_000 - limits.LOG_LINES
    assert lines.take() == [f"refused {limits.LOG_LINES} [one of {held} lines held back]", "refused 5000"]


def test_the_count_is_said_without_another_line(lines: _Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOG_INTERVAL_S", 0.3)  # the clock moves before the timer ends
    for number in range(limits.LOG_LINES):
        _refused(number)
    lines.take()
    lines.now_s = -1.0
    _refused(-1)
    lines.now_s = 1.0
    timer = lines.bounds._timer
    assert timer is not None
    timer.join()
    assert lines.take() == ["refused -1 [one of 1 lines held back]"]


def test_who_caused_it_is_a_cause_of_its_own_up_to_a_limit(lines: _Lines) -> None:
    for uid in range(limits.MAX_LOG_CAUSES * 2):
        _refused(uid, uid)
    shown = len(lines.take())
    assert limits.MAX_LOG_CAUSES <= shown <= limits.MAX_LOG_CAUSES + limits.LOG_LINES
    assert len(lines.bounds._minutes) <= limits.MAX_LOG_CAUSES + 1
    lines.bounds.report(everything=True)
    (count,) = lines.take()
    more = re.search(r"one of (\d+) lines", count)
    assert more is not None
    assert shown + int(more[1]) == limits.MAX_LOG_CAUSES * 2


def test_what_is_held_back_keeps_nothing_alive(lines: _Lines) -> None:
    for _ in range(limits.LOG_LINES + 2):
        try:
            raise ValueError("with a traceback")
        except ValueError as error:
            log.exception("failed: %s", error)
    text = "\n".join(lines.take())
    assert text.count("Traceback") == limits.LOG_LINES
    lines.bounds.report(everything=True)
    assert lines.take() == ["failed: with a traceback [one of 2 lines held back]"]


def test_debugging_is_not_bounded(lines: _Lines) -> None:
    for number in range(100):
        log.debug("step %d", number)
    assert len(lines.take()) == 100


def test_the_log_of_a_service_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger("kvfs")
    before = root.handlers, root.level, root.propagate
    try:
        set_up_logging("info")
        for number in range(1_000):
            _refused(number)
        (handler,) = root.handlers
    finally:
        root.handlers, root.propagate = before[0], before[2]
        root.setLevel(before[1])
    assert len(capsys.readouterr().err.splitlines()) == limits.LOG_LINES
    (bounds,) = handler.filters
    assert isinstance(bounds, BoundedLines)
    bounds.report(everything=True)


def test_a_refused_session_is_its_uids_doing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """So that one uid's many refusals hide no other's."""
    none: Any = None
    with open_store(StoreOptions(tmp_path / "data", dram_bytes=32 << 20, backing="directory")) as store:
        server = SessionServer(store, tmp_path / "socket", quota=SessionQuota(sessions=0))
        ours, theirs = socket.socketpair()
        with ours:
            server._admit(theirs, none)
    assert [
        (record.message, vars(record)["cause"]) for record in caplog.records if "refused" in record.message
    ] == [("refused a session: 0 sessions are open, which is the limit", os.getuid())]
