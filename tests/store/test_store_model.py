"""The store against a plain model: any order of calls on a few names gives what a dictionary would."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, initialize, rule, run_state_machine_as_test

from kvfs.errors import Exists, KvfsError, NoSpace, NotEmpty, NotFound, NotPermitted, WriterActive
from kvfs.keys import block_name
from tests.support.door import need_mount
from tests.support.seeds import rounds
from tests.support.store_model import BUCKETS, SIZES, UNIT, Held, Open, StoreModel, Thing, is_within
from tests.support.stores import BOUND, CAPACITY_BYTES
from tiers.model.objects import Attributes, Directory, Name, ObjectInfo

KEYS = [b"a", b"a-b", b"d", b"d/a", b"d/e/a", UNIT + b"0", UNIT + b"1", b"kv", b"kw", b"kv/x"]
DIRECTORIES = [b"a/", b"d/", b"d/e/", b"n/", UNIT]
DIGESTS = [bytes([first]) + bytes([rest]) * 15 for first, rest in [(0, 1), (0, 2), (0x0A, 0), (0xFF, 0xFF)]]

names = st.builds(Name, st.sampled_from(BUCKETS), st.sampled_from(KEYS))
directories = st.builds(Name, st.sampled_from(BUCKETS), st.sampled_from(DIRECTORIES))
digests = st.sampled_from(DIGESTS)
targets = st.sampled_from([b"x", b"../a", b"/" * 4095])
sizes = st.sampled_from(SIZES)


class Store(StoreModel):
    """Every rule makes the call and changes the model likewise, or expects the model's error."""

    opens = Bundle("opens")
    drafts = Bundle("drafts")

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
