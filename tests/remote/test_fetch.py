"""Blocks that one machine has and another one asks for."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from kvfs import limits
from kvfs.config.settings import ClusterSettings
from kvfs.errors import ConfigError, InvalidRequest
from kvfs.keys import block_name
from kvfs.limits import MIB
from kvfs.namespaces import Namespace
from tests.support.cold import FolderBucket, options
from tests.support.faulty_device import silent_device
from tests.support.machines import (
    Machine,
    clustered,
    digest_of,
    machine,
    machines,
    payload_of,
    write_secret,
)
from tests.support.own_ports import own_port
from tests.support.rogue_peers import Proxy, serving
from tests.support.stores import BOUND, NAMESPACE, draft_of
from tests.support.waits import WAIT_S, until
from tiers.cold.tier import ColdTier
from tiers.device.device import Device
from tiers.device.threads import thread_device
from tiers.model.objects import Name
from tiers.recovery.start import NvmeOptions, StoreOptions, open_store, start_store
from tiers.remote import wire
from tiers.remote.connections.identity import read_secret
from tiers.store.store import Store

DEPTH = 4
"""Operations at once of a drive that is slow."""


async def test_blocks_of_a_peer_are_fetched_once_and_whole(tmp_path: Path) -> None:
    async with machines(tmp_path, 2) as (first, second):
        digests = first.put(range(1, 41))
        assert await second.fetch(digests) == 40
        for number, digest in enumerate(digests, 1):
            assert second.read(digest) == payload_of(number, 4096)
        info = second.store.catalog.blocks.get(digests[1])
        assert info is not None
        assert info.parent == digests[0]
        assert second.drafts() == 0
        assert second.cluster.status()["fetched_blocks"] == 40
        assert await second.fetch(digests) == 40
        assert second.cluster.status()["fetched_blocks"] == 40
        assert await second.fetch([*digests, digest_of(99)]) == 40


async def test_a_hinted_peer_is_asked_alone_and_without_a_match(tmp_path: Path) -> None:
    async with machines(tmp_path, 3) as (first, second, third):
        digests = first.put(range(1, 5))
        assert await third.fetch(digests, hint=second.address) == 0
        assert await third.fetch(digests[:1], hint=first.address) == 1
        matches = third.cluster.status()["matches"]
        assert await third.fetch(digests, hint=first.address) == 4
        assert third.cluster.status()["matches"] == matches
        larger = first.put([7, 8], 9000)
        assert await third.fetch(larger, hint=first.address) == 2
        assert third.read(larger[1]) == payload_of(8, 9000)
        with pytest.raises(InvalidRequest, match="hint"):
            await third.fetch(digests, hint="127.0.0.1:1")


async def test_what_many_ask_for_at_once_comes_once(tmp_path: Path) -> None:
    async with machines(tmp_path, 2) as (first, second):
        digests = first.put(range(1, 11))
        counts = []

        async def fetch() -> None:
            counts.append(await second.fetch(digests))

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(fetch)
        assert counts == [10] * 5
        assert second.cluster.status()["fetched_blocks"] == 10


@pytest.mark.parametrize("fault", ["cut_after", "stall_after"])
async def test_another_holder_is_asked_where_one_fails_in_the_middle(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REMOTE_READ_S", 0.5)
    async with machines(tmp_path, 2) as (first, second):
        digests = first.put(range(1, 17), 65536)
        second.put(range(1, 17), 65536)
        proxy = Proxy(first.address)
        async with (
            serving(proxy.serve) as address,
            machine(tmp_path / "asker", peers=[address, second.address]) as asker,
        ):
            await until(lambda: asker.cluster.status()["peers_up"] == 2)
            setattr(proxy, fault, wire.NONCE_BYTES + wire.WELCOME_BYTES + 100_000)
            assert await asker.fetch(digests) == 16
            bad, good = asker.cluster.status()["peers"]
            assert bad["failures"] + bad["deadlines"] >= 1
            assert not bad["is_up"]
            assert good["blocks"] >= 8
            for number, digest in enumerate(digests, 1):
                assert asker.read(digest) == payload_of(number, 65536)
            assert asker.drafts() == 0


async def test_a_peer_that_comes_back_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REMOTE_BACKOFF_S", 0.01)
    address = f"127.0.0.1:{own_port()}"
    async with machine(tmp_path / "asker", peers=[address]) as asker:
        await until(lambda: asker.cluster.status()["failures"] >= 2)
        async with machine(tmp_path / "server", listen=address) as server:
            digests = server.put([1, 2])
            await until(lambda: asker.cluster.peers[0].store_id is not None)
            assert await asker.fetch(digests) == 2


async def test_a_checksum_that_is_still_due_is_computed_by_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with machines(tmp_path, 2) as (first, second):
        monkeypatch.setattr(first.store.dram.checksums, "push", lambda _: None)
        [digest] = first.put([1], MIB)
        extent = first.store.lookup_block(digest).extent
        assert extent is not None
        assert first.store.dram.checksum(extent) is None
        assert await second.fetch([digest]) == 1
        assert second.read(digest) == payload_of(1, MIB)


@asynccontextmanager
async def served_from_nvme(
    tmp_path: Path, device: Device | None = None
) -> AsyncIterator[tuple[Machine, Machine]]:
    """A server with an NVMe tier, and a machine that asks it."""
    address = f"127.0.0.1:{own_port()}"
    secret = write_secret(tmp_path / "secret")
    device = device or thread_device()
    try:
        store = await start_store(
            StoreOptions(
                tmp_path / "server",
                dram_bytes=16 * MIB,
                backing="directory",
                nvme=NvmeOptions(device, 16 * MIB, segment_bytes=MIB),
            )
        )
        with store:
            store.create_bucket(BOUND, uid=0, gid=0, namespace=NAMESPACE)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.run)
                async with (
                    clustered(store, ClusterSettings(listen=address, secret_file=secret)) as server,
                    machine(tmp_path / "asker", peers=[address]) as asker,
                ):
                    yield server, asker
                nursery.cancel_scope.cancel()
    finally:
        await device.aclose()


async def leave_dram(store: Store, digests: list[bytes], bucket: bytes = BOUND) -> None:
    await until(lambda: all(map(partial(is_written, store), digests)))
    store.evict(names=[Name(bucket, block_name(digest)) for digest in digests])
    assert {store.lookup_block(digest).tier for digest in digests} == {"nvme"}


def wait_for_drives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have machines wait for a drive as long as a test does: a busy one keeps its drive waiting, too."""
    for name in ("REMOTE_LIFT_WAIT_S", "REMOTE_READ_S"):
        monkeypatch.setattr(limits, name, WAIT_S)


