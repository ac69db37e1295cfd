"""Rights and quotas of the clients of sessions."""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest

import kvfs
from kvfs import errors
from kvfs.protocol.messages import (
    Abort,
    Control,
    Failure,
    Op,
    Reserve,
)
from tests.support.block_batches import Block, open_blocks
from tests.support.session_answers import (
    ALICE,
    BOB,
    DESCRIPTION,
    descriptors,
    digest,
    extents,
)
from tests.support.sessions import MIB, SERVICE_GID, RawClient, Server, fork, session_server
from tiers.sessions.state import SessionQuota

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="clients with other uids need root")


# --- rights ----------------------------------------------------------------------------------------------
def denied(do: Callable[[kvfs.Client], Any]) -> Callable[[kvfs.Client], str]:
    """What `do` is refused with, as a class name; "" when it is not."""

    def attempt(client: kvfs.Client) -> str:
        try:
            do(client)
        except kvfs.KvfsError as error:
            return type(error).__name__
        return ""

    return attempt


def own_bucket(client: kvfs.Client, name: str, uid: int, mode: int) -> None:
    client.create_bucket(name)
    client.set_attributes(name, uid=uid, gid=uid, mode=mode)


def test_only_the_group_makes_buckets(server: Server) -> None:
    make = denied(lambda client: client.create_bucket("new"))
    assert server.run(make, uid=ALICE) == "AccessDenied"
    assert server.run(make, uid=ALICE, groups=(SERVICE_GID,)) == ""
    assert server.run(lambda client: client.may_open, uid=ALICE) is False
    assert server.run(lambda client: client.may_open, uid=ALICE, groups=(SERVICE_GID,)) is True


def test_every_supplementary_group_counts(server: Server) -> None:
    """The kernel sorts them, so the one that matters is the last of a thousand."""
    groups = (*range(2_000, 3_000), SERVICE_GID)
    assert server.run(lambda client: client.may_open, uid=ALICE, groups=groups) is True


def test_a_private_bucket_is_its_owners(server: Server, client: kvfs.Client) -> None:
    own_bucket(client, "alice", ALICE, 0o700)
    server.run(lambda alice: alice.put("alice/a", b"secret"), uid=ALICE)
    attempts: dict[str, Callable[[kvfs.Client], Any]] = {
        "put": lambda c: c.put("alice/b", b""),
        "get": lambda c: c.get("alice/a"),
        "open": lambda c: c.open("alice/a"),
        "stat": lambda c: c.stat("alice/a"),
        "list": lambda c: list(c.list("alice")),
        "remove": lambda c: c.remove("alice/a"),
        "rename out": lambda c: c.rename("alice/a", "files/a"),
        "mkdir": lambda c: c.make_directory("alice/d"),
        "pin": lambda c: c.pin("alice/a"),
        "evict": lambda c: c.evict("alice/a"),
        "chmod": lambda c: c.set_attributes("alice/a", mode=0o777),
    }
    bob = server.run(lambda c: {what: denied(do)(c) for what, do in attempts.items()}, uid=BOB)
    assert bob == dict.fromkeys(attempts, "AccessDenied")
    assert server.run(lambda c: c.get("alice/a"), uid=ALICE) == b"secret"


def test_others_read_what_the_mode_lets_them(server: Server, client: kvfs.Client) -> None:
    own_bucket(client, "alice", ALICE, 0o755)

    def write(alice: kvfs.Client) -> None:
        alice.put("alice/open", b"open", mode=0o644)
        alice.put("alice/closed", b"closed", mode=0o600)
        alice.make_directory("alice/d", mode=0o700)
        alice.put("alice/d/inner", b"inner", mode=0o644)

    server.run(write, uid=ALICE)
    attempts: dict[str, Callable[[kvfs.Client], Any]] = {
        "open": lambda c: c.get("alice/open"),
        "closed": lambda c: c.get("alice/closed"),
        "inner": lambda c: c.get("alice/d/inner"),
        "stat inner": lambda c: c.stat("alice/d/inner"),
        "overwrite": lambda c: c.put("alice/open", b"mine"),
        "remove": lambda c: c.remove("alice/open"),
        "pin": lambda c: c.pin("alice/open"),
        "evict": lambda c: c.evict("alice/open"),
        "chmod": lambda c: c.set_attributes("alice/open", mode=0o666),
        "remove bucket": lambda c: c.remove_bucket("alice"),
        "rename into": lambda c: c.rename("bob/a", "alice/b"),
    }
    own_bucket(client, "bob", BOB, 0o755)
    server.run(lambda c: c.put("bob/a", b"bob"), uid=BOB)
    bob = server.run(lambda c: {what: denied(do)(c) for what, do in attempts.items()}, uid=BOB)
    assert bob == {
        "open": "",
        "closed": "AccessDenied",
        "inner": "AccessDenied",
        "stat inner": "AccessDenied",
        "overwrite": "AccessDenied",
        "remove": "AccessDenied",
        "pin": "NotPermitted",
        "evict": "NotPermitted",
        "chmod": "NotPermitted",
        "remove bucket": "NotPermitted",
        "rename into": "AccessDenied",
    }
    names = server.run(lambda c: [entry.key for entry in c.list("alice")], uid=BOB)
    assert names == ["closed", "d/", "open"]
    names = server.run(lambda c: [entry.key for entry in c.list("alice")], uid=ALICE)
    assert names == ["closed", "d/", "d/inner", "open"]


