"""Sessions on a real socket over a real store: what is served, to whom, and what a session leaves behind."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs import errors, limits
from kvfs.messages import (
    Abort,
    BlockSeal,
    Control,
    ControlAnswer,
    CountAnswer,
    DigestBatch,
    ExtentAnswer,
    ExtentResult,
    Failure,
    Hello,
    NameSeal,
    Op,
    OpenNames,
    Request,
    Reserve,
    Result,
    ResultAnswer,
    SealBlocks,
    SealNames,
)
from kvfs.protocol import HEADER, ReceivedAnswer
from tests.support.door import need_mount
from tests.support.service import Service
from tests.support.sessions import MIB, SERVICE_GID, RawClient, Server, fork, session_server
from tests.support.stores import NAMESPACE
from tiers.session_state import SessionQuota

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="clients with other uids need root")

ALICE, BOB, SERVICE_UID = 1001, 1002, 1003
DESCRIPTION = NAMESPACE.as_mapping()


@pytest.fixture
def server() -> Iterator[Server]:
    with session_server() as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[kvfs.Client]:
    with server.connect() as connected:
        connected.create_bucket("files")
        yield connected


def digest(number: int) -> bytes:
    return (number + (1 << 119)).to_bytes(16, "big")


def extents(answers: list[ReceivedAnswer]) -> list[ExtentResult]:
    return [e for a in answers if isinstance(a.answer, ExtentAnswer) for e in a.answer.entries]


def descriptors(answers: list[ReceivedAnswer]) -> list[int]:
    return [descriptor for answer in answers for descriptor in answer.descriptors]


def results(answers: list[ReceivedAnswer]) -> list[Result]:
    return [r for a in answers if isinstance(a.answer, ResultAnswer) for r in a.answer.entries]


def put_many(server: Server, keys: list[bytes]) -> None:
    """Objects in bucket `files` whose bytes are their keys."""
    with RawClient(server) as raw:
        for at in range(0, len(keys), 100):
            some = keys[at : at + 100]
            answers = raw.ask(Reserve(tuple(map(len, some))))
            for key, descriptor in zip(some, descriptors(answers), strict=True):
                os.write(descriptor, key)
                os.close(descriptor)
            drafts = extents(answers)
            seals = [NameSeal(d.slot, d.generation, b"files", k) for d, k in zip(drafts, some, strict=True)]
            assert {result.status for result in results(raw.ask(SealNames(tuple(seals))))} == {0}


# --- what is served --------------------------------------------------------------------------------------
def test_an_object_comes_back_as_it_was_put(client: kvfs.Client) -> None:
    data = os.urandom(3 * MIB + 5)
    client.put("files/a/b", data, mode=0o640, mtime_ns=12345, user_metadata=b"\0meta")
    assert client.get("files/a/b") == data
    entry = client.stat("files/a/b")
    assert (entry.size_bytes, entry.mode, entry.mtime_ns) == (len(data), 0o640, 12345)
    assert entry.user_metadata == b"\0meta"
    assert client.stat("files/a/").is_directory
    assert client.stat("files").is_directory


def test_empty_objects_and_odd_buffers(client: kvfs.Client) -> None:
    client.put("files/empty", b"")
    client.put("files/odd", memoryview(bytearray(b"12345678")).cast("I"))
    assert client.get("files/empty") == b""
    assert client.get("files/odd") == b"12345678"


def test_put_replaces_unless_told_otherwise(client: kvfs.Client) -> None:
    client.put("files/a", b"one")
    client.put("files/a", b"two")
    with pytest.raises(errors.Exists, match="files/a"):
        client.put("files/a", b"three", replace=False)
    assert client.get("files/a") == b"two"
    assert client.status()["open_drafts"] == 0


def test_names_come_in_pages(server: Server, client: kvfs.Client) -> None:
    keys = [b"d%d/%04d" % (i % 3, i) for i in range(1100)]
    put_many(server, keys)
    assert [entry.key.encode() for entry in client.list("files")] == sorted(keys)
    assert [entry.key for entry in client.list("files", delimiter="/")] == ["d0/", "d1/", "d2/"]
    assert all(entry.key.startswith("d1/") for entry in client.list("files/d1/"))
    assert client.get("files/d1/0001") == b"d1/0001"


def test_a_page_ends_before_its_frame_is_full(server: Server, client: kvfs.Client) -> None:
    for number in range(12):
        client.put(f"files/{number:03}", b"x", user_metadata=bytes(limits.MAX_USER_METADATA_BYTES))
    assert len(list(client.list("files"))) == 12
    with RawClient(server) as raw:
        [received] = raw.ask(Control(Op.LIST, {"bucket": "files"}))
        assert isinstance(received.answer, ControlAnswer)
        assert 1 < len(received.answer.result["entries"]) < 12


def test_names_move_and_go(client: kvfs.Client) -> None:
    client.put("files/d/a", b"a")
    client.rename("files/d/a", "files/d/b")
    client.rename("files/d/", "files/e/")
    assert client.get("files/e/b") == b"a"
    with pytest.raises(errors.IsDirectory):
        client.get("files/e")
    client.remove("files/e/b")
    with pytest.raises(errors.NotFound, match="files/e/b"):
        client.get("files/e/b")
    client.make_directory("files/f")
    with pytest.raises(errors.Exists):
        client.make_directory("files/f/")
    with pytest.raises(errors.NotEmpty):
        client.remove_bucket("files")
    client.remove("files/f/")
    client.remove_bucket("files")
    with pytest.raises(errors.BucketNotFound):
        client.stat("files/f")


def test_pinned_objects_outlast_eviction(client: kvfs.Client) -> None:
    client.put("files/pinned", bytes(MIB))
    client.put("files/other", bytes(MIB))
    client.pin("files/pinned")
    assert client.stat("files/pinned").pinned
    assert client.evict(size_bytes=1 << 40) == MIB
    assert [entry.key for entry in client.list("files")] == ["pinned"]
    client.unpin("files/pinned")
    assert client.evict("files/pinned") == MIB


def test_blocks_are_matched_read_and_removed(client: kvfs.Client) -> None:
    namespace = client.open_namespace(NAMESPACE)
    assert namespace.digest == NAMESPACE.digest
    assert namespace.bucket == f"kv-{namespace.digest.hex()[:12]}"
    assert client.open_namespace(digest=namespace.digest) == namespace
    blocks = [
        kvfs.Block(digest(n), b"%d" % n * 1000, parent=digest(n - 1) if n > 1 else None)
        for n in range(1, 301)
    ]
    assert client.put_blocks(namespace, blocks) == [True] * 300
    assert client.put_blocks(namespace, blocks[:2]) == [False, False]
    wanted = [block.digest for block in blocks]
    assert client.match(namespace, wanted) == 300
    assert client.match(namespace, [*wanted[:5], digest(999), *wanted[5:]]) == 5
    found = client.get_blocks(namespace, [*wanted, digest(999)])
    assert found == [*[bytes(block.data) for block in blocks], None]
    assert client.touch(namespace, [*wanted, digest(999)]) == 300
    assert client.stat(f"{namespace.bucket}/kv/{digest(1).hex()[:2]}/{digest(1).hex()}").hits >= 1
    assert client.remove_blocks(namespace, [*wanted[:10], digest(999)]) == 10
    assert client.match(namespace, wanted) == 0
    assert client.status()["open_drafts"] == 0


def test_a_block_belongs_to_the_bucket_it_was_sealed_into(client: kvfs.Client) -> None:
    ours, theirs = client.open_namespace(DESCRIPTION), client.open_namespace({**DESCRIPTION, "salt": "x"})
    client.put_blocks(ours, [kvfs.Block(digest(1), b"ours")])
    assert client.match(theirs, [digest(1)]) == 0
    assert client.get_blocks(theirs, [digest(1)]) == [None]
    assert client.remove_blocks(theirs, [digest(1)]) == 0
    for call in (client.get, client.stat, client.remove, client.evict):
        with pytest.raises(errors.NotFound):
            call(f"{theirs.bucket}/kv/{digest(1).hex()[:2]}/{digest(1).hex()}")
    assert client.get_blocks(ours, [digest(1)]) == [b"ours"]
    assert client.get(f"{ours.bucket}/kv/{digest(1).hex()[:2]}/{digest(1).hex()}") == b"ours"


def test_namespaces_are_found_by_digest_and_bound_once(client: kvfs.Client) -> None:
    namespace = client.open_namespace(DESCRIPTION, bucket="cache")
    assert namespace.bucket == "cache"
    assert client.open_namespace(digest=namespace.digest, bucket="cache") == namespace
    with pytest.raises(errors.BucketNotFound):
        client.open_namespace(digest=bytes(16))
    with pytest.raises(errors.InvalidNamespace, match="cache"):
        client.open_namespace(digest=bytes(16), bucket="cache")
    [bucket] = [bucket for bucket in client.buckets() if bucket.name == "cache"]
    assert bucket.namespace == namespace.digest
    client.reconnect()
    with pytest.raises(errors.InvalidRequest, match="earlier session"):
        client.match(namespace, [digest(1)])


def test_buckets_come_in_pages(client: kvfs.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(limits.MAX_LIST_ENTRIES + 5):
        client.create_bucket(f"b{number:05}")
    names = [bucket.name for bucket in client.buckets()]
    assert names == sorted(names)
    assert len(names) == limits.MAX_LIST_ENTRIES + 6


# --- addresses -------------------------------------------------------------------------------------------
def test_a_data_directory_or_a_socket_is_address_enough(server: Server) -> None:
    for address in (server.socket, server.directory / "data", str(server.socket)):
        with kvfs.connect(address) as client:
            assert len(client.store_id) == 16
            assert client.may_open
            assert (Path(client.details["directory"]) / "..").is_dir()
            assert Path(client.details["table"]).is_file()


@pytest.mark.mount
def test_a_mount_is_address_enough_and_given_up_when_it_hangs() -> None:
    need_mount()
    with Service(dram="32MiB") as service:
        with kvfs.connect(service.mount) as client:
            client.create_bucket("b")
            client.put("b/a", b"by session")
            assert (service.mount / "b" / "a").read_bytes() == b"by session"
            (service.mount / "b" / "c").write_bytes(b"by path")
            assert client.get("b/c") == b"by path"
        with pytest.raises(errors.SessionClosed, match=r"no kvfs mount"):
            kvfs.connect(service.mount / "b")
        service.running.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(errors.DeadlinePassed, match=str(service.mount)):
                kvfs.connect(service.mount, timeout_s=0.2)
        finally:
            service.running.send_signal(signal.SIGCONT)


def test_an_address_without_a_service_says_so(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(errors.SessionClosed, match=str(path)):
            kvfs.connect(path)
    (tmp_path / "file").touch()
    with pytest.raises(errors.InvalidRequest, match="neither a mount"):
        kvfs.connect(tmp_path / "file")
    dead = tmp_path / "kvfs.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(dead))
    with pytest.raises(errors.SessionClosed, match="refused"):
        kvfs.connect(dead)


def test_a_service_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "kvfs.sock"))
        listener.listen(0)
        with pytest.raises(errors.DeadlinePassed, match=r"no answer within 0.1 s"):
            kvfs.connect(tmp_path, timeout_s=0.1)
        with pytest.raises(errors.DeadlinePassed, match=r"not accepted within 0.1 s"):
            kvfs.connect(tmp_path, timeout_s=0.1)


def test_a_closed_client_says_so_until_it_reconnects(client: kvfs.Client) -> None:
    client.close()
    client.close()
    with pytest.raises(errors.SessionClosed):
        client.status()
    client.reconnect()
    assert client.status()["sessions"] == 1


def test_a_forked_child_must_connect_itself(client: kvfs.Client) -> None:
    with pytest.raises(errors.SessionClosed, match="another process"):
        fork(lambda _: client.status()).result()
    assert client.status()["sessions"] == 1


# --- batches and descriptors -----------------------------------------------------------------------------
def test_a_large_batch_takes_several_frames(server: Server) -> None:
    with RawClient(server) as raw:
        answers = raw.ask(Reserve((0,) * 300))
        assert len(answers) >= 3
        assert max(len(answer.descriptors) for answer in answers) <= limits.MAX_FDS_PER_MESSAGE
        drafts, fds = extents(answers), descriptors(answers)
        assert len(fds) == len({(draft.slot, draft.generation) for draft in drafts}) == 300
        for number, fd in enumerate(fds):
            os.write(fd, b"%d" % number)
            assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
            assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
            os.close(fd)
        [opened] = raw.ask(Control(Op.OPEN_NAMESPACE, {"description": DESCRIPTION}))
        assert isinstance(opened.answer, ControlAnswer)
        handle = opened.answer.result["handle"]
        seals = [BlockSeal(draft.slot, draft.generation, digest(n)) for n, draft in enumerate(drafts)]
        assert {r.status for r in results(raw.ask(SealBlocks(handle, tuple(seals))))} == {0}

        wanted = b"".join(map(digest, range(350)))
        answers = raw.ask(DigestBatch(Op.OPEN_BLOCK, handle, wanted))
        found, fds = extents(answers), descriptors(answers)
        assert [entry.status for entry in found] == [0] * 300 + [errno.ENOENT] * 50
        for number, (entry, fd) in enumerate(zip(found, fds, strict=False)):
            assert os.pread(fd, 100, 0) == b"%d" % number
            assert entry.size_bytes == len(b"%d" % number)
            assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
            assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.write(fd, b"x")
            os.close(fd)
        [looked] = raw.ask(DigestBatch(Op.LOOKUP_BLOCK, handle, wanted))
        assert [entry[:3] for entry in extents([looked])] == [entry[:3] for entry in found]


def test_an_opened_object_is_a_read_only_lease(client: kvfs.Client) -> None:
    client.put("files/a", b"bytes")
    descriptor = client.open("files/a")
    assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    assert client.evict("files/a") == 0
    client.put("files/a", b"other")
    assert os.pread(descriptor, 100, 0) == b"bytes"
    os.close(descriptor)


def test_answers_keep_the_order_of_pipelined_requests(server: Server) -> None:
    with RawClient(server) as raw:
        kinds: list[Request] = [
            Control(Op.STATUS),
            Reserve((0, 0)),
            Control(Op.STAT),
            Reserve(()),
            Abort(()),
        ]
        requests = kinds * 20
        answers = raw.ask(*requests)
        assert [answer.number for answer in answers] == sorted(answer.number for answer in answers)
        assert len({answer.number for answer in answers}) == len(requests)
        for descriptor in descriptors(answers):
            os.close(descriptor)


def test_a_draft_with_an_open_writer_is_busy_and_stays(server: Server, client: kvfs.Client) -> None:
    with RawClient(server) as raw:
        [answer] = raw.ask(Reserve((0,)))
        [draft], [fd] = extents([answer]), answer.descriptors
        os.write(fd, b"bytes")
        seal = SealNames((NameSeal(draft.slot, draft.generation, b"files", b"a"),))
        assert results(raw.ask(seal)) == [Result(errno.EBUSY)]
        assert client.status()["session_drafts"] == 1
        os.close(fd)
        [sealed] = results(raw.ask(seal))
        [found] = raw.ask(Control(Op.STAT, {"name": ["files", "a"]}))
        assert isinstance(found.answer, ControlAnswer)
        assert sealed == Result(0, found.answer.result["object_id"])
        assert results(raw.ask(seal)) == [Result(errno.ESTALE)]
        assert client.status()["session_drafts"] == 0
    assert client.get("files/a") == b"bytes"


def test_a_batch_gives_the_event_loop_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no time per turn, every entry is a turn of its own, and so a frame where descriptors are sent."""
    monkeypatch.setattr(limits, "SESSION_TURN_S", 0.0)
    with session_server() as server, RawClient(server) as raw:
        answers = raw.ask(Reserve((0,) * 10))
        assert [len(answer.descriptors) for answer in answers] == [1] * 10
        drafts = tuple((draft.slot, draft.generation) for draft in extents(answers))
        assert results(raw.ask(Abort(drafts))) == [Result(0)] * 10


