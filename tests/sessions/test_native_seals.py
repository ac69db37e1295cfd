"""Blocks sealed beside the event loop: at once at every door, the first one wins, and nothing is left behind."""

from __future__ import annotations

import errno
import os
import random
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs import errors, limits
from kvfs._native.seal.sealer import SEALS_AT_ONCE
from kvfs.keys import block_name
from kvfs.protocol.messages import (
    BlockSeal,
    Control,
    ControlAnswer,
    DigestBatch,
    ExtentResult,
    Op,
    Reserve,
    SealBlocks,
)
from kvfs.rights import Caller
from tests.support.seal_packets import RESULT, SEAL, answer_of, keys_of
from tests.support.seeds import SEED
from tests.support.session_answers import DESCRIPTION, extents, results
from tests.support.sessions import MIB, RawClient, Server, fork, session_server
from tests.support.stores import NAMESPACE
from tests.support.waits import WAIT_S, eventually
from tiers.recovery.start import StoreOptions, open_store
from tiers.sessions.native_seals import NativeSeals
from tiers.sessions.permissions import Access
from tiers.sessions.state import Session, SessionQuota

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs a private tmpfs")


@pytest.fixture
def server() -> Iterator[Server]:
    with session_server(dram_bytes=64 * MIB) as running:
        yield running


@pytest.fixture
def blocks(server: Server) -> Iterator[kvfs.Blocks]:
    with server.connect() as client, client.blocks(NAMESPACE) as opened:
        yield opened


class Engine:
    """A session with a seal channel, by hand."""

    def __init__(self, server: Server) -> None:
        self.raw = RawClient(server)
        [opened] = self.raw.ask(Control(Op.OPEN_NAMESPACE, {"description": DESCRIPTION}))
        assert isinstance(opened.answer, ControlAnswer)
        self.handle = opened.answer.result["handle"]
        [answer] = self.raw.ask(DigestBatch(Op.OPEN_SEALER, self.handle, NAMESPACE.digest))
        assert extents([answer]) == [ExtentResult(0, 0, 0, SEALS_AT_ONCE)]
        self.channel = socket.socket(fileno=answer.descriptors[0])
        self.channel.settimeout(WAIT_S)

    def draft(self, data: bytes) -> tuple[int, int, int]:
        """A written draft, still open for writing; the service has closed its own end of it by the second answer."""
        [answer, _] = self.raw.ask(Reserve((0,)), DigestBatch(Op.MATCH, self.handle, b""))
        [draft] = extents([answer])
        [descriptor] = answer.descriptors
        os.pwrite(descriptor, data, 0)
        return draft.slot, draft.generation, descriptor

    def seal(self, slot: int, generation: int, key: bytes, flags: int = 0, checksum: int = 0) -> int:
        [status] = answer_of(self.channel, SEAL.pack(slot, generation, key, bytes(16), flags, 0, checksum))
        return status

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self.raw.socket.close()


@pytest.fixture
def engine(server: Server) -> Iterator[Engine]:
    with Engine(server) as engine:
        yield engine


# --- the channel -----------------------------------------------------------------------------------------
def test_a_block_is_there_when_its_seal_is_answered(server: Server, engine: Engine) -> None:
    """At the door of names, too, which the event loop serves."""
    with server.connect() as client:
        for key in keys_of(20):
            slot, generation, descriptor = engine.draft(key * 100)
            os.close(descriptor)
            assert engine.seal(slot, generation, key) == 0
            name = f"kv-{NAMESPACE.digest.hex()[:12]}/{block_name(key).decode()}"
            assert client.get(name) == key * 100
            client.remove(name)
            assert engine.seal(slot, generation, key) == errno.ESTALE
        found = client.status()
        assert (found["blocks"], found["open_drafts"]) == (0, 0)


