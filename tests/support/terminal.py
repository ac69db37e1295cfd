"""A Python program whose stderr is a terminal, as people run it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

from tests.support.service import ROOT


def on_a_terminal(*arguments: str) -> str:
    """Run `python ARGUMENTS` in the checkout to its end; return what it wrote on its stderr."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160", "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env=environment,
    ) as process:
        os.close(theirs)
        with os.fdopen(ours, "rb", buffering=0) as terminal:
            shown = b""
            while chunk := _read_some(terminal.fileno()):
                shown += chunk
    assert process.returncode == 0, shown
    return shown.decode()


def _read_some(terminal: int) -> bytes:
    """Return the next bytes; none once nobody has the other end open."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""
