"""GPU memory that outlives a killed service, through whole services on the stand-in: what is handed back, what not."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs import limits
from kvfs._native.cuda.driver import open_driver
from kvfs._native.hash.hashing import xxh3_64
from kvfs.client.device_pool import DevicePool, Earlier
from kvfs.client.exchange import Exchange
from kvfs.errors import ProtocolError, SessionClosed
from kvfs.protocol.messages import Op
from tests.support.pool_engines import BLOCK_BYTES, PoolEngine, payload
from tests.support.pool_services import hbm, keys_of, raw, serving
from tests.support.service import Service
from tests.support.sessions import fork
from tests.support.stores import NAMESPACE
from tests.support.waits import WAIT_S, eventually
from tiers.hbm.segment_tokens import SegmentTokens
from tiers.sessions import channel

ALICE = 1001
OTHER_BYTES = 80 << 10
"""Of blocks that go into a segment of their own."""


@pytest.fixture
def service(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("KVFS_LIBCUDA", str(library))
    with serving(library) as running:
        yield running
        assert not running.complaints()


@pytest.fixture
def engine(service: Service) -> Iterator[PoolEngine]:
    with PoolEngine(service.data) as made:
        yield made


def fill(engine: PoolEngine, count: int = 3) -> list[bytes]:
    """Put blocks into the store and the pool."""
    keys = keys_of(count)
    engine.put(keys)
    assert engine.promote(keys) == [True] * count
    return keys


def kill(service: Service, engine: PoolEngine) -> None:
    """Kill the service, which the engine notices."""
    service.kill()
    with pytest.raises(SessionClosed):
        engine.lease([bytes(16)])


def hand_back(engine: PoolEngine) -> DevicePool:
    """Take a place in the restarted service's pool; return the earlier place, which is closed."""
    earlier = engine.pool
    engine.pool = engine.attach(earlier)
    assert earlier.is_closed
    assert earlier.regions == []
    return earlier


def wait_open(service: Service, descriptor: int, times: int) -> None:
    """Wait until the service has the file of a test's descriptor open so many times."""
    wanted = os.fstat(descriptor)

    def is_same(path: str) -> bool:
        try:
            return os.path.samestat(wanted, os.stat(path))
        except FileNotFoundError:  # closed since
            return False

    def are_open() -> bool:
        return sum(is_same(entry.path) for entry in os.scandir(f"/proc/{service.pid}/fd")) == times

    eventually(are_open, f"it is open {times} times")


def test_blocks_outlive_a_killed_service(service: Service, engine: PoolEngine) -> None:
    keys = fill(engine)
    regions = engine.pool.regions
    for _ in range(2):  # what was taken over once can be again
        kill(service, engine)
        service.restart()
        hand_back(engine)
        assert engine.has(keys) == [True] * 3
        assert engine.pool.regions == regions
        found = hbm(service)
        assert (found["adopted"], found["promoted"], found["blocks"]) == (3, 0, 3)
        assert found["segment_bytes"] == limits.HBM_SEGMENT_BYTES
    more = fill(engine)
    assert engine.has([*keys, *more]) == [True] * 6


def test_a_block_that_changed_meanwhile_is_dropped(service: Service, engine: PoolEngine) -> None:
    keys = fill(engine)
    [_, changed, _] = engine.lease(keys)
    assert changed is not None
    kill(service, engine)
    engine.damage(changed.address + 1000)
    service.restart()
    hand_back(engine)
    assert engine.has(keys) == [True, False, True]


def test_a_block_that_the_store_has_no_more_is_dropped(service: Service, engine: PoolEngine) -> None:
    keys = fill(engine)
    kill(service, engine)
    service.restart()
    assert engine.blocks.remove([keys[0]]) == 1
    hand_back(engine)
    assert engine.has(keys) == [False, True, True]


def test_a_slot_that_was_granted_to_another_block_is_not_handed_back(
    service: Service, engine: PoolEngine
) -> None:
    old, new = fill(engine, 1), keys_of(1)
    [block] = engine.lease(old)
    assert block is not None
    engine.pool.release([block])
    engine.blocks.remove(old)
    engine.put([*new, *old])
    [draft] = engine.reserve(new)
    assert draft is not None
    assert draft.address == block.address, "the same slot, with the old bytes in it still"
    kill(service, engine)
    service.restart()
    hand_back(engine)
    assert engine.has([*old, *new]) == [False, False]
    assert hbm(service)["segment_bytes"] == 0