def test_only_ones_own_draft_is_sealed_and_only_when_it_is_closed(server: Server, engine: Engine) -> None:
    first, second = keys_of(2)
    with Engine(server) as other:
        slot, generation, descriptor = engine.draft(b"mine")
        assert other.seal(slot, generation, first) == errno.ESTALE
        assert engine.seal(slot, generation + 2, first) == errno.ESTALE
        assert engine.seal(1 << 20, generation, first) == errno.ESTALE
        assert engine.seal(slot, generation, first) == errno.EBUSY
        os.close(descriptor)
        assert engine.seal(slot, generation, bytes(8) + first[:8]) == errno.EINVAL
        assert engine.seal(slot, generation, first, flags=2) == errno.EINVAL
        assert engine.seal(slot, generation, first) == 0
        slot, generation, descriptor = other.draft(b"too late")
        os.close(descriptor)
        assert other.seal(slot, generation, first) == errno.EEXIST
        assert other.seal(slot, generation, second) == errno.ESTALE
    with server.connect() as client, client.blocks(NAMESPACE) as blocks:
        assert blocks.exists([first, second]) == [True, False]
        assert client.status()["session_drafts"] == 0


def test_the_event_loop_and_the_thread_see_each_others_seals(server: Server, engine: Engine) -> None:
    first, second = keys_of(2)
    drafts = [engine.draft(b"data") for _ in range(4)]
    for _, _, descriptor in drafts:
        os.close(descriptor)
    pairs = [draft[:2] for draft in drafts]

    def seal_slowly(draft: tuple[int, int], key: bytes) -> int:
        [result] = results(engine.raw.ask(SealBlocks(engine.handle, (BlockSeal(*draft, key),))))
        return result.status

    assert engine.seal(*pairs[0], first) == 0
    assert seal_slowly(pairs[0], second) == errno.ESTALE
    assert seal_slowly(pairs[1], first) == errno.EEXIST
    assert seal_slowly(pairs[2], second) == 0
    assert engine.seal(*pairs[2], first) == errno.ESTALE
    assert engine.seal(*pairs[3], second) == errno.EEXIST
    assert server.wait_until(lambda found: found["open_drafts"] == 0)["blocks"] == 2


def test_a_channel_is_its_sessions_until_that_ends(server: Server) -> None:
    """Closed by its writer, it is not given to another session, whose seals would be the first one's."""
    with Engine(server) as first:
        first.channel.close()
        with Engine(server) as second:
            first.raw.socket.close()
            server.wait_until(lambda found: found["sessions"] == 2)
            for key in keys_of(3):
                slot, generation, descriptor = second.draft(b"data")
                os.close(descriptor)
                assert second.seal(slot, generation, key) == 0
    server.wait_until(lambda found: found["sessions"] == 1 and found["open_drafts"] == 0)
    assert "accounting does not follow" not in server.log()


@pytest.mark.parametrize("packet", [b"x", bytes(55), bytes(57), bytes(56 * (SEALS_AT_ONCE + 1))])
def test_a_packet_that_is_no_batch_ends_the_channel(engine: Engine, packet: bytes) -> None:
    engine.channel.send(packet)
    assert engine.channel.recv(16) == b""
    slot, generation, descriptor = engine.draft(b"still mine")
    os.close(descriptor)
    [key] = keys_of(1)
    seals = SealBlocks(engine.handle, (BlockSeal(slot, generation, key),))
    assert [result.status for result in results(engine.raw.ask(seals))] == [0]


def test_who_does_not_read_answers_loses_the_channel(server: Server, engine: Engine) -> None:
    def flood() -> None:
        while True:
            engine.channel.send(bytes(56 * SEALS_AT_ONCE))

    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        flood()
    with server.connect() as client:  # and nobody else notices
        assert client.status()["sessions"] == 2


