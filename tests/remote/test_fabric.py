"""Bytes between machines by UCX, here over TCP on the loopback interface: leases; peers that lie, stop or have none."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from kvfs import limits
from kvfs._native.remote import stream as native
from kvfs._native.shared.slots import xxh3_64
from kvfs.errors import KvfsError, ProtocolError
from kvfs.keys import block_name
from tests.support.fabric_rogues import (
    BY_FABRIC,
    IN_PIECES,
    OFFER,
    PIECE_BYTES,
    Gate,
    asking,
    offered,
    offering,
    taken,
)
from tests.support.machines import (
    SECRET,
    Machine,
    digest_of,
    machine,
    machines,
    open_descriptors,
    payload_of,
    threads,
)
from tests.support.rogue_peers import (
    ITEM,
    ITEM_MAGIC,
    READ,
    REQUEST,
    REQUEST_MAGIC,
    Serve,
    having_all,
    item,
    receive,
    serving,
    welcome,
)
from tests.support.stores import BOUND
from tests.support.ucx import fabric_or_skip
from tests.support.waits import WAIT_S, until
from tiers.model.objects import Name
from tiers.remote.connections.fabric import Offer
from tiers.remote.connections.identity import Identity
from tiers.remote.link import PeerLink, Want
from tiers.remote.peer import UcxOpener, open_tcp
from tiers.remote.wire import FABRIC

SIZE = 3 * PIECE_BYTES + 5
LARGE = 12 * PIECE_BYTES
OWN = Identity(b"an asker's store", SECRET)
DIGEST = digest_of(1)


@pytest.fixture(autouse=True)
def opener() -> UcxOpener:
    return UcxOpener(fabric_or_skip())


@asynccontextmanager
async def link_to(serve: Serve, opener: UcxOpener) -> AsyncIterator[PeerLink]:
    """A link to a server; afterwards nothing of it is left."""
    async with serving(serve) as address:
        host, _, port = address.rpartition(":")
        link, _ = await opener(host, int(port), OWN)
        try:
            yield link
        finally:
            link.close()


@asynccontextmanager
async def lender(folder: Path) -> AsyncIterator[Machine]:
    async with machines(folder, 1, transport="ucx") as [running]:
        before = open_descriptors(), threads()
        yield running
        await until(lambda: running.cluster.status()["connections"] == 0)
        running.store.dram.sweep()  # slots that were held
        await until(lambda: open_descriptors() <= before[0])
        await until(lambda: threads() <= before[1])


def draft(folder: Path, name: str = "draft") -> Path:
    path = folder / name
    path.write_bytes(b"")
    return path


def want(path: Path, digest: bytes = DIGEST, room_bytes: int = LARGE) -> Want:
    return Want(digest, room_bytes, lambda: os.open(path, os.O_WRONLY | os.O_CLOEXEC))


async def read(
    link: PeerLink, path: Path, server: Machine | None = None, wait_s: float = WAIT_S
) -> tuple[int, KvfsError | None]:
    namespace = bytes(16) if server is None else server.bucket.namespace or b""
    [found], error = await link.read(namespace, [want(path)], wait_s, urgent=True)
    return found.status, error


def changed(**wrong: int) -> Callable[[bytes], bytes]:
    """Change fields of the item that answers the first READ."""

    def change(data: bytes) -> bytes:
        if data[:4] != ITEM_MAGIC.to_bytes(4, "little"):
            return data
        names = (
            "magic",
            "status",
            "number",
            "index",
            "generation",
            "size_bytes",
            "checksum",
            "parent",
            "zero",
        )
        fields = dict(zip(names, ITEM.unpack(data[:64]), strict=True))
        return (
            ITEM.pack(*(fields | {name: fields[name] + by for name, by in wrong.items()}).values())
            + data[64:]
        )

    return change


@asynccontextmanager
async def gated(
    folder: Path, opener: UcxOpener, change: Callable[[bytes], bytes] = bytes, size_bytes: int = LARGE
) -> AsyncIterator[tuple[Machine, Gate, PeerLink]]:
    """A link to a machine that has the first block, through a gate."""
    async with lender(folder) as server:
        assert server.put([1], size_bytes) == [DIGEST]
        gate = Gate(server.address, change)
        async with link_to(gate.serve, opener) as link:
            assert link.transport == "ucx"
            yield server, gate, link


@pytest.mark.parametrize("by", [-1, 1, -6])
async def test_a_piece_of_another_length_than_its_block_has_ends_the_link(
    tmp_path: Path, opener: UcxOpener, by: int
) -> None:
    async with gated(tmp_path, opener, changed(size_bytes=by), SIZE) as (server, _, link):
        status, error = await read(link, draft(tmp_path), server)
        assert isinstance(error, ProtocolError)
        assert status == native.NOT_ANSWERED
        assert not link.is_usable


async def test_wrong_bytes_in_pieces_are_a_mismatch_and_the_link_goes_on(
    tmp_path: Path, opener: UcxOpener
) -> None:
    async with gated(tmp_path, opener, changed(checksum=1)) as (server, _, link):
        for _ in range(2):
            assert await read(link, draft(tmp_path), server) == (native.MISMATCH, None)
            assert link.is_usable


async def test_pieces_that_never_come_cost_the_deadline_and_nothing_writes_later(
    tmp_path: Path, opener: UcxOpener
) -> None:
    async with gated(tmp_path, opener) as (server, gate, link):
        gate.shut()
        path = draft(tmp_path)
        before, began_s = open_descriptors(), trio.current_time()
        status, error = await read(link, path, server, wait_s=0.5)
        assert isinstance(error, KvfsError)  # its deadline, or the machine's
        assert trio.current_time() - began_s < 5
        assert status == native.NOT_ANSWERED
        assert not link.is_usable
        assert open_descriptors() <= before  # nothing has the draft open
        assert path.stat().st_size == 4 * PIECE_BYTES
        gate.may_pass.set()
        await until(lambda: server.cluster.status()["connections"] == 0)
        assert path.stat().st_size == 4 * PIECE_BYTES


async def test_a_connection_that_ends_within_a_block_ends_the_link(tmp_path: Path, opener: UcxOpener) -> None:
    async with gated(tmp_path, opener) as (server, gate, link):
        gate.shut()

        async def end() -> None:
            await gate.held.wait()
            gate.ends.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(end)
            status, error = await read(link, draft(tmp_path), server)
        assert type(error) is KvfsError
        assert status == native.NOT_ANSWERED


async def test_reads_that_are_cancelled_within_a_block_harm_no_server(
    tmp_path: Path, opener: UcxOpener
) -> None:
    async with lender(tmp_path) as server:
        server.put([1], LARGE)
        for _ in range(20):
            gate = Gate(server.address)
            gate.shut()
            async with link_to(gate.serve, opener) as link, trio.open_nursery() as nursery:
                nursery.start_soon(read, link, draft(tmp_path), server)
                await gate.held.wait()
                gate.may_pass.set()
                nursery.cancel_scope.cancel()


async def test_pieces_without_a_fabric_are_no_answer(tmp_path: Path) -> None:
    async def answer(stream: trio.SocketStream, number: int, digests: Sequence[bytes]) -> None:
        await stream.send_all(item(number, 0, SIZE, 1, status=IN_PIECES))

    async with serving(having_all(SIZE, answer)) as address:
        host, _, port = address.rpartition(":")
        link, _ = await open_tcp(host, int(port), OWN)
        _, error = await read(link, draft(tmp_path))
        link.close()
        assert isinstance(error, ProtocolError)


@pytest.mark.parametrize(
    "wrong",
    [
        {"magic": b"KVFX"},
        {"address_bytes": limits.MAX_FABRIC_ADDRESS_BYTES + 1},
        {"zero": 1},
        {"checksum": 1},
        {"address_bytes": 7},
    ],
)
async def test_an_offer_outside_of_the_limits_is_none(
    opener: UcxOpener, wrong: dict[str, bytes | int]
) -> None:
    data = os.urandom(300)
    fields = {"magic": b"KVFB", "major": 1, "minor": 13, "address_bytes": 300, "zero": 0, "tag": 0}
    head = OFFER.pack(*(fields | {"checksum": xxh3_64(data)} | wrong).values())
    async with serving(offering(head + data + bytes(1 << 16))) as address:
        host, _, port = address.rpartition(":")
        with pytest.raises(ProtocolError):
            await opener(host, int(port), OWN)


async def test_a_worker_that_is_not_reached_leaves_tcp_for_a_while(
    tmp_path: Path, opener: UcxOpener, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REMOTE_PROBE_S", 0.3)
    async with lender(tmp_path) as server:
        async with offered(server) as (_, offer):
            pass
        # The worker goes, and nobody answers there.
        async with serving(offering(offer)) as address:
            host, _, port = address.rpartition(":")
            for _ in range(2):
                link, _ = await opener(host, int(port), OWN)
                assert link.transport == "tcp"
                assert await read(link, draft(tmp_path)) == (native.ABSENT, None)
                link.close()
        assert len(re.findall("bytes come over TCP: UCX: [A-Z]", caplog.text)) == 1


async def test_a_further_link_to_a_machine_without_ucx_is_as_the_others(
    tmp_path: Path, opener: UcxOpener
) -> None:
    async with machines(tmp_path, 1) as [server]:
        host, _, port = server.address.rpartition(":")
        for open_link in (opener, opener.beside):
            link, _ = await open_link(host, int(port), OWN)
            assert link.transport == "tcp"
            assert await read(link, draft(tmp_path)) == (native.ABSENT, None)
            link.close()


async def test_a_further_link_that_there_is_no_room_for_says_nothing_of_ucx(
    tmp_path: Path, opener: UcxOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_REMOTE_CONNECTIONS", 2)
    async with lender(tmp_path) as server:
        host, _, port = server.address.rpartition(":")
        links = [(await opener(host, int(port), OWN))[0], (await opener.beside(host, int(port), OWN))[0]]
        with pytest.raises((KvfsError, OSError)):
            await opener.beside(host, int(port), OWN)
        links.pop().close()
        await until(lambda: server.cluster.status()["connections"] == 1)
        links.append((await opener(host, int(port), OWN))[0])
        assert [link.transport for link in links] == ["ucx", "ucx"]
        for link in links:
            link.close()


@pytest.mark.parametrize(
    "said", [taken(13), taken(0), taken(1, magic=1), taken(1, reserved=1), taken(1 << 63), b"y" * 16]
)
async def test_what_no_asker_says_of_pieces_ends_the_connection(
    tmp_path: Path, opener: UcxOpener, said: bytes
) -> None:
    async with lender(tmp_path) as server:
        [digest] = server.put([1], LARGE)
        async with asking(server, fabric_or_skip()) as (stream, _):
            await ask_for(server, stream, digest, 60_000)
            assert len(await receive(stream, 64)) == 64
            await stream.send_all(said)
            assert await receive(stream, 1) == b""
        await until(lambda: server.cluster.status()["served_broken"] == 1)


async def test_an_asker_that_takes_nothing_is_served_until_its_deadline(tmp_path: Path) -> None:
    async with lender(tmp_path) as server:
        [digest] = server.put([1], LARGE)
        async with asking(server, fabric_or_skip()) as (stream, _):
            await ask_for(server, stream, digest, 200)
            assert len(await receive(stream, 65)) == 64  # the item, and the end


async def test_an_asker_that_declined_gets_no_pieces(tmp_path: Path) -> None:
    async with lender(tmp_path) as server:
        [digest] = server.put([1], LARGE)
        async with offered(server) as (stream, _):
            await stream.send_all(Offer().encode())
            await ask_for(server, stream, digest, 60_000)
            assert await receive(stream, 1) == b""
        await until(lambda: server.cluster.status()["served_broken"] == 1)


async def ask_for(server: Machine, stream: trio.SocketStream, digest: bytes, wait_ms: int) -> None:
    namespace = server.bucket.namespace or b""
    head = REQUEST.pack(REQUEST_MAGIC, READ, BY_FABRIC, 1, wait_ms, 1, namespace)
    await stream.send_all(head + digest + LARGE.to_bytes(8, "little"))


async def test_a_slot_that_is_evicted_while_it_is_read_goes_out_as_it_was(
    tmp_path: Path, opener: UcxOpener
) -> None:
    async with gated(tmp_path, opener) as (server, gate, link):
        path, found = draft(tmp_path), []
        gate.shut()

        async def fetch() -> None:
            found.append(await read(link, path, server))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetch)
            await gate.held.wait()
            server.store.evict(names=[Name(BOUND, block_name(DIGEST))])
            assert server.read(DIGEST) is None
            server.put(range(2, 4), LARGE)  # in slots that are free
            gate.may_pass.set()
        assert found == [(native.FOUND, None)]
        assert path.read_bytes() == payload_of(1, LARGE)


@pytest.mark.parametrize("largest_eager", ["auto", "inf"])
async def test_small_and_large_blocks_of_a_read_come_in_their_order(
    tmp_path: Path, largest_eager: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where UCX sends all at once, as over RDMA, so that it finds bytes of a receive that it begins: it ends that
    within the call, and calls back from there."""
    monkeypatch.setenv("UCX_RNDV_THRESH", largest_eager)
    opener = UcxOpener(fabric_or_skip())
    sizes = [LARGE, 5, 16_384, 16_385, 0, PIECE_BYTES, 2 * PIECE_BYTES + 1]
    async with lender(tmp_path) as server:
        digests = [server.put([number], size)[0] for number, size in enumerate(sizes, 1)]
        host, _, port = server.address.rpartition(":")
        link, _ = await opener(host, int(port), OWN)
        for _ in range(3):
            paths = [draft(tmp_path, digest.hex()) for digest in digests]
            wants = [want(path, digest) for path, digest in zip(paths, digests, strict=True)]
            found, error = await link.read(server.bucket.namespace or b"", wants, WAIT_S, urgent=False)
            assert error is None
            assert [each.status for each in found] == [native.FOUND] * len(sizes)
            assert [path.read_bytes() for path in paths] == [
                payload_of(number, size) for number, size in enumerate(sizes, 1)
            ]
        link.close()