def test_a_segment_without_room_is_refused_and_unmapped(service: Service, engine: PoolEngine) -> None:
    first, second = fill(engine), keys_of(2)
    engine.put(second, OTHER_BYTES)
    assert engine.promote(second) == [True, True]
    assert len(engine.pool.regions) == 2
    kill(service, engine)
    service.arguments = ["--hbm", "128MiB"]
    service.restart()
    hand_back(engine)
    assert len(engine.pool.regions) == 1
    assert engine.has([*first, *second]) in ([True] * 3 + [False] * 2, [False] * 3 + [True] * 2)
    assert hbm(service)["segment_bytes"] == limits.HBM_SEGMENT_BYTES


def test_two_processes_hand_back_the_same_segment(service: Service) -> None:
    keys, there = keys_of(3), [True] * 3

    def other(pipe: socket.socket) -> list[bool]:
        with PoolEngine(service.data) as second:
            second.put(keys)
            assert second.promote(keys) == there
            pipe.send(b"!")
            pipe.recv(1)
            hand_back(second)
            return second.has(keys)

    child = fork(other)
    try:
        child.wait_for(b"!")
        with PoolEngine(service.data) as engine:
            assert engine.has(keys) == there
            kill(service, engine)
            service.restart()
            hand_back(engine)
            child.pipe.send(b"!")
            assert child.result() == there
            found = hbm(service)
            assert (found["adopted"], found["blocks"]) == (3, 3)
            assert found["segment_bytes"] == limits.HBM_SEGMENT_BYTES
            assert engine.has(keys) == there
    finally:
        child.kill()


def test_who_handed_nothing_back_maps_what_others_did(service: Service, engine: PoolEngine) -> None:
    keys = fill(engine)
    kill(service, engine)
    service.restart()
    hand_back(engine)
    with PoolEngine(service.data) as second:
        assert second.has(keys) == [True] * 3


def test_a_service_that_was_not_restarted_is_handed_nothing(service: Service, engine: PoolEngine) -> None:
    keys = fill(engine)
    engine.put(drafts := keys_of(1))
    assert None not in engine.reserve(drafts)
    engine.pool._transport.close()
    hand_back(engine)
    [pool] = hbm(service)["pools"]
    assert pool["quarantined_bytes_by_pid"].get(str(os.getpid()), 0) == 0, "it heard that the place was left"
    assert engine.has(keys) == [True] * 3
    assert hbm(service)["adopted"] == 0


