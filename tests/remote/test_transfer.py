"""What every transport between two machines does, over real connections: the suite of `tiers.remote.link.PeerLink`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import trio

from kvfs._native.remote import stream as native
from kvfs._native.shared.slots import xxh3_64
from kvfs.errors import DeadlinePassed
from tests.support.certificates import ClusterTls
from tests.support.machines import (
    SECRET,
    Machine,
    digest_of,
    machines,
    open_descriptors,
    payload_of,
    threads,
)
from tests.support.rogue_peers import serve_tls, serving, welcome
from tests.support.ucx import fabric_or_skip
from tests.support.waits import WAIT_S, until
from tiers.remote.connections.fabric import Offer
from tiers.remote.connections.identity import Certificates, Identity
from tiers.remote.link import PeerLink, Want
from tiers.remote.peer import Opener, UcxOpener, open_tcp
from tiers.remote.wire import FABRIC


class Transport(NamedTuple):
    """How two machines are linked."""

    opener: Opener
    tls: ClusterTls | None = None
    name: Literal["tcp", "ucx"] = "tcp"

    async def open(self, address: str) -> tuple[PeerLink, bytes]:
        host, _, port = address.rpartition(":")
        certificates = None if self.tls is None else Certificates(*self.tls)
        return await self.opener(host, int(port), Identity(b"an asker's store", SECRET, certificates))


@pytest.fixture(params=["tcp", "tls", "ucx"])
def transport(request: pytest.FixtureRequest, cluster_tls: ClusterTls) -> Transport:
    if request.param == "ucx":
        return Transport(UcxOpener(fabric_or_skip()), name="ucx")
    return Transport(open_tcp, cluster_tls if request.param == "tls" else None)


@asynccontextmanager
async def linked(folder: Path, transport: Transport) -> AsyncIterator[tuple[Machine, PeerLink]]:
    async with machines(folder, 1, transport.tls, transport.name) as [server]:
        link, store_id = await transport.open(server.address)
        assert store_id == server.store.store_id
        assert link.transport == (transport.name if transport.tls is None else "tls")
        try:
            yield server, link
        finally:
            link.close()


@asynccontextmanager
async def linked_to_silence(transport: Transport) -> AsyncIterator[PeerLink]:
    """A link to a peer that never answers."""

    async def hang(stream: trio.abc.Stream) -> None:
        hello = await welcome(stream)
        if hello.purpose == FABRIC:
            await stream.send_all(Offer().encode())
        await trio.sleep_forever()

    async with serving(hang if transport.tls is None else serve_tls(transport.tls, hang)) as address:
        link, _ = await transport.open(address)
        yield link


def namespace(server: Machine) -> bytes:
    assert server.bucket.namespace is not None
    return server.bucket.namespace


def wants(folder: Path, digests: Sequence[bytes], room_bytes: int) -> list[Want]:
    def open_file(path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    paths = [folder / digest.hex() for digest in digests]
    return [
        Want(digest, room_bytes, lambda path=path: open_file(path))
        for digest, path in zip(digests, paths, strict=True)
    ]


@pytest.mark.parametrize("size_bytes", [1, 4096, 65536, 1 << 20, (3 << 20) + 5])
async def test_blocks_come_whole_with_checksum_and_parent(
    tmp_path: Path, transport: Transport, size_bytes: int
) -> None:
    async with linked(tmp_path, transport) as (server, link):
        digests = server.put([1, 2, 3], size_bytes)
        assert await link.match(namespace(server), b"".join(digests), WAIT_S) == [size_bytes] * 3
        asked = wants(tmp_path, digests, size_bytes)
        before = open_descriptors()
        reads, error = await link.read(namespace(server), asked, WAIT_S, urgent=True)
        assert error is None
        assert link.is_usable
        await until(lambda: open_descriptors() <= before)
        for number, read in enumerate(reads, 1):
            payload = payload_of(number, size_bytes)
            assert read.status == native.FOUND
            assert (read.size_bytes, read.checksum) == (size_bytes, xxh3_64(payload))
            assert read.parent == (digests[number - 2] if number > 1 else bytes(16))
            assert (tmp_path / digests[number - 1].hex()).read_bytes() == payload


async def test_an_empty_block_has_no_bytes(tmp_path: Path, transport: Transport) -> None:
    async with linked(tmp_path, transport) as (server, link):
        digests = server.put([1, 2], 0)
        reads, _ = await link.read(namespace(server), wants(tmp_path, digests, 8), WAIT_S, urgent=False)
        assert [(read.status, read.size_bytes) for read in reads] == [(native.FOUND, 0)] * 2


async def test_absent_and_too_large_blocks_are_told_apart(tmp_path: Path, transport: Transport) -> None:
    async with linked(tmp_path, transport) as (server, link):
        digests = server.put([1, 2], 4096)
        asked = [
            *wants(tmp_path, [digests[0], digest_of(9)], 4096),
            *wants(tmp_path, digests[1:], 4095),
        ]
        reads, error = await link.read(namespace(server), asked, WAIT_S, urgent=True)
        assert error is None
        assert [read.status for read in reads] == [native.FOUND, native.ABSENT, native.TOO_LARGE]
        assert reads[2].size_bytes == 4096
        joined = b"".join([digests[0], digest_of(9), digests[1]])
        assert await link.match(namespace(server), joined, WAIT_S) == [4096]


async def test_64_blocks_and_1024_digests_are_one_call(tmp_path: Path, transport: Transport) -> None:
    async with linked(tmp_path, transport) as (server, link):
        digests = server.put(range(1, 65), 512)
        asked = wants(tmp_path, digests, 512)
        reads, _ = await link.read(namespace(server), asked, WAIT_S, urgent=True)
        assert [read.status for read in reads] == [native.FOUND] * 64
        joined = b"".join([*digests, *(digest_of(number) for number in range(100, 1060))])
        assert len(await link.match(namespace(server), joined, WAIT_S)) == 64


async def test_another_namespace_has_nothing(tmp_path: Path, transport: Transport) -> None:
    async with linked(tmp_path, transport) as (server, link):
        digests = server.put([1], 512)
        assert await link.match(b"another namespac", digests[0], WAIT_S) == []
        reads, _ = await link.read(b"another namespac", wants(tmp_path, digests, 512), WAIT_S, urgent=True)
        assert reads[0].status == native.ABSENT


async def test_a_deadline_ends_the_link_and_closes_every_draft(tmp_path: Path, transport: Transport) -> None:
    async with linked_to_silence(transport) as link:
        before = open_descriptors()
        asked = wants(tmp_path, [digest_of(1), digest_of(2)], 4096)
        reads, error = await link.read(bytes(16), asked, 0.05, urgent=True)
        assert isinstance(error, DeadlinePassed)
        assert [read.status for read in reads] == [native.NOT_ANSWERED] * 2
        assert not link.is_usable
        assert open_descriptors() < before


async def test_a_cancelled_call_ends_the_link(tmp_path: Path, transport: Transport) -> None:
    async with linked_to_silence(transport) as link:
        with trio.CancelScope() as scope:
            scope.cancel()
            await link.read(bytes(16), wants(tmp_path, [digest_of(1)], 1 << 20), WAIT_S, urgent=True)
        assert scope.cancelled_caught
        assert not link.is_usable


async def test_a_peer_that_is_gone_shows_before_the_next_call(tmp_path: Path, transport: Transport) -> None:
    before = open_descriptors(), threads()
    async with machines(tmp_path, 1, transport.tls, transport.name) as [server]:
        link, _ = await transport.open(server.address)
        assert link.is_usable
    await until(lambda: not link.is_usable)
    link.close()
    assert open_descriptors() <= before[0]
    await until(lambda: threads() <= before[1])
