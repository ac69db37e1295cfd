"""Operations of a device, watched: one that is late is answered without the device.

Responsibility: an `Operation` from its begin until the device is done with its memory, and who looks how long that
takes. What a late one means for others is `tiers.device.drive`.

Invariants:
- Whoever waits for an operation gets its result, or DeviceAway once it is late; a cancellation changes neither, since
  an operation cannot be taken back.
- A late operation keeps its memory, its permit and what it was begun on until the device is done with them: so there
  are at most as many as permits. Memory that was given to one must not be used again by whoever gave it.
- An operation is late only after it was found unfinished in _LOOKS looks: an event loop that stood still makes nobody
  late.

Concurrency: the trio thread; `run_in_thread` calls in a thread and ends on the trio thread. One system task looks at
all operations, while there are any.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import trio

from kvfs import limits
from kvfs.errors import Corrupt, DeviceAway, DeviceFailed
from tiers.device.drive import Drive

_LOOKS = 12
"""Looks at an operation before it is late: a read is late by a twelfth of its patience at most."""
_MOST_LATE = limits.DEVICE_BUFFERS // 2
"""Late operations with which the drive may be here: others find permits and buffers."""


class Operation:
    """Describes one operation on a descriptor. Whatever runs it calls `end` once, and is then done with `memory`."""

    __slots__ = ("_on_end", "_result", "_task", "began", "changes", "fd", "looks", "memory", "offset", "patience_s",
                 "what")  # fmt: skip

    def __init__(
        self,
        what: str,
        fd: int,
        offset: int = 0,
        memory: memoryview | None = None,
        *,
        patience_s: float = math.inf,
        changes: bool = False,
    ) -> None:
        """`what` is for messages; `changes`: it changes the bytes of its file."""
        self.what, self.fd, self.offset = what, fd, offset
        self.memory = memoryview(b"") if memory is None else memory
        self.patience_s, self.changes = patience_s, changes
        self.began = time.monotonic()
        self.looks = 0
        self._task: trio.lowlevel.Task | None = None
        self._result: int | Exception | None = None
        self._on_end: Callable[[Operation, int | Exception], None] | None = None

    async def wait(self) -> int:
        """Wait for the result. Raises what the operation ended with; DeviceAway once it is late."""
        if self._result is None:
            self._task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
        result = self._result
        assert result is not None
        if isinstance(result, Exception):
            raise result
        return result

    def end(self, result: int | Exception) -> None:
        """Note that the operation is over. `result`: what it returns, a checksum or 0, or raises."""
        self.memory = memoryview(b"")
        if self._on_end is not None:
            self._on_end(self, result)
        self.answer(result)

    def answer(self, result: int | Exception) -> None:
        """Give whoever waits a result, if there was none yet."""
        if self._result is None:
            self._result = result
            if self._task is not None:
                trio.lowlevel.reschedule(self._task)

    def watch(self, on_end: Callable[[Operation, int | Exception], None]) -> None:
        """Have `on_end` called before whoever waits."""
        self._on_end = on_end

    def run_in_thread(self, call: Callable[[], int]) -> None:
        """Begin, as a call in a thread."""
        token = trio.lowlevel.current_trio_token()

        def catch() -> int | Exception:
            try:
                return call()
            except Exception as error:
                return error

        def deliver(outcome: Any) -> None:
            with suppress(trio.RunFinishedError):  # everybody who would want to know has ended
                token.run_sync_soon(self.end, outcome.unwrap())

        trio.lowlevel.start_thread_soon(catch, deliver)


class Operations(Protocol):
    """Moves bytes of files, for one device."""

    backend: str

    def add_buffer(self, view: memoryview) -> None:
        """Prepare memory that many operations will use."""
        ...

    def begin_read(self, operation: Operation, payload_bytes: int) -> None:
        """Begin to fill the operation's memory; its result is the XXH3-64 of the first `payload_bytes`."""
        ...

    def begin_write(self, operation: Operation) -> None:
        """Begin to write all of the operation's memory."""
        ...

    def begin_sync(self, operation: Operation) -> None:
        """Begin to make what was written durable."""
        ...

    async def release(self) -> None:
        """Release what operations run on, and end those that can be taken back."""
        ...


