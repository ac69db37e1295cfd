"""Named objects that a start took over: verified before it in durable buckets, in caches when somebody asks."""

from __future__ import annotations

import mmap
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvfs._native.shared.table import SEALED, TIER_DRAM, TIER_NVME, TIER_UNVERIFIED, Table
from kvfs.errors import NotFound
from kvfs.limits import MIB
from tests.recovery.test_unverified import flip, kill, opened
from tests.support.door import TEST_MODES, need_mount
from tests.support.gateway import fails, gateway
from tests.support.posix import pattern
from tests.support.service import Service
from tests.support.small_store import checksums
from tests.support.stores import keys, put, read
from tests.support.unverified_service import MODULE
from tests.support.waits import WAIT_S, eventually
from tiers.device.device import open_device
from tiers.model.objects import Directory, Name, ObjectInfo
from tiers.nvme.write_behind import NvmeJournal
from tiers.recovery.start import NvmeOptions, StoreOptions, open_store, start_store
from tiers.store.store import Store

CACHE, DURABLE = b"cache", b"durable"
UNIT = b"f" * 32 + b"/"
KEYS = [b"file-%d" % i for i in range(8)]
DATA = {key: pattern(i, 1 + 40_000 * i) for i, key in enumerate(KEYS)}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """What a killed store left: objects in a cache, some of them a unit."""
    store = opened(tmp_path / "data")
    store.create_bucket(CACHE, uid=0, gid=0)
    for key, content in DATA.items():
        put(store, key, content, bucket=CACHE)
    for i in range(3):
        put(store, UNIT + b"%d" % i, b"layer" * 100, bucket=CACHE)
    store.dram.checksums.wait(WAIT_S)
    kill(store)
    return tmp_path / "data"


@pytest.fixture
def store(data: Path) -> Iterator[Store]:
    with opened(data) as again:
        yield again


def found(store: Store, bucket: bytes, key: bytes) -> ObjectInfo:
    info = store.lookup(Name(bucket, key))
    assert not isinstance(info, Directory)
    return info


def damage(store: Store, bucket: bytes, key: bytes) -> None:
    entry = store.table.get(found(store, bucket, key).key.digest)
    assert entry is not None
    flip(store.dram.directory / f"{entry.slot:08x}")


def tiers_of(store: Store, bucket: bytes) -> set[int]:
    entries = [store.table.get(found(store, bucket, key).key.digest) for key in keys(store, bucket)]
    return {0 if entry is None else entry.tiers for entry in entries}


async def loaded(store: Store, bucket: bytes, key: bytes) -> bytes:
    """Read as doors do. Raises NotFound."""
    return read(store, await store.load(found(store, bucket, key), uid=0))


async def test_an_object_of_a_cache_is_there_and_unread_until_somebody_asks(store: Store) -> None:
    assert tiers_of(store, CACHE) == {TIER_UNVERIFIED}
    assert store.usage()["unverified"] == len(keys(store, CACHE)) == len(DATA) + 3
    assert (found(store, CACHE, KEYS[5]).extent, found(store, CACHE, KEYS[5]).tier) == (None, "dram")
    assert {key: await loaded(store, CACHE, key) for key in DATA} == DATA
    assert tiers_of(store, CACHE) == {TIER_DRAM, TIER_UNVERIFIED}
    await store.verifier.run()
    assert tiers_of(store, CACHE) == {TIER_DRAM}


@asynccontextmanager
async def over_nvme(data: Path, *, killed: bool = False) -> AsyncIterator[Store]:
    device = open_device("threads")
    nvme = NvmeOptions(device, 16 * MIB, segment_bytes=MIB)
    store = await start_store(
        StoreOptions(data, dram_bytes=32 * MIB, max_slots=128, backing="directory", nvme=nvme)
    )
    try:
        yield store
    finally:
        if killed:
            assert isinstance(store.journal, NvmeJournal)
            store.journal.nvme.pool.close_files()
            kill(store)
        else:
            store.close()
        await device.aclose()


