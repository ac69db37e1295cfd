"""PyTorch tensors over a pool's memory, and paged caches in every order of vLLM's, copied block by block."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from kvfs._native.cuda.copies import Plan
from kvfs._native.cuda.driver import Context
from tests.gpu.conftest import ON_GPU
from tests.support.gpu_memory import DeviceMemory, HostMemory, Piece, numbers, run_plan

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.skipif(not ON_GPU, reason="PyTorch has no tensors on a stand-in")

SIZES = {"L": 6, "B": 10, "H": 4, "N": 16, "C": 256}
"""Layers, blocks, heads, tokens, bytes of a key and a value."""
BLOCK_BYTES = SIZES["L"] * SIZES["H"] * SIZES["N"] * SIZES["C"]
ORDERS = ["LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC"]
RUNS = {"LBNHC": 6, "LBHNC": 6, "BLNHC": 1, "BLHNC": 1, "BHLNC": 1, "LHBNC": 24}
"""How many copies a block takes in each order, where its slot has the same order."""


class Exposed:
    """Memory as other packages take it."""

    def __init__(self, memory: DeviceMemory, size_bytes: int) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
        }


def test_a_tensor_over_the_pools_memory(on_device: Callable[[int], DeviceMemory]) -> None:
    memory = on_device(4 << 20)
    memory.write(bytes(range(256)) * 16)
    tensor = torch.as_tensor(Exposed(memory, 4096), device="cuda")
    assert tensor.data_ptr() == memory.address
    assert tensor.view(torch.bfloat16).shape == (2048,)
    assert tensor.cpu().numpy().tobytes() == bytes(range(256)) * 16
    tensor[:] = 7
    torch.cuda.synchronize()
    assert memory.read(4096) == bytes([7]) * 4096


def block_pieces(cache: Any, order: str, block: int, slot: int) -> list[Piece]:
    """Return the pieces (slot, cache, bytes) of a block: its dimensions in the cache's order, without B."""
    part = cache.select(order.index("B"), block)
    outer = [range(size) for size in part.shape[:-1]]
    pieces = []
    for place, index in enumerate(itertools.product(*outer)):
        source = part.data_ptr() + sum(i * stride for i, stride in zip(index, part.stride(), strict=False))
        pieces.append((slot + place * SIZES["C"], source, SIZES["C"]))
    return pieces


@pytest.mark.parametrize("order", ORDERS)
def test_a_block_of_a_paged_cache_goes_to_a_slot_and_back(
    order: str, context: Context, on_device: Callable[[int], DeviceMemory]
) -> None:
    cache = torch.randint(0, 256, [SIZES[name] for name in order], dtype=torch.uint8, device="cuda")
    reference = cache.clone()
    torch.cuda.synchronize()
    slots = on_device(4 << 20)
    whole = [(cache.data_ptr(), cache.numel())]
    for block in (3, 0, SIZES["B"] - 1):
        pieces = block_pieces(cache, order, block, slots.address)
        plan = Plan(numbers(pieces), [(slots.address, BLOCK_BYTES)], whole)
        assert len(plan) == RUNS[order]
        run_plan(context, plan)
        expected = reference.select(order.index("B"), block).contiguous().cpu().numpy().tobytes()
        assert slots.read(BLOCK_BYTES) == expected
        target = (block + 1) % SIZES["B"]
        back = [
            (to, source, size)
            for (source, _, size), (_, to, _) in zip(
                pieces, block_pieces(cache, order, target, slots.address), strict=True
            )
        ]
        run_plan(context, Plan(numbers(back), whole, [(slots.address, BLOCK_BYTES)]))
        reference.select(order.index("B"), target).copy_(reference.select(order.index("B"), block))
        torch.cuda.synchronize()
        assert torch.equal(cache, reference)


def test_a_cache_goes_through_registered_memory(
    context: Context, on_host: Callable[[int], HostMemory]
) -> None:
    host = on_host(4 << 20)
    cache = torch.randn((2, 10, 16, 4, 64), dtype=torch.bfloat16, device="cuda")
    other = torch.zeros_like(cache)
    torch.cuda.synchronize()
    size = cache.numel() * 2
    for to, source in (
        (host.address, cache.data_ptr()),
        (other.data_ptr(), host.address),
    ):
        run_plan(context, Plan(numbers([(to, source, size)]), [(to, size)], [(source, size)]))
    assert torch.equal(cache, other)
