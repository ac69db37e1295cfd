"""`kvfs fsck`: finds any damage, repairs it, and what is served afterwards is right."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from kvfs.cli.offline.fsck_command import Exit, _check
from kvfs.errors import KvfsError, NoSpace, NotFound
from kvfs.formats import (
    RECORD_ALIGNMENT,
    RECORD_HEADER,
    RECORD_MAGIC,
    SEGMENT_DATA_START,
    SEGMENT_HEADER,
    SLOT_HEADER,
    TABLE_HEADER,
    RecordType,
    SegmentState,
)
from kvfs.limits import MIB
from tests.support.nvme_stores import data_of, fill, put, put_block, read, running, until_written
from tests.support.one_store import abandon
from tests.support.seeds import SEED
from tests.support.service import ROOT, run_kvfs
from tests.support.stores import NAMESPACE
from tests.support.waits import WAIT_S
from tiers.device.threads import thread_device
from tiers.model.objects import Attributes, Name, ObjectInfo
from tiers.recovery.start import NvmeOptions, StoreOptions, start_store
from tiers.store.store import Store

ROUNDS: Final = int(os.environ.get("KVFS_TEST_ROUNDS", "5"))
NVME: Final = 16 * MIB
CACHE, DURABLE, BLOCKS = b"cache", b"durable", b"blocks"
SIZES: Final = (0, 1, 700, 5_000, 60_000, 300_000, 600_000)


@dataclass
class Life:
    """A store's life at random, and what it holds in the end."""

    path: Path
    random: random.Random
    names: dict[Name, bytes] = field(default_factory=dict)
    """Of named objects; of a cache's, those that are there may be fewer."""
    digests: list[bytes] = field(default_factory=list)

    async def run(self, lives: int, *, killed: bool) -> None:
        for number in range(lives):
            last = number == lives - 1
            if last and killed:
                await self._killed_life()
            else:
                async with running(self.path, nvme_bytes=NVME, keep=self.random.random() < 0.5) as store:
                    await self._live(store)

    async def _killed_life(self) -> None:
        device = thread_device()
        store = await start_store(
            StoreOptions(
                self.path,
                dram_bytes=16 * MIB,
                backing="directory",
                nvme=NvmeOptions(device, NVME, segment_bytes=MIB),
            )
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.run)
            await self._live(store)
            nursery.cancel_scope.cancel()
        abandon(store)
        await device.aclose()

    async def _live(self, store: Store) -> None:
        if not store.buckets():
            store.create_bucket(CACHE, uid=0, gid=0)
            store.create_bucket(DURABLE, uid=0, gid=0, durable=True)
            store.create_bucket(BLOCKS, uid=0, gid=0, namespace=NAMESPACE)
        for _ in range(60):
            try:
                self._step(store)
            except KvfsError:
                continue
            if self.random.random() < 0.2:
                await store.journal.settle()
            store.maintain()
            await trio.lowlevel.checkpoint()
        await store.journal.settle()
        store.dram.checksums.wait(WAIT_S)

    def _step(self, store: Store) -> None:
        choice = self.random.random()
        name = self._name()
        if choice < 0.1:
            leads_to = b"../%d" % self.random.randrange(1 << 60)
            store.make_link(name, leads_to, Attributes(), replace=True)
            self.names[name] = leads_to
        elif choice < 0.6:
            size = self.random.choice(SIZES if name.bucket == CACHE else SIZES[:5])
            draft = store.reserve(size, uid=0)
            content = self.random.randbytes(size)
            fill(store, draft, content)
            try:
                store.seal(draft, name, Attributes())
            except NoSpace:
                store.abort(draft)
                return
            self.names[name] = content
        elif choice < 0.7 and name in self.names:
            target = Name(name.bucket, b"renamed-" + name.key)
            store.rename(name, target)
            self.names[target] = self.names.pop(name)
        elif choice < 0.8:
            store.remove(name)
            self.names.pop(name, None)
        elif choice < 0.85:
            store.set_attributes(name, mode=self.random.choice([0o600, 0o644]))
        elif choice < 0.9:
            store.make_directory(Name(name.bucket, b"dir%d/" % self.random.randrange(9)), Attributes())
        else:
            digest = self.random.randbytes(16)
            put_block(store, BLOCKS, digest, self.digests[-1] if self.digests else None, 4096)
            self.digests.append(digest)

    def _name(self) -> Name:
        bucket = DURABLE if self.random.random() < 0.4 else CACHE
        return Name(bucket, b"n%d" % self.random.randrange(25))


