"""The worker's half of the vLLM connector without vLLM: blocks go out and come back, or are reported."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from kvfs._native.cuda.driver import open_driver
from kvfs.connectors.common import Link
from kvfs.errors import QuotaExceeded
from tests.support.door import need_mount
from tests.support.service import Service
from tests.support.vllm_workers import (
    BLOCKS,
    NAMES,
    RANK,
    Told,
    Worker,
    cache,
    copies_of,
    device,
    keys_of,
    namespace_of,
    patient,
    plan,
    run_of,
    service,
    standin_path,
    watch_of,
    weights,
)
from tests.support.waits import WAIT_S, eventually

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.mount

__all__ = ["device", "patient", "service", "standin_path"]


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
    monkeypatch.setattr("tests.support.vllm_workers.STANDIN", [context])
    monkeypatch.setattr("tests.support.vllm_workers.STREAMS", [context.stream()])
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
    from kvfs.connectors.vllm_scheduler import BlockRun
    from kvfs.connectors.vllm_worker import _step_of
    from kvfs.keys import split_keys

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
    monkeypatch.setattr("tests.support.vllm_workers.ELEMENTS", 32 << 10)
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

    monkeypatch.setattr("tests.support.vllm_workers.ELEMENTS", 32 << 10)
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
