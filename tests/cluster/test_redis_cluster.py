"""A directory on a Redis Cluster of three real servers: what one server's end costs, and who takes its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from kvfs import limits
from kvfs.config.settings import ClusterSettings
from kvfs.errors import ProtocolError
from tests.support.directory_cluster import SERVERS, ServerCluster, cluster_of_three
from tests.support.directory_server import (
    DirectoryServer,
    agreed,
    connected,
    directed_machines,
    directory_server,
    needs_server,
)
from tests.support.machines import Machine, digest_of, machine
from tests.support.own_ports import own_port
from tests.support.waits import WAIT_S, until
from tiers.cluster.location_format import encode_changes
from tiers.cluster.part import DirectoryPart, reaches
from tiers.cluster.redis_cluster import SLOTS, RedisCluster, decode_slots, slot_of
from tiers.cluster.redis_server import RedisServer
from tiers.cluster.scripts import CHANGE, LEND, PREFIX

NUMBERS = range(3, 256, 4)
"""Of blocks that are spread over all parts: their first bytes are these numbers."""


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerCluster]:
    monkeypatch.setattr(limits, "DIRECTORY_BEAT_S", 0.05)
    monkeypatch.setattr(limits, "DIRECTORY_BACKOFF_S", 0.02)
    monkeypatch.setattr(limits, "MAX_DIRECTORY_BACKOFF_S", 0.1)
    monkeypatch.setattr(limits, "DIRECTORY_LOOK_S", 3600.0)  # what changes is seen without a look
    monkeypatch.setattr(limits, "DIRECTORY_RELEASE_S", WAIT_S)
    with cluster_of_three(tmp_path / "directory") as running:
        yield running


def on(machine: Machine, port: int) -> set[int]:
    """Return which of the blocks have their locations on a server, as the machine knows."""
    directory: Any = machine.cluster._directory
    parts = [
        each
        for each in directory._parts
        if directory._server._address_of(each._prefix) == f"127.0.0.1:{port}"
    ]
    return {number for number in NUMBERS if any(part.has(digest_of(number)) for part in parts)}


def alone_says(machine: Machine, why: str) -> bool:
    return why in machine.directory()["trouble"]


def numbers_of(running: list[Machine]) -> list[bytes]:
    directories: list[Any] = [each.cluster._directory for each in running]
    return [each._membership.number for each in directories]


async def known(asking: Machine, holder: Machine) -> set[int] | None:
    """Return the blocks that the holder, and nobody else, is said to have; None where nothing is said."""
    holders = await asking.cluster._directory.holders([digest_of(number) for number in NUMBERS])
    found = zip(NUMBERS, holders or (), strict=holders is not None)
    return None if holders is None else {number for number, some in found if some == (holder.address,)}


async def until_known(asking: Machine, holder: Machine, numbers: set[int]) -> None:
    """Wait until the directory says that the holder has exactly these blocks of all."""
    with trio.fail_after(WAIT_S):
        while await known(asking, holder) != numbers:  # noqa: ASYNC110
            await trio.sleep(0.005)


def test_slots_are_those_of_the_specification() -> None:
    """Its examples, and the key of which it gives the checksum."""
    assert slot_of(b"123456789") == 0x31C3
    assert slot_of(b"{user1000}.following") == slot_of(b"{user1000}.followers") == slot_of(b"user1000")
    assert slot_of(b"foo{}{bar}") != slot_of(b"bar")
    assert slot_of(b"foo{{bar}}zap") == slot_of(b"{bar")
    assert slot_of(b"foo{bar}{zap}") == slot_of(b"bar")


@given(st.integers(1, 64))
def test_each_block_is_in_one_part_and_the_parts_are_spread_over_the_slots(count: int) -> None:
    found = reaches(count)
    assert [byte for each in found for byte in each.first_bytes] == list(range(256))
    assert len({each.prefix for each in found}) == count
    assert (count > 1) == any(b"{" in each.prefix for each in found)
    if count > 1:
        assert [slot_of(each.prefix) * count // SLOTS for each in found] == list(range(count))
    assert reaches(1)[0].prefix == PREFIX


_answers = st.recursive(
    st.none() | st.integers() | st.binary(max_size=6),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=20,
)


_hosts = (
    st.none() | st.text(max_size=8).map(str.encode) | st.ip_addresses().map(lambda each: str(each).encode())
)
_slots = st.integers(-1, SLOTS)
_rows = st.tuples(_slots, _slots, st.tuples(_hosts, st.integers(-1, 1 << 16)))


@given(_answers | st.lists(_rows, max_size=3))
def test_an_answer_that_is_no_map_is_an_error_of_the_protocol(answer: object) -> None:
    """And of what is one servers can be made."""
    try:
        found = decode_slots(answer, "10.0.0.1:6379")
    except ProtocolError:
        return
    assert isinstance(answer, list)
    assert len(found) == len(answer)
    for each in found:
        RedisServer(f"redis://{each.address}/0")


def test_a_password_may_have_any_characters() -> None:
    for url in (
        "redis+cluster://u:p{x}@h:1",
        "redis+cluster://u:a{}b%40@h:1,[::1]:2",
        "rediss+cluster://:p@h:1",
    ):
        made = RedisCluster(url)
        assert made.shown == url.replace(url.partition("://")[2].rpartition("@")[0] + "@", "")
        assert made.trouble


def test_a_server_that_knows_no_host_of_its_own_is_where_it_was_asked() -> None:
    answer = [[0, 99, [b"", 7000, b"id"]], [100, 16383, [b"::1", 7001, b"id"], [b"10.0.0.3", 7002, b"id"]]]
    assert [tuple(each) for each in decode_slots(answer, "10.0.0.1:6379")] == [
        (0, 99, "10.0.0.1:7000"),
        (100, 16383, "[::1]:7001"),
    ]


@pytest.mark.parametrize(
    "url",
    [
        "redis://h:1/0",
        "rediss://u:p%3F@h:1/0",
        "unix:///run/redis",
        "redis+cluster://h:1",
        "rediss+cluster://u:p@h:1,[::1]:2/",
    ],
)
def test_a_directory_is_named_by_its_url(url: str, tmp_path: Path) -> None:
    settings = ClusterSettings(secret_file=tmp_path, directory=SecretStr(url))
    assert settings.directory is not None
    assert settings.directory.get_secret_value() == url


@pytest.mark.parametrize(
    "url",
    [
        "h:1",
        "http://h:1",
        "redis://",
        "redis://u:a?b@h:1/0",
        "redis://u:a#b@h:1/0",
        "redis+cluster://h",
        "redis+cluster://h:1,",
        "redis+cluster://h:1/3",
        "redis+cluster://u:a?b@h:1",
    ],
)
def test_another_directory_is_refused_and_its_password_not_shown(url: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="must be redis://HOST:PORT/DB") as refused:
        ClusterSettings(secret_file=tmp_path, directory=SecretStr(url))
    assert "a?b" not in str(refused.value)
    assert "a#b" not in str(refused.value)


@needs_server
async def test_every_server_has_a_share(tmp_path: Path, servers: ServerCluster) -> None:
    async with directed_machines(tmp_path, 2, servers.url) as (first, second):
        first.put(NUMBERS)
        await until_known(second, first, {*NUMBERS})
        shares = [on(second, server.port) for server in servers.servers]
        assert all(len(share) >= len(NUMBERS) // 6 for share in shares), shares
        assert sum(map(len, shares)) == len(NUMBERS)
        assert len(first.directory()["members"]) == 2
        assert first.directory()["server"] == servers.url
    leases = b"".join(server.ask("KEYS kvfs:*node:*") for server in servers.servers)
    assert leases == b"*0\r\n" * SERVERS, "who stops ends its leases at all"


@needs_server
@pytest.mark.parametrize("at", range(SERVERS))
async def test_a_server_that_ends_takes_its_own_share_along_and_no_other(
    tmp_path: Path, servers: ServerCluster, at: int
) -> None:
    """Also that on which members are, which goes on being known."""
    async with directed_machines(tmp_path, 2, servers.url) as running:
        first, second = running
        first.put(NUMBERS)
        await until_known(second, first, {*NUMBERS})
        lost = on(second, servers.servers[at].port)
        servers.servers[at].kill()
        await until(lambda: not second.directory()["is_up"] and not first.directory()["is_up"])
        assert f":{servers.servers[at].port}: " in second.directory()["trouble"]
        await until_known(second, first, {*NUMBERS} - lost)
        gone, stays = min({*NUMBERS} - lost), max({*NUMBERS} - lost)
        first.store.remove_block(digest_of(gone))
        await until_known(second, first, {*NUMBERS} - lost - {gone})
        assert await second.fetch([digest_of(stays)]) == 1
        servers.servers[at].start()
        first.put([gone])
        second.store.remove_block(digest_of(stays))
        await until_known(second, first, {*NUMBERS})
        await until(lambda: agreed(running))


@needs_server
async def test_a_replica_takes_the_place_of_its_master(tmp_path: Path, servers: ServerCluster) -> None:
    async with directed_machines(tmp_path, 2, servers.url) as (first, second):
        first.put(NUMBERS)
        await until_known(second, first, {*NUMBERS})
        replica = servers.add_replica(servers.servers[0])
        share = on(second, servers.servers[0].port)
        servers.servers[0].kill()
        await until_known(second, first, {*NUMBERS})
        await until(lambda: second.directory()["is_up"])
        assert on(second, replica.port) == share
        late_address = f"127.0.0.9:{own_port()}"
        async with machine(
            tmp_path / "late", listen=late_address, directory=servers.url, match_wait_s=1.0
        ) as late:
            await until(lambda: late.directory()["state"] == "joined")
            await until_known(late, first, {*NUMBERS})


@needs_server
@pytest.mark.parametrize("at", range(SERVERS))
async def test_a_server_that_is_emptied_is_filled_again(
    tmp_path: Path, servers: ServerCluster, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that on which members are, who have their numbers again: leases at the other parts are taken late."""
    lend = DirectoryPart.lend

    async def lend_late(part: DirectoryPart) -> None:
        await trio.sleep(0.2)
        await lend(part)

    async with directed_machines(tmp_path, 2, servers.url) as running:
        first, second = running
        first.put(NUMBERS)
        await until_known(second, first, {*NUMBERS})
        numbers = numbers_of(running)
        monkeypatch.setattr(DirectoryPart, "lend", lend_late)
        servers.servers[at].empty()
        await until_known(second, first, {*NUMBERS})
        await until(lambda: agreed(running))
        assert numbers_of(running) == numbers
        await until_known(second, first, {*NUMBERS})


