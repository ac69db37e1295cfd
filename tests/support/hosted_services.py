"""Services on hosts of a network of their own, each with a mount and an S3 endpoint, that share a directory.

Responsibility: start them, and name what they have through each door.
Concurrency: the calling thread, which is on a host while it talks to that host's endpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvfs
from kvfs.keys import block_name
from kvfs.limits import MIB
from tests.support.directory_server import DirectoryServer
from tests.support.gateway import ACCESS, SECRET, Gateway
from tests.support.machines import write_secret
from tests.support.network_hosts import Network, sockets_to
from tests.support.peer_services import put
from tests.support.service import Service
from tests.support.stores import NAMESPACE
from tests.support.waits import eventually

BUCKET = "blocks"
CLUSTER_PORT, S3_PORT = 9400, 9000


@dataclass(frozen=True)
class Host:
    """One host of the network, and its service."""

    network: Network
    number: int
    service: Service

    @property
    def address(self) -> str:
        return self.network.address(self.number)

    def cluster(self) -> dict[str, Any]:
        with self.service.client() as client:
            return dict(client.status()["cluster"])

    def put(self, numbers: range) -> list[bytes]:
        """Put blocks of 1 MiB, each the child of the one before; return their digests."""
        with self.blocks() as blocks:
            return put(blocks, len(numbers), MIB, numbers.start)

    @contextmanager
    def blocks(self) -> Iterator[kvfs.Blocks]:
        with self.service.client() as client, client.blocks(NAMESPACE, bucket=BUCKET) as blocks:
            yield blocks

    def fetch(self, digests: list[bytes]) -> int:
        """Have blocks fetched; return how many of them are here then."""
        with self.blocks() as blocks:
            return blocks.fetch(digests).result()

    def finds(self, other: Host, digests: list[bytes]) -> bool:
        """Whether all of these blocks are known here to be on another host."""
        with self.blocks() as blocks:
            found = blocks.match_cluster(digests).result()
        return found.get(f"{other.address}:{CLUSTER_PORT}", 0) == len(digests)

    def read_path(self, digest: bytes) -> bytes:
        return (self.service.mount / BUCKET / block_name(digest).decode()).read_bytes()

    def read_s3(self, digest: bytes) -> bytes:
        with self.network.within(self.number):
            s3 = Gateway(self.service, self.address, S3_PORT, secure=False).client()
            found = s3.get_object(Bucket=BUCKET, Key=block_name(digest).decode())
            return bytes(found["Body"].read())

    def open_drafts(self) -> int:
        with self.service.client() as client:
            return int(client.status()["open_drafts"])

    def connections_with(self, other: Host) -> int:
        return sockets_to(self.service.pid, other.address)


@contextmanager
def hosted_services(folder: Path, network: Network, count: int) -> Iterator[list[Host]]:
    """Run services on the first hosts of a network, and their directory on the last."""
    last = network.hosts[-1]
    secret = write_secret(folder / "secret")
    with ExitStack() as stack:
        with network.within(last):
            directory = DirectoryServer(folder, network.address(last))
            stack.callback(directory.kill)
            directory.start()
        running = []
        for number in range(1, count + 1):
            config = folder / f"{number}.toml"
            config.write_text(_configuration(network.address(number), directory.url, secret))
            service = Service(nvme="0", arguments=["--config", str(config)])
            with network.within(number):
                running.append(Host(network, number, stack.enter_context(service)))
        for host in running:
            with host.service.client() as client:
                client.create_bucket(BUCKET, mode=0o755)
            with host.blocks():
                pass
        eventually(lambda: all(sees(host, count) for host in running), "all hosts see each other")
        yield running
        for host in running:
            assert not host.service.complaints()


def _configuration(address: str, directory: str, secret: Path) -> str:
    return (
        f'[cluster]\nlisten = "{address}:{CLUSTER_PORT}"\ndirectory = "{directory}"\nsecret_file = "{secret}"\n'
        f"match_wait_s = 1\nmount_fetches = true\n"
        f'[s3]\nlisten = "{address}:{S3_PORT}"\nworkers = 1\n'
        f'[[s3.credentials]]\naccess_key = "{ACCESS}"\nsecret_key = "{SECRET}"\n'
    )


def sees(host: Host, count: int) -> bool:
    """Whether a host is in the directory, and finds so many there."""
    directory = host.cluster()["directory"]
    return bool(directory["state"] == "joined" and directory["members_count"] == count)
