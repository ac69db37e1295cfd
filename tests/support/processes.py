"""Helper processes of tests: a Python snippet with lines in and lines out, so that nothing needs a sleep."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_PR_SET_PDEATHSIG: Final = 1
_libc = ctypes.CDLL(None)


def task_state(task: Path) -> str:
    """The state of a process or a thread, by its folder in /proc."""
    return (task / "stat").read_text().rsplit(")", 1)[1].split()[0]


def end_with(parent: int) -> None:
    """Have the kernel kill this process when the thread of its parent that forked it ends; end now if it has.

    A change of credentials takes that back.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class Helper:
    """A process that runs `code` (a snippet) or a program; the two sides talk in lines. Killed at the end."""

    def __init__(self, code: str | Path, *arguments: object) -> None:
        command = [str(code)] if isinstance(code, Path) else [sys.executable, "-c", code]
        self.process = subprocess.Popen(
            [*command, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def expect(self, line: str) -> None:
        """Read one line. Raises AssertionError when it is another."""
        assert self.process.stdout is not None
        found = self.process.stdout.readline().rstrip("\n")
        assert found == line, f"the helper said {found!r} instead of {line!r}"

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")

    def stop(self) -> None:
        """SIGSTOP, and wait until it has taken effect."""
        os.kill(self.process.pid, signal.SIGSTOP)
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
