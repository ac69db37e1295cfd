"""LMCache's own S3 classes against the S3 endpoint; runs under the engines' python, with LMCache's wheel on the path.

`S3Connector`, made by its adapter for `remote_url: s3://`, and `S3L2Adapter`, made by LMCache's factory for `type: s3`.

Reads a JSON request from standard input, writes a JSON reply to the path given as the only argument:

    [{"endpoint", "access", "secret", "tls", "http2", "tokens"}, ...]    ->    [{check: answer}, ...]
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from tests.engines.run_lmcache import wait_for

LAYERS, HEADS, ELEMENTS = 3, 8, 128
TOKEN_BYTES = 2 * LAYERS * HEADS * ELEMENTS * 4
COUNT = 4
POOL_BYTES = 1 << 30
REGION = "us-east-1"
MODEL = "some/model (1)"
"""With what a path has to escape."""


@cache
def allocator() -> Any:
    """Memory as LMCache has it on the host: the connector wants chunks' physical sizes."""
    from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator

    return HostMemoryAllocator(POOL_BYTES)


def chunk(tokens: int, fill: int | None = None) -> Any:
    """A chunk of LMCache's memory."""
    from lmcache.v1.memory_management import MemoryFormat

    shape = torch.Size((2, LAYERS, tokens, HEADS * ELEMENTS))
    made = allocator().allocate([shape], [torch.float32], MemoryFormat.KV_2LTD)
    if fill is None:
        made.tensor.zero_()
    else:
        torch.manual_seed(fill)
        made.tensor.copy_(torch.randn(made.tensor.shape))
    return made


def digest(made: Any) -> str:
    return hashlib.sha256(made.byte_array).hexdigest()


def equal(read: list[Any], chunks: list[Any]) -> list[bool]:
    """Which of them came back as they were."""
    return [
        each is not None and torch.equal(each.tensor, c.tensor) for each, c in zip(read, chunks, strict=True)
    ]


# --- the connector -----------------------------------------------------------------------------------------
def connector(request: dict[str, Any], **other: str) -> Any:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.connector import ConnectorContext
    from lmcache.v1.storage_backend.connector.s3_adapter import S3ConnectorAdapter

    tokens = request["tokens"]
    config = LMCacheEngineConfig.from_defaults(chunk_size=tokens)
    config.extra_config = {
        "save_chunk_meta": False,
        "s3_region": REGION,
        "s3_num_io_threads": 2,
        "s3_prefer_http2": request["http2"],
        "disable_tls": not request["tls"],
        "aws_access_key_id": request["access"],
        "aws_secret_access_key": request["secret"],
        **other,
    }
    metadata = LMCacheMetadata(
        model_name=MODEL,
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.float32,
        kv_shape=(LAYERS, 2, tokens, HEADS, ELEMENTS),
        chunk_size=tokens,
    )
    cpu = SimpleNamespace(config=config, metadata=metadata, allocate=allocator().allocate)
    url = f"s3://{request['endpoint']}"
    return S3ConnectorAdapter().create_connector(
        ConnectorContext(url, asyncio.get_running_loop(), cpu, config, metadata)
    )


def keys() -> list[Any]:
    from lmcache.utils import CacheEngineKey

    return [CacheEngineKey(MODEL, 1, 0, 1000 + i, torch.float32) for i in range(COUNT)]


