"""The worker's half of the vLLM connector without vLLM: blocks go out and come back, or are reported."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from kvfs import Namespace, prefix_hashes
from kvfs._native.cuda.driver import Context, Stream, open_driver
from kvfs.connectors.common import Link
from kvfs.errors import DeadlinePassed, QuotaExceeded
from tests.support.cuda_standin import Standin, build_standin
from tests.support.door import need_mount
from tests.support.service import Service
from tests.support.stores import NAMESPACE
from tests.support.waits import WAIT_S, eventually

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.mount

RANK = (0, 0)
LAYERS, BLOCKS, HEADS, TOKENS, ELEMENTS = 3, 12, 2, 4, 8
NAMES = [f"layer {i}" for i in range(LAYERS)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    need_mount()
    file = tmp_path_factory.mktemp("config") / "kvfs.toml"
    file.write_text('[session]\nquota = "32MiB"\n')
    with Service(dram="256MiB", arguments=["--config", str(file)]) as running:
        yield running


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give loads as long as a test waits for anything."""
    from kvfs.connectors import vllm_worker

    monkeypatch.setattr(vllm_worker, "CONNECTOR_TIMEOUT_S", WAIT_S)


def cache(fill: int | None) -> dict[str, Any]:
    """A head-major cache, whose blocks lie apart in two runs per layer."""
    torch.manual_seed(fill or 0)
    whole = (
        torch.randn(LAYERS, HEADS, BLOCKS, TOKENS, ELEMENTS)
        if fill
        else torch.zeros(LAYERS, HEADS, BLOCKS, TOKENS, ELEMENTS)
    )
    return {name: whole[i].transpose(0, 1) for i, name in enumerate(NAMES)}


def run_of(keys: bytes, block_ids: list[int], name: str = "request") -> Any:
    from kvfs.connectors.vllm_scheduler import BlockRun

    return BlockRun(name, block_ids, {RANK: keys}, {RANK: None})


def plan(**runs: Any) -> Any:
    from kvfs.connectors.vllm_scheduler import Plan

    return Plan(**runs)


class Worker:
    def __init__(
        self,
        service: Service,
        layers: dict[str, Any],
        namespace: Namespace,
        *,
        is_async: bool,
        watch: Any = None,
        adapters: Any = None,
    ) -> None:
        from kvfs.connectors.adapters import LoadedAdapters
        from kvfs.connectors.vllm_layout import KVLayout, Shard
        from kvfs.connectors.vllm_worker import Transfers

        link, layout = Link(str(service.mount), name="test", timeout_s=WAIT_S), KVLayout(layers, BLOCKS)
        watch = watch or watch_of(weights())
        adapters = adapters or LoadedAdapters(None, Told(), str)
        shards: dict[tuple[int, ...], Shard] = {RANK: Shard(namespace, layout)}
        self.transfers = Transfers(
            link, shards, is_async=is_async, watch=watch, adapters=adapters, device=copies_of(layout)
        )

    def store(self, *runs: Any, by_layer: bool = True, epoch: int = 0) -> None:
        step = plan(stores=list(runs), epoch=epoch)
        self.transfers.enter(step)
        for name in NAMES if by_layer else ():
            self.transfers.save_layer(step, name)
        self.transfers.finish(step)

    def settle(self, count: int) -> None:
        """Until so many blocks are stored, or dropped."""
        counts = self.transfers.counts
        eventually(lambda: counts["stored_blocks"] + counts["dropped_blocks"] >= count, "stores have ended")

    def load(self, *runs: Any, epoch: int = 0) -> tuple[set[str], set[int]]:
        """A step with these loads: requests that finished, blocks that failed."""
        step = plan(loads=list(runs), epoch=epoch)
        self.transfers.enter(step)
        self.transfers.begin(step)
        for name in NAMES:
            self.transfers.wait_layer(name)
        finished: set[str] = set()

        def ended() -> bool:
            finished.update(self.transfers.take_finished())
            return not self.transfers._loads

        eventually(ended, "loads have ended")
        return finished, self.transfers.take_failed_blocks()


