"""Figures of blocks between machines: a fetch from another process over loopback, against `sendfile` to `recv` alone.

Responsibility: one function for each figure, from seconds to a Result. A process of its own holds the blocks, serves
them as a service does, and serves the baseline: threads that send the same slots by `sendfile` when asked. This process
is the asking machine: a store and its cluster; the baseline receives into memory over as many streams as the fetch.
Both sides walk 96 MiB, so that bytes come from memory and go there. A fetch is one of a hinted
peer: it reserves drafts, receives, verifies and seals them. One over TLS is measured against the same fetch without.

The sides take turns, operation by operation. `python -m bench.remote FOLDER BYTES TRANSPORT` is the serving process.

Concurrency: one trio thread and the store's native threads; the baseline's streams have a thread each.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

import trio

from bench.keys import NAMESPACE
from bench.measure import Result
from bench.ports import free_ports
from kvfs import limits
from kvfs.config.settings import ClusterSettings
from kvfs.limits import KIB, MIB
from tiers.recovery.start import StoreOptions, start_store
from tiers.remote.cluster import Cluster
from tiers.store.store import Store

SET_BYTES = 96 * MIB
DRAM_BYTES = 512 * MIB
BUCKET = b"bench"
LEAST_TURNS = 8

Side = Callable[[int], Awaitable[float | None]]
"""Moves a batch from a block on; returns the us that it took where it takes the time itself."""


def get_1m(seconds: float) -> Result:
    """Return the time of a fetch of one block of 1 MiB."""
    return _against_raw("remote.get_1m", MIB, 1, seconds)


def batch16_1m(seconds: float) -> Result:
    """Return the time of a fetch of 16 blocks of 1 MiB."""
    return _against_raw("remote.batch16_1m", MIB, 16, seconds)


def get_64k(seconds: float) -> Result:
    """Return the time of a fetch of one block of 64 KiB."""
    return _against_raw("remote.get_64k", 64 * KIB, 1, seconds)


def get_1m_tls(seconds: float) -> Result:
    """Return the time of a fetch of one block of 1 MiB over TLS, against one without."""
    with tempfile.TemporaryDirectory(prefix="kvfs-bench-") as name:
        folder = Path(name)
        _make_certificates(folder)
        with other_machine(folder, MIB) as (port, _, tls_port):
            return trio.run(partial(_measure_tls, folder, port, tls_port, seconds))


def _against_raw(name: str, size_bytes: int, batch: int, seconds: float) -> Result:
    with (
        tempfile.TemporaryDirectory(prefix="kvfs-bench-") as folder,
        other_machine(Path(folder), size_bytes) as (port, raw_port, _),
    ):
        raw = Raw(raw_port, size_bytes)
        return trio.run(partial(_measure, name, Path(folder), port, raw, batch, seconds))


def _make_certificates(folder: Path) -> None:
    """Make one that is its own authority: both machines show it."""
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    files = ("-keyout", str(folder / "key"), "-out", str(folder / "certificate"))
    command = ["openssl", "req", "-x509", *curve, "-days", "2", "-subj", "/CN=bench", *files]
    subprocess.run(command, check=True, capture_output=True)


def _settings(folder: Path, *, tls: bool = False, **more: Any) -> ClusterSettings:
    if tls:
        certificate = folder / "certificate"
        more |= {"certificate": certificate, "key": folder / "key", "authorities": certificate}
    return ClusterSettings(secret_file=folder / "secret", match_wait_s=1.0, **more)


@contextmanager
def other_machine(folder: Path, size_bytes: int, *, transport: str = "tcp") -> Iterator[tuple[int, int, int]]:
    """Run the process that serves; yield its ports: for a fetch, for the baseline, for a fetch over TLS."""
    secret = folder / "secret"
    secret.write_bytes(os.urandom(32).hex().encode())
    secret.chmod(0o600)
    for machine in ("a", "b"):
        (folder / machine).mkdir()
    with subprocess.Popen(
        [sys.executable, "-m", "bench.remote", str(folder), str(size_bytes), transport],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        port, raw_port, tls_port = map(int, process.stdout.readline().split())
        yield port, raw_port, tls_port


async def _measure(name: str, folder: Path, port: int, raw: Raw, batch: int, seconds: float) -> Result:
    count = SET_BYTES // raw.size_bytes

    async def receive(first: int) -> None:
        raw.receive([(first + i) % count for i in range(batch)])

    result = await beside_fetches(name, folder, port, receive, batch, count, seconds)
    raw.close()
    return result


async def beside_fetches(
    name: str,
    folder: Path,
    port: int,
    side: Side,
    batch: int,
    count: int,
    seconds: float,
    *,
    transport: str = "tcp",
) -> Result:
    """Measure fetches of batches of `count` blocks from the machine at `port`, and another way in turns."""
    settings = _settings(folder, peers=(f"127.0.0.1:{port}",), transport=transport)
    async with _asking(folder, settings) as (store, [cluster]):
        ours = partial(_fetch, store, cluster, batch, count)
        return await _in_turns(name, store, (ours, side), batch, count, seconds)


async def _measure_tls(folder: Path, port: int, tls_port: int, seconds: float) -> Result:
    settings = [
        _settings(folder, peers=(f"127.0.0.1:{tls_port}",), tls=True),
        _settings(folder, peers=(f"127.0.0.1:{port}",)),
    ]
    count = SET_BYTES // MIB
    async with _asking(folder, *settings) as (store, clusters):
        sides = [partial(_fetch, store, cluster, 1, count) for cluster in clusters]
        return await _in_turns("remote.get_1m_tls", store, sides, 1, count, seconds)


@asynccontextmanager
async def _asking(folder: Path, *settings: ClusterSettings) -> AsyncIterator[tuple[Store, list[Cluster]]]:
    store = await _open_store(folder / "b")
    try:
        clusters = [Cluster(each, store) for each in settings]
        async with trio.open_nursery() as nursery:
            for cluster in clusters:
                await nursery.start(cluster.run)
            yield store, clusters
            nursery.cancel_scope.cancel()
    finally:
        store.close()


async def _fetch(store: Store, cluster: Cluster, batch: int, count: int, first: int) -> None:
    bucket, peer = store.bucket(BUCKET), cluster.peers[0].address
    digests = [_digest((first + i) % count) for i in range(batch)]
    if await cluster.fetch(bucket, digests, uid=0, hint=peer, urgent=True) != batch:
        raise RuntimeError("bench: a block did not come")


async def _open_store(path: Path) -> Store:
    store = await start_store(StoreOptions(path, dram_bytes=DRAM_BYTES))
    store.create_bucket(BUCKET, uid=0, gid=0, namespace=NAMESPACE)
    return store


def _digest(number: int) -> bytes:
    return b"benchrem" + number.to_bytes(8, "big")


async def _in_turns(
    name: str,
    store: Store,
    sides: Sequence[Side],
    batch: int,
    count: int,
    seconds: float,
) -> Result:
    samples: list[list[float]] = [[], []]
    deadline, turn = perf_counter_ns() + int(seconds * 1e9), 0
    while perf_counter_ns() < deadline or turn < LEAST_TURNS:
        for index in (0, 1) if turn % 2 else (1, 0):
            began = perf_counter_ns()
            took_us = await sides[index](turn * batch)
            samples[index].append((perf_counter_ns() - began) / 1000 if took_us is None else took_us)
            for digest in (_digest((turn * batch + i) % count) for i in range(batch)):
                if store.block_bucket(digest) is not None:
                    store.remove_block(digest)
            store.maintain()
        turn += 1
    values, others = (sorted(each[LEAST_TURNS // 2 :]) for each in samples)
    value, baseline = median(values), median(others)
    at = len(values) * 99 // 100
    return Result(name, value, "us", baseline, baseline / value, values[at], others[at])


class Raw:
    """Receives slots that the other process sends by `sendfile`, over limits.REMOTE_STREAMS connections."""

    def __init__(self, port: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._area = memoryview(mmap.mmap(-1, SET_BYTES))
        for at in range(0, SET_BYTES, 4096):
            self._area[at] = 1
        self._streams = [socket.create_connection(("127.0.0.1", port)) for _ in range(limits.REMOTE_STREAMS)]
        for stream in self._streams:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._threads = ThreadPoolExecutor(limits.REMOTE_STREAMS)

    def receive(self, numbers: list[int]) -> None:
        """Receive blocks, each stream its share of them."""
        if len(numbers) == 1:
            self._receive_some(self._streams[0], numbers)
            return
        shares = [numbers[i :: limits.REMOTE_STREAMS] for i in range(limits.REMOTE_STREAMS)]
        list(self._threads.map(self._receive_some, self._streams, shares))

    def _receive_some(self, stream: socket.socket, numbers: list[int]) -> None:
        for number in numbers:
            stream.sendall(number.to_bytes(4, "big"))
            at, end = number * self.size_bytes, (number + 1) * self.size_bytes
            while at < end:
                got = stream.recv_into(self._area[at:end])
                if not got:
                    raise RuntimeError("bench: the serving process ended")
                at += got

    def close(self) -> None:
        self._threads.shutdown()
        for stream in self._streams:
            stream.close()


async def _serve(folder: Path, size_bytes: int, transport: str) -> None:
    store = await _open_store(folder / "a")
    ports = free_ports(2)
    with socket.create_server(("127.0.0.1", 0)) as raw:
        slots = [_put(store, number, size_bytes) for number in range(SET_BYTES // size_bytes)]
        async with trio.open_nursery() as nursery:
            for port, tls in zip(ports, (False, (folder / "certificate").exists()), strict=True):
                settings = _settings(folder, listen=f"127.0.0.1:{port}", tls=tls, transport=transport)
                await nursery.start(Cluster(settings, store).run)
            threading.Thread(target=_serve_raw, args=[raw, slots, size_bytes], daemon=True).start()
            print(ports[0], raw.getsockname()[1], ports[1], flush=True)
            await trio.to_thread.run_sync(sys.stdin.read)
            nursery.cancel_scope.cancel()
    for slot in slots:
        os.close(slot)
    store.close()


def _put(store: Store, number: int, size_bytes: int) -> int:
    """Store a block; return a descriptor of its slot."""
    draft = store.reserve(size_bytes, uid=0)
    descriptor = store.open_draft(draft)
    os.write(descriptor, os.urandom(size_bytes))
    os.close(descriptor)
    info = store.seal_block(draft, BUCKET, _digest(number), parent=None, uid=0)
    store.dram.checksums.wait(10.0)
    return store.open_read(info, uid=0)


def _serve_raw(listener: socket.socket, slots: list[int], size_bytes: int) -> None:
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_send_slots, args=[connection, slots, size_bytes], daemon=True).start()


def _send_slots(connection: socket.socket, slots: list[int], size_bytes: int) -> None:
    with connection:
        while asked := connection.recv(4, socket.MSG_WAITALL):
            slot, at = slots[int.from_bytes(asked, "big")], 0
            while at < size_bytes:
                at += os.sendfile(connection.fileno(), slot, at, size_bytes - at)


if __name__ == "__main__":
    trio.run(_serve, Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
