"""The call sequences of engines' path connectors, replayed exactly as they were traced.

Sources, versions as traced: vLLM 0.32.0 (ExampleConnector; the `fs` tier of its offloading), LMCache 0.5.6 (`fs://`),
SGLang 0.5.23 (HiCache `file` backend). `tests/engines` runs the first two for real.
"""

from __future__ import annotations

import glob
import json
import mmap
import os
import random
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support.door import Door
from tests.support.posix import opened, pattern, write_all
from tests.support.waits import eventually

pytestmark = pytest.mark.mount

MIB = 1 << 20


def sealed(door: Door, path: Path) -> None:
    """On the service: wait until other doors and machines would see the file."""
    if door.service is not None:
        eventually(lambda: os.getxattr(path, "user.kvfs.state") == b"sealed", f"{path} is sealed")


# --- vLLM ExampleConnector ---------------------------------------------------------------------------------
def example_store(directory: Path, layer: str, data: bytes) -> None:
    """safetensors' save_file: the rename comes before the close, and there is no fsync."""
    os.makedirs(directory, exist_ok=True)
    temporary = directory / f".tmp{uuid.uuid4().hex[:6]}"
    with opened(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600) as fd:
        os.ftruncate(fd, len(data))
        for start in range(0, len(data), MIB):
            write_all(fd, memoryview(data)[start : start + MIB])
        os.rename(temporary, directory / f"{layer}.safetensors")


def example_load(directory: Path, layer: str) -> bytes:
    """safetensors' load_file: two private mappings, the second one writable."""
    path = directory / f"{layer}.safetensors"
    header = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    size = os.fstat(header).st_size
    first = mmap.mmap(header, size, mmap.MAP_PRIVATE, mmap.PROT_READ)
    tensors = os.open(path, os.O_RDONLY)
    assert os.fstat(tensors).st_size == size
    second = mmap.mmap(tensors, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(tensors)
    os.close(header)
    data = second[:]
    assert first[:] == data
    second[:8] = b"scratch."
    first.close()
    second.close()
    return data


def test_vllm_example_connector(door: Door) -> None:
    storage = door.path / "kv"
    layers = [f"model.layers.{i}.self_attn.attn" for i in range(4)]
    for block, size in enumerate([80, 65_616, MIB + 80, 3 * MIB + 7]):
        directory = storage / f"{block:032x}"
        # A hit is decided by the directory alone.
        assert not os.path.exists(directory)
        for i, layer in enumerate(layers):
            example_store(directory, layer, pattern(i + 10 * block, size))
        assert os.path.exists(directory)
        for i, layer in enumerate(layers):
            assert example_load(directory, layer) == pattern(i + 10 * block, size)
            sealed(door, directory / f"{layer}.safetensors")
            assert example_load(directory, layer) == pattern(i + 10 * block, size)
        assert sorted(os.listdir(directory)) == [f"{layer}.safetensors" for layer in layers]
        mode = (directory / f"{layers[0]}.safetensors").stat().st_mode
        assert mode & 0o777 == 0o600


def test_vllm_example_connector_stores_again_while_another_loads(door: Door) -> None:
    """Two engines that share a prefix store the same blocks at the same time."""
    directory = door.path / "kv" / ("0" * 32)
    data = pattern(1, 2 * MIB + 80)
    example_store(directory, "layer", data)

    def engine(number: int) -> bool:
        for _ in range(5):
            if number % 2:
                example_store(directory, "layer", data)
            if example_load(directory, "layer") != data:
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(engine, range(4))) == [True] * 4
    assert os.listdir(directory) == ["layer.safetensors"]


# --- vLLM offloading, fs tier ------------------------------------------------------------------------------
def fs_tier_probe(directory: Path) -> bool:
    path = directory / f".o_direct_probe_{random.getrandbits(63)}.tmp"
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT, 0o644)
            try:
                os.write(fd, page)
            finally:
                os.close(fd)
        except OSError:
            return False
        finally:
            os.remove(path)
    return True


def fs_tier_store(path: Path, block: memoryview) -> None:
    """A short write is an error, so one write must take the whole block."""
    if os.path.exists(path):
        return
    temporary = f"{path}_{random.getrandbits(63)}.tmp"
    os.makedirs(path.parent, exist_ok=True)
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT
    with opened(temporary, flags, 0o644) as fd:
        assert os.write(fd, block) == len(block)
    os.replace(temporary, path)


def fs_tier_load(path: Path, block: memoryview) -> None:
    """A short read is an error, and the file is deleted."""
    with opened(path, os.O_RDONLY | os.O_DIRECT) as fd:
        assert os.readv(fd, [block]) == len(block)


