"""Blocks to and from PyTorch's tensors on a GPU, with a real service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.gpu.conftest import ON_GPU

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
for needed in ("trio", "lmdb", "pydantic", "typer", "xxhash"):
    pytest.importorskip(needed, reason=f"{needed}, which a service needs, is not installed")
pytestmark = pytest.mark.skipif(not ON_GPU, reason="PyTorch has no tensors on a stand-in")

import kvfs  # noqa: E402
from kvfs import Scatter  # noqa: E402
from kvfs.connectors.device.device_blocks import DeviceBlocks  # noqa: E402
from tests.support.service import Service  # noqa: E402
from tests.support.stores import NAMESPACE  # noqa: E402
from tests.support.waits import WAIT_S  # noqa: E402

LAYERS, PAGES, PAGE, COUNT = 4, 32, 8192, 12
BLOCK = LAYERS * 2 * PAGE
"""A page of keys and one of values in each layer."""


@pytest.fixture
def blocks(library: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[kvfs.Blocks]:
    environment = {"KVFS_LIBCUDA": library or "libcuda.so.1"}
    monkeypatch.setenv("KVFS_LIBCUDA", environment["KVFS_LIBCUDA"])
    with (
        Service(mode="off", dram="64MiB", arguments=["--hbm", "256MiB"], environment=environment) as running,
        running.client() as client,
        client.blocks(NAMESPACE) as made,
    ):
        yield made


@pytest.fixture
def on_device(blocks: kvfs.Blocks) -> Iterator[DeviceBlocks]:
    with DeviceBlocks(blocks, BLOCK, compute_stream=lambda: torch.cuda.current_stream().cuda_stream) as made:
        yield made


def pages_of(cache: Any, page: int) -> bytes:
    pages = (cache[layer, kind, page] for layer in range(LAYERS) for kind in range(2))
    return b"".join(each.cpu().view(torch.uint8).numpy().tobytes() for each in pages)


def test_a_cache_of_bfloat16_is_stored_behind_what_computes_it_and_loaded(
    blocks: kvfs.Blocks, on_device: DeviceBlocks
) -> None:
    keys = [bytes([number + 1]) * 16 for number in range(COUNT)]
    cache = torch.zeros(LAYERS, 2, PAGES, PAGE // 2, dtype=torch.bfloat16, device="cuda")
    new = torch.randn(cache.shape, dtype=torch.bfloat16, device="cuda")
    matrix = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    offsets = [[page * PAGE, (PAGES + page) * PAGE] for page in torch.randperm(PAGES)[:COUNT].tolist()]
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(50):  # some ms
            matrix @ matrix
        cache.copy_(new)
        assert all(on_device.put(keys, Scatter(list(cache), offsets, PAGE), timeout_s=WAIT_S))
    stored = [bytearray(BLOCK) for _ in keys]
    assert blocks.get_into(keys, stored) == [BLOCK] * COUNT
    assert stored == [pages_of(new, row[0] // PAGE) for row in offsets]
    for _ in range(4):  # from the second on also by the pool
        other = torch.zeros_like(cache)
        assert (
            on_device.get_into(keys, Scatter(list(other), offsets, PAGE), timeout_s=WAIT_S) == [BLOCK] * COUNT
        )
        assert [pages_of(other, row[0] // PAGE) for row in offsets] == stored
        assert int(other.ne(0).any(dim=3).sum()) == COUNT * LAYERS * 2
