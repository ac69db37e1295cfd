"""SGLang's own classes on kvfs; runs under the engines' python, with SGLang's wheel on the path and no GPU.

Its factory makes `KVFSHiCache` and its `MooncakeStore` runs on `kvfs.compat.mooncake`, both over host pools of its own
class with memory that is allocated here. Modules that SGLang imports for images and quantised weights are stood in for.

Reads a JSON request from standard input, writes a JSON reply to the path given as the only argument:

    {"address": path}    ->    {check: answer}
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import logging
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, cast
from unittest.mock import MagicMock

import torch
import transformers.image_utils  # looks for torchvision itself, before it is stood in for

STAND_INS = ("torchvision", "gguf")
PAGE, LAYERS, HEADS, ELEMENTS, PAGES = 4, 3, 2, 8, 6
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
KEYS = [f"{i:064x}" for i in range(PAGES)]


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in STAND_INS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = cast(ModuleType, MagicMock(name=spec.name))
        module.__path__, module.__spec__ = [], spec
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def host_pool(layout: str, *, dtype: torch.dtype = torch.bfloat16, fill: int = 0) -> Any:
    """SGLang's host pool, of memory that is allocated here; its constructor wants a GPU's pool."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    pool = MHATokenToKVPoolHost.__new__(MHATokenToKVPoolHost)
    size = PAGE * PAGES
    pool.layout, pool.page_size, pool.layer_num, pool.size, pool.page_num = layout, PAGE, LAYERS, size, PAGES
    pool.head_num, pool.head_dim, pool.v_head_dim, pool.dtype, pool.device = (
        HEADS,
        ELEMENTS,
        ELEMENTS,
        dtype,
        "cpu",
    )
    pool.pin_memory = False
    shape = {
        "layer_first": (2, LAYERS, size, HEADS, ELEMENTS),
        "page_first": (2, size, LAYERS, HEADS, ELEMENTS),
        "page_first_direct": (2, PAGES, LAYERS, PAGE, HEADS, ELEMENTS),
    }[layout]
    pool.kv_buffer = torch.zeros(shape, dtype=dtype)
    if fill:
        torch.manual_seed(fill)
        pool.kv_buffer.copy_(torch.randn(shape))
    return pool


def config(
    address: str, *, rank: int = 0, revision: str = "1", mla: bool = False, v1: int = 1, **others: Any
) -> Any:
    """Of one of two tensor-parallel ranks; `others` are further fields, or other values."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    extra = {
        "backend_name": "kvfs",
        "module_path": "kvfs.connectors.sglang",
        "class_name": "KVFSHiCache",
        "interface_v1": v1,
        "address": address,
        "revision": revision,
        "master_server_address": address,
    }
    fields = {
        "tp_rank": rank,
        "tp_size": 2,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": mla,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "test/model",
        "extra_config": extra,
    }
    return HiCacheStorageConfig(**{**fields, **others})


def backend(storage_config: Any, pool: Any) -> Any:
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    made = StorageBackendFactory.create_backend("dynamic", storage_config, pool)
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    return made


def indices(pages: Sequence[int]) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def check_layout(address: str, layout: str) -> dict[str, Any]:
    """A pool is stored and another one filled from it, page by page and in reverse places."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

    source, target = host_pool(layout, fill=1), host_pool(layout)
    writer, reader = backend(config(address), source), backend(config(address), target)
    found: dict[str, Any] = {"before": reader.batch_exists(KEYS)}
    found["set"] = writer.batch_set_v1(KEYS[:2], indices([0, 1]), HiCacheStorageExtraInfo())
    chained = HiCacheStorageExtraInfo(prefix_keys=KEYS[:2])
    found["set behind"] = writer.batch_set_v1(KEYS[2:5], indices([2, 3, 4]), chained)
    found["set again"] = writer.batch_set_v1(KEYS[:1], indices([5]))
    found["exists"] = [reader.batch_exists(KEYS), reader.exists(KEYS[4]), reader.exists(KEYS[5])]
    found["get"] = reader.batch_get_v1(KEYS, indices(range(PAGES)))
    found["equal"] = [
        torch.equal(source.get_data_page(page * PAGE), target.get_data_page(page * PAGE))
        for page in range(PAGES)
    ]
    # Evicted between the look-up and the read: a miss, and nothing of another page.
    found["exists before eviction"] = reader.batch_exists(KEYS)
    evict(writer, KEYS[1])
    found["get after eviction"] = reader.batch_get_v1(KEYS, indices(range(PAGES)))
    found["exists after eviction"] = reader.batch_exists(KEYS)
    writer.clear()
    for each in (writer, reader):
        each.close()
    return found


