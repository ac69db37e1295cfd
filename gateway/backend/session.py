"""A session with the service for a trio program: many tasks' requests in flight on one connection.

Responsibility: frames and descriptors to and from the service's socket, each answer to the task that asked.

Invariants: an exchange, once begun, is not cancelled: whoever asked gets the answer, and so owns the descriptors and
drafts in it. It ends within limits.CLIENT_TIMEOUT_S, or the session does. After any failure the session is closed,
every waiting task gets `SessionClosed`, and the service aborts its drafts.

Concurrency: one trio thread. One task runs `run`; any number exchange. Requests go out in the order of their numbers
under a lock, answers come in that order.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import trio

from kvfs import limits
from kvfs.client.transport import close_all, close_answers, receive_some
from kvfs.errors import DeadlinePassed, KvfsError, SessionClosed
from kvfs.protocol.messages import (
    Control,
    ControlAnswer,
    CountAnswer,
    ExtentAnswer,
    ExtentResult,
    Failure,
    Hello,
    HelloAnswer,
    Op,
    Request,
    Result,
    ResultAnswer,
)
from kvfs.protocol.state_machine import Connection, ReceivedAnswer, Side

Opened = list[tuple[ExtentResult, int | None]]
"""Entries of an answer, each with its descriptor where its status is 0."""


class Signal:
    """Waits once for another task, without being cancelled meanwhile.

    A shielded scope around an event does the same, but the two of each in an exchange with the service took 30 us of
    it. `wait` ends with `notify` and in no other way, so whoever notifies must be sure to run.
    """

    __slots__ = ("_task", "notified")

    def __init__(self) -> None:
        self.notified = False
        self._task: trio.lowlevel.Task | None = None

    def notify(self) -> None:
        """End the wait; twice is harmless."""
        self.notified = True
        if self._task is not None:
            trio.lowlevel.reschedule(self._task)
            self._task = None

    async def wait(self) -> None:
        """Wait for `notify`; return at once after it."""
        if not self.notified:
            self._task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(_never)


def _never(_: object) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.FAILED


@dataclass(slots=True, eq=False)
class _Waiting:
    answers: list[ReceivedAnswer] = field(default_factory=list)
    done: Signal = field(default_factory=Signal)
    began_s: float = field(default_factory=trio.current_time)
    error: KvfsError | None = None


class Session:
    """Made by `connect`; `run` must run beside it."""

    def __init__(self, connection: socket.socket, path: Path) -> None:
        self.path = path
        self._socket = connection
        self._protocol = Connection(Side.CLIENT)
        self._waiting: deque[_Waiting] = deque()
        self._sending = trio.Lock()
        self._ended: KvfsError | None = None
        self.ended = trio.Event()
        self.hello: HelloAnswer

    @classmethod
    async def connect(cls, path: Path, client: str, nursery: trio.Nursery) -> Self:
        """Connect a session whose `run` is a task of `nursery`. Raises SessionClosed, FormatMismatch, LimitExceeded."""
        connection = socket.socket(
            socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        session = cls(connection, path)
        try:
            try:
                connection.connect(str(path))
            except OSError as error:
                raise SessionClosed(f"{path}: no service answers: {error.strerror}") from None
            nursery.start_soon(session.run)
            [hello] = await session.exchange(Hello(client, os.getpid()))
        except BaseException:
            session.close()
            raise
        assert isinstance(hello.answer, HelloAnswer)
        session.hello = hello.answer
        return session

    @property
    def is_open(self) -> bool:
        """Return whether the session has not ended."""
        return self._ended is None

    def close(self, why: KvfsError | None = None) -> None:
        """End the session; the service aborts what was not sealed. Closing twice is harmless."""
        if self._ended is not None:
            return
        self._ended = why or SessionClosed(f"{self.path}: the session was closed")
        self.ended.set()
        trio.lowlevel.notify_closing(self._socket)
        self._socket.close()
        close_all(self._protocol.unused_descriptors())
        for waiting in self._waiting:
            close_answers(waiting.answers)
            waiting.answers.clear()
            waiting.error = SessionClosed(str(self._ended))
            waiting.done.notify()
        self._waiting.clear()

    # --- exchanges ---------------------------------------------------------------------------------------
    async def exchange(self, request: Request) -> list[ReceivedAnswer]:
        """Send a request, and return the answer's frames; the caller closes the descriptors in them.

        Raises the service's error for a request that failed, SessionClosed, DeadlinePassed.
        """
        waiting = _Waiting()
        try:
            self._sending.acquire_nowait()
        except trio.WouldBlock:
            with trio.CancelScope(shield=True):
                await self._sending.acquire()
        try:
            if self._ended is not None:
                raise SessionClosed(str(self._ended))
            data = self._protocol.send_request(request)
            self._waiting.append(waiting)
            await self._send(data)
        finally:
            self._sending.release()
        await waiting.done.wait()
        if waiting.error is not None:
            raise waiting.error
        last = waiting.answers[-1].answer
        if isinstance(last, Failure):
            close_answers(waiting.answers)
            raise last.error
        return waiting.answers

    async def control(self, op: Op, **arguments: Any) -> dict[str, Any]:
        """Send a control request; return the result, an object of JSON values."""
        [received] = await self.exchange(Control(op, arguments))
        assert isinstance(received.answer, ControlAnswer)
        return received.answer.result

    async def results(self, request: Request) -> list[Result]:
        """Send a request that is answered with a result for each entry; return those, in order."""
        answers = [received.answer for received in await self.exchange(request)]
        return [entry for answer in answers if isinstance(answer, ResultAnswer) for entry in answer.entries]

    async def count(self, request: Request) -> int:
        """Send a request that is answered with a count; return that."""
        [received] = await self.exchange(request)
        assert isinstance(received.answer, CountAnswer)
        return received.answer.count

    async def opened(self, request: Request) -> Opened:
        """Return each entry of an answer with its descriptor, which is the caller's."""
        found: Opened = []
        for received in await self.exchange(request):
            assert isinstance(received.answer, ExtentAnswer)
            left = iter(received.descriptors)
            found += [(entry, next(left) if entry.status == 0 else None) for entry in received.answer.entries]
        return found

    async def _send(self, data: bytes) -> None:
        """Send without being cancelled; whoever waits for an answer gets the error of a session that ends."""
        left = memoryview(data)
        with suppress(OSError, trio.ClosedResourceError):  # why the service closed is in what it sent before
            while left:
                try:
                    left = left[self._socket.send(left) :]
                except BlockingIOError:
                    with trio.CancelScope(shield=True):
                        await trio.lowlevel.wait_writable(self._socket)

    # --- answers -----------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Receive until the session ends."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_time)
                await self._receive_all()
                nursery.cancel_scope.cancel()
        finally:
            self.close()

    async def _receive_all(self) -> None:
        try:
            while True:
                event = self._protocol.next_event()
                if isinstance(event, ReceivedAnswer):
                    self._deliver(event)
                else:
                    await self._receive()
        except KvfsError as error:
            self.close(error)
        except (OSError, trio.ClosedResourceError) as error:
            self.close(SessionClosed(f"{self.path}: {error}"))

    async def _watch_time(self) -> None:
        """End the session when its oldest request waits too long: a request has no deadline of its own."""
        while True:
            await trio.sleep(limits.GATEWAY_TOUCH_INTERVAL_S)
            now_s = trio.current_time()
            if self._waiting and now_s - self._waiting[0].began_s > limits.CLIENT_TIMEOUT_S:
                self.close(DeadlinePassed(f"{self.path}: no answer within {limits.CLIENT_TIMEOUT_S:g} s"))

    def _deliver(self, received: ReceivedAnswer) -> None:
        if isinstance(received.answer, Failure) and received.answer.op is Op.CLOSED:
            raise received.answer.error
        waiting = self._waiting[0]
        waiting.answers.append(received)
        if not received.more:
            self._waiting.popleft()
            waiting.done.notify()

    async def _receive(self) -> None:
        while True:
            try:
                return receive_some(self._socket, self._protocol, self.path)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._socket)