@needs_server
async def test_a_server_that_has_forgotten_the_cluster_is_not_believed(
    tmp_path: Path, servers: ServerCluster
) -> None:
    """It is the first that is named, and what it had is a replica's now."""
    async with directed_machines(tmp_path, 2, servers.url) as (first, second):
        first.put(NUMBERS)
        replica = servers.add_replica(servers.servers[0])
        servers.servers[0].kill()
        await until(lambda: bool(on(second, replica.port)) and second.directory()["is_up"])
        (servers.servers[0].folder / "nodes.conf").unlink()
        servers.servers[0].start()
        address = f"127.0.0.9:{own_port()}"
        async with machine(
            tmp_path / "late", listen=address, directory=servers.url, match_wait_s=1.0
        ) as third:
            await until(lambda: third.directory()["state"] == "joined")
            await until_known(third, first, {*NUMBERS})
            await until_known(second, first, {*NUMBERS})
            assert (third.directory()["trouble"], second.directory()["trouble"]) == ("", "")


@needs_server
async def test_a_slot_that_moves_holds_up_no_other_part(tmp_path: Path, servers: ServerCluster) -> None:
    async with directed_machines(tmp_path, 2, servers.url) as (first, second):
        first.put(NUMBERS)
        await until_known(second, first, {*NUMBERS})
        directory: Any = second.cluster._directory
        source, target = servers.servers[0], servers.servers[1]
        share = on(second, source.port)
        part = directory._parts[0]
        assert directory._server._address_of(part._prefix) == f"127.0.0.1:{source.port}"
        slot, moving = slot_of(part._prefix), {number for number in NUMBERS if part.has(digest_of(number))}
        assert moving < share
        target.order(f"CLUSTER SETSLOT {slot} IMPORTING {source.id}")
        source.order(f"CLUSTER SETSLOT {slot} MIGRATING {target.id}")
        await until_known(second, first, {*NUMBERS} - moving)
        for _ in range(20):
            assert await known(second, first) == {*NUMBERS} - moving
        source.empty()  # what is left there is not moved
        for server in (target, source, servers.servers[2]):
            server.order(f"CLUSTER SETSLOT {slot} NODE {target.id}")
        await until_known(second, first, {*NUMBERS})
        assert moving <= on(second, target.port)