def check_generic(address: str, layout: str) -> dict[str, Any]:
    """The same in the forms that the controller uses without interface_v1."""
    source, target = host_pool(layout, fill=7), host_pool(layout)
    writer, reader = backend(config(address, v1=0), source), backend(config(address, v1=0), target)
    pages = [source.get_data_page(page * PAGE) for page in range(PAGES)]
    found: dict[str, Any] = {"before": reader.batch_exists(KEYS)}
    found["set"] = [writer.batch_set(KEYS[:4], pages[:4]), writer.set(KEYS[4], pages[4])]
    found["exists"] = reader.batch_exists(KEYS)
    read = reader.batch_get(KEYS, [target.get_dummy_flat_data_page() for _ in KEYS])
    for page, tensor in enumerate(read):
        if tensor is not None:
            target.set_from_flat_data_page(page * PAGE, tensor)
    found["get"] = [tensor is not None for tensor in read]
    found["equal"] = [torch.equal(page, target.get_data_page(at * PAGE)) for at, page in enumerate(pages)]
    found["get one"] = [reader.get(KEYS[4]) is not None, reader.get(KEYS[5]) is None]
    evict(writer, KEYS[1])
    found["get after eviction"] = [tensor is not None for tensor in reader.batch_get(KEYS)]
    writer.clear()
    found["cleared"] = reader.batch_exists(KEYS)
    return found


def check_side_pools(address: str) -> dict[str, Any]:
    """A hybrid model's pools beside the KV cache, through the v2 forms."""
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer

    pools = [
        {name: host_pool("page_first", fill=fill) for name in ("kv", "indexer", "swa")} for fill in (8, 0)
    ]
    writer, reader = (backend(config(address, revision="side"), each["kv"]) for each in pools)
    for storage, each in zip((writer, reader), pools, strict=True):
        for name in ("indexer", "swa"):
            storage.register_mem_host_pool_v2(each[name], name)

    def transfer(name: str, pages: Sequence[int], policy: Any = PoolHitPolicy.ALL_PAGES) -> Any:
        keys = [KEYS[page] for page in pages]
        return PoolTransfer(name=name, host_indices=indices(pages), keys=keys, hit_policy=policy)

    def exists(*transfers: Any) -> list[Any]:
        result = reader.batch_exists_v2(KEYS, list(transfers))
        return [
            result.kv_hit_pages,
            {str(k): v for k, v in result.extra_pool_hit_pages.items()},
            result.restorable_prefix_pages,
        ]

    trailing = transfer("swa", [0, 1], PoolHitPolicy.TRAILING_PAGES)
    found: dict[str, Any] = {"before": exists(transfer("indexer", range(PAGES)))}
    writer.batch_set_v1(KEYS[:5], indices(range(5)))
    found["set"] = writer.batch_set_v2([transfer("indexer", range(4)), transfer("swa", [1, 2])])
    found["exists"] = exists()
    found["exists, all pages"] = exists(transfer("indexer", range(PAGES)))
    found["exists, trailing pages"] = exists(trailing)
    found["exists, both"] = exists(transfer("indexer", range(PAGES)), trailing)
    found["get"] = reader.batch_get_v2([transfer("indexer", range(PAGES)), transfer("swa", [2, 1])])
    source, target = pools
    found["equal"] = [
        torch.equal(
            source["indexer"].get_data_page(page * PAGE), target["indexer"].get_data_page(page * PAGE)
        )
        for page in range(PAGES)
    ]
    found["other places"] = torch.equal(source["swa"].get_data_page(PAGE), target["swa"].get_data_page(PAGE))
    short = transfer("indexer", [0, 1])
    short.host_indices = indices([0])
    found["places that do not fit"] = reader.batch_get_v2([short])
    unknown = transfer("indexer", [0], "of later")
    found["unknown policies"] = [exists(unknown), exists(unknown)]
    groups = []
    for pages, group_pages in ((4, 2), (PAGES, 2), (3, 2), (4, 3), (PAGES, 5), (1, 2)):
        of_groups = transfer("indexer", range(pages), PoolHitPolicy.BLOCK_GROUPS)
        of_groups.block_pages, of_groups.group_pages = 3, group_pages
        groups.append(exists(of_groups))
    found["block groups"] = groups
    writer.clear()
    found["cleared"] = exists(transfer("indexer", range(PAGES)))
    return found


