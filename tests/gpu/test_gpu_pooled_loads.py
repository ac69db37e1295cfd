"""Loads from a device's pool in several processes, with a real service: of blocks that others added, and its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kvfs._native.cuda.driver import Context

for needed in ("trio", "lmdb", "pydantic", "typer", "xxhash"):
    pytest.importorskip(needed, reason=f"{needed}, which a service needs, is not installed")

from kvfs.connectors.device import pooled  # noqa: E402
from tests.support.pool_engines import PoolEngine  # noqa: E402
from tests.support.pool_workers import COUNT, Worker  # noqa: E402
from tests.support.service import Service  # noqa: E402
from tests.support.waits import WAIT_S  # noqa: E402


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no busy machine end a place in the pool."""
    monkeypatch.setattr(pooled, "CONNECTOR_POOL_S", WAIT_S)


@pytest.fixture
def service(library: str) -> Iterator[Service]:
    with Service(
        mode="off",
        dram="64MiB",
        arguments=["--hbm", "256MiB"],
        environment={"KVFS_LIBCUDA": library or "libcuda.so.1"},
    ) as running:
        yield running
        assert not running.complaints()


@pytest.fixture
def worker(
    service: Service, library: str, context: Context, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Worker]:
    monkeypatch.setenv("KVFS_LIBCUDA", library or "libcuda.so.1")
    with Worker(service.data, context) as made:
        yield made


def start_peer(service: Service, keys: list[bytes]) -> subprocess.Popen[bytes]:
    joined = ",".join(key.hex() for key in keys)
    command = [sys.executable, "-m", "tests.gpu.pool_peer", str(service.data), joined]
    peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert peer.stdout is not None
    assert peer.stdout.readline() == b"ready\n"
    return peer


def end(peer: subprocess.Popen[bytes]) -> None:
    peer.kill()
    peer.communicate()


def hbm(worker: Worker) -> dict[str, Any]:
    return dict(worker.client.status()["hbm"])


def test_blocks_that_another_process_added_are_loaded_after_its_end_too(
    service: Service, worker: Worker
) -> None:
    keys = worker.put()
    peer = start_peer(service, keys)
    try:
        assert worker.load(keys) == 0
    finally:
        end(peer)
    assert worker.load(keys) == 0
    assert worker.pooled.counts.verified == 2 * COUNT
    assert hbm(worker)["missing"] == []


def test_what_was_loaded_twice_is_in_the_pool_until_its_bytes_are_wrong(
    service: Service, worker: Worker
) -> None:
    keys = worker.put()
    worker.fill(keys)
    assert worker.load(keys) == 0
    with PoolEngine(service.data) as engine:
        found = [each for each in engine.lease(keys) if each is not None]
        engine.damage(found[1].address + 100)
        engine.pool.release(found)
    assert worker.load(keys) == 1
    assert worker.read == [keys[1]]
    assert (worker.pooled.counts.mismatched, hbm(worker)["damaged"]) == (1, 1)


def test_what_was_in_the_pool_is_loaded_from_it_after_a_restart(
    service: Service, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooled, "CONNECTOR_RETRY_S", 0)
    keys = worker.put()
    worker.fill(keys)
    with PoolEngine(service.data) as engine:
        found = [each for each in engine.lease(keys) if each is not None]
        engine.pool.release(found)
        service.kill()
        worker.notice(keys)
        engine.damage(found[1].address + 100)
    service.restart()
    assert worker.load(keys) == 1
    assert worker.read == [keys[1]]
    with service.client() as client:
        counted = client.status()["hbm"]
    assert (counted["adopted"], counted["damaged"]) == (COUNT - 1, 0)
