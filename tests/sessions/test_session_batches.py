"""Batches, descriptors and arguments of sessions on a real socket."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time

import pytest

import kvfs
from kvfs import errors, limits
from kvfs.protocol.messages import (
    Abort,
    BlockSeal,
    Control,
    ControlAnswer,
    DigestBatch,
    Failure,
    NameSeal,
    Op,
    OpenNames,
    Request,
    Reserve,
    Result,
    SealBlocks,
    SealNames,
)
from tests.support.session_answers import (
    DESCRIPTION,
    SERVICE_UID,
    descriptors,
    digest,
    extents,
    results,
)
from tests.support.sessions import RawClient, Server, session_server
from tests.support.waits import WAIT_S

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="clients with other uids need root")


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
        deadline = time.monotonic() + WAIT_S
        while "descriptors in flight" not in server.log():
            assert server.child.running
            assert time.monotonic() < deadline, "nothing waits for descriptors in flight"
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
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=WAIT_S
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


def test_an_unknown_namespace_handle_is_refused(shared_server: Server) -> None:
    with RawClient(shared_server) as raw:
        for handle in (0, 1, 2**32 - 1):
            [received] = raw.ask(DigestBatch(Op.MATCH, handle, bytes(16)))
            assert isinstance(received.answer, Failure)
            assert f"handle {handle}" in str(received.answer.error)
