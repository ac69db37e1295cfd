"""A plain model of the store, and what always holds of both; the rules that change them are a test's.

The model knows what was sealed under which name and hash, and forgets a thing only when it was removed,
replaced, or evicted: listeners of the store say what left, and the rules say whether it might.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvfs.errors import KvfsError
from kvfs.keys import block_name
from tests.support.posix import pattern
from tests.support.stores import BOUND, BUCKET, CAPACITY_BYTES, SLOTS, draft_of, read, small_store
from tiers.model.objects import Change, ChangeKind, Directory, Draft, Name, ObjectInfo
from tiers.model.tier import Kind

UNIT = b"0123456789abcdef0123456789abcdef/"
BUCKETS = [BUCKET, BOUND]
PARTS = [b"", b"a", b"a-", b"d/", b"d/e", UNIT, b"k", b"kv/", b"kv/00/", b"kv/00/0001", b"kv/0a", b"z"]
DELIMITERS = [None, b"/", b"-", b"0", b"0/"]
SIZES = [0, 1, 4096, 300_000, 2_000_000]

Thing = Name | bytes
"""What the model holds: a named object, or a block by its prefix hash."""


@dataclass
class Held:
    data: bytes
    pinned: bool = False
    parent: bytes | None = None
    link: bool = False
    """`data` is the target of a symbolic link."""


@dataclass(eq=False)
class Open:
    descriptor: int
    data: bytes


def is_within(name: Name, directory: Name) -> bool:
    return name.bucket == directory.bucket and name.key.startswith(directory.key)


def is_of_unit(thing: Thing, bucket: bytes) -> bool:
    """Whether it is evicted with others: a file of the directory itself, not of one below."""
    return isinstance(thing, Name) and thing.bucket == bucket and thing.key.rpartition(b"/")[0] == UNIT[:-1]


class StoreModel(RuleBasedStateMachine):
    """What there is, how a rule may change it, and whether the store says the same."""

    def __init__(self, parent: Path, backing: str) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(dir=parent))
        self.store = small_store(self.root / "data", backing=backing)
        self.things: dict[Thing, Held] = {}
        self.markers: set[Name] = set()
        self.open_files: list[Open] = []
        self.open_drafts: dict[int, tuple[Draft, bytes]] = {}
        self.serial = 0
        self.evicted: list[Thing] = []
        self.store.listeners.append(self.note)

    def note(self, change: Change) -> None:
        """What was evicted leaves the model, if it might."""
        if change.kind is not ChangeKind.REMOVED or not change.evicted:
            return
        if change.key is None:
            assert change.name is not None
            assert change.name.key == UNIT
            self.markers.discard(change.name)
            return
        assert change.name is not None
        thing: Thing = change.key.digest if change.key.kind is Kind.BLOCK else change.name
        del self.things[thing]
        self.evicted.append(thing)

    def legally(self, call: Callable[[], object]) -> None:
        """Run what may evict by policy: nothing pinned, no ancestor of a survivor, no part of a unit."""
        before = dict(self.things)
        self.evicted.clear()
        try:
            call()
        finally:
            gone = set(self.evicted)
            assert not [thing for thing in gone if before[thing].pinned]
            for held in self.things.values():
                assert held.parent is None or held.parent not in gone
            for bucket in BUCKETS:
                unit = {thing for thing in before if is_of_unit(thing, bucket)}
                assert not gone & unit or unit <= gone
                directory = Name(bucket, UNIT)
                is_empty = not any(is_within(name, directory) for name in self.all_names() - {directory})
                if unit and unit <= gone and is_empty:
                    assert directory not in self.markers

    def draft(self, size: int) -> tuple[Draft, bytes]:
        self.serial += 1
        data, made = pattern(self.serial, size), list[Draft]()
        self.legally(lambda: made.append(draft_of(self.store, data)))
        return made[0], data

    # --- what the model says ------------------------------------------------------------------------------

    def in_directory(self, directory: Name) -> bool:
        """Whether anything, marker or block included, has a name that starts with the directory's."""
        return directory in self.all_names() or any(is_within(name, directory) for name in self.all_names())

    def all_names(self) -> set[Name]:
        blocks = {Name(BOUND, block_name(thing)) for thing in self.things if isinstance(thing, bytes)}
        return blocks | self.markers | {thing for thing in self.things if isinstance(thing, Name)}

    def right(self, thing: Thing) -> ObjectInfo:
        found = self.store.lookup(thing) if isinstance(thing, Name) else self.store.lookup_block(thing)
        assert isinstance(found, ObjectInfo)
        held = self.things[thing]
        assert found.size_bytes == len(held.data)
        assert found.pinned == held.pinned
        if held.link:
            assert (found.target, found.extent, found.mode) == (held.data, None, 0o777)
            return found
        assert read(self.store, found) == held.data
        return found

    def full(self) -> bool:
        """Whether a store without room had a reason: what is pinned, held open or in a draft."""
        kept = sum(len(held.data) + 4096 for held in self.things.values() if not held.link)
        kept += sum(len(file.data) + 4096 for file in self.open_files)
        kept += sum(len(data) + 4096 for _, data in self.open_drafts.values())
        return kept + max(SIZES) > CAPACITY_BYTES * 3 // 4

    def size_bytes(self) -> int:
        """In tiers: links have no bytes there."""
        return sum(len(held.data) for held in self.things.values() if not held.link)

    def stands_under_a_pin(self, thing: Thing) -> bool:
        if isinstance(thing, bytes):
            children = [key for key, held in self.things.items() if held.parent == thing]
            return any(self.things[key].pinned or self.stands_under_a_pin(key) for key in children)
        return is_of_unit(thing, thing.bucket) and any(
            held.pinned for key, held in self.things.items() if is_of_unit(key, thing.bucket)
        )

    def expect(self, error: str | None, call: Callable[[], object]) -> None:
        found = None
        try:
            call()
        except KvfsError as caught:
            found = type(caught).__name__
        assert found == error

    # --- listings -----------------------------------------------------------------------------------------

    @invariant()
    def listings_agree(self) -> None:
        for bucket in BUCKETS:
            self.list(bucket, b"", b"", None, 3)
            self.list(bucket, b"", b"", b"/", 2)

    @rule(
        bucket=st.sampled_from(BUCKETS),
        prefix=st.sampled_from(PARTS),
        after=st.sampled_from(PARTS),
        delimiter=st.sampled_from(DELIMITERS),
        limit=st.integers(1, 4),
    )
    def list(self, bucket: bytes, prefix: bytes, after: bytes, delimiter: bytes | None, limit: int) -> None:
        expected: dict[bytes, bool] = {}
        for name in self.all_names():
            if name.bucket == bucket and name.key.startswith(prefix):
                cut = name.key.find(delimiter, len(prefix)) if delimiter else -1
                common = name.key if cut < 0 else name.key[: cut + len(delimiter or b"")]
                expected[common] = cut >= 0 or name in self.markers
        found: dict[bytes, bool] = {}
        place: bytes | None = after
        for _ in range(len(expected) + 2):
            if place is None:
                break
            page = self.store.list(bucket, prefix=prefix, after=place, delimiter=delimiter, limit=limit)
            assert len(page.entries) <= limit
            assert page.entries or page.next_after is None
            for key, what in page.entries:
                assert not found or key > max(found)
                found[key] = isinstance(what, Directory)
            place = page.next_after
        assert place is None
        assert found == {key: kind for key, kind in expected.items() if key > after}

    # --- always -------------------------------------------------------------------------------------------

    @invariant()
    def usage_agrees(self) -> None:
        usage = json.loads(json.dumps(self.store.usage()))
        [tier] = usage["tiers"]
        assert tier["used_bytes"] <= tier["capacity_bytes"] == CAPACITY_BYTES
        blocks = sum(isinstance(thing, bytes) for thing in self.things)
        links = sum(held.link for held in self.things.values())
        assert (usage["blocks"], usage["objects"]) == (blocks, len(self.things) - blocks - links)
        assert usage["open_drafts"] == self.store.space.open_drafts == len(self.open_drafts)
        assert len(self.things) - links + len(self.open_drafts) <= tier["slots"] <= SLOTS

    @invariant()
    def all_is_right(self) -> None:
        for thing, held in self.things.items():
            found = self.store.lookup(thing) if isinstance(thing, Name) else self.store.lookup_block(thing)
            assert isinstance(found, ObjectInfo)
            if held.link:
                assert found.target == held.data
                continue
            assert found.extent is not None
            descriptor = self.store.dram.open_sealed(found.extent)  # not a use
            try:
                assert os.pread(descriptor, len(held.data) + 1, 0) == held.data
            finally:
                os.close(descriptor)
        for file in self.open_files:
            assert os.pread(file.descriptor, len(file.data) + 1, 0) == file.data

    def teardown(self) -> None:
        try:
            for file in self.open_files:
                os.close(file.descriptor)
            for draft, _ in self.open_drafts.values():
                self.store.abort(draft)
            self.store.listeners.clear()
            for thing, held in list(self.things.items()):
                if held.link:  # which no tier has, and which goes with the last file of its unit
                    continue
                self.store.evict(names=[thing if isinstance(thing, Name) else Name(BOUND, block_name(thing))])
            self.store.dram.sweep()
            usage = self.store.dram.usage()
            assert (usage.held_bytes, usage.slots, self.store.space.open_drafts) == (0, 0, 0)
        finally:
            with suppress(OSError):
                self.store.close()
            shutil.rmtree(self.root, ignore_errors=True)