def test_owners_control_what_is_theirs(server: Server, client: kvfs.Client) -> None:
    own_bucket(client, "alice", ALICE, 0o755)

    def use(alice: kvfs.Client) -> list[str]:
        alice.put("alice/a", b"a")
        alice.pin("alice/a")
        alice.set_attributes("alice/a", mode=0o600, mtime_ns=5)
        given = denied(lambda c: c.set_attributes("alice/a", uid=BOB))(alice)
        swept = denied(lambda c: c.evict(size_bytes=MIB))(alice)
        stopped = denied(lambda c: c.shutdown())(alice)
        alice.evict("alice/a")
        return [given, swept, stopped]

    assert server.run(use, uid=ALICE) == ["NotPermitted"] * 3
    assert list(client.list("alice")) == []


def test_in_a_sticky_bucket_nobody_removes_what_is_anothers(server: Server, client: kvfs.Client) -> None:
    own_bucket(client, "shared", 0, 0o1777)
    server.run(lambda c: c.put("shared/a", b"alice"), uid=ALICE)
    for attempt in (
        lambda c: c.remove("shared/a"),
        lambda c: c.put("shared/a", b"bob"),
        lambda c: c.rename("shared/a", "shared/b"),
    ):
        assert server.run(denied(attempt), uid=BOB) == "AccessDenied"
    server.run(lambda c: c.put("shared/b", b"bob"), uid=BOB)
    assert client.get("shared/a") + client.get("shared/b") == b"alicebob"


def test_blocks_have_their_buckets_rights(server: Server) -> None:
    group = (SERVICE_GID,)

    def write(engine: kvfs.Client) -> None:
        open_blocks(engine, DESCRIPTION).put([Block(digest(1), b"kv")])

    server.run(write, uid=ALICE, groups=group)

    def read(engine: kvfs.Client) -> list[bytes | None]:
        return open_blocks(engine, DESCRIPTION).get([digest(1)])

    assert server.run(read, uid=BOB, groups=group) == [b"kv"]
    assert server.run(denied(lambda c: open_blocks(c, DESCRIPTION)), uid=BOB) == "AccessDenied"
    with server.connect() as client:
        [bucket] = client.buckets()
        client.set_attributes(bucket.name, mode=0o775)
    assert server.run(read, uid=BOB) == [b"kv"]
    assert server.run(denied(write), uid=BOB) == "AccessDenied"

    def by_name(c: kvfs.Client) -> bytes:
        return c.get(f"{bucket.name}/kv/{digest(1).hex()[:2]}/{digest(1).hex()}")

    assert server.run(by_name, uid=BOB) == b"kv"


def test_root_and_the_services_own_user_stop_it(server: Server) -> None:
    with server.connect() as client, RawClient(server) as idle:
        client.shutdown()
        received = idle.receive()
        assert isinstance(received.answer, Failure)
        assert isinstance(received.answer.error, errors.SessionClosed)
        with pytest.raises(errors.SessionClosed, match="the service stops"):
            client.status()
        with pytest.raises(errors.SessionClosed, match="reconnect"):
            client.status()
    server.child.result()
    assert not server.socket.exists()


# --- quotas ----------------------------------------------------------------------------------------------
def test_drafts_of_a_session_are_bounded() -> None:
    with session_server(quota=SessionQuota(drafts=5)) as server, RawClient(server) as raw:
        answers = raw.ask(Reserve((0,) * 7))
        assert [entry.status for entry in extents(answers)] == [0] * 5 + [errno.EDQUOT] * 2
        [first, *_] = extents(answers)
        for fd in descriptors(answers):
            os.close(fd)
        raw.ask(Abort(((first.slot, first.generation),)))
        answers = raw.ask(Reserve((0, 0)))
        assert [entry.status for entry in extents(answers)] == [0, errno.EDQUOT]


