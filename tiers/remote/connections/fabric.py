"""Bytes between machines beside their connection, by UCX: what this machine has for it, and what it offers a peer.

Responsibility: load `kvfs._native.remote.ucx` where `[cluster] transport` asks for it; the messages in which both
machines say where their workers are, behind the greeting.

Invariants: an offer is bounded and has a checksum: UCX, which reads what is in it, is told no length. Two versions of
UCX are not brought together.
Concurrency: the service's trio thread; workers are made in threads, since devices take their time.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from struct import Struct
from typing import Any, Final, NamedTuple, Protocol

import trio

from kvfs import limits
from kvfs._native.shared.slots import xxh3_64
from kvfs.errors import ConfigError, DeadlinePassed, KvfsError, ProtocolError, TierUnreachable, Unsupported
from kvfs.system import topology
from tiers.remote.connections.connection import Connection, Handed

log = logging.getLogger("kvfs.remote")

_UCX: Final = "kvfs._native.remote.ucx"
"""Loaded where transport = "ucx": only then is libucp needed."""
_ENVIRONMENT: Final = {
    "UCX_LOG_FILE": "stderr",
    "UCX_HANDLE_ERRORS": "none",
    "UCX_MEM_EVENTS": "n",
    "UCX_IB_REG_METHODS": "direct",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_TCP_TX_SEG_SIZE": "128k",
    "UCX_TCP_RX_SEG_SIZE": "128k",
}
"""What UCX reads when it is loaded, unless the environment says otherwise. It is to log where the service does, and to
leave signals alone, and the functions that map memory, so that it may keep no registrations of its own; over TCP
it takes segments of 128 KiB, which are four to five times as fast as its default."""
_MAGIC: Final = b"KVFB"
_HEAD: Final = Struct("<4sHHIIQQ")
"""Magic, version of UCX (major, minor), bytes of the address, zero, tag, XXH3-64 of the address."""


class FabricWorker(Handed, Protocol):
    """Moves the bytes of one connection: `kvfs._native.remote.ucx.Worker`."""

    @property
    def address(self) -> bytes:
        """Return where a peer reaches the worker."""

    def greet(self, address: bytes, tag: int) -> None:
        """Name the peer, and begin to greet it. Raises TierUnreachable."""

    def connect(self, address: bytes, tag: int) -> None:
        """Name the peer. Raises TierUnreachable."""

    def await_greeting(self, wait_s: float) -> None:
        """Wait for the peer's greeting. Raises TierUnreachable."""

    def close(self) -> None:
        """End the worker, unless it is taken. It may wait for the peer."""


class FabricContext(Protocol):
    """Has the devices: `kvfs._native.remote.ucx.Context`."""

    def worker(self) -> FabricWorker:
        """Return a worker. Raises TierUnreachable."""


class Offer(NamedTuple):
    """Says where a machine's worker is; without an address it has none."""

    version: tuple[int, int] = (0, 0)
    address: bytes = b""
    tag: int = 0

    def encode(self) -> bytes:
        """Encode the message."""
        checksum = xxh3_64(self.address)
        return _HEAD.pack(_MAGIC, *self.version, len(self.address), 0, self.tag, checksum) + self.address


