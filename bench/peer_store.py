"""One other store of KV blocks, measured in an environment that has it: `python -P peer_store.py NAME FOLDER`.

Responsibility: the work that is compared (`works`, the same on every store), and the stores other than kvfs. Started
by `bench.peers`, whose environment needs none of them; imports nothing of kvfs.

Protocol, in lines: this process says "ready" or "missing: WHY"; then answers each "run FIGURE SECONDS" with the
median and the 99th percentile of single operations in us. The end of its input ends it, and the servers that it
started.

Where there is a choice, it is meant to favour the store: Redis a Unix socket and hiredis, LMCache's connector no
header in its files and no hop to another thread's event loop.

Concurrency: one thread calls.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import mmap
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, Protocol

KIB, MIB = 1 << 10, 1 << 20
FIGURES = ("get_1m", "get_4k", "put_1m", "put_4m", "batch16_put_1m", "batch16_get_1m", "match_64")
LARGE, SMALL, LARGEST = 128, 8192, 32
"""Blocks of 1 MiB, of 4 KiB and of 4 MiB: 128 MiB, four times a last-level cache of 32 MiB, 32 MiB, and 128 MiB."""
BATCH, MATCHED, PUTS = 16, 64, 16
CAPACITY_BYTES = 768 * MIB
START_S = 30.0
SERVER = "server"


class Store(Protocol):
    """Blocks of 4 KiB, 1 MiB or 4 MiB. A miss raises EOFError."""

    def key(self, digest: bytes) -> Any:
        """Return a key as the store's callers have it."""

    def piece(self, data: memoryview) -> Any:
        """Return `data` in memory from which the store puts."""

    def put(self, key: Any, piece: Any) -> None: ...
    def put_batch(self, keys: Sequence[Any], pieces: Sequence[Any]) -> None: ...

    def get(self, key: Any, size: int) -> Any:
        """Read a value; the bytes are good until the next call."""

    def get_batch(self, keys: Sequence[Any]) -> None:
        """Read values of 1 MiB each."""

    def match(self, keys: Sequence[Any]) -> None: ...
    def remove(self, keys: Sequence[Any]) -> None: ...


@dataclass(slots=True)
class Work:
    operation: Callable[[int], object]
    batch: int
    after_batch: Callable[[], object] | None = None
    """Untimed."""
    numbers: Iterator[int] = field(default_factory=count)