def live(path: Path, seed: int, *, lives: int = 3, killed: bool = False) -> Life:
    life = Life(path, random.Random(seed))
    trio.run(lambda: life.run(lives, killed=killed))
    return life


def fsck(path: Path, *, repair: bool = True) -> dict[str, Any]:
    return _check(path, path / "nvme", repair)


async def _serve(path: Path, life: Life) -> tuple[dict[Name, bytes], set[bytes]]:
    """What a store serves: all right, or not at all."""
    there: dict[Name, bytes] = {}
    async with running(path, nvme_bytes=NVME) as store:
        for bucket in store.buckets():
            for key, info in store.list(bucket.name).entries:
                name = Name(bucket.name, key)
                if isinstance(info, ObjectInfo) and info.name is not None:
                    there[name] = await read(store, name)
        blocks = set()
        for digest in life.digests:
            try:
                info = await store.load(store.lookup_block(digest), uid=0)
            except KvfsError:
                continue
            descriptor = store.open_read(info, uid=0)
            assert os.pread(descriptor, 5000, 0) == digest * 256
            os.close(descriptor)
            blocks.add(digest)
    for name, content in there.items():
        assert life.names.get(name) == content, f"{name} is served with other bytes"
    return there, blocks


def serve(path: Path, life: Life) -> tuple[dict[Name, bytes], set[bytes]]:
    return trio.run(_serve, path, life)


@pytest.mark.seeded
@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("seed", range(SEED, SEED + 4))
def test_a_random_life_leaves_nothing_to_report(fast_path: Path, seed: int, killed: bool) -> None:
    life = live(fast_path, seed, killed=killed)
    found = fsck(fast_path)
    assert found["problems"] == []
    assert found["exit_code"] == Exit.CLEAN
    assert found["records"] > 50
    there, _ = serve(fast_path, life)
    assert {name for name in life.names if name.bucket == DURABLE} <= there.keys()


# --- damage --------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def lived(module_fast_path: Path) -> dict[bool, Life]:
    """A store that was stopped cleanly, and one that was killed."""
    found = {}
    for killed in (False, True):
        found[killed] = live(module_fast_path / str(killed), 7, killed=killed)
        assert fsck(found[killed].path)["exit_code"] == Exit.CLEAN
    return found


@pytest.fixture
def copy(lived: dict[bool, Life], fast_path: Path) -> Callable[[bool], Path]:
    def make(killed: bool) -> Path:
        target = fast_path / "data"
        if target.exists():
            shutil.rmtree(target)
        shutil.copytree(lived[killed].path, target, copy_function=_copy_sparse)
        return target

    return make


def _copy_sparse(source: str, target: str) -> None:
    with open(source, "rb") as old, open(target, "wb") as new:
        zeros = bytes(1 << 20)
        while piece := old.read(len(zeros)):
            if piece == zeros[: len(piece)]:
                new.seek(len(piece), os.SEEK_CUR)
            else:
                new.write(piece)
        new.truncate()
    shutil.copystat(source, target)


def flip(path: Path, offset: int, mask: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)
        file.seek(offset)
        file.write(bytes([old[0] ^ mask]))


MENDED_BY_A_START = "logged again at the next start"


def check_damage(path: Path, life: Life, before: tuple[dict[Name, bytes], set[bytes]]) -> str:
    """Whether damage is found and repaired, or harmless; which."""
    found = fsck(path, repair=False)
    if found["exit_code"] == Exit.CLEAN:
        assert serve(path, life) == before, "damage that was not found, and did harm"
        return "harmless"
    assert found["exit_code"] in (Exit.LEFT, Exit.DURABLE_LOST), found
    repaired = fsck(path)
    assert [p["what"] for p in repaired["problems"]] == [p["what"] for p in found["problems"]]
    assert all(problem["repaired"] for problem in repaired["problems"]), repaired
    again = [problem for problem in fsck(path)["problems"] if problem["consequence"] != MENDED_BY_A_START]
    assert again == [], (found["problems"], again)
    there, _ = serve(path, life)
    lost = {name for name in before[0].keys() - there.keys() if name.bucket == DURABLE}
    assert bool(lost) <= (repaired["exit_code"] == Exit.DURABLE_LOST), (lost, repaired["problems"])
    if not any(problem["cost"] != "nothing" for problem in repaired["problems"]):
        assert there == before[0], repaired["problems"]
    return "repaired"


