"""Peers that lie, break off, say nothing or do not know the secret: a miss, a count, and nothing that stays behind."""

from __future__ import annotations

import logging
import os
from collections.abc import (
    AsyncIterator,
    Sequence,
)
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs import limits
from kvfs._native.shared.slots import xxh3_64
from tests.support.machines import Machine, digest_of, machine, machines, open_descriptors, threads
from tests.support.rogue_peers import (
    MATCH,
    READ,
    REQUEST,
    REQUEST_MAGIC,
    Answer,
    Proxy,
    Serve,
    ask,
    having_all,
    item,
    receive,
    send_last,
    serving,
    welcome,
)
from tests.support.waits import until
from tiers.remote import wire

SIZE = 65536
DATA = b"x" * SIZE
SUM = xxh3_64(DATA)
DIGESTS = [digest_of(number) for number in range(1, 9)]


def lie(**wrong: int) -> Answer:
    async def answer(stream: trio.SocketStream, number: int, digests: Sequence[bytes]) -> None:
        head = {"number": number, "index": 0, "size_bytes": SIZE, "checksum": SUM} | wrong
        await stream.send_all(item(**head) + DATA)
        await trio.sleep_forever()

    return answer


async def break_off(stream: trio.SocketStream, number: int, digests: Sequence[bytes]) -> None:
    await stream.send_all(item(number, 0, SIZE, SUM) + DATA[: SIZE // 2])
    await stream.aclose()


async def garbage(stream: trio.SocketStream, number: int, digests: Sequence[bytes]) -> None:
    await stream.send_all(os.urandom(1 << 16))


async def another_size(stream: trio.SocketStream, number: int, digests: Sequence[bytes]) -> None:
    for index in range(len(digests)):
        await stream.send_all(item(number, index, SIZE - 1, xxh3_64(DATA[1:])) + DATA[1:])


async def wrong_bytes(stream: trio.SocketStream, number: int, digests: Sequence[bytes]) -> None:
    for index in range(len(digests)):
        await stream.send_all(item(number, index, SIZE, SUM + 1) + DATA)


async def silence(stream: trio.SocketStream, number: int, digests: Sequence[bytes]) -> None:
    await trio.sleep_forever()


@asynccontextmanager
async def asker_of(tmp_path: Path, serve: Serve) -> AsyncIterator[Machine]:
    """A machine whose only peer is a rogue; afterwards nothing of it is left but what was there before."""
    before = open_descriptors(), threads()
    async with serving(serve) as address, machine(tmp_path / "asker", peers=[address]) as asker:
        yield asker
        assert asker.drafts() == 0
    assert open_descriptors() <= before[0]
    await until(lambda: threads() <= before[1])


@pytest.mark.parametrize(
    "answer",
    [
        lie(size_bytes=SIZE + 1),
        lie(size_bytes=1 << 63),
        lie(number=77),
        lie(index=1),
        lie(index=0xFFFFFFFF),
        lie(magic=1),
        lie(reserved=1),
        lie(status=9),
        lie(status=1),
        lie(status=2),
        garbage,
    ],
)
async def test_what_is_no_answer_ends_the_link_and_is_a_failure(
    tmp_path: Path, answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvfs.remote"):
        async with asker_of(tmp_path, having_all(SIZE, answer)) as asker:
            assert await asker.fetch(DIGESTS) == 0
            [peer] = asker.cluster.status()["peers"]
            assert peer["failures"] >= 1
            assert not peer["is_up"]
            assert peer["blocks"] == 0
            assert any(peer["address"] in record.getMessage() for record in caplog.records)


async def test_a_stream_that_breaks_off_is_a_failure_and_whole_blocks_stay(tmp_path: Path) -> None:
    async with asker_of(tmp_path, having_all(SIZE, break_off)) as asker:
        assert await asker.fetch(DIGESTS) == 0
        assert asker.cluster.status()["failures"] >= 1


async def test_wrong_bytes_are_misses_that_name_the_peer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "kvfs.remote"):
        async with asker_of(tmp_path, having_all(SIZE, wrong_bytes)) as asker:
            assert await asker.fetch(DIGESTS) == 0
            [peer] = asker.cluster.status()["peers"]
            assert peer["mismatches"] == len(DIGESTS)
            assert peer["is_up"]
            assert DIGESTS[0].hex() in caplog.text
            assert peer["address"] in caplog.text


async def test_a_block_of_another_size_than_was_said_is_a_miss(tmp_path: Path) -> None:
    async with asker_of(tmp_path, having_all(SIZE, another_size)) as asker:
        assert await asker.fetch(DIGESTS) == 0
        assert asker.cluster.status()["misses"] == len(DIGESTS)


async def test_a_silent_peer_costs_one_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REMOTE_READ_S", 0.2)
    async with asker_of(tmp_path, having_all(SIZE, silence)) as asker:
        assert await asker.fetch(DIGESTS) == 0
        assert asker.cluster.status()["deadlines"] >= 1
        assert asker.cluster.status()["peers_up"] == 0


async def test_a_cancelled_fetch_ends_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    async with asker_of(tmp_path, having_all(SIZE, silence)) as asker:
        with trio.move_on_after(60) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(asker.fetch, DIGESTS)
                await until(lambda: asker.drafts() == len(DIGESTS))
                nursery.cancel_scope.cancel()
        assert not scope.cancelled_caught
        assert asker.drafts() == 0
        assert await asker.fetch([]) == 0


async def test_who_does_not_know_the_secret_is_told_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with machines(tmp_path, 1) as [server]:
        refused = server.cluster.status()["refused"]
        with caplog.at_level(logging.WARNING, "kvfs.remote"):
            stream, said = await ask(server.address, b"another secret of 32 bytes, or so")
            async with stream:
                assert said == b""
            await until(lambda: server.cluster.status()["refused"] == refused + 1)
        assert "secret" in caplog.text
    async with machine(tmp_path / "asker", peers=["127.0.0.1:1"], secret=b"y" * 32) as asker:
        assert await asker.fetch(DIGESTS) == 0


async def test_a_server_that_does_not_know_the_secret_is_not_asked(tmp_path: Path) -> None:
    async def serve(stream: trio.SocketStream) -> None:
        await welcome(stream, b"another secret of 32 bytes, or so")
        await receive(stream, 1)

    async with asker_of(tmp_path, serve) as asker:
        await until(lambda: asker.cluster.status()["failures"] >= 1)
        assert await asker.fetch(DIGESTS) == 0
        assert "secret" in asker.cluster.peers[0].trouble


async def test_a_foreign_version_and_a_half_greeting_are_refused(tmp_path: Path) -> None:
    async with machines(tmp_path, 1) as [server]:
        refused = server.cluster.status()["refused"]
        host, _, port = server.address.rpartition(":")
        hello = bytearray(wire.Hello(bytes(16), bytes(32)).encode())
        hello[8] += 1
        for said in (bytes(hello), b"GET / HTTP/1.1\r\n" * 4, bytes(hello)[:10]):
            async with await trio.open_tcp_stream(host, int(port)) as stream:
                await send_last(stream, said)
                assert await receive(stream, 1) == b""
        await until(lambda: server.cluster.status()["refused"] == refused + 3)


async def test_a_replayed_greeting_is_refused(tmp_path: Path) -> None:
    async with machines(tmp_path, 1) as [server]:
        host, _, port = server.address.rpartition(":")
        hello = wire.Hello(bytes(16), bytes(32))
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            await stream.send_all(hello.encode())
            nonce = await receive(stream, 32)
            proof = wire.Proofs(b"a secret of the tests, 32 bytes or more", hello, nonce).of_asker()
            await stream.send_all(proof)
            assert len(await receive(stream, wire.WELCOME_BYTES)) == wire.WELCOME_BYTES
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            await stream.send_all(hello.encode())
            await receive(stream, 32)
            await stream.send_all(proof)
            assert await receive(stream, 1) == b""


async def test_requests_outside_of_the_limits_end_the_connection(tmp_path: Path) -> None:
    async with machines(tmp_path, 1) as [server]:
        for wrong in (
            (1, READ, 0, 1, 10, 1),
            (REQUEST_MAGIC, 3, 0, 1, 10, 1),
            (REQUEST_MAGIC, READ, 2, 1, 10, 1),
            (REQUEST_MAGIC, READ, 0, 65, 10, 1),
            (REQUEST_MAGIC, READ, 0, 0, 10, 1),
            (REQUEST_MAGIC, MATCH, 0, 1025, 10, 1),
            (REQUEST_MAGIC, MATCH, 0, 1, 60001, 1),
        ):
            stream, _ = await ask(server.address)
            async with stream:
                await stream.send_all(REQUEST.pack(*wrong, bytes(16)))
                assert await receive(stream, 1) == b""
        await until(lambda: server.cluster.status()["connections"] == 0)
        assert server.cluster.status()["served_broken"] == 7


async def test_a_request_that_breaks_off_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    head = REQUEST.pack(REQUEST_MAGIC, READ, 0, 1, 1000, 5, bytes(16))
    with caplog.at_level(logging.INFO, "kvfs.remote"):
        async with machines(tmp_path, 1) as [server]:
            for said in (head[:1], head[:-1], head, head + bytes(23)):
                stream, _ = await ask(server.address)
                async with stream:
                    await send_last(stream, said)
                    assert await receive(stream, 1) == b""
            await until(lambda: server.cluster.status()["connections"] == 0)
            assert server.cluster.status()["served_requests"] == 0
    assert caplog.text.count("connection ended: Connection reset by peer") == 4


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_any_bytes_after_the_greeting_harm_nobody(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]
) -> None:
    async def run() -> None:
        async with machines(tmp_path_factory.mktemp("any"), 1) as [server]:
            stream, _ = await ask(server.address)
            async with stream:
                magic = REQUEST_MAGIC.to_bytes(4, "little")
                await send_last(stream, b"".join(magic + part for part in parts))
                while await receive(stream, 65536):
                    pass
            await until(lambda: server.cluster.status()["connections"] == 0)

    trio.run(run)


async def test_a_named_object_and_another_namespaces_block_are_absent(tmp_path: Path) -> None:
    async with machines(tmp_path, 1) as [server]:
        [digest] = server.put([1])
        stream, _ = await ask(server.address)
        async with stream:
            for namespace, key in (
                (bytes(16), digest),
                (server.bucket.namespace or b"", (1).to_bytes(16, "big")),
            ):
                head = REQUEST.pack(REQUEST_MAGIC, READ, 0, 1, 1000, 5, namespace)
                await stream.send_all(head + key + (1 << 20).to_bytes(8, "little"))
                assert await receive(stream, 64) == item(5, 0, 0, 0, status=1)[:20] + bytes(44)


@pytest.mark.parametrize("place", [0, 40, 90, 20_000])
async def test_a_proxy_that_cuts_or_flips_costs_misses_and_no_wrong_byte(tmp_path: Path, place: int) -> None:
    async with machines(tmp_path, 1) as [server]:
        digests = server.put(range(1, 9), SIZE)
        for fault in ("cut_after", "flip_at"):
            proxy = Proxy(server.address)
            async with (
                serving(proxy.serve) as address,
                machine(tmp_path / f"{fault}{place}", peers=[address]) as asker,
            ):
                await until(lambda: asker.cluster.status()["peers_up"] == 1)
                setattr(proxy, fault, wire.NONCE_BYTES + wire.WELCOME_BYTES + place)
                here = await asker.fetch(digests)
                for digest in digests:
                    assert asker.read(digest) in (None, server.read(digest))
                assert sum(asker.read(digest) is not None for digest in digests) == here < len(digests)
                assert asker.drafts() == 0
