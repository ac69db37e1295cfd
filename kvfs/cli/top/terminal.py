"""A terminal that shows frames and takes keys.

Responsibility: the other screen, keys one by one, scrolling, what follows a change of size; all as it was at the end,
whatever happened. Concurrency: the main thread shows and waits for keys; one more reads the source.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Final

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment

from kvfs.cli.top.frame import frame
from kvfs.cli.top.sources import Source
from kvfs.errors import KvfsError
from kvfs.watch.panels import Snapshot

_QUIT: Final = frozenset("qQ\x04")
_SCROLLS: Final = {"j": 1, "\x1b[B": 1, "k": -1, "\x1b[A": -1, " ": 15, "b": -15, "g": -1_000_000}
_KEY: Final = re.compile(r"\x1b\[[A-Z]|.", re.DOTALL)
_HINT: Final = "q quits, j and k scroll"
_RETRY_S: Final = 1.0
_LOOK_S: Final = 0.25
"""How soon a change of the terminal's size shows."""
_STDIN: Final = 0


class _Reader:
    """The newest snapshot of a source, which is asked anew when it ends."""

    def __init__(self, source: Source) -> None:
        """Take a first look. Raises what that raises."""
        self._source = source
        self.newest: Snapshot = source.once()
        self.problem = ""
        self.woken, self._wake = os.pipe()

    def start(self) -> None:
        # It may wait on the network for as long as it likes: the process ends without it.
        Thread(target=self._run, name="kvfs top", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                for snapshot in self._source.follow():
                    self.newest, self.problem = snapshot, ""
                    os.write(self._wake, b"x")
            except KvfsError as error:
                self.problem = f"{error}; trying again"
                os.write(self._wake, b"x")
            time.sleep(_RETRY_S)


class _Scrolled:
    """What fits the screen of something, from a line on."""

    def __init__(self, whole: RenderableType, first: int) -> None:
        self._whole, self.first = whole, first

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._whole, options.update(height=None), pad=False)
        height = options.height or options.max_height
        self.first = max(0, min(self.first, len(lines) - height))
        for line in lines[self.first : self.first + height]:
            yield from line
            yield Segment.line()


def show(source: Source) -> None:
    """Show a source until q, Ctrl-C or Ctrl-D. REQUIRES a terminal. Raises what the first look raises."""
    reader = _Reader(source)
    reader.start()
    ended: list[int] = []
    # An exception of a handler is lost where it comes inside a finalizer: they note the exit code, for the next look.
    signal.signal(signal.SIGINT, lambda *_: ended.append(0))
    signal.signal(signal.SIGTERM, lambda *_: ended.append(128 + signal.SIGTERM))
    with _keys(), Live(screen=True, auto_refresh=False) as live:
        _show_until_quit(reader, live, ended)
    if ended:
        sys.exit(ended[0])


def _show_until_quit(reader: _Reader, live: Live, ended: list[int]) -> None:
    first = 0
    while not ended:
        shown = _Scrolled(frame(reader.newest, reader.problem or _HINT), first)
        live.update(shown, refresh=True)
        ready, _, _ = select.select([_STDIN, reader.woken], [], [], _LOOK_S)
        if reader.woken in ready:
            os.read(reader.woken, 4096)
        if _STDIN in ready:
            keys = os.read(_STDIN, 64).decode(errors="replace")
            if not keys or not _QUIT.isdisjoint(keys):
                return
            first = max(shown.first + sum(_SCROLLS.get(key, 0) for key in _KEY.findall(keys)), 0)


@contextmanager
def _keys() -> Iterator[None]:
    """Take keys as they are pressed, without their echo."""
    before = termios.tcgetattr(_STDIN)
    try:
        tty.setcbreak(_STDIN)
        yield
    finally:
        termios.tcsetattr(_STDIN, termios.TCSADRAIN, before)
