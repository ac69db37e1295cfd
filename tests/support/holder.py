"""A process that holds a file open or mapped and says, when asked, whether it still reads the right bytes.

The kernel ends its lease when it ends. What it reads may also be an error or SIGBUS, which is told apart from
wrong bytes: an error is honest.
"""

from __future__ import annotations

import mmap
import os
import signal
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

from tests.support.posix import start_child

RIGHT: Final = b"r"
WRONG: Final = b"w"
ERROR: Final = b"e"
DIED: Final = b""

Kind = Literal["descriptor", "mapping", "populated mapping"]


class Holder:
    """Opens or maps `path` in a child; the mapping outlives the descriptor. Raises LookupError."""

    def __init__(self, path: Path, expected: bytes, kind: Kind) -> None:
        self._path, self._expected, self._kind = path, expected, kind
        ask_read, self._ask = os.pipe()
        self._answers, answer_write = os.pipe()
        self.pid = start_child(lambda: self._serve(ask_read, answer_write))
        os.close(ask_read)
        os.close(answer_write)
        if os.read(self._answers, 1) != RIGHT:
            self.close()
            raise LookupError(f"{path}: not there to be held")

    # --- in the child ------------------------------------------------------------------------------------
    def _serve(self, asks: int, answers: int) -> None:
        os.close(self._ask)
        os.close(self._answers)
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        try:
            fd = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return
        mapping = None
        if self._kind != "descriptor":
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if self._kind == "populated mapping" else 0)
            mapping = mmap.mmap(fd, len(self._expected), flags, mmap.PROT_READ)
            os.close(fd)
        os.write(answers, RIGHT)
        while os.read(asks, 1):
            os.write(answers, self._look(fd, mapping))

    def _look(self, fd: int, mapping: mmap.mmap | None) -> bytes:
        try:
            if mapping is not None:
                return RIGHT if mapping[:] == self._expected else WRONG
            return RIGHT if read_whole(fd) == self._expected else WRONG
        except OSError:
            return ERROR

    # --- in the test ---------------------------------------------------------------------------------------
    def look(self) -> bytes:
        """RIGHT, WRONG, ERROR, or DIED (of SIGBUS)."""
        try:
            os.write(self._ask, b"?")
        except BrokenPipeError:
            return DIED
        return os.read(self._answers, 1)

    def suspend(self) -> None:
        """SIGSTOP, and wait until it is stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self._ask)
            os.close(self._answers)
            self.pid = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_whole(fd: int) -> bytes:
    """The whole file from offset 0, whatever the position."""
    data = bytearray()
    while part := os.pread(fd, 1 << 20, len(data)):
        data += part
    return bytes(data)
