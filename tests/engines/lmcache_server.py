"""LMCache's server for checks of object groups: its context, storage and look-up, with `KVFSL2Adapter` as second level.

Its model has three object groups and two ranks: full attention, a sliding window of two chunks, and recurrent states.
Runs under the engines' python, with LMCache's wheel on the path and no GPU.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import torch
from lmcache.utils import EngineType
from lmcache.v1.distributed.api import AttnWindowDesc, MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.serde import SerdeConfig
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.engine_context import MPCacheServerContext
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.multiprocess.modules.lmcache_driven_transfer import LMCacheDrivenTransferModule
from lmcache.v1.multiprocess.modules.lookup import LookupModule
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from lmcache.v1.platform.base.event_ipc import get_event_ipc_backend
from lmcache.v1.platform.devices.cpu.shm import migrate_to_shm_and_wrap

from kvfs.connectors.common import digest_keys
from kvfs.connectors.lmcache_rules.object_keys import bare_key_bytes, layout_of

MODEL, CHUNK, CHUNKS, RANKS = "org/hybrid", 8, 6, 2
BLOCKS = 2 * CHUNKS + 1
WAIT_S = 60.0
Layouts = dict[int, MemoryLayoutDesc]


def layout(*parts: tuple[torch.dtype, tuple[int, ...]]) -> MemoryLayoutDesc:
    return MemoryLayoutDesc([torch.Size(shape) for _, shape in parts], [dtype for dtype, _ in parts])


LAYOUTS: Layouts = {
    0: layout((torch.bfloat16, (2, 2, CHUNK, 16))),
    1: layout((torch.bfloat16, (2, 1, CHUNK, 16)), (torch.bfloat16, (2, 2, CHUNK // 2, 16))),
    2: layout((torch.float32, (1, 2, 1, 40)), (torch.bfloat16, (1, 2, 1, 7))),
}
"""Full attention of two layers; a window of one layer and two whose heads are in half as many slots; states."""
WINDOWS = [-1, 2, 1]
ONE_GROUP: Layouts = {0: LAYOUTS[0]}
TWO_GROUPS: Layouts = {0: LAYOUTS[0], 1: layout((torch.float32, (1, 2, 1, 40)))}
"""Which LMCache's serde can transform: of one part each, the largest first."""
OTHER_TYPES: Layouts = {
    group: MemoryLayoutDesc(
        each.shapes, [torch.float16 if dtype == torch.bfloat16 else dtype for dtype in each.dtypes]
    )
    for group, each in LAYOUTS.items()
}
"""Of the same sizes."""


def tokens_of(prompt: int) -> list[int]:
    return [prompt * 1000 + i for i in range(CHUNKS * CHUNK)]


def content(key: ObjectKey, size: int) -> bytes:
    """Return the bytes of an object, which no other has."""
    name = (key.chunk_hash, key.kv_rank, key.object_group_id)
    return hashlib.shake_128(repr(name).encode()).digest(size)


