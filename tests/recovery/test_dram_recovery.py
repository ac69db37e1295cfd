"""What a store finds again after its process was killed, or its files were damaged: the same, or a miss."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import lmdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs import limits
from kvfs._native.catalog.adoption import Adoption
from kvfs._native.catalog.block_index import BlockIndex
from kvfs._native.catalog.object_names import ObjectNames
from kvfs._native.shared import slots as native
from kvfs._native.shared.table import Table
from kvfs.errors import FormatMismatch, NotFound
from kvfs.formats import SLOT_HEADER, TABLE_HEADER, slot_header_checksum
from kvfs.index import environment
from kvfs.index.environment import NameEnvironment
from kvfs.index.names import NameIndex
from kvfs.limits import MIB
from kvfs.paths import unit_prefix
from kvfs.system import linux
from tests.support.door import need_mount
from tests.support.posix import pattern
from tests.support.processes import Helper
from tests.support.seeds import SEED, rounds
from tests.support.service import fork_python
from tests.support.store_writer import DIGESTS, UNIT
from tests.support.stores import (
    BOUND,
    BUCKET,
    NAMESPACE,
    abandon_home,
    draft_of,
    keys,
    put,
    put_block,
    read,
    verified,
)
from tests.support.waits import WAIT_S
from tiers.dram import tmpfs
from tiers.dram.tier import DramTier
from tiers.model.objects import Attributes, Directory, Name, ObjectInfo
from tiers.model.tier import Sealed
from tiers.recovery.start import StoreOptions, open_store
from tiers.recovery.startup import Startup
from tiers.store.store import Store

ROUNDS: Final = int(os.environ.get("KVFS_TEST_ROUNDS", rounds(3, 6)))
CAPACITY_BYTES: Final = 32 * MIB


@pytest.fixture(params=[pytest.param("tmpfs", marks=pytest.mark.mount), "directory"])
def backing(request: pytest.FixtureRequest) -> str:
    if request.param == "tmpfs":
        need_mount()
    return str(request.param)


@pytest.fixture
def data() -> Iterator[Path]:
    base = Path(tempfile.mkdtemp(prefix="kvfs-adoption-"))
    yield base / "data"
    while tmpfs.is_mounted(base / "data/dram"):
        tmpfs.unmount(base / "data/dram")
    shutil.rmtree(base)


def open_again(
    data: Path, *, backing: str = "directory", capacity_bytes: int = CAPACITY_BYTES, max_slots: int = 1024
) -> Store:
    store = open_store(StoreOptions(data, dram_bytes=capacity_bytes, max_slots=max_slots, backing=backing))
    for bucket in (BUCKET, BOUND):
        if bucket not in {found.name for found in store.buckets()}:
            store.create_bucket(bucket, uid=0, gid=0, namespace=NAMESPACE if bucket == BOUND else None)
    return store


def crash(store: Store, *, wait: bool = True) -> None:
    """Let go of everything as a killed process does: nothing is flushed, removed or recorded."""
    if wait:
        store.dram.checksums.wait(WAIT_S)
    abandon(store.dram)
    store.names.environment._env.close()
    abandon_home(store.home)
    store.close = lambda **_: None  # type: ignore[method-assign]


def abandon(tier: DramTier) -> None:
    tier._prepare_keep = lambda: None  # type: ignore[method-assign]
    tier.close(keep=True)


def names_of(store: Store) -> dict[bytes, bytes]:
    """Every object's key and bytes, of those that can be read; whatever cannot is not listed from then on."""
    found = {}
    for bucket in store.buckets():
        for key, info in store.list(bucket.name).entries:
            if isinstance(info, ObjectInfo):
                with suppress(NotFound):
                    found[key] = read(store, info)
    for bucket in store.buckets():
        listed = store.list(bucket.name).entries
        assert {key for key, info in listed if isinstance(info, ObjectInfo)} <= found.keys()
    return found


