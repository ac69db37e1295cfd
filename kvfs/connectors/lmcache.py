"""LMCache on kvfs: `KVFSConnector`, a remote backend, and `KVFSL2Adapter`, a second level of its distributed storage.

    remote_url: "external://localhost:0/kvfs.connectors.lmcache/?connector_name=KVFSConnector"
    extra_config: {kvfs_address: /mnt/kvfs}

    {"type": "plugin", "module_path": "kvfs.connectors.lmcache", "class_name": "KVFSL2Adapter",
     "adapter_params": {"address": "/mnt/kvfs"}}

Responsibility: LMCache's two interfaces over blocks. LMCache's keys name model, rank, element type and a hash over the
prefix; the namespace adds the weights, and the shapes and format of a chunk. A value has the form of LMCache's own
connectors: the chunk, after its description where `save_chunk_meta` is set.

Invariants: no failure of the store raises: a chunk is there, whole, or it is a miss. A chunk that was looked up and
locked stays readable until it is unlocked: a lease, which ends with this process. Concurrency: LMCache's event loop
and controller threads; copies run on threads of their own and drop the GIL.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform.event_notifier import create_event_notifier
from lmcache.v1.protocol import RemoteMetadata
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from kvfs._native.blocks.reader import View
from kvfs.client.blocks import Blocks
from kvfs.connectors.common import (
    Link,
    address_of,
    digest_keys,
    model_revision,
    string_keys,
    string_namespace,
)
from kvfs.errors import InvalidRequest
from kvfs.limits import CONNECTOR_LOCKS, CONNECTOR_MATCH_S, CONNECTOR_SIZES, CONNECTOR_THREADS

T = TypeVar("T")
Chunks = list[Any]


class KVFSConnector(RemoteConnector):  # type: ignore[misc]
    """Keep LMCache's chunks remotely. `extra_config` may name `kvfs_address` and `kvfs_revision` (of the weights)."""

    def __init__(self, loop: Any, local_cpu_backend: Any, config: Any) -> None:
        super().__init__(local_cpu_backend.config, local_cpu_backend.metadata)
        metadata, extra = local_cpu_backend.metadata, dict(getattr(config, "extra_config", None) or {})
        self._cpu = local_cpu_backend
        self._link = Link(address_of(extra, "kvfs_address"), name="lmcache", log=init_logger("lmcache.kvfs"))
        self._namespace = string_namespace(
            "lmcache chunk key",
            {
                "revision": model_revision(str(metadata.model_name), extra.get("kvfs_revision")),
                "shapes": str([tuple(shape) for shape in self.meta_shapes]),
                "dtypes": str(self.meta_dtypes),
                "format": str(self.meta_fmt),
                "described": str(self.save_chunk_meta),
            },
        )
        self._link.open(self._namespace)

    # --- what is there ------------------------------------------------------------------------------------
    async def exists(self, key: Any) -> bool:
        return self.exists_sync(key)

    def exists_sync(self, key: Any) -> bool:
        return self._match([key]) == 1

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        return self._match(keys)

    def _match(self, keys: Sequence[Any]) -> int:
        """Match in shared memory, in microseconds, so that the event loop may call it."""
        return self._do(lambda blocks, digests: blocks.match(digests, timeout_s=CONNECTOR_MATCH_S), keys, 0)

    # --- reading ------------------------------------------------------------------------------------------
    async def get(self, key: Any) -> Any:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: list[Any]) -> list[Any]:
        return await asyncio.to_thread(self._get, keys)

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[Any]) -> list[Any]:
        """Return chunks up to the first miss."""
        found = await self.batched_get(keys)
        hits = next((i for i, chunk in enumerate(found) if chunk is None), len(found))
        for chunk in found[hits:]:
            if chunk is not None:
                chunk.ref_count_down()
        return found[:hits]

    def _get(self, keys: Sequence[Any]) -> list[Any]:
        missed: list[View | None] = [None] * len(keys)
        views = self._do(lambda blocks, digests: blocks.get(digests), keys, missed)
        chunks: Chunks = []
        for view in views:
            if view is None:
                chunks.append(None)
            else:
                with view:
                    chunks.append(self._chunk_of(np.frombuffer(memoryview(view), dtype=np.uint8)))
        return chunks

    def _chunk_of(self, value: np.ndarray[Any, Any]) -> Any:
        """Copy a value into a chunk of LMCache's memory; return None where that has no room."""
        if not self.save_chunk_meta:
            chunk = self._cpu.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt)
            if chunk is None:
                return None
            np.copyto(np.frombuffer(chunk.byte_array, dtype=np.uint8)[: len(value)], value)
            return self.reshape_partial_chunk(chunk, len(value))
        start = self.remote_metadata_bytes
        described = RemoteMetadata.deserialize(value[:start].tobytes())
        chunk = self._cpu.allocate(described.shapes, described.dtypes, described.fmt)
        if chunk is not None:
            np.copyto(np.frombuffer(chunk.byte_array, dtype=np.uint8), value[start:])
        return chunk

    # --- writing ------------------------------------------------------------------------------------------
    async def put(self, key: Any, memory_obj: Any) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: list[Any], memory_objs: list[Any]) -> None:
        if self._link.is_up:
            values = [self._value_of(chunk) for chunk in memory_objs]
            await asyncio.to_thread(
                self._do, lambda blocks, digests: blocks.put(digests, values), keys, [False] * len(keys)
            )

    def _value_of(self, chunk: Any) -> list[Any]:
        data = chunk.byte_array
        if not self.save_chunk_meta:
            return [data]
        described = RemoteMetadata(
            len(data), chunk.get_shapes(), chunk.get_dtypes(), chunk.get_memory_format()
        )
        return [described.serialize(), data]

    # --- the rest -----------------------------------------------------------------------------------------
    def remove_sync(self, key: Any) -> bool:
        return self._do(lambda blocks, digests: blocks.remove(digests), [key], 0) == 1

    async def close(self) -> None:
        self._link.close()

    def _do(self, call: Callable[[Blocks, list[bytes]], T], keys: Sequence[Any], otherwise: T) -> T:
        blocks = self._link.blocks(self._namespace)
        if blocks is None or not keys:
            return otherwise
        digests = string_keys(self._namespace, [key.to_string() for key in keys])
        return self._link.attempt(lambda: call(blocks, digests), otherwise)

    async def list(self) -> Sequence[str]:
        """Refuse with InvalidRequest: the store keeps digests of LMCache's keys, not the keys."""
        raise InvalidRequest("kvfs keeps digests of LMCache's keys and cannot list these")