class Watch:
    """Watches the operations of one device, at most `depth` of which run at once."""

    def __init__(self, depth: int, drive: Drive, late_ended: Callable[[], None]) -> None:
        """Begin without operations. `late_ended` is called when the device is done with one that was late."""
        self._depth, self._drive, self._late_ended = depth, drive, late_ended
        self._most_late = min(_MOST_LATE, depth - 1)
        self._permits = trio.Semaphore(depth, max_value=depth)
        self._running: set[Operation] = set()
        self._late: set[Operation] = set()
        self._probe: Operation | None = None
        self._is_looking = False
        self.late_fd = -1
        """The descriptor of the last operation that was late; -1 before one was."""

    @property
    def late(self) -> int:
        """Return how many operations are late, and not over yet."""
        return len(self._late)

    async def begin(self, operation: Operation, begin: Callable[[Operation], None]) -> None:
        """Begin an operation in its turn. Raises DeviceAway while the drive is away, and what `begin` raises."""
        await self._drive.acquire(self._permits)
        operation.began = time.monotonic()
        try:
            begin(operation)
        except BaseException:
            self._permits.release()
            raise
        operation.watch(self._ended)
        self._running.add(operation)
        if not self._is_looking:
            self._is_looking = True
            trio.lowlevel.spawn_system_task(self._look)

    def _ended(self, operation: Operation, result: int | Exception) -> None:
        self._permits.release()
        if operation in self._late:
            self._late.discard(operation)
            self._late_ended()
        else:
            self._running.discard(operation)
        if not isinstance(result, Exception):
            self._answered()

    def _answered(self) -> None:
        """Have the drive be here, unless too much of it is still without an answer."""
        if len(self._late) <= self._most_late:
            self._drive.answered()

    async def probe(self, operation: Operation, begin: Callable[[Operation], None]) -> None:
        """Run one operation beside all others, however long it takes, and whether the drive is here or away."""
        begin(operation)
        self._probe = operation
        try:
            with suppress(Corrupt):  # a file that is shorter was read, too
                await operation.wait()
        finally:
            self._probe = None
            self._late_ended()
        self._answered()

    async def _look(self) -> None:
        try:
            while self._running:
                await trio.sleep(limits.NVME_READ_S / _LOOKS)
                now = time.monotonic()
                for operation in list(self._running):
                    operation.looks += 1
                    silent_s = now - operation.began
                    if operation.looks >= _LOOKS and silent_s >= operation.patience_s:
                        self._miss(operation, silent_s)
        finally:
            self._is_looking = False

    def _miss(self, operation: Operation, silent_s: float) -> None:
        """Answer a late operation in the drive's place."""
        self._running.discard(operation)
        self._late.add(operation)
        self.late_fd = operation.fd
        why = f"{operation.what}: no answer for {silent_s:.1f} s"
        self._drive.leave(silent_s, why)
        operation.answer(DeviceAway(why))

    def uses(self, fd: int) -> bool:
        """Return whether an operation that nobody waits for is still on this descriptor."""
        return any(each.fd == fd for each in self._late) or (self._probe is not None and self._probe.fd == fd)

    def changes(self, fd: int) -> bool:
        """Return whether a late operation may still change bytes of this file."""
        return any(each.fd == fd and each.changes for each in self._late)

    def has_memory(self, view: memoryview) -> bool:
        """Return whether a late operation may still use the memory that this view is of."""
        return any(each.memory.obj is view.obj for each in self._late)

    async def drain(self) -> None:
        """Wait, at most limits.DEVICE_CLOSE_WAIT_S, until no operation runs but those that are late; whoever still
        waits to begin then finds the device closed."""
        taken = 0
        with trio.move_on_after(limits.DEVICE_CLOSE_WAIT_S):
            while taken + self.late < self._depth:
                await self._permits.acquire()
                taken += 1
        for _ in range(taken):
            self._permits.release()

    def abandon(self) -> bool:
        """Answer whoever waits for an operation that could not be taken back, or has not begun; return whether none is
        left."""
        self._drive.close()
        left = [*self._running, *([] if self._probe is None else [self._probe])]
        for operation in left:
            operation.answer(DeviceFailed("the device was closed before the operation ended"))
        return not (left or self._late)
