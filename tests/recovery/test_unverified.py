"""Blocks that a start took over unverified: there, and read only once their payload was hashed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from kvfs import limits
from kvfs._native.shared import slots as native
from kvfs._native.shared.table import TIER_DRAM, TIER_NVME, TIER_UNVERIFIED
from kvfs.errors import NotFound
from kvfs.limits import MIB
from tests.support.block_batches import Block, open_blocks
from tests.support.cold import FolderBucket, options
from tests.support.door import need_mount
from tests.support.gateway import fails, gateway
from tests.support.posix import pattern
from tests.support.small_store import checksums
from tests.support.stores import BOUND, NAMESPACE, abandon_home, put_block
from tests.support.waits import WAIT_S, until
from tiers.cold.format import ColdName, parse_name
from tiers.cold.uploader import Uploader
from tiers.device.device import open_device
from tiers.dram.verification import Verifier
from tiers.model.objects import ObjectInfo
from tiers.model.tier import Extent
from tiers.recovery.start import NvmeOptions, StoreOptions, open_store, start_store
from tiers.store.store import Store

COUNT = 40
DIGESTS = [bytes([i + 1]) * 16 for i in range(COUNT)]
CONTENTS = {digest: pattern(i, 1 + i * 977) for i, digest in enumerate(DIGESTS)}


def opened(data: Path, *, slots: int = 128) -> Store:
    return open_store(StoreOptions(data, dram_bytes=32 * MIB, max_slots=slots, backing="directory"))


def kill(store: Store) -> None:
    """Let go of everything as a killed process does."""
    store.dram._prepare_keep = lambda: None  # type: ignore[method-assign]
    store.dram.close(keep=True)
    store.names.environment._env.close()
    abandon_home(store.home)


def file_of(store: Store, digest: bytes) -> Path:
    entry = store.table.get(digest)
    assert entry is not None
    return store.dram.directory / native.slot_name(entry.slot)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """What a killed store with COUNT blocks left."""
    store = opened(tmp_path / "data")
    store.create_bucket(BOUND, uid=0, gid=0, namespace=NAMESPACE)
    for at, digest in enumerate(DIGESTS):
        put_block(store, digest, CONTENTS[digest], parent=DIGESTS[at - 1] if at else None)
    store.dram.checksums.wait(WAIT_S)
    kill(store)
    return tmp_path / "data"


@pytest.fixture
def store(data: Path) -> Iterator[Store]:
    with opened(data) as again:
        yield again


def tiers_of(store: Store) -> list[int]:
    return [0 if (entry := store.table.get(digest)) is None else entry.tiers for digest in DIGESTS]


async def get(store: Store, digest: bytes) -> bytes:
    """Read as doors do. Raises NotFound."""
    info = await store.load(store.lookup_block(digest), uid=0)
    descriptor = store.open_read(info, uid=0)
    try:
        return os.pread(descriptor, info.size_bytes + 1, 0)
    finally:
        os.close(descriptor)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    with path.open("r+b") as file:
        file.write(content)


async def test_a_block_is_there_and_unread_until_somebody_asks(store: Store) -> None:
    assert tiers_of(store) == [TIER_UNVERIFIED] * COUNT
    assert store.match(b"".join(DIGESTS)) == COUNT
    info = store.lookup_block(DIGESTS[7])
    assert (info.extent, info.tier) == (None, "dram")
    assert await get(store, DIGESTS[7]) == CONTENTS[DIGESTS[7]]
    assert tiers_of(store).count(TIER_DRAM) == 1


async def test_the_background_verifies_all(store: Store) -> None:
    assert store.verifier.left == store.usage()["unverified"] == COUNT
    with trio.fail_after(WAIT_S):
        await store.verifier.run()
    assert tiers_of(store) == [TIER_DRAM] * COUNT
    assert store.usage()["unverified"] == 0
    assert [await get(store, digest) for digest in DIGESTS] == list(CONTENTS.values())


@pytest.mark.parametrize("by", ["reader", "background", "lower tier"])
async def test_a_flipped_byte_is_a_miss(store: Store, by: str, caplog: pytest.LogCaptureFixture) -> None:
    flip(file_of(store, DIGESTS[3]))
    if by == "reader":
        with pytest.raises(NotFound):
            await get(store, DIGESTS[3])
    elif by == "background":
        await store.verifier.run()
    else:
        assert store.verifier.checked(DIGESTS[3]) is None
    assert "does not match its checksum" in caplog.text
    assert store.match(b"".join(DIGESTS)) == 3
    with pytest.raises(NotFound):
        store.lookup_block(DIGESTS[3])
    await store.verifier.run()
    others = [digest for digest in DIGESTS if digest != DIGESTS[3]]
    assert [await get(store, digest) for digest in others] == [CONTENTS[digest] for digest in others]
    put_block(store, DIGESTS[3], CONTENTS[DIGESTS[3]])
    assert await get(store, DIGESTS[3]) == CONTENTS[DIGESTS[3]]


async def test_a_slot_that_somebody_can_write_is_a_miss(store: Store) -> None:
    writer = os.open(file_of(store, DIGESTS[5]), os.O_RDWR)
    try:
        with pytest.raises(NotFound):
            await get(store, DIGESTS[5])
        await store.verifier.run()
        os.pwrite(writer, b"changed", 0)
        assert tiers_of(store).count(TIER_DRAM) == COUNT - 1
        assert store.dram.usage().held_bytes > 0
    finally:
        os.close(writer)
    store.maintain()
    assert store.dram.usage().held_bytes == 0


async def test_a_file_that_is_gone_or_of_another_size_is_a_miss(store: Store) -> None:
    file_of(store, DIGESTS[8]).unlink()
    os.truncate(file_of(store, DIGESTS[9]), 5)
    await store.verifier.run()
    assert [at for at, tiers in enumerate(tiers_of(store)) if not tiers] == [8, 9]


async def test_a_kill_during_the_background_loses_nothing(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "VERIFY_SLOTS_AT_ONCE", 4)
    store = opened(data)
    with trio.CancelScope() as scope:
        decide = store.verifier._decide

        def stop_halfway(*arguments: Any) -> None:
            decide(*arguments)
            if tiers_of(store).count(TIER_DRAM) == COUNT // 2:
                scope.cancel()

        store.verifier._decide = stop_halfway
        await store.verifier.run()
    assert scope.cancelled_caught
    assert 0 < tiers_of(store).count(TIER_UNVERIFIED) < COUNT
    kill(store)
    with opened(data) as again:
        assert tiers_of(again) == [TIER_UNVERIFIED] * COUNT
        await again.verifier.run()
        assert [await get(again, digest) for digest in DIGESTS] == list(CONTENTS.values())


async def test_unverified_blocks_are_evicted_and_removed_as_others(store: Store) -> None:
    store.remove_block(DIGESTS[-1])
    store.evict(64 * MIB)
    assert (store.object_count, len(store.table), store.dram.usage().slots) == (0, 0, 0)
    await store.verifier.run()
    put_block(store, DIGESTS[0], b"new")
    assert await get(store, DIGESTS[0]) == b"new"


async def test_what_is_found_out_late_says_nothing_of_a_later_object(store: Store) -> None:
    """A slot is hashed, and meanwhile its object goes and another one gets the slot."""
    digest, info = DIGESTS[2], store.lookup_block(DIGESTS[2])
    entry = store.table.get(digest)
    assert entry is not None
    store.remove_block(digest)
    again = put_block(store, digest, b"another")
    assert again.object_id != info.object_id
    store.verifier._take(digest, Extent(entry.slot, entry.generation), False)
    assert await get(store, digest) == b"another"


async def test_a_lower_tier_takes_only_what_was_verified(data: Path) -> None:
    device = open_device("threads")
    options = StoreOptions(
        data,
        dram_bytes=32 * MIB,
        max_slots=128,
        backing="directory",
        nvme=NvmeOptions(device, 16 * MIB, segment_bytes=MIB),
    )
    store = await start_store(options)
    try:
        assert tiers_of(store) == [TIER_UNVERIFIED] * COUNT, "the start itself hashes none"
        flip(file_of(store, DIGESTS[3]))
        await store.finish()
        expected = [0 if at == 3 else TIER_DRAM | TIER_NVME for at in range(COUNT)]
        assert tiers_of(store) == expected
    finally:
        store.close()
        await device.aclose()


def test_a_large_block_is_verified_before_the_store_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "VERIFY_LATER_BYTES", 1000)
    store = opened(tmp_path / "data")
    store.create_bucket(BOUND, uid=0, gid=0, namespace=NAMESPACE)
    for at, size in enumerate((1000, 1001, 1001)):
        put_block(store, DIGESTS[at], bytes(size))
    store.dram.checksums.wait(WAIT_S)
    damaged = file_of(store, DIGESTS[2])
    kill(store)
    flip(damaged)
    with opened(tmp_path / "data") as again:
        assert tiers_of(again)[:3] == [TIER_UNVERIFIED, TIER_DRAM, 0]


@pytest.mark.mount
@pytest.mark.parametrize("first", ["client", "mount", "s3"])
def test_no_door_reads_a_damaged_block(first: str) -> None:
    """Each door in turn is the first to ask after the restart: the damaged block is a miss, the others are right."""
    need_mount()
    with gateway(dram="64MiB", sections="[nvme]\nscrub_rate = 0") as door:
        service = door.service
        with service.client() as client:
            bound = open_blocks(client, NAMESPACE, bucket="kv")
            bound.put([Block(digest, data) for digest, data in CONTENTS.items()])
        while not all(checksums(service)):
            pass
        service.kill()
        for file in (service.data / "dram/slots").iterdir():
            if file.read_bytes() == CONTENTS[DIGESTS[6]]:
                flip(file)
        service.restart()
        names = {digest: f"kv/{digest.hex()[:2]}/{digest.hex()}" for digest in DIGESTS}

        def by_client() -> None:
            with service.client() as client:
                found = open_blocks(client, NAMESPACE, bucket="kv").get(DIGESTS)
            assert found == [None if at == 6 else data for at, data in enumerate(CONTENTS.values())]

        def by_mount() -> None:
            for at, (digest, name) in enumerate(names.items()):
                path = service.mount / "kv" / name
                if at == 6:
                    with pytest.raises(FileNotFoundError):
                        path.read_bytes()
                else:
                    assert path.read_bytes() == CONTENTS[digest]

        def by_s3() -> None:
            s3 = door.started_again().client()
            for at, (digest, name) in enumerate(names.items()):
                if at == 6:
                    fails(lambda key=name: s3.get_object(Bucket="kv", Key=key), "NoSuchKey", 404)
                else:
                    assert s3.get_object(Bucket="kv", Key=name)["Body"].read() == CONTENTS[digest]

        doors = {"client": by_client, "mount": by_mount, "s3": by_s3}
        for look in (doors.pop(first), *doors.values()):
            look()


async def test_nothing_is_uploaded_before_it_is_verified(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The uploader comes to every block while none is verified, and to a damaged one after its payload was hashed."""
    bucket = FolderBucket(tmp_path / "bucket")
    asked: set[bytes] = set()
    verified, run, wanted = trio.Event(), Verifier.run, Uploader._wanted

    async def run_late(self: Verifier) -> None:
        await verified.wait()
        await run(self)

    def note(self: Uploader, digest: bytes) -> tuple[ColdName, ObjectInfo] | None:
        asked.add(digest)
        return wanted(self, digest)

    monkeypatch.setattr(Verifier, "run", run_late)
    monkeypatch.setattr(Uploader, "_wanted", note)
    monkeypatch.setattr(limits, "WRITE_BEHIND_POLL_S", 0.001)
    opened = StoreOptions(data, dram_bytes=32 * MIB, max_slots=128, backing="directory", cold=options(bucket))
    with open_store(opened) as store:
        flip(file_of(store, DIGESTS[3]))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.run)
            await until(lambda: asked == set(DIGESTS))
            assert bucket.objects() == []
            verified.set()
            await until(lambda: len(bucket.objects()) == COUNT - 1 and store.verifier.left == 0)
            nursery.cancel_scope.cancel()
        sent = {name.key.digest for text in bucket.objects() if (name := parse_name(text)) is not None}
        assert sent == set(DIGESTS) - {DIGESTS[3]}
