"""`KVFSHiCache`: SGLang's HiCache on kvfs, as its `dynamic` storage backend.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvfs",
        "module_path": "kvfs.connectors.sglang", "class_name": "KVFSHiCache", "interface_v1": 1,
        "address": "/mnt/kvfs"}'

Responsibility: HiCacheStorage over blocks. With `interface_v1` pages are copied straight between SGLang's host pool and
the store; without it each goes through a tensor of its own. Page keys are SGLang's (a hash over the prefix); what they
leave out is the namespace: weights, the host pool's layout and element type, page size, and the rank where ranks
differ. A page's parent is the page before it, so that no page is evicted before those that follow it.

Invariants: nothing raises for what the store does: a page is there, whole, or it is a miss. Until the host pool is
registered nothing is there. Concurrency: SGLang's prefetch, backup and scheduler threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from kvfs.blocks import Blocks
from kvfs.connectors.common import (
    Link,
    address_of,
    chain_parents,
    memory_at,
    model_revision,
    string_keys,
    string_namespace,
)
from kvfs.namespaces import Namespace

T = TypeVar("T")

PIECES, FLAT = "pieces", "flat"
"""The order of a page's bytes: as the pool lists its pieces of memory (the v1 forms), or as a tensor of the page
(the others). They differ for the layout `layer_first`, so each form has a namespace of its own."""


class KVFSHiCache(HiCacheStorage):  # type: ignore[misc]
    """See the module's header. `extra_config` may name `address` and `revision` (which weights)."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self._config = storage_config
        self._extra = dict(storage_config.extra_config or {})
        self._link = Link(address_of(self._extra), name="sglang")
        self._revision = model_revision(str(storage_config.model_name or ""), self._extra.get("revision"))
        self._namespaces: dict[str, Namespace] = {}
        self._used = PIECES if self._extra.get("interface_v1") else FLAT
        self._page_bytes = 0

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Raises InvalidRequest, InvalidNamespace for what cannot be described."""
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

    # --- pages in the host pool ---------------------------------------------------------------------------
    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        places = self._places(keys, host_indices)
        missed = [-1] * len(keys)
        sizes = self._do(PIECES, lambda blocks, digests: blocks.get_into(digests, places), keys, missed)
        return [size == self._page_bytes for size in sizes]

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._put(PIECES, keys, self._places(keys, host_indices), extra_info)

    def _places(self, keys: Sequence[str], host_indices: Any) -> list[list[Any]]:
        """The pieces of host memory that each page is spread over."""
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
        """Each page in its target, flat; None for a miss. Without targets, tensors of bytes."""
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

    # --- what is there ------------------------------------------------------------------------------------
    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many pages are there without a gap from the first on."""
        return self._do(self._used, lambda blocks, digests: blocks.match(digests, timeout_s=0), keys, 0)

    def clear(self) -> None:
        """Remove every page of these weights, this pool and this rank."""
        for namespace in self._namespaces.values():
            self._link.clear(namespace)

    def close(self) -> None:
        self._link.close()

    def _put(self, form: str, keys: Sequence[str], places: Sequence[Any], extra_info: Any) -> list[bool]:
        if not self._link.is_up:
            return [False] * len(keys)
        before = (getattr(extra_info, "prefix_keys", None) or [None])[-1]

        def put(blocks: Blocks, digests: list[bytes]) -> list[bool]:
            parent = string_keys(self._namespaces[form], [before])[0] if before is not None else None
            blocks.put(digests, places, chain_parents(digests, parent))
            return [True] * len(digests)

        return self._do(form, put, keys, [False] * len(keys))

    def _do(
        self, form: str, call: Callable[[Blocks, list[bytes]], T], keys: Sequence[str], otherwise: T
    ) -> T:
        namespace = self._namespaces.get(form)
        blocks = None if namespace is None else self._link.open(namespace)
        if namespace is None or blocks is None or not keys:
            return otherwise
        return self._link.attempt(lambda: call(blocks, string_keys(namespace, keys)), otherwise)
