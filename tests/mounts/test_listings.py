"""Listings at the path door: how much one step of the service's thread handles, and what is listed beside changes."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio

from kvfs import limits
from kvfs.errors import LimitExceeded, Superseded
from mounts.kernel.backing import PlainBackings
from mounts.kernel.call_queue import NoCalls
from mounts.kernel.nodes import Node, NodeTable
from mounts.kernel.open_draft import OpenDraft
from mounts.tree import readdir
from mounts.tree.readdir import FIRST_BARE, MAX_MARKS, NAME_TURN, Listing, OpenListings
from tests.support.door import Door
from tests.support.posix import opened
from tests.support.seeds import SEED
from tests.support.stores import BOUND, BUCKET, put, put_block, small_store
from tiers.model.objects import Attributes, ListedName, Name, NamePage
from tiers.store.store import Store

MANY = 3000


class Loop(PlainBackings):
    """What the native loop was given for the one listing that is open."""

    lists_names = True

    def __init__(self) -> None:
        super().__init__()
        self.filled: list[tuple[int, list[ListedName], bool]] = []

    def listing_fill(self, fh: int, first: int, names: list[ListedName], ended: bool) -> None:
        self.filled.append((first, names, ended))


class Bench:
    """A directory of a store, listed without the kernel."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.loop = Loop()
        self.nodes = NodeTable(self.loop)
        bucket = self.nodes.add(self.nodes.root, BUCKET, directory=True, ino=2)
        self.directory = self.nodes.add(bucket, b"many", directory=True, ino=3)
        self.open = OpenListings(store, self.nodes, self.loop, NoCalls())
        self.slot = store.reserve(uid=0)
        """The slot of all drafts: none is written."""
        store.make_directory(Name(BUCKET, b"many/"), Attributes(mode=0o755))

    def make(self, name: bytes) -> None:
        self.store.make_directory(Name(BUCKET, b"many/%s/" % name), Attributes(mode=0o755))

    def draft(self, name: bytes) -> Node:
        node = self.nodes.add(self.directory, name, directory=False, ino=9)
        self.nodes.set_draft(node, OpenDraft(self.slot, 0o600, 0, 0, 1))
        return node

    def walk(self, listing: int) -> Iterator[tuple[int, list[bytes]]]:
        """(offset, names) of every turn of a whole listing, without its dots."""
        offset, ended = len(readdir.DOTS), False
        while not ended:
            trio.run(self.open.fill_in_turns, listing, offset)
            first, names, ended = self.loop.filled[-1]
            assert first == offset
            offset += len(names)
            yield first, [tail for tail, *_ in names]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with small_store(tmp_path / "data", max_slots=1024) as store:
        yield Bench(store)


def test_no_step_handles_more_than_one_turn_and_others_have_theirs_between(bench: Bench) -> None:
    """One request deep into a directory walks all before it: other tasks run after every NAME_TURN names."""
    for number in range(MANY):
        bench.make(b"%05d" % number)
    steps, at_turns = 0, []
    done = trio.Event()
    unpatched = bench.store.list_names

    def counted(bucket: bytes, *, prefix: bytes, after: bytes, limit: int) -> NamePage:
        assert limit <= NAME_TURN
        at_turns.append(steps)
        return unpatched(bucket, prefix=prefix, after=after, limit=limit)

    bench.store.list_names = counted

    async def everybody_else() -> None:
        nonlocal steps
        while not done.is_set():
            steps += 1
            await trio.lowlevel.checkpoint()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(everybody_else)
            await trio.lowlevel.checkpoint()
            await bench.open.fill_in_turns(bench.open.open(bench.directory), MANY)
            done.set()

    trio.run(main)
    assert len(at_turns) >= MANY // NAME_TURN
    assert max(Counter(at_turns).values()) <= 2, (
        "trio runs everybody once, in any order, before anybody twice"
    )
    assert bench.loop.filled == [(MANY, bench.loop.filled[0][1], True)]
    assert [tail for tail, *_ in bench.loop.filled[0][1]] == [b"02998/", b"02999/"]


def test_a_turn_is_bounded_where_drafts_and_names_mix(bench: Bench) -> None:
    """And where nothing of what was looked at is shown."""
    for number in range(600):
        bench.make(b"%05d" % number)
        if number % 3 == 0:
            put(bench.store, b"many/%05d-" % number, b"")
    drafts = [bench.draft(b"%05dd" % number) for number in range(500)]
    steps = list(bench.walk(bench.open.open(bench.directory)))
    assert max(len(names) for _, names in steps) <= NAME_TURN
    names = [name for _, found in steps for name in found]
    assert names == sorted(names)
    assert len(names) == len(set(names)) == 600 + 200 + len(drafts)


