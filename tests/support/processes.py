"""Helper processes of tests: a Python snippet with lines in and lines out, so that nothing needs a sleep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self


def task_state(task: Path) -> str:
    """The state of a process or a thread, by its folder in /proc."""
    return (task / "stat").read_text().rsplit(")", 1)[1].split()[0]


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
