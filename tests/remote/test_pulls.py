"""Machines that ask for pulls: what they are answered, and what those that break the rules cost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from kvfs import limits
from tests.support.machines import Machine, digest_of, machine, open_descriptors
from tests.support.own_ports import own_port
from tests.support.rogue_peers import ask, receive, send_last, serving, welcome
from tests.support.stores import NAMESPACE
from tests.support.waits import until
from tiers.remote.pull_wire import ANSWER_BYTES, ASK, PULL, Pull, decode_answer_head, decode_pulled
from tiers.remote.wire import PULLS, WELCOME_BYTES
from tiers.transfers.other_machines import BROUGHT, MISSING, THERE, Cause, Pulled


@asynccontextmanager
async def asked(tmp_path: Path, *peers: str) -> AsyncIterator[tuple[Machine, trio.SocketStream]]:
    """Run a machine, with a connection for pulls to it."""
    address = f"127.0.0.1:{own_port()}"
    async with machine(tmp_path / "asked", listen=address, peers=peers) as running:
        stream, last = await ask(address, purpose=PULLS)
        assert len(last) == WELCOME_BYTES
        async with stream:
            yield running, stream


async def answer(stream: trio.SocketStream, pull: Pull) -> Pulled:
    await stream.send_all(pull.encode())
    cause, reason_bytes = decode_answer_head(await receive(stream, ANSWER_BYTES), pull)
    count = len(pull.digests)
    return decode_pulled(cause, await receive(stream, count + reason_bytes), count)


def pull_of(*numbers: int, kind: int = PULL, address: str = "127.0.0.9:1") -> Pull:
    return Pull(kind, 7, NAMESPACE.digest, address, [digest_of(number) for number in numbers])


async def test_a_machine_that_is_no_peer_is_refused_and_told_what_is_there(tmp_path: Path) -> None:
    async with asked(tmp_path) as (running, stream):
        running.put([1, 2])
        assert await answer(stream, pull_of(1, 2)) == Pulled(bytes([THERE, THERE]))
        assert await answer(stream, pull_of(2, 3, kind=ASK)) == Pulled(bytes([THERE, MISSING]))
        refused = await answer(stream, pull_of(3))
        assert refused.cause is Cause.REFUSED
        assert "the machine that asks, '127.0.0.9:1' is neither of [cluster] peers" in refused.reason
        assert running.cluster.status()["refused_pulls"] == 1


async def test_a_machine_that_cannot_be_read_from_now_may_be_in_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REMOTE_BACKOFF_S", limits.MAX_REMOTE_BACKOFF_S)
    down = f"127.0.0.1:{own_port()}"
    async with asked(tmp_path, down) as (running, stream):
        await until(lambda: running.cluster.status()["peers_up"] == 0)
        paused = await answer(stream, pull_of(1, address=down))
        assert paused.cause is Cause.PASSING
        assert f"it cannot read from {down} now: cannot be reached" in paused.reason


async def test_a_pull_waits_for_its_turn_no_longer_than_a_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REMOTE_FETCH_S", 0.05)

    async def idle(stream: trio.SocketStream) -> None:
        await welcome(stream)
        await trio.sleep_forever()

    async with serving(idle) as up, asked(tmp_path, up) as (running, stream):
        turns = running.cluster._serving._pulls._turns  # type: ignore[union-attr]
        for each in range(limits.REMOTE_PULLS):
            await turns.acquire_on_behalf_of(each)
        late = await answer(stream, pull_of(1, address=up))
        assert late.cause is Cause.PASSING
        assert "4 other pulls are under way there" in late.reason


@pytest.mark.parametrize(
    "sent",
    [bytes(40), b"", pull_of(1).encode()[:30], pull_of(1, 2).encode()[:-1], b"x" * 5000],
    ids=["zeros", "nothing", "part of a head", "part of a pull", "noise"],
)
async def test_bytes_that_are_no_pull_cost_their_connection_alone(tmp_path: Path, sent: bytes) -> None:
    async with asked(tmp_path) as (running, stream):
        before = open_descriptors()
        other, _ = await ask(running.address, purpose=PULLS)
        async with other:
            await send_last(other, sent)
            assert await receive(other, 1) == b""
        running.put([1])
        assert (await answer(stream, pull_of(1))).statuses == bytes([THERE])
        await until(lambda: open_descriptors() == before)
        assert running.drafts() == 0


async def test_connections_for_pulls_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CLUSTER_NODES", 1)
    async with asked(tmp_path) as (running, stream):
        assert (await answer(stream, pull_of(1, kind=ASK))).statuses == bytes([MISSING])
        other, _ = await ask(running.address, purpose=PULLS)
        async with other:
            assert await receive(other, 1) == b""
        assert (await answer(stream, pull_of(1, kind=ASK))).statuses == bytes([MISSING])


async def test_what_came_is_told_from_what_was_there(tmp_path: Path) -> None:
    addresses = [f"{host}:{own_port()}" for host in ("127.0.0.2", "127.0.0.3")]
    async with (
        machine(tmp_path / "from", listen=addresses[0]) as source,
        machine(tmp_path / "to", listen=addresses[1], peers=addresses[:1]) as running,
    ):
        await until(lambda: running.cluster.status()["peers_up"] == 1)
        source.put(range(1, 4))
        running.put([2])
        stream, _ = await ask(
            running.address, purpose=PULLS
        )  # a store that is not the peer's: by its address
        async with stream:
            pulled = await answer(stream, pull_of(1, 2, 3, 9, address=source.address))
        assert pulled.statuses == bytes([BROUGHT, THERE, BROUGHT, MISSING])
        assert pulled.cause is Cause.NONE
        assert pulled.reason