async def check_connector(request: dict[str, Any]) -> dict[str, Any]:
    """Three of four chunks are stored; readers are made anew, since a connector remembers what it saw.

    None is closed: a connector's `close` waits, on its loop, for a task of that loop.
    """
    tokens, first = request["tokens"], connector(request)
    chunks = [chunk(tokens, fill=i + 1) for i in range(COUNT)]
    found: dict[str, Any] = {"before": [await first.exists(keys()[0]), first.exists_sync(keys()[1])]}
    found["contains before"] = await first.batched_async_contains("lookup", keys())
    found["get before"] = await first.get(keys()[0]) is not None
    await asyncio.gather(*(first.put(key, c) for key, c in list(zip(keys(), chunks, strict=True))[:3]))
    await first.put(keys()[3], chunk(tokens // 2, fill=9))
    await first.put(keys()[2], chunks[2])
    found["stored"] = {
        key.to_string().replace("/", "_"): digest(c) for key, c in zip(keys(), chunks, strict=True)
    }
    second, third, fourth = connector(request), connector(request), connector(request)
    found["exists"] = [await second.exists(key) for key in keys()]
    found["contains"] = await third.batched_async_contains("lookup", keys())
    found["get"] = equal([await fourth.get(key) for key in keys()], chunks)
    found["batched get"] = equal(await second.batched_get(keys()), chunks)
    some = await third.batched_get_non_blocking("lookup", keys()[:3])
    found["prefetch"] = equal(some, chunks[:3])
    for name, other in (
        ("secret", {"aws_secret_access_key": "another-secret"}),
        ("key", {"aws_access_key_id": "X"}),
    ):
        wrong = connector(request, **other)
        await wrong.put(keys()[3], chunks[3])
        found[f"wrong {name}"] = [await wrong.exists(keys()[0]), await wrong.get(keys()[0]) is not None]
    found["after"] = await connector(request).exists(keys()[3])
    try:
        await first.list()
    except NotImplementedError:
        found["list"] = "NotImplementedError"
    return found


# --- the second level --------------------------------------------------------------------------------------
def adapter(request: dict[str, Any], **other: str) -> Any:
    from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
    from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry

    config = {
        "s3_endpoint": request["endpoint"],
        "s3_region": REGION,
        "s3_num_io_threads": 2,
        "s3_prefer_http2": request["http2"],
        "disable_tls": not request["tls"],
        "aws_access_key_id": request["access"],
        "aws_secret_access_key": request["secret"],
        **other,
    }
    return create_l2_adapter_from_registry(get_l2_adapter_config_class("s3").from_dict(config))


class Level:
    """One adapter, each task waited for."""

    def __init__(self, made: Any) -> None:
        self.made = made
        made.set_backend_identity("kvfs")

    def store(self, some: list[Any], objects: list[Any]) -> list[Any]:
        task = self.made.submit_store_task(some, objects)
        done = wait_for(self.made.get_store_event_fd(), self.made.pop_completed_store_tasks)[task]
        return [done.is_successful(), done.bytes_transferred()]

    def look_up(self, some: list[Any]) -> list[bool]:
        task = self.made.submit_lookup_and_lock_task(some, {})
        fd = self.made.get_lookup_and_lock_event_fd()
        return self._bits(wait_for(fd, lambda: self.made.query_lookup_and_lock_result(task)), len(some))

    def load(self, some: list[Any], objects: list[Any]) -> list[bool]:
        task = self.made.submit_load_task(some, objects)
        fd = self.made.get_load_event_fd()
        return self._bits(wait_for(fd, lambda: self.made.query_load_result(task)), len(some))

    @staticmethod
    def _bits(bitmap: Any, count: int) -> list[bool]:
        return [bool(bitmap.test(i)) for i in range(count)]


def check_l2(request: dict[str, Any]) -> dict[str, Any]:
    from lmcache.v1.distributed.api import ObjectKey

    tokens = request["tokens"]
    some = [
        ObjectKey(chunk_hash=bytes([i]) * 32, model_name=MODEL, kv_rank=0, cache_salt="s" if i == 2 else "")
        for i in range(COUNT)
    ]
    chunks = [chunk(tokens, fill=20 + i) for i in range(COUNT)]
    writer, reader, lister = (Level(adapter(request)) for _ in range(3))
    found: dict[str, Any] = {"before": reader.look_up(some)}
    found["store"] = writer.store(some[:3], chunks[:3])
    found["store again"] = writer.store(some[:1], chunks[:1])
    found["look-up"] = reader.look_up(some)
    targets = [chunk(tokens) for _ in some]
    found["load"] = reader.load(some, targets)
    found["equal"] = equal(targets, chunks)
    found["list"] = list_all(lister.made, MODEL)
    found["list of another model"] = list_all(lister.made, "other")
    reader.made.submit_unlock(some)
    writer.made.delete(some[1:2])
    found["look-up after delete"] = Level(adapter(request)).look_up(some)
    wrong = Level(adapter(request, aws_secret_access_key="another-secret"))
    found["wrong secret"] = [
        wrong.store(some[3:], chunks[3:]),
        wrong.look_up(some[:1]),
        wrong.load(some[:1], [chunk(tokens)]),
    ]
    found["healthy"] = [each.made.report_status()["is_healthy"] for each in (writer, reader, wrong)]
    for each in (writer, reader, lister, wrong):
        each.made.close()
    return found


def list_all(made: Any, model: str) -> list[int]:
    """Sizes of what is listed, two on a page."""
    sizes, cursor = [], None
    while True:
        page = made.list_l2_keys(model, page_size=2, cursor=cursor)
        sizes += [entry.size_bytes for entry in page.entries]
        cursor = page.next_page_token
        if cursor is None:
            return sizes


async def check_all(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "connector": await check_connector(request),
            "l2": await asyncio.to_thread(check_l2, request),
        }
        for request in requests
    ]


def main() -> None:
    reply = asyncio.run(check_all(json.loads(sys.stdin.readline())))
    with open(sys.argv[1], "w") as file:
        json.dump(reply, file)


if __name__ == "__main__":
    main()