def test_bytes_reserved_by_a_uid_are_bounded() -> None:
    with session_server(quota_bytes=2 * MIB) as server:

        def reserve(_: socket.socket) -> list[list[int]]:
            with RawClient(server) as one, RawClient(server) as other:
                found = [one.ask(Reserve((MIB,))), other.ask(Reserve((MIB, MIB)))]
                return [[entry.status for entry in extents(answers)] for answers in found]

        assert fork(reserve, uid=ALICE, gid=ALICE).result() == [[0], [0, errno.EDQUOT]]
        server.wait_until(lambda status: status["open_drafts"] == 0)
        assert fork(reserve, uid=ALICE, gid=ALICE).result() == [[0], [0, errno.EDQUOT]]


def test_a_draft_is_promised_more_within_the_quota() -> None:
    with session_server(quota_bytes=3 * MIB) as server, RawClient(server) as raw:
        answers = raw.ask(Reserve((4096, MIB)))
        [draft, _] = extents(answers)

        def promise(size_bytes: int, generation: int = draft.generation) -> str:
            arguments = {"slot": draft.slot, "generation": generation, "size_bytes": size_bytes}
            [received] = raw.ask(Control(Op.RESERVE_BYTES, arguments))
            return type(received.answer.error).__name__ if isinstance(received.answer, Failure) else ""

        assert [promise(2 * MIB), promise(4096), promise(2 * MIB)] == ["", "", ""]
        assert promise(2 * MIB + 1) == "QuotaExceeded"
        assert promise(1 << 40) == "ObjectTooLarge"
        assert promise(MIB, draft.generation + 2) == "Superseded"
        for descriptor in descriptors(answers):
            os.close(descriptor)
        raw.ask(Abort(((draft.slot, draft.generation),)))
        assert [entry.status for entry in extents(raw.ask(Reserve((2 * MIB,))))] == [0]


def test_sessions_are_bounded() -> None:
    with session_server(quota=SessionQuota(sessions=6, sessions_per_uid=2)) as server:

        def connect(_: socket.socket) -> str:
            with server.connect(), server.connect():
                try:
                    server.connect()
                except errors.LimitExceeded as error:
                    return str(error)
            return ""

        assert "uid 1001 has 2 sessions" in fork(connect, uid=ALICE, gid=ALICE).result()
        server.wait_until(lambda status: status["sessions"] == 1)
        clients = [server.connect() for _ in range(6)]
        with pytest.raises(errors.LimitExceeded, match="6 sessions are open"):
            server.connect()
        for client in clients:
            client.close()
        server.wait_until(lambda status: status["sessions"] == 1)


def test_held_bytes_are_charged_to_the_stopped_reader() -> None:
    with session_server(quota_bytes=3 * MIB) as server, server.connect() as client:
        client.create_bucket("files")
        client.put("files/a", b"a" * 2 * MIB)
        client.put("files/b", b"b" * 2 * MIB)

        def hold(pipe: socket.socket) -> bytes:
            with server.connect() as reader:
                lease = reader.open("files/a")
                pipe.sendall(b"held")
                os.kill(os.getpid(), signal.SIGSTOP)
                pipe.sendall(b"woke")
                pipe.recv(1)
                held = reader.status()["caller"]["held_bytes"]
                try:
                    reader.put("files/mine", bytes(2 * MIB))
                except errors.QuotaExceeded:
                    return b"%d " % held + os.pread(lease, 3, 2 * MIB - 3)
                return b"no quota"

        child = fork(hold, uid=ALICE, gid=ALICE)
        try:
            child.wait_for(b"held")
            child.wait_stopped()
            assert client.evict("files/a") == 0
            assert client.evict("files/b") == 2 * MIB
            with pytest.raises(errors.NotFound):
                client.get("files/a")
            client.put("files/a", b"new")
            assert server.wait_until(lambda status: status["tiers"][0]["held_bytes"] == 2 * MIB)
            child.kill(signal.SIGCONT)
            child.wait_for(b"woke")
            child.pipe.sendall(b"!")
            child.pipe.shutdown(socket.SHUT_WR)
            assert child.result() == b"%d aaa" % (2 * MIB)
        finally:
            child.kill()
        server.wait_until(lambda status: status["tiers"][0]["held_bytes"] == 0)


def test_a_given_back_draft_that_is_still_written_is_charged(server: Server) -> None:
    def keep(_: socket.socket) -> list[int]:
        with RawClient(server) as raw, server.connect() as watching:
            [answer] = raw.ask(Reserve((0,)))
            [draft] = extents([answer])
            os.write(answer.descriptors[0], bytes(MIB))
            raw.ask(Abort(((draft.slot, draft.generation),)))
            held = watching.status()["caller"]["held_bytes"]
            os.close(answer.descriptors[0])
            server.wait_until(lambda status: status["tiers"][0]["held_bytes"] == 0)
            return [held, watching.status()["caller"]["held_bytes"]]

    assert fork(keep, uid=ALICE, gid=ALICE).result() == [MIB, 0]