def test_a_service_short_of_open_files_answers_in_smaller_frames() -> None:
    with session_server(uid=SERVICE_UID, open_files=70) as server, server.connect() as client:
        client.create_bucket("files")
        with RawClient(server) as raw:
            answers = raw.ask(Reserve((10,) * 300))
            assert [entry.status for entry in extents(answers)] == [0] * 300
            assert len(answers) > 300 / 70
            for fd in descriptors(answers):
                os.write(fd, b"x" * 10)
                os.close(fd)
            seals = [
                NameSeal(e.slot, e.generation, b"files", b"%03d" % n) for n, e in enumerate(extents(answers))
            ]
            assert {result.status for result in results(raw.ask(SealNames(tuple(seals))))} == {0}
            answers = raw.ask(OpenNames(tuple((b"files", b"%03d" % n) for n in range(300))))
            assert [entry.status for entry in extents(answers)] == [0] * 300
            for fd in descriptors(answers):
                os.close(fd)
        assert server.run(lambda own: own.evict(size_bytes=1 << 40), uid=SERVICE_UID) == 3000
        server.run(lambda own: own.shutdown(), uid=SERVICE_UID)
        server.child.result()


def test_descriptors_in_flight_are_waited_for() -> None:
    """Without CAP_SYS_RESOURCE the kernel refuses to send more than RLIMIT_NOFILE at a time."""
    with session_server(uid=SERVICE_UID, open_files=70) as server, RawClient(server) as slow:
        slow.send(slow.protocol.send_request(Reserve((0,) * 300)))
        while "descriptors in flight" not in server.log():
            assert server.child.running
        answers = [slow.receive()]
        while answers[-1].more:
            answers.append(slow.receive())
        assert [entry.status for entry in extents(answers)] == [0] * 300
        for fd in descriptors(answers):
            os.close(fd)


