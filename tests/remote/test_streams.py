"""As many streams as bring most, over connections that each have a rate of their own, to a real machine."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace as with_fields
from pathlib import Path
from typing import Literal

import pytest
import trio

from kvfs import limits
from kvfs._native.remote.stream import FOUND
from kvfs.limits import KIB
from tests.support.certificates import ClusterTls
from tests.support.machines import Machine, machines
from tests.support.rogue_peers import Proxy, serving
from tests.support.ucx import fabric_or_skip
from tests.support.waits import WAIT_S
from tiers.remote.link import Want
from tiers.remote.peer import Peer
from tiers.remote.read_queue import Urgency

BLOCK_BYTES = 256 * KIB
STREAM_RATE = 30e6
"""Bytes per second of each connection."""
WINDOW_READS = 8
MOST_READS_OF_A_TRIAL = 2 * limits.MAX_REMOTE_STREAMS + 3 * WINDOW_READS


class SlowConnections(Proxy):
    """Connections with a rate each."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.open = 0

    async def serve(self, stream: trio.SocketStream) -> None:
        self.open += 1
        try:
            await super().serve(stream)
        except* trio.BrokenResourceError:  # the machine has reset a connection that it has no room for
            pass
        finally:
            self.open -= 1

    async def _back(self, server: trio.SocketStream, asker: trio.SocketStream) -> None:
        free_s = trio.current_time()
        async for data in server:
            free_s = max(free_s, trio.current_time()) + len(data) / STREAM_RATE
            await trio.sleep_until(free_s)
            await asker.send_all(data)


@asynccontextmanager
async def slow_peer(
    folder: Path, tls: ClusterTls | None = None
) -> AsyncIterator[tuple[Machine, SlowConnections, Peer]]:
    async with machines(folder, 1, tls=tls) as [server], trio.open_nursery() as nursery:
        proxy = SlowConnections(server.address)
        async with serving(proxy.serve) as address:
            host, _, port = address.rpartition(":")
            peer = Peer(
                address,
                host,
                int(port),
                with_fields(server.cluster._own, store_id=b"an asker's store"),
                want_more=lambda peer: nursery.start_soon(peer.open_more),
            )
            yield server, proxy, peer
            peer.close()
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def reads_of(
    peer: Peer, server: Machine, folder: Path
) -> AsyncIterator[trio.MemoryReceiveChannel[int]]:
    """Read a block again and again, as many at a time as the peer gives; yield where the number of streams comes from
    after each read."""
    [digest] = server.put([1], BLOCK_BYTES)
    send, ended = trio.open_memory_channel[int](0)

    async def read(number: int) -> None:
        path, flags = folder / f"draft-{number}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        want = Want(digest, BLOCK_BYTES, lambda: os.open(path, flags))
        while True:
            async with peer.link(BLOCK_BYTES, Urgency(True)) as link:
                [found] = await peer.read(link, server.bucket.namespace or b"", [want], WAIT_S, urgent=True)
            assert found.status == FOUND
            await send.send(peer.streams)

    with trio.fail_after(WAIT_S):
        async with trio.open_nursery() as nursery:
            for number in range(2 * limits.MAX_REMOTE_STREAMS):
                nursery.start_soon(read, number)
            yield ended
            nursery.cancel_scope.cancel()


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REMOTE_STREAM_WINDOW_BYTES", WINDOW_READS * BLOCK_BYTES)
    monkeypatch.setattr(limits, "REMOTE_STREAM_WINDOW_S", 0.01)


@pytest.mark.usefixtures("small_windows")
async def test_where_each_stream_has_a_rate_of_its_own_there_are_as_many_as_may_be(tmp_path: Path) -> None:
    async with slow_peer(tmp_path) as (server, proxy, peer):
        assert peer.streams == limits.REMOTE_STREAMS
        in_a_row = 0
        async with reads_of(peer, server, tmp_path) as ended:
            while in_a_row <= MOST_READS_OF_A_TRIAL:
                in_a_row = in_a_row + 1 if await ended.receive() == limits.MAX_REMOTE_STREAMS else 0
            assert proxy.open == limits.MAX_REMOTE_STREAMS
        assert peer.counts["failures"] == 0


@pytest.mark.parametrize("is_proved", [False, True], ids=["secret", "certificates"])
@pytest.mark.usefixtures("small_windows")
async def test_a_machine_that_takes_no_more_connections_is_read_over_those_that_there_are(
    tmp_path: Path, cluster_tls: ClusterTls, monkeypatch: pytest.MonkeyPatch, is_proved: bool
) -> None:
    monkeypatch.setattr(limits, "MAX_REMOTE_CONNECTIONS", limits.REMOTE_STREAMS + 1)
    async with slow_peer(tmp_path, tls=cluster_tls if is_proved else None) as (server, _, peer):
        async with reads_of(peer, server, tmp_path) as ended:
            while server.cluster.status()["refused"] == 0:
                await ended.receive()
            for _ in range(100):
                await ended.receive()
        assert (peer.counts["failures"], peer.is_up) == (0, True)
        assert peer.streams <= limits.REMOTE_STREAMS


@pytest.mark.parametrize("transport", ["tcp", "ucx"])
async def test_a_fetch_that_fills_the_streams_has_more_opened(
    tmp_path: Path, transport: Literal["tcp", "ucx"]
) -> None:
    if transport == "ucx":
        fabric_or_skip()
    async with machines(tmp_path, 2, transport=transport) as [server, asker]:
        [peer] = [peer for peer in asker.cluster.peers if not peer.is_self]
        assert (peer._more_opener == peer._opener) is (transport == "tcp")
        peer._streams.wanted = limits.MAX_REMOTE_STREAMS
        number = 1
        with trio.fail_after(WAIT_S):
            while len(peer._links) < limits.MAX_REMOTE_STREAMS:
                digests = server.put(range(number, number + 64), 4 * KIB)
                number += 64
                assert await asker.fetch(digests) == 64
        status = peer.status()
        assert (status["links"], status["streams"]) == (
            limits.MAX_REMOTE_STREAMS + 1,
            limits.MAX_REMOTE_STREAMS,
        )
        assert {link.transport for link in peer._links} == {transport}
        assert peer.counts["failures"] == 0
