"""The ends of sessions: clients that die, hang, flood or send garbage, and what stays of them."""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import kvfs
from kvfs import errors, limits
from kvfs.protocol.messages import (
    Control,
    ControlAnswer,
    CountAnswer,
    DigestBatch,
    Failure,
    Hello,
    Op,
    OpenNames,
    Reserve,
)
from kvfs.protocol.state_machine import HEADER
from tests.support.session_answers import (
    ALICE,
    DESCRIPTION,
    descriptors,
)
from tests.support.sessions import MIB, RawClient, Server, fork, session_server
from tests.support.waits import eventually

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="clients with other uids need root")


# --- the ends of sessions --------------------------------------------------------------------------------
def test_a_client_killed_while_writing_leaves_nothing(server: Server, client: kvfs.Client) -> None:
    before = client.status()["tiers"][0]

    def write(pipe: socket.socket) -> None:
        raw = RawClient(server)
        answers = raw.ask(Reserve((MIB,) * 4))
        for fd in descriptors(answers):
            os.write(fd, bytes(MIB))
        pipe.sendall(b"half")
        signal.pause()

    child = fork(write, uid=ALICE, gid=ALICE)
    child.wait_for(b"half")
    assert client.status()["session_drafts"] == 4
    child.kill()
    after = server.wait_until(
        lambda status: status["session_drafts"] == 0 and status["tiers"][0]["slots"] == before["slots"]
    )
    assert after["sessions"] == 2
    assert after["open_drafts"] == 0
    assert after["tiers"][0]["used_bytes"] == before["used_bytes"]
    assert list(client.list("files")) == []


def test_sessions_leave_no_descriptors_in_the_service(server: Server, client: kvfs.Client) -> None:
    client.put("files/a", b"a")

    def open_files() -> list[str]:
        client.status()
        there = []
        for each in Path(f"/proc/{server.child.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                there.append(os.readlink(each))
        return there

    most = len(open_files())  # with what is just being closed, if there is any
    for ending in (b"", b"garbage" * 10, HEADER.pack(100, Op.STATUS, 0, 9)) * 20:
        with RawClient(server) as raw:
            names = OpenNames(((b"files", b"a"), (b"files", b"nothing")))
            for fd in descriptors(raw.ask(Reserve((0,) * 3), names, Control(Op.STAT))):
                os.close(fd)
            raw.send(ending)
    server.wait_until(lambda status: status["sessions"] == 2 and status["open_drafts"] == 0)
    with suppress(AssertionError):
        eventually(lambda: len(open_files()) <= most, "none of theirs is left")
    assert len(left := open_files()) <= most, left


def test_a_file_kept_open_by_a_dead_sessions_child_is_not_reused(server: Server, client: kvfs.Client) -> None:
    """A draft's descriptor outlives its session: what is written through it reaches no later object."""
    with RawClient(server) as raw:
        [answer] = raw.ask(Reserve((0,)))
    [fd] = answer.descriptors
    server.wait_until(lambda status: status["open_drafts"] == 0)
    for number in range(20):
        client.put(f"files/{number}", b"good")
    os.pwrite(fd, b"evil", 0)
    assert {client.get(f"files/{number}") for number in range(20)} == {b"good"}
    os.close(fd)


GARBAGE: dict[str, tuple[bytes, str]] = {
    "http": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "over 1048576"),
    "unknown operation": (HEADER.pack(0, 999, 0, 3), "unknown operation 999"),
    "a second hello": (
        HEADER.pack(16, Op.HELLO, 0, 3) + struct.pack("<8sII", b"kvfs-ses", 1, 1),
        "HELLO comes",
    ),
    "a bad body": (HEADER.pack(3, Op.RESERVE, 0, 3) + b"abc", "3 bytes, at least 8"),
}