async def test_the_earlier_object_of_a_durable_bucket_comes_back_at_the_start(tmp_path: Path) -> None:
    """Of two that nobody was answered for one is damaged, and only the log has what it replaced."""
    async with over_nvme(tmp_path / "data", killed=True) as store:
        store.create_bucket(DURABLE, uid=0, gid=0, durable=True)
        for key in KEYS[:2]:
            put(store, key, b"earlier", bucket=DURABLE)
        assert isinstance(store.journal, NvmeJournal)
        await store.journal.nvme.log.drain()
        for key in KEYS[:2]:
            put(store, key, b"later", bucket=DURABLE)
        store.dram.checksums.wait(WAIT_S)
        damage(store, DURABLE, KEYS[1])
    async with over_nvme(tmp_path / "data") as again:
        assert tiers_of(again, DURABLE) == {TIER_DRAM | TIER_NVME, TIER_NVME}
        assert await loaded(again, DURABLE, KEYS[0]) == b"later"
        assert await loaded(again, DURABLE, KEYS[1]) == b"earlier"


@pytest.mark.parametrize("by", ["reader", "background", "lower tier"])
async def test_a_damaged_object_of_a_cache_is_as_if_evicted(store: Store, by: str) -> None:
    damage(store, CACHE, KEYS[3])
    if by == "reader":
        with pytest.raises(NotFound):
            await loaded(store, CACHE, KEYS[3])
    elif by == "background":
        await store.verifier.run()
    else:
        assert store.verifier.checked(found(store, CACHE, KEYS[3]).key.digest) is None
    assert keys(store, CACHE) == [
        *(UNIT + b"%d" % i for i in range(3)),
        *(key for key in DATA if key != KEYS[3]),
    ]
    assert store.names.get(CACHE, KEYS[3]) is None
    put(store, KEYS[3], b"another", bucket=CACHE)
    assert await loaded(store, CACHE, KEYS[3]) == b"another"


async def test_a_unit_goes_with_its_damaged_file(store: Store) -> None:
    damage(store, CACHE, UNIT + b"1")
    await store.verifier.run()
    assert keys(store, CACHE) == KEYS
    assert store.find_path(Name(CACHE, UNIT[:-1])) is None


async def test_a_file_of_another_size_or_without_one_is_a_miss(store: Store) -> None:
    for key, change in ((KEYS[2], Path.unlink), (KEYS[4], lambda path: os.truncate(path, 5))):
        entry = store.table.get(found(store, CACHE, key).key.digest)
        assert entry is not None
        change(store.dram.directory / f"{entry.slot:08x}")
        with pytest.raises(NotFound):
            await loaded(store, CACHE, key)


async def test_what_was_renamed_into_a_durable_bucket_is_verified_before_it_is_durable(data: Path) -> None:
    async with over_nvme(data) as store:
        store.create_bucket(DURABLE, uid=0, gid=0, durable=True)
        damage(store, CACHE, KEYS[3])
        for key in (KEYS[3], KEYS[4]):
            store.rename(Name(CACHE, key), Name(DURABLE, b"renamed-" + key))
        await store.finish()
        assert await loaded(store, DURABLE, b"renamed-" + KEYS[4]) == DATA[KEYS[4]]
        assert store.catalog.tiers_of(found(store, DURABLE, b"renamed-" + KEYS[4]).key.digest) & TIER_NVME
        assert b"renamed-" + KEYS[3] not in keys(store, DURABLE)


def test_what_a_smaller_tier_could_not_take_is_verified_before(tmp_path: Path) -> None:
    """It would be larger than DRAM takes, for doors that ask whether they have to read it elsewhere."""
    before = opened(tmp_path / "data")
    before.create_bucket(CACHE, uid=0, gid=0)
    put(before, b"large", bytes(6 * MIB), bucket=CACHE)
    before.dram.checksums.wait(WAIT_S)
    kill(before)
    smaller = StoreOptions(tmp_path / "data", dram_bytes=16 * MIB, max_slots=128, backing="directory")
    with open_store(smaller) as again:
        assert tiers_of(again, CACHE) == {TIER_DRAM}
        assert read(again, found(again, CACHE, b"large")) == bytes(6 * MIB)


# --- doors ---------------------------------------------------------------------------------------------------
SMALL, LARGE = 2, 6
"""Files that are damaged: S3 answers one from memory, and sends the other with sendfile."""
FILES = {f"file-{i}": pattern(i, 70_000 * i if i > 3 else 900 * i + 1) for i in range(8)}
DAMAGED = [f"file-{SMALL}", f"file-{LARGE}"]
UNSCRUBBED = "[nvme]\nscrub_rate = 0"


def damage_files(service: Service) -> None:
    """Flip a byte of each of DAMAGED, while nobody serves them."""
    for file in (service.data / "dram/slots").iterdir():
        if file.read_bytes() in (FILES[name] for name in DAMAGED):
            flip(file)