async def test_what_only_nvme_has_is_brought_up_for_a_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_drives(monkeypatch)
    async with served_from_nvme(tmp_path) as (server, asker):
        digests = server.put(range(1, 9), 65536)
        await leave_dram(server.store, digests)
        assert await asker.fetch(digests) == 8
        for number, digest in enumerate(digests, 1):
            assert asker.read(digest) == payload_of(number, 65536)
        assert server.store.usage()["promotions"] == 8


async def test_blocks_below_dram_are_those_of_the_namespace_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_drives(monkeypatch)
    other = Namespace(**{**NAMESPACE.as_mapping(), "model": "another"})
    async with served_from_nvme(tmp_path) as (server, asker):
        store = server.store
        store.create_bucket(b"other", uid=0, gid=0, namespace=other)
        own, others = server.put(range(1, 5)), [digest_of(number) for number in range(5, 9)]
        for digest in others:
            store.seal_block(draft_of(store, b"another's"), b"other", digest, parent=None, uid=0)
        await leave_dram(store, own[1:])
        await leave_dram(store, others, b"other")
        match = partial(asker.cluster.match, asker.bucket)
        assert await match(others) == {}
        assert await match([*own, *others]) == {server.address: 4}
        assert await asker.fetch([*own, *others]) == 4
        assert await asker.fetch(others[:1], hint=server.address) == 0
        assert store.usage()["promotions"] == 3


