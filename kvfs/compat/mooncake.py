"""Mooncake's `MooncakeDistributedStore` on kvfs, as SGLang and LMCache call it.

    from kvfs.compat.mooncake import MooncakeDistributedStore   # instead of mooncake.store

Responsibility: the same calls, codes and answers for the same states; `tests/golden/mooncake.json` records those of the
original. Keys are strings, kept as digests in a namespace of their own. `setup`'s master address is the service's
address where it is a path; else KVFS_ADDRESS counts. `setup` tries the store with a block of its own, and logs
what came of it.

Differences: buffers need not be registered; leases have no clock, so `remove` never answers -706; `upsert` removes and
stores, and a reader in between misses; a store that is not set up answers as one without keys, where the original ends
the process. A ReplicateConfig is ignored.

Invariants: no failure of the store raises; a place that is too small gets nothing. Concurrency: any thread.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, TypeVar

from kvfs._native.blocks.reader import View
from kvfs.client import Client, connect
from kvfs.client.blocks import Blocks
from kvfs.connectors.common import (
    address_of,
    clear,
    memory_at,
    say,
    string_keys,
    string_namespace,
    try_store,
)
from kvfs.errors import InvalidRequest, KvfsError, NoSpace, ObjectTooLarge, QuotaExceeded
from kvfs.namespaces import Namespace

T = TypeVar("T")
log = logging.getLogger("kvfs.connectors")

OK: Final = 0
NO_SPACE: Final = -200
INVALID: Final = -600
NOT_FOUND: Final = -704
FAILED: Final = -900
"""The store did not answer."""


class ReplicateConfig:
    """Accept the original's settings, which are ignored: kvfs keeps one copy per tier."""

    def __init__(self) -> None:
        self.replica_num = 1
        self.with_soft_pin = False
        self.preferred_segment = ""


class BufferHandle(bytes):
    """A value's bytes, from `get_buffer`."""

    def size(self) -> int:
        """Return the value's size in bytes."""
        return len(self)

    def ptr(self) -> int:
        """Return the address of the value's bytes, which are this object's."""
        return ctypes.cast(ctypes.c_char_p(self), ctypes.c_void_p).value or 0