def test_a_channel_ends_with_the_rights_it_was_opened_by(server: Server, engine: Engine) -> None:
    bucket = f"kv-{NAMESPACE.digest.hex()[:12]}"
    key, other = keys_of(2)
    with server.connect() as client:
        slot, generation, descriptor = engine.draft(b"in time")
        os.close(descriptor)
        assert engine.seal(slot, generation, key) == 0
        with pytest.raises(errors.NotEmpty):
            client.remove_bucket(bucket)
        assert engine.channel.recv(16) == b""
        with client.blocks(NAMESPACE) as blocks:
            assert blocks.put([other], [b"x"]) == [True]
            client.set_attributes(bucket, mode=0o700)
            assert blocks.put(keys_of(3), [b"y"] * 3) == [True] * 3
            assert blocks.remove([key, other]) == 2


def test_a_digest_that_is_not_the_namespaces_is_refused(engine: Engine) -> None:
    [answer] = engine.raw.ask(DigestBatch(Op.OPEN_SEALER, engine.handle, bytes(16)))
    assert [entry.status for entry in extents([answer])] == [errno.EINVAL]


def test_in_a_plain_directory_the_event_loop_seals() -> None:
    keys = keys_of(5)
    with (
        session_server(backing="directory") as server,
        server.connect() as client,
        client.blocks(NAMESPACE) as blocks,
    ):
        assert blocks.put(keys, [b"data"] * 5) == [True] * 5
        assert [bytes(view) for view in blocks.get(keys) if view] == [b"data"] * 5


# --- the client's part -----------------------------------------------------------------------------------
@pytest.mark.seeded
def test_of_many_writers_one_is_first(server: Server) -> None:
    """Four processes put the same keys in other orders, two of them through the event loop."""
    keys = keys_of(200)

    def write(number: int) -> list[bytes]:
        order = random.Random(SEED + number).sample(keys, len(keys))
        with server.connect() as client, client.blocks(NAMESPACE) as blocks:
            if number % 2:
                grants = blocks._session.grants
                assert grants is not None
                grants._refused = True
            new: list[bytes] = []
            for at in range(0, len(order), 7):
                some = order[at : at + 7]
                flags = blocks.put(some, [key * (1 + number) for key in some])
                new += [key for key, flag in zip(some, flags, strict=True) if flag]
            return new

    children = [fork(lambda _, number=number: write(number)) for number in range(4)]
    new = [child.result() for child in children]
    assert sorted(key for each in new for key in each) == sorted(keys)
    with server.connect() as client, client.blocks(NAMESPACE) as blocks:
        for number, mine in enumerate(new):
            for key, view in zip(mine, blocks.get(mine), strict=True):
                assert view is not None
                assert bytes(view) == key * (1 + number)
        assert client.status()["blocks"] == 200


def test_more_than_fits_is_put_all_the_same(blocks: kvfs.Blocks) -> None:
    """Drafts granted ahead have no promised room: where there is none left, the event loop makes some."""
    keys, data = keys_of(90), os.urandom(MIB)
    for at in range(0, 90, 6):
        some = keys[at : at + 6]
        before = [None, *some[:-1]]
        assert blocks.put(some, [key + data for key in some], before) == [True] * 6
        [view] = blocks.get(some[-1:])
        assert view is not None
        assert bytes(view) == some[-1] + data
    assert 20 < sum(blocks.exists(keys)) < 64