def leave_files(data: Path) -> None:
    """Leave FILES in a data directory as a killed service does."""
    store = open_store(StoreOptions(data, dram_bytes=64 * MIB, max_slots=4096, backing="tmpfs"))
    store.create_bucket(b"files", uid=0, gid=0)
    for name, content in FILES.items():
        put(store, name.encode(), content, bucket=b"files")
    store.dram.checksums.wait(WAIT_S)
    kill(store)


def expect_unverified(service: Service) -> None:
    table = Table.attach(service.data / "dram/table")
    try:
        headers = [table.read_header(slot) for slot in range(table.slots_used)]
        entries = [table.get(header.key) for header in headers if header.state == SEALED]
        assert [entry and entry.tiers for entry in entries] == [TIER_UNVERIFIED] * len(FILES)
    finally:
        table.close()


@contextmanager
def started(mode: str) -> Iterator[Service]:
    """A service that took FILES over unverified, two of them damaged, and hashes only what somebody asks for."""
    need_mount()
    service = Service(mode=mode, dram="64MiB", arguments=("--slots", "4096"), module=MODULE)
    config = service.base / "kvfs.toml"
    config.write_text(UNSCRUBBED)
    service.arguments += ["--config", str(config)]
    leave_files(service.data)
    damage_files(service)
    with service:
        expect_unverified(service)
        yield service


@contextmanager
def restarted() -> Iterator[Any]:
    """A client of S3 of such a service, which was killed before."""
    need_mount()
    with gateway(dram="64MiB", sections=UNSCRUBBED) as door:
        service = door.service
        with service.client() as client:
            client.create_bucket("files")
            for name, content in FILES.items():
                client.put(f"files/{name}", content)
        eventually(lambda: all(checksums(service)), "every slot has its checksum")
        service.kill()
        damage_files(service)
        service.module = MODULE
        service.restart()
        expect_unverified(service)
        yield door.started_again().client()


def expect(
    get: Callable[[str], bytes], missing: type[BaseException] | tuple[type[BaseException], ...]
) -> None:
    """Each file is right, twice, or a miss if it is damaged."""
    for name, content in FILES.items():
        for _ in range(2):
            if name in DAMAGED:
                with pytest.raises(missing):
                    get(name)
            else:
                assert get(name) == content, name


@pytest.mark.mount
@pytest.mark.parametrize("mode", TEST_MODES)
@pytest.mark.parametrize("first", ["open", "stat", "map", "write", "renamed"])
def test_the_mount_hands_no_damaged_file_out(mode: str, first: str) -> None:
    with started(mode) as service:
        bucket = service.mount / "files"

        def get(name: str) -> bytes:
            path = bucket / name
            if first == "renamed":
                path = (
                    path.rename(bucket / f"{name}-renamed") if path.exists() else bucket / f"{name}-renamed"
                )
            with path.open("r+b" if first == "write" else "rb") as file:
                if first == "map":
                    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                        return bytes(mapped)
                return file.read()

        if first == "stat":
            assert [(bucket / name).stat().st_size for name in FILES] == [
                len(each) for each in FILES.values()
            ]
        expect(get, FileNotFoundError)
        assert sorted(path.name.removesuffix("-renamed") for path in bucket.iterdir()) == sorted(
            FILES.keys() - set(DAMAGED)
        )


@pytest.mark.mount
@pytest.mark.parametrize("first", ["get", "range", "copy"])
def test_s3_hands_no_damaged_object_out(first: str) -> None:
    with restarted() as s3:

        def get(name: str) -> bytes:
            if first == "copy":
                s3.copy_object(Bucket="files", Key="copy", CopySource=f"files/{name}")
                name = "copy"
            ranged = {"Range": f"bytes=0-{len(FILES[name]) - 1}"} if first == "range" else {}
            body: bytes = s3.get_object(Bucket="files", Key=name, **ranged)["Body"].read()
            return body

        expect(get, (s3.exceptions.NoSuchKey, s3.exceptions.ClientError))
        for name in DAMAGED:
            fails(lambda key=name: s3.get_object(Bucket="files", Key=key), "NoSuchKey", 404)


@pytest.mark.mount
@pytest.mark.parametrize("first", ["get", "open"])
def test_the_client_gets_no_lease_on_a_damaged_object(first: str) -> None:
    with started("native") as service, service.client() as client:

        def get(name: str) -> bytes:
            if first == "get":
                return client.get(f"files/{name}")
            descriptor = client.open(f"files/{name}")
            try:
                return os.pread(descriptor, len(FILES[name]) + 1, 0)
            finally:
                os.close(descriptor)

        expect(get, NotFound)
