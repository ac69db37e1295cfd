"""Machines of a cluster in one process: stores with their doors for other machines, on loopback addresses.

Responsibility: start and stop them inside of a trio nursery, and count what must not stay behind: drafts, descriptors,
connections, threads. Concurrency: one trio thread runs all machines; their native threads are apart.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import trio
from pydantic import SecretStr

from kvfs import limits
from kvfs.config.settings import ClusterSettings
from kvfs.errors import NotFound
from tests.support.certificates import ClusterTls
from tests.support.own_ports import own_port
from tests.support.stores import BOUND, NAMESPACE, draft_of, read, small_store
from tests.support.waits import until
from tiers.cluster.directory import Directory
from tiers.device.threads import thread_device
from tiers.model.objects import Bucket
from tiers.recovery.start import NvmeOptions, StoreOptions, start_store
from tiers.remote.cluster import Cluster
from tiers.remote.peer import Opener, open_tcp
from tiers.store.store import Store

SECRET = b"a secret of the tests, 32 bytes or more"


def digest_of(number: int) -> bytes:
    return number.to_bytes(8, "little").replace(b"\0", b"\1") + number.to_bytes(8, "big")


def payload_of(number: int, size_bytes: int) -> bytes:
    return (number.to_bytes(8, "big") * (size_bytes // 8 + 1))[:size_bytes]


@dataclass(frozen=True, slots=True)
class Machine:
    """One store with its cluster, running."""

    store: Store
    cluster: Cluster
    address: str

    @property
    def bucket(self) -> Bucket:
        return self.store.bucket(BOUND)

    def put(self, numbers: Sequence[int], size_bytes: int = 4096) -> list[bytes]:
        """Store blocks, each the child of the one before; return their digests."""
        digests = [digest_of(number) for number in numbers]
        for number, digest, parent in zip(numbers, digests, [None, *digests], strict=False):
            draft = draft_of(self.store, payload_of(number, size_bytes))
            self.store.seal_block(draft, BOUND, digest, parent=parent, uid=0)
        return digests

    async def fetch(self, digests: Sequence[bytes], hint: str | None = None) -> int:
        return await self.cluster.fetch(self.bucket, digests, uid=0, hint=hint, urgent=True)

    def read(self, digest: bytes) -> bytes | None:
        """Return the bytes of a block that is here."""
        try:
            return read(self.store, self.store.lookup_block(digest))
        except NotFound:
            return None

    def directory(self) -> dict[str, Any]:
        """Return the status of the machine's directory."""
        status: dict[str, Any] = self.cluster.status()["directory"]
        return status

    def task(self, kind: str) -> dict[str, Any]:
        """Return the status of the task of a kind that runs or ended last."""
        found: dict[str, Any] = {each["name"]: each for each in self.cluster.status()["tasks"]}[kind]
        return found

    async def ended(self, kind: str) -> dict[str, Any]:
        """Wait for the end of a task; return its status."""
        await until(lambda: self.task(kind)["state"] != "runs")
        return self.task(kind)

    def drafts(self) -> int:
        return self.store.space.open_drafts


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    """Return how many threads there are beside Python's, of which trio keeps some for a while. One of Python's that has
    ended counts until the kernel has taken it out."""
    return len(os.listdir("/proc/self/task")) - threading.active_count()


def write_secret(path: Path, secret: bytes = SECRET) -> Path:
    path.write_bytes(secret)
    path.chmod(0o600)
    return path


@asynccontextmanager
async def machine(
    folder: Path,
    *,
    listen: str | None = None,
    peers: Sequence[str] = (),
    secret: bytes = SECRET,
    opener: Opener = open_tcp,
    backing: str = "auto",
    match_wait_s: float = limits.MAX_REMOTE_MATCH_S,
    directory: str | None = None,
    tls: ClusterTls | None = None,
    transport: Literal["tcp", "ucx"] = "tcp",
    keep: bool = False,
) -> AsyncIterator[Machine]:
    """Run one machine until the end of the block. `keep`: one that is started there later has what this one has."""
    await trio.Path(folder).mkdir(exist_ok=True)
    settings = ClusterSettings(
        listen=listen,
        peers=tuple(peers),
        secret_file=write_secret(folder / "secret", secret),
        match_wait_s=match_wait_s,
        directory=None if directory is None else SecretStr(directory),
        transport=transport,
        **({} if tls is None else tls._asdict()),
    )
    store = small_store(folder / "data", backing=backing)
    try:
        async with clustered(store, settings, opener) as running:
            yield running
    finally:
        store.close(keep=keep)


@asynccontextmanager
async def clustered(
    store: Store, settings: ClusterSettings, opener: Opener = open_tcp
) -> AsyncIterator[Machine]:
    """Run the cluster of a store that is there."""
    directory = None if settings.directory is None else Directory(settings, store)
    cluster = Cluster(settings, store, opener, directory)
    async with trio.open_nursery() as nursery:
        await nursery.start(cluster.run)
        yield Machine(store, cluster, settings.listen or "")
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def machines(
    folder: Path, count: int, tls: ClusterTls | None = None, transport: Literal["tcp", "ucx"] = "tcp"
) -> AsyncIterator[list[Machine]]:
    """Run machines that all know each other, themselves included."""
    addresses = [f"127.0.0.{number + 1}" for number in range(count)]
    addresses = [f"{host}:{own_port()}" for host in addresses]
    async with AsyncExitStack() as stack:
        running = [
            await stack.enter_async_context(
                machine(folder / f"m{number}", listen=address, peers=addresses, tls=tls, transport=transport)
            )
            for number, address in enumerate(addresses)
        ]
        for each in running:
            await until(lambda each=each: each.cluster.status()["peers_up"] == count - 1)
        yield running


@asynccontextmanager
async def onto_nvme(tmp_path: Path, **bucket: bool) -> AsyncIterator[tuple[Machine, Machine]]:
    """Run two machines, of which the second one has an NVMe tier, and a bucket as said."""
    addresses = [f"{host}:{own_port()}" for host in ("127.0.0.1", "127.0.0.2")]
    secret, device = write_secret(tmp_path / "secret"), thread_device()
    options = StoreOptions(
        tmp_path / "to",
        dram_bytes=16 * limits.MIB,
        backing="directory",
        nvme=NvmeOptions(device, 16 * limits.MIB, segment_bytes=limits.MIB),
    )
    settings = ClusterSettings(listen=addresses[1], peers=(addresses[0],), secret_file=secret)
    try:
        with await start_store(options) as store:
            store.create_bucket(BOUND, uid=0, gid=0, namespace=NAMESPACE, **bucket)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.run)
                async with (
                    machine(tmp_path / "from", listen=addresses[0], peers=addresses) as first,
                    clustered(store, settings) as second,
                ):
                    await until(lambda: second.cluster.status()["peers_up"] == 1)
                    yield first, second
                nursery.cancel_scope.cancel()
    finally:
        await device.aclose()
