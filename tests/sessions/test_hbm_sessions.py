"""Blocks in GPU memory through a whole service, on the stand-in: processes share them, and nothing wrong gets in."""

from __future__ import annotations

import base64
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs._native.hash.hashing import xxh3_64
from kvfs.errors import SessionClosed
from kvfs.keys import block_name
from kvfs.protocol.messages import Op
from tests.support import undrained_service
from tests.support.cuda_standin import DEVICE
from tests.support.pool_engines import PoolEngine, payload
from tests.support.pool_services import (
    PLACE,
    engine_in_child,
    failure,
    hbm,
    keys_of,
    pool_of,
    raw,
    serving,
)
from tests.support.service import Service, run_kvfs, sink
from tests.support.sessions import fork, session_server
from tests.support.stores import NAMESPACE
from tests.support.waits import WAIT_S, eventually

ALICE = 1001


@pytest.fixture(scope="module")
def service(library: Path) -> Iterator[Service]:
    with serving(library) as running:
        yield running
        assert not running.complaints()


@pytest.fixture
def engine(service: Service, library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolEngine]:
    monkeypatch.setenv("KVFS_LIBCUDA", str(library))
    with PoolEngine(service.data) as made:
        yield made


def test_processes_share_blocks_which_outlive_them(
    service: Service, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(4)
    child = engine_in_child(service, library, keys, seal=True)
    monkeypatch.setenv("KVFS_LIBCUDA", str(library))
    with PoolEngine(service.data) as engine:
        before = hbm(service)
        assert engine.has([*keys, *keys_of(1)]) == [True] * 4 + [False]
        assert pool_of(service)["clients"] == 2
        child.kill()
        assert engine.has(keys) == [True] * 4
        assert hbm(service)["hits"] - before["hits"] == 4, "what is known is leased without asking"
        engine.pool.report(timeout_s=WAIT_S)
        after = hbm(service)
    assert (after["hits"] - before["hits"], after["misses"] - before["misses"]) == (8, 1)
    assert after["promoted"] >= 4
    assert after["capacity_bytes"] == 2 * (256 << 20)
    assert "GPU      256 MiB of each of 2\n" in service.log()
    page = run_kvfs("status", "--at", str(service.data)).stdout
    assert f"{after['blocks']} blocks" in page


def test_drafts_of_a_killed_process_are_not_reused(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts, keys = keys_of(3), keys_of(8)
    with serving(library, module=undrained_service.MODULE) as service:
        child = engine_in_child(service, library, drafts, seal=False)
        child.kill()
        eventually(
            lambda: pool_of(service)["quarantined_bytes_by_pid"] == {str(child.pid): 3 * (64 << 10)},
            "its drafts wait",
            every_s=0.02,
        )
        monkeypatch.setenv("KVFS_LIBCUDA", str(library))
        with PoolEngine(service.data) as engine:
            engine.put(keys)
            assert engine.promote(keys) == [True] * 8
            assert pool_of(service)["used_bytes"] == (3 + 8) * (64 << 10)


def test_a_wrong_checksum_is_refused(service: Service, engine: PoolEngine) -> None:
    keys = keys_of(2)
    engine.put(keys)
    before = hbm(service)
    good, bad = engine.reserve(keys)
    assert good is not None
    assert bad is not None
    for draft in (good, bad):
        engine.write(draft, payload(draft.key))
    right, wrong = xxh3_64(payload(good.key)), xxh3_64(payload(bad.key)) ^ 1
    assert engine.pool.seal([bad, good], [wrong, right], timeout_s=WAIT_S) == [False, True]
    assert engine.has(keys) == [True, False]
    assert hbm(service)["refused"] == before["refused"] + 1
    assert pool_of(service)["used_bytes"] == before["used_bytes"] + (64 << 10)


def test_a_block_that_went_to_nvme_is_sealed_by_the_checksum_there(engine: PoolEngine) -> None:
    keys = keys_of(2)
    engine.put(keys)
    sink(engine.client, [f"{engine.blocks.bucket}/{block_name(key).decode()}" for key in keys])
    assert engine.promote(keys) == [True, True]


def test_what_is_removed_goes_and_what_is_evicted_stays(engine: PoolEngine) -> None:
    removed, evicted, named = keys = keys_of(3)
    engine.put(keys)
    assert engine.promote(keys) == [True] * 3
    name = f"{engine.blocks.bucket}/{block_name(named).decode()}"
    assert engine.blocks.remove([removed]) == 1
    engine.client.evict(f"{engine.blocks.bucket}/{block_name(evicted).decode()}")
    engine.client.remove(name)
    assert engine.has(keys) == [False, True, False]
    engine.put([removed])  # which is not what the pool had
    assert engine.has([removed]) == [False]


def test_what_is_evicted_from_the_store_stays_until_its_bucket_goes(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFS_LIBCUDA", str(library))
    with serving(library, nvme="0") as service, PoolEngine(service.data) as engine:
        keys = keys_of(2)
        engine.put(keys)
        assert engine.promote(keys) == [True, True]
        engine.client.evict(*(f"{engine.blocks.bucket}/{block_name(key).decode()}" for key in keys))
        assert engine.blocks.exists(keys) == [False, False]
        assert engine.has(keys) == [True, True]
        engine.client.remove_bucket(engine.blocks.bucket)
        assert hbm(service)["blocks"] == 0


def test_a_block_of_another_bucket_gets_no_slot(service: Service, engine: PoolEngine) -> None:
    keys = keys_of(1)
    engine.put(keys)
    [draft] = engine.reserve(keys)
    assert draft is not None
    other = {**NAMESPACE.as_mapping(), "salt": "other"}
    at = {"namespace": 1, "digests": base64.b64encode(keys[0]).decode()}
    with raw(service.data) as exchange:
        exchange.control(Op.OPEN_NAMESPACE, description=other)
        exchange.control(Op.HBM_FIND, **at)
        assert exchange.control(Op.HBM_RESERVE, **at) == {"drafts": [None]}
    engine.pool.abort([draft], timeout_s=WAIT_S)


def test_a_block_that_the_store_has_not_gets_no_slot(engine: PoolEngine) -> None:
    [known, _] = keys = keys_of(2)
    engine.put([known])
    reserved, nothing = engine.reserve(keys)
    assert nothing is None
    assert reserved is not None
    assert engine.blocks.remove([known]) == 1
    assert engine.pool.seal([reserved], [xxh3_64(payload(known))], timeout_s=WAIT_S) == [False]
    assert engine.has([known]) == [False]


def test_a_block_whose_bytes_are_wrong_on_the_device_is_dropped(engine: PoolEngine) -> None:
    keys = keys_of(2)
    engine.put(keys)
    assert engine.promote(keys) == [True, True]
    first, _ = leased = [each for each in engine.lease(keys) if each is not None]
    assert engine.pool.drop([first], timeout_s=WAIT_S) == 1
    assert engine.pool.drop([first], timeout_s=WAIT_S) == 0
    engine.pool.release(leased)
    assert engine.has(keys) == [False, True]


def test_a_place_whose_session_was_lost_is_left_with_the_next_one(
    service: Service, engine: PoolEngine
) -> None:
    keys = keys_of(2)
    engine.put(keys)
    assert None not in engine.reserve(keys)
    engine.pool._transport.close()
    engine.pool.close(timeout_s=WAIT_S)
    me = str(os.getpid())
    eventually(
        lambda: pool_of(service)["quarantined_bytes_by_pid"].get(me) == 2 * (64 << 10),
        "its drafts wait",
        every_s=0.02,
    )
    engine.pool = engine.attach()
    assert pool_of(service)["quarantined_bytes_by_pid"].get(me, 0) == 0
    assert engine.promote(keys) == [True, True]
    assert not engine.blocks._left_pools


def test_a_place_that_was_left_is_not_left_again(engine: PoolEngine) -> None:
    for _ in range(2):
        engine.pool.close(timeout_s=WAIT_S)
        assert not engine.blocks._left_pools


def test_a_place_is_left_by_its_own_process_alone(service: Service, engine: PoolEngine) -> None:
    keys, token = keys_of(1), engine.pool._token

    def attach(_: socket.socket) -> None:
        with raw(service.data, left=[[token]]):
            pass

    fork(attach).result()
    engine.put(keys)
    assert engine.promote(keys) == [True]


def test_a_leased_block_keeps_its_slot(service: Service, engine: PoolEngine) -> None:
    keys = keys_of(1)
    engine.put(keys)
    assert engine.promote(keys) == [True]
    [leased] = engine.lease(keys)
    assert leased is not None
    engine.blocks.remove(keys)
    others = keys_of(4)
    engine.put(others)
    assert engine.promote(others) == [True] * 4
    assert engine.read(leased) == payload(keys[0])
    assert pool_of(service)["held_bytes"] == 64 << 10
    engine.pool.release([leased])
    eventually(lambda: pool_of(service)["held_bytes"] == 0, "the slot is free", every_s=0.02)


def test_drafts_that_are_given_back_are_free(service: Service, engine: PoolEngine) -> None:
    keys = keys_of(2)
    engine.put(keys)
    before = hbm(service)["used_bytes"]
    drafts = [draft for draft in engine.reserve(keys) if draft is not None]
    assert hbm(service)["used_bytes"] == before + 2 * (64 << 10)
    engine.pool.abort(drafts, timeout_s=WAIT_S)
    assert hbm(service)["used_bytes"] == before


def test_a_service_that_is_killed_and_started_again_begins_anew(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFS_LIBCUDA", str(library))
    keys = keys_of(2)
    with serving(library) as service, PoolEngine(service.data) as engine:
        engine.put(keys)
        assert engine.promote(keys) == [True, True]
        [leased, _] = engine.lease(keys)
        assert leased is not None
        service.kill()
        assert engine.has(keys) == [True, True]  # nobody reuses what is leased
        with pytest.raises(SessionClosed):
            engine.lease([*keys, *keys_of(1)])
        assert not engine.pool.is_open
        assert engine.read(leased) == payload(keys[0])  # what is mapped is its own until it unmaps
        engine.pool.close(timeout_s=WAIT_S)
        service.restart()
        engine.pool = engine.attach()
        assert engine.has(keys) == [False, False]
        engine.blocks.put(keys, [payload(key) for key in keys])
        assert engine.promote(keys) == [True, True]
        assert engine.has(keys) == [True, True]


def test_a_device_without_memory_gives_no_drafts(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFS_LIBCUDA", str(library))
    with (
        serving(library, KVFS_STANDIN_FAULTS="cuMemCreate:2:0") as service,
        PoolEngine(service.data) as engine,
    ):
        keys = keys_of(2)
        engine.put(keys)
        assert engine.reserve(keys) == [None, None]
        assert engine.has(keys) == [False, False]
        assert not service.complaints()


# --- rights and bad requests, without a driver ------------------------------------------------------------------
def test_who_may_not_write_a_bucket_adds_nothing_to_it(service: Service, engine: PoolEngine) -> None:
    keys = keys_of(1)
    engine.put(keys)
    assert engine.promote(keys) == [True]
    bucket = engine.client.buckets()[0].name
    at = {"namespace": 1, "digests": base64.b64encode(keys[0]).decode()}

    def attempt(_: socket.socket) -> list[str]:
        with raw(service.data) as exchange:
            opened = failure(exchange, Op.OPEN_NAMESPACE, description=NAMESPACE.as_mapping())
            return [opened] + [failure(exchange, op, **at) for op in (Op.HBM_FIND, Op.HBM_RESERVE)]

    refused = fork(attempt, uid=ALICE, gid=ALICE).result()
    assert [each.partition(":")[0] for each in refused] == [
        "AccessDenied",
        "InvalidRequest",
        "InvalidRequest",
    ]
    engine.client.set_attributes(f"{bucket}/", mode=0o755)
    try:
        opened, found, reserved = fork(attempt, uid=ALICE, gid=ALICE).result()
    finally:
        engine.client.set_attributes(f"{bucket}/", mode=0o770)
    assert (opened, found) == ("", "")
    assert reserved.startswith("AccessDenied")


def test_another_uid_has_a_pool_of_its_own(service: Service, engine: PoolEngine) -> None:
    keys = keys_of(1)
    engine.put(keys)
    assert engine.promote(keys) == [True]
    bucket = engine.client.buckets()[0].name
    digests = base64.b64encode(keys[0]).decode()

    def look(_: socket.socket) -> tuple[list[Any], str]:
        with raw(service.data) as exchange:
            exchange.control(Op.OPEN_NAMESPACE, description=NAMESPACE.as_mapping())
            found = exchange.control(Op.HBM_FIND, namespace=1, digests=digests)["blocks"]
            return found, failure(exchange, Op.HBM_MAP, segment=0)

    engine.client.set_attributes(f"{bucket}/", mode=0o755)
    try:
        found, mapped = fork(look, uid=ALICE, gid=ALICE).result()
    finally:
        engine.client.set_attributes(f"{bucket}/", mode=0o770)
    assert found == [None]
    assert mapped.startswith("NotFound")


@pytest.mark.parametrize(
    "row",
    [[0, 1, "00", "0" * 16], [0, -1, "0" * 32, "0" * 16], [0, 1, "0" * 32], 5, [True, 1, "0" * 32, "0" * 16]],
)
def test_a_wrong_row_is_named(service: Service, row: Any) -> None:
    with raw(service.data) as exchange:
        exchange.control(Op.OPEN_NAMESPACE, description=NAMESPACE.as_mapping())
        said = failure(exchange, Op.HBM_SEAL, namespace=1, seals=[row])
        assert said.endswith(
            f"seals has {row!r}, not [an integer, an integer, 16 bytes in hex, 8 bytes in hex]"
        )


def test_wrong_requests_are_named(service: Service) -> None:
    with raw(service.data) as exchange:
        exchange.control(Op.OPEN_NAMESPACE, description=NAMESPACE.as_mapping())
        assert "attached to device" in failure(exchange, Op.HBM_ATTACH, **PLACE)
        assert "token = 'x': 16 bytes in hex" in failure(
            exchange, Op.HBM_ATTACH, device=DEVICE, token="x", left=[]
        )
        assert "1025 drafts, over 1024" in failure(exchange, Op.HBM_ABORT, drafts=[[0, 1]] * 1025)
        assert failure(exchange, Op.HBM_ABORT, drafts=[[0, 1]]).startswith("Superseded")
        assert "16 for each" in failure(exchange, Op.HBM_FIND, namespace=1, digests="AAAA")
        assert exchange.control(Op.HBM_DETACH) == {}
        assert "attached to no device" in failure(exchange, Op.HBM_FIND, namespace=1, digests="")
        assert "no memory of device 'GPU-other'" in failure(
            exchange, Op.HBM_ATTACH, **{**PLACE, "device": "GPU-other"}
        )


def test_a_service_without_pools_says_so() -> None:
    with session_server() as server, server.connect() as client:
        assert client.details["devices"] == []
        with raw(server.socket.parent, attach=False) as exchange:
            assert failure(exchange, Op.HBM_ATTACH, **PLACE).startswith("Unsupported")
