"""Ports that stay a test's own while servers on them come and go.

A port that was picked and closed belongs to whoever takes it next, such as another test's outgoing connection. A socket
that is bound and never listens keeps it: servers bind beside it with SO_REUSEADDR, as all of ours, trio's and
ZeroMQ's do.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from types import TracebackType
from typing import Self


class HeldPort:
    """A free TCP port of the loopback address, kept until it is closed, or nobody has it any more."""

    def __init__(self, number: int = 0) -> None:
        """Take a port; 0: any. Raises OSError where somebody has it."""
        self._descriptor = -1
        with socket.socket() as made:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(("127.0.0.1", number))
            self.number: int = made.getsockname()[1]
            self._descriptor = made.detach()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    __del__ = close

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def held_neighbours() -> tuple[HeldPort, HeldPort]:
    """Take a port and the one after it."""
    while True:
        first = HeldPort()
        with suppress(OSError, OverflowError):
            with (
                socket.socket() as alone
            ):  # beside another held port only one that is as willing would be let in
                alone.bind(("127.0.0.1", first.number + 1))
            return first, HeldPort(first.number + 1)
        first.close()
