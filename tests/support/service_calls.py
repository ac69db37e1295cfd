"""Small parts of the service crash tests' load: when to end the service, what an error says, how bytes are written.

Concurrency: a `Trigger` may be reached from any thread; the rest is functions.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from botocore.exceptions import BotoCoreError, ClientError

from kvfs.errors import SessionClosed

_GONE: Final = (
    errno.ENOTCONN,
    errno.ECONNABORTED,
    errno.ECONNRESET,
    errno.ECONNREFUSED,
    errno.EPIPE,
    errno.EROFS,  # what is under the mount (`Harness` makes it so)
)


class Trigger:
    """Ends the service `delay_s` after the `at`-th event, an answer or the beginning of a rename."""

    def __init__(self, end: Callable[[], None], *, event: str, at: int, delay_s: float) -> None:
        self._end, self._event, self._left, self._delay_s = end, event, at, delay_s
        self._lock = threading.Lock()
        self.ending = threading.Event()
        """Set before the service is ended: what fails from then on is cut off."""

    def reach(self, event: str) -> None:
        if event != self._event or self._delay_s < 0:
            return
        with self._lock:
            self._left -= 1
            due = self._left == 0
        if due:
            if self._event == "rename":
                threading.Thread(target=self.fire).start()
            else:
                self.fire()

    def fire(self) -> None:
        time.sleep(self._delay_s)
        self.ending.set()
        self._end()


@contextmanager
def closing(fd: int) -> Iterator[None]:
    """Close a descriptor; what close(2) says counts, unless something else went wrong before."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            os.close(fd)
        raise
    os.close(fd)


def write_pieces(fd: int, data: bytes, piece: int) -> None:
    for at in range(0, len(data), piece):
        rest = memoryview(data)[at : at + piece]
        while rest:
            rest = rest[os.write(fd, rest) :]  # where there is no room for all of it, the next one says so


def is_gone(error: BaseException) -> bool:
    """Whether it is the connection that failed, so that nobody knows what became of the call."""
    if isinstance(error, ClientError):
        return http_status(error) == 503
    if isinstance(error, OSError):
        return error.errno in _GONE
    return isinstance(error, SessionClosed | BotoCoreError)


def is_busy(error: BaseException) -> bool:
    """An answer after which the change may still happen."""
    return isinstance(error, ClientError) and http_status(error) >= 500


def describe(error: BaseException) -> str:
    if isinstance(error, ClientError):
        return f"S3 {error.response['Error'].get('Code')}"
    if isinstance(error, OSError):
        return errno.errorcode.get(error.errno or 0, str(error))
    return type(error).__name__


def http_status(error: ClientError) -> int:
    return int(error.response["ResponseMetadata"]["HTTPStatusCode"])