@pytest.mark.parametrize(("data", "words"), GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_cut_off_by_name_and_others_go_on(shared_server: Server, data: bytes, words: str) -> None:
    with shared_server.connect() as other, RawClient(shared_server) as raw:
        [answer] = raw.ask(Reserve((0,)))
        os.close(answer.descriptors[0])
        before = other.status()["sessions_cut_off"]
        raw.send(data)
        received = raw.receive()
        assert isinstance(received.answer, Failure)
        assert isinstance(received.answer.error, errors.ProtocolError)
        assert words in str(received.answer.error)
        assert raw.at_end()
        shared_server.wait_until(lambda status: status["open_drafts"] == 0)
        assert other.status()["sessions_cut_off"] == before + 1
        assert "cut off: " in shared_server.log()
        assert words in shared_server.log()


def test_another_protocol_version_is_told_so(shared_server: Server) -> None:
    with RawClient(shared_server, greet=False) as raw:
        [received] = raw.ask(Hello("old", 1, version=99))
        assert isinstance(received.answer, Failure)
        assert isinstance(received.answer.error, errors.FormatMismatch)
        assert "99" in str(received.answer.error)
        assert raw.at_end()


@pytest.fixture
def hasty_server(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A service with little patience in one thing: with those who are in order, it has as much as ever."""
    monkeypatch.setattr(limits, request.param, 0.3)
    with session_server() as running:
        yield running


def hasty(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("hasty_server", [name], indirect=True)


@hasty("SESSION_HELLO_TIMEOUT_S")
def test_who_never_says_hello_is_cut_off(hasty_server: Server) -> None:
    with RawClient(hasty_server, greet=False) as raw:
        assert raw.at_end()
    assert "no HELLO came" in hasty_server.log()


@hasty("SESSION_FRAME_TIMEOUT_S")
def test_half_a_frame_is_cut_off_but_silence_is_not(hasty_server: Server) -> None:
    with RawClient(hasty_server) as quiet, RawClient(hasty_server) as half:
        half.send(HEADER.pack(1000, Op.MATCH, 0, 2) + b"half")
        assert half.at_end()
        assert isinstance(quiet.ask(Control(Op.STATUS))[0].answer, ControlAnswer)
    assert "not completed" in hasty_server.log()


@hasty("SESSION_IDLE_WRITE_TIMEOUT_S")
def test_who_does_not_read_answers_is_cut_off(hasty_server: Server) -> None:
    with hasty_server.connect() as other:
        other.create_bucket("files")
        other.put("files/a", bytes(MIB))
        flood = RawClient(hasty_server)
        [answer] = flood.ask(Reserve((0,)))
        os.close(answer.descriptors[0])
        wanted = ((b"files", b"a"),) * 128
        with suppress(BrokenPipeError, ConnectionResetError):
            while True:
                flood.send(flood.protocol.send_request(OpenNames(wanted)))
        assert other.status()["sessions"] == 1
        assert other.status()["session_drafts"] == 0
        assert "did not read its answers" in hasty_server.log()
        flood.socket.close()
        assert other.evict("files/a") == MIB


def test_a_flood_does_not_starve_the_others(server: Server, client: kvfs.Client) -> None:
    def flood(pipe: socket.socket) -> None:
        with RawClient(server) as raw:
            request = DigestBatch(Op.TOUCH, 1, bytes(16 * limits.MAX_BATCH))
            raw.ask(Control(Op.OPEN_NAMESPACE, {"description": DESCRIPTION}))
            pipe.sendall(b"go")
            while True:
                raw.ask(*[request] * 8)

    children = [fork(flood) for _ in range(3)]
    try:
        for child in children:
            child.wait_for(b"go")
        with server.connect() as other:
            for number in range(20):
                other.put(f"files/{number}", b"x")
                assert other.get(f"files/{number}") == b"x"
    finally:
        for child in children:
            child.kill()


def test_a_second_service_on_the_socket_is_refused(server: Server) -> None:
    from tiers.sessions.server import _listen

    with pytest.raises(errors.StoreLocked, match=r"kvfs\.sock"):
        _listen(server.socket)


def test_counts_of_matches(server: Server) -> None:
    with RawClient(server) as raw:
        [opened] = raw.ask(Control(Op.OPEN_NAMESPACE, {"description": DESCRIPTION}))
        assert isinstance(opened.answer, ControlAnswer)
        [answer] = raw.ask(DigestBatch(Op.MATCH, opened.answer.result["handle"], b""))
        assert answer.answer == CountAnswer(Op.MATCH, 0)
