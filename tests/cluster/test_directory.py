"""Machines that find each other's blocks by a directory on a real server, and what its failures cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from kvfs import limits
from tests.support.directory_cluster import ServerCluster, cluster_of_three
from tests.support.directory_server import (
    DirectoryServer,
    agreed,
    connected,
    directed_machines,
    directory_server,
    needs_server,
)
from tests.support.machines import Machine, digest_of, machine, payload_of
from tests.support.own_ports import own_port
from tests.support.waits import WAIT_S, until
from tiers.cluster.membership import Membership
from tiers.cluster.scripts import BEAT


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DirectoryServer]:
    with directory_server(tmp_path) as running:
        yield running


@pytest.fixture(params=[directory_server, cluster_of_three], ids=["a server", "three servers"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DirectoryServer | ServerCluster]:
    with request.param(tmp_path / "directory") as running:
        yield running


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten what a test would wait for."""
    monkeypatch.setattr(limits, "DIRECTORY_BEAT_S", 0.05)
    monkeypatch.setattr(limits, "DIRECTORY_BACKOFF_S", 0.02)
    monkeypatch.setattr(limits, "MAX_DIRECTORY_BACKOFF_S", 0.1)


pytestmark = [needs_server, pytest.mark.usefixtures("beats")]


async def located(machine: Machine, digests: list[bytes]) -> dict[str, int]:
    return await machine.cluster.match(machine.bucket, digests)


async def until_located(machine: Machine, digests: list[bytes], expected: dict[str, int]) -> None:
    with trio.fail_after(WAIT_S):
        while await located(machine, digests) != expected:  # noqa: ASYNC110
            await trio.sleep(0.005)


async def test_a_block_put_on_one_machine_is_read_on_another_without_a_hint(
    tmp_path: Path, either: DirectoryServer | ServerCluster
) -> None:
    async with directed_machines(tmp_path, 3, either.url) as (first, second, third):
        digests = first.put(range(1, 65))
        await until_located(second, digests, {first.address: 64})
        assert await second.fetch(digests) == 64
        assert [second.read(each) for each in digests] == [payload_of(n, 4096) for n in range(1, 65)]
        await until_located(third, digests, {first.address: 64, second.address: 64})
        assert third.directory()["failed_lookups"] == 0


async def test_a_request_is_read_from_several_machines_where_each_has_a_part(
    tmp_path: Path, either: DirectoryServer | ServerCluster
) -> None:
    async with directed_machines(tmp_path, 3, either.url) as (first, second, third):
        a, b = first.put(range(1, 5)), second.put(range(5, 9))
        await until_located(third, b, {second.address: 4})
        await until_located(third, a, {first.address: 4})
        assert await third.fetch([*a, digest_of(99), *b]) == 8


async def test_an_evicted_block_is_located_no_more(tmp_path: Path, server: DirectoryServer) -> None:
    async with directed_machines(tmp_path, 2, server.url) as (first, second):
        digests = first.put([1, 2])
        await until_located(second, digests, {first.address: 2})
        first.store.remove_block(digests[1])
        await until_located(second, digests, {first.address: 1})
        first.store.remove_block(digests[0])
        await until_located(second, digests, {})
        assert server.ask("EXISTS kvfs:b:" + digests[0][:2].decode("latin1")) == b":0\r\n"


async def test_an_emptied_directory_is_healed_by_manifests(
    tmp_path: Path, either: DirectoryServer | ServerCluster
) -> None:
    async with directed_machines(tmp_path, 3, either.url) as running:
        first, second, _ = running
        digests = first.put(range(1, 33))
        await until_located(second, digests, {first.address: 32})
        either.empty()
        more = first.put([40])
        await until_located(second, [*digests, *more], {first.address: 33})
        await until(lambda: agreed(running))


async def test_a_killed_server_costs_a_miss_and_is_used_again_when_it_is_back(
    tmp_path: Path, either: DirectoryServer | ServerCluster
) -> None:
    wait_s = limits.MAX_REMOTE_MATCH_S
    async with directed_machines(tmp_path, 2, either.url, match_wait_s=wait_s) as running:
        first, second = running
        digests = first.put(range(1, 9))
        await until_located(second, digests, {first.address: 8})
        either.kill()
        with trio.fail_after(wait_s / 2):
            assert await second.fetch(digests) == 0
        more = first.put([20])  # the local door does not notice
        assert first.read(more[0]) == payload_of(20, 4096)
        await until(lambda: not second.directory()["is_up"])
        assert second.directory()["trouble"]
        either.start()
        await until_located(second, [*digests, *more], {first.address: 9})
        assert await second.fetch(digests) == 8