def used_places(path: Path) -> list[tuple[Path, int, int]]:
    """(file, start, end) of everything in a data directory that was written."""
    places = []
    for file in sorted((path / "nvme").glob("*.seg")):
        data = file.read_bytes()
        if any(data):
            places.append((file, 0, SEGMENT_DATA_START))
            end = max(SEGMENT_DATA_START, len(data[:-4096].rstrip(b"\0")))
            places.append((file, SEGMENT_DATA_START, end))
            places.append((file, len(data) - 4096, len(data) - 4096 + 100))
    return places


def payloads(path: Path) -> list[tuple[Path, int, int]]:
    """(file, start, end) of each payload that a record of a segment in use has."""
    found = []
    for file in sorted((path / "nvme").glob("*.seg")):
        data = file.read_bytes()
        head, at = SEGMENT_HEADER.decode(data[: SEGMENT_HEADER.size]), SEGMENT_DATA_START
        while head["state"] == SegmentState.IN_USE and at < len(data) - RECORD_HEADER.size:
            raw = RECORD_HEADER.decode(data[at : at + RECORD_HEADER.size])
            if (raw["magic"], raw["segment_sequence"]) != (RECORD_MAGIC, head["segment_sequence"]):
                at += RECORD_ALIGNMENT
                continue
            if raw["payload_bytes"]:
                start = at + raw["payload_offset"]
                found.append((file, start, start + raw["payload_bytes"]))
            at += raw["record_bytes"]  # a footer's has the headers of the others in it
    return found


@pytest.mark.seeded
@pytest.mark.parametrize("killed", [False, True])
def test_any_flipped_byte_of_a_segment_is_found_or_harmless(
    lived: dict[bool, Life], copy: Callable[[bool], Path], killed: bool
) -> None:
    rng = random.Random(SEED)
    life = lived[killed]
    before = serve(copy(killed), life)
    for number in range(ROUNDS):
        path = copy(killed)
        places = used_places(path) if number % 2 else payloads(path)
        file, start, end = rng.choice([place for place in places if place[2] > place[1]])
        offset, mask = rng.randrange(start, end), 1 << rng.randrange(8)
        print(f"{file.name} at {offset}, mask {mask}", flush=True)
        of_payload = any(file == of and first <= offset < last for of, first, last in payloads(path))
        flip(file, offset, mask)
        outcome = check_damage(path, life, before)
        print(outcome)
        assert outcome == "repaired" or not of_payload


def test_both_headers_gone_sets_the_file_aside(lived: dict[bool, Life], copy: Callable[[bool], Path]) -> None:
    path = copy(False)
    before = serve(copy(False), lived[False])
    path = copy(False)
    victim = max((path / "nvme").glob("*.seg"), key=lambda file: len(file.read_bytes().rstrip(b"\0")))
    flip(victim, 20)
    flip(victim, 4096 + 20)
    check_damage(path, lived[False], before)
    assert victim.with_name(victim.name + ".bad").exists()


def test_a_short_file_is_set_aside_after_what_it_holds_was_moved(
    lived: dict[bool, Life], copy: Callable[[bool], Path]
) -> None:
    before = serve(copy(False), lived[False])
    path = copy(False)
    victim = max((path / "nvme").glob("*.seg"), key=lambda file: len(file.read_bytes().rstrip(b"\0")))
    os.truncate(victim, MIB - 4096)
    assert check_damage(path, lived[False], before) == "repaired"
    assert victim.with_name(victim.name + ".bad").exists()