def test_the_package_imports_neither_engines_nor_the_services_parts() -> None:
    heavy = {"torch", "pyfuse3", "lmdb", "trio", "pydantic"}
    code = f"import sys, kvfs; print(*({heavy} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=20
    )
    assert found.stdout.split() == []
    assert all(hasattr(kvfs, name) for name in kvfs.__all__)


def test_one_failing_entry_fails_alone(server: Server, client: kvfs.Client) -> None:
    with RawClient(server) as raw:
        too_large = client.details["limits"]["object_bytes"] + 1
        answers = raw.ask(Reserve((10, too_large, 10)))
        drafts = extents(answers)
        assert [draft.status for draft in drafts] == [0, errno.EFBIG, 0]
        for fd in descriptors(answers):
            os.close(fd)
        names = [(b"files", b"ok"), (b"files", b"directory/"), (b"nowhere", b"a")]
        slots = [drafts[0], drafts[2], drafts[2]]
        seals = [NameSeal(d.slot, d.generation, *name) for d, name in zip(slots, names, strict=True)]
        statuses = [result.status for result in results(raw.ask(SealNames(tuple(seals))))]
        assert statuses == [0, errno.EINVAL, errno.ENOENT]
        opened = raw.ask(OpenNames(tuple(names)))
        assert [entry.status for entry in extents(opened)] == [0, errno.ENOENT, errno.ENOENT]
        [fd] = descriptors(opened)
        os.close(fd)