@pytest.mark.parametrize("block_bytes", [4096, 3 * 128 * 1024, 6 * MIB])
def test_vllm_fs_tier(door: Door, block_bytes: int) -> None:
    base = door.path / "org_model_0123456789ab"
    os.makedirs(base, exist_ok=True)
    if not os.path.exists(base / "config.json"):
        with open(base / "config.json", "w") as file:
            json.dump({"model_name": "org/model", "block": block_bytes}, file, indent=2, sort_keys=True)
    assert fs_tier_probe(base), "O_DIRECT is refused: the engine would fall back to its slow path"
    assert os.listdir(base) == ["config.json"]
    count = 8
    paths = []
    for i in range(count):
        name = f"{i * 0x1357_9BDF:064x}"[::-1]
        paths.append(door.path / f"org_model_0123456789ab_r0/{name[:3]}/{name[3:5]}_g0/{name}.bin")
    stored, loaded = mmap.mmap(-1, count * block_bytes), mmap.mmap(-1, count * block_bytes)
    stored[:] = pattern(block_bytes, count * block_bytes)
    with memoryview(stored) as source, memoryview(loaded) as target, ThreadPoolExecutor(4) as pool:

        def part(view: memoryview, i: int) -> memoryview:
            return view[i * block_bytes : (i + 1) * block_bytes]

        assert [os.access(path, os.F_OK) for path in paths] == [False] * count
        list(pool.map(lambda i: fs_tier_store(paths[i], part(source, i)), range(count)))
        assert [os.access(path, os.F_OK) for path in paths] == [True] * count
        fs_tier_store(paths[0], part(source, 1))  # is there: nothing is written
        list(pool.map(lambda i: fs_tier_load(paths[i], part(target, i)), reversed(range(count))))
    assert loaded[:] == stored[:]
    loaded.close()
    stored.close()
    assert json.loads((base / "config.json").read_text())["block"] == block_bytes


# --- LMCache fs:// -----------------------------------------------------------------------------------------
def test_lmcache_file_connector(door: Door) -> None:
    """Long names in one flat directory; Python's own open() and one write()."""
    model = "meta-llama/Llama-3.1-70B-Instruct-with-a-rather-long-suffix".replace("/", "-SEP-")
    blocks = {
        f"{model}@8@{i % 8}@{i * 0x9E37_79B9:032x}@bfloat16": pattern(i, 40_000 * i) for i in range(1, 30)
    }
    for key, data in blocks.items():
        final, temporary = door.path / f"{key}.data", door.path / f"{key}.tmp"
        assert not os.path.exists(final)
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, final)
    found = glob.glob(str(door.path / "*.data"))
    assert {os.path.basename(name) for name in found} == {f"{key}.data" for key in blocks}
    for key, data in blocks.items():
        path = door.path / f"{key}.data"
        buffer = bytearray(path.stat().st_size)
        with open(path, "rb") as file:
            assert file.readinto(buffer) == len(data)
        assert buffer == data


def test_lmcache_writers_of_one_key_collide_on_its_temporary_name(door: Door) -> None:
    """Both write `key.tmp`: the second truncates what the first has open. The rename of the loser fails or
    moves the same bytes; the key never shows anything but a whole block."""
    final, temporary, data = door.path / "key.data", door.path / "key.tmp", pattern(1, 300_000)

    def put(_: int) -> None:
        with open(temporary, "wb", buffering=0) as file:
            file.write(data)
        try:
            os.replace(temporary, final)
        except FileNotFoundError:
            return

    for _ in range(10):
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(put, range(2)))
        assert final.read_bytes() == data


# --- SGLang HiCache, file backend --------------------------------------------------------------------------
def test_sglang_file_backend(door: Door) -> None:
    pages = {
        f"{i * 0x0123_4567:064x}_org-model_0_1": np.arange(i * 1000, i * 1000 + 50_000) for i in range(20)
    }
    for key, page in pages.items():
        temporary = door.path / f".{uuid.uuid4().hex}.tmp"
        page.tofile(temporary)
        os.replace(temporary, door.path / f"{key}.bin")
    for key, page in pages.items():
        path = door.path / f"{key}.bin"
        assert os.path.exists(path)
        target = np.empty_like(page)
        with open(path, "rb", buffering=0) as file:
            # A short read is an error to it: one call must fill the page.
            assert file.readinto(target.data.cast("B")) == page.nbytes
        assert np.array_equal(target, page)
    # Its evictor reads the room that is left, oldest access first; its clear() removes what it lists.
    room = os.statvfs(door.path)
    assert room.f_bavail * room.f_frsize > 0
    by_age = sorted(pages, key=lambda key: os.stat(door.path / f"{key}.bin").st_atime_ns)
    assert len(by_age) == 20
    for name in os.listdir(door.path):
        os.remove(door.path / name)
    assert os.listdir(door.path) == []
