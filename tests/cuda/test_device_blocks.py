"""Blocks to and from tensors in device memory, of a service's DRAM and its pool: on the stand-in."""

from __future__ import annotations

import array
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvfs
from kvfs import Scatter
from kvfs._native.cuda.driver import Context
from kvfs.connectors.device import pooled
from kvfs.connectors.device.device_blocks import DeviceBlocks
from kvfs.connectors.device.tensors import places_of
from kvfs.errors import DeviceMissing, InvalidRequest, KvfsError
from tests.support.cuda_standin import Standin
from tests.support.gpu_memory import DeviceMemory
from tests.support.seeds import SEED, rounds
from tests.support.service import Service
from tests.support.stores import NAMESPACE
from tests.support.waits import WAIT_S, eventually

BLOCK, COUNT = 4096, 5
PAGE, PAGES = 1024, 24
"""Of each of two layers: a block has a page of keys and one of values in both."""


class Tensor(DeviceMemory):
    """Bytes on the device, as CuPy or Numba describe theirs."""

    def __init__(self, context: Context, size_bytes: int, **described: Any) -> None:
        super().__init__(context, context.device.create(2 << 20))
        self.write(bytes(size_bytes))
        self.__cuda_array_interface__ = {
            "data": (self.address, False),
            "shape": (size_bytes // 2,),
            "typestr": "<f2",
            "version": 3,
            **described,
        }


@pytest.fixture(scope="module")
def service(standin_path: Path) -> Iterator[Service]:
    environment = {"KVFS_LIBCUDA": str(standin_path)}
    with Service(mode="off", dram="64MiB", arguments=["--hbm", "128MiB"], environment=environment) as running:
        yield running
        assert not running.complaints()


@pytest.fixture
def blocks(service: Service) -> Iterator[kvfs.Blocks]:
    with service.client() as client, client.blocks(NAMESPACE) as made:
        yield made


@pytest.fixture
def on_device(
    standin: Standin, context: Context, blocks: kvfs.Blocks, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DeviceBlocks]:
    monkeypatch.setenv("KVFS_LIBCUDA", standin.path)
    monkeypatch.setattr(pooled, "CONNECTOR_POOL_S", WAIT_S)
    compute = context.stream()
    with DeviceBlocks(
        blocks, BLOCK, device=context.device.uuid, compute_stream=lambda: compute.handle
    ) as made:
        yield made


def new_keys(count: int = COUNT) -> list[bytes]:
    return [os.urandom(16) for _ in range(count)]


def test_what_is_stored_from_tensors_is_loaded_into_others(
    context: Context, blocks: kvfs.Blocks, on_device: DeviceBlocks
) -> None:
    keys, contents = new_keys(), [os.urandom(BLOCK) for _ in range(COUNT)]
    tensors, others = ([Tensor(context, BLOCK) for _ in range(COUNT)] for _ in range(2))
    for tensor, content in zip(tensors, contents, strict=True):
        tensor.write(content)
    assert on_device.put(keys, tensors, [None, *keys[:-1]], timeout_s=WAIT_S) == [True] * COUNT
    assert on_device.put(keys, tensors, timeout_s=WAIT_S) == [False] * COUNT
    on_host = [bytearray(BLOCK) for _ in range(COUNT)]
    assert blocks.get_into(keys, on_host) == [BLOCK] * COUNT
    assert on_host == contents
    rounds = 0

    def is_all_from_the_pool() -> bool:
        nonlocal rounds
        rounds, before = rounds + 1, on_device.counts.verified
        for other in others:
            other.write(bytes(BLOCK))
        assert on_device.get_into(keys, others, timeout_s=WAIT_S) == [BLOCK] * COUNT
        assert [other.read(BLOCK) for other in others] == contents
        return on_device.counts.verified - before == COUNT

    eventually(is_all_from_the_pool, "the pool has all blocks")
    assert rounds > 1


@pytest.mark.seeded
@pytest.mark.parametrize("form", ["lists", "rows of one", "array"])
def test_a_scatter_means_what_it_means_on_the_host(
    context: Context, blocks: kvfs.Blocks, on_device: DeviceBlocks, form: str
) -> None:
    """What is loaded into a cache of pages on the device, and stored from there, is what the host's is."""
    draw, caches = random.Random(f"{SEED}.{form}"), [Tensor(context, PAGE * PAGES) for _ in range(2)]
    for _ in range(rounds(5, 50)):
        columns = draw.sample([0, PAGE * PAGES // 2], 2 if form == "lists" else 1)
        rows = [[at + page * PAGE for at in columns] for page in draw.sample(range(PAGES // 2), COUNT)]
        offsets = array.array("q", [row[0] for row in rows]) if form == "array" else rows
        size = 2 * len(columns) * PAGE
        keys, contents = new_keys(), [draw.randbytes(size) for _ in range(COUNT)]
        blocks.put(keys, contents)
        layers = [bytearray(PAGE * PAGES) for _ in range(2)]
        for cache in caches:
            cache.write(bytes(PAGE * PAGES))
        in_cache = Scatter(caches, offsets, PAGE)
        assert blocks.get_into(keys, Scatter(layers, offsets, PAGE)) == [size] * COUNT
        assert on_device.get_into(keys, in_cache, timeout_s=WAIT_S) == [size] * COUNT
        assert [cache.read(PAGE * PAGES) for cache in caches] == layers
        others, stored = new_keys(), [bytearray(size) for _ in range(COUNT)]
        assert all(on_device.put(others, in_cache, timeout_s=WAIT_S))
        blocks.get_into(others, stored)
        assert stored == contents


def test_a_miss_and_a_block_of_another_size_leave_their_places(
    context: Context, blocks: kvfs.Blocks, on_device: DeviceBlocks
) -> None:
    short, good, missing = new_keys(3)
    blocks.put([short], [bytes(BLOCK // 2)])
    blocks.put([good], [b"g" * BLOCK])
    tensors = [Tensor(context, BLOCK) for _ in range(3)]
    for tensor in tensors:
        tensor.write(b"old!" * (BLOCK // 4))
    assert on_device.get_into([short, good, missing], tensors, timeout_s=WAIT_S) == [-1, BLOCK, -1]
    assert [tensor.read(BLOCK) for tensor in tensors] == [b"old!" * 1024, b"g" * BLOCK, b"old!" * 1024]
    assert (on_device.get_into(b"", []), on_device.put([], [])) == ([], [])


def test_more_than_the_registered_memory_is_stored_in_parts(
    context: Context, blocks: kvfs.Blocks, on_device: DeviceBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.connectors.device.device_blocks.CONNECTOR_STAGING_BYTES", BLOCK // 2)
    keys, cache, before, put = new_keys(), Tensor(context, COUNT * BLOCK), list[Any](), blocks.put

    def noted(some: list[bytes], copied: Any, parents: Any, *, timeout_s: float) -> list[bool]:
        before.append(parents)
        return put(some, copied, parents, timeout_s=timeout_s)

    monkeypatch.setattr(blocks, "put", noted)
    cache.write(content := os.urandom(COUNT * BLOCK))
    places = Scatter(cache, [number * BLOCK for number in range(COUNT)], BLOCK)
    free = len(on_device._copies.stores._free)
    assert on_device.put(keys, places, [None, *keys[:-1]], timeout_s=WAIT_S) == [True] * COUNT
    assert before == [[None, keys[0]], keys[1:3], keys[3:4]]
    assert len(on_device._copies.stores._free) == free
    stored = bytearray(COUNT * BLOCK)
    blocks.get_into(keys, Scatter(stored, list(range(0, COUNT * BLOCK, BLOCK)), BLOCK))
    assert stored == content


def test_what_is_no_place_of_blocks_is_refused(context: Context, on_device: DeviceBlocks) -> None:
    good, keys = Tensor(context, BLOCK), new_keys(2)
    on_host = SimpleNamespace(data_ptr=int, device=SimpleNamespace(type="cpu", __str__=lambda: "cpu"))
    wrong: list[tuple[Any, str]] = [
        ([], "2 keys and places for 0 blocks"),
        (Scatter(good, [], 8), "2 keys and places for 0 blocks"),
        ([good], "2 keys and places for 1 blocks"),
        ([good, bytearray(BLOCK)], "bytearray is no tensor in a GPU's memory"),
        ([good, on_host], "not in a GPU's memory"),
        ([good, Tensor(context, BLOCK // 2)], r"tensors of \[2048, 4096\] bytes"),
        ([good, Tensor(context, BLOCK, strides=(4,))], r"strides \(4,\) is not contiguous"),
        ([good, Tensor(context, BLOCK, data=(good.address, True))], "read-only"),
        ([Tensor(context, BLOCK, shape=(0, 7))] * 2, "a tensor of 0 bytes"),
        ([good] * 2, "overlaps another"),
        (Scatter(good, [[0, 8], [16, 32]], 8), r"offsets \[16, 32\] of block 1, \[0, 8\] of the first"),
        (Scatter(good, [0, -8], 8), r"offsets \[-8\] of block 1"),
        (Scatter(good, [0, BLOCK - 4], 8), "outside the regions"),
        (
            Scatter([Tensor(context, 2 * BLOCK) for _ in range(2)], [0, BLOCK], BLOCK),
            f"blocks of {2 * BLOCK} bytes",
        ),
    ]
    for buffers, why in wrong:
        with pytest.raises(InvalidRequest, match=why):
            on_device.get_into(keys, buffers, timeout_s=WAIT_S)
    with pytest.raises(InvalidRequest, match="2 keys and 1 parents"):
        on_device.put(keys, Scatter(good, [0, 8], 8), [None])


def test_a_tensor_may_be_read_only_and_several_may_be_the_same_where_they_are_stored(
    context: Context, blocks: kvfs.Blocks, on_device: DeviceBlocks
) -> None:
    tensor, keys = Tensor(context, BLOCK), new_keys(3)
    tensor.write(content := os.urandom(BLOCK))
    again = SimpleNamespace(
        __cuda_array_interface__={
            **tensor.__cuda_array_interface__,
            "data": (tensor.address, True),
            "strides": (2,),
        }
    )
    assert on_device.put(keys, [tensor, again, tensor], timeout_s=WAIT_S) == [True] * 3
    stored = [bytearray(BLOCK) for _ in keys]
    blocks.get_into(keys, stored)
    assert stored == [content] * 3


def test_regions_that_overlap_are_one_and_neighbours_are_two() -> None:
    def at(address: int, size_bytes: int) -> Any:
        interface = {"data": (address, False), "shape": (size_bytes,), "typestr": "|u1", "version": 3}
        return SimpleNamespace(__cuda_array_interface__=interface)

    bases = [at(1000, 10), at(1010, 10), at(1015, 10), at(3000, 5), at(3000, 5)]
    assert places_of(Scatter(bases, [0], 1), writable=False).regions == [(1000, 10), (1010, 15), (3000, 5)]


def test_after_the_end_nothing_is_copied(context: Context, on_device: DeviceBlocks) -> None:
    tensor, key = Tensor(context, BLOCK), new_keys(1)
    for _ in range(2):
        on_device.close()
    for call in (on_device.get_into, on_device.put):
        with pytest.raises(KvfsError):
            call(key, [tensor])


@pytest.mark.parametrize("device", [99, "GPU-none"])
def test_a_device_that_there_is_not_is_named(
    blocks: kvfs.Blocks, standin: Standin, monkeypatch: pytest.MonkeyPatch, device: int | str
) -> None:
    monkeypatch.setenv("KVFS_LIBCUDA", standin.path)
    with pytest.raises(DeviceMissing, match=f"no device {device}"):
        DeviceBlocks(blocks, BLOCK, device=device)
