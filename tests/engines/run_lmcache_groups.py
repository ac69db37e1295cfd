"""LMCache's own storage of a hybrid model on kvfs; runs under the engines' python, with LMCache's wheel and no GPU.

LMCache's server context (storage manager, store, prefetch and look-up) makes `KVFSL2Adapter` by its plugin's
configuration. A model has three object groups and two ranks: full attention, a sliding window of two chunks, and
recurrent states.

Reads a JSON request from standard input, writes a JSON reply to the path given as the only argument:

    {"address": path}    ->    {check: answer}
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Self
from unittest.mock import patch

import numpy as np
import torch
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
from lmcache.v1.multiprocess.modules.lookup import LookupModule
from lmcache.v1.multiprocess.token_hasher import TokenHasher

from kvfs.connectors.common import digest_keys
from kvfs.connectors.lmcache_rules import object_locks
from kvfs.connectors.lmcache_rules.object_keys import bare_key_bytes, layout_of

MODEL, CHUNK, CHUNKS, RANKS = "org/hybrid", 8, 6, 2
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
        with self._ended:
            self._stored.clear()
        self.storage.finish_write(written)
        with self._ended:
            ended = self._ended.wait_for(
                lambda: sum(count for count, _ in self._stored) >= len(written), WAIT_S
            )
        assert ended, "LMCache stores nothing"
        return [is_stored for _, is_stored in self._stored]

    def look_up(self, prompt: int) -> list[Any]:
        """Return how many chunks LMCache hits, and whether what it has loaded for these is right."""
        self._requests += 1
        request = f"{prompt} {self._requests}"
        tokens = tokens_of(prompt)
        asked = IPCCacheServerKey.from_token_ids(
            MODEL, RANKS, None, tokens, end=len(tokens), request_id=request
        )
        self.look_ups.lookup(asked, RANKS)
        hits = self.look_ups.wait_prefetch_status(request, WAIT_S)
        assert hits is not None, "LMCache's look-up does not end"
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


# --- checks ------------------------------------------------------------------------------------------------
def check_round(address: str) -> dict[str, Any]:
    with Server(address, LAYOUTS) as writer:
        found: dict[str, Any] = {"store": writer.store(1)}
        sizes = [layout_of(each).size_bytes for each in LAYOUTS.values()]
        found["usage is of all objects"] = (
            writer.adapter.get_usage().total_bytes_used == RANKS * CHUNKS * sum(sizes)
        )
        # vLLM keeps the state of few chunks, and of a window the blocks of the last ones.
        writer.store(2, {1: {2, 3, 4, 5}, 2: {1, 3}})
        writer.store(3, {1: {0, 2, 3, 5}, 2: {1, 2, 4}})
    with Server(address, LAYOUTS) as reader:
        found["all"], found["again"] = reader.look_up(1), reader.look_up(1)
        found["few states"], found["window with a gap"] = reader.look_up(2), reader.look_up(3)
        found["nothing"] = reader.look_up(4)
        found["locked at the end"] = reader.adapter.report_status()["locked"]
    with Server(address, LAYOUTS, revision="2") as other:
        found["other weights"] = other.look_up(1)
    with Server(address, OTHER_TYPES) as other:
        found["other element types"] = other.look_up(1)
    swapped = {0: LAYOUTS[1], 1: LAYOUTS[0], 2: LAYOUTS[2]}
    with Server(address, swapped, windows=[2, -1, 1]) as other:
        found["other order of groups"] = other.look_up(1)
    with Server(address, ONE_GROUP) as other:
        found["full attention alone"] = other.look_up(1)
    return found


def check_evictions(address: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with Server(address, LAYOUTS) as writer:
        for prompt in range(10, 17):
            writer.store(prompt)
        evicted = {
            "a window's last chunk of one rank": (11, 1, 1, 5),
            "a window's old chunk": (12, 1, 0, 1),
            "a state of one rank": (13, 2, 1, 5),
            "full attention": (14, 0, 0, 2),
        }
        for prompt, group, rank, chunk in evicted.values():
            writer.adapter.delete(writer.keys(prompt, group, rank)[chunk : chunk + 1])
    with Server(address, LAYOUTS) as reader:
        found |= {name: reader.look_up(prompt) for name, (prompt, *_) in evicted.items()}
    with Server(address, LAYOUTS) as reader:
        at_load(reader, reader.adapter.delete)
        found["all, after the look-up"] = reader.look_up(10)
    with Server(address, LAYOUTS) as reader:
        lost = reader.keys(16, 1, 0)[4:5]

        def lose(keys: list[ObjectKey]) -> None:
            reader.adapter.submit_unlock(lost)
            reader.adapter.delete(lost)

        at_load(reader, lose)
        found["a window's, after look-up and unlock"] = reader.look_up(16)
        found["locked at the end"] = reader.adapter.report_status()["locked"]
    with Server(address, LAYOUTS) as reader, patch.object(object_locks, "CONNECTOR_LOCKS", 5):
        locked = []
        at_load(reader, lambda keys: locked.append(reader.adapter.report_status()["locked"]))
        found["more than can be locked"] = [*reader.look_up(15), locked]
    return found


def check_sizes(address: str) -> dict[str, Any]:
    """Objects of other sizes than their layout's under their keys."""
    found: dict[str, Any] = {}
    with Server(address, LAYOUTS) as writer:
        writer.store(21)
        writer.store(22)
        size = layout_of(LAYOUTS[1]).size_bytes
        for prompt, chunk, of in ((21, 5, size + 64), (22, 4, size - 64)):
            key = writer.keys(prompt, 1, 1)[chunk]
            writer.plant(writer.digest(key), content(key, of))
    with Server(address, LAYOUTS) as reader:
        found["longer"], found["shorter"] = reader.look_up(21), reader.look_up(22)
        # Without a look-up: one that does not fit is no other's miss.
        some = reader.all_keys(21)
        objects = [
            memory
            for group, described in LAYOUTS.items()
            for memory in reader.storage.reserve_write(
                [each for each in some if each.object_group_id == group], described
            ).values()
        ]
        bitmap = reader.adapter._load(some, objects)
        found["missed by a load of all"] = [
            [key.object_group_id, i % CHUNKS] for i, key in enumerate(some) if not bitmap.test(i)
        ]
        found["loaded right"] = all(
            bytes(memory.byte_array) == content(key, memory.get_size())
            for i, (key, memory) in enumerate(zip(some, objects, strict=True))
            if bitmap.test(i)
        )
    return found


