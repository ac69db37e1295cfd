"""A real Redis Cluster of three servers for tests of the directory.

Responsibility: start them on free ports, each with a third of the slots, and kill, pause and empty one or all. One of
them can have a replica, which takes its place. Concurrency: the servers are processes of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.directory_server import DirectoryServer
from tests.support.own_ports import own_port
from tests.support.waits import eventually

SERVERS = 3
SLOTS = 16384
FAILURE_MS = 500
"""How long a server does not answer the others until they take it for down."""


class ClusterServer(DirectoryServer):
    """Runs one server of the cluster. What it has of the cluster outlives its end, its keys do not."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bus_port = folder, own_port()
        flags = {
            "cluster-enabled": "yes",
            "cluster-port": self.bus_port,
            "cluster-node-timeout": FAILURE_MS,
            "cluster-require-full-coverage": "no",
        }
        super().__init__(
            folder, arguments=[word for name, value in flags.items() for word in (f"--{name}", str(value))]
        )

    @property
    def id(self) -> str:
        return self.ask("CLUSTER MYID").split(b"\r\n")[1].decode()

    def order(self, command: str) -> None:
        answer = self.ask(command)
        assert answer == b"+OK\r\n", (command, answer)

    def says(self, fact: str) -> bool:
        """Return whether the server says so of the cluster."""
        return fact.encode() in self.ask("CLUSTER INFO")


class ServerCluster:
    """Runs the servers; `url` names two of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.servers = [ClusterServer(folder / f"server{at}") for at in range(SERVERS)]
        self.url = f"redis+cluster://127.0.0.1:{self.servers[0].port},127.0.0.1:{self.servers[1].port}"

    def found(self) -> None:
        """Start the servers and share the slots out."""
        for at, server in enumerate(self.servers):
            DirectoryServer.start(server)
            edges = [SLOTS * each // SERVERS for each in (at, at + 1)]
            server.order(f"CLUSTER ADDSLOTSRANGE {edges[0]} {edges[1] - 1}")
            server.order(f"CLUSTER SET-CONFIG-EPOCH {at + 1}")
        for server in self.servers[1:]:
            self._meet(server)
        self._settle()

    def add_replica(self, of: ClusterServer) -> ClusterServer:
        """Start a replica of a server, and wait until it has what that has."""
        replica = ClusterServer(self._folder / "replica")
        replica.start()
        self._meet(replica)
        eventually(lambda: replica.says(f"cluster_known_nodes:{SERVERS + 1}"), "the replica knows all")
        eventually(lambda: replica.ask(f"CLUSTER REPLICATE {of.id}") == b"+OK\r\n", "it is a replica")
        eventually(
            lambda: b"master_link_status:up" in replica.ask("INFO replication"), "it has what its master has"
        )
        self.servers.append(replica)
        return replica

    def start(self) -> None:
        for server in self.servers:
            server.start()
        self._settle()

    def kill(self) -> None:
        for server in self.servers:
            server.kill()

    def empty(self) -> None:
        for server in self.servers:
            server.empty()

    @contextmanager
    def paused(self) -> Iterator[None]:
        with ExitStack() as stack:
            for server in self.servers:
                stack.enter_context(server.paused())
            yield

    def _meet(self, server: ClusterServer) -> None:
        server.order(f"CLUSTER MEET 127.0.0.1 {self.servers[0].port} {self.servers[0].bus_port}")

    def _settle(self) -> None:
        def agrees() -> bool:
            return all(
                server.says("cluster_state:ok") and server.says(f"cluster_slots_ok:{SLOTS}")
                for server in self.servers
            )

        eventually(agrees, "the servers are a cluster")


@contextmanager
def cluster_of_three(folder: Path) -> Iterator[ServerCluster]:
    cluster = ServerCluster(folder)
    try:
        cluster.found()
        yield cluster
    finally:
        cluster.kill()
