"""Links that nothing comes over: both ends close them, and what is asked next finds a new one."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from kvfs import limits
from tests.support.machines import machine, machines, payload_of
from tests.support.own_ports import own_port
from tests.support.rogue_peers import (
    ITEM,
    MATCH,
    READ,
    REQUEST,
    REQUEST_MAGIC,
    WANT,
    ask,
    matched,
    receive,
)
from tests.support.waits import WAIT_S, until


async def test_machines_that_read_nothing_keep_the_link_for_match_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REMOTE_IDLE_S", 0.01)
    async with machines(tmp_path, 2) as (first, second):
        digests = first.put(range(1, 41))
        for some in (digests[:20], digests[20:]):
            assert await second.fetch(some) == 20
            await until(lambda: first.cluster.status()["connections"] == 1)
        status = second.cluster.status()
        assert (status["failures"], status["deadlines"], status["peers_up"]) == (0, 0, 1)


async def test_the_server_ends_what_blocks_were_read_over_and_keeps_what_asks_what_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REMOTE_SERVED_IDLE_S", 0.01)
    async with machine(tmp_path / "server", listen=f"127.0.0.1:{own_port()}") as server:
        [digest] = server.put([1])
        namespace = server.bucket.namespace or b""
        match = REQUEST.pack(REQUEST_MAGIC, MATCH, 0, 1, 1000, 1, namespace) + digest
        answer = matched(1, 4096)
        asks, _ = await ask(server.address)
        reads, _ = await ask(server.address)
        async with asks, reads:
            await asks.send_all(match)
            assert await receive(asks, len(answer)) == answer
            read = REQUEST.pack(REQUEST_MAGIC, READ, 0, 1, 1000, 1, namespace)
            await reads.send_all(read + WANT.pack(digest, 4096))
            assert (await receive(reads, ITEM.size + 4096))[ITEM.size :] == payload_of(1, 4096)
            with trio.fail_after(WAIT_S):
                assert await receive(reads, 1) == b""
            await until(lambda: server.cluster.status()["connections"] == 1)
            await asks.send_all(match)
            assert await receive(asks, len(answer)) == answer
        assert server.cluster.status()["served_broken"] == 0