def check_bare_keys(address: str) -> dict[str, Any]:
    """Objects under keys without a layout."""
    found: dict[str, Any] = {}
    size = layout_of(LAYOUTS[0]).size_bytes
    with Server(address, LAYOUTS) as writer:
        for key in writer.all_keys(31):
            writer.plant_bare(key, layout_of(LAYOUTS[key.object_group_id]).size_bytes)
        for rank in range(RANKS):
            for chunk, key in enumerate(writer.keys(32, 0, rank)):
                writer.plant_bare(key, size if chunk < 3 else size - 64)
    with Server(address, ONE_GROUP) as reader:
        found["one group"] = reader.look_up(31)
        found["of another size"] = reader.look_up(32)
        reader.adapter.delete(reader.all_keys(31))
        found["one group, deleted"] = reader.look_up(31)
    with Server(address, LAYOUTS) as reader:
        found["several groups"] = reader.look_up(31)
    return found


def check_serde(address: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with Server(address, ONE_GROUP, revision="serde", serde="fp8") as writer:
        found["store"] = writer.store(41)
    with Server(address, ONE_GROUP, revision="serde", serde="fp8") as reader:
        found["hits"] = reader.look_up(41)[0]
    with Server(address, ONE_GROUP, revision="serde") as reader:
        found["without serde"] = reader.look_up(41)
    groups: dict[str, Any] = {"windows": [-1, 1], "revision": "serde"}
    with Server(address, TWO_GROUPS, **groups, serde="fp8") as writer:
        found["store of groups"] = [writer.store(prompt) for prompt in (42, 43)]
        found["usage"] = writer.adapter.get_usage().total_bytes_used
    with Server(address, TWO_GROUPS, **groups, serde="fp8") as reader:
        found["hits of groups"] = reader.look_up(42)
    with Server(address, TWO_GROUPS, **groups) as both:
        found["groups without serde"] = [set(both.store(42)) == {True}, both.look_up(42)]
    return found


def check_delete(address: str) -> dict[str, Any]:
    with Server(address, LAYOUTS) as writer:
        writer.store(51)
        keys = writer.all_keys(51)
        digests = [writer.digest(key) for key in keys]
        blocks = writer.adapter._link.blocks(writer.adapter._namespace)
        there = sum(blocks.exists(digests))
        writer.adapter.delete(keys)
        usage = writer.adapter.get_usage().total_bytes_used
        return {"there": there, "left": sum(blocks.exists(digests)), "usage": usage}


CHECKS = {
    "round": check_round,
    "evictions": check_evictions,
    "sizes": check_sizes,
    "bare keys": check_bare_keys,
    "serde": check_serde,
    "delete": check_delete,
}


def main() -> None:
    address = json.loads(sys.stdin.readline())["address"]
    reply = {name: check(address) for name, check in CHECKS.items()}
    with open(sys.argv[1], "w") as file:
        json.dump(reply, file)


if __name__ == "__main__":
    main()
