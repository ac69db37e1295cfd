"""Waits of the sessions' clients: each ends by itself, and nobody is left waiting by another's failure."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from gateway.backend.batcher import Batcher
from gateway.backend.session import Session
from kvfs import limits
from kvfs._native.blocks.writer import Put
from kvfs.client import transport as transport_module
from kvfs.client import write_path
from kvfs.client.grants import Grants, Spare
from kvfs.client.session import BlockSession, Live
from kvfs.client.transport import Deadline, Transport, socket_path
from kvfs.client.write_path import put_some
from kvfs.connectors.common import Link, string_namespace
from kvfs.errors import DeadlinePassed, KvfsError, NoSpace, ProtocolError, SessionClosed
from kvfs.protocol.messages import Control, Hello, HelloAnswer, Op
from kvfs.protocol.state_machine import Connection, ReceivedRequest, Side
from tests.support.waits import WAIT_S

HELLO = HelloAnswer(bytes(16), False, {})


class Mute:
    """A service that greets, if it does, and answers nothing else."""

    def __init__(self, path: Path, *, greets: bool = True) -> None:
        self.path = path
        self.asked = threading.Semaphore(0)
        self._greets = greets
        self._over = threading.Event()
        self._connected: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        accepted = []
        with suppress(OSError):
            while True:
                connected, _ = self._listener.accept()
                self._connected.append(connected)
                accepted.append(threading.Thread(target=self._mute, args=[connected]))
                accepted[-1].start()
        for each in accepted:
            each.join()

    def _mute(self, connected: socket.socket) -> None:
        protocol = Connection(Side.SERVER)
        with connected:
            try:
                while data := connected.recv(4096):
                    protocol.receive_data(data)
                    while isinstance(event := protocol.next_event(), ReceivedRequest):
                        if isinstance(event.request, Hello) and self._greets:
                            connected.sendall(protocol.send_answer(HELLO))
                        else:
                            self.asked.release()
            except ProtocolError:  # from here on it reads nothing
                assert self._over.wait(WAIT_S)

    def close(self) -> None:
        """End, and with it every connection."""
        self._over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for each in self._connected:
            with suppress(OSError):  # its client has closed
                each.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


@pytest.fixture
def mute(tmp_path: Path) -> Iterator[Mute]:
    made = Mute(tmp_path / "socket")
    yield made
    made.close()


# --- threads ------------------------------------------------------------------------------------------------


def outcome(do: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    found: list[BaseException] = []

    def run() -> None:
        try:
            do()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def test_a_session_that_is_closed_wakes_the_thread_that_waits_in_it(mute: Mute) -> None:
    """And its descriptor is nobody else's before that thread has left it."""
    transport = Transport(mute.path, timeout_s=60.0, client="test")
    number = transport._socket.fileno()
    threads = [outcome(lambda: transport.exchange(Control(Op.STATUS, {}))) for _ in range(3)]
    assert mute.asked.acquire(timeout=WAIT_S)
    transport.close()
    for thread, found in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
        assert [type(error) for error in found] == [SessionClosed]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    with pytest.raises(SessionClosed):
        transport.exchange(Control(Op.STATUS, {}))


def test_closing_from_many_threads_closes_once(mute: Mute) -> None:
    for _ in range(20):
        transport = Transport(mute.path, timeout_s=60.0, client="test")
        threads = [outcome(lambda transport=transport: transport.exchange(Control(Op.STATUS, {})))]
        threads += [outcome(transport.close) for _ in range(4)]
        for thread, _ in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        assert transport._socket.fileno() == -1
        assert [type(error) for _, found in threads for error in found] == [SessionClosed]


def test_a_close_does_not_wait_for_a_thread_that_connects(tmp_path: Path) -> None:
    """To a service that never answers: it ends before the service is gone, after which the thread does."""
    mute = Mute(tmp_path / "socket", greets=False)
    connecting = threading.Event()

    def begin(timeout_s: float) -> Transport:
        connecting.set()
        return Transport(mute.path, timeout_s=timeout_s, client="test")

    session = BlockSession(begin, {})
    with closing(mute):
        thread, found = outcome(lambda: session.run(lambda live: None, Deadline.after(2 * WAIT_S)))
        assert connecting.wait(WAIT_S)
        close, _ = outcome(session.close)
        close.join(WAIT_S)
        assert (close.is_alive(), thread.is_alive()) == (False, True)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert [isinstance(error, KvfsError) for error in found] == [True]


def test_a_close_ends_the_put_that_waits_for_a_seal() -> None:
    """Whose service answers nothing: what waits in the channel is woken, and its deadline is not waited for."""
    details = {"quota": {"spare_drafts": 1}}
    transport: Any = SimpleNamespace(hello=SimpleNamespace(details=details), close=lambda: None)
    grants, waits = Grants(transport), threading.Event()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    grants._channel = ours.detach()

    def at_once(channel: int, *_: object) -> bool:
        waits.set()
        return bool(os.read(channel, 1))

    put: Any = SimpleNamespace(at_once=at_once, size_bytes=0, statuses=None)
    thread, found = outcome(lambda: grants.put(put, None, Deadline.after(60)))
    assert waits.wait(WAIT_S)
    closing, _ = outcome(grants.close)
    with theirs:
        closing.join(WAIT_S)
        assert not closing.is_alive()
    thread.join(WAIT_S)
    assert not found
    assert not grants.has_channel