async def test_a_slow_drive_costs_a_peer_misses_and_no_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slower than a peer waits, and not so slow that it counts as away."""
    monkeypatch.setattr(limits, "NVME_READ_S", WAIT_S)
    device, operations = silent_device(DEPTH)
    async with served_from_nvme(tmp_path, device) as (server, asker):
        digests = server.put(range(1, limits.MAX_REMOTE_LIFTS + 1))
        await leave_dram(server.store, digests)
        operations.silence(lambda operation: not operation.changes)
        assert await asker.fetch(digests) == 0
        [peer] = asker.cluster.status()["peers"]
        assert (peer["misses"], peer["deadlines"], peer["is_up"]) == (len(digests), 0, True)
        assert len(operations.kept) == DEPTH
        await until(lambda: server.cluster.status()["lifts"] == DEPTH)
        assert server.drafts() == DEPTH
        operations.speak()
        await until(lambda: server.cluster.status()["lifts"] == 0)
        assert server.drafts() == 0
        assert server.store.usage()["promotions"] <= DEPTH
        wait_for_drives(monkeypatch)
        assert await asker.fetch(digests) == len(digests)
        for number, digest in enumerate(digests, 1):
            assert asker.read(digest) == payload_of(number, 4096)


async def test_what_only_the_own_cold_tier_has_comes_from_a_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value_s in (("COLD_BACKOFF_S", 0.01), ("MAX_COLD_BACKOFF_S", 0.05), ("COLD_CHECK_S", 0.05)):
        monkeypatch.setattr(limits, name, value_s)
    address = f"127.0.0.1:{own_port()}"
    settings = ClusterSettings(
        peers=(address,),
        secret_file=write_secret(tmp_path / "secret"),
        match_wait_s=limits.MAX_REMOTE_MATCH_S,
    )
    bucket = FolderBucket(tmp_path / "bucket")
    cold = options(bucket)
    with open_store(
        StoreOptions(tmp_path / "asker", dram_bytes=16 * MIB, backing="directory", cold=cold)
    ) as store:
        store.create_bucket(BOUND, uid=0, gid=0, namespace=NAMESPACE)
        tier = store.cold
        assert isinstance(tier, ColdTier)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.run)
            async with (
                machine(tmp_path / "server", listen=address) as server,
                clustered(store, settings) as asker,
            ):
                digests = asker.put([1, 2, 3])
                server.put([1, 2])
                await until(lambda: tier.counts.uploads == 3)
                store.evict(16 * MIB)
                assert {store.lookup_block(digest).tier for digest in digests} == {"cold"}
                await until(lambda: asker.cluster.status()["peers_up"] == 1)
                bucket.down = True
                await until(lambda: not tier.is_up)
                assert await asker.fetch(digests) == 2
                assert [asker.read(digest) for digest in digests[:2]] == [payload_of(n, 4096) for n in (1, 2)]
                bucket.down = False
                await until(lambda: tier.is_up)
                assert await asker.fetch(digests) == 3
            nursery.cancel_scope.cancel()
        await store.finish()


async def test_a_peer_that_closes_costs_no_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REMOTE_BACKOFF_S", 0.01)
    address = f"127.0.0.1:{own_port()}"
    async with machine(tmp_path / "asker", peers=[address]) as asker:
        async with machine(tmp_path / "server", listen=address) as server:
            digests = server.put([1, 2])
            await until(lambda: asker.cluster.peers[0].store_id is not None)
            assert await asker.fetch(digests[:1]) == 1
        assert await asker.fetch(digests) == 1
        assert asker.cluster.status()["deadlines"] == 0


async def test_a_machine_with_a_copied_data_directory_is_not_taken_for_this_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    addresses = [f"127.0.0.{number}:{own_port()}" for number in (1, 2)]
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(machine(first, listen=addresses[0], peers=addresses))
        (second / "data").mkdir(parents=True)
        shutil.copy(first / "data/format.json", second / "data")
        two = await stack.enter_async_context(machine(second, listen=addresses[1], peers=addresses))
        for own, other in ((one, 1), (two, 0)):
            peers = partial(lambda own: own.cluster.status()["peers"], own)
            await until(
                lambda peers=peers: all(each["is_self"] or "copy" in each["trouble"] for each in peers())
            )
            assert [each["is_self"] for each in peers()] == [other == 1, other == 0]
            assert f"{addresses[other]}: its data directory is a copy" in caplog.text


def is_written(store: Store, digest: bytes) -> bool:
    return store.journal.holds(store.lookup_block(digest).object_id)


async def test_blocks_that_this_store_has_no_room_for_are_misses(tmp_path: Path) -> None:
    async with machines(tmp_path, 2) as (first, second):
        digests = first.put(range(1, 3), 3 * MIB)
        held = [second.store.reserve(3 * MIB, uid=0) for _ in range(2)]
        assert await second.fetch(digests) == 0
        for draft in held:
            second.store.abort(draft)
        assert await second.fetch(digests) == 2


@pytest.mark.parametrize(
    ("secret", "mode", "says"), [(b"x" * 31, 0o600, "31 bytes"), (b"x" * 40, 0o640, "0640")]
)
def test_a_weak_or_open_secret_is_refused(tmp_path: Path, secret: bytes, mode: int, says: str) -> None:
    path = write_secret(tmp_path / "secret", secret)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=says):
        read_secret(path)


def test_a_cluster_needs_a_secret_and_names_each_peer_once() -> None:
    with pytest.raises(ValueError, match="secret_file"):
        ClusterSettings(listen="127.0.0.1:9400")
    with pytest.raises(ValueError, match="twice"):
        ClusterSettings(peers=("127.0.0.1:1", "127.0.0.1:1"), secret_file=Path("/x"))
    with pytest.raises(ValueError, match="at most 16"):
        ClusterSettings(peers=tuple(f"127.0.0.1:{port}" for port in range(17)), secret_file=Path("/x"))
    with pytest.raises(ValueError, match="mount_fetches needs peers or a directory"):
        ClusterSettings(listen="127.0.0.1:9400", mount_fetches=True, secret_file=Path("/x"))