@dataclass(frozen=True, slots=True)
class Fabric:
    """Makes workers, and brings them together with those of peers."""

    context: FabricContext
    version: tuple[int, int]

    async def serve(self, connection: Connection) -> FabricWorker | None:
        """Offer a worker to a peer; return it, or None where the peer does not take it, or none can be made. Raises
        OSError, ProtocolError."""
        try:
            worker = await trio.to_thread.run_sync(self.context.worker)
        except KvfsError as error:
            log.error("no memory or device for a peer that reads by UCX: %s", error)
            await decline(connection)
            return None
        async with _closing(worker) as kept:
            await connection.send_all(Offer(self.version, worker.address).encode())
            answer = await receive_offer(connection)
            if answer.address:
                with suppress(TierUnreachable):  # the peer, which is not greeted, finds out
                    await trio.to_thread.run_sync(worker.greet, answer.address, answer.tag)
                kept.append(worker)
        return kept[0] if kept else None

    async def reach(self, connection: Connection) -> FabricWorker:
        """Make a worker for what a peer offers. Raises Unsupported where it offers nothing, TierUnreachable where UCX
        does not reach it, OSError, ProtocolError, DeadlinePassed."""
        with trio.move_on_after(limits.REMOTE_GREETING_S):
            offer = await receive_offer(connection)
            if not offer.address:
                raise Unsupported("it has no UCX")
            if offer.version != self.version:
                await decline(connection)
                raise Unsupported(
                    "its UCX is {}.{}, this machine's {}.{}".format(*offer.version, *self.version)
                )
            return await self._answer(connection, offer)
        raise DeadlinePassed(f"no word about UCX within {limits.REMOTE_GREETING_S:g} s")

    async def _answer(self, connection: Connection, offer: Offer) -> FabricWorker:
        tag = int.from_bytes(os.urandom(7), "little") << 8
        try:
            worker = await trio.to_thread.run_sync(self.context.worker)
        except TierUnreachable:
            await decline(connection)
            raise
        async with _closing(worker) as kept:
            try:
                worker.connect(offer.address, tag)
            except TierUnreachable:
                await decline(connection)
                raise
            await connection.send_all(Offer(self.version, worker.address, tag).encode())
            await trio.to_thread.run_sync(worker.await_greeting, limits.REMOTE_PROBE_S)
            kept.append(worker)
        return worker


@asynccontextmanager
async def _closing(worker: FabricWorker) -> AsyncIterator[list[FabricWorker]]:
    """Close a worker at the end, unless it was put into the list."""
    kept: list[FabricWorker] = []
    try:
        yield kept
    finally:
        if not kept:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(worker.close)


def load_fabric(numa_nodes: Collection[int] = ()) -> Fabric:
    """Return what this machine has, the cards nearest to some NUMA nodes if there are any. Raises ConfigError where it
    has nothing."""
    for name, value in (_ENVIRONMENT | near_devices(numa_nodes)).items():
        os.environ.setdefault(name, value)
    try:
        return _open(importlib.import_module(_UCX))
    except ModuleNotFoundError:
        why = "this kvfs was built without UCX: build it where its headers are (Debian's libucx-dev, 1.13 or newer)"
    except ImportError as error:
        why = f"UCX's libraries are missing (Debian's libucx0): {error}"
    except (Unsupported, TierUnreachable) as error:
        why = str(error)
    raise ConfigError(f"[cluster] transport = 'ucx': {why}")


def near_devices(numa_nodes: Collection[int], sys: Path = topology.SYS) -> dict[str, str]:
    """Return the variable that has UCX use the cards nearest to nodes; nothing where none is nearer than others."""
    ports = topology.rdma_ports(sys)
    near = topology.nearest_ports(ports, numa_nodes, topology.node_distances(sys))
    if len(near) == len(ports):
        return {}
    names = ",".join(each.name for each in near)
    log.info("of %d ports of RDMA cards those nearest to NUMA nodes %s: %s", len(ports), [*numa_nodes], names)
    return {"UCX_NET_DEVICES": names}


@cache
def _open(module: Any) -> Fabric:
    """Open the devices, once for the process, and make a worker, where the right to lock memory shows."""
    context = module.Context()
    context.worker()
    return Fabric(context, module.version())


async def decline(connection: Connection) -> None:
    """Tell a peer that there is nothing but the connection. Raises OSError."""
    await connection.send_all(Offer().encode())


async def receive_offer(connection: Connection) -> Offer:
    """Return what a peer offers. Raises OSError, ProtocolError."""
    during = "before it said whether it has UCX"
    head = await connection.receive_all(_HEAD.size, during)
    magic, major, minor, address_bytes, zero, tag, checksum = _HEAD.unpack(head)
    if magic != _MAGIC or zero or address_bytes > limits.MAX_FABRIC_ADDRESS_BYTES:
        raise ProtocolError("what it says of UCX is nothing that is known")
    address = await connection.receive_all(address_bytes, during)
    if xxh3_64(address) != checksum:
        raise ProtocolError("what it says of UCX does not match its checksum")
    return Offer((major, minor), address, tag)
