"""The worker's half of the vLLM connector without vLLM, on a real service, with caches in CPU memory or on a stand-in.

Responsibility: caches of a few layers, a worker over them whose steps store and load, its weights and the other ranks;
the fixtures of all tests of it, which import them.

Concurrency: one test's thread; the worker's own threads copy. One device at a time has the caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs import Namespace, prefix_hashes
from kvfs._native.cuda.driver import Context, Stream, open_driver
from kvfs.connectors.common import Link
from tests.support.cuda_standin import build_standin
from tests.support.door import need_mount
from tests.support.service import Service
from tests.support.stores import NAMESPACE
from tests.support.waits import WAIT_S, eventually

torch = pytest.importorskip("torch")

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