STANDIN: list[Context] = []
"""The context of the stand-in for a device, while a test has its caches there."""
STREAMS: list[Stream] = []
"""What the engine computes on there."""


def copies_of(layout: Any) -> Any:
    """The stand-in's copies; None where caches are in CPU memory, or copied by PyTorch."""
    from kvfs.connectors.device.copies import copies_in

    if not STANDIN:
        return None
    return copies_in(STANDIN[0], layout.block_bytes, lambda: STREAMS[0].handle)


@pytest.fixture(scope="module")
def standin_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_standin(tmp_path_factory.mktemp("standin"))


@pytest.fixture(params=["in place", "staged", "by the stand-in"])
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, standin_path: Path
) -> Iterator[str]:
    """A cache in CPU memory, and two that are on a device: copied by PyTorch, and by the driver's copies."""
    from kvfs.connectors.vllm_layout import KVLayout

    if request.param != "in place":
        monkeypatch.setattr(KVLayout, "is_on_cpu", property(lambda _: False))
    if request.param == "by the stand-in":
        # 128 MiB for blocks of some KiB are ten thousands of slots: 0.1 s of each worker's start
        monkeypatch.setattr("kvfs.connectors.device.buffers.CONNECTOR_STAGING_BYTES", 1 << 20)
        STANDIN.append(open_driver(str(standin_path)).devices()[0].retain_context())
        STREAMS.append(STANDIN[0].stream())
    yield str(request.param)
    STREAMS.clear()
    STANDIN.clear()


def namespace_of(name: str) -> Namespace:
    return Namespace.from_mapping({**NAMESPACE.as_mapping(), "salt": name})


def keys_of(namespace: Namespace, count: int, seed: int = 1) -> bytes:
    return prefix_hashes(namespace, [seed * 1000 + i for i in range(count * namespace.block_tokens)])


@pytest.mark.parametrize("by_layer", [True, False])
def test_blocks_go_out_and_come_back(service: Service, device: str, by_layer: bool) -> None:
    namespace = namespace_of(f"{device} {by_layer}")
    source, target, keys = cache(3), cache(None), keys_of(namespace, 4)
    writer, reader = (Worker(service, c, namespace, is_async=True) for c in (source, target))
    # Two requests of one step share their first two blocks, which lie in different places.
    writer.store(run_of(keys, [7, 2, 9, 4]), run_of(keys[:32], [1, 3], "other"), by_layer=by_layer)
    writer.settle(4)
    assert writer.transfers.counts["stored_blocks"] == 4
    assert reader.load(run_of(keys, [0, 5, 6, 11])) == ({"request"}, set())
    for name in NAMES:
        assert torch.equal(target[name][[0, 5, 6, 11]], source[name][[7, 2, 9, 4]])
        assert not target[name][[1, 2, 3, 4, 7, 8, 9, 10]].any()
    for each in (writer, reader):
        each.transfers.close()


