"""Log lines bounded per cause: a repeated line is shown a few times, then counted.

Responsibility: a filter that shows the first limits.LOG_LINES lines of a cause in each minute, and the count of the
others when that minute is over. A cause is the logging statement together with its `extra={"cause": ...}`, which names
the peer. Debug lines are not bounded.

Invariants: lines not shown are counted, and the count is shown when the cause's minute is over, or logging ends. At
most limits.MAX_LOG_CAUSES causes are kept apart; past it `extra` is ignored.

Concurrency: any thread. A timer of its own logs the counts; it runs only while lines are held back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvfs import limits

_Cause = tuple[str, int, object]


@dataclass(slots=True)
class _Minute:
    """One cause's lines since the first of them."""

    ends_s: float
    shown: int = 0
    held_back: int = 0
    first: logging.LogRecord | None = None
    """The first line held back, as text without a traceback: it keeps no other object alive."""


class BoundedLines(logging.Filter):
    """Filter the lines of `handler`, which also logs the counts; `now_s` is the clock."""

    def __init__(self, handler: logging.Handler, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._handler = handler
        self._now_s = now_s
        self._lock = threading.Lock()
        self._minutes: dict[_Cause, _Minute] = {}
        """In the order in which they end."""
        self._timer: threading.Timer | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line is shown."""
        if record.levelno <= logging.DEBUG or getattr(record, "is_count", False):
            return True
        with self._lock:
            ended = self._take_ended()
            shown = self._count(self._minute(record), record)
        self._say(ended)
        return shown

    def report(self, *, everything: bool = False) -> None:
        """Log how many lines were held back in the minutes that are over, or in all."""
        with self._lock:
            self._timer = None
            ended = self._take_ended(everything=everything)
            if any(minute.held_back for minute in self._minutes.values()):
                self._start_timer()
        self._say(ended)

    def _minute(self, record: logging.LogRecord) -> _Minute:
        cause: _Cause = (record.pathname, record.lineno, getattr(record, "cause", None))
        if cause not in self._minutes and len(self._minutes) >= limits.MAX_LOG_CAUSES:
            cause = (*cause[:2], None)
        if cause not in self._minutes:
            self._minutes[cause] = _Minute(self._now_s() + limits.LOG_INTERVAL_S)
        return self._minutes[cause]

    def _count(self, minute: _Minute, record: logging.LogRecord) -> bool:
        if minute.shown < limits.LOG_LINES:
            minute.shown += 1
            return True
        minute.held_back += 1
        if minute.first is None:
            minute.first = logging.makeLogRecord(
                {**vars(record), "msg": record.getMessage(), "args": (), "exc_info": None, "stack_info": None}
            )
        self._start_timer()
        return False

    def _take_ended(self, *, everything: bool = False) -> list[_Minute]:
        ended = []
        while self._minutes:
            cause, minute = next(iter(self._minutes.items()))
            if not everything and minute.ends_s > self._now_s():
                break
            del self._minutes[cause]
            if minute.held_back:
                ended.append(minute)
        return ended

    def _say(self, ended: list[_Minute]) -> None:
        for minute in ended:
            assert minute.first is not None
            line = logging.makeLogRecord({**vars(minute.first), "is_count": True})
            line.msg, line.args = "%s [one of %d lines held back]", (minute.first.msg, minute.held_back)
            self._handler.handle(line)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(limits.LOG_INTERVAL_S, self.report)
            self._timer.daemon = True
            self._timer.name = "kvfs-log"
            self._timer.start()
