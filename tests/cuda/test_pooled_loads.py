"""Loads from the pool of a device's memory, and what is added to it, with a real service: on the stand-in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvfs import limits
from kvfs._native.cuda.driver import Context
from kvfs._native.hash.hashing import xxh3_64
from kvfs.client.device_pool import DevicePool
from kvfs.client.transport import Deadline
from kvfs.connectors.device import pooled
from tests.support.cuda_standin import Standin
from tests.support.pool_engines import PoolEngine
from tests.support.pool_services import hbm
from tests.support.pool_workers import BLOCK, COUNT, Cache, Worker, payload
from tests.support.service import Service
from tests.support.waits import WAIT_S, eventually


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no busy machine end a place in the pool."""
    monkeypatch.setattr(pooled, "CONNECTOR_POOL_S", WAIT_S)


@pytest.fixture(scope="module")
def service(standin_path: Path) -> Iterator[Service]:
    with serving(standin_path) as running:
        yield running
        assert not running.complaints()


def serving(library: Path) -> Service:
    return Service(
        mode="off",
        dram="64MiB",
        arguments=["--hbm", "128MiB"],
        environment={"KVFS_LIBCUDA": str(library)},
    )


@pytest.fixture
def library(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> Standin:
    monkeypatch.setenv("KVFS_LIBCUDA", standin.path)
    return standin


@pytest.fixture
def worker(service: Service, library: Standin, context: Context) -> Iterator[Worker]:
    made = Worker(service.data, context)
    yield made
    library.set_faults()
    library.hold(False)
    made.close()


@pytest.fixture
def keys(worker: Worker) -> list[bytes]:
    return worker.put()


def test_what_was_loaded_twice_comes_from_the_pool(
    worker: Worker, keys: list[bytes], service: Service, context: Context
) -> None:
    assert worker.load(keys) == COUNT
    worker.wait_added()
    assert worker.pooled.counts.promoted == 0
    assert worker.load(keys) == COUNT
    eventually(lambda: worker.pooled.counts.promoted == COUNT, "all were added")
    assert worker.load(keys) == 0
    assert worker.pooled.counts.verified == COUNT
    with Worker(service.data, context) as other:
        assert other.load(keys) == 0
        worker.blocks.remove(keys)
        assert worker.client.status()["hbm"]["held_bytes"] == 0, "nothing is leased any more"


def test_part_of_a_load_comes_from_the_pool(worker: Worker, keys: list[bytes], service: Service) -> None:
    with PoolEngine(service.data) as engine:
        for key in keys[1::2]:
            [draft] = engine.reserve([key])
            assert draft is not None
            engine.write(draft, payload(key))
            assert engine.pool.seal([draft], [xxh3_64(payload(key))], timeout_s=WAIT_S) == [True]
    assert worker.load(keys) == COUNT // 2
    assert worker.pooled.counts.verified == COUNT // 2


def test_a_block_that_is_wrong_on_the_device_is_loaded_from_below(
    worker: Worker, keys: list[bytes], service: Service
) -> None:
    worker.fill(keys)
    with PoolEngine(service.data) as engine:
        found = [each for each in engine.lease(keys) if each is not None]
        wrong = found[2]
        engine.damage(wrong.address + 5000)
        engine.pool.release(found)
    before = worker.client.status()["hbm"]["damaged"]
    assert worker.load(keys) == 1
    assert worker.read == [keys[2]]
    assert worker.pooled.counts.mismatched == 1
    assert worker.client.status()["hbm"]["damaged"] == before + 1
    assert worker.load(keys) == 1


def test_a_block_that_has_another_size_by_now_is_not_added(
    worker: Worker, keys: list[bytes], service: Service, context: Context
) -> None:
    with PoolEngine(service.data) as engine:
        for _ in range(2):
            assert engine.lease(keys) == [None] * COUNT
    before = worker.client.status()["hbm"]["used_bytes"]
    worker.pooled.promote(b"".join(keys), [4096] * COUNT, BLOCK // 2, (4096, BLOCK), context.stream())
    assert worker.pooled.counts.promoted == 0
    assert worker.client.status()["hbm"]["used_bytes"] == before


def test_adding_delays_no_load_and_is_one_at_a_time(
    worker: Worker, keys: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on, reserve = threading.Event(), threading.Event(), DevicePool.reserve
    asked: list[bytes] = []

    def slowly(self: DevicePool, some: bytes, *, timeout_s: float) -> Any:
        asked.append(some)
        began.set()
        assert go_on.wait(WAIT_S)
        return reserve(self, some, timeout_s=timeout_s)

    monkeypatch.setattr(DevicePool, "reserve", slowly)
    assert worker.load(keys) == COUNT
    assert began.wait(WAIT_S)
    assert worker.load(keys) == COUNT
    assert worker.load(keys) == COUNT
    assert len(asked) == 1
    go_on.set()
    eventually(lambda: worker.pooled.counts.promoted == COUNT, "all were added")
    assert worker.load(keys) == 0


def test_the_end_does_not_wait_for_what_was_not_begun(worker: Worker, keys: list[bytes]) -> None:
    """Blocks that were to be added to the pool, and the buffer that they lie in."""
    go_on = threading.Event()
    for _ in range(limits.CLIENT_THREADS):
        worker.loads._promoter.submit(go_on.wait)
    try:
        assert worker.load(keys) == COUNT
        worker.loads.close()
        assert worker.loads._buffers == 0, "all were given back"
    finally:
        go_on.set()


def test_the_end_waits_until_the_place_in_the_pool_is_left(
    worker: Worker, keys: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves, go_on, close = threading.Event(), threading.Event(), DevicePool.close

    def slowly(self: DevicePool, *, timeout_s: float) -> None:
        leaves.set()
        assert go_on.wait(WAIT_S)
        close(self, timeout_s=timeout_s)

    def fail(self: DevicePool, some: bytes, *, timeout_s: float) -> Any:
        raise OSError("a fault")

    worker.fill(keys)
    monkeypatch.setattr(DevicePool, "close", slowly)
    monkeypatch.setattr(DevicePool, "lease", fail)
    load = threading.Thread(target=worker.load, args=[keys])
    load.start()
    assert leaves.wait(WAIT_S)
    ended = threading.Thread(target=worker.pooled.close, args=[Deadline.after(WAIT_S)])
    ended.start()
    assert worker.pooled._place is not None, "it is not left yet"
    go_on.set()
    ended.join(WAIT_S)
    load.join(WAIT_S)
    assert worker.pooled._place is None


@pytest.mark.parametrize(
    "fault",
    ["cuMemImportFromShareableHandle:2:0", "cuMemMap:2:2", "cuLaunchKernel:2:1", "cuLaunchKernel:2:2"],
)
def test_loads_go_on_where_the_device_refuses(
    fault: str,
    worker: Worker,
    keys: list[bytes],
    service: Service,
    library: Standin,
    context: Context,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pooled, "CONNECTOR_RETRY_S", 0)
    with Worker(service.data, context) as other:
        other.fill(keys)
    library.set_faults(fault)
    assert worker.load(keys) == COUNT
    assert worker.pooled.counts.verified == 0
    library.set_faults()
    eventually(lambda: worker.load(keys) == 0, "the pool is there again")


@contextmanager
def left_alone(
    library: Standin, context: Context, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Service, Worker, list[bytes]]]:
    """A worker that knows that its service was killed, whose pool has these blocks; it looks for another at once."""
    monkeypatch.setattr(pooled, "CONNECTOR_RETRY_S", 0)
    with serving(Path(library.path)) as service, Worker(service.data, context) as worker:
        made = worker.put()
        worker.fill(made)
        service.kill()
        worker.notice(made)
        yield service, worker, made


def test_loads_go_on_while_the_service_is_away_and_from_the_pool_it_had_before(
    library: Standin, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    with left_alone(library, context, monkeypatch) as (service, worker, made):
        assert worker.load(made) == COUNT
        service.restart()
        assert worker.load(made) == 0
        assert worker.pooled.counts.promoted == COUNT, "nothing was added again"
        assert hbm(service)["adopted"] == COUNT
        with Worker(service.data, context) as other:
            assert other.load(made) == 0
        worker.blocks.remove(made)
        assert hbm(service)["held_bytes"] == 0, "nothing is leased any more"


def test_what_a_service_that_stays_away_had_is_given_back(
    library: Standin, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    with left_alone(library, context, monkeypatch) as (service, worker, made):
        for _ in range(2):
            assert worker.load(made) == COUNT
        kept = worker.pooled._earlier
        assert kept is not None
        assert len(kept.regions) == 1
        monkeypatch.setattr(worker.pooled, "_keep_until_s", 0)
        assert worker.load(made) == COUNT
        assert worker.pooled._earlier is None
        assert kept.is_closed
        service.restart()
        worker.fill(made)
        assert worker.load(made) == 0


def test_a_handover_that_the_device_refuses_is_none(
    library: Standin, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    with left_alone(library, context, monkeypatch) as (service, worker, made):
        service.restart()
        library.set_faults("cuLaunchKernel:2:1")
        worker.load(made)
        library.set_faults()
        assert worker.pooled._earlier is None
        worker.fill(made)
        assert worker.load(made) == 0
        assert hbm(service)["adopted"] == 0


def test_a_load_from_the_pool_ends_before_its_worker_does(
    service: Service, library: Standin, context: Context
) -> None:
    worker = Worker(service.data, context)
    keys = worker.put()
    worker.fill(keys)
    with Cache(context) as cache:
        library.hold(True)
        future = worker.submit(keys, cache)
        eventually(lambda: getattr(worker.pooled._place, "users", 0) == 1, "it has begun")
        closing = threading.Thread(target=worker.loads.close)
        closing.start()
        eventually(lambda: worker.pooled._is_off, "the worker ends")
        assert not future.done()
        library.hold(False)
        closing.join(WAIT_S)
        assert future.result(WAIT_S) == [BLOCK] * COUNT
        assert cache.blocks() == [payload(key) for key in keys]
    assert worker.pooled._place is None
    worker.client.close()


def test_a_service_without_a_pool_is_asked_once(library: Standin, context: Context) -> None:
    with Service(mode="off", dram="64MiB") as plain, Worker(plain.data, context) as worker:
        made = worker.put()
        for _ in range(3):
            assert worker.load(made) == COUNT
        assert worker.pooled._is_off