# --- a process that is killed ------------------------------------------------------------------------------
@dataclass
class Model:
    """What the killed process said that there is."""

    things: dict[str, list[Any]] = field(default_factory=dict)
    """Name or prefix hash -> version, size, mode, user metadata, pinned, file id (0: not known)."""
    markers: set[str] = field(default_factory=set)
    settled: set[str] = field(default_factory=set)
    """Things that have their checksum: they must be there again, if nothing was evicted."""

    def apply(self, change: dict[str, Any], ino: int) -> None:
        if "set" in change:
            name, *values = change["set"]
            self.forget(name)
            self.things[name] = [*values, ino]
        if "block" in change:
            digest, version, size, _ = change["block"]
            self.forget(digest)
            self.things[digest] = [version, size, 0o444, "", False, ino]
        if "remove" in change:
            self.forget(change["remove"])
        if "mode" in change and change["mode"][0] in self.things:
            self.things[change["mode"][0]][2] = change["mode"][1]
        moved = [
            (target, self.things[source], source in self.settled)
            for source, target in change.get("move", ())
            if source in self.things
        ]
        for source, target in change.get("move", ()):
            if source != target:
                self.forget(source)
        for target, values, settled in moved:
            self.forget(target)
            self.things[target] = values
            if settled:
                self.settled.add(target)
        if "mark" in change:
            self.markers.add(change["mark"])
        if "unmark" in change:
            self.markers.discard(change["unmark"])

    def forget(self, thing: str) -> None:
        self.things.pop(thing, None)
        self.settled.discard(thing)


def run_and_kill(model: Model, arguments: list[object], lines: int, seed: int) -> dict[str, Any] | None:
    """Have a writer change the store, kill it after so many lines; the change that was not finished."""
    ours, its = os.pipe()
    command = ["-m", "tests.support.store_writer", *map(str, arguments), str(seed)]
    with open(its, "wb") as output:
        process = fork_python(command, output, errors=2)
    with open(ours, "rb") as said_lines:
        change: dict[str, Any] | None = None
        for number, text in enumerate(said_lines):
            if number == lines:
                process.kill()  # and read what it said until then
            if not text.endswith(b"\n"):
                break
            said = json.loads(text)
            if "begin" in said:
                change = said["begin"]
            elif "done" in said and change is not None:
                model.apply(change, said["done"])
                change = None
            elif "failed" in said:
                change = None
            elif "evicted" in said:
                model.forget(said["evicted"])
            elif "settled" in said:
                model.settled = set(model.things)
    assert process.wait() == -signal.SIGKILL, "the writer ended by itself"
    return change


def look(store: Store) -> Model:
    """What the store shows, with every byte read and compared to what its user metadata says it is."""
    found = Model()
    for bucket in store.buckets():
        if bucket.name == BOUND:
            continue
        for key, info in store.list(bucket.name).entries:
            if isinstance(info, Directory):
                found.markers.add(key.decode())
                continue
            meta = info.user_metadata.decode()
            version = int(meta)
            assert read(store, info) == pattern(version, info.size_bytes), f"{key!r}: wrong bytes"
            assert info.mtime_ns == version
            assert info.uid == 0
            name = str(Name(bucket.name, key))
            found.things[name] = [version, info.size_bytes, info.mode, meta, info.pinned, info.ino]
    for at, digest in enumerate(DIGESTS):
        try:
            info = store.lookup_block(digest)
        except NotFound:
            continue
        data = read(store, info)
        version = int.from_bytes(data[4:8], "little") if len(data) >= 8 else -1
        assert store.catalog.blocks.get(digest).uid == at  # type: ignore[union-attr]
        found.things[digest.hex()] = [version, len(data), 0o444, "", False, info.ino]
        if version >= 0:
            assert data == pattern(version, len(data)), f"{digest.hex()}: wrong bytes"
    return found


def differs(found: Model, expected: Model) -> str:
    """Why what was found is not a part of what is expected; "" if it is."""
    for name, values in found.things.items():
        wanted = expected.things.get(name)
        if wanted is None:
            return f"{name} should not be there"
        wanted = [*wanted[:5], wanted[5] or values[5]]
        if values[0] < 0:  # a block too short to hold its version
            values = [wanted[0], *values[1:]]
        if values != wanted:
            return f"{name} is {values} instead of {wanted}"
    units = {name: unit_prefix(name.partition("/")[2].encode()) for name in expected.things}
    for bucket in ("b/", "other/"):
        whole = {name for name, unit in units.items() if unit and name.startswith(bucket)}
        if (part := whole & found.things.keys()) and part != whole:
            return f"only {part} of {whole}"
    return "" if found.markers - {UNIT} == expected.markers else f"directories {found.markers}"