def test_a_killed_client_leaves_nothing(server: Server) -> None:
    def use(pipe: socket.socket) -> None:
        with server.connect() as client, client.blocks(NAMESPACE) as blocks:
            blocks.put(keys_of(3), [b"x"] * 3)
            [draft] = blocks.reserve(keys_of(1), [MIB])
            assert draft is not None
            memoryview(draft)[:4] = b"half"
            pipe.sendall(b"ready")
            pipe.recv(1)

    child = fork(use)
    child.wait_for(b"ready")
    assert server.wait_until(lambda found: found["session_drafts"] > limits.CLIENT_SPARE_DRAFTS // 2)
    child.kill()
    found = server.wait_until(lambda found: found["session_drafts"] == 0 and found["sessions"] == 1)
    assert (found["open_drafts"], found["blocks"]) == (0, 3)
    with server.connect() as client:
        assert client.evict(size_bytes=64 * MIB) > 0
    server.wait_until(lambda found: found["tiers"][0]["slots"] == found["blocks"] == 0)


class QuietPuts(threading.Event):
    """What wakes the thread for drafts, whose wait for further puts passes when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = threading.Event()
        self.waited_s: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_set():
            self.waited_s.append(timeout)
            assert self.passes.wait(WAIT_S)
        return self.is_set()


def test_spare_drafts_go_back_when_nothing_is_put(server: Server) -> None:
    with server.connect() as client, client.blocks(NAMESPACE) as blocks:
        quiet = blocks._refiller._asked = QuietPuts()
        blocks.put(keys_of(1), [b"x"])
        server.wait_until(lambda found: found["session_drafts"] >= limits.CLIENT_SPARE_DRAFTS // 2)
        quiet.passes.set()
        server.wait_until(lambda found: found["session_drafts"] == 0)
        assert set(quiet.waited_s) == {limits.CLIENT_SPARE_IDLE_S}
        quiet.passes.clear()
        assert blocks.put(keys_of(40), [b"x"] * 40) == [True] * 40
        server.wait_until(lambda found: found["session_drafts"] > 0)
        quiet.passes.set()


def test_a_child_that_lives_on_keeps_no_draft_from_being_sealed(blocks: kvfs.Blocks) -> None:
    blocks.put(keys_of(1), [b"x"])
    [draft] = blocks.reserve(keys_of(1), [4096])
    assert draft is not None
    memoryview(draft)[:4] = b"mine"
    grants = blocks._session.grants
    assert grants is not None
    eventually(
        lambda: len(grants.spares) > limits.CLIENT_SPARE_DRAFTS // 2, "a thread has reserved some ahead"
    )
    before = len(os.listdir("/proc/self/fd"))

    def live_on(pipe: Any) -> int:
        pipe.sendall(b"ready")
        pipe.recv(1)
        return len(os.listdir("/proc/self/fd"))

    child = fork(live_on)
    child.wait_for(b"ready")
    assert blocks.seal([draft]) == [True]
    assert blocks.put(keys_of(20), [b"y"] * 20) == [True] * 20
    child.pipe.sendall(b"x")
    assert child.result() <= before - limits.CLIENT_SPARE_DRAFTS // 2


def test_the_event_loop_holds_the_thread_between_looking_and_putting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seal of the same block that arrives in between is answered after the event loop's, which was first."""
    [key] = keys_of(1)
    with open_store(StoreOptions(tmp_path / "data", dram_bytes=32 * MIB)) as store:
        store.create_bucket(b"kv", uid=0, gid=0, namespace=NAMESPACE)
        seals = NativeSeals(store)
        caller = Caller(uid=0, gid=0, groups=frozenset(), pid=1)
        session = Session(1, caller, Access(store, caller, 0), store, SessionQuota(), seals, lambda: -1)
        with socket.socket(fileno=seals.open(session, store.bucket(b"kv"))) as channel:
            (mine, ours), (theirs, other) = session.reserve(0), session.reserve(0)
            os.close(ours)
            os.close(other)
            seals.reclaim(mine.extent.slot)
            inner = store.dram.seal

            def seal_slowly(*arguments: Any, **more: Any) -> Any:
                extent = theirs.extent
                channel.send(SEAL.pack(extent.slot, extent.generation, key, bytes(16), 0, 0, 0))
                assert select.select([channel], [], [], 0.1)[0] == []
                return inner(*arguments, **more)

            monkeypatch.setattr(store.dram, "seal", seal_slowly)
            info = store.seal_block(mine, b"kv", key, parent=None, uid=0)
            assert info.extent is not None
            assert info.extent.slot == mine.extent.slot
            channel.settimeout(WAIT_S)
            assert RESULT.unpack(channel.recv(64))[0] == errno.EEXIST
            seals.catch_up()
            assert store.usage()["open_drafts"] == 0
        seals.close()
