"""Sessions on a real socket over a real store: what is served, by which addresses, and to a gateway."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs import errors, limits
from kvfs.client.transport import Transport
from kvfs.protocol.messages import (
    Abort,
    Control,
    ControlAnswer,
    CountAnswer,
    DigestBatch,
    Failure,
    NameSeal,
    Op,
    Reserve,
    SealNames,
)
from tests.support.block_batches import Block, open_blocks
from tests.support.door import need_mount
from tests.support.service import Service
from tests.support.session_answers import (
    DESCRIPTION,
    descriptors,
    digest,
    extents,
    put_many,
    results,
)
from tests.support.sessions import MIB, RawClient, Server, fork
from tests.support.stores import NAMESPACE

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="clients with other uids need root")


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


def test_links_are_made_read_and_never_followed(client: kvfs.Client) -> None:
    client.put("files/a", b"bytes")
    made = client.symlink("../a", "files/d/link")
    assert (made.target, made.size_bytes, made.mode, made.tier) == ("../a", 4, 0o777, "index")
    assert client.readlink("files/d/link") == "../a"
    assert [(each.key, each.target) for each in client.list("files")] == [("a", ""), ("d/link", "../a")]
    for call in (client.get, client.open):
        with pytest.raises(errors.IsLink, match="files/d/link"):
            call("files/d/link")
    with pytest.raises(errors.Exists, match="files/d/link"):
        client.symlink("x", "files/d/link")
    client.symlink("\udcff/x", "files/d/link", replace=True)
    assert client.readlink("files/d/link") == "\udcff/x"
    client.rename("files/d/link", "files/link")
    client.put("files/link", b"a file now")
    assert client.get("files/link") == b"a file now"
    client.symlink("x", "files/a", replace=True)
    client.remove("files/a")
    with pytest.raises(errors.NotFound):
        client.readlink("files/a")
    with pytest.raises(errors.InvalidRequest, match="no symbolic link"):
        client.readlink("files/link")
    for target, error in (
        ("", errors.InvalidRequest),
        ("\0", errors.InvalidRequest),
        ("n" * 4096, errors.NameTooLong),
    ):
        with pytest.raises(error):
            client.symlink(target, "files/new")
    assert [entry.key for entry in client.list("files")] == ["link"]
    with pytest.raises(errors.BucketNotFound):
        client.symlink("x", "missing/x")


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
    namespace = open_blocks(client, NAMESPACE)
    assert namespace.digest == NAMESPACE.digest
    assert namespace.bucket == f"kv-{namespace.digest.hex()[:12]}"
    assert open_blocks(client, digest=namespace.digest) == namespace
    blocks = [
        Block(digest(n), b"%d" % n * 1000, parent=digest(n - 1) if n > 1 else None) for n in range(1, 301)
    ]
    assert namespace.put(blocks) == [True] * 300
    assert namespace.put(blocks[:2]) == [False, False]
    wanted = [block.digest for block in blocks]
    assert namespace.match(wanted) == 300
    assert namespace.match([*wanted[:5], digest(999), *wanted[5:]]) == 5
    found = namespace.get([*wanted, digest(999)])
    assert found == [*[block.data for block in blocks], None]
    assert namespace.touch([*wanted, digest(999)]) == 300
    assert client.stat(f"{namespace.bucket}/kv/{digest(1).hex()[:2]}/{digest(1).hex()}").hits >= 1
    assert namespace.remove([*wanted[:10], digest(999)]) == 10
    assert namespace.match(wanted) == 0
    assert client.status()["open_drafts"] == 0


def test_a_block_belongs_to_the_bucket_it_was_sealed_into(client: kvfs.Client) -> None:
    ours, theirs = open_blocks(client, DESCRIPTION), open_blocks(client, {**DESCRIPTION, "salt": "x"})
    ours.put([Block(digest(1), b"ours")])
    assert theirs.match([digest(1)]) == 0
    assert theirs.get([digest(1)]) == [None]
    assert theirs.remove([digest(1)]) == 0
    for call in (client.get, client.stat, client.remove, client.evict):
        with pytest.raises(errors.NotFound):
            call(f"{theirs.bucket}/kv/{digest(1).hex()[:2]}/{digest(1).hex()}")
    assert ours.get([digest(1)]) == [b"ours"]
    assert client.get(f"{ours.bucket}/kv/{digest(1).hex()[:2]}/{digest(1).hex()}") == b"ours"


def test_namespaces_are_found_by_digest_and_bound_once(client: kvfs.Client) -> None:
    namespace = open_blocks(client, DESCRIPTION, bucket="cache")
    assert namespace.bucket == "cache"
    assert open_blocks(client, digest=namespace.digest, bucket="cache") == namespace
    with pytest.raises(errors.BucketNotFound):
        open_blocks(client, digest=bytes(16))
    with pytest.raises(errors.InvalidNamespace, match="cache"):
        open_blocks(client, digest=bytes(16), bucket="cache")
    [bucket] = [bucket for bucket in client.buckets() if bucket.name == "cache"]
    assert bucket.namespace == namespace.digest


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
        with service.paused(), pytest.raises(errors.DeadlinePassed, match=str(service.mount)):
            kvfs.connect(service.mount, timeout_s=0.2)


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
            Transport(tmp_path / "kvfs.sock", timeout_s=0.1, client="test")


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


def test_a_seal_may_need_a_marker(server: Server, client: kvfs.Client) -> None:
    marker = (b"files", b"open/")
    with RawClient(server) as raw:
        assert seal_one(raw, b"k", needs=marker) == errno.ENOENT
        client.put("files/open/below", b"")  # a directory without a marker
        assert seal_one(raw, b"k", needs=marker) == errno.ENOENT
        control(raw, Op.MKDIR, name=["files", "open/"], marker="AQ==")
        assert seal_one(raw, b"k", needs=marker, expected_id=1) == errno.ENOENT
        assert seal_one(raw, b"k", needs=marker) == 0
        assert control(raw, Op.STAT, name=["files", "open/"])["marker_id"] > 0
        control(raw, Op.REMOVE, name=["files", "open/"], marker=True)
        assert seal_one(raw, b"other", needs=marker) == errno.ENOENT
        assert seal_one(raw, b"other", needs=(b"files", b"k")) == errno.EINVAL
        assert seal_one(raw, b"other", needs=(b"missing", b"open/")) == errno.ENOENT
    assert client.get("files/k") == b"k"
    with pytest.raises(errors.NotFound):
        client.stat("files/other")


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
