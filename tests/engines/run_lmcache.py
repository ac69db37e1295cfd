"""LMCache's own classes on kvfs; runs under the engines' python, with LMCache's wheel on the path and no GPU.

Its adapters make `KVFSConnector` and `KVFSL2Adapter`, and its connector for Mooncake runs on `kvfs.compat.mooncake`.

Reads a JSON request from standard input, writes a JSON reply to the path given as the only argument:

    {"address": path}    ->    {check: answer}
"""

from __future__ import annotations

import asyncio
import json
import select
import sys
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

CHUNK, LAYERS, HEADS, ELEMENTS = 8, 3, 2, 4
SHAPE = torch.Size((2, LAYERS, CHUNK, HEADS * ELEMENTS))
COUNT = 5
WAIT_S = 60.0


def chunk(fill: int | None = None, tokens: int = CHUNK) -> Any:
    """A chunk of LMCache's memory."""
    from lmcache.v1.memory_management import MemoryFormat

    made = allocator().allocate(
        [torch.Size((2, LAYERS, tokens, HEADS * ELEMENTS))], [torch.float32], MemoryFormat.KV_2LTD
    )
    if fill is not None:
        torch.manual_seed(fill)
        made.tensor.copy_(torch.randn(made.tensor.shape))
    else:
        made.tensor.zero_()
    return made


def allocator() -> Any:
    from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator

    return AdHocMemoryAllocator(device="cpu")


def backend(*, described: bool, address: str, model: str = "test-model", revision: str = "1") -> Any:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata

    config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK)
    config.extra_config = {
        "save_chunk_meta": described,
        "kvfs_address": address,
        "kvfs_revision": revision,
        "mooncake_master_server_address": address,
        "mooncake_local_hostname": "localhost",
        "mooncake_metadata_server": "P2PHANDSHAKE",
        "mooncake_protocol": "tcp",
        "transfer_timeout": 10,
    }
    metadata = LMCacheMetadata(
        model_name=model,
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.float32,
        kv_shape=(LAYERS, 2, CHUNK, HEADS, ELEMENTS),
        chunk_size=CHUNK,
    )
    memory = allocator()
    return SimpleNamespace(
        config=config, metadata=metadata, allocate=memory.allocate, memory_allocator=memory
    )


def keys() -> list[Any]:
    from lmcache.utils import CacheEngineKey

    return [CacheEngineKey("test-model", 1, 0, 1000 + i, torch.float32) for i in range(COUNT)]


def connector(loop: Any, cpu: Any) -> Any:
    from lmcache.v1.storage_backend.connector import ConnectorContext
    from lmcache.v1.storage_backend.connector.external_adapter import ExternalConnectorAdapter

    url = "external://localhost:0/kvfs.connectors.lmcache/?connector_name=KVFSConnector"
    return ExternalConnectorAdapter().create_connector(
        ConnectorContext(url, loop, cpu, cpu.config, cpu.metadata)
    )