def check_context_parallelism(address: str) -> dict[str, Any]:
    """Ranks that have other tokens of a page, in the pool of KV and in one beside it."""
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer

    prefill = {"attn_cp_size": 2, "tp_size": 1}
    decode = {"dcp_size": 2, "mla": True, "logical_page_size": 2 * PAGE}
    ranks: dict[str, dict[str, Any]] = {
        "none": {},
        "prefill 0": {**prefill, "attn_cp_rank": 0},
        "prefill 1": {**prefill, "attn_cp_rank": 1},
        "decode 0": {**decode, "rank": 0, "dcp_rank": 0},
        "decode 1": {**decode, "rank": 1, "dcp_rank": 1},
    }
    transfer, found = PoolTransfer(name="indexer", host_indices=indices([0]), keys=KEYS[:1]), {}
    for fill, (name, fields) in enumerate(ranks.items(), 11):
        pools = [host_pool("page_first", fill=fill) for _ in range(2)]
        storage = backend(config(address, revision="context", **fields), pools[0])
        storage.register_mem_host_pool_v2(pools[1], "indexer")
        before = storage.batch_get_v1(KEYS[:1], indices([0])) + storage.batch_get_v2([transfer])["indexer"]
        storage.batch_set_v1(KEYS[:1], indices([0]))
        storage.batch_set_v2([transfer])
        after = storage.batch_get_v1(KEYS[:1], indices([0])) + storage.batch_get_v2([transfer])["indexer"]
        found[name] = [before, after]
        storage.close()
    return found


def check_replicated_pools(address: str) -> dict[str, Any]:
    """What a rank finds in a side pool that the first rank alone has written."""
    from sglang.srt.mem_cache import memory_pool_host
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer
    from sglang.srt.mem_cache.pool_host import dsa, mla
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    from kvfs.connectors.sglang import REPLICATED_POOLS

    modules = (memory_pool_host, dsa, mla)
    found: dict[str, Any] = {
        "unknown": [name for name in REPLICATED_POOLS if not any(hasattr(each, name) for each in modules)]
    }
    indexer = type("Indexer", (MHATokenToKVPoolHost, dsa.DSAIndexerPoolHost), {})
    transfer = PoolTransfer(name="indexer", host_indices=indices([0]), keys=KEYS[:1])
    for latent in (True, False):
        for replicated in (True, False):
            hits = []
            for rank in (0, 1):
                side = host_pool("page_first", fill=21)
                side.__class__ = indexer if replicated else MHATokenToKVPoolHost
                storage = backend(
                    config(address, rank=rank, mla=latent, revision="replicated"), host_pool("page_first")
                )
                storage.register_mem_host_pool_v2(side, "indexer")
                if rank == 0:
                    storage.batch_set_v2([transfer])
                hits += storage.batch_get_v2([transfer])["indexer"]
                storage.close()
            found[f"latent {latent}, replicated {replicated}"] = hits
    return found


def evict(storage: Any, key: str) -> None:
    from kvfs.connectors.common import string_keys

    namespace = storage._namespaces[storage._used]
    assert storage._link.blocks(namespace).remove(string_keys(namespace, [key])) == 1


def check_namespaces(address: str) -> dict[str, Any]:
    """What decides the bytes besides the key sets pages apart."""
    others = {
        "same": (config(address), host_pool("page_first")),
        "other rank": (config(address, rank=1), host_pool("page_first")),
        "other weights": (config(address, revision="2"), host_pool("page_first")),
        "other dtype": (config(address), host_pool("page_first", dtype=torch.float16)),
        "other layout": (config(address), host_pool("page_first_direct")),
    }
    writer = backend(config(address), host_pool("page_first", fill=2))
    writer.clear()
    writer.batch_set_v1(KEYS, indices(range(PAGES)))
    found = {name: backend(*each).batch_exists(KEYS) for name, each in others.items()}
    other_rank = backend(config(address, rank=1), host_pool("page_first", fill=3))
    other_rank.batch_set_v1(KEYS[:2], indices([0, 1]))
    writer.clear()
    found["cleared"] = writer.batch_exists(KEYS)
    found["other rank, not cleared"] = other_rank.batch_exists(KEYS)
    latent = [
        backend(config(address, rank=rank, mla=True), host_pool("page_first", fill=4)) for rank in (0, 1)
    ]
    latent[0].batch_set_v1(KEYS[:1], indices([0]))
    found["MLA, other rank"] = latent[1].batch_exists(KEYS)
    return found