@pytest.mark.parametrize("change", [b"", b"{}", b"segment_bytes"])
def test_the_geometry_is_what_the_segments_say(
    lived: dict[bool, Life], copy: Callable[[bool], Path], change: bytes
) -> None:
    before = serve(copy(False), lived[False])
    path = copy(False)
    geometry = path / "nvme" / "pool.json"
    text = geometry.read_bytes()
    geometry.write_bytes(text.replace(b"1048576", b"2097152") if change == b"segment_bytes" else change)
    assert check_damage(path, lived[False], before) == "repaired"
    assert serve(path, lived[False]) == before


@pytest.mark.seeded
@pytest.mark.parametrize("killed", [False, True])
def test_any_flipped_byte_of_the_index_is_found_or_harmless(
    lived: dict[bool, Life], copy: Callable[[bool], Path], killed: bool
) -> None:
    rng = random.Random(SEED)
    before = serve(copy(killed), lived[killed])
    for _ in range(ROUNDS):
        path = copy(killed)
        file = path / "index" / "data.mdb"
        written = len(file.read_bytes().rstrip(b"\0"))
        offset, mask = rng.randrange(written), 1 << rng.randrange(8)
        print(f"index at {offset}, mask {mask}", flush=True)
        flip(file, offset, mask)
        print(check_damage(path, lived[killed], before))


@pytest.mark.parametrize("part", ["index", "data.mdb"])
def test_a_lost_index_is_built_anew(lived: dict[bool, Life], copy: Callable[[bool], Path], part: str) -> None:
    before = serve(copy(False), lived[False])
    path = copy(False)
    if part == "index":
        shutil.rmtree(path / "index")
    else:
        (path / "index" / "data.mdb").unlink()
    assert check_damage(path, lived[False], before) == "repaired"


@pytest.mark.seeded
def test_any_flipped_byte_of_a_slot_is_found_or_harmless(
    lived: dict[bool, Life], copy: Callable[[bool], Path]
) -> None:
    rng = random.Random(SEED)
    life = lived[True]
    before = serve(copy(True), life)
    outcomes = []
    for number in range(ROUNDS):
        path = copy(True)
        table = path / "dram" / "table"
        head = TABLE_HEADER.decode(table.read_bytes()[: TABLE_HEADER.size])
        slots = [file for file in (path / "dram" / "slots").iterdir() if file.stat().st_size]
        if number % 3:
            end = head["slots_offset"] + head["slots_used"] * SLOT_HEADER.size
            file, offset = table, rng.randrange(head["slots_offset"], end)
        elif number % 2:
            file, offset = table, rng.randrange(512)
        else:
            file = rng.choice(slots)
            offset = rng.randrange(file.stat().st_size)
        print(f"{file} at {offset}", flush=True)
        flip(file, offset, 1 << rng.randrange(8))
        outcomes.append(check_damage(path, life, before))
        print(outcomes[-1])
    assert "repaired" in outcomes


# --- what durable objects cost -------------------------------------------------------------------------------
def find_record(path: Path, kind: int, object_id: int | None = None) -> tuple[Path, int]:
    """(file, offset) of the last record of a type, of an object."""
    found = []
    for file in sorted((path / "nvme").glob("*.seg")):
        data = file.read_bytes()
        for at in range(SEGMENT_DATA_START, len(data) - RECORD_HEADER.size, 512):
            if data[at : at + 4] == RECORD_MAGIC:
                raw = RECORD_HEADER.decode(data[at : at + RECORD_HEADER.size])
                if raw["type"] == kind and object_id in (None, raw["object_id"]):
                    found.append((raw["sequence"], file, at))
    _, file, at = max(found)
    return file, at


async def _one_durable(path: Path, name: Name, *, keep: bool) -> int:
    async with running(path, nvme_bytes=NVME, keep=keep) as store:
        store.create_bucket(DURABLE, uid=0, gid=0, durable=True)
        store.create_bucket(CACHE, uid=0, gid=0)
        info = put(store, name, 50_000)
        put(store, Name(CACHE, b"other"), 10_000)
        await store.journal.settle()
        return info.object_id