def test_a_put_sends_nothing_on_a_channel_that_was_closed_before_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its number is a stranger's by then."""
    details = {"quota": {"spare_drafts": 1}}
    transport: Any = SimpleNamespace(hello=SimpleNamespace(details=details), close=lambda: None)
    grants = Grants(transport)
    channel, service = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.shutdown(socket.SHUT_WR)  # who waits for an answer of it is woken
    number = grants._channel = channel.detach()
    take = write_path._take_drafts

    def take_and_end(live: Live, count: int) -> list[Spare]:
        taken = take(live, count)
        grants.close()
        os.dup2(stranger.fileno(), number)
        return taken

    monkeypatch.setattr(write_path, "_take_drafts", take_and_end)
    deadline = Deadline.after(WAIT_S)
    draft = os.memfd_create("draft")
    grants.add([(0, 1, draft, 0)], deadline)
    with service, stranger, peer:
        with pytest.raises(SessionClosed):
            put_some(
                Live(transport, 1, "b", bytes(16), False, grants, deadline),
                Put([bytes(16)], [b"x"], None),
                [0],
            )
        with pytest.raises(BlockingIOError):
            peer.recv(4096, socket.MSG_DONTWAIT)
        os.close(number)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(draft)


def test_a_failure_is_noted_while_another_thread_connects(tmp_path: Path) -> None:
    """To a service that does not answer: an engine's step does not wait for that."""
    mute = Mute(tmp_path / "socket", greets=False)
    link = Link(str(mute.path), name="test", timeout_s=2 * WAIT_S)
    with closing(mute):
        opening, _ = outcome(lambda: link.open(string_namespace("test")))
        assert mute.asked.acquire(timeout=WAIT_S)
        noting, _ = outcome(lambda: link.failed(SessionClosed("the session ended")))
        noting.join(WAIT_S)
        assert (noting.is_alive(), opening.is_alive()) == (False, True)
        assert not link.is_up
    opening.join(WAIT_S)
    link.close()


def test_who_asks_for_an_address_that_hangs_waits_for_the_look_that_is_under_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on a mount whose service hangs: a thread for each would be one more, every few seconds."""
    go_on, looks = threading.Event(), list[Path]()

    def hang(path: Path) -> Path:
        looks.append(path)
        assert go_on.wait(WAIT_S)
        return path

    monkeypatch.setattr(transport_module, "_socket_path", hang)
    for _ in range(3):
        with pytest.raises(DeadlinePassed):
            socket_path(tmp_path, timeout_s=0)
    waiting, _ = outcome(lambda: socket_path(tmp_path, timeout_s=WAIT_S))
    go_on.set()
    waiting.join(WAIT_S)
    assert looks == [tmp_path]
    assert socket_path(tmp_path, timeout_s=WAIT_S) == tmp_path
    assert looks == [tmp_path] * 2


def test_another_look_is_begun_where_one_hangs_for_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The mount may be another by then."""
    go_on, looks = threading.Event(), list[Path]()

    def hang_once(path: Path) -> Path:
        looks.append(path)
        assert len(looks) > 1 or go_on.wait(WAIT_S)
        return path

    monkeypatch.setattr(transport_module, "_socket_path", hang_once)
    monkeypatch.setattr(limits, "CLIENT_LOOK_S", 0)
    with pytest.raises(DeadlinePassed):
        socket_path(tmp_path, timeout_s=0)
    assert socket_path(tmp_path, timeout_s=WAIT_S) == tmp_path
    go_on.set()