class Server:
    """LMCache's server with one second level, for as long as the `with` block."""

    def __init__(
        self,
        address: str,
        layouts: Layouts,
        *,
        windows: list[int] | None = None,
        revision: str = "1",
        serde: str | None = None,
    ) -> None:
        second = PluginL2AdapterConfig.from_dict(
            {
                "module_path": "kvfs.connectors.lmcache",
                "class_name": "KVFSL2Adapter",
                "adapter_params": {"address": address, "revision": revision},
            }
        )
        second.serde_config = SerdeConfig(type=serde) if serde else None
        memory = L1MemoryManagerConfig(size_in_bytes=16 << 20, use_lazy=False, shm_name="")
        config = StorageManagerConfig(
            L1ManagerConfig(memory), EvictionConfig("noop"), L2AdaptersConfig([second])
        )
        self.layouts = layouts
        self.context = MPCacheServerContext(config, chunk_size=CHUNK, separate_object_groups=True)
        self.context.layout_desc_registry.register(
            MODEL,
            RANKS,
            layouts[0],
            AttnWindowDesc((windows or WINDOWS)[: len(layouts)]),
            group_layout_descs=layouts,
        )
        self.windows = (windows or WINDOWS)[: len(layouts)]
        self.look_ups = LookupModule(self.context)
        self.storage = self.context.storage_manager
        adapter = self.storage.l2_adapters()[0][1]
        self.adapter = adapter.inner_adapter if serde else adapter
        self._ended = threading.Condition()
        self._stored: list[tuple[int, bool]] = []
        self._requests = 0
        store = self.adapter._store

        def watched(keys: list[Any], objects: list[Any]) -> Any:
            result = store(keys, objects)
            with self._ended:
                self._stored.append((len(keys), result.is_successful()))
                self._ended.notify_all()
            return result

        self.adapter._store = watched

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def keys(self, prompt: int, group: int, rank: int) -> list[ObjectKey]:
        hashes = self.context.token_hasher.compute_chunk_hashes(tokens_of(prompt))
        kv_rank = ObjectKey.ComputeKVRank(RANKS, rank, RANKS, rank)
        return [ObjectKey(TokenHasher.hash_to_bytes(each), MODEL, kv_rank, group) for each in hashes]

    def all_keys(self, prompt: int) -> list[ObjectKey]:
        return [
            key for group in self.layouts for rank in range(RANKS) for key in self.keys(prompt, group, rank)
        ]

    def store(self, prompt: int, kept: Mapping[int, set[int]] | None = None) -> list[bool]:
        """Write a prompt's chunks (of a group, those of `kept`) and wait; return whether each store succeeded."""
        written: list[ObjectKey] = []
        for group, described in self.layouts.items():
            chunks = (kept or {}).get(group, set(range(CHUNKS)))
            some = [
                self.keys(prompt, group, rank)[chunk] for rank in range(RANKS) for chunk in sorted(chunks)
            ]
            for key, memory in self.storage.reserve_write(some, described).items():
                place = np.frombuffer(memory.byte_array, dtype=np.uint8)
                place[:] = np.frombuffer(content(key, len(place)), dtype=np.uint8)
            written += some
        return self.stores(len(written), lambda: self.storage.finish_write(written))

    def stores(self, count: int, begin: Callable[[], object]) -> list[bool]:
        """Wait until so many objects that are begun to be written are stored; return whether each task succeeded."""
        with self._ended:
            self._stored.clear()
        begin()
        with self._ended:
            ended = self._ended.wait_for(lambda: sum(each for each, _ in self._stored) >= count, WAIT_S)
        assert ended, "LMCache stores nothing"
        return [is_stored for _, is_stored in self._stored]

    def hits(self, prompt: int) -> tuple[str, int]:
        """Look a prompt up; return the name of the request and how many chunks LMCache hits."""
        self._requests += 1
        request = f"{prompt} {self._requests}"
        tokens = tokens_of(prompt)
        asked = IPCCacheServerKey.from_token_ids(
            MODEL, RANKS, None, tokens, end=len(tokens), request_id=request
        )
        self.look_ups.lookup(asked, RANKS)
        hits = self.look_ups.wait_prefetch_status(request, WAIT_S)
        assert hits is not None, "LMCache's look-up does not end"
        return request, hits

    def look_up(self, prompt: int) -> list[Any]:
        """Return how many chunks LMCache hits, and whether what it has loaded for these is right."""
        _, hits = self.hits(prompt)
        needed = [
            key
            for group, window in enumerate(self.windows)
            for rank in range(RANKS)
            for key in self.keys(prompt, group, rank)[0 if window < 0 else max(0, hits - window) : hits]
        ]
        if not needed:
            return [hits, True]
        with self.storage.read_prefetched_results(needed) as objects:
            equal = objects is not None and all(
                bytes(memory.byte_array) == content(key, memory.get_size())
                for key, memory in zip(needed, objects, strict=True)
            )
        self.storage.finish_read_prefetched(needed)
        return [hits, equal]

    def digest(self, key: ObjectKey) -> bytes:
        """Return the digest that an object of the key's group is stored under."""
        return bytes(self.adapter._keys.stored(key, layout_of(self.layouts[key.object_group_id])))

    def plant(self, digest: bytes, value: bytes) -> None:
        """Store other bytes under a digest."""
        blocks = self.adapter._link.blocks(self.adapter._namespace)
        blocks.remove([digest])
        assert blocks.put([digest], [value]) == [True]

    def plant_bare(self, key: ObjectKey, size: int) -> None:
        digest = digest_keys(self.adapter._namespace, [bare_key_bytes(key)])[0]
        self.plant(digest, content(key, size))


def at_load(server: Server, do: Callable[[list[ObjectKey]], None]) -> None:
    """Do something between LMCache's look-up and its load."""
    submit = server.adapter.submit_load_task

    def then_load(keys: list[ObjectKey], objects: list[Any]) -> int:
        do(keys)
        return int(submit(keys, objects))

    server.adapter.submit_load_task = then_load


class EngineRank:
    """The caches of one rank of an engine in memory of the CPU, which LMCache copies from and to.

    A block of attention has four tokens, one of states a chunk's. Block 0 is vLLM's null block.
    """

    def __init__(self, server: Server, transfers: LMCacheDrivenTransferModule, rank: int) -> None:
        self._server, self._transfers, self._rank = server, transfers, rank
        attention = (2, BLOCKS, CHUNK // 2, 2, 16)
        shapes = [(attention, torch.bfloat16)] * 3 + [((BLOCKS, 1, 40), torch.float32)] * 2
        self.layers = [torch.zeros(shape, dtype=dtype) for shape, dtype in shapes]
        transfers.register_kv_cache(
            rank,
            [migrate_to_shm_and_wrap(layer) for layer in self.layers],
            MODEL,
            RANKS,
            EngineType.VLLM,
            {"kv_layout": "NHD"},
            [
                EngineGroupInfo(0, (0, 1), CHUNK // 2),
                EngineGroupInfo(1, (2,), CHUNK // 2, 2 * CHUNK),
                EngineGroupInfo(2, (3, 4), CHUNK, CHUNK, recurrent_state=True),
            ],
        )

    def compute(self) -> None:
        """Fill the caches, otherwise than other ranks."""
        torch.manual_seed(100 + self._rank)
        for layer in self.layers:
            layer.copy_(torch.randn(layer.shape))

    def store(self, prompt: int, blocks: list[list[int]]) -> bool:
        return bool(
            self._transfers.store(self._key(prompt, "store", CHUNKS), self._rank, blocks, _event())[1]
        )

    def retrieve(self, prompt: int, request: str, hits: int, blocks: list[list[int]]) -> bool:
        key = self._key(prompt, request, hits)
        return bool(self._transfers.retrieve(key, self._rank, blocks, _event())[1])

    def _key(self, prompt: int, request: str, chunks: int) -> IPCCacheServerKey:
        return IPCCacheServerKey.from_token_ids(
            MODEL, RANKS, self._rank, tokens_of(prompt), end=chunks * CHUNK, request_id=request
        )


def _event() -> bytes:
    """Return the handle of an event of the engine's that has happened."""
    backend = get_event_ipc_backend(torch.device("cpu"))
    event = backend.create_event(torch.device("cpu"))
    backend.record_event(event, None)
    return bytes(backend.export_event(event, torch.device("cpu")))