async def test_machines_of_which_one_has_no_ucx_use_tcp_and_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        machines(tmp_path, 1) as [server],
        machine(tmp_path / "asker", peers=[server.address], transport="ucx") as asker,
    ):
        digests = server.put(range(1, 5), SIZE)
        await until(lambda: asker.cluster.status()["peers_up"] == 1)
        with caplog.at_level(logging.WARNING, "kvfs.remote"):
            assert await asker.fetch(digests) == 4
        assert caplog.text.count("bytes come over TCP: it has no UCX") == 1
        assert asker.cluster.status()["peers"][0]["transport"] == "tcp"


@pytest.mark.parametrize(
    ("pause_s", "asked"),
    [(limits.REMOTE_WITHOUT_FABRIC_S, [FABRIC, 0, 0]), (0.0, [FABRIC, 0, FABRIC, 0])],
    ids=["within the pause", "after it"],
)
async def test_a_kvfs_that_knows_nothing_of_it_is_asked_again_after_a_pause(
    opener: UcxOpener, monkeypatch: pytest.MonkeyPatch, pause_s: float, asked: list[int]
) -> None:
    monkeypatch.setattr(limits, "REMOTE_WITHOUT_FABRIC_S", pause_s)
    purposes: list[int] = []

    async def serve(stream: trio.SocketStream) -> None:
        peeked = await stream.receive_some(64)
        purposes.append(int.from_bytes(peeked[12:16], "little"))
        if purposes[-1] == FABRIC:
            return  # ends it without a nonce
        await welcome(_Again(peeked, stream))
        await trio.sleep_forever()

    async with serving(serve) as address:
        host, _, port = address.rpartition(":")
        for _ in range(2):
            link, _ = await opener(host, int(port), OWN)
            assert link.transport == "tcp"
            link.close()
    assert purposes == asked


class _Again(trio.abc.Stream):
    """A stream of which some bytes were read already."""

    def __init__(self, read: bytes, stream: trio.SocketStream) -> None:
        self._read, self._stream = read, stream

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        data, self._read = self._read, b""
        return data or await self._stream.receive_some(max_bytes)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._stream.aclose()