class KVFSL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Keep LMCache's objects as a second level. `adapter_params`: `address`, and `revision`, a name for the weights and
    for all else that the engines must share: LMCache's keys name no adapter."""

    def __init__(self, params: dict[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        if not params.get("revision"):
            raise InvalidRequest("adapter_params: revision is missing; it names the weights of the chunks")
        self._namespace = string_namespace("lmcache object key", {"revision": str(params["revision"])})
        self._log = init_logger("lmcache.kvfs")
        self._link = Link(address_of(params), name="lmcache-l2", log=self._log)
        self._link.open(self._namespace)
        self._store_done, self._lookup_done, self._load_done = (create_event_notifier() for _ in range(3))
        self._workers = ThreadPoolExecutor(CONNECTOR_THREADS, thread_name_prefix="kvfs-l2")
        self._lock = threading.Lock()
        self._next_task = 0
        self._stored: dict[int, Any] = {}
        self._found: dict[int, Any] = {}
        self._loaded: dict[int, Any] = {}
        self._locked: dict[bytes, list[View]] = {}
        self._sizes: dict[bytes, int] = {}
        """What LMCache's usage has of the chunks that this adapter has stored, CONNECTOR_SIZES of them."""

    def get_store_event_fd(self) -> int:
        return int(self._store_done.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._lookup_done.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._load_done.fileno())

    # --- store --------------------------------------------------------------------------------------------
    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        failed = L2StoreResult(False, 0)
        return self._submit(lambda: self._store(keys, objects), failed, self._stored, self._store_done)

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        with self._lock:
            stored = dict(self._stored)
            self._stored.clear()
        return stored

    def _store(self, keys: list[Any], objects: list[Any]) -> Any:
        values = [chunk.byte_array for chunk in objects]
        blocks = self._link.blocks(self._namespace)
        if blocks is None or not self._link.is_up:
            return L2StoreResult(False, 0)
        failed: list[bool] | None = None
        digests = self._digests(keys)
        new = self._link.attempt(lambda: blocks.put(digests, values), failed)
        if new is None:
            return L2StoreResult(False, 0)
        stored = [
            (key, digest, len(value))
            for key, digest, value, is_new in zip(keys, digests, values, new, strict=True)
            if is_new
        ]
        self._note_stored(stored)
        return L2StoreResult(True, sum(size for _, _, size in stored))

    def _note_stored(self, stored: list[tuple[Any, bytes, int]]) -> None:
        """Tell LMCache of chunks, but for those that the store had evicted since it was told."""
        with self._lock:
            told = [each for each in stored if each[1] not in self._sizes]
            self._sizes.update({digest: size for _, digest, size in told})
            while len(self._sizes) > CONNECTOR_SIZES:
                del self._sizes[next(iter(self._sizes))]
        if told:
            self._notify_keys_stored([key for key, _, _ in told], [size for _, _, size in told])

    # --- look-up ------------------------------------------------------------------------------------------
    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Any) -> int:
        return self._submit(lambda: self._look_up(keys), Bitmap(len(keys)), self._found, self._lookup_done)

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._take(self._found, task_id)

    def _look_up(self, keys: list[Any]) -> Any:
        """Find chunks and lock CONNECTOR_LOCKS at most; others may be evicted before their load, which then misses."""
        bitmap = Bitmap(len(keys))
        blocks = self._link.blocks(self._namespace)
        if blocks is None:
            return bitmap
        digests = self._digests(keys)
        nothing: list[bool] = [False] * len(keys)
        hits = self._link.attempt(lambda: blocks.exists(digests), nothing)
        room = CONNECTOR_LOCKS - sum(map(len, list(self._locked.values())))
        wanted = [digest for digest, hit in zip(digests, hits, strict=True) if hit][: max(room, 0)]
        missed: list[View | None] = [None] * len(wanted)
        for digest, view in zip(wanted, self._link.attempt(lambda: blocks.get(wanted), missed), strict=True):
            if view is None:
                hits[digests.index(digest)] = False
            else:
                with self._lock:
                    self._locked.setdefault(digest, []).append(view)
        for i, hit in enumerate(hits):
            if hit:
                bitmap.set(i)
        return bitmap

    def submit_unlock(self, keys: list[Any]) -> None:
        for digest in self._digests(keys):
            with self._lock:
                views = self._locked.get(digest, [])
                view = views.pop() if views else None
                if not views:
                    self._locked.pop(digest, None)
            if view is not None:
                with suppress(BufferError):  # being copied: released when that ends
                    view.release()

    # --- load ---------------------------------------------------------------------------------------------
    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        missed = Bitmap(len(keys))
        return self._submit(lambda: self._load(keys, objects), missed, self._loaded, self._load_done)

    def query_load_result(self, task_id: int) -> Any:
        return self._take(self._loaded, task_id)

    def _load(self, keys: list[Any], objects: list[Any]) -> Any:
        bitmap = Bitmap(len(keys))
        digests, places = self._digests(keys), [chunk.byte_array for chunk in objects]
        rest = []
        for i, digest in enumerate(digests):
            if self._copy_locked(digest, places[i]):
                bitmap.set(i)
            else:
                rest.append(i)
        blocks = self._link.blocks(self._namespace)
        if blocks is None or not rest:
            return bitmap
        missed = [-1] * len(rest)
        sizes = self._link.attempt(
            lambda: blocks.get_into([digests[i] for i in rest], [places[i] for i in rest]), missed
        )
        for i, size in zip(rest, sizes, strict=True):
            if size == len(places[i]):
                bitmap.set(i)
        return bitmap

    def _copy_locked(self, digest: bytes, place: Any) -> bool:
        """Copy a locked chunk, whether the store still has it or not; return whether it is locked."""
        with self._lock:
            views = self._locked.get(digest)
            locked = memoryview(views[-1]) if views else None
        if locked is None or len(locked) != len(place):
            return False
        np.copyto(np.frombuffer(place, dtype=np.uint8), np.frombuffer(locked, dtype=np.uint8))
        return True

    # --- the rest -----------------------------------------------------------------------------------------
    def delete(self, keys: list[Any]) -> None:
        """Remove chunks, and tell LMCache that they are gone, also where the store had evicted them."""
        blocks, digests = self._link.blocks(self._namespace), self._digests(keys)
        if blocks is None or not keys or self._link.attempt(lambda: blocks.remove(digests), -1) < 0:
            return
        with self._lock:
            sizes = [self._sizes.pop(digest, 0) for digest in digests]
        self._notify_keys_deleted(keys, sizes)

    def report_status(self) -> dict[str, Any]:
        return {"is_healthy": self._link.is_up, "type": type(self).__name__, "locked": len(self._locked)}

    def close(self) -> None:
        self._workers.shutdown(wait=True, cancel_futures=True)
        for views in self._locked.values():
            for view in views:
                view.release()
        self._locked.clear()
        self._link.close()
        for done in (self._store_done, self._lookup_done, self._load_done):
            done.close()

    def _submit(self, do: Callable[[], Any], otherwise: Any, results: dict[int, Any], done: Any) -> int:
        """Do a task on a thread; its result is `otherwise` where it fails: LMCache waits for each task."""
        with self._lock:
            task_id = self._next_task
            self._next_task += 1

        def run() -> None:
            try:
                result = do()
            except Exception:
                self._log.exception("a task of LMCache failed")
                result = otherwise
            with self._lock:
                results[task_id] = result
            done.notify()

        self._workers.submit(run)
        return task_id

    def _take(self, results: dict[int, Any], task_id: int) -> Any:
        with self._lock:
            return results.pop(task_id, None)

    def _digests(self, keys: Sequence[Any]) -> list[bytes]:
        return digest_keys(self._namespace, [_key_bytes(key) for key in keys])


def _key_bytes(key: Any) -> bytes:
    """Encode all fields of an ObjectKey; the hash, the only one that may hold any byte, comes last."""
    fields = f"{key.model_name}\0{key.kv_rank}\0{key.object_group_id}\0{key.cache_salt}\0"
    return fields.encode() + bytes(key.chunk_hash)
