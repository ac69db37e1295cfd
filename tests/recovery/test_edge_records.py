"""Records, rows and slot headers that hold, with values that nobody writes: each is a miss, and the start goes on."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import trio

from kvfs.errors import KvfsError
from kvfs.formats import (
    INDEX_ENTRY,
    RECORD_HEADER,
    SLOT_HEADER,
    TABLE_HEADER,
    Layout,
    RecordType,
    slot_header_checksum,
)
from kvfs.index.names import NameIndex
from kvfs.index.rows import load_row, store_row
from kvfs.limits import MIB
from tests.support.crash_harness import fast_directory
from tests.support.seeds import seeds
from tests.support.stores import NAMESPACE, draft_of, read
from tests.support.waits import WAIT_S
from tiers.device.device import Device
from tiers.device.threads import thread_device
from tiers.log.segment_reader import SegmentReader
from tiers.log.segments import Listing, Segment
from tiers.model.objects import Attributes, Name, ObjectInfo
from tiers.recovery.start import NvmeOptions, StoreOptions, start_store
from tiers.store.store import Store

ROUNDS: Final = int(os.environ.get("KVFS_TEST_ROUNDS", "4"))
BUCKETS: Final = (b"cache", b"durable", b"bound")


@pytest.fixture
def data() -> Iterator[Path]:
    base = Path(tempfile.mkdtemp(prefix="kvfs-edges-", dir=fast_directory()))
    yield base / "data"
    shutil.rmtree(base)


async def start(data: Path, device: Device) -> Store:
    return await start_store(
        StoreOptions(
            data,
            dram_bytes=16 * MIB,
            max_slots=256,
            backing="directory",
            nvme=NvmeOptions(device, 8 * MIB, segment_bytes=MIB),
        )
    )


async def serve(data: Path, do: Callable[[Store], None], *, clean: bool) -> None:
    """One life of the store."""
    device = thread_device()
    try:
        store = await start(data, device)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.run)
            do(store)
            with trio.fail_after(WAIT_S):
                await store.journal.settle()
            nursery.cancel_scope.cancel()
        store.dram.checksums.wait(WAIT_S)
        if clean:
            await store.finish()
        store.close(keep=True)
    finally:
        await device.aclose()


KEYS: Final = [b"%d" % number + b"k" * (600 * (number == 3)) for number in range(4)]
DIGESTS: Final = [(number + (1 << 119)).to_bytes(16, "big") for number in range(4)]
WRITTEN: Final = {key * 20 for key in (*KEYS, *DIGESTS, b"new")}


def fill(store: Store) -> None:
    for bucket in BUCKETS:
        store.create_bucket(
            bucket,
            uid=0,
            gid=0,
            durable=bucket == b"durable",
            namespace=NAMESPACE if bucket == b"bound" else None,
        )
        store.make_directory(Name(bucket, b"directory/"), Attributes(mode=0o755, uid=0, gid=0))
        for key in KEYS:
            store.seal(draft_of(store, key * 20), Name(bucket, key), Attributes(uid=0))
    for bucket in BUCKETS:
        store.make_link(Name(bucket, b"link"), b"leads/there", Attributes())
    for digest in DIGESTS:
        store.seal_block(draft_of(store, digest * 20), b"bound", digest, parent=None, uid=0)


def use(store: Store) -> None:
    """What is there can be listed, looked at, changed, read or is a miss; and the store takes more."""
    for bucket in store.buckets():
        for key, found in store.list(bucket.name).entries:
            with suppress(KvfsError):
                store.lookup(Name(bucket.name, key))
            if isinstance(found, ObjectInfo):
                with suppress(KvfsError):
                    assert not found.size_bytes or read(store, found) in WRITTEN
    store.maintain()
    store.usage()
    with suppress(KvfsError):
        store.create_bucket(b"new", uid=0, gid=0)
        store.seal(draft_of(store, b"new" * 20), Name(b"new", b"new"), Attributes(uid=0))


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    base = Path(tempfile.mkdtemp(prefix="kvfs-edges-", dir=fast_directory()))
    trio.run(partial(serve, base / "data", fill, clean=True))
    yield base / "data"
    shutil.rmtree(base)


def edges(size: int) -> list[bytes]:
    """Values of a field: all bits, the sign, small ones, and what is only just none of the service's own."""
    top = 1 << (8 * size - 1)
    numbers = {0, 1, 2, 3, 255, 2 * top - 1, 2 * top - 2, top - 1, top}
    return [(number % (2 * top)).to_bytes(size, "little") for number in sorted(numbers)]


def spoil(rng: random.Random, layout: Layout, data: bytes) -> bytes:
    """The structure with some fields at their edges."""
    out = bytearray(data)
    for name in rng.sample(sorted(layout.offsets), rng.choice((1, 1, 1, 2, 4))):
        at, size = layout.offsets[name]
        out[at : at + size] = rng.choice(edges(size))
    return bytes(out)


