"""A vLLM worker whose store is late, or stops for a while: blocks are stored later, or dropped and counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any

import pytest

from kvfs.errors import DeadlinePassed
from tests.support.service import Service
from tests.support.vllm_workers import (
    NAMES,
    RANK,
    Told,
    Worker,
    assert_all_there,
    cache,
    device,
    keys_of,
    namespace_of,
    patient,
    plan,
    reused,
    run_of,
    service,
    standin_path,
    watch_of,
    weights,
)
from tests.support.waits import eventually

pytestmark = pytest.mark.mount

__all__ = ["device", "patient", "service", "standin_path"]


class Slow:
    """A store whose answers come when they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._answers = threading.Event()
        self._answers.set()
        self.reserves = 0
        self._make_late(monkeypatch, "put")
        self._make_late(monkeypatch, "reserve")
        self._make_late(monkeypatch, "get_into")

    def _make_late(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        from kvfs.client.blocks import Blocks

        call = getattr(Blocks, name)

        def call_late(blocks: Blocks, *given: Any, timeout_s: float | None = None, **options: Any) -> Any:
            self.reserves += name == "reserve"
            if not self._answers.wait(timeout_s):
                raise DeadlinePassed("no answer")
            return call(blocks, *given, timeout_s=timeout_s, **options)

        monkeypatch.setattr(Blocks, name, call_late)

    def begin(self) -> None:
        self._answers.clear()

    def end(self) -> None:
        self._answers.set()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    from kvfs.connectors import vllm_worker

    monkeypatch.setattr(vllm_worker, "CONNECTOR_STORE_BLOCKS", 2)
    made = Slow(monkeypatch)
    yield made
    made.end()


@pytest.mark.parametrize("by_layer", [True, False])
def test_a_late_store_gets_every_block_and_costs_one_wait(
    service: Service, slow: Slow, device: str, by_layer: bool
) -> None:
    namespace = namespace_of(f"late {device} {by_layer}")
    source, keys = cache(14), keys_of(namespace, 12)
    worker = Worker(service, source, namespace, is_async=True)
    slow.begin()
    worker.store(run_of(keys[: 16 * 7], list(range(7))), by_layer=by_layer)
    worker.store(run_of(keys[16 * 7 : 16 * 10], [7, 8, 9]), by_layer=by_layer)
    assert slow.reserves == (device == "in place")
    held = reused(source)
    slow.end()
    worker.settle(10)
    counts = worker.transfers.counts
    assert (counts["stored_blocks"], counts["dropped_blocks"]) == (10, 0)
    assert counts["late_blocks"] == (10 if device == "in place" else 0)
    assert_all_there(service, namespace, keys[: 16 * 10], held)
    # Drafts are asked for again once nothing waits.
    worker.store(run_of(keys[16 * 10 :], [10, 11]), by_layer=by_layer)
    worker.settle(12)
    assert slow.reserves == 2 * (device == "in place")
    worker.transfers.close()
    with service.client() as client:
        eventually(lambda: client.status()["open_drafts"] == 0, "no draft stays behind")


def test_a_load_that_does_not_end_is_named_once(
    service: Service, slow: Slow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvfs.connectors import vllm_worker

    monkeypatch.setattr(vllm_worker, "CONNECTOR_COPY_S", 0.0)
    namespace = namespace_of("no end")
    keys = keys_of(namespace, 2)
    worker = Worker(service, cache(12), namespace, is_async=True)
    worker.store(run_of(keys, [1, 2]))
    worker.settle(2)
    slow.begin()
    worker.transfers.begin(plan(loads=[run_of(keys, [8, 9], "late")]))
    for _ in range(2):
        assert worker.transfers.take_finished() == {}
    [logged] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "2 blocks" in logged
    assert "its request late waits" in logged
    slow.end()
    assert worker.load() == ({"late"}, set())
    worker.transfers.close()


def test_what_a_late_store_finds_no_memory_for_is_dropped_and_counted(
    service: Service,
    slow: Slow,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from kvfs.connectors import vllm_stores

    namespace = namespace_of(f"bound {device}")
    source, keys = cache(15), keys_of(namespace, 10)
    worker = Worker(service, source, namespace, is_async=True)
    monkeypatch.setattr(
        vllm_stores, "CONNECTOR_LATE_BYTES", 4 * worker.transfers._shards[RANK].layout.block_bytes
    )
    monkeypatch.setattr(vllm_stores, "CONNECTOR_TIMEOUT_S", 0.1)
    slow.begin()
    for at in range(0, 10, 2):
        worker.store(run_of(keys[16 * at : 16 * (at + 2)], [at, at + 1]))
    assert worker.transfers.counts["dropped_blocks"] == 6
    held = reused(source)
    slow.end()
    worker.settle(10)
    assert worker.transfers.counts["stored_blocks"] == 4
    assert len([record for record in caplog.records if "are dropped" in record.message]) == 1
    assert_all_there(service, namespace, keys[: 16 * 4], held)
    # There is room again.
    worker.store(run_of(keys[16 * 4 :], [4, 5, 6, 7, 8, 9]))
    worker.settle(16)
    assert worker.transfers.counts["dropped_blocks"] == 6
    worker.transfers.close()


@pytest.mark.parametrize("in_drafts", [True, False])
def test_a_service_that_stops_for_a_while_gets_every_block(
    service: Service, slow: Slow, device: str, in_drafts: bool
) -> None:
    """Before a step asks for its first drafts, and when they are filled."""
    namespace = namespace_of(f"stopped {device} {in_drafts}")
    source, keys = cache(16), keys_of(namespace, 12)
    worker = Worker(service, source, namespace, is_async=True)
    step = plan(stores=[run_of(keys[: 16 * 5], list(range(5)))])
    worker.transfers.enter(step)
    if in_drafts:
        for name in NAMES:
            worker.transfers.save_layer(step, name)
        for part in worker.transfers._parts:
            wait(part.copies)
    with service.paused():
        worker.transfers.finish(step)
        worker.store(run_of(keys[16 * 5 : 16 * 8], [5, 6, 7]))
        worker.store(run_of(keys[16 * 8 :], [8, 9, 10, 11]))
        held = reused(source)
    worker.settle(12)
    assert worker.transfers.counts["dropped_blocks"] == 0
    assert_all_there(service, namespace, keys, held)
    worker.transfers.close()
    with service.client() as client:
        eventually(lambda: client.status()["open_drafts"] == 0, "no draft stays behind")


def test_late_drafts_of_a_step_with_other_weights_are_aborted(service: Service, slow: Slow) -> None:
    namespace, peers = namespace_of("late and wrong"), Told()
    keys = keys_of(namespace, 3)
    worker = Worker(service, cache(17), namespace, is_async=True, watch=watch_of(weights(), peers))
    step = plan(stores=[run_of(keys, [1, 2, 3])])
    worker.transfers.enter(step)
    slow.begin()
    for name in NAMES:
        worker.transfers.save_layer(step, name)
    peers.notify("epoch 0")
    worker.transfers.finish(step)
    slow.end()
    worker.settle(3)
    assert worker.transfers.counts["dropped_blocks"] == 3
    worker.transfers.close()
    with service.client() as client:
        eventually(lambda: client.status()["open_drafts"] == 0, "no draft stays behind")
        with client.blocks(namespace) as blocks:
            assert blocks.match(keys) == 0
