"""The worker's half of the vLLM connector without vLLM: blocks go out and come back, or are reported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvfs import Namespace, prefix_hashes
from kvfs.connectors.common import Link
from tests.support.door import eventually, need_mount
from tests.support.service import Service
from tests.support.stores import NAMESPACE

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.mount

RANK = (0, 0)
LAYERS, BLOCKS, HEADS, TOKENS, ELEMENTS = 3, 12, 2, 4, 8
NAMES = [f"layer {i}" for i in range(LAYERS)]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    need_mount()
    with Service(dram="64MiB") as running:
        yield running


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


def plan(**runs: list[Any]) -> Any:
    from kvfs.connectors.vllm_scheduler import Plan

    return Plan(**runs)


class Worker:
    def __init__(
        self, service: Service, layers: dict[str, Any], namespace: Namespace, *, is_async: bool
    ) -> None:
        from kvfs.connectors.vllm_layout import KVLayout
        from kvfs.connectors.vllm_worker import Transfers

        layout = KVLayout(layers, BLOCKS)
        self.transfers = Transfers(
            Link(str(service.mount), name="test"), namespace, RANK, layout, is_async=is_async
        )

    def store(self, *runs: Any, by_layer: bool = True) -> None:
        step = plan(stores=list(runs))
        for name in NAMES if by_layer else ():
            self.transfers.save_layer(step, name)
        self.transfers.finish(step)

    def settle(self, count: int) -> None:
        """Until so many blocks are stored, or dropped."""
        counts = self.transfers.counts
        eventually(
            lambda: counts["stored_blocks"] + counts["dropped_blocks"] >= count, "stores have ended", 20
        )

    def load(self, *runs: Any) -> tuple[set[str], set[int]]:
        """A step with these loads: requests that finished, blocks that failed."""
        self.transfers.begin(plan(loads=list(runs)))
        for name in NAMES:
            self.transfers.wait_layer(name)
        finished: set[str] = set()

        def ended() -> bool:
            finished.update(self.transfers.take_finished())
            return not self.transfers._loads

        eventually(ended, "loads have ended", 20)
        return finished, self.transfers.take_failed_blocks()


@pytest.fixture(params=["in place", "staged"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A cache in CPU memory, and one that has to be copied there first."""
    from kvfs.connectors.vllm_layout import KVLayout

    if request.param == "staged":
        monkeypatch.setattr(KVLayout, "is_on_cpu", property(lambda _: False))
    return str(request.param)


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
    assert reader.transfers.take_finished() == set()
    for each in (writer, reader):
        each.transfers.close()


def test_a_service_that_is_gone_costs_stores_and_nothing_else(service: Service, device: str) -> None:
    namespace = namespace_of(f"gone {device}")
    source, keys, later = cache(6), keys_of(namespace, 2), keys_of(namespace, 2, seed=2)
    worker = Worker(service, source, namespace, is_async=True)
    worker.store(run_of(keys, [1, 2]))
    worker.settle(2)
    service.kill()
    worker.store(run_of(later, [3, 4]))
    worker.settle(4)
    assert worker.transfers.counts["dropped_blocks"] == 2
    # In place, without a service: what is there comes, the rest is reported.
    assert worker.load(run_of(keys, [8, 9])) == ({"request"}, set())
    assert worker.load(run_of(later, [10, 11])) == ({"request"}, {10, 11})
    service.restart()
    eventually(lambda: worker.transfers._link.is_up, "the service is found again", 20)
    worker.store(run_of(later, [3, 4]))
    worker.settle(6)
    assert worker.transfers.counts["stored_blocks"] == 4
    worker.transfers.close()
    with service.client() as client:
        eventually(lambda: client.status()["open_drafts"] == 0, "no draft stays behind", 20)
