"""What a store finds again after its process was killed, or its files were damaged: the same, or a miss."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from kvfs.errors import NotFound
from kvfs.limits import MIB
from kvfs.paths import unit_prefix
from tests.support.door import need_mount
from tests.support.posix import pattern
from tests.support.service import ROOT
from tests.support.store_writer import DIGESTS, UNIT
from tests.support.stores import BOUND, BUCKET, NAMESPACE, put, read
from tiers import tmpfs
from tiers.dram import DramTier
from tiers.model import Directory, Name, ObjectInfo
from tiers.store import TieredStore

SEED: Final = int(os.environ.get("KVFS_TEST_SEED", random.SystemRandom().randrange(1 << 15)))
ROUNDS: Final = int(os.environ.get("KVFS_TEST_ROUNDS", "12"))
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
) -> TieredStore:
    store = TieredStore.open(data, dram_bytes=capacity_bytes, max_slots=max_slots, backing=backing)
    for bucket in (BUCKET, BOUND):
        if bucket not in {found.name for found in store.buckets()}:
            store.create_bucket(bucket, uid=0, gid=0, namespace=NAMESPACE if bucket == BOUND else None)
    return store


def crash(store: TieredStore) -> None:
    """Let go of everything as a killed process does: nothing is flushed, removed or recorded."""
    store.dram.wait_checksums(30)
    abandon(store.dram)
    store.names._env._env.close()
    os.close(store.home._lock_fd)


def abandon(tier: DramTier) -> None:
    tier._settle = lambda: None  # type: ignore[method-assign]
    tier.close(keep=True)


def names_of(store: TieredStore) -> dict[bytes, bytes]:
    """Every object's key and bytes."""
    found = {}
    for bucket in store.buckets():
        for key, info in store.list(bucket.name).entries:
            if isinstance(info, ObjectInfo):
                found[key] = read(store, info)
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
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.store_writer", *map(str, arguments), str(seed)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        change: dict[str, Any] | None = None
        for number, text in enumerate(process.stdout):
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
        process.wait()
        assert process.returncode == -9, "the writer ended by itself"
    return change


def look(store: TieredStore) -> Model:
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
        assert store._blocks.get(digest).uid == at  # type: ignore[union-attr]
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


@pytest.mark.parametrize("room", ["roomy", "tight"])
def test_a_killed_process_leaves_what_it_acknowledged(data: Path, backing: str, room: str) -> None:
    """After each kill everything found is as acknowledged, or as the unfinished change would have it; with room
    for all of it, nothing is missing that had its checksum."""
    print(f"KVFS_TEST_SEED={SEED}")
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
        store = TieredStore.open(data, dram_bytes=capacity, max_slots=slots, backing=backing)
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