def spoil_table(rng: random.Random, data: Path) -> None:
    path = data / "dram/table"
    table = bytearray(path.read_bytes())
    head = TABLE_HEADER.decode(bytes(table))
    for layout, start, count in (
        (SLOT_HEADER, head["slots_offset"], head["slots_used"]),
        (INDEX_ENTRY, head["entries_offset"], head["entry_count"]),
    ):
        used = [
            at
            for at in range(start, start + count * layout.size, layout.size)
            if any(table[at : at + layout.size])
        ]
        for at in rng.sample(used, rng.randint(1, 4)):
            piece = spoil(rng, layout, bytes(table[at : at + layout.size]))
            if layout is SLOT_HEADER:
                piece = piece[:-8] + slot_header_checksum(piece).to_bytes(8, "little")
            table[at : at + layout.size] = piece
    path.write_bytes(table)


def spoil_names(rng: random.Random, data: Path) -> None:
    """Rows of names and buckets whose checksums hold."""
    names = NameIndex.open(data / "index")
    stored = dict(names.environment.read(lambda txn: list(txn.cursor(db=names._bucket_db))))
    rows = [(bucket + b"\0" + key, row) for bucket, key, row in names.encoded_rows() if row is not None]
    for name, row in rng.sample(rows, 3):
        names.environment.write(
            partial(names._tree.put, name=name, value=store_row(name, spoil_row(rng, row)))
        )
    for name in rng.sample(sorted(stored), rng.randint(0, 1)):
        value = store_row(name, spoil_row(rng, load_row(name, stored[name])))
        names.environment.write(lambda txn, name=name, value=value: txn.put(name, value, db=names._bucket_db))
    if rng.random() < 0.3:
        key = rng.choice([b"ids", b"bucket_ids"])
        value = rng.choice(edges(8))
        names.environment.write(lambda txn: txn.put(key, value, db=names.environment._meta_db))
    names.environment._env.close()


def spoil_row(rng: random.Random, row: bytes) -> bytes:
    out = bytearray(row)
    for _ in range(rng.randint(1, 3)):
        size = rng.choice((1, 4, 8))
        at = rng.randrange(0, len(out) // size) * size
        out[at : at + size] = rng.choice(edges(size))[: len(out) - at]
    return bytes(out[: rng.choice((len(out), len(out), len(out), rng.randrange(len(out))))])


def spoil_listing(rng: random.Random, listing: Listing) -> Listing:
    headers, bodies = bytearray(listing.headers), bytearray(listing.bodies)
    count = len(headers) // RECORD_HEADER.size
    for number in rng.sample(range(count), min(count, rng.randint(1, 3))):
        at = number * RECORD_HEADER.size
        spoilt = spoil(rng, RECORD_HEADER, bytes(headers[at : at + RECORD_HEADER.size]))
        lengths = RECORD_HEADER.only("body_bytes", "record_bytes")
        if lengths.unpack(spoilt) != lengths.unpack(headers[at : at + RECORD_HEADER.size]):
            continue  # a footer whose lengths do not add up is none
        headers[at : at + RECORD_HEADER.size] = spoilt
    if bodies and rng.random() < 0.5:
        at = rng.randrange(len(bodies) // 8) * 8
        bodies[at : at + 8] = rng.choice(edges(8))
    return Listing(memoryview(headers), memoryview(bodies), listing.offsets)


@pytest.mark.seeded
@pytest.mark.parametrize("what", ["table", "names", "records", "records alone"])
def test_no_record_stops_a_start(
    what: str, data: Path, template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = SegmentReader.listing
    first, *found = seeds("edge records")
    for seed in (*range(first, first + ROUNDS), *found):
        print("seed", seed)
        rng = random.Random(seed)
        shutil.rmtree(data, ignore_errors=True)
        shutil.copytree(template, data)
        if what == "table":
            spoil_table(rng, data)
        elif what == "names":
            spoil_names(rng, data)
        else:

            async def listing(self: SegmentReader, segment: Segment, rng: random.Random = rng) -> Listing:
                return spoil_listing(rng, await listed(self, segment))

            monkeypatch.setattr(SegmentReader, "listing", listing)
            if what == "records alone":
                (data / "index/data.mdb").unlink()
        trio.run(partial(serve, data, use, clean=bool(seed % 2)))
        monkeypatch.setattr(SegmentReader, "listing", listed)
        trio.run(partial(serve, data, use, clean=True))


def test_a_size_beyond_the_tier_is_no_size(
    data: Path, template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(template, data)
    (data / "index/data.mdb").unlink()
    listed = SegmentReader.listing
    (type_at, _), (size_at, size) = (RECORD_HEADER.offsets[name] for name in ("type", "object_bytes"))

    async def listing(self: SegmentReader, segment: Segment) -> Listing:
        found = await listed(self, segment)
        headers = bytearray(found.headers)
        for at in range(0, len(headers), RECORD_HEADER.size):
            if headers[at + type_at] == RecordType.META:
                headers[at + size_at : at + size_at + size] = (1 << 62).to_bytes(size, "little")
        return Listing(memoryview(headers), found.bodies, found.offsets)

    monkeypatch.setattr(SegmentReader, "listing", listing)
    trio.run(partial(serve, data, use, clean=True))