@pytest.mark.seeded
@pytest.mark.parametrize("seed", range(SEED, SEED + 8))
def test_what_is_there_throughout_is_listed_once(bench: Bench, seed: int) -> None:
    """Names and drafts come and go between steps, and the kernel goes back to where it has been."""
    order = random.Random(seed)
    stays = {b"%05d" % order.randrange(100_000) for _ in range(900)}
    for name in stays:
        bench.make(name)
    kept = {b"%05dd" % order.randrange(100_000) for _ in range(300)}
    for name in kept:
        bench.draft(name)
    others: dict[bytes, Node | None] = {}
    listing = bench.open.open(bench.directory)
    seen: list[bytes] = []
    for first, names in bench.walk(listing):
        seen += names
        assert len(seen) == first + len(names) - len(readdir.DOTS)
        for _ in range(20):
            name = b"%05dx" % order.randrange(100_000)
            if others and order.random() < 0.5:
                gone, node = others.popitem()
                if node is None:
                    bench.store.remove_directory(Name(BUCKET, b"many/%s/" % gone))
                else:
                    bench.nodes.unlink(node)
            elif name not in others and order.random() < 0.5:
                bench.make(name)
                others[name] = None
            elif name not in others:
                others[name] = bench.draft(name)
    assert len(seen) == len(set(seen)), seed
    assert stays <= {name.removesuffix(b"/") for name in seen}, seed
    assert kept <= set(seen), seed
    for offset in order.sample(range(len(seen)), 10):
        trio.run(bench.open.fill_in_turns, listing, offset + len(readdir.DOTS))
        first, found, ended = bench.loop.filled[-1]
        assert first == offset + len(readdir.DOTS)
        assert found or ended


@pytest.mark.seeded
@pytest.mark.parametrize("seed", range(SEED, SEED + 4))
def test_blocks_are_listed_among_names_page_by_page(bench: Bench, seed: int) -> None:
    """`list_names` says of a bucket with blocks what `list` does."""
    order, store = random.Random(seed), bench.store
    digests = [bytes([order.choice((7, 8, 250))]) + order.randbytes(15) for _ in range(300)]
    for digest in digests:
        put_block(store, digest, b"x")
    for key in (b"a", b"kt", b"kv-", b"z/1", b"z/2", b"zz"):
        put(store, key, b"", bucket=BOUND)
    for gone in digests[::10]:
        store.remove_block(gone)
    for prefix in (b"", b"kv/", b"kv/07/", b"kv/fa/", b"kv/00/", b"z/"):
        expected = [
            (key[len(prefix) :], info.ino, False)
            for key, info in store.list(BOUND, prefix=prefix, delimiter=b"/").entries
        ]
        for limit in (1, 7, 32, 1000):
            found: list[ListedName] = []
            after: bytes | None = b""
            while after is not None:
                page = store.list_names(BOUND, prefix=prefix, after=after, limit=limit)
                assert len(page.entries) <= limit
                found += page.entries
                after = page.next_after
                if order.random() < 0.1:
                    put_block(store, again := digests[0], b"x")
                    store.remove_block(again)
            assert found == expected, (seed, prefix, limit)


def test_places_that_a_handle_remembers_are_bounded(bench: Bench) -> None:
    listing = Listing(bench.directory)
    total = 4 * MAX_MARKS * NAME_TURN
    for first in range(0, total, 100):
        listing.pass_over([b"%08d" % number for number in range(first + 1, first + 101)])
    assert len(listing._marks) <= MAX_MARKS
    for wanted in (1, NAME_TURN, 12_345, total // 2, total - 1):
        listing.begin_answer(wanted)
        assert listing.offset <= wanted
        assert wanted - listing.offset < 8 * NAME_TURN
        assert listing.last == (b"%08d" % listing.offset if listing.offset else b"")


def test_open_directories_are_bounded_and_closed_ones_unknown(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_OPEN_LISTINGS", 2)
    first, _ = bench.open.open(bench.directory), bench.open.open(bench.directory)
    with pytest.raises(LimitExceeded):
        bench.open.open(bench.directory)
    bench.open.close(first)
    bench.open.close(first)
    with pytest.raises(Superseded):
        bench.open.fill(first, FIRST_BARE)
    bench.open.open(bench.directory)


# --- on the mount --------------------------------------------------------------------------------------------


@pytest.mark.mount
def test_files_being_written_are_listed_among_the_others(door: Door) -> None:
    expected = set()
    with ExitStack() as files:
        for number in range(400):
            sealed, draft = f"{number:04}", f"{number:04}-draft"
            (door.path / sealed).write_bytes(b"")
            if number % 2:
                files.enter_context(opened(door.path / draft, os.O_WRONLY | os.O_CREAT))
                expected.add(draft)
            expected.add(sealed)
        found = os.listdir(door.path)
        assert len(found) == len(expected)
        assert set(found) == expected
        with os.scandir(door.path) as entries:
            for entry in entries:
                assert entry.is_file()
                assert entry.inode() == entry.stat().st_ino


@pytest.mark.mount
def test_a_removed_directory_that_is_open_lists_nothing_more(door: Door) -> None:
    directory = door.path / "directory"
    directory.mkdir()
    for number in range(700):
        (directory / f"{number:04}").mkdir()
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        assert len(os.listdir(descriptor)) == 700
        for number in range(700):
            (directory / f"{number:04}").rmdir()
        directory.rmdir()
        assert os.listdir(descriptor) == []
    finally:
        os.close(descriptor)