def works(store: Store, source: memoryview) -> dict[str, Work]:
    """Return what is measured, by figure, on a store filled for it. `source` is `LARGE` MiB of the caller's."""
    draw = random.Random(4)
    large, small, new = ([store.key(draw.randbytes(16)) for _ in range(n)] for n in (LARGE, SMALL, 64 * PUTS))
    largest = [store.piece(source[i * 4 * MIB : (i + 1) * 4 * MIB]) for i in range(LARGEST)]
    pieces: list[Any] = []
    for size, keys in ((4 * KIB, small), (MIB, large)):
        parts = [source[i * MIB : i * MIB + size] for i in range(LARGE)]
        pieces = [store.piece(part) for part in parts]
        for n, key in enumerate(keys):
            store.put(key, pieces[n % LARGE])
        if bytes(store.get(keys[5], size)) != parts[5]:
            raise ValueError("other bytes than were put")
    order = draw.sample(small, SMALL)
    prompts = [draw.sample(small, MATCHED) for _ in range(256)]
    batches = [large[i : i + BATCH] for i in range(0, LARGE, BATCH)]
    made: list[Any] = []

    def put_from(pieces: Sequence[Any]) -> Callable[[int], None]:
        def put(n: int) -> None:
            key = new[n % len(new)]
            made.append(key)
            store.put(key, pieces[n % len(pieces)])

        return put

    def put_batch(n: int) -> None:
        keys = new[n * BATCH % len(new) :][:BATCH]
        made.extend(keys)
        store.put_batch(keys, pieces[n * BATCH % LARGE :][:BATCH])

    def trim() -> None:
        store.remove(made)
        made.clear()

    return {
        "get_1m": Work(lambda n: store.get(large[n % LARGE], MIB), 16),
        "get_4k": Work(lambda n: store.get(order[n % SMALL], 4 * KIB), 64),
        "put_1m": Work(put_from(pieces), PUTS, trim),
        "put_4m": Work(put_from(largest), PUTS, trim),
        "batch16_put_1m": Work(put_batch, PUTS // BATCH, trim),
        "batch16_get_1m": Work(lambda n: store.get_batch(batches[n % len(batches)]), 4),
        "match_64": Work(lambda n: store.match(prompts[n % 256]), 32),
    }


def timed_us(work: Work, seconds: float) -> tuple[float, float]:
    """Return the median and the 99th percentile of single operations of about so many seconds, after a batch that is
    not counted."""
    times: list[int] = []
    _batch(work)
    deadline = time.perf_counter() + seconds
    while not times or time.perf_counter() < deadline:
        times += _batch(work)
    return median(times) / 1000, sorted(times)[len(times) * 99 // 100] / 1000


def _batch(work: Work) -> list[int]:
    operation, clock, numbers, times = work.operation, time.perf_counter_ns, work.numbers, []
    for _ in range(work.batch):
        n = next(numbers)
        start = clock()
        operation(n)
        times.append(clock() - start)
    if work.after_batch is not None:
        work.after_batch()
    return times


def memory(size: int) -> memoryview:
    """Return memory of huge pages, where the machine has them, with random bytes; it goes with its last user."""
    mapping = mmap.mmap(-1, size)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    view, chunk = memoryview(mapping), os.urandom(MIB)
    for start in range(0, size, MIB):
        view[start : start + MIB] = chunk
    return view


def need(found: bool) -> None:
    if not found:
        raise EOFError("a miss, or a refusal")


# --- Redis -------------------------------------------------------------------------------------------------
class RedisStore:
    """EXISTS of all keys in one command. Reads give new bytes objects: the client has no read into memory."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def key(self, digest: bytes) -> bytes:
        return digest

    def piece(self, data: memoryview) -> bytes:
        """Return bytes: the client sends them faster than a memoryview."""
        return bytes(data)

    def put(self, key: bytes, piece: bytes) -> None:
        need(self._client.set(key, piece))

    def put_batch(self, keys: Sequence[bytes], pieces: Sequence[bytes]) -> None:
        need(self._client.mset(dict(zip(keys, pieces, strict=True))))

    def get(self, key: bytes, size: int) -> bytes:
        found: bytes | None = self._client.get(key)
        if found is None or len(found) != size:
            raise EOFError("a miss")
        return found

    def get_batch(self, keys: Sequence[bytes]) -> None:
        """Read one after the other: MGET of 16 MiB took about as long."""
        need(None not in [self._client.get(key) for key in keys])

    def match(self, keys: Sequence[bytes]) -> None:
        need(self._client.exists(*keys) == len(keys))

    def remove(self, keys: Sequence[bytes]) -> None:
        self._client.delete(*keys)


@contextmanager
def open_redis(folder: Path, source: memoryview) -> Iterator[Store]:
    redis = importlib.import_module("redis")
    path = str(folder / "redis.sock")
    options = ["--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", "--dir", str(folder)]
    with (
        server(["redis-server", *options]),
        redis.Redis(unix_socket_path=path, socket_read_size=256 * KIB) as client,
    ):
        wait_for(lambda: client.ping(), redis.ConnectionError)
        yield RedisStore(client)


# --- Mooncake ----------------------------------------------------------------------------------------------
class MooncakeStore:
    """Registered memory on both ways; the blocks lie in a process of their own, which TCP reaches."""

    def __init__(self, store: Any, source: memoryview) -> None:
        self._store = store
        self._into = memory(BATCH * MIB)
        self._places = [address_of(self._into) + i * MIB for i in range(BATCH)]
        need(store.register_buffer(address_of(source), len(source)) == 0)
        need(store.register_buffer(self._places[0], len(self._into)) == 0)

    def key(self, digest: bytes) -> str:
        return digest.hex()

    def piece(self, data: memoryview) -> tuple[int, int]:
        return address_of(data), len(data)

    def put(self, key: str, piece: tuple[int, int]) -> None:
        need(self._store.put_from(key, *piece) == 0)

    def put_batch(self, keys: Sequence[str], pieces: Sequence[tuple[int, int]]) -> None:
        addresses, sizes = zip(*pieces, strict=True)
        need(self._store.batch_put_from(list(keys), list(addresses), list(sizes)) == [0] * len(keys))

    def get(self, key: str, size: int) -> memoryview:
        need(self._store.get_into(key, self._places[0], size) == size)
        return self._into[:size]

    def get_batch(self, keys: Sequence[str]) -> None:
        sizes = [MIB] * len(keys)
        need(self._store.batch_get_into(keys, self._places, sizes) == sizes)

    def match(self, keys: Sequence[str]) -> None:
        need(self._store.batch_is_exist(keys) == [1] * len(keys))

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._store.remove(key, True)


@contextmanager
def open_mooncake_local(folder: Path, source: memoryview) -> Iterator[Store]:
    """Keep the blocks in the caller's process, with its copies by memcpy: as near to kvfs as Mooncake comes."""
    os.environ["MC_STORE_MEMCPY"] = "1"
    with mooncake_master() as master:
        store = mooncake_client(master, CAPACITY_BYTES)
        try:
            yield MooncakeStore(store, source)
        finally:
            store.close()


@contextmanager
def open_mooncake(folder: Path, source: memoryview) -> Iterator[Store]:
    with mooncake_master() as master, ExitStack() as stack:
        data = stack.enter_context(
            server([sys.executable, "-P", __file__, SERVER, master], stdout=subprocess.PIPE)
        )
        assert data.stdout is not None
        while (line := data.stdout.readline()) != b"ready\n":
            need(bool(line))
        store = mooncake_client(master, 0)
        stack.callback(store.close)
        yield MooncakeStore(store, source)


@contextmanager
def mooncake_master() -> Iterator[str]:
    """Run the process that knows where blocks are; yield its address. Raises ImportError."""
    package = Path(importlib.import_module("mooncake").__path__[0])
    importlib.import_module("mooncake.store")
    port, metrics_port = free_ports(2)
    ports = [f"--rpc_port={port}", f"--metrics_port={metrics_port}", "--rpc_address=127.0.0.1"]
    with server([str(package / "mooncake_master"), *ports, "--logtostderr"]):
        wait_for(lambda: socket.create_connection(("127.0.0.1", port)).close(), OSError)
        yield f"127.0.0.1:{port}"


def mooncake_client(master: str, segment_bytes: int) -> Any:
    store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    need(store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 64 * MIB, "tcp", "", master) == 0)
    return store


def serve_mooncake(master: str) -> None:
    """Run the process that holds the blocks, until it is ended."""
    store = mooncake_client(master, CAPACITY_BYTES)
    os.write(1, b"ready\n")
    sys.stdin.read()
    store.close()


def address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


# --- LMCache -----------------------------------------------------------------------------------------------
class LMCacheStore:
    """Its fs connector on a tmpfs: one for each size, since files without a header have one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, folder: Path) -> None:
        pool = importlib.import_module("lmcache.v1.memory_allocators.tensor_memory_allocator")
        self._torch = importlib.import_module("torch")
        self._key = importlib.import_module("lmcache.utils").CacheEngineKey
        self._memory = pool.TensorMemoryAllocator(self._torch.zeros(512 * MIB, dtype=self._torch.uint8))
        self._run = loop.run_until_complete
        self._connectors = {size: self._connector(loop, folder, size) for size in (4 * KIB, MIB, 4 * MIB)}

    def _connector(self, loop: Any, folder: Path, size: int) -> Any:
        config = importlib.import_module("lmcache.v1.config").LMCacheEngineConfig.from_defaults(chunk_size=16)
        config.extra_config = {"save_chunk_meta": False}
        metadata = importlib.import_module("lmcache.v1.metadata").LMCacheMetadata(
            model_name="bench",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=self._torch.bfloat16,
            kv_shape=(1, 2, 16, 1, size // 64),
            chunk_size=16,
        )
        backend = SimpleNamespace(config=config, metadata=metadata, allocate=self._memory.allocate)
        connector = importlib.import_module("lmcache.v1.storage_backend.connector.fs_connector").FSConnector
        return connector(loop, backend, config, base_paths_str=str(folder / "lmcache"))

    def key(self, digest: bytes) -> Any:
        return self._key("bench", 1, 0, int.from_bytes(digest[:8], "little"), self._torch.bfloat16)

    def piece(self, data: memoryview) -> Any:
        connector = self._connectors[len(data)]
        made = self._memory.allocate(connector.meta_shapes, connector.meta_dtypes, connector.meta_fmt)
        made.byte_array.cast("B")[:] = data
        return made

    def put(self, key: Any, piece: Any) -> None:
        self._run(self._connectors[piece.get_size()].put(key, piece))

    def put_batch(self, keys: Sequence[Any], pieces: Sequence[Any]) -> None:
        for key, piece in zip(keys, pieces, strict=True):
            self.put(key, piece)

    def get(self, key: Any, size: int) -> Any:
        found = self._run(self._connectors[size].get(key))
        need(found is not None)
        found.ref_count_down()
        return found.byte_array

    def get_batch(self, keys: Sequence[Any]) -> None:
        found = self._run(self._connectors[MIB].batched_get_non_blocking("bench", keys))
        for each in found:
            each.ref_count_down()
        need(len(found) == len(keys))

    def match(self, keys: Sequence[Any]) -> None:
        exists = self._connectors[4 * KIB].exists_sync
        need(all(exists(key) for key in keys))

    def remove(self, keys: Sequence[Any]) -> None:
        for key in keys:
            self._connectors[MIB].remove_sync(key)


@contextmanager
def open_lmcache(folder: Path, source: memoryview) -> Iterator[Store]:
    with asyncio.Runner() as runner:
        yield LMCacheStore(runner.get_loop(), folder)


# --- processes ---------------------------------------------------------------------------------------------
@contextmanager
def server(command: list[str], stdout: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_for(reach: Callable[[], object], refused: type[Exception]) -> None:
    """Wait until a server answers. Raises what it last raised."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            reach()
            return
        except refused:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in sockets]


STORES = {
    "mooncake": open_mooncake,
    "mooncake_local": open_mooncake_local,
    "redis": open_redis,
    "lmcache_fs": open_lmcache,
}


def main() -> None:
    name, place = sys.argv[1:]
    if name == SERVER:
        serve_mooncake(place)
        return
    # Libraries print; the protocol has a descriptor of its own.
    with os.fdopen(os.dup(1), "w", buffering=1) as replies, ExitStack() as stack:
        os.dup2(2, 1)
        source = memory(LARGE * MIB)
        try:
            store = stack.enter_context(STORES[name](Path(place), source))
        except (ImportError, FileNotFoundError) as error:
            print(f"missing: {error}", file=replies)
            return
        measured = works(store, source)
        print("ready", file=replies)
        for line in sys.stdin:
            _, figure, seconds = line.split()
            print(*timed_us(measured[figure], float(seconds)), file=replies)


if __name__ == "__main__":
    main()