@needs_server
async def test_members_that_were_forgotten_are_members_again(tmp_path: Path, servers: ServerCluster) -> None:
    """As where the server evicts keys for want of memory."""
    async with directed_machines(tmp_path, 2, servers.url) as running:
        for server in servers.servers:
            if server.ask("EXISTS kvfs:{3}:live").startswith(b":1"):
                server.ask("DEL kvfs:{3}:live")
        await until(lambda: agreed(running))
        first, second = running
        first.put(NUMBERS)
        await until_known(second, first, {*NUMBERS})


@needs_server
async def test_more_servers_than_are_followed_are_refused(
    tmp_path: Path, servers: ServerCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_DIRECTORY_SERVERS", 2)
    address = f"127.0.0.1:{own_port()}"
    async with machine(tmp_path / "m", listen=address, directory=servers.url, match_wait_s=1.0) as alone:
        await until(lambda: "has 3 servers, the limit is 2" in alone.directory()["trouble"])
        assert not alone.directory()["is_up"]


@needs_server
async def test_a_server_that_is_no_cluster_is_said_to_be_none(tmp_path: Path) -> None:
    with directory_server(tmp_path / "directory") as server:
        url, address = f"redis+cluster://127.0.0.1:{server.port}", f"127.0.0.1:{own_port()}"
        async with machine(tmp_path / "m", listen=address, directory=url, match_wait_s=1.0) as alone:
            await until(lambda: "cluster support disabled" in alone.directory()["trouble"])
            assert alone.directory()["state"] == "waits"


@needs_server
async def test_a_cluster_that_is_asked_for_as_one_server_is_not_used(
    tmp_path: Path, servers: ServerCluster
) -> None:
    """What its servers say is that of the scripts' keys, or that these are not all on one."""
    for server in servers.servers:
        url, address = f"redis://127.0.0.1:{server.port}/0", f"127.0.0.1:{own_port()}"
        async with machine(tmp_path / address, listen=address, directory=url, match_wait_s=1.0) as alone:
            await until(lambda at=alone: alone_says(at, "Redis Cluster") or alone_says(at, "cluster node"))
            assert alone.directory()["state"] == "waits"


@needs_server
async def test_a_lent_lease_is_that_of_the_latest_epoch(tmp_path: Path) -> None:
    prefix, own, changes = PREFIX + b"{7}:", b"1" * 16, encode_changes([(digest_of(1), True)])

    async def lend(epoch: int, number: bytes = b"\0\1") -> int:
        return int(await redis.call(LEND, own, b"%d" % epoch, number, b"60000", prefix=prefix))

    with directory_server(tmp_path) as server:
        async with connected(server.url) as redis:
            assert [await lend(epoch) for epoch in (5, 5, 6, 5, 6)] == [1, 0, 1, -1, 0]
            assert [await lend(6, number) for number in (b"\0\2", b"\0\2")] == [1, 0]
            assert await redis.call(CHANGE, own, b"5", changes, prefix=prefix) == -1
            assert await redis.call(CHANGE, own, b"6", changes, prefix=prefix) == 0
            assert isinstance(server, DirectoryServer)
            assert server.ask("KEYS kvfs:{7}:b:*").startswith(b"*1\r\n")
