"""The tasks of one service that bring its blocks to other machines.

Responsibility: begin, cancel and describe them.

Invariants: one of a kind runs at a time, and the last one of each kind that has ended is remembered. A task's failure
is its result, and ends nothing else; the service's stop cancels what runs. A service that starts has none.

Concurrency: the service's trio thread.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import trio

from kvfs.errors import Busy, KvfsError, NotFound, SessionClosed
from tiers.transfers.progress import Progress, State

log = logging.getLogger("kvfs.tasks")


@dataclass(slots=True)
class _Task:
    progress: Progress
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class Tasks:
    """Runs tasks, one of each kind."""

    def __init__(self) -> None:
        self._tasks: dict[str, _Task] = {}
        """By kind: the one that runs, or ended last."""
        self._nursery: trio.Nursery | None = None
        self._begun = 0
        self._ended: dict[str, int] = {"blocks": 0, "bytes": 0, "failed_blocks": 0}
        """Summed over the tasks that were replaced by a later one."""

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run what is begun, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    def begin(self, progress: Progress, work: Callable[[], Awaitable[str]]) -> dict[str, Any]:
        """Begin a task, whose work returns its result; describe it. Raises Busy where one of its kind runs."""
        if self.is_running(progress.kind):
            number = self._tasks[progress.kind].progress.number
            raise Busy(f"a {progress.kind} is under way already, as task {number}")
        if self._nursery is None:
            raise SessionClosed("the service starts or stops")
        self._begun += 1
        progress.number = self._begun
        if progress.kind in self._tasks:
            before = self._tasks[progress.kind].progress.status()
            self._ended = {name: count + before[name] for name, count in self._ended.items()}
        task = self._tasks[progress.kind] = _Task(progress)
        self._nursery.start_soon(self._work, task, work)
        return progress.status()

    def cancel(self, kind: str) -> dict[str, Any]:
        """Cancel the task of a kind; describe it. Raises NotFound where none runs."""
        if not self.is_running(kind):
            raise NotFound(f"no {kind} is under way")
        task = self._tasks[kind]
        task.scope.cancel()
        return task.progress.status()

    def is_running(self, kind: str) -> bool:
        """Return whether a task of this kind is under way."""
        return kind in self._tasks and self._tasks[kind].progress.state is State.RUNS

    def status(self) -> dict[str, Any]:
        """Describe all tasks, as JSON values; counts are of all that were begun."""
        tasks = [task.progress.status() for task in self._tasks.values()]
        return {
            "tasks": tasks,
            "tasks_running": sum(map(self.is_running, self._tasks)),
            **{f"task_{name}": count + sum(t[name] for t in tasks) for name, count in self._ended.items()},
        }

    async def _work(self, task: _Task, work: Callable[[], Awaitable[str]]) -> None:
        progress = task.progress
        log.info("task %d, %s%s: begins", progress.number, progress.kind, _to(progress))
        state, said = State.CANCELLED, "cancelled"
        try:
            with task.scope:
                said = await work()
                state = State.FAILED if progress.failed_blocks else State.DONE
        except (KvfsError, OSError) as error:
            state, said = State.FAILED, str(error)
        except Exception as error:
            state, said = State.FAILED, f"an internal error: {error!r}"
            log.exception("task %d", progress.number)
        finally:
            progress.end(state, said)
            log.info("task %d, %s%s: %s: %s", progress.number, progress.kind, _to(progress), state, said)


def _to(progress: Progress) -> str:
    return f" to {progress.to}" if progress.to else ""