def test_a_damaged_durable_object_is_said_to_be_lost_once(fast_path: Path) -> None:
    name = Name(DURABLE, b"dear")
    object_id = trio.run(lambda: _one_durable(fast_path, name, keep=False))
    file, at = find_record(fast_path, RecordType.DATA, object_id)
    flip(file, at + 4096 + 30_000)
    left = fsck(fast_path, repair=False)
    assert left["exit_code"] == Exit.DURABLE_LOST
    [problem] = left["problems"]
    assert not problem["repaired"]
    assert problem["where"] == f"segment {file.name} at {at}"
    assert "durable/dear" in problem["consequence"]
    assert "the durable object is lost" in problem["consequence"]
    assert fsck(fast_path)["exit_code"] == Exit.DURABLE_LOST
    assert fsck(fast_path)["exit_code"] == Exit.CLEAN

    async def look() -> None:
        async with running(fast_path, nvme_bytes=NVME) as store:
            with pytest.raises(NotFound):
                store.lookup(name)
            assert isinstance(store.lookup(Name(CACHE, b"other")), ObjectInfo)

    trio.run(look)


def test_what_dram_has_is_not_lost(fast_path: Path) -> None:
    name = Name(DURABLE, b"dear")
    object_id = trio.run(lambda: _one_durable(fast_path, name, keep=True))
    file, at = find_record(fast_path, RecordType.DATA, object_id)
    flip(file, at + 4096 + 30_000)
    assert fsck(fast_path)["exit_code"] == Exit.REPAIRED
    assert fsck(fast_path)["exit_code"] == Exit.CLEAN

    async def look() -> None:
        async with running(fast_path, nvme_bytes=NVME) as store:
            assert await read(store, name) == data_of(name, 50_000)
            await until_written(store, 2)

    trio.run(look)
    shutil.rmtree(fast_path / "dram", ignore_errors=True)
    shutil.rmtree(fast_path / "index")
    trio.run(look)


# --- records that only a killed store needs ------------------------------------------------------------------
async def _killed(path: Path) -> dict[bytes, int]:
    """A store whose segments have no footer, with a rename and a removal in the log."""
    device = thread_device()
    store = await start_store(
        StoreOptions(
            path, dram_bytes=16 * MIB, backing="directory", nvme=NvmeOptions(device, NVME, segment_bytes=MIB)
        )
    )
    ids = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        store.create_bucket(DURABLE, uid=0, gid=0, durable=True)
        for key in (b"a", b"b", b"c"):
            ids[key] = put(store, Name(DURABLE, key), 5_000).object_id
        await store.journal.settle()
        store.rename(Name(DURABLE, b"a"), Name(DURABLE, b"renamed"))
        store.remove(Name(DURABLE, b"b"))
        await store.journal.settle()
        nursery.cancel_scope.cancel()
    abandon(store)
    await device.aclose()
    return ids


async def _clean_life(path: Path) -> None:
    async with running(path, nvme_bytes=NVME) as store:
        assert len(store.list(DURABLE).entries) == 2


@pytest.mark.parametrize("kind", ["META", "TOMBSTONE", "BUCKET"])
@pytest.mark.parametrize("index", ["there", "lost"])
@pytest.mark.parametrize("where", [0, 45, RECORD_HEADER.size + 3])
@pytest.mark.parametrize("stopped", [False, True])
def test_a_damaged_name_deletion_or_bucket_brings_nothing_back(
    fast_path: Path, kind: str, index: str, where: int, stopped: bool
) -> None:
    """`stopped`: a later service stopped cleanly."""
    ids = trio.run(_killed, fast_path)
    shutil.rmtree(fast_path / "dram")
    if stopped:
        trio.run(_clean_life, fast_path)
    file, at = find_record(fast_path, RecordType[kind], ids[b"a"] if kind == "META" else None)
    flip(file, at + where)
    if index == "lost":
        shutil.rmtree(fast_path / "index")
    found = fsck(fast_path)
    assert found["exit_code"] in (Exit.REPAIRED, Exit.DURABLE_LOST)
    assert fsck(fast_path)["exit_code"] == Exit.CLEAN

    async def look() -> dict[bytes, bytes]:
        there = {}
        async with running(fast_path, nvme_bytes=NVME) as store:
            for bucket in store.buckets():
                for key, _ in store.list(bucket.name).entries:
                    there[key] = await read(store, Name(bucket.name, key))
        return there

    there = trio.run(look)
    if index == "there":
        assert there.keys() == {b"renamed", b"c"}
        assert found["exit_code"] == Exit.REPAIRED
    elif kind == "META" and where > 190:
        assert there.keys() == {b"c"}
        assert found["exit_code"] == Exit.DURABLE_LOST
    for key, content in there.items():
        assert content == data_of(Name(DURABLE, b"a" if key == b"renamed" else key), 5_000)


