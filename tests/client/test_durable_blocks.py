"""Puts of blocks into durable buckets, whatever other buckets hold: what was answered is there in that bucket after
a kill that costs DRAM and index."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

import kvfs
from kvfs import errors
from kvfs.keys import block_name
from kvfs.limits import MIB
from kvfs.system import linux
from tests.support.door import ON_DIRECTORY, need_mount
from tests.support.faulty_device import WrappedDevice
from tests.support.gateway import fails, gateway
from tests.support.service import Service
from tests.support.stores import NAMESPACE
from tests.support.waits import WAIT_S
from tiers.device.device import Device
from tiers.device.threads import thread_device
from tiers.dram import tmpfs
from tiers.model.objects import ObjectInfo
from tiers.recovery.start import NvmeOptions, StoreOptions, start_store
from tiers.sessions.server import SessionServer

pytestmark = [pytest.mark.mount, pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")]

OTHER = kvfs.Namespace(**{**NAMESPACE.as_mapping(), "model": "another"})
KEPT = "kept"


@pytest.fixture
def service() -> Iterator[Service]:
    need_mount()
    with Service(dram="64MiB", nvme="128MiB") as running:
        yield running
        assert not running.complaints()


@pytest.fixture
def client(service: Service) -> Iterator[kvfs.Client]:
    with kvfs.connect(service.mount, timeout_s=WAIT_S) as connected:
        connected.create_bucket(KEPT, durable=True, mode=0o770)
        yield connected


def keys_of(count: int) -> list[bytes]:
    return [b"\1" + os.urandom(15) for _ in range(count)]


def data_of(key: bytes) -> bytes:
    return key * 4096


def put(blocks: kvfs.Blocks, keys: list[bytes]) -> list[bool]:
    return blocks.put(keys, [data_of(key) for key in keys], [None, *keys[:-1]])


def save(blocks: kvfs.Blocks, keys: list[bytes]) -> list[bool]:
    """Put by drafts that the caller fills."""
    drafts = blocks.reserve(keys, [16 * 4096] * len(keys), [None, *keys[:-1]])
    for key, draft in zip(keys, drafts, strict=True):
        if draft is not None:
            draft.write(data_of(key))
    return blocks.seal(drafts)


def held(client: kvfs.Client, bucket: str) -> set[str]:
    return {entry.name for entry in client.list(f"{bucket}/")}


def names_of(bucket: str, keys: list[bytes]) -> set[str]:
    return {f"{bucket}/{block_name(key).decode()}" for key in keys}


def lose_all_but_nvme(service: Service) -> None:
    """Kill the service, and start it as after a loss of power: without DRAM and index."""
    service.kill()
    while tmpfs.is_mounted(service.data / "dram"):
        linux.unmount(service.data / "dram", linux.MNT_DETACH)
    for lost in ("dram", "index"):
        shutil.rmtree(service.data / lost, ignore_errors=True)
    service.start()


@pytest.mark.parametrize("store", [put, save])
@pytest.mark.parametrize("first", [NAMESPACE, OTHER], ids=["same-namespace", "another-namespace"])
def test_a_put_into_a_durable_bucket_is_durable_there(
    service: Service, client: kvfs.Client, first: kvfs.Namespace, store: object
) -> None:
    keys = keys_of(6)
    with client.blocks(first, bucket="cache") as cached:
        assert put(cached, keys[:4]) == [True] * 4
        with client.blocks(NAMESPACE, bucket=KEPT) as kept:
            assert store(kept, keys) == [True] * 6  # type: ignore[operator]
            assert store(kept, keys) == [False] * 6  # type: ignore[operator]
            assert held(client, KEPT) == names_of(KEPT, keys)
            assert held(client, "cache") == set(), "a prefix hash has one bucket"
            assert put(cached, keys) == [False] * 6
            assert (service.mount / names_of(KEPT, keys[:1]).pop()).read_bytes() == data_of(keys[0])
    lose_all_but_nvme(service)
    with kvfs.connect(service.mount, timeout_s=WAIT_S) as again, again.blocks(NAMESPACE, bucket=KEPT) as kept:
        assert held(again, KEPT) == names_of(KEPT, keys)
        assert [bytes(view or b"") for view in kept.get(keys)] == [data_of(key) for key in keys]


def test_a_killed_service_has_it_with_its_index(service: Service, client: kvfs.Client) -> None:
    keys = keys_of(4)
    with client.blocks(NAMESPACE, bucket="cache") as cached, client.blocks(NAMESPACE, bucket=KEPT) as kept:
        put(cached, keys)
        assert put(kept, keys) == [True] * 4
        service.kill()
        service.start()
        assert put(kept, keys) == [False] * 4
        assert kept.remove(keys[:1]) == 1
        assert put(cached, keys[:1]) == [True]


def test_what_another_bucket_promises_to_keep_is_refused(client: kvfs.Client) -> None:
    client.create_bucket("first", durable=True, mode=0o770)
    pinned, durable = keys_of(1), keys_of(1)
    with client.blocks(NAMESPACE, bucket="cache") as cached, client.blocks(NAMESPACE, bucket=KEPT) as kept:
        put(cached, pinned)
        client.pin(*names_of("cache", pinned))
        with client.blocks(NAMESPACE, bucket="first") as first:
            put(first, durable)
        for keys in (pinned, durable):
            with pytest.raises(errors.NotPermitted):
                put(kept, keys)
            with pytest.raises(errors.NotPermitted):
                save(kept, keys)
        assert held(client, "first") == names_of("first", durable)
        assert held(client, "cache") == names_of("cache", pinned)
        client.unpin(*names_of("cache", pinned))
        assert put(kept, pinned) == [True]


class HeldDevice(WrappedDevice):
    """Syncs once it may."""

    def __init__(self, inner: Device) -> None:
        super().__init__(inner)
        self.may_sync = trio.Event()

    async def sync(self, fd: int) -> None:
        await self.may_sync.wait()
        await super().sync(fd)


async def test_there_is_not_said_of_what_another_client_waits_for() -> None:
    [key], device, asked = keys_of(1), HeldDevice(thread_device()), trio.Event()
    answers: list[list[bool]] = []
    clients: list[kvfs.Client] = []

    def opened(socket: Path) -> kvfs.Blocks:
        clients.append(kvfs.connect(socket, timeout_s=WAIT_S))
        blocks = clients[-1].blocks(NAMESPACE, bucket=KEPT)
        put(blocks, keys_of(1))
        return blocks

    async def put_and_note(blocks: kvfs.Blocks) -> None:
        answers.append(await trio.to_thread.run_sync(put, blocks, [key]))
        asked.set()

    with tempfile.TemporaryDirectory(prefix="kvfs-test-") as directory:
        socket = Path(directory) / "kvfs.sock"
        nvme = NvmeOptions(device, 64 * MIB, segment_bytes=MIB)
        options = StoreOptions(Path(directory) / "data", dram_bytes=16 * MIB, backing="directory", nvme=nvme)
        device.may_sync.set()
        store = await start_store(options)
        seal, seals = store.seal_block, trio.Event()

        def note_seal(*arguments: Any, **options: Any) -> ObjectInfo:
            (asked if seals.is_set() else seals).set()
            return seal(*arguments, **options)

        with trio.fail_after(WAIT_S):
            async with trio.open_nursery() as serving:
                serving.start_soon(store.run)
                await serving.start(SessionServer(store, socket).serve)
                store.create_bucket(KEPT.encode(), uid=0, gid=0, durable=True, namespace=NAMESPACE)
                first, second = [await trio.to_thread.run_sync(opened, socket) for _ in range(2)]
                store.seal_block, device.may_sync = note_seal, trio.Event()
                async with trio.open_nursery() as putting:
                    putting.start_soon(put_and_note, first)
                    await seals.wait()
                    putting.start_soon(put_and_note, second)
                    await asked.wait()
                    assert answers == []
                    device.may_sync.set()
                for client in clients:
                    await trio.to_thread.run_sync(client.close)
                assert sorted(answers) == [[False], [True]]
                serving.cancel_scope.cancel()
            await store.finish()
        store.close()
        await device.aclose()


def test_an_s3_put_into_a_durable_bucket_is_durable_there() -> None:
    need_mount()
    [key, other] = keys_of(2)
    name = block_name(key).decode()
    with gateway(nvme="128MiB") as door, door.service.client() as client:
        service, s3 = door.service, door.client()
        for bucket, durable in (("cache", False), (KEPT, True)):
            client.create_bucket(bucket, durable=durable, mode=0o777)
            client.blocks(NAMESPACE, bucket=bucket).close()
        s3.put_object(Bucket="cache", Key=name, Body=data_of(key))
        s3.put_object(Bucket=KEPT, Key=name, Body=data_of(key))
        assert held(client, KEPT) == names_of(KEPT, [key])
        fails(lambda: s3.head_object(Bucket="cache", Key=name), "404")
        s3.put_object(Bucket="cache", Key=block_name(other).decode(), Body=data_of(other))
        source = {"Bucket": "cache", "Key": block_name(other).decode()}
        fails(lambda: s3.copy_object(Bucket=KEPT, Key=source["Key"], CopySource=source), "AccessDenied")
        s3.copy_object(Bucket=KEPT, Key="copy", CopySource=source)
        lose_all_but_nvme(service)
        s3 = door.started_again().client()
        assert s3.get_object(Bucket=KEPT, Key=name)["Body"].read() == data_of(key)
        assert s3.get_object(Bucket=KEPT, Key="copy")["Body"].read() == data_of(other)
