"""What a process that is killed at any instant had acknowledged is there after the next start, or a miss."""

from __future__ import annotations

import json
import os
import random
import signal
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from kvfs.errors import NotFound
from kvfs.limits import MIB
from kvfs.paths import unit_prefix
from tests.support.killed_stores import crash
from tests.support.posix import pattern
from tests.support.seeds import SEED, rounds
from tests.support.service import fork_python
from tests.support.store_writer import DIGESTS, UNIT
from tests.support.stores import BOUND, BUCKET, put, read
from tiers.model.objects import Directory, Name
from tiers.recovery.start import StoreOptions, open_store
from tiers.store.store import Store

ROUNDS: Final = int(os.environ.get("KVFS_TEST_ROUNDS", rounds(3, 6)))


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