def test_drafts_of_another_session_are_out_of_reach(server: Server) -> None:
    with RawClient(server) as one, RawClient(server) as other:
        [answer] = one.ask(Reserve((0,)))
        [draft] = extents([answer])
        os.close(answer.descriptors[0])
        assert results(other.ask(Abort(((draft.slot, draft.generation),)))) == [Result(errno.ESTALE)]
        assert results(one.ask(Abort(((draft.slot, draft.generation),)))) == [Result(0)]


WRONG_ARGUMENTS: dict[str, tuple[Control, str]] = {
    "missing": (Control(Op.STAT), "'name' is missing"),
    "unknown": (Control(Op.STATUS, {"verbose": True}), "unknown argument 'verbose'"),
    "not a pair": (Control(Op.STAT, {"name": "a/b"}), "name is a str"),
    "not two": (Control(Op.STAT, {"name": ["a"]}), r"must be \[bucket, key\]"),
    "long": (Control(Op.STAT, {"name": ["a", "k" * 1025]}), "1025 bytes: at most 63"),
    "flag": (
        Control(Op.RENAME, {"source": ["a", "b"], "target": ["a", "c"], "replace": 1}),
        "replace is a int",
    ),
    "range": (Control(Op.LIST, {"bucket": "files", "limit": 1001}), "from 0 to 1000"),
    "boolean": (Control(Op.LIST, {"bucket": "files", "limit": True}), "limit = True"),
    "surrogate": (Control(Op.STAT, {"name": ["a", "\ud800"]}), "no byte form"),
    "base64": (
        Control(Op.SET_ATTRIBUTES, {"name": ["files", "a"], "user_metadata": "?"}),
        "user_metadata is not base64",
    ),
    "digest": (Control(Op.OPEN_NAMESPACE, {"digest": "abc"}), "not 32 hex digits"),
    "namespace": (Control(Op.OPEN_NAMESPACE, {"description": {**DESCRIPTION, "dtype": []}}), "field dtype"),
    "namespace field": (Control(Op.OPEN_NAMESPACE, {"description": {"model": "m"}}), "is missing"),
    "bucket": (Control(Op.BUCKET_CREATE, {"bucket": "a/b"}), "only letters"),
    "long prefix": (Control(Op.LIST, {"bucket": "files", "prefix": "k" * 1025}), "1024 bytes at most"),
}