async def test_a_paused_server_costs_one_bounded_wait(
    tmp_path: Path, server: DirectoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "DIRECTORY_CALL_S", 20.0)  # so that no stall of this machine is taken for it
    async with directed_machines(tmp_path, 2, server.url, match_wait_s=0.05) as running:
        first, second = running
        digests = first.put(range(1, 9))
        await until(lambda: agreed(running))
        with server.paused():
            began = time.monotonic()
            assert await second.fetch(digests) == 0
            assert time.monotonic() - began < limits.DIRECTORY_CALL_S / 2
            put = time.monotonic()
            for number in range(100, 200):
                first.put([number])
            assert time.monotonic() - put < limits.DIRECTORY_CALL_S
        with trio.fail_after(WAIT_S):
            while await second.fetch(digests) != 8:  # noqa: ASYNC110
                await trio.sleep(0.01)
        await until_located(second, [digest_of(199)], {first.address: 1})


async def test_changes_beyond_the_bound_are_healed_by_a_manifest(
    tmp_path: Path, server: DirectoryServer
) -> None:
    async with directed_machines(tmp_path, 2, server.url) as (first, second):
        pending = first.cluster._directory._parts[0].locations._pending  # type: ignore[attr-defined]
        pending._most = 4
        digests = first.put(range(1, 65))
        await until_located(second, digests, {first.address: 64})
        assert first.directory()["dropped"] > 0
        await until(lambda: first.directory()["manifests"] > 1)


async def test_what_a_machine_that_ended_held_is_taken_out_by_anothers_manifest(
    tmp_path: Path, server: DirectoryServer
) -> None:
    async with directed_machines(tmp_path, 1, server.url) as (first,):
        first.put(range(1, 17))
        await until(lambda: first.directory()["written"] >= 16)
        assert server.ask("HLEN kvfs:numbers") == b":1\r\n"
    (tmp_path / "later").mkdir()
    async with directed_machines(tmp_path / "later", 1, server.url):
        assert server.ask("KEYS kvfs:b:*") == b"*0\r\n"


async def test_a_machine_that_is_refused_reads_by_the_members_of_now(
    tmp_path: Path, either: DirectoryServer | ServerCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with directed_machines(tmp_path, 1, either.url) as (first,):
        monkeypatch.setattr(limits, "MAX_CLUSTER_NODES", 1)
        digests = first.put(range(1, 9))
        address = f"127.0.0.9:{own_port()}"
        async with machine(tmp_path / "late", listen=address, directory=either.url, match_wait_s=1.0) as late:
            await until(lambda: late.directory()["state"] == "refused")
            await until_located(late, digests, {first.address: 8})
            assert await late.fetch(digests) == 8
            assert [each["address"] for each in first.directory()["members"]] == [first.address]


async def test_a_machine_that_was_overtaken_sees_who_comes(tmp_path: Path, server: DirectoryServer) -> None:
    async with directed_machines(tmp_path, 1, server.url) as (first,), connected(server.url) as redis:
        own = first.directory()
        start = Membership(first.store.store_id, first.address, own["epoch"] + 1)
        start.take(await redis.call(BEAT, *start.arguments({})))
        await until(lambda: first.directory()["state"] == "refused")
        other = Membership(b"2" * 16, "10.0.0.2:9400", 5)
        other.take(await redis.call(BEAT, *other.arguments({})))
        await until(lambda: first.directory()["members_count"] == 2)
        assert first.directory()["state"] == "refused"
        assert "has started elsewhere" in first.directory()["trouble"]


async def test_a_block_and_its_holder_take_forty_bytes_at_most(
    tmp_path: Path, server: DirectoryServer
) -> None:
    """With 300,000 blocks spread as prefix hashes are: 5 a hash. More are fewer bytes each."""
    body = (
        "for i = 1, 300000 do local d = redis.sha1hex(i); "
        "redis.call('HSET', 'kvfs:b:' .. d:sub(1, 4), d:sub(5, 12), '01') end return 1"
    )
    before = used_bytes(server)
    assert server.ask(f'EVAL "{body}" 0') == b":1\r\n"
    assert (used_bytes(server) - before) / 300_000 <= 40


def used_bytes(server: DirectoryServer) -> int:
    [line] = [each for each in server.ask("INFO memory").split(b"\r\n") if each.startswith(b"used_memory:")]
    return int(line.partition(b":")[2])
