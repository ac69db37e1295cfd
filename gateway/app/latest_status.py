"""The service's status for those who watch, within a time: a request to a service that hangs cannot be taken back.

Invariants: one request is under way at most, however many ask. Concurrency: a task that asks, others that wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trio

from gateway.backend.backend import Backend
from kvfs.errors import KvfsError
from kvfs.limits import WATCH_LOOK_S


class LatestStatus:
    """See the module's header. `run` must run beside it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._wanted, self._answered = trio.Event(), trio.Event()
        self._found: Mapping[str, Any] | str = ""

    async def run(self) -> None:
        """Ask the service whenever somebody wants its status, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            try:
                self._found = await self._backend.status()
            except KvfsError as error:
                self._found = f"the service does not answer: {error}"
            answered, self._answered = self._answered, trio.Event()
            answered.set()

    async def ask(self) -> Mapping[str, Any] | str:
        """Return the status, or why there is none."""
        self._wanted.set()
        answered = self._answered
        with trio.move_on_after(WATCH_LOOK_S):
            await answered.wait()
            return self._found
        return f"the service does not answer within {WATCH_LOOK_S:g} s"