@pytest.mark.parametrize(("request_", "words"), WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS)
def test_a_wrong_argument_is_named_and_the_session_goes_on(
    shared_server: Server, request_: Control, words: str
) -> None:
    with RawClient(shared_server) as raw:
        [received] = raw.ask(request_)
        assert isinstance(received.answer, Failure)
        with pytest.raises(errors.InvalidRequest, match=words):
            raise received.answer.error
        assert isinstance(raw.ask(Control(Op.STATUS))[0].answer, ControlAnswer)


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    with session_server() as running:
        with running.connect() as client:
            client.create_bucket("files")
            client.put("files/a", b"a")
        yield running


def test_an_unknown_namespace_handle_is_refused(shared_server: Server) -> None:
    with RawClient(shared_server) as raw:
        for handle in (0, 1, 2**32 - 1):
            [received] = raw.ask(DigestBatch(Op.MATCH, handle, bytes(16)))
            assert isinstance(received.answer, Failure)
            assert f"handle {handle}" in str(received.answer.error)


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
        engine.put_blocks(engine.open_namespace(DESCRIPTION), [kvfs.Block(digest(1), b"kv")])

    server.run(write, uid=ALICE, groups=group)

    def read(engine: kvfs.Client) -> list[bytes | None]:
        return engine.get_blocks(engine.open_namespace(DESCRIPTION), [digest(1)])

    assert server.run(read, uid=BOB, groups=group) == [b"kv"]
    assert server.run(denied(lambda c: c.open_namespace(DESCRIPTION)), uid=BOB) == "AccessDenied"
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
            [received] = raw.ask(Control(Op.PROMISE, arguments))
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

    def descriptors_open() -> int:
        client.status()
        return len(os.listdir(f"/proc/{server.child.pid}/fd"))

    before = descriptors_open()
    for ending in (b"", b"garbage" * 10, HEADER.pack(100, Op.STATUS, 0, 9)) * 20:
        with RawClient(server) as raw:
            names = OpenNames(((b"files", b"a"), (b"files", b"nothing")))
            for fd in descriptors(raw.ask(Reserve((0,) * 3), names, Control(Op.STAT))):
                os.close(fd)
            raw.send(ending)
    server.wait_until(lambda status: status["sessions"] == 2 and status["open_drafts"] == 0)
    server.wait_until(lambda _: descriptors_open() == before + 1)  # this session's own


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
def hasty_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A service with little patience."""
    for name in ("SESSION_HELLO_TIMEOUT_S", "SESSION_FRAME_TIMEOUT_S", "SESSION_IDLE_WRITE_TIMEOUT_S"):
        monkeypatch.setattr(limits, name, 0.3)
    with session_server() as running:
        yield running


def test_who_never_says_hello_is_cut_off(hasty_server: Server) -> None:
    with RawClient(hasty_server, greet=False) as raw:
        assert raw.at_end()
    assert "no HELLO came" in hasty_server.log()


def test_half_a_frame_is_cut_off_but_silence_is_not(hasty_server: Server) -> None:
    with RawClient(hasty_server) as quiet, RawClient(hasty_server) as half:
        half.send(HEADER.pack(1000, Op.MATCH, 0, 2) + b"half")
        assert half.at_end()
        assert isinstance(quiet.ask(Control(Op.STATUS))[0].answer, ControlAnswer)
    assert "not completed" in hasty_server.log()


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
        with server.connect(timeout_s=5) as other:
            for number in range(20):
                other.put(f"files/{number}", b"x")
                assert other.get(f"files/{number}") == b"x"
    finally:
        for child in children:
            child.kill()


def test_a_second_service_on_the_socket_is_refused(server: Server) -> None:
    from tiers.sessions import _listen

    with pytest.raises(errors.StoreLocked, match=r"kvfs\.sock"):
        _listen(server.socket)


def test_counts_of_matches(server: Server) -> None:
    with RawClient(server) as raw:
        [opened] = raw.ask(Control(Op.OPEN_NAMESPACE, {"description": DESCRIPTION}))
        assert isinstance(opened.answer, ControlAnswer)
        [answer] = raw.ask(DigestBatch(Op.MATCH, opened.answer.result["handle"], b""))
        assert answer.answer == CountAnswer(Op.MATCH, 0)


# --- what a gateway asks for ---------------------------------------------------------------------------------
def seal_one(raw: RawClient, key: bytes, **options: Any) -> int:
    """The status of sealing an object whose bytes are its key."""
    answers = raw.ask(Reserve((len(key),)))
    [draft], [descriptor] = extents(answers), descriptors(answers)
    os.write(descriptor, key)
    os.close(descriptor)
    seal = NameSeal(draft.slot, draft.generation, b"files", key, **options)
    [result] = results(raw.ask(SealNames((seal,))))
    if result.status:
        raw.ask(Abort(((draft.slot, draft.generation),)))
    return result.status


def control(raw: RawClient, op: Op, **arguments: Any) -> dict[str, Any]:
    [received] = raw.ask(Control(op, arguments))
    if isinstance(received.answer, Failure):
        raise received.answer.error
    assert isinstance(received.answer, ControlAnswer)
    return received.answer.result


def test_a_seal_may_expect_what_it_replaces(server: Server, client: kvfs.Client) -> None:
    with RawClient(server) as raw:
        assert seal_one(raw, b"k", expected_id=1) == errno.ENOENT
        assert seal_one(raw, b"k") == 0
        first = control(raw, Op.STAT, name=["files", "k"])["object_id"]
        assert seal_one(raw, b"k", expected_id=first + 1) == errno.EEXIST
        assert seal_one(raw, b"k", expected_id=first) == 0
        assert seal_one(raw, b"k", expected_id=first) == errno.EEXIST
        second = control(raw, Op.STAT, name=["files", "k"])["object_id"]
        for op, options in ((Op.REMOVE, {}), (Op.SET_ATTRIBUTES, {"user_metadata": "AA=="})):
            with pytest.raises(errors.Exists):
                control(raw, op, name=["files", "k"], expected_id=first, **options)
        control(raw, Op.SET_ATTRIBUTES, name=["files", "k"], expected_id=second, user_metadata="AA==")
        assert client.stat("files/k").user_metadata == b"\0"
        control(raw, Op.REMOVE, name=["files", "k"], expected_id=second)
        with pytest.raises(errors.NotFound):
            control(raw, Op.REMOVE, name=["files", "k"], expected_id=second)


def test_a_marker_stands_beside_whatever_has_the_name(server: Server, client: kvfs.Client) -> None:
    client.put("files/a", b"file")
    client.put("files/a/b", b"below")
    with RawClient(server) as raw:
        for value in ("AQ==", "Ag=="):
            control(raw, Op.MKDIR, name=["files", "a/"], marker=value)
        found = control(raw, Op.STAT, name=["files", "a/"])
        assert (found["directory"], found["user_metadata"], found["marker_id"] > 0) == (True, "Ag==", True)
        control(raw, Op.REMOVE, name=["files", "a/"], marker=True)
        assert control(raw, Op.STAT, name=["files", "a/"])["marker_id"] == 0
        with pytest.raises(errors.NotFound):
            control(raw, Op.REMOVE, name=["files", "a/"], marker=True)
    assert client.get("files/a") == b"file"
    assert client.get("files/a/b") == b"below"


def test_hits_of_named_objects_are_reported_by_the_services_user(server: Server, client: kvfs.Client) -> None:
    client.put("files/k", b"x")
    with RawClient(server) as raw:
        identity = control(raw, Op.STAT, name=["files", "k"])["object_id"]
        keys = identity.to_bytes(16, "big") * 3 + bytes(16)
        [received] = raw.ask(DigestBatch(Op.TOUCH, 0, keys))
        assert isinstance(received.answer, CountAnswer)
        assert received.answer.count == 3
    assert client.stat("files/k").hits == 3


def test_a_large_object_needs_an_nvme_tier_and_a_transfer(server: Server, client: kvfs.Client) -> None:
    client.put("files/k", b"x")
    with RawClient(server) as raw:
        with pytest.raises(errors.DeviceMissing):
            control(raw, Op.LARGE_CREATE, bucket="files")
        for op, arguments in (
            (Op.LARGE_APPEND, {"slot": 0, "generation": 1}),
            (Op.LARGE_READ, {"slot": 0, "generation": 1, "offset": 0, "size": 1}),
            (Op.LARGE_SEAL, {"name": ["files", "x"]}),
            (Op.LARGE_OPEN, {"name": ["files", "k"]}),
        ):
            with pytest.raises(errors.InvalidRequest):
                control(raw, op, **arguments)
        control(raw, Op.LARGE_CLOSE)
