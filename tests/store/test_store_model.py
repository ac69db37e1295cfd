"""The store against a plain model: any order of calls on a few names gives what a dictionary would.

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

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvfs.errors import Exists, KvfsError, NoSpace, NotEmpty, NotFound, NotPermitted, WriterActive
from kvfs.keys import block_name
from tests.support.door import need_mount
from tests.support.posix import pattern
from tests.support.seeds import rounds
from tests.support.stores import BOUND, BUCKET, CAPACITY_BYTES, SLOTS, draft_of, read, small_store
from tiers.model.objects import Attributes, Change, ChangeKind, Directory, Draft, Name, ObjectInfo
from tiers.model.tier import Kind

UNIT = b"0123456789abcdef0123456789abcdef/"
BUCKETS = [BUCKET, BOUND]
KEYS = [b"a", b"a-b", b"d", b"d/a", b"d/e/a", UNIT + b"0", UNIT + b"1", b"kv", b"kw", b"kv/x"]
DIRECTORIES = [b"a/", b"d/", b"d/e/", b"n/", UNIT]
DIGESTS = [bytes([first]) + bytes([rest]) * 15 for first, rest in [(0, 1), (0, 2), (0x0A, 0), (0xFF, 0xFF)]]
PARTS = [b"", b"a", b"a-", b"d/", b"d/e", UNIT, b"k", b"kv/", b"kv/00/", b"kv/00/0001", b"kv/0a", b"z"]
DELIMITERS = [None, b"/", b"-", b"0", b"0/"]
SIZES = [0, 1, 4096, 300_000, 2_000_000]

names = st.builds(Name, st.sampled_from(BUCKETS), st.sampled_from(KEYS))
directories = st.builds(Name, st.sampled_from(BUCKETS), st.sampled_from(DIRECTORIES))
digests = st.sampled_from(DIGESTS)
targets = st.sampled_from([b"x", b"../a", b"/" * 4095])
sizes = st.sampled_from(SIZES)
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


class Store(RuleBasedStateMachine):
    """Every rule makes the call and changes the model likewise, or expects the model's error."""

    opens = Bundle("opens")
    drafts = Bundle("drafts")

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

    @initialize(
        present=st.lists(names, min_size=4, max_size=16, unique=True),
        chain=st.integers(0, len(DIGESTS)),
        pinned=st.sets(st.integers(0, 16), max_size=2),
    )
    def fill(self, present: list[Name], chain: int, pinned: set[int]) -> None:
        """Begin with things to meet: objects, and blocks that stand on each other."""
        for i, name in enumerate(present):
            self.put(name, 4096)
            self.pin(name, i in pinned)
        for parent, digest in zip([None, *DIGESTS], DIGESTS[:chain], strict=False):
            self.put_block(digest, parent, 4096)

    # --- writing ------------------------------------------------------------------------------------------

    @rule(target=drafts, size=sizes)
    def reserve(self, size: int) -> int:
        if len(self.open_drafts) == 3:  # room for all of them, and for what is pinned
            self.abort(next(iter(self.open_drafts)))
        try:
            made = self.draft(size)
        except NoSpace:
            assert self.full()
            return -1
        self.open_drafts[self.serial] = made
        return self.serial

    def full(self) -> bool:
        """Whether a store without room had a reason: what is pinned, held open or in a draft."""
        kept = sum(len(held.data) + 4096 for held in self.things.values() if not held.link)
        kept += sum(len(file.data) + 4096 for file in self.open_files)
        kept += sum(len(data) + 4096 for _, data in self.open_drafts.values())
        return kept + max(SIZES) > CAPACITY_BYTES * 3 // 4

    @rule(draft=drafts)
    def abort(self, draft: int) -> None:
        if draft in self.open_drafts:
            grant, _ = self.open_drafts.pop(draft)
            self.store.abort(grant)
            self.store.abort(grant)

    @rule(draft=drafts, name=names, replace=st.booleans(), pinned=st.sampled_from([False, False, True]))
    def seal(self, draft: int, name: Name, replace: bool, pinned: bool) -> None:
        if draft not in self.open_drafts:
            return
        grant, data = self.open_drafts[draft]
        if name in self.things and not replace:
            with pytest.raises(Exists):
                self.store.seal(grant, name, Attributes(), replace=False)
            return
        writer = self.store.open_draft(grant)
        with pytest.raises(WriterActive):
            self.store.seal(grant, name, Attributes())
        os.close(writer)
        info = self.store.seal(grant, name, Attributes(pinned=pinned), replace=replace)
        del self.open_drafts[draft]
        self.things[name] = Held(data, pinned)
        assert info.key == self.right(name).key

    @rule(name=names, size=sizes)
    def put(self, name: Name, size: int) -> None:
        """Reserve, write and seal at once: most of what happens to a store."""
        try:
            draft, data = self.draft(size)
        except NoSpace:
            assert self.full()
            return
        self.store.seal(draft, name, Attributes())
        self.things[name] = Held(data)

    @rule(digest=digests, parent=st.one_of(st.none(), digests), size=sizes)
    def put_block(self, digest: bytes, parent: bytes | None, size: int) -> None:
        if parent is not None and DIGESTS.index(parent) >= DIGESTS.index(digest):
            parent = None  # hashes make no cycles
        try:
            draft, data = self.draft(size)
        except NoSpace:
            assert self.full()
            return
        info = self.store.seal_block(draft, BOUND, digest, parent=parent, uid=0)
        self.things.setdefault(digest, Held(data, parent=parent))
        assert info.key == self.right(digest).key
        assert not draft.open

    @rule(digest=digests)
    def no_block_by_name(self, digest: bytes) -> None:
        draft, _ = self.draft(0)
        with pytest.raises(NotPermitted):
            self.store.seal(draft, Name(BOUND, block_name(digest)), Attributes())
        self.store.abort(draft)

    @rule(name=names, leads_to=targets, replace=st.booleans())
    def make_link(self, name: Name, leads_to: bytes, replace: bool) -> None:
        taken = name in self.things and not replace
        self.expect(
            "Exists" if taken else None,
            lambda: self.store.make_link(name, leads_to, Attributes(), replace=replace),
        )
        if not taken:
            self.things[name] = Held(leads_to, link=True)
            self.right(name)

    # --- reading ------------------------------------------------------------------------------------------

    @rule(target=opens, thing=st.one_of(names, digests))
    def open_read(self, thing: Thing) -> Open | None:
        if thing not in self.things or self.things[thing].link or len(self.open_files) >= 3:
            return None
        data = self.things[thing].data
        file = Open(self.store.open_read(self.right(thing), uid=len(self.open_files)), data)
        self.open_files.append(file)
        return file

    @rule(file=opens)
    def close(self, file: Open | None) -> None:
        if file is not None and file in self.open_files:
            os.close(file.descriptor)
            self.open_files.remove(file)
            self.store.dram.sweep()

    @rule(name=names)
    def lookup(self, name: Name) -> None:
        directory = Name(name.bucket, name.key + b"/")
        if self.in_directory(directory):
            assert isinstance(self.store.find_path(name), Directory)
        elif name in self.things:
            found = self.store.find_path(name)
            assert isinstance(found, ObjectInfo)
            assert found.name == name
        else:
            assert self.store.find_path(name) is None
        if name in self.things:
            self.right(name)
        elif self.in_directory(directory):
            assert isinstance(self.store.lookup(name), Directory)
        else:
            with pytest.raises(NotFound):
                self.store.lookup(name)

    @rule(digest=digests)
    def lookup_block(self, digest: bytes) -> None:
        name = Name(BOUND, block_name(digest))
        if digest in self.things:
            by_name = self.store.lookup(name)
            assert isinstance(by_name, ObjectInfo)
            assert by_name.key == self.right(digest).key
            return
        self.expect("NotFound", lambda: self.store.lookup(name))
        self.expect("NotFound", lambda: self.store.lookup_block(digest))
        assert self.store.find_path(name) is None

    @rule(chain=st.lists(digests, max_size=4))
    def match(self, chain: list[bytes]) -> None:
        expected = next((i for i, digest in enumerate(chain) if digest not in self.things), len(chain))
        assert self.store.match(b"".join(chain)) == expected

    # --- names --------------------------------------------------------------------------------------------

    @rule(name=names)
    def remove(self, name: Name) -> None:
        if name in self.things:
            self.store.remove(name)
            del self.things[name]
        else:
            with pytest.raises(KvfsError) as caught:
                self.store.remove(name)
            is_directory = self.in_directory(Name(name.bucket, name.key + b"/"))
            assert type(caught.value).__name__ == ("IsDirectory" if is_directory else "NotFound")

    @rule(digest=digests, by_name=st.booleans())
    def remove_block(self, digest: bytes, by_name: bool) -> None:
        def call() -> None:
            if by_name:
                self.store.remove(Name(BOUND, block_name(digest)))
            else:
                self.store.remove_block(digest)

        if digest in self.things:
            call()
            del self.things[digest]
        else:
            with pytest.raises(NotFound):
                call()

    @rule(src=names, dst=names, replace=st.booleans())
    def rename(self, src: Name, dst: Name, replace: bool) -> None:
        expected = None
        if any(name.bucket == BOUND and name.key.startswith(b"kv/") for name in (src, dst)):
            expected = "NotPermitted"
        elif src not in self.things:
            expected = "NotFound"
        elif self.in_directory(Name(dst.bucket, dst.key + b"/")):
            expected = "IsDirectory"
        elif dst in self.things and not replace:
            expected = "Exists"
        self.expect(expected, lambda: self.store.rename(src, dst, replace=replace))
        if expected is None:
            self.things[dst] = self.things.pop(src)

    @rule(src=directories, dst=directories, replace=st.booleans())
    def rename_directory(self, src: Name, dst: Name, replace: bool) -> None:
        expected = None
        inside = [name for name in self.all_names() if is_within(name, dst) and name != dst]
        if not self.in_directory(src):
            expected = "NotFound"
        elif is_within(dst, src) and dst != src:
            expected = "InvalidRequest"
        elif Name(dst.bucket, dst.key[:-1]) in self.things:
            expected = "NotDirectory"
        elif src != dst and self.in_directory(dst) and not replace:
            expected = "Exists"
        elif src != dst and inside:
            expected = "NotEmpty"
        self.expect(expected, lambda: self.store.rename(src, dst, replace=replace))
        if expected is not None:
            return

        def moved(name: Name) -> Name:
            return Name(dst.bucket, dst.key + name.key[len(src.key) :]) if is_within(name, src) else name

        self.things = {moved(k) if isinstance(k, Name) else k: held for k, held in self.things.items()}
        self.markers = {moved(name) for name in self.markers}

    def expect(self, error: str | None, call: Callable[[], object]) -> None:
        found = None
        try:
            call()
        except KvfsError as caught:
            found = type(caught).__name__
        assert found == error

    @rule(name=directories)
    def make_directory(self, name: Name) -> None:
        taken = Name(name.bucket, name.key[:-1]) in self.things or self.in_directory(name)
        self.expect("Exists" if taken else None, lambda: self.store.make_directory(name, Attributes()))
        if not taken:
            self.markers.add(name)

    @rule(name=directories)
    def remove_directory(self, name: Name) -> None:
        inside = [other for other in self.all_names() if is_within(other, name) and other != name]
        expected = "NotEmpty" if inside else None if name in self.markers else "NotFound"
        self.expect(expected, lambda: self.store.remove_directory(name))
        if expected is None:
            self.markers.remove(name)

    @rule(bucket=st.sampled_from(BUCKETS))
    def remove_bucket(self, bucket: bytes) -> None:
        if any(name.bucket == bucket for name in self.all_names()):
            with pytest.raises(NotEmpty):
                self.store.remove_bucket(bucket)
            return
        described = self.store.bucket(bucket)
        if described.namespace is None:
            self.store.remove_bucket(bucket)
            with pytest.raises(NotFound):
                self.store.list(bucket)
            self.store.create_bucket(bucket, uid=0, gid=0)

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

    # --- attributes and space -----------------------------------------------------------------------------

    @rule(thing=st.one_of(names, digests), pinned=st.booleans())
    def pin(self, thing: Thing, pinned: bool) -> None:
        if thing in self.things:
            name = thing if isinstance(thing, Name) else Name(BOUND, block_name(thing))
            if self.things[thing].link and pinned:
                self.expect("Unsupported", lambda: self.store.set_attributes(name, pinned=True))
                return
            self.store.set_attributes(name, pinned=pinned)
            self.things[thing].pinned = pinned
            self.right(thing)

    @rule(name=names, mode=st.integers(0, 0o7777), metadata=st.binary(max_size=3))
    def set_attributes(self, name: Name, mode: int, metadata: bytes) -> None:
        if name in self.things:
            link = self.things[name].link
            if link:
                self.expect("Unsupported", lambda: self.store.set_attributes(name, mode=mode))
            found = self.store.set_attributes(
                name, mode=None if link else mode, mtime_ns=5, user_metadata=metadata
            )
            assert isinstance(found, ObjectInfo)
            assert (found.mtime_ns, found.user_metadata) == (5, metadata)
            assert link or found.mode == mode
            self.right(name)

    @rule(digest=digests)
    def block_has_no_mode(self, digest: bytes) -> None:
        if digest in self.things:
            with pytest.raises(NotPermitted):
                self.store.set_attributes(Name(BOUND, block_name(digest)), mode=0o600)

    @rule(wanted=st.sampled_from([1, 300_001, 4_000_000, CAPACITY_BYTES]))
    def evict_bytes(self, wanted: int) -> None:
        freed: list[int] = []
        before = self.size_bytes()
        self.legally(lambda: freed.append(self.store.evict(wanted)))
        assert freed == [before - self.size_bytes()]
        if freed[0] < wanted and not self.open_files:  # then nothing is left but what may not go
            for thing, held in self.things.items():
                assert held.link or held.pinned or self.stands_under_a_pin(thing)

    def size_bytes(self) -> int:
        """In tiers: links have no bytes there."""
        return sum(len(held.data) for held in self.things.values() if not held.link)

    @rule(thing=st.one_of(names, digests), wanted=st.sampled_from([1, CAPACITY_BYTES]))
    def evict_around_a_reader(self, thing: Thing, wanted: int) -> None:
        if thing in self.things and not self.things[thing].link:
            held = self.things[thing]
            descriptor = self.store.open_read(self.right(thing), uid=0)
            try:
                self.legally(lambda: self.store.evict(wanted))
                assert self.things.get(thing) is held
            finally:
                os.close(descriptor)

    def stands_under_a_pin(self, thing: Thing) -> bool:
        if isinstance(thing, bytes):
            children = [key for key, held in self.things.items() if held.parent == thing]
            return any(self.things[key].pinned or self.stands_under_a_pin(key) for key in children)
        return is_of_unit(thing, thing.bucket) and any(
            held.pinned for key, held in self.things.items() if is_of_unit(key, thing.bucket)
        )

    @rule(thing=st.one_of(names, digests))
    def evict_name(self, thing: Thing) -> None:
        """What is asked for by name goes, pinned or held; a link has nothing to free, and stays."""
        name = thing if isinstance(thing, Name) else Name(BOUND, block_name(thing))
        if thing in self.things:
            link = self.things[thing].link
            assert self.store.evict(names=[name]) == 0 or not link
            assert (thing in self.things) == link
        else:
            with pytest.raises(KvfsError):
                self.store.evict(names=[name])

    @rule()
    def maintain(self) -> None:
        self.legally(self.store.maintain)

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


@pytest.mark.seeded
@pytest.mark.parametrize("backing", ["directory", pytest.param("tmpfs", marks=pytest.mark.mount)])
def test_the_store_follows_the_model(tmp_path: Path, backing: str) -> None:
    if backing == "tmpfs":
        need_mount()
    run_state_machine_as_test(
        lambda: Store(tmp_path, backing),  # type: ignore[arg-type]
        settings=settings(
            max_examples=rounds(75, 150) if backing == "directory" else rounds(20, 30),
            stateful_step_count=40,
            deadline=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