@pytest.mark.seeded
@pytest.mark.parametrize("room", ["roomy", "tight"])
def test_a_killed_process_leaves_what_it_acknowledged(data: Path, backing: str, room: str) -> None:
    """After each kill everything found is as acknowledged, or as the unfinished change would have it; with room
    for all of it, nothing is missing that had its checksum."""
    chance = random.Random(SEED)
    capacity = 512 * MIB if room == "roomy" else 16 * MIB
    slots = 4096 if room == "roomy" else 24
    model, adopted = Model(), 0
    for round_ in range(ROUNDS):
        arguments = [data, backing, capacity, slots]
        before = model
        unfinished = run_and_kill(before, arguments, chance.randrange(1, 400), chance.randrange(1 << 15))
        after = deepcopy(before)
        if unfinished is not None:
            after.apply(unfinished, 0)
        store = open_store(StoreOptions(data, dram_bytes=capacity, max_slots=slots, backing=backing))
        try:
            found = look(store)
            where = f"seed {SEED}, round {round_}, unfinished {unfinished}"
            wrong = [differs(found, before), differs(found, after)]
            assert "" in wrong, f"{where}: {wrong}"
            adopted += len(found.things)
            kept = {name for name in before.settled & after.settled if not unit_prefix_of(name)}
            if room == "roomy" and not (unfinished and "evict" in unfinished):
                assert kept <= found.things.keys(), f"{where}: lost {kept - found.things.keys()}"
            usage = store.dram.usage()
            assert usage.slots == len(found.things)
            assert usage.used_bytes <= usage.capacity_bytes
            assert store.object_count == len(found.things)
            filled = [file for file in store.dram.directory.iterdir() if file.stat().st_size]
            assert len(filled) == sum(1 for values in found.things.values() if values[1]), (
                "a draft or a dropped slot is left"
            )
            put(store, b"works", b"works")
            store.remove(Name(BUCKET, b"works"))
        finally:
            if chance.random() < 0.5:
                store.close(keep=True)
            else:
                crash(store)
        model = found
        model.markers.discard(UNIT)
        model.settled = set(found.things)
    assert adopted > ROUNDS, "too little was taken over for this to be a test"


def unit_prefix_of(name: str) -> bytes | None:
    return unit_prefix(name.partition("/")[2].encode())


# --- single slots ------------------------------------------------------------------------------------------
def slot_file(store: Store, key: bytes) -> Path:
    info = store.lookup(Name(BUCKET, key))
    assert isinstance(info, ObjectInfo)
    assert info.extent is not None
    return store.dram.directory / native.slot_name(info.extent.slot)


def use(store: Store, key: bytes, last_access_s: int) -> None:
    info = store.lookup(Name(BUCKET, key))
    assert isinstance(info, ObjectInfo)
    store.table.set_access(info.key.digest, 1, last_access_s)


@pytest.mark.parametrize("clean", [True, False])
def test_everything_is_as_it_was(data: Path, backing: str, clean: bool) -> None:
    with open_again(data, backing=backing) as store:
        before = store.seal(
            draft_of(store, b"first" * 1000, uid=5),
            Name(BUCKET, b"a/b"),
            Attributes(0o640, 5, 6, 7, ino=99, user_metadata=b"meta"),
        )
        for _ in range(3):
            store.touch(before.key)
        block = put_block(store, b"\7" * 16, b"block", parent=b"\6" * 16)
        store.set_attributes(Name(BOUND, b"kv/07/" + b"07" * 16), pinned=True)
        store.touch(block.key)
        store.make_directory(Name(BUCKET, b"empty/"), Attributes(mode=0o711))
        ids = {row.name: row.bucket_id for row in store.buckets()}
        if clean:
            store.close(keep=True)
        else:
            crash(store)
        with open_again(data, backing=backing) as again:
            found = again.lookup(Name(BUCKET, b"a/b"))
            assert isinstance(found, ObjectInfo)
            assert (found.extent, found.tier) == (None, "dram")
            found = verified(again, found)
            assert found == ObjectInfo(
                **{**{name: getattr(before, name) for name in before.__slots__}, "hits": 3}
            )
            assert read(again, found) == b"first" * 1000
            here = again.lookup_block(b"\7" * 16)
            assert (here.hits, here.pinned, here.size_bytes, here.mtime_ns) == (1, True, 5, block.mtime_ns)
            assert again.match(b"\7" * 16) == 1
            assert {row.name: row.bucket_id for row in again.buckets()} == ids
            assert isinstance(again.lookup(Name(BUCKET, b"empty/")), Directory)
            assert put(again, b"next", b"next").object_id > block.object_id


def test_the_order_of_eviction_goes_on(data: Path) -> None:
    with open_again(data) as store:
        for i in range(8):
            put(store, b"%d" % i, bytes([i]) * 100_000)
            use(store, b"%d" % i, 100 + i)
        use(store, b"0", 999)
        for at, digest in enumerate(DIGESTS[:4]):  # a chain, of which the first block was used last
            put_block(store, digest, b"block", parent=DIGESTS[at - 1] if at else None)
            store.table.set_access(digest, 1, 50 - at)
        store.set_attributes(Name(BUCKET, b"1"), pinned=True)
        crash(store)
        with open_again(data) as again:
            gone: list[str] = []
            again.listeners.append(lambda change: gone.append(str(change.name)))
            again.evict(1 << 30)
            assert [name.partition("/")[2][-2:] for name in gone] == [*("04", "03", "02", "01"), *"2345670"]


