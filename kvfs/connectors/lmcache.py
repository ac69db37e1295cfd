"""LMCache on kvfs: `KVFSConnector`, a remote backend, and `KVFSL2Adapter`, a second level of its distributed storage.

    remote_url: "external://localhost:0/kvfs.connectors.lmcache/?connector_name=KVFSConnector"
    extra_config: {kvfs_address: /mnt/kvfs}

    {"type": "plugin", "module_path": "kvfs.connectors.lmcache", "class_name": "KVFSL2Adapter",
     "adapter_params": {"address": "/mnt/kvfs"}}

Responsibility: LMCache's two interfaces over blocks. To the remote backend LMCache's keys name model, rank, element
type and a hash over the prefix; the namespace adds the weights, and the shapes and format of a chunk. A value has the
form of LMCache's own connectors: the chunk, after its description where `save_chunk_meta` is set. The second level has
a chunk as one object of each object group (full attention, a sliding window, recurrent states), each of a size of its
own; its keys are those of `lmcache_rules.object_keys`, its values are the objects.

Invariants: no failure of the store raises: a chunk is there, whole, or it is a miss, of each key for itself. A chunk
that was looked up and locked stays readable until it is unlocked: a lease, which ends with this process. Concurrency:
LMCache's event loop and controller threads; copies run on threads of their own and drop the GIL.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

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
from kvfs.connectors.lmcache_rules.object_keys import Layout, Name, ObjectKeys, layout_of, object_layout
from kvfs.connectors.lmcache_rules.object_locks import ObjectLocks
from kvfs.connectors.lmcache_rules.task_results import Results, Tasks
from kvfs.errors import InvalidRequest
from kvfs.limits import CONNECTOR_MATCH_S, CONNECTOR_SIZES

T = TypeVar("T")
Chunks = list[Any]

SERDE_OF_GROUPS: Final = (
    "serde with --separate-object-groups is refused, nothing is stored: LMCache makes the buffers of a task as large "
    "as that of its first object, whatever its group; leave out one of the two"
)


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
        self._stored, self._found, self._loaded = map(
            Results, (self._store_done, self._lookup_done, self._load_done)
        )
        self._tasks = Tasks(self._log)
        self._keys = ObjectKeys(lambda key: digest_keys(self._namespace, [key])[0])
        self._locks = ObjectLocks()
        self._refused = threading.Event()
        self._lock = threading.Lock()
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
        return self._tasks.submit(lambda: self._store(keys, objects), L2StoreResult(False, 0), self._stored)

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        return self._stored.take_all()

    def _store(self, keys: list[Any], objects: list[Any]) -> Any:
        layouts = [object_layout(chunk) for chunk in objects]
        blocks = self._link.blocks(self._namespace)
        if blocks is None or not self._link.is_up or self._refuses(keys, layouts):
            return L2StoreResult(False, 0)
        values = [chunk.byte_array for chunk in objects]
        digests = [self._keys.stored(key, layout) for key, layout in zip(keys, layouts, strict=True)]
        failed: list[bool] | None = None
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

    def _refuses(self, keys: list[Any], layouts: list[Layout]) -> bool:
        """Return whether objects of several groups come transformed; say so once."""
        mixed = any(
            each.is_serialised and key.object_group_id > 0 for key, each in zip(keys, layouts, strict=True)
        )
        if mixed and not self._refused.is_set():
            self._refused.set()
            self._log.error("lmcache-l2: %s", SERDE_OF_GROUPS)
        return mixed

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
        missed = Bitmap(len(keys))
        return self._tasks.submit(lambda: self._look_up(keys, group_layout_descs), missed, self._found)

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._found.take(task_id)

    def _look_up(self, keys: list[Any], group_layout_descs: Any) -> Any:
        """Find chunks, each of its own: which of a group a hit needs is LMCache's to decide, of the bitmap."""
        bitmap = Bitmap(len(keys))
        blocks = self._link.blocks(self._namespace)
        if blocks is None:
            return bitmap
        layouts = {group: layout_of(each) for group, each in group_layout_descs.items()}
        self._keys.note_groups(keys, layouts)
        names = [self._keys.looked_up(key, layouts) for key in keys]
        for some, turn in _turns(names, bitmap):
            hits = self._lock_found(blocks, [keys[i] for i in some], [names[i][turn] for i in some])
            _set_hits(bitmap, some, hits)
        return bitmap

    def _lock_found(self, blocks: Blocks, keys: list[Any], names: list[Name]) -> list[bool]:
        """Find chunks and lock CONNECTOR_LOCKS at most; others may be evicted before their load, which then misses."""
        nothing: list[bool] = [False] * len(keys)
        hits = self._link.attempt(lambda: blocks.exists([name.digest for name in names]), nothing)
        wanted = [i for i, hit in enumerate(hits) if hit][: self._locks.room]
        missed: list[View | None] = [None] * len(wanted)
        views = self._link.attempt(lambda: blocks.get([names[i].digest for i in wanted]), missed)
        for i, view in zip(wanted, views, strict=True):
            hits[i] = view is not None and names[i].size_bytes in (None, len(view))
            if view is not None and hits[i]:
                self._locks.lock(keys[i], names[i].digest, view)
            elif view is not None:
                view.release()
        return hits

    def submit_unlock(self, keys: list[Any]) -> None:
        for key in keys:
            self._locks.unlock(key)

    # --- load ---------------------------------------------------------------------------------------------
    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._tasks.submit(lambda: self._load(keys, objects), Bitmap(len(keys)), self._loaded)

    def query_load_result(self, task_id: int) -> Any:
        return self._loaded.take(task_id)

    def _load(self, keys: list[Any], objects: list[Any]) -> Any:
        bitmap = Bitmap(len(keys))
        places = [chunk.byte_array for chunk in objects]
        names = [
            self._keys.loaded(key, object_layout(chunk)) for key, chunk in zip(keys, objects, strict=True)
        ]
        copied = [self._locks.copy(*each) for each in zip(keys, names, places, strict=True)]
        _set_hits(bitmap, range(len(keys)), copied)
        blocks = self._link.blocks(self._namespace)
        if blocks is None:
            return bitmap
        for some, turn in _turns(names, bitmap):
            sizes = self._read(blocks, [names[i][turn] for i in some], [places[i] for i in some])
            _set_hits(bitmap, some, [size == len(places[i]) for i, size in zip(some, sizes, strict=True)])
        return bitmap

    def _read(self, blocks: Blocks, digests: list[bytes], places: list[Any]) -> list[int]:
        """Read chunks; return the bytes of each, -1 for a miss: one that is longer than its place is no other's."""
        missed = [-1] * len(digests)
        try:
            return self._link.attempt(lambda: blocks.get_into(digests, places), missed)
        except InvalidRequest:
            half = len(digests) // 2
            if not half:
                return missed
            first = self._read(blocks, digests[:half], places[:half])
            return first + self._read(blocks, digests[half:], places[half:])

    # --- the rest -----------------------------------------------------------------------------------------
    def delete(self, keys: list[Any]) -> None:
        """Remove chunks, and tell LMCache that they are gone, also where the store had evicted them."""
        blocks, digests = self._link.blocks(self._namespace), [self._keys.removed(key) for key in keys]
        joined = [digest for some in digests for digest in some]
        if blocks is None or not keys or self._link.attempt(lambda: blocks.remove(joined), -1) < 0:
            return
        with self._lock:
            sizes = [sum(self._sizes.pop(digest, 0) for digest in some) for some in digests]
        self._notify_keys_deleted(keys, sizes)

    def report_status(self) -> dict[str, Any]:
        return {"is_healthy": self._link.is_up, "type": type(self).__name__, "locked": len(self._locks)}

    def close(self) -> None:
        self._tasks.close()
        self._locks.close()
        self._link.close()
        for done in (self._store_done, self._lookup_done, self._load_done):
            done.close()


def _turns(names: Sequence[Sequence[Any]], found: Any) -> Iterator[tuple[list[int], int]]:
    """Yield, for each turn, which chunks were not found by the names before and have one more."""
    for turn in range(max(map(len, names), default=0)):
        some = [i for i, each in enumerate(names) if turn < len(each) and not found.test(i)]
        if some:
            yield some, turn


def _set_hits(bitmap: Any, places: Sequence[int], hits: Sequence[bool]) -> None:
    for i, hit in zip(places, hits, strict=True):
        if hit:
            bitmap.set(i)