def test_what_a_stop_or_a_closed_file_writes_to_the_index_alone_is_no_problem(fast_path: Path) -> None:
    """The times of a bucket, and a row that is retired, which a start drops."""

    async def work(*, ends: bool) -> None:
        async with running(fast_path, nvme_bytes=NVME) as store:
            if not ends:
                store.create_bucket(CACHE, uid=0, gid=0)
                put(store, Name(CACHE, b"a"), 5_000)
                return
            put(store, Name(CACHE, b"b"), 5_000)
            info = store.lookup(Name(CACHE, b"a"))
            assert isinstance(info, ObjectInfo)
            await store.journal.persist(info.object_id)
            store.retire(Name(CACHE, b"a"))

    for ends in (False, True):
        trio.run(lambda: work(ends=ends))  # noqa: B023 run at once
        found = fsck(fast_path, repair=False)
        assert found["exit_code"] == Exit.CLEAN, found["problems"]


# --- the command ---------------------------------------------------------------------------------------------
def test_the_exit_codes_are_those_of_the_help(fast_path: Path) -> None:
    data = fast_path / "data"
    object_id = trio.run(lambda: _one_durable(data, Name(DURABLE, b"dear"), keep=False))

    def run(*arguments: str) -> tuple[int, str]:
        done = run_kvfs("fsck", "--data", str(data), *arguments)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout + done.stderr

    code, text = run()
    assert (code, text.splitlines()[-1]) == (0, "clean")
    other, at = find_record(data, RecordType.DATA)
    flip(other, at + 4096 + 100)
    code, text = run("--check-only")
    assert code == Exit.LEFT, text
    assert (
        f"segment {other.name} at {at}: its payload does not match its checksum; extent 0 of object" in text
    )
    assert run()[0] == Exit.REPAIRED
    assert run()[0] == Exit.CLEAN
    dear, at = find_record(data, RecordType.DATA, object_id)
    flip(dear, at + 4096 + 100)
    code, text = run("--json")
    assert code == Exit.DURABLE_LOST
    assert json.loads(text)["problems"][0]["cost"] == "durable"
    assert run()[0] == Exit.CLEAN
    assert run_kvfs("fsck", "--nonsense").returncode == 2
    shown = run_kvfs("fsck", "--help").stdout
    documented = (ROOT / "docs" / "fsck.md").read_text()
    for each in Exit:
        assert f"{each.value} " in shown
        assert f"\n| {each.value} | " in documented


def test_it_cannot_run_beside_a_service_or_elsewhere(fast_path: Path) -> None:
    nothing = run_kvfs("fsck", "--data", str(fast_path / "nothing"))
    assert nothing.returncode == Exit.CANNOT_RUN
    assert "not a data directory" in nothing.stderr
    assert not (fast_path / "nothing").exists()

    async def beside() -> None:
        async with running(fast_path, nvme_bytes=NVME):
            done = await trio.to_thread.run_sync(lambda: run_kvfs("fsck", "--data", str(fast_path)))
            assert done.returncode == Exit.CANNOT_RUN
            assert f"process {os.getpid()}" in done.stderr

    trio.run(beside)
    (fast_path / "config.toml").write_text(
        f'[store]\ndata = "{fast_path}"\n[nvme]\npath = "{fast_path}/moved"\n'
    )
    trio.run(lambda: _one_durable(fast_path, Name(DURABLE, b"x"), keep=False))
    (fast_path / "nvme").rename(fast_path / "moved")
    elsewhere = run_kvfs("fsck", "--data", str(fast_path))
    assert elsewhere.returncode == Exit.CANNOT_RUN
    assert "no segments there" in elsewhere.stderr
    assert run_kvfs("fsck", "--config", str(fast_path / "config.toml")).returncode == Exit.CLEAN
    (fast_path / "format.json").write_text('{"format": 999}')
    other = run_kvfs("fsck", "--data", str(fast_path))
    assert other.returncode == Exit.CANNOT_RUN
    assert other.stderr.count("\n") == 1