def test_a_slot_that_somebody_can_write_is_not_taken_over(data: Path, backing: str) -> None:
    with open_again(data, backing=backing) as store:
        for key in (b"kept", b"written"):
            put(store, key, b"sealed" * 1000)
        writer = os.open(slot_file(store, b"written"), os.O_RDWR)
        draft = store.reserve(uid=9)
        drafter = store.open_draft(draft)
        os.write(drafter, b"draft" * 1000)
        crash(store)
        with open_again(data, backing=backing) as again:
            assert names_of(again) == {b"kept": b"sealed" * 1000}
            assert again.dram.usage().held_bytes == 2 * 8192
            os.pwrite(writer, b"x" * 6000, 0)
            os.pwrite(drafter, b"x" * 6000, 0)
            refilled = {b"%d" % i: bytes([i]) * 6000 for i in range(20)}
            for key, payload in refilled.items():
                put(again, key, payload)
            os.pwrite(writer, b"y" * 6000, 0)
            assert names_of(again) == {b"kept": b"sealed" * 1000, **refilled}
            os.close(writer)
            os.close(drafter)
            again.maintain()
            assert again.dram.usage().held_bytes == 0


WRITER = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
mapping = mmap.mmap(fd, 0)
os.close(fd)
print("mapped", flush=True)
sys.stdin.readline()
"""


def test_nor_one_that_another_process_has_mapped_to_write(data: Path, backing: str) -> None:
    with open_again(data, backing=backing) as store:
        put(store, b"key", b"sealed" * 1000)
        with Helper(WRITER, slot_file(store, b"key")) as writer:
            writer.expect("mapped")
            crash(store)
            with open_again(data, backing=backing) as again:
                assert names_of(again) == {}


def test_readers_keep_an_adopted_slot_and_one_that_is_not(data: Path, backing: str) -> None:
    with open_again(data, backing=backing) as store:
        put(store, b"kept", b"kept" * 2000)
        put(store, b"lost", b"lost" * 2000)
        held = [store.open_read(store.lookup(Name(BUCKET, key)), uid=0) for key in (b"kept", b"lost")]  # type: ignore[arg-type]
        crash(store)
        NameIndex.open(data / "index").remove(BUCKET, b"lost")
        with open_again(data, backing=backing) as again:
            info = again.lookup(Name(BUCKET, b"kept"))
            assert isinstance(info, ObjectInfo)
            info = verified(again, info)
            assert info.extent is not None
            assert again.dram.held(info.extent)
            assert again.dram.usage().held_bytes == 8192
            assert [os.pread(fd, 9000, 0) for fd in held] == [b"kept" * 2000, b"lost" * 2000]
            os.close(held[0])
            assert not again.dram.held(info.extent)
            os.close(held[1])


def test_more_holders_than_descriptors_are_swept_later(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_again(data)
    held = []
    for i in range(6):
        put(store, b"%d" % i, bytes([i]) * 5000)
        held.append(store.open_read(store.lookup(Name(BUCKET, b"%d" % i)), uid=0))  # type: ignore[arg-type]
    crash(store)
    (data / "index/data.mdb").unlink()
    monkeypatch.setattr(limits, "MAX_HELD_SLOTS", 2)
    with open_again(data) as again:
        assert again.dram.usage().held_bytes == 6 * 8192
        assert [os.pread(fd, 1, 4999) for fd in held] == [bytes([i]) for i in range(6)]
        for fd in held:
            os.close(fd)
        again.maintain()
        assert again.dram.usage().held_bytes == 0
        for i in range(20):
            put(again, b"%d" % i, b"new" * 1000)
        assert set(names_of(again).values()) == {b"new" * 1000}


def test_what_has_no_checksum_yet_is_not_taken_over(data: Path) -> None:
    store = open_again(data)
    put(store, b"early", b"early")
    store.dram.checksums.wait(WAIT_S)
    store.dram.checksums.thread.close()
    put(store, b"late", b"late")
    crash(store, wait=False)
    with open_again(data) as again:
        assert names_of(again) == {b"early": b"early"}


def test_a_clean_stop_waits_for_checksums_and_leaves_no_drafts(data: Path, backing: str) -> None:
    store = open_again(data, backing=backing)
    for i in range(50):
        put(store, b"%d" % i, bytes([i]) * 200_000)
    draft_of(store, b"draft" * 1000)
    directory = store.dram.directory
    store.close(keep=True)
    assert sum(1 for file in directory.iterdir() if file.stat().st_size) == 50
    with open_again(data, backing=backing) as again:
        assert len(names_of(again)) == 50


@pytest.mark.seeded
def test_a_flipped_bit_of_a_payload_is_a_miss(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    chance = random.Random(SEED)
    with open_again(data) as store:
        contents = {b"%d" % i: pattern(i, 1 + chance.randrange(300_000)) for i in range(20)}
        files = {}
        for key, payload in contents.items():
            put(store, key, payload)
            files[key] = slot_file(store, key)
        crash(store)
        for key in chance.sample(sorted(contents), 5):
            flip(files[key], chance.randrange(len(contents.pop(key))), chance)
        with open_again(data) as again:
            assert names_of(again) == contents
            assert caplog.text.count("does not match its checksum") == 5


@pytest.mark.parametrize("size", ["longer", "shorter", "gone"])
def test_a_payload_of_another_size_is_a_miss(data: Path, size: str) -> None:
    with open_again(data) as store:
        put(store, b"right", b"right")
        put(store, b"wrong", b"wrong")
        file = slot_file(store, b"wrong")
        crash(store)
        if size == "gone":
            file.unlink()
        else:
            os.truncate(file, 6 if size == "longer" else 4)
        with open_again(data) as again:
            assert names_of(again) == {b"right": b"right"}


def flip(file: Path, offset: int, chance: random.Random) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ 1 << chance.randrange(8)]))


# --- the table ---------------------------------------------------------------------------------------------
@pytest.mark.seeded
def test_a_flipped_bit_of_a_header_costs_that_slot_at_most(data: Path) -> None:
    chance = random.Random(SEED)
    store = open_again(data)
    for i in range(8):
        put(store, b"%d" % i, pattern(i, 1 + i * 1000))
    for i in range(16):
        put_block(store, DIGESTS[i], pattern(i + 8, 1 + i * 1000), parent=DIGESTS[i - 1] if i else None)
    store.dram.checksums.wait(WAIT_S)
    seen = headers_of(store)
    crash(store)
    for _ in range(20):
        table = data / "dram/table"
        head = TABLE_HEADER.decode(table.read_bytes())
        offset = head["slots_offset"] + chance.randrange(24 * SLOT_HEADER.size)
        flip(table, offset, chance)
        store = open_again(data)
        found = headers_of(store)
        crash(store)
        assert found.items() <= seen.items()
        assert len(found) >= len(seen) - 1
        seen = found
    assert len(seen) < 24


def headers_of(store: Store) -> dict[int, Sealed]:
    return {sealed.extent.slot: sealed for sealed in store.dram.sealed()}


def test_a_header_in_mid_change_does_not_hold_the_start_up(data: Path) -> None:
    store = open_again(data)
    for i in range(50):
        put(store, b"%d" % i, b"data")
    put(store, b"whole", b"data")
    slots = {store.lookup(Name(BUCKET, b"%d" % i)).extent.slot for i in range(50)}  # type: ignore[union-attr]
    crash(store)
    with (data / "dram/table").open("r+b") as table:
        head = TABLE_HEADER.decode(table.read(TABLE_HEADER.size))
        for slot in slots:
            table.seek(head["slots_offset"] + slot * SLOT_HEADER.size)
            table.write(b"\1")
        for place in range(head["entry_count"]):  # 2,048 x 0.1 s, if anybody waited for a writer
            table.seek(head["entries_offset"] + place * 64)
            table.write(b"\1")
    with open_again(data) as again:
        assert names_of(again) == {b"whole": b"data"}


@pytest.mark.parametrize("damage", ["store", "version", "magic", "truncated", "empty", "gone"])
def test_a_table_that_is_not_ours_is_refused_with_its_slots(data: Path, backing: str, damage: str) -> None:
    store = open_again(data, backing=backing)
    put(store, b"key", b"data")
    crash(store)
    table = data / "dram/table"
    content = bytearray(table.read_bytes())
    if damage in ("store", "version", "magic"):
        offset, size = TABLE_HEADER.offsets[{"store": "store_id"}.get(damage, damage)]
        content[offset : offset + size] = b"\x63" * size
        at = TABLE_HEADER.offsets["header_checksum"][0]
        content[at : at + 8] = native.xxh3_64(bytes(content[:at])).to_bytes(8, "little")
    if damage == "gone":
        table.unlink()
    else:
        table.write_bytes(bytes(content[: {"truncated": len(content) // 2, "empty": 0}.get(damage)]))
    with open_again(data, backing=backing) as again:
        assert names_of(again) == {}
        assert again.dram.usage().held_bytes == 0
        assert put(again, b"key", b"new").size_bytes == 3


def test_generations_go_on_and_old_readers_see_their_table_dead(data: Path, backing: str) -> None:
    store = open_again(data, backing=backing)
    tier = store.dram
    for i in range(6):
        put(store, b"%d" % i, b"data")
    for i in range(3):
        store.remove(Name(BUCKET, b"%d" % i))
    used = {slot: tier.table.generation(slot) for slot in range(tier.table.slots_used)}
    reader = Table.attach(tier.root / "table", store.store_id)
    crash(store)
    with open_again(data, backing=backing) as again:
        assert not reader.alive
        found = {sealed.extent.slot: sealed.extent.generation for sealed in again.dram.sealed()}
        assert found == {slot: used[slot] for slot in found}
        assert len(found) == 3
        for _ in range(20):
            extent = again.reserve(uid=0).extent
            assert extent.generation & 1
            assert extent.generation > used.get(extent.slot, 0)


def test_less_room_keeps_what_was_used_last(data: Path, backing: str) -> None:
    store = open_again(data, backing=backing, capacity_bytes=64 * MIB)
    for i in range(48):
        put(store, b"%02d" % i, bytes([i]) * MIB)
        use(store, b"%02d" % i, 1000 - i)
    store.set_attributes(Name(BUCKET, b"47"), pinned=True)
    crash(store)
    with open_again(data, backing=backing, capacity_bytes=16 * MIB) as again:
        usage = again.dram.usage()
        assert usage.used_bytes <= usage.capacity_bytes == 16 * MIB
        found = sorted(int(key) for key in names_of(again))
        assert found[-1] == 47
        assert found[:-1] == list(range(len(found) - 1))
        assert 12 <= len(found) <= 16


def test_fewer_slots_keep_the_slots_that_there_are(data: Path) -> None:
    store = open_again(data, max_slots=128)
    for i in range(100):
        put(store, b"%d" % i, b"data")
    crash(store)
    with open_again(data, max_slots=64) as again:
        assert 60 <= len(names_of(again)) <= 64
        assert again.dram.usage().max_slots == 64


def test_another_backing_drops_what_the_first_kept(data: Path) -> None:
    need_mount()
    for first, second in (("tmpfs", "directory"), ("directory", "tmpfs")):
        store = open_again(data, backing=first)
        put(store, b"key", b"data")
        store.close(keep=True)
        with open_again(data, backing=second) as again:
            assert again.dram.backing == second
            assert names_of(again) == {}
        assert not tmpfs.is_mounted(data / "dram")
        assert list((data / "dram").iterdir()) == []


# --- units -------------------------------------------------------------------------------------------------
def test_a_unit_that_lost_a_file_goes_with_its_directory(data: Path) -> None:
    whole, unit = b"f" * 32 + b"/", UNIT.encode()
    store = open_again(data)
    for directory in (whole, unit):
        store.make_directory(Name(BUCKET, directory), Attributes())
        for i in range(3):
            put(store, directory + b"%d" % i, b"data" * 100)
    file = slot_file(store, unit + b"1")
    crash(store)
    flip(file, 7, random.Random(0))
    with open_again(data) as again:
        damaged = again.lookup(Name(BUCKET, unit + b"1"))
        assert isinstance(damaged, ObjectInfo)
        with pytest.raises(NotFound):
            read(again, damaged)
        assert keys(again) == [whole, *(whole + b"%d" % i for i in range(3))]
        assert again.find_path(Name(BUCKET, unit[:-1])) is None


digests = st.integers(0, 11).map(lambda number: bytes([number + 1]) * 16)


def order_of(blocks: list[tuple[bytes, bytes, int, bool]], at: Path, most: int) -> list[bytes]:
    """Sort out slots of one page each, with room for `most` of them; return the hashes kept, the dearest first."""
    table = Table.create(at / "old", bytes(16), 16, 32)
    (at / "slots").mkdir(exist_ok=True)
    for slot, (digest, parent, used, pinned) in enumerate(blocks):
        (at / "slots" / native.slot_name(slot)).write_bytes(bytes(4096))
        generation = table.publish(
            slot, table.begin(slot), kind=2, key=digest, size=4096, sequence=slot, checksum=0, parent=parent
        )
        table.put(digest, 2, slot, generation, 4096, flags=int(pinned))
        table.set_access(digest, 1, used)
    adoption, index, order = Adoption(16), BlockIndex(), list[bytes]()
    slotfd = os.open(at / "slots", os.O_RDONLY)
    with (at / "old").open("rb", buffering=0) as file:
        assert adoption.list_files(slotfd) == []
        assert adoption.read(file.fileno()) == []
    adoption.check_files(slotfd, 0)
    adoption.keep_whole()
    os.close(slotfd)
    adoption.want_blocks({0})
    adoption.sort()
    adoption.fit(most * 4096)
    new = Table.create(at / "new", bytes(16), 16, 32)
    adoption.write_headers(new)
    adoption.restore(
        new, index, {0: index.open_bucket()}, ObjectNames(), lambda key, **_: order.append(key), 0.0
    )
    assert len(new) == len(index) == len(adoption) == len(order)
    table.close()
    new.close()
    return order[::-1]


@given(
    st.lists(st.tuples(digests, digests, st.integers(0, 5), st.booleans()), unique_by=lambda each: each[0]),
    st.data(),
)
def test_any_first_part_of_what_is_dear_can_be_used(
    blocks: list[tuple[bytes, bytes, int, bool]], chance: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        order = order_of(blocks, Path(name), len(blocks))
        assert sorted(order) == sorted(digest for digest, _, _, _ in blocks)
        cut = chance.draw(st.integers(0, len(order)))
        kept = set(order_of(blocks, Path(name), cut))
    assert kept == set(order[:cut])
    parents = {digest: parent for digest, parent, _, _ in blocks}
    for digest in kept:
        seen = {digest}
        while (digest := parents[digest]) in parents and digest not in seen:
            seen.add(digest)
            if digest not in kept:
                assert digest_is_in_cycle(digest, parents), "an ancestor is behind its descendant"
                break


def digest_is_in_cycle(digest: bytes, parents: dict[bytes, bytes]) -> bool:
    at = parents[digest]
    for _ in parents:
        if at == digest:
            return True
        at = parents.get(at, b"")
    return False


# --- the index ---------------------------------------------------------------------------------------------
def filled(data: Path) -> dict[bytes, bytes]:
    """A crashed store with some objects; what was in it."""
    store = open_again(data)
    contents = {b"%03d" % i: pattern(i, 1000 + i) for i in range(60)}
    for key, payload in contents.items():
        put(store, key, payload)
    crash(store)
    return contents


@pytest.mark.parametrize(
    "damage", ["gone", "empty", "truncated", "garbage", "another store's", "an older copy"]
)
def test_an_index_that_cannot_be_believed_is_dropped(
    data: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    if damage == "an older copy":
        filled(data)
        shutil.copytree(data / "index", data.parent / "copy")
    filled(data)
    index = data / "index/data.mdb"
    if damage == "gone":
        index.unlink()
    elif damage == "truncated":
        os.truncate(index, 8192)
    elif damage in ("another store's", "an older copy"):
        source = data.parent / "copy"
        if damage == "another store's":
            filled(data.parent / "second")
            source = data.parent / "second/index"
        shutil.copy(source / "data.mdb", index)
    else:
        index.write_bytes(b"" if damage == "empty" else b"no index" * 5000)
    with open_again(data) as store:
        assert names_of(store) == {}
        assert damage in ("gone", "empty") or "starting with an empty one" in caplog.text
        put(store, b"key", b"data")
        crash(store)
    with open_again(data) as store:
        assert names_of(store) == {b"key": b"data"}


@pytest.mark.parametrize("row", [b"\1\0\0\0\0\0\x10\0", b"\3" + bytes(7), b""])
def test_a_damaged_row_of_the_format_is_no_other_format(data: Path, row: bytes) -> None:
    contents = filled(data)
    with lmdb.open(str(data / "index"), max_dbs=8) as env, env.begin(write=True) as txn:
        meta = env.open_db(b"meta", txn=txn)
        stored = txn.get(b"format", db=meta)
        assert stored is not None
        txn.put(b"format", row + stored[len(row) :] if row else b"", db=meta)
    with open_again(data) as store:
        assert names_of(store) == contents


@pytest.mark.seeded
def test_flipped_bits_of_the_index_cost_names_and_never_make_wrong_ones(data: Path) -> None:
    """Not even a crash: LMDB reads wherever a damaged page points to."""
    chance = random.Random(SEED)
    contents = filled(data)
    index = data / "index/data.mdb"
    content = index.read_bytes().rstrip(b"\0")
    os.truncate(index, -(-len(content) // 4096) * 4096)  # it is a hole from there on, which a copy would fill
    shutil.copytree(data, data.parent / "good")
    kept = dropped = 0
    for _ in range(rounds(30, 60)):
        shutil.rmtree(data)
        shutil.copytree(data.parent / "good", data)
        for _ in range(chance.choice([1, 8, 200])):
            flip(index, chance.randrange(len(content)), chance)
        try:
            store = open_again(data)
        except FormatMismatch as error:
            assert "format" in str(error)  # noqa: PT017
            continue
        found = names_of(store)
        store.close()
        assert found.items() <= contents.items()
        kept, dropped = kept + len(found), dropped + len(contents) - len(found)
    assert kept
    assert dropped


def test_an_index_of_a_newer_version_is_left_alone(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "FORMAT_VERSION", 2)
    contents = filled(data)
    monkeypatch.undo()
    with pytest.raises(FormatMismatch, match="format 2, this is format 1"):
        open_again(data)
    monkeypatch.setattr(environment, "FORMAT_VERSION", 2)
    with open_again(data) as store:
        assert names_of(store) == contents


@pytest.mark.parametrize("clean", [True, False])
def test_after_a_boot_only_a_clean_stop_is_believed(
    data: Path, clean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a plain directory, whose files are still there."""
    store = open_again(data)
    put(store, b"key", b"data")
    if clean:
        store.close(keep=True)
    else:
        crash(store)
    monkeypatch.setattr(linux, "boot_id", lambda: "another boot")
    with open_again(data) as again:
        assert names_of(again) == ({b"key": b"data"} if clean else {})