def test_blocks_come_from_the_pool_of_the_device(standin_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvfs.connectors.device import pooled
    from kvfs.connectors.vllm_layout import KVLayout

    need_mount()
    monkeypatch.setattr(pooled, "CONNECTOR_POOL_S", WAIT_S)
    monkeypatch.setattr(KVLayout, "is_on_cpu", property(lambda _: False))
    monkeypatch.setenv("KVFS_LIBCUDA", str(standin_path))
    context = open_driver().devices()[0].retain_context()
    monkeypatch.setattr(f"{__name__}.STANDIN", [context])
    monkeypatch.setattr(f"{__name__}.STREAMS", [context.stream()])
    namespace, source, target = namespace_of("pool"), cache(3), cache(None)
    keys = keys_of(namespace, 4)
    with Service(
        dram="64MiB", arguments=["--hbm", "128MiB"], environment={"KVFS_LIBCUDA": str(standin_path)}
    ) as service:
        writer, reader = (Worker(service, c, namespace, is_async=True) for c in (source, target))
        writer.store(run_of(keys, [7, 2, 9, 4]))
        writer.settle(4)

        def load() -> bool:
            assert reader.load(run_of(keys, [0, 5, 6, 11])) == ({"request"}, set())
            return reader.transfers.pool_counts["pool_promoted_blocks"] > 0

        eventually(load, "the blocks were added")
        before = reader.transfers.pool_counts
        for name in NAMES:
            target[name].zero_()
        assert reader.load(run_of(keys, [0, 5, 6, 11])) == ({"request"}, set())
        for name in NAMES:
            assert torch.equal(target[name][[0, 5, 6, 11]], source[name][[7, 2, 9, 4]])
        verified = before["pool_verified_blocks"] + 4
        assert reader.transfers.pool_counts == {**before, "pool_verified_blocks": verified}
        assert (before["pool_promoted_blocks"], before["pool_mismatched_blocks"]) == (4, 0)
        for each in (writer, reader):
            each.transfers.close()


def test_what_is_missing_is_reported_block_by_block(service: Service, device: str) -> None:
    namespace = namespace_of(f"missing {device}")
    source, target, keys = cache(4), cache(None), keys_of(namespace, 3)
    writer, reader = (Worker(service, c, namespace, is_async=True) for c in (source, target))
    writer.store(run_of(keys[:16], [1]), run_of(keys[32:], [2]))
    writer.settle(2)
    assert reader.load(run_of(keys, [8, 9, 10])) == ({"request"}, {9})
    assert reader.transfers.take_failed_blocks() == set(), "said once"
    assert torch.equal(target[NAMES[1]][10], source[NAMES[1]][2])
    for each in (writer, reader):
        each.transfers.close()


def test_layer_by_layer_within_the_step(service: Service) -> None:
    namespace = namespace_of("layers")
    source, target, keys = cache(5), cache(None), keys_of(namespace, 3)
    writer, reader = (Worker(service, c, namespace, is_async=False) for c in (source, target))
    writer.store(run_of(keys[:32], [1, 2]))
    writer.settle(2)
    reader.transfers.begin(plan(loads=[run_of(keys, [4, 5, 6])]))
    for name in NAMES:
        reader.transfers.wait_layer(name)
        assert torch.equal(target[name][[4, 5]], source[name][[1, 2]]), "there when it is waited for"
    assert reader.transfers.take_failed_blocks() == {6}
    assert reader.transfers.take_finished() == {}
    for each in (writer, reader):
        each.transfers.close()


def test_a_request_of_several_groups_ends_with_its_last_load_and_fails_with_any(
    service: Service, device: str
) -> None:
    """Two groups with blocks of equal sizes and of equal tokens: each has its own."""
    from kvfs.connectors.adapters import LoadedAdapters
    from kvfs.connectors.vllm_layout import KVLayout, Shard
    from kvfs.connectors.vllm_scheduler import BlockRun
    from kvfs.connectors.vllm_worker import Transfers

    spaces = [namespace_of(f"group {group} {device}") for group in range(2)]
    keys = [keys_of(space, 3) for space in spaces]

    def made(caches: list[dict[str, Any]]) -> Transfers:
        shards: dict[tuple[int, ...], Shard] = {
            (0, 0, group): Shard(space, KVLayout(caches[group], BLOCKS)) for group, space in enumerate(spaces)
        }
        link = Link(str(service.mount), name="test", timeout_s=WAIT_S)
        adapters = LoadedAdapters(None, Told(), str)
        return Transfers(
            link,
            shards,
            is_async=True,
            watch=watch_of(weights()),
            adapters=adapters,
            device=copies_of(shards[0, 0, 0].layout),
        )

    def run(group: int, block_ids: list[int], name: str = "r", count: int = 3) -> BlockRun:
        return BlockRun(name, block_ids, {(0, 0, group): keys[group][: 16 * count]}, {(0, 0, group): None})

    sources, targets = ([cache(fill) for fill in fills] for fills in ((3, 4), (None, None)))
    writer, reader = made(sources), made(targets)
    step = plan(stores=[run(0, [1, 2, 3]), run(1, [4, 5], count=2)])
    writer.enter(step)
    writer.finish(step)
    eventually(lambda: writer.counts["stored_blocks"] == 5, "all is stored")
    step = plan(
        loads=[
            *(run(0, [1, 2], "whole", 2), run(1, [3, 4], "whole", 2)),
            *(run(0, [5, 6, 7], "lacks one"), run(1, [8, 9, 10], "lacks one")),
        ]
    )
    reader.enter(step)
    reader.begin(step)
    ended: dict[str, bool] = {}

    def all_ended() -> bool:
        ended.update(reader.take_finished())
        return len(ended) == 2

    eventually(all_ended, "loads have ended")
    assert ended == {"whole": True, "lacks one": False}
    for name in NAMES:
        assert torch.equal(targets[0][name][[1, 2]], sources[0][name][[1, 2]])
        assert torch.equal(targets[1][name][[3, 4]], sources[1][name][[4, 5]])
    for each in (writer, reader):
        each.close()


def test_a_service_that_is_gone_costs_nothing_once_it_is_back(service: Service, device: str) -> None:
    namespace = namespace_of(f"gone {device}")
    source, (keys, later, last) = cache(6), (keys_of(namespace, 2, seed) for seed in (1, 2, 3))
    worker = Worker(service, source, namespace, is_async=True)
    worker.store(run_of(keys, [1, 2]))
    worker.settle(2)
    service.kill()
    worker.store(run_of(later, [3, 4]))
    # In place, without a service: what is there comes, the rest is reported.
    assert worker.load(run_of(keys, [8, 9])) == ({"request"}, set())
    assert worker.load(run_of(later, [10, 11])) == ({"request"}, {10, 11})
    service.restart()
    eventually(lambda: worker.transfers._link.is_up, "the service is found again")
    worker.store(run_of(last, [5, 6]))
    worker.settle(6)
    assert worker.transfers.counts["stored_blocks"] == 6
    assert worker.load(run_of(later, [10, 11])) == ({"request"}, set())
    for name in NAMES:
        assert torch.equal(source[name][[10, 11]], source[name][[3, 4]])
    worker.transfers.close()
    with service.client() as client:
        eventually(lambda: client.status()["open_drafts"] == 0, "no draft stays behind")


def test_blocks_follow_their_anchors_where_a_run_names_them() -> None:
    from kvfs.client.session import split_keys
    from kvfs.connectors.vllm_scheduler import BlockRun
    from kvfs.connectors.vllm_worker import _step_of

    keys, anchors = bytes(range(32)), bytes(range(32, 64))
    chain = BlockRun("chain", [1, 2], {RANK: keys}, {RANK: bytes(16)})
    anchored = BlockRun("anchored", [3, 4], {RANK: anchors}, {RANK: None}, anchors={RANK: keys})
    step = _step_of([chain, anchored], RANK, None)  # type: ignore[arg-type]
    assert step.parents == [bytes(16), keys[:16], *split_keys(keys)]


@pytest.mark.parametrize("by_layer", [True, False])
def test_a_step_of_many_blocks_goes_out_part_by_part(
    service: Service, device: str, by_layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvfs.connectors import vllm_worker

    monkeypatch.setattr(vllm_worker, "CONNECTOR_STORE_BLOCKS", 3)
    namespace = namespace_of(f"many {device} {by_layer}")
    source, target, keys = cache(7), cache(None), keys_of(namespace, 10)
    writer, reader = (Worker(service, c, namespace, is_async=True) for c in (source, target))
    writer.store(run_of(keys, list(range(10))), by_layer=by_layer)
    writer.settle(10)
    assert writer.transfers.counts["stored_blocks"] == 10
    assert reader.load(run_of(keys, list(range(10)))) == ({"request"}, set())
    for name in NAMES:
        assert torch.equal(target[name][:10], source[name][:10])
    for each in (writer, reader):
        each.transfers.close()


def test_a_step_of_more_than_the_quota_is_stored_whole(
    service: Service, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 blocks of 3 MiB where one user may write 32 MiB at once."""
    monkeypatch.setattr(f"{__name__}.ELEMENTS", 32 << 10)
    namespace = namespace_of(f"quota {device}")
    worker, keys = Worker(service, cache(12), namespace, is_async=True), keys_of(namespace, BLOCKS)
    worker.store(run_of(keys, list(range(BLOCKS))))
    worker.settle(BLOCKS)
    assert worker.transfers.counts["dropped_blocks"] == 0
    assert worker.transfers.counts["stored_blocks"] == BLOCKS
    worker.transfers.close()
    with service.client() as client, client.blocks(namespace) as blocks:
        assert blocks.match(keys) == BLOCKS
        assert blocks.remove(keys) == BLOCKS


def test_a_part_that_finds_no_room_waits_for_those_before_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine of the same user takes most of the quota."""
    from kvfs.client.blocks import Blocks
    from kvfs.connectors import vllm_worker
    from kvfs.connectors.vllm_stores import Stores

    monkeypatch.setattr(f"{__name__}.ELEMENTS", 32 << 10)
    monkeypatch.setattr(vllm_worker, "CONNECTOR_STORE_BLOCKS", 1)
    namespace, refused = namespace_of("room"), threading.Event()
    worker, keys = Worker(service, cache(13), namespace, is_async=True), keys_of(namespace, 4)
    reserve, seal = Blocks.reserve, Stores._seal

    def reserve_and_say(self: Blocks, *given: Any, **options: Any) -> Any:
        try:
            return reserve(self, *given, **options)
        except QuotaExceeded:
            refused.set()
            raise

    def seal_when_one_was_refused(self: Stores, *given: Any) -> Any:
        assert refused.wait(WAIT_S)
        return seal(self, *given)

    other = keys_of(namespace, 1, seed=2)
    with service.client() as client, client.blocks(namespace) as blocks:
        drafts = blocks.reserve(other, [28 << 20])
        monkeypatch.setattr(Blocks, "reserve", reserve_and_say)
        monkeypatch.setattr(Stores, "_seal", seal_when_one_was_refused)
        worker.store(run_of(keys, [1, 2, 3, 4]))
        worker.settle(4)
        blocks.abort(drafts)
        assert worker.transfers.counts["dropped_blocks"] == 0
        assert blocks.match(keys) == 4
        assert worker.transfers._link.is_up
        # With nothing of its own under way, the engine does not wait for others.
        drafts = blocks.reserve(other, [31 << 20])
        last = keys_of(namespace, 1, seed=3)
        worker.store(run_of(last, [5]))
        worker.settle(5)
        assert worker.transfers.counts["dropped_blocks"] == 1
        blocks.abort(drafts)
        blocks.remove(keys)
    worker.transfers.close()


# --- a store that is late ------------------------------------------------------------------------------------
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


def reused(layers: dict[str, Any]) -> dict[str, Any]:
    """What the engine's blocks held; now they hold others' tokens, by what it computes next."""
    for stream in STREAMS:
        stream.synchronize()
    held = {name: layer.clone() for name, layer in layers.items()}
    for layer in layers.values():
        layer.fill_(7)
    return held


def assert_all_there(service: Service, namespace: Namespace, keys: bytes, held: dict[str, Any]) -> None:
    """Blocks of these keys are there, each from the place of its number."""
    target, block_ids = cache(None), list(range(len(keys) // 16))
    reader = Worker(service, target, namespace, is_async=True)
    assert reader.load(run_of(keys, block_ids)) == ({"request"}, set())
    for name in NAMES:
        assert torch.equal(target[name][block_ids], held[name][block_ids])
    reader.transfers.close()


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


# --- a device ------------------------------------------------------------------------------------------------
@pytest.fixture
def standin(standin_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Standin]:
    """A device for caches, with registered memory for five blocks at first."""
    from kvfs.connectors.device import buffers, stores
    from kvfs.connectors.vllm_layout import KVLayout

    monkeypatch.setattr(KVLayout, "is_on_cpu", property(lambda _: False))
    monkeypatch.setattr(buffers, "CONNECTOR_STAGING_BYTES", 4096)
    monkeypatch.setattr(stores, "CONNECTOR_STAGING_BUFFERS", 1)
    made = Standin(standin_path)
    made.set_faults()
    STANDIN.append(open_driver(made.path).devices()[0].retain_context())
    STREAMS.append(STANDIN[0].stream())
    yield made
    made.set_faults()
    made.hold(False)
    STREAMS.clear()
    STANDIN.clear()


def test_a_step_ends_while_its_copies_wait_and_the_next_one_writes_after_them(
    service: Service, standin: Standin
) -> None:
    namespace = namespace_of("held")
    source, other, keys = cache(18), cache(19), keys_of(namespace, BLOCKS)
    held = {name: layer.clone() for name, layer in source.items()}
    worker = Worker(service, source, namespace, is_async=True)
    standin.hold(True)
    worker.store(run_of(keys[: 16 * 7], list(range(7))))
    worker.store(run_of(keys[16 * 7 :], list(range(7, BLOCKS))))
    storages = [layers[NAMES[0]].untyped_storage() for layers in (source, other)]
    STREAMS[0].copy(storages[0].data_ptr(), storages[1].data_ptr(), storages[0].nbytes())
    assert worker.transfers.counts["stored_blocks"] == 0
    assert torch.equal(source[NAMES[1]], held[NAMES[1]])
    standin.hold(False)
    worker.settle(BLOCKS)
    assert_all_there(service, namespace, keys, held)
    STREAMS[0].synchronize()
    assert torch.equal(source[NAMES[1]], other[NAMES[1]])
    worker.transfers.close()


class NoMemory:
    """The module `mmap` where the kernel has no memory."""

    PAGESIZE = mmap.PAGESIZE

    @staticmethod
    def mmap(*_: Any) -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


@pytest.mark.parametrize(
    "fault",
    [
        "mmap",
        "cuMemHostRegister:2:1",
        "cuLaunchKernel:2:1",
        "cuStreamWaitEvent:2:2",
        "cuEventSynchronize:719:2",
        "sticky:719:4",
    ],
)
def test_what_a_device_does_not_copy_is_dropped_and_logged_once(
    service: Service,
    standin: Standin,
    fault: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvfs.connectors.device import buffers

    namespace = namespace_of(fault)
    source, keys = cache(20), keys_of(namespace, 9)
    worker = Worker(service, source, namespace, is_async=True)
    counts = worker.transfers.counts
    standin.set_faults(fault)
    with monkeypatch.context() as patch:
        if fault == "mmap":
            patch.setattr(buffers, "mmap", NoMemory)
        worker.store(run_of(keys[: 16 * 6], list(range(6))))
        worker.settle(6)
    assert (counts["stored_blocks"], counts["dropped_blocks"]) == (0, 6)
    worker.store(run_of(keys[16 * 6 :], [6, 7, 8]))
    worker.settle(9)
    is_lost = fault.startswith("sticky")
    assert (counts["stored_blocks"], counts["dropped_blocks"]) == ((0, 9) if is_lost else (3, 6))
    assert worker.transfers.stores._kept_bytes == 0
    assert len([record for record in caplog.records if "the device" in record.message]) == 1
    with service.client() as client, client.blocks(namespace) as blocks:
        assert blocks.exists(keys) == [False] * 6 + [not is_lost] * 3
    worker.transfers.close()


# --- weights -------------------------------------------------------------------------------------------------
def weights() -> Any:
    torch.manual_seed(8)
    return torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.LayerNorm(30))


class Told:
    """The other ranks: one of them may have said that its weights are others."""

    def __init__(self) -> None:
        self.heard: set[str] = set()

    def notify(self, what: str) -> None:
        self.heard.add(what)

    def was_notified(self, what: str) -> bool:
        return what in self.heard


def watch_of(model: Any, peers: Any = None) -> Any:
    from kvfs.connectors.vllm_weights import Watch

    told: Any = peers or Told()
    return Watch(lambda: [model], told)


def test_other_weights_end_loads_and_stores_until_the_next_epoch(
    service: Service, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    namespace, model = namespace_of(f"weights {device}"), weights()
    first, second, third = (keys_of(namespace, 2, seed) for seed in (1, 2, 3))
    worker = Worker(service, cache(8), namespace, is_async=True, watch=watch_of(model))
    worker.store(run_of(first, [1, 2]))
    worker.settle(2)
    with torch.no_grad():
        model[1].bias[7] += 1
    worker.store(run_of(second, [3, 4]))
    assert worker.transfers.ended_epoch == 0
    assert worker.load(run_of(first, [8, 9])) == ({"request"}, {8, 9})
    with torch.no_grad():
        model[1].bias[7] -= 1
    worker.store(run_of(second, [3, 4]))
    assert worker.load(run_of(first, [8, 9])) == ({"request"}, {8, 9}), "what came in between is not known"
    worker.settle(6)
    counts = worker.transfers.counts
    assert (counts["stored_blocks"], counts["dropped_blocks"], counts["weights_changed"]) == (2, 4, 1)
    assert len([record for record in caplog.records if "weights in memory" in record.message]) == 1
    # The engine resets, ends its last requests, and then changes the weights.
    assert worker.load(epoch=1) == (set(), set())
    with torch.no_grad():
        model[1].bias[7] += 3
    worker.store(run_of(third, [5, 6]), epoch=1)
    worker.settle(8)
    assert worker.load(run_of(third, [10, 11]), epoch=1) == ({"request"}, set())
    assert worker.transfers.ended_epoch is None
    with service.client() as client, client.blocks(namespace) as blocks:
        assert [blocks.match(keys) for keys in (first, second, third)] == [2, 0, 2]
    worker.transfers.close()


def test_the_weights_of_an_epoch_are_those_that_compute_first_in_it(service: Service) -> None:
    namespace, model = namespace_of("computes"), weights()
    worker = Worker(service, cache(11), namespace, is_async=True, watch=watch_of(model))
    worker.transfers.enter(plan(computes=True, epoch=1))
    with torch.no_grad():
        model[0].weight[3] *= 2
    worker.store(run_of(keys_of(namespace, 1), [1]), epoch=1)
    assert worker.transfers.counts["dropped_blocks"] == 1
    assert worker.transfers.ended_epoch == 1
    worker.transfers.close()


def test_a_load_that_ends_in_another_epoch_has_failed(service: Service, device: str) -> None:
    namespace = namespace_of(f"epochs {device}")
    keys = keys_of(namespace, 2)
    worker = Worker(service, cache(9), namespace, is_async=True, watch=watch_of(weights()))
    worker.store(run_of(keys, [1, 2]))
    worker.settle(2)
    worker.transfers.begin(plan(loads=[run_of(keys, [8, 9])]))
    assert worker.load(epoch=1) == ({"request"}, {8, 9})
    worker.transfers.close()


@pytest.mark.parametrize("by_layer", [True, False])
def test_what_another_ranks_weights_made_wrong_is_not_stored(
    service: Service, device: str, by_layer: bool
) -> None:
    """The other rank finds its weights changed while this one computes: told before this one's step ends."""
    namespace, peers = namespace_of(f"ranks {device} {by_layer}"), Told()
    keys = keys_of(namespace, 3)
    worker = Worker(service, cache(10), namespace, is_async=True, watch=watch_of(weights(), peers))
    step = plan(stores=[run_of(keys, [1, 2, 3])])
    worker.transfers.enter(step)
    for name in NAMES if by_layer else ():
        worker.transfers.save_layer(step, name)
    peers.notify("epoch 0")
    worker.transfers.finish(step)
    worker.settle(3)
    assert worker.transfers.counts["dropped_blocks"] == 3
    assert worker.transfers.ended_epoch == 0
    worker.transfers.close()
    with service.client() as client:
        eventually(lambda: client.status()["open_drafts"] == 0, "no draft stays behind")
        with client.blocks(namespace) as blocks:
            assert blocks.match(keys) == 0