def check_weights(address: str) -> dict[str, Any]:
    """SGLang's own name for its weights changes with an update: nothing until the clear, then pages of its own."""
    from sglang.srt import runtime_context

    serving = runtime_context._ConfigBag("serving")
    serving._set("weight_version", "default")
    runtime_context._CONTEXT._config_bags = {"serving": serving}
    try:
        pool = host_pool("page_first", fill=9)
        updated, other = (backend(config(address, revision="updates"), pool) for _ in range(2))
        found: dict[str, Any] = {"set": updated.batch_set_v1(KEYS[:3], indices([0, 1, 2]))}
        serving._set("weight_version", "step 1")
        found["updated"] = [updated.batch_exists(KEYS), updated.batch_get_v1(KEYS[:1], indices([5]))]
        found["set, updated"] = updated.batch_set_v1(KEYS[3:4], indices([3]))
        serving._set("weight_version", "default")  # the other engine's, which has no part in it
        found["another engine"] = other.batch_exists(KEYS)
        serving._set("weight_version", "step 1")
        updated.clear()
        found["cleared"] = updated.batch_exists(KEYS)
        found["set, cleared"] = updated.batch_set_v1(KEYS[:2], indices([4, 5]))
        found["exists, cleared"] = updated.batch_exists(KEYS)
        serving._set("weight_version", "default")
        found["another engine, cleared"] = other.batch_exists(KEYS)
    finally:
        runtime_context._CONTEXT._config_bags = None
    return found


def check_outage(address: str) -> dict[str, Any]:
    """An address without a service: misses, no exception."""
    pool = host_pool("page_first", fill=5)
    storage = backend(config("/nowhere/kvfs.sock"), pool)
    return {
        "exists": storage.batch_exists(KEYS),
        "set": storage.batch_set_v1(KEYS, indices(range(PAGES))),
        "get": storage.batch_get_v1(KEYS, indices(range(PAGES))),
        "generic": [storage.batch_set(KEYS[:1], [pool.get_data_page(0)]), storage.get(KEYS[0]) is None],
    }


def check_mooncake(address: str) -> dict[str, Any]:
    """SGLang's own MooncakeStore, whose import is changed."""
    import kvfs.compat.mooncake

    sys.modules["mooncake"] = ModuleType("mooncake")
    sys.modules["mooncake.store"] = kvfs.compat.mooncake
    from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

    source, target = host_pool("page_first", fill=6), host_pool("page_first")
    stores = []
    for pool in (source, target):
        store = MooncakeStore(config(address), pool)
        store.register_mem_pool_host(pool)
        stores.append(store)
    writer, reader = stores
    found: dict[str, Any] = {"before": reader.batch_exists(KEYS)}
    found["set"] = writer.batch_set_v1(KEYS[:4], indices(range(4)))
    found["exists"] = reader.batch_exists(KEYS)
    found["get"] = reader.batch_get_v1(KEYS, indices(range(PAGES)))
    found["equal"] = [
        torch.equal(source.get_data_page(page * PAGE), target.get_data_page(page * PAGE))
        for page in range(PAGES)
    ]
    writer.clear()
    found["cleared"] = reader.batch_exists(KEYS)
    return found


def main() -> None:
    logging.basicConfig()
    logging.getLogger("sglang").setLevel(logging.INFO)
    address = json.loads(sys.stdin.readline())["address"]
    assert not transformers.utils.is_torchvision_available()
    sys.meta_path.append(_StandIns())
    reply = {layout: check_layout(address, layout) for layout in LAYOUTS}
    reply |= {f"generic {layout}": check_generic(address, layout) for layout in LAYOUTS}
    reply |= {
        "namespaces": check_namespaces(address),
        "side pools": check_side_pools(address),
        "context parallelism": check_context_parallelism(address),
        "replicated pools": check_replicated_pools(address),
        "weights": check_weights(address),
        "outage": check_outage(address),
        "mooncake": check_mooncake(address),
    }
    with open(sys.argv[1], "w") as file:
        json.dump(reply, file)


if __name__ == "__main__":
    main()