@pytest.mark.parametrize("moment", ["its wait has ended", "it has looked for the last time"])
def test_who_asks_for_drafts_while_the_thread_for_them_ends_gets_some(
    monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    monkeypatch.setattr(limits, "CLIENT_SPARE_IDLE_S", 0.05)
    done: queue.SimpleQueue[object] = queue.SimpleQueue()
    refiller = write_path.Refiller(lambda do, _: done.put(do))
    grants: Any = SimpleNamespace(spares=[], wanted=2, has_channel=True)
    late = threading.Thread(target=lambda: refiller.ask(grants))

    class Asked(threading.Event):
        """Is asked once more at this moment of the thread."""

        def wait(self, timeout: float | None = None) -> bool:
            found = super().wait(timeout)
            if not found and moment == "its wait has ended":
                self._ask()
            return found

        def is_set(self) -> bool:
            found = super().is_set()
            if moment == "it has looked for the last time":
                self._ask()
            return found

        def _ask(self) -> None:
            if late.ident is None:
                late.start()
                late.join(0.5)  # or it waits for the thread

    refiller._asked = Asked()
    refiller.ask(grants)
    found = [done.get(timeout=WAIT_S) for _ in range(3)]
    assert found == [write_path._fill, write_path._empty, write_path._fill]
    late.join(WAIT_S)
    refiller.close()


# --- tasks --------------------------------------------------------------------------------------------------


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What makes the deadline of the sessions' requests a short one, those under way included."""
    monkeypatch.setattr(limits, "GATEWAY_TOUCH_INTERVAL_S", 0.05)
    return lambda: monkeypatch.setattr(limits, "CLIENT_TIMEOUT_S", 0.2)


async def test_every_session_of_the_gateway_has_a_deadline(mute: Mute, soon: Callable[[], None]) -> None:
    """Whoever made it, and also where its own cancellation waits for the answer."""
    async with trio.open_nursery() as nursery:
        session = await Session.connect(mute.path, "test", nursery)
        other = await Session.connect(mute.path, "test", nursery)
        soon()
        with trio.fail_after(WAIT_S):
            with pytest.raises(SessionClosed, match="no answer within"):
                await session.control(Op.STATUS)
            assert not session.is_open
            with trio.CancelScope() as scope:
                scope.cancel()
                with pytest.raises(SessionClosed, match="no answer within"):
                    await other.control(Op.STATUS)


async def test_a_greeting_that_does_not_come_has_a_deadline(tmp_path: Path, soon: Callable[[], None]) -> None:
    soon()
    mute = Mute(tmp_path / "other", greets=False)
    try:
        with trio.fail_after(WAIT_S):
            async with trio.open_nursery() as nursery:
                with pytest.raises(SessionClosed, match="no answer within"):
                    await Session.connect(mute.path, "test", nursery)
    finally:
        mute.close()


async def test_closing_a_session_wakes_whoever_sends(mute: Mute) -> None:
    """Whose socket is full: the error is a KvfsError, which everybody above expects."""
    async with trio.open_nursery() as nursery:
        session = await Session.connect(mute.path, "test", nursery)
        ended: list[type[BaseException]] = []

        async def send() -> None:
            try:
                await session._send(bytes(64 << 20))
                await session.control(Op.STATUS)
            except KvfsError as error:
                ended.append(type(error))

        # What is sent is no frame, so that the service does not read on.
        nursery.start_soon(send)
        await trio.testing.wait_all_tasks_blocked(0.05)
        session.close()
    assert ended == [SessionClosed]


class Crash(Exception):
    pass


async def ask(batches: Batcher[int, int], heard: list[str], item: int) -> None:
    """Ask, and note what is said where that ends without an outcome."""
    try:
        await batches.ask(item)
    except SessionClosed as closed:
        heard.append(str(closed))


@pytest.mark.parametrize("error", [Crash("bang"), OSError(5, "gone"), trio.ClosedResourceError()])
async def test_whoever_asked_hears_of_a_batch_that_crashed(error: Exception) -> None:
    """Their waits cannot be cancelled: without a word they would hold up the end of the process."""
    heard: list[str] = []

    async def send(items: Sequence[int]) -> Sequence[int]:
        await trio.lowlevel.checkpoint()
        raise error

    batches: Batcher[int, int] = Batcher(send)

    with trio.fail_after(WAIT_S):
        with (
            pytest.RaisesGroup(type(error))
            if hasattr(pytest, "RaisesGroup")
            else pytest.raises(ExceptionGroup)
        ):
            async with trio.open_nursery() as nursery:
                for item in range(limits.GATEWAY_BATCH * 2):
                    nursery.start_soon(ask, batches, heard, item)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(batches.run)
        with pytest.raises(SessionClosed):
            await batches.ask(1)
    assert len(heard) == limits.GATEWAY_BATCH * 2


async def test_whoever_asked_hears_when_the_batches_are_cancelled() -> None:
    heard: list[str] = []

    async def send(items: Sequence[int]) -> Sequence[int]:
        await trio.sleep_forever()
        raise AssertionError

    batches: Batcher[int, int] = Batcher(send)

    with trio.fail_after(WAIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, batches, heard, 1)
            nursery.start_soon(batches.run)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(ask, batches, heard, 2)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    assert len(heard) == 2


async def test_a_batch_that_the_service_refuses_fails_alone() -> None:
    refused = True

    async def send(items: Sequence[int]) -> Sequence[int]:
        await trio.lowlevel.checkpoint()
        if refused:
            raise NoSpace("full")
        return [item + 1 for item in items]

    batches: Batcher[int, int] = Batcher(send)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(batches.run)
        with pytest.raises(NoSpace, match="full"):
            await batches.ask(1)
        refused = False
        assert await batches.ask(1) == 2
        nursery.cancel_scope.cancel()


def test_a_call_that_waits_too_long_says_so(mute: Mute) -> None:
    transport = Transport(mute.path, timeout_s=WAIT_S, client="test")
    with pytest.raises(DeadlinePassed):
        transport.exchange(Control(Op.STATUS, {}), timeout_s=0.1)
    assert not transport.is_open