class MooncakeHostMemAllocator:
    """Allocate page-aligned memory by address."""

    def __init__(self) -> None:
        self._held: dict[int, mmap.mmap] = {}

    def alloc(self, size: int) -> int:
        """Allocate `size` bytes of zeros; return their address."""
        memory = mmap.mmap(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._held[address] = memory
        return address

    def free(self, address: int) -> None:
        """Drop memory that `alloc` returned; any other address is ignored."""
        self._held.pop(address, None)


class MooncakeDistributedStore:
    """Store values by string keys. Codes: 0 or a size, -200 no space, -600 wrong argument, -704 no key, -900 failed."""

    def __init__(self) -> None:
        self._client: Client | None = None
        self._blocks: Blocks | None = None
        self._namespace: Namespace = string_namespace("mooncake store key")
        self._registered: dict[int, int] = {}
        self._lock = threading.Lock()

    # --- life ---------------------------------------------------------------------------------------------
    def setup(
        self,
        local_hostname: str | Mapping[str, Any] = "",
        metadata_server: str = "",
        global_segment_size: int = 0,
        local_buffer_size: int = 0,
        protocol: str = "",
        rdma_devices: str = "",
        master_server_addr: str = "",
        engine: Any = None,
        *,
        tenant_id: str = "default",
        **_: Any,
    ) -> int:
        """Connect, in place of what was connected before; return a code, and change nothing where that fails.

        Segments, buffers and transports are ignored; all arguments may be one mapping.
        """
        if isinstance(local_hostname, Mapping):
            given = local_hostname
            master_server_addr = str(
                given.get("master_server_addr") or given.get("master_server_address") or ""
            )
            tenant_id = str(given.get("tenant_id") or tenant_id)
        address = address_of({"address": _path(master_server_addr)})
        try:
            namespace = string_namespace("mooncake store key", {"tenant": tenant_id})
            with ExitStack() as opened:
                client = opened.enter_context(connect(address, client="mooncake"))
                blocks = client.blocks(namespace)
                opened.pop_all()
        except (KvfsError, OSError) as error:
            return _code(error)
        self.close()
        self._client, self._namespace, self._blocks = client, namespace, blocks
        try:
            say(log, f"mooncake: the store at {address} {try_store(client, namespace, blocks)}")
        except (KvfsError, OSError) as error:
            log.warning("mooncake: the store at %s: %s", address, error)
        return OK

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """Connect to the service at `server_address`; return a code. The sizes are ignored."""
        return self.setup(master_server_addr=server_address)

    def close(self) -> int:
        """End the session; return OK. Closing twice is harmless."""
        client, self._client = self._client, None
        if client is not None:
            client.close()  # and the blocks, which it knows as long as they are held here
        self._blocks = None
        return OK

    def get_hostname(self) -> str:
        """Return this machine's name."""
        return os.uname().nodename

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Note memory of `size` bytes; return a code. Nothing needs that here."""
        with self._lock:
            if size <= 0 or buffer_ptr in self._registered:
                return INVALID
            self._registered[buffer_ptr] = size
        return OK

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Drop a noted buffer; return INVALID where there is none at this address."""
        with self._lock:
            return INVALID if self._registered.pop(buffer_ptr, None) is None else OK

    # --- what is there ------------------------------------------------------------------------------------
    def is_exist(self, key: str) -> int:
        """Return 1 if the key is there, else 0."""
        return self.batch_is_exist([key])[0]

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """Return 1 for each key that is there, else 0."""
        return [
            int(there) for there in self._do(lambda b: b.exists(self._digests(keys)), [False] * len(keys))
        ]

    def get_size(self, key: str) -> int:
        """Return a value's size in bytes, or NOT_FOUND."""
        [view] = self._views([key])
        return NOT_FOUND if view is None else len(view)

    # --- writing ------------------------------------------------------------------------------------------
    def put(self, key: str, value: Any, config: Any = None) -> int:
        """Store a value; return a code. An empty value is INVALID."""
        if not memoryview(value).nbytes:
            return INVALID
        return self._put([key], [[value]])[0]

    def put_batch(self, keys: Sequence[str], values: Sequence[Any], config: Any = None) -> int:
        """Store a value under each key; return OK, or the lowest code of any of them."""
        if len(keys) != len(values):
            return INVALID
        return min(self._put(keys, [[value] for value in values]), default=OK)

    def put_parts(self, key: str, *values: Any, config: Any = None) -> int:
        """Store several buffers as one value; return a code."""
        parts = [value for value in values if memoryview(value).nbytes]
        return self._put([key], [parts])[0] if parts else OK

    def put_from(self, key: str, buffer_ptr: int, size: int, config: Any = None) -> int:
        """Store `size` bytes at an address as a value; return a code."""
        return self.batch_put_from([key], [buffer_ptr], [size])[0]

    def batch_put_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], config: Any = None
    ) -> list[int]:
        """Store a value from an address for each key; return a code for each."""
        return self.batch_put_from_multi_buffers(
            keys, [[at] for at in buffer_ptrs], [[size] for size in sizes]
        )

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: Any = None,
    ) -> list[int]:
        """Store a value from several addresses for each key; return a code for each."""
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes):
            return [INVALID] * len(keys)
        places = [memory_at(at, sizes) for at, sizes in zip(all_buffer_ptrs, all_sizes, strict=True)]
        codes, full = [OK] * len(keys), [i for i, place in enumerate(places) if place]
        for i, code in zip(full, self._put([keys[i] for i in full], [places[i] for i in full]), strict=True):
            codes[i] = code
        return codes

    def upsert(self, key: str, value: Any, config: Any = None) -> int:
        """Store a value in place of what the key had; return a code."""
        if not key or not memoryview(value).nbytes:
            return INVALID
        self._do(lambda blocks: blocks.remove(self._digests([key])), 0)
        return self.put(key, value)

    def _put(self, keys: Sequence[str], parts: Sequence[list[Any]]) -> list[int]:
        """Store values; return codes. A key that is there keeps its value."""
        if not keys:
            return []
        if not all(keys):
            return [
                self._put([key], [part])[0] if key else INVALID for key, part in zip(keys, parts, strict=True)
            ]
        if self._blocks is None:
            return [FAILED] * len(keys)
        try:
            self._blocks.put(self._digests(keys), list(parts))
        except (KvfsError, OSError) as error:
            if len(keys) == 1:
                return [_code(error)]
            # One by one, to find the keys that fit; those that were stored answer at once.
            return [self._put([key], [part])[0] for key, part in zip(keys, parts, strict=True)]
        return [OK] * len(keys)

    # --- reading ------------------------------------------------------------------------------------------
    def get(self, key: str) -> bytes:
        """Return a value; empty where there is none."""
        return self.get_batch([key])[0]

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        """Return the value of each key; empty where there is none."""
        return [b"" if handle is None else bytes(handle) for handle in self.batch_get_buffer(keys)]

    def get_buffer(self, key: str) -> BufferHandle | None:
        """Return a copy of a value, or None."""
        return self.batch_get_buffer([key])[0]

    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        """Return a copy of each key's value, or None."""
        handles: list[BufferHandle | None] = []
        for view in self._views(keys):
            if view is None:
                handles.append(None)
            else:
                with view:
                    handles.append(BufferHandle(view))
        return handles

    def _views(self, keys: Sequence[str]) -> list[View | None]:
        missed: list[View | None] = [None] * len(keys)
        return self._do(lambda blocks: blocks.get(self._digests(keys)), missed)

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Copy a value to `size` bytes at an address; return its size, or a code."""
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    def batch_get_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Return the bytes of each, or a code."""
        return self.batch_get_into_multi_buffers(
            keys, [[at] for at in buffer_ptrs], [[size] for size in sizes]
        )

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Copy each key's value to several addresses; return its size, or a code, for each."""
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes):
            return [INVALID] * len(keys)
        places = [memory_at(at, sizes) for at, sizes in zip(all_buffer_ptrs, all_sizes, strict=True)]
        return self._get_into(self._digests(keys), places)

    def _get_into(self, digests: list[bytes], places: list[list[Any]]) -> list[int]:
        try:
            sizes = self._do(lambda blocks: blocks.get_into(digests, places), [-1] * len(digests))
        except InvalidRequest:  # a value is longer than its place: that key alone gets the code
            if len(digests) == 1:
                return [INVALID]
            return [self._get_into([d], [place])[0] for d, place in zip(digests, places, strict=True)]
        return [NOT_FOUND if size < 0 else size for size in sizes]

    # --- removing -----------------------------------------------------------------------------------------
    def remove(self, key: str, force: bool = False) -> int:
        """Remove a key; return OK, or NOT_FOUND."""
        return OK if self._do(lambda blocks: blocks.remove(self._digests([key])), 0) else NOT_FOUND

    def remove_all(self, force: bool = False) -> int:
        """Remove every key of this tenant; return how many, or a code."""
        client, blocks = self._client, self._blocks
        if client is None or blocks is None:
            return 0
        try:
            return clear(client, blocks)
        except (KvfsError, OSError) as error:
            return _code(error)

    def _digests(self, keys: Sequence[str]) -> list[bytes]:
        return string_keys(self._namespace, keys)

    def _do(self, call: Callable[[Blocks], T], otherwise: T) -> T:
        if self._blocks is None:
            return otherwise
        try:
            return call(self._blocks)
        except InvalidRequest:
            raise
        except (KvfsError, OSError):
            return otherwise


def _path(address: str) -> str | None:
    return address if address.startswith("/") else None


def _code(error: Exception) -> int:
    if isinstance(error, NoSpace | ObjectTooLarge | QuotaExceeded):
        return NO_SPACE
    return INVALID if isinstance(error, InvalidRequest) else FAILED