def test_a_service_that_takes_nothing_over_is_handed_nothing(
    service: Service, engine: PoolEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = fill(engine)
    kill(service, engine)
    service.restart()
    monkeypatch.setattr(Exchange, "sent", None)
    begin = engine.blocks._begin

    def older(timeout_s: float) -> Any:
        transport = begin(timeout_s)
        del transport.hello.details["pools"]
        return transport

    monkeypatch.setattr(engine.blocks, "_begin", older)
    hand_back(engine)
    assert engine.has(keys) == [False] * 3


@pytest.mark.parametrize("error", [kvfs.KvfsError("the device fails"), OSError("no more files")])
def test_a_checksum_that_fails_ends_the_handover_alone(
    error: Exception, service: Service, engine: PoolEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = fill(engine)
    kill(service, engine)
    service.restart()

    def fails(_: object) -> list[int]:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(engine, "checksums", fails)
        hand_back(engine)
    assert engine.has(keys) == [False] * 3
    assert engine.promote(keys) == [True] * 3


def test_segments_are_handed_back_as_far_as_there_is_time(service: Service, engine: PoolEngine) -> None:
    keys, earlier = fill(engine), engine.pool
    kill(service, engine)
    service.restart()
    engine.pool = engine.attach()
    named = Earlier(earlier, engine.checksums)
    assert engine.pool.take_over(named, timeout_s=0) == 0
    assert len(earlier.regions) == 1
    assert engine.pool.take_over(named, timeout_s=WAIT_S) == 3
    assert earlier.regions == []
    earlier.close(timeout_s=0)
    assert engine.has(keys) == [True] * 3


def test_a_service_that_is_killed_during_the_handover_leaves_all_unmapped(
    service: Service, engine: PoolEngine
) -> None:
    keys, earlier = fill(engine), engine.pool
    kill(service, engine)
    service.restart()

    def killing(ranges: Sequence[tuple[int, int]]) -> list[int]:
        service.kill()
        return engine.checksums(ranges)

    with pytest.raises(SessionClosed):
        engine.blocks.device_pool(open_driver(), engine.context, earlier=Earlier(earlier, killing))
    assert earlier.is_closed
    assert earlier.regions == []
    service.restart()
    engine.pool = engine.attach()
    assert engine.has(keys) == [False] * 3


def test_the_key_of_tokens_is_the_service_users_own_and_drawn_anew_where_it_is_damaged(
    service: Service, engine: PoolEngine
) -> None:
    keys, file = fill(engine), service.data / "hbm.key"
    assert file.stat().st_mode & 0o777 == 0o600
    kill(service, engine)
    file.write_bytes(file.read_bytes()[:-1])
    service.restart()
    hand_back(engine)
    assert engine.has(keys) == [False] * 3
    assert len(file.read_bytes()) == limits.HBM_SEGMENT_TOKEN_BYTES
    assert engine.promote(keys) == [True] * 3


# --- refusals, with a descriptor that a test made ----------------------------------------------------------------
@pytest.fixture(scope="module")
def standing(library: Path) -> Iterator[Service]:
    """A service that no test kills."""
    with serving(library) as running:
        yield running
        assert not running.complaints()


@pytest.fixture
def writer(standing: Service, library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolEngine]:
    monkeypatch.setenv("KVFS_LIBCUDA", str(library))
    with PoolEngine(standing.data) as made:
        yield made


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("segment")
    yield descriptor
    os.close(descriptor)


@contextmanager
def place(service: Service) -> Iterator[Exchange]:
    """A session with the namespace open and a place in the pool, which it leaves."""
    with raw(service.data) as exchange:
        exchange.control(Op.OPEN_NAMESPACE, description=NAMESPACE.as_mapping())
        yield exchange
        exchange.control(Op.HBM_DETACH)


def store_tokens(service: Service, uid: int = 0) -> SegmentTokens:
    """Make tokens as the store of a service does."""
    [device, *_] = hbm(service)["devices"]
    return SegmentTokens((service.data / "hbm.key").read_bytes(), device, uid, limits.HBM_SEGMENT_BYTES)


def refused(exchange: Exchange, descriptor: int, token: bytes, *rows: object, namespace: int = 1) -> str:
    try:
        exchange.sent(Op.HBM_ADOPT, descriptor, namespace=namespace, token=token.hex(), blocks=list(rows))
    except kvfs.KvfsError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def row_of(key: bytes, *, offset: int = 0) -> list[object]:
    return [offset, BLOCK_BYTES, key.hex(), f"{xxh3_64(payload(key)):016x}"]


def test_a_token_that_the_store_did_not_make_is_refused(
    standing: Service, writer: PoolEngine, memory: int
) -> None:
    writer.put(keys := keys_of(1))
    good = store_tokens(standing).make()
    changed = bytes([good[0] ^ 1]) + good[1:]
    with place(standing) as exchange:
        for token in (changed, bytes(32), store_tokens(standing, uid=ALICE).make()):
            said = refused(exchange, memory, token, row_of(keys[0]))
            assert said.startswith(
                f"InvalidRequest: token {token.hex()} is of no segment that this store made"
            )
        wait_open(standing, memory, 0)
        before = hbm(standing)
        assert refused(exchange, memory, good, row_of(keys[0])) == ""
        assert hbm(standing)["adopted"] == before["adopted"] + 1
        assert hbm(standing)["segment_bytes"] == before["segment_bytes"] + limits.HBM_SEGMENT_BYTES
        wait_open(standing, memory, 1)
        writer.blocks.remove(keys)
        wait_open(standing, memory, 0)


def test_a_segment_that_this_service_made_is_refused(
    standing: Service, writer: PoolEngine, memory: int
) -> None:
    keys = fill(writer)
    segment, *_ = writer.pool._mapped.values()
    with place(standing) as exchange:
        said = refused(exchange, memory, bytes.fromhex(segment.token), row_of(keys[0]))
        assert said.startswith("InvalidRequest: segment ")
        assert said.endswith(" was made by this service")


def test_what_is_handed_back_with_nothing_right_in_it_takes_no_room(
    standing: Service, writer: PoolEngine, memory: int
) -> None:
    writer.put(keys := keys_of(1))
    right = row_of(keys[0])
    wrong = [
        row_of(keys_of(1)[0]),
        [1, *right[1:]],
        [limits.HBM_SEGMENT_BYTES, *right[1:]],
        [0, BLOCK_BYTES // 2, *right[2:]],
        [*right[:3], "0" * 16],
    ]
    with place(standing) as exchange:
        before, token = hbm(standing)["segment_bytes"], store_tokens(standing).make()
        for row in wrong:
            answer = exchange.sent(Op.HBM_ADOPT, memory, namespace=1, token=token.hex(), blocks=[row])
            assert answer == {"blocks": [None]}
        assert hbm(standing)["segment_bytes"] == before
        wait_open(standing, memory, 0)
        assert "1025 blocks, over 1024" in refused(exchange, memory, token, *[right] * 1025)
        assert "namespace handle 2" in refused(exchange, memory, token, right, namespace=2)


def test_who_may_not_write_a_bucket_hands_nothing_back_to_it(
    standing: Service, writer: PoolEngine, memory: int
) -> None:
    writer.put(keys := keys_of(1))
    bucket = writer.client.buckets()[0].name
    token = store_tokens(standing, uid=ALICE).make()

    def attempt(_: socket.socket) -> str:
        with place(standing) as exchange:
            return refused(exchange, memory, token, row_of(keys[0]))

    writer.client.set_attributes(f"{bucket}/", mode=0o755)
    assert fork(attempt, uid=ALICE, gid=ALICE).result().startswith("AccessDenied")
    writer.client.set_attributes(f"{bucket}/", mode=0o777)
    assert fork(attempt, uid=ALICE, gid=ALICE).result() == ""
    writer.client.set_attributes(f"{bucket}/", mode=0o770)
    writer.blocks.remove(keys)


def test_a_descriptor_of_a_file_is_refused_and_closed(
    standing: Service, writer: PoolEngine, tmp_path: Path
) -> None:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    with place(standing) as exchange:
        said = refused(exchange, descriptor, store_tokens(standing).make())
        assert said == (
            "InvalidRequest: the descriptor is neither a memory file nor a device, as a segment's is"
        )
        wait_open(standing, descriptor, 0)
    os.close(descriptor)


def test_a_descriptor_before_a_place_is_taken_ends_the_session(standing: Service, memory: int) -> None:
    with raw(standing.data, attach=False) as exchange:
        said = refused(exchange, memory, bytes(32))
        assert said == f"{ProtocolError.__name__}: HBM_ADOPT: 0 of 1 descriptors arrived"
    wait_open(standing, memory, 0)


def test_no_more_descriptors_are_taken_than_may_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, closed, close = threading.Event(), list[int](), os.close

    def hang(descriptor: int) -> None:
        if threading.current_thread().name == "kvfs-closer":
            assert go_on.wait(WAIT_S)
            closed.append(descriptor)
        close(descriptor)

    monkeypatch.setattr(os, "close", hang)
    received = channel.ReceivedDescriptors()
    made = [os.eventfd(0) for _ in range(limits.MAX_CLOSING_DESCRIPTORS)]
    received.close(made[1:])
    assert received.has_room
    received.close(made[:1])
    assert not received.has_room
    go_on.set()
    eventually(lambda: received.has_room, "they are closed")
    eventually(lambda: closed == [*made[1:], made[0]], "all of them")


def test_a_file_whose_close_fails_keeps_no_other_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """FUSE flushes a file at each close, which returns what came of that."""
    close = os.close

    def fail(descriptor: int) -> None:
        close(descriptor)
        if threading.current_thread().name == "kvfs-closer":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "close", fail)
    received = channel.ReceivedDescriptors()
    received.close([os.eventfd(0) for _ in range(limits.MAX_CLOSING_DESCRIPTORS)])
    eventually(lambda: received.has_room, "the first is closed")
    eventually(lambda: received._done == limits.MAX_CLOSING_DESCRIPTORS, "all are")


def test_memory_and_devices_are_told_from_files() -> None:
    for path, is_memory in (("/dev/null", True), ("/", False), ("/proc/self/stat", False)):
        descriptor = os.open(path, os.O_RDONLY)
        assert channel.is_memory(descriptor) == is_memory
        os.close(descriptor)
    descriptor = os.memfd_create("memory")
    assert channel.is_memory(descriptor)
    os.close(descriptor)
