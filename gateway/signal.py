"""Waiting for another task's word, once, without being cancelled meanwhile.

Responsibility: what a shielded scope around an event does, without either: an exchange with the service has both
twice, and they took 30 us of it. Invariants: `wait` ends with `tell` and in no other way, so whoever tells must be
sure to run. Concurrency: one trio thread; one task waits.
"""

from __future__ import annotations

import trio


class Signal:
    __slots__ = ("_task", "told")

    def __init__(self) -> None:
        self.told = False
        self._task: trio.lowlevel.Task | None = None

    def tell(self) -> None:
        """Twice is harmless."""
        self.told = True
        if self._task is not None:
            trio.lowlevel.reschedule(self._task)
            self._task = None

    async def wait(self) -> None:
        if not self.told:
            self._task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(_never)


def _never(_: object) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.FAILED
