"""`KVFSHiCache`: SGLang's HiCache on kvfs, as its `dynamic` storage backend.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvfs",
        "module_path": "kvfs.connectors.sglang", "class_name": "KVFSHiCache", "interface_v1": 1,
        "address": "/mnt/kvfs"}'

Responsibility: HiCacheStorage over blocks, its v2 forms for the side pools of hybrid models included. With
`interface_v1` pages are copied straight between SGLang's host pool and the store; without it each goes through a tensor
of its own. SGLang's page keys are hashes over the prefix; the namespace adds the weights, the host pool's layout and
element type, page size, and the rank where ranks differ. A page's parent is the page before it, so that no page is
evicted before those that follow it.

Weights: identified by their files, and by SGLang's name for them (`weight_version`). After an update to another name
everything misses until `clear`, since pages of the old weights may be under way; then keys are of an epoch that no
other engine has. An update without a new name is not detected.

Invariants: no failure of the store raises: a page is there, whole, or it is a miss. Everything misses until the host
pool is registered. Concurrency: SGLang's prefetch, backup and scheduler threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult
from sglang.srt.runtime_context import get_serving

from kvfs.client.blocks import Blocks
from kvfs.connectors.common import (
    SGLANG_LOG,
    Link,
    address_of,
    chain_parents,
    memory_at,
    model_revision,
    new_epoch,
    string_keys,
    string_namespace,
)
from kvfs.limits import CONNECTOR_MATCH_S
from kvfs.namespaces import Namespace

T = TypeVar("T")
log = logging.getLogger(SGLANG_LOG)

PIECES, FLAT = "pieces", "flat"
"""The order of a page's bytes: as the pool lists its pieces of memory (the v1 forms), or as a tensor of the page
(the others). They differ for the layout `layer_first`, so each form has a namespace of its own."""

REPLICATED_POOLS = frozenset(
    ("MLATokenToKVPoolHost", "DSAIndexerPoolHost", "DeepSeekV4PagedHostPool", "DeepSeekV4StateHostPool")
)
"""Classes of side pools that are equal on all tensor-parallel ranks of a model with MLA: no heads are divided, and
SGLang has the first rank alone write them (0.5.23, `should_backup` and `is_storage_writer`). All others are by rank."""


class KVFSHiCache(HiCacheStorage):  # type: ignore[misc]
    """Store HiCache's pages as blocks. `extra_config` may name `address` and `revision` (of the weights)."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self._config = storage_config
        self._extra = dict(storage_config.extra_config or {})
        self._link = Link(address_of(self._extra), name="sglang", log=log)
        self._revision = model_revision(str(storage_config.model_name or ""), self._extra.get("revision"))
        self._namespaces: dict[str, Namespace] = {}
        self._used = PIECES if self._extra.get("interface_v1") else FLAT
        self._page_bytes = 0
        self._weights, self._epoch = _weight_version(), ""
        self._is_right = True
        self._unknown_policies: set[Any] = set()
        """Those that the log has named."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Begin with the engine's pool. Raises InvalidRequest, InvalidNamespace for what cannot be described."""
        super().register_mem_pool_host(mem_pool_host)
        self._page_bytes = mem_pool_host.page_size * mem_pool_host.get_size_per_token()
        self._namespaces = {form: self._describe(mem_pool_host, form) for form in (PIECES, FLAT)}
        self._link.open(self._namespaces[self._used])

    def _describe(self, pool: Any, form: str) -> Namespace:
        config = self._config
        ranks = {
            "pp": f"{config.pp_rank}/{config.pp_size}",
            "cp": f"{config.attn_cp_rank}/{config.attn_cp_size}",
        }
        if config.dcp_size > 1:
            ranks["dcp"] = f"{config.dcp_rank}/{config.dcp_size} of {config.tp_size}"
        elif not config.is_mla_model:  # with MLA all ranks hold the same bytes, and one writes them
            ranks["tp"] = f"{config.tp_rank}/{config.tp_size}"
        shape = "x".join(
            str(getattr(pool, name, "-")) for name in ("layer_num", "head_num", "head_dim", "v_head_dim")
        )
        return string_namespace(
            "sglang page hash",
            {
                "revision": self._revision,
                "pool": type(pool).__name__,
                "layout": str(pool.layout),
                "dtype": str(pool.dtype),
                "page": f"{pool.page_size} tokens, {self._page_bytes} bytes",
                "shape": shape,
                "form": form,
                "tag": str(self._extra.get("extra_backend_tag", "")),
                **ranks,
            },
        )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Register a pool beside the anchor, in a namespace of its own. Raises as `register_mem_pool_host`."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        page = host_pool.get_dummy_flat_data_page()
        self._namespaces[_side(host_pool_name)] = string_namespace(
            "sglang side page hash",
            {
                "revision": self._revision,
                "side": str(host_pool_name),
                "pool": type(host_pool).__name__,
                "layout": str(getattr(host_pool, "layout", "-")),
                "page": f"{getattr(host_pool, 'page_size', 1)} tokens, {page.nbytes} bytes of {page.dtype}",
                "tag": str(self._extra.get("extra_backend_tag", "")),
                "rank": f"{self._tensor_rank(host_pool)} {self._config.pp_rank}/{self._config.pp_size}",
                **_context_ranks(self._config),
            },
        )

    def _tensor_rank(self, host_pool: Any) -> str:
        """Return the tensor-parallel rank whose bytes a side pool holds, `all` where each rank has the same."""
        names = {base.__name__ for base in type(host_pool).__mro__}
        if self._config.is_mla_model and names & REPLICATED_POOLS:
            return "all"
        return f"{self._config.tp_rank}/{self._config.tp_size}"

    # --- pages in the host pool ---------------------------------------------------------------------------
    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        places = self._places(keys, host_indices)
        missed = [-1] * len(keys)
        sizes = self._do(PIECES, lambda blocks, digests: blocks.get_into(digests, places), keys, missed)
        return [size == self._page_bytes for size in sizes]

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._put(PIECES, keys, self._places(keys, host_indices), extra_info)

    def _places(self, keys: Sequence[str], host_indices: Any) -> list[list[Any]]:
        """Return the pieces of host memory that each page is spread over."""
        pointers, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        each = len(pointers) // max(len(keys), 1)
        return [
            memory_at(pointers[at : at + each], sizes[at : at + each])
            for at in range(0, each * len(keys), each or 1)
        ]

    # --- pages as tensors ---------------------------------------------------------------------------------
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Return each page in its target, flat; None for a miss. Without targets, tensors of bytes."""
        targets: list[torch.Tensor] = [
            target if target is not None else torch.empty(self._page_bytes, dtype=torch.uint8)
            for target in target_locations or [None] * len(keys)
        ]
        places, missed = [target.view(torch.uint8) for target in targets], [-1] * len(keys)
        sizes = self._do(FLAT, lambda blocks, digests: blocks.get_into(digests, places), keys, missed)
        return [t if size == t.nbytes else None for t, size in zip(targets, sizes, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        pages = [value.contiguous().view(-1).view(torch.uint8) for value in values]
        return all(self._put(FLAT, keys, pages, None))

    # --- side pools ---------------------------------------------------------------------------------------
    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Read pages of each pool; return which were hits, by the pool's name."""
        return {transfer.name: self._get_side(transfer) for transfer in transfers}

    def _get_side(self, transfer: Any) -> list[bool]:
        pool, keys, places = self._side_pages(transfer)
        pages = [pool.get_dummy_flat_data_page() for _ in places]
        buffers, missed = [page.view(torch.uint8) for page in pages], [-1] * len(keys)
        if not pages:
            return [False] * len(keys)
        form = _side(transfer.name)
        sizes = self._do(form, lambda blocks, digests: blocks.get_into(digests, buffers), keys, missed)
        came = [size == page.nbytes for size, page in zip(sizes, pages, strict=True)]
        for place, page, is_there in zip(places, pages, came, strict=True):
            if is_there:
                pool.set_from_flat_data_page(place, page)
        return came

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of each pool; return which were stored, by the pool's name."""
        return {transfer.name: self._set_side(transfer) for transfer in transfers}

    def _set_side(self, transfer: Any) -> list[bool]:
        pool, keys, places = self._side_pages(transfer)
        pages = [pool.get_data_page(place, flat=True).contiguous().view(torch.uint8) for place in places]
        return self._put(_side(transfer.name), keys, pages, None) if pages else [False] * len(keys)

    def _side_pages(self, transfer: Any) -> tuple[Any, list[str], list[int]]:
        """Return the pool, keys, and the start of each page; no starts where their number does not fit the keys."""
        pool, keys = self.registered_pools[transfer.name], list(transfer.keys or [])
        page_size, indices = getattr(pool, "page_size", 1) or 1, transfer.host_indices
        if indices is None or indices.numel() != len(keys) * page_size:
            return pool, keys, []
        return pool, keys, indices[::page_size].tolist()

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[Any] | None = None, extra_info: Any = None
    ) -> Any:
        """Return the longest prefix of which KV and every side pool have the pages that its policy wants; none where a
        policy is unknown. A pool of block groups says how many pages these cover, and bounds no prefix."""
        pages = self.batch_exists(keys, extra_info)
        hits, restorable = ({PoolName.KV: pages} if pages else {}), set(range(1, pages + 1))
        for transfer in pool_transfers or []:
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                if covered := self._covered(transfer):
                    hits[transfer.name] = covered
                continue
            nothing: list[bool] = [False] * pages
            there = self._do(
                _side(transfer.name),
                lambda blocks, digests: blocks.exists(digests, timeout_s=CONNECTOR_MATCH_S),
                keys[:pages],
                nothing,
            )
            lengths = _restorable(transfer, there)
            if lengths is None:
                self._warn_of_policy(transfer)
                lengths = set()
            if lengths:
                hits[transfer.name] = max(lengths)
            restorable &= lengths
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def _covered(self, transfer: Any) -> int:
        """Return how many pages of KV a pool's leading whole groups of keys cover."""
        keys, group = list(transfer.keys or ()), max(transfer.group_pages, 1)
        there = self._do(
            _side(transfer.name),
            lambda blocks, digests: blocks.match(digests, timeout_s=CONNECTOR_MATCH_S),
            keys,
            0,
        )
        return int(there // group * transfer.block_pages)

    def _warn_of_policy(self, transfer: Any) -> None:
        if transfer.hit_policy not in self._unknown_policies:
            self._unknown_policies.add(transfer.hit_policy)
            log.warning(
                "HiCache pool %s: hit policy %s is not supported, its requests find nothing (logged once)",
                transfer.name,
                transfer.hit_policy,
            )

    # --- what is there ------------------------------------------------------------------------------------
    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many pages are there without a gap from the first on."""
        return self._do(
            self._used, lambda blocks, digests: blocks.match(digests, timeout_s=CONNECTOR_MATCH_S), keys, 0
        )

    def clear(self) -> None:
        """Remove every page of these weights, this pool and this rank; after an update of the weights, begin an epoch
        and remove nothing."""
        if not self._has_right_weights():
            self._weights, self._epoch, self._is_right = _weight_version(), new_epoch(), True
            return
        for namespace in self._namespaces.values():
            self._link.clear(namespace)

    def close(self) -> None:
        self._link.close()

    def _put(self, form: str, keys: Sequence[str], places: Sequence[Any], extra_info: Any) -> list[bool]:
        if not self._link.is_up:
            return [False] * len(keys)
        before = (getattr(extra_info, "prefix_keys", None) or [None])[-1]

        def put(blocks: Blocks, digests: list[bytes]) -> list[bool]:
            parent = (
                string_keys(self._namespaces[form], [before], self._epoch)[0] if before is not None else None
            )
            blocks.put(digests, places, chain_parents(digests, parent))
            return [True] * len(digests)

        return self._do(form, put, keys, [False] * len(keys))

    def _do(
        self, form: str, call: Callable[[Blocks, list[bytes]], T], keys: Sequence[str], otherwise: T
    ) -> T:
        namespace = self._namespaces.get(form)
        blocks = None if namespace is None else self._link.open(namespace)
        if namespace is None or blocks is None or not keys or not self._has_right_weights():
            return otherwise
        digests = string_keys(namespace, keys, self._epoch)
        return self._link.attempt(lambda: call(blocks, digests), otherwise)

    def _has_right_weights(self) -> bool:
        """Return whether the weights still have their name of the start, or of the last `clear` after an update."""
        if self._is_right and _weight_version() != self._weights:
            self._is_right = False
            log.error(
                "the weights were updated to %r: nothing is loaded or stored until the storage backend is cleared",
                _weight_version(),
            )
        return self._is_right


def _weight_version() -> str:
    """Return SGLang's name for its weights; empty in a process without one."""
    try:
        return str(get_serving().weight_version)
    except (AttributeError, ValueError):
        return ""


def _context_ranks(config: Any) -> dict[str, str]:
    """Return the ranks of prefill and decode context parallelism, where there are any: each has its part of a page."""
    ranks = {"cp": (config.attn_cp_rank, config.attn_cp_size), "dcp": (config.dcp_rank, config.dcp_size)}
    return {name: f"{rank}/{size}" for name, (rank, size) in ranks.items() if size > 1}


def _side(name: Any) -> str:
    return f"side {name}"


def _restorable(transfer: Any, there: Sequence[bool]) -> set[int] | None:
    """Return the lengths of prefixes for which a pool has what its hit policy wants; None for an unknown policy."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        wanted = len(there)
    elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        wanted = max(1, len(transfer.keys or ()))
    else:
        return None
    return {n for n in range(1, len(there) + 1) if all(there[max(0, n - wanted) : n])}