def test_after_a_boot_without_the_tmpfs_no_name_is_without_bytes(data: Path) -> None:
    need_mount()
    store = open_again(data, backing="tmpfs")
    put(store, b"key", b"data")
    put(store, UNIT.encode() + b"0", b"data")
    store.mark_directory(Name(BUCKET, UNIT.encode()), Attributes())
    store.make_directory(Name(BUCKET, b"kept/"), Attributes())
    store.close(keep=True)
    tmpfs.unmount(data / "dram")
    with open_again(data, backing="tmpfs") as again:
        assert keys(again) == [b"kept/"]
        assert [key for _, key, _ in again.names.rows()] == [b"kept/"]


@pytest.mark.parametrize("step", ["begin", "put_meta", "begun", "choose", "build"])
def test_a_start_that_is_killed_costs_nothing(
    data: Path, backing: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after each step of a start."""
    store = open_again(data, backing=backing)
    put(store, b"key", b"data")
    crash(store)
    from tiers.data_dir import Home

    owner: Any = {"put_meta": NameEnvironment, "choose": Startup, "build": Startup}.get(step, Home)
    real = getattr(owner, step)
    for after in (False, True):
        monkeypatch.setattr(owner, step, dying(real, after))
        child = os.fork()
        if child == 0:
            try:
                open_again(data, backing=backing)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 9
        monkeypatch.undo()
        with monkeypatch.context():
            again = open_again(data, backing=backing)
            assert names_of(again) == {b"key": b"data"}
            crash(again)


def dying(real: Any, after: bool) -> Any:
    def step(*values: Any, **named: Any) -> None:
        if after:
            real(*values, **named)
        os.kill(os.getpid(), 9)

    return step


def test_a_start_that_fails_keeps_what_there_is(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = filled(data)
    with monkeypatch.context() as patched:
        patched.setattr(Startup, "build", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            open_again(data)
    with open_again(data) as store:
        assert names_of(store) == contents


def test_rows_that_changed_places_are_dropped(data: Path) -> None:
    """The bytes that they lead to are whole, but another object's."""
    contents = filled(data)
    index = NameIndex.open(data / "index")
    names = [BUCKET + b"\0" + key for key in (b"003", b"004")]

    def swap(txn: Any) -> None:
        first, second = [index._tree.get(txn, name) for name in names]
        assert first is not None
        assert second is not None
        index._tree.put(txn, names[0], second)
        index._tree.put(txn, names[1], first)

    index.environment.write(swap)
    index.close()
    del contents[b"003"], contents[b"004"]
    with open_again(data) as store:
        assert names_of(store) == contents


def test_pages_that_only_a_writer_would_trip_over_cost_nothing(data: Path) -> None:
    """Of every page, the place where its free room ends."""
    contents = filled(data)
    file = data / "index/data.mdb"
    pages = bytearray(file.read_bytes())
    for at in range(8192, len(pages), 4096):
        if pages[at + 10] == 2:
            pages[at + 14] ^= 64
    file.write_bytes(pages)
    with open_again(data) as store:
        assert names_of(store) == contents


def test_an_index_that_kills_its_reader_is_dropped(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(data)
    monkeypatch.setattr("tiers.recovery.index_check._walk", lambda *_: os.kill(os.getpid(), signal.SIGSEGV))
    with open_again(data) as store:
        assert names_of(store) == {}


def test_slot_headers_carry_their_checksum() -> None:
    """What the other tests rely on: a flipped bit anywhere but in `seq` shows."""
    header = SLOT_HEADER.encode(version=1, state=2, generation=4)
    assert slot_header_checksum(header) != slot_header_checksum(header[:50] + b"\1" + header[51:])