async def check_connector(address: str, *, described: bool) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    writer, reader = (connector(loop, backend(described=described, address=address)) for _ in range(2))
    chunks = [chunk(fill=i + 1) for i in range(COUNT)]
    found: dict[str, Any] = {"before": [await reader.exists(keys()[0]), reader.exists_sync(keys()[0])]}
    await writer.put(keys()[0], chunks[0])
    await writer.batched_put(keys()[1:4], chunks[1:4])
    found["exists"] = [await reader.exists(key) for key in keys()]
    found["contains"] = await reader.batched_async_contains("lookup", keys())
    read = await reader.batched_get(keys())
    found["get"] = [each is not None for each in read]
    found["equal"] = [
        each is not None and torch.equal(each.tensor, c.tensor) for each, c in zip(read, chunks, strict=True)
    ]
    found["get one"] = torch.equal((await reader.get(keys()[2])).tensor, chunks[2].tensor)
    partial = chunk(fill=9, tokens=CHUNK // 2)
    await writer.put(keys()[4], partial)
    short = await reader.get(keys()[4])
    found["partial"] = [list(short.get_shape()), torch.equal(short.tensor, partial.tensor)]
    # Evicted between the look-up and the read.
    found["contains before eviction"] = await reader.batched_async_contains("lookup", keys())
    found["remove"] = [writer.remove_sync(keys()[1]), writer.remove_sync(keys()[1])]
    found["get after eviction"] = [each is not None for each in await reader.batched_get(keys())]
    found["prefix after eviction"] = len(await reader.batched_get_non_blocking("lookup", keys()))
    other = connector(loop, backend(described=described, address=address, revision="2"))
    found["other weights"] = await other.batched_async_contains("lookup", keys())
    away = connector(loop, backend(described=described, address="/nowhere/kvfs.sock"))
    await away.put(keys()[0], chunks[0])
    found["without a service"] = [await away.exists(keys()[0]), await away.get(keys()[0]) is None]
    for each in (writer, reader, other, away):
        await each.close()
    return found


# --- the second level --------------------------------------------------------------------------------------
def wait_for(fd: int, take: Callable[[], Any]) -> Any:
    """What a task gives, once its event says that one is done."""
    from lmcache.v1.platform.event_notifier import consume_fd

    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if (result := take()) not in (None, {}):
            return result
        if select.select([fd], [], [], 1.0)[0]:
            consume_fd(fd)
    raise TimeoutError("a task did not end")


def adapter(address: str, revision: str = "1") -> Any:
    from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import (
        PluginL2AdapterConfig,
        _create_plugin_adapter,
    )

    config = PluginL2AdapterConfig.from_dict(
        {
            "module_path": "kvfs.connectors.lmcache",
            "class_name": "KVFSL2Adapter",
            "adapter_params": {"address": address, "revision": revision},
        }
    )
    made = _create_plugin_adapter(config)
    made.set_backend_identity("kvfs")
    return made


class Heard:
    """A listener of an adapter, as LMCache's eviction is."""

    def __init__(self) -> None:
        self.deleted: list[Any] = []

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None: ...

    def on_l2_keys_accessed(self, keys: list[Any]) -> None: ...

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        self.deleted += keys


def check_l2(address: str) -> dict[str, Any]:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey

    layouts = {0: MemoryLayoutDesc([SHAPE], [torch.float32])}

    def key(i: int, rank: int = 0, salt: str = "") -> Any:
        return ObjectKey(chunk_hash=bytes([i]) * 32, model_name="test-model", kv_rank=rank, cache_salt=salt)

    def bits(bitmap: Any, count: int) -> list[bool]:
        return [bool(bitmap.test(i)) for i in range(count)]

    def store(which: Any, some: list[Any], objects: list[Any]) -> list[Any]:
        task = which.submit_store_task(some, objects)
        done = wait_for(which.get_store_event_fd(), which.pop_completed_store_tasks)[task]
        return [done.is_successful(), done.bytes_transferred()]

    def look_up(which: Any, some: list[Any]) -> list[bool]:
        task = which.submit_lookup_and_lock_task(some, layouts)
        fd = which.get_lookup_and_lock_event_fd()
        return bits(wait_for(fd, lambda: which.query_lookup_and_lock_result(task)), len(some))

    def load(which: Any, some: list[Any], objects: list[Any]) -> list[bool]:
        task = which.submit_load_task(some, objects)
        return bits(wait_for(which.get_load_event_fd(), lambda: which.query_load_result(task)), len(some))

    writer, reader = adapter(address), adapter(address)
    some, chunks = [key(i) for i in range(4)], [chunk(fill=20 + i) for i in range(4)]
    fds = {
        f()
        for a in (writer, reader)
        for f in (a.get_store_event_fd, a.get_lookup_and_lock_event_fd, a.get_load_event_fd)
    }
    found: dict[str, Any] = {"event descriptors": len(fds), "before": look_up(reader, some)}
    found["store"] = store(writer, some[:3], chunks[:3])
    found["store again"] = store(writer, some[:1], chunks[:1])
    found["usage"] = writer.get_usage().total_bytes_used
    found["look-up"] = look_up(reader, some)
    heard = Heard()
    writer.register_listener(heard)
    # Gone from the store between look-up and load: what is locked is leased.
    writer.delete(some[1:2])
    found["usage after delete"] = writer.get_usage().total_bytes_used
    writer.delete(some[1:2])
    found["usage after another"] = writer.get_usage().total_bytes_used
    found["heard as deleted"] = [key.chunk_hash[0] for key in heard.deleted]
    found["look-up by another"] = look_up(writer, some)
    writer.submit_unlock(some)
    targets = [chunk() for _ in some]
    found["load after eviction"] = load(reader, some, targets)
    found["load by another"] = load(writer, some, [chunk() for _ in some])
    found["equal"] = [torch.equal(t.tensor, c.tensor) for t, c in zip(targets, chunks, strict=True)]
    found["load of what has no room"] = load(writer, some[:1], [chunk(tokens=CHUNK // 2)])
    reader.submit_unlock(some)
    found["locked after unlock"] = reader.report_status()["locked"]
    found["other rank, salt, weights"] = [
        look_up(reader, [key(0, rank=1)])[0],
        look_up(reader, [key(0, salt="user")])[0],
        look_up(adapter(address, "2"), some)[0],
    ]
    # What the store evicts is no part of LMCache's usage twice.
    reader.delete(some[:1])
    found["store after eviction"] = store(writer, some[:2], chunks[:2])
    found["usage after eviction"] = writer.get_usage().total_bytes_used
    writer.delete(some)
    found["usage at the end"] = writer.get_usage().total_bytes_used
    away = adapter("/nowhere/kvfs.sock")
    found["without a service"] = [
        store(away, some[:1], chunks[:1]),
        look_up(away, some[:1]),
        load(away, some[:1], targets[:1]),
    ]
    away.register_listener(heard := Heard())
    away.delete(some)
    found["heard without a service"] = len(heard.deleted)
    for each in (writer, reader, away):
        each.close()
    return found


# --- Mooncake ----------------------------------------------------------------------------------------------
async def check_mooncake(address: str, *, described: bool) -> dict[str, Any]:
    """LMCache's own connector for Mooncake, whose import is changed."""
    import kvfs.compat.mooncake

    sys.modules["mooncake"] = ModuleType("mooncake")
    sys.modules["mooncake.store"] = kvfs.compat.mooncake
    from lmcache.v1.storage_backend.connector.mooncakestore_connector import MooncakestoreConnector

    cpu = backend(described=described, address=address)
    made = MooncakestoreConnector(asyncio.get_running_loop(), cpu, cpu.config)
    chunks = [chunk(fill=40 + i) for i in range(COUNT)]
    found: dict[str, Any] = {"before": await made.exists(keys()[0])}
    await made.batched_put(keys()[:3], chunks[:3])
    found["contains"] = await made.batched_async_contains("lookup", keys())
    read = await made.batched_get(keys())
    found["equal"] = [
        each is not None and torch.equal(each.tensor, c.tensor) for each, c in zip(read, chunks, strict=True)
    ]
    made.store.remove_all()
    await made.close()
    return found


async def check_all(address: str) -> dict[str, Any]:
    return {
        "connector, described": await check_connector(address, described=True),
        "connector, plain": await check_connector(address, described=False),
        "l2": await asyncio.to_thread(check_l2, address),
        "mooncake, described": await check_mooncake(address, described=True),
        "mooncake, plain": await check_mooncake(address, described=False),
    }


def main() -> None:
    reply = asyncio.run(check_all(json.loads(sys.stdin.readline())["address"]))
    with open(sys.argv[1], "w") as file:
        json.dump(reply, file)


if __name__ == "__main__":
    main()
