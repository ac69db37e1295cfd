"""Which look-ups other machines are asked about, in batches, by a stand-in for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from kvfs import limits
from kvfs.errors import QuotaExceeded
from kvfs.keys import block_name
from mounts.kernel.backing import PlainBackings
from mounts.kernel.nodes import Node, NodeTable
from mounts.tree.fetches import Batch, Fetches
from tests.support.posix import NOBODY, SOMEBODY
from tests.support.stores import BOUND, BUCKET, small_store
from tests.support.waits import until
from tiers.model.objects import Bucket, Directory, Name
from tiers.store.store import Store

DIGESTS = [bytes([number]) * 16 for number in range(limits.MAX_MOUNT_FETCHES + 1)]


@dataclass
class Others:
    """Other machines, which answer when they are let."""

    asked: list[tuple[bytes, int, list[bytes]]] = field(default_factory=list)
    answer: trio.Event = field(default_factory=trio.Event)
    error: Exception | None = None

    async def fetch(
        self, bucket: Bucket, digests: Sequence[bytes], *, uid: int, hint: str | None, urgent: bool
    ) -> int:
        assert hint is None
        assert urgent
        self.asked.append((bucket.name, uid, list(digests)))
        await self.answer.wait()
        if self.error is not None:
            raise self.error
        return 0


class Invalidations(PlainBackings):
    """Notes what the kernel would look up again."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[int, bytes]] = []

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        self.entries.append((parent, name))


class Tree:
    """The directories that lead to blocks, and look-ups in them."""

    def __init__(self, store: Store) -> None:
        self.store, self.others, self.backings = store, Others(), Invalidations()
        self.nodes = NodeTable(self.backings)
        self.fetches = Fetches(store, self.nodes, self.backings, self.others)

    def directory(self, bucket: bytes, *components: bytes) -> Node:
        node = self.nodes.root
        for component in (bucket, *components):
            known = self.nodes.child(node, component)
            node = known or self.nodes.add(node, component, directory=True, ino=2)
        return node

    def ask(self, digest: bytes, *, bucket: bytes = BOUND, uid: int = 0, gid: int = 0) -> Batch | None:
        *above, component = block_name(digest).split(b"/")
        return self.fetches.ask(self.directory(bucket, *above), component, uid=uid, gid=gid, pid=0)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    with small_store(tmp_path / "data") as store:
        yield Tree(store)


@asynccontextmanager
async def running(tree: Tree) -> AsyncIterator[trio.Nursery]:
    async with trio.open_nursery() as nursery:
        with tree.fetches.running_in(nursery):
            yield nursery


async def test_names_that_are_missed_together_are_asked_for_together(tree: Tree) -> None:
    async with running(tree):
        batches = [tree.ask(digest) for digest in DIGESTS[:4]]
        batches.append(tree.ask(DIGESTS[4], uid=NOBODY))
        await until(lambda: len(tree.others.asked) == 2)
        later = tree.ask(DIGESTS[5])
        await until(lambda: len(tree.others.asked) == 3)
        tree.others.answer.set()
        for batch in (*batches, later):
            assert batch is not None
            await batch.wait()
    assert sorted(tree.others.asked) == [
        (BOUND, 0, DIGESTS[:4]),
        (BOUND, 0, [DIGESTS[5]]),
        (BOUND, NOBODY, [DIGESTS[4]]),
    ]


async def test_only_so_many_wait_at_once(tree: Tree) -> None:
    async with running(tree):
        assert all(tree.ask(digest) for digest in DIGESTS[: limits.MAX_MOUNT_FETCHES])
        assert tree.ask(DIGESTS[-1]) is None
        tree.others.answer.set()
        await until(lambda: tree.ask(DIGESTS[-1]) is not None)


async def test_names_beside_a_look_up_that_waits_are_invalidated_behind_it(tree: Tree) -> None:
    shelf, other = (tree.directory(BOUND, b"kv", component) for component in (b"00", b"01"))
    said = tree.backings.entries
    async with running(tree):
        assert tree.ask(DIGESTS[0]) is not None
        await until(lambda: bool(tree.others.asked))
        assert tree.ask(DIGESTS[0], uid=NOBODY) is not None
        for number in range(limits.MAX_LATE_INVALIDATIONS):
            tree.fetches.invalidate_entry(shelf.nodeid, b"%d" % number)
        tree.fetches.invalidate_entry(other.nodeid, b"elsewhere")
        assert said == [(other.nodeid, b"elsewhere")]
        tree.fetches.invalidate_entry(shelf.nodeid, b"one too many")
        assert said[1:] == [(shelf.nodeid, b"one too many")]
        tree.others.answer.set()
    assert said[2:] == [(shelf.nodeid, b"%d" % number) for number in range(limits.MAX_LATE_INVALIDATIONS)]
    tree.fetches.invalidate_entry(shelf.nodeid, b"later")
    assert said[-1] == (shelf.nodeid, b"later")


async def test_nobody_is_asked_for_what_is_no_block_of_a_cache(tree: Tree) -> None:
    async with running(tree):
        assert tree.ask(DIGESTS[0], bucket=BUCKET) is None
        shelf = tree.directory(BOUND, b"kv", b"01")
        for component in (b"01" * 16 + b"x", b"02" * 16, b"Z" * 32, b"file"):
            assert tree.fetches.ask(shelf, component, uid=0, gid=0, pid=0) is None
        assert tree.fetches.ask(tree.nodes.root, b"01" * 16, uid=0, gid=0, pid=0) is None
    assert tree.others.asked == []


async def test_nobody_is_asked_for_who_may_not_read(tree: Tree) -> None:
    tree.store.set_bucket(BOUND, mode=0o751, uid=0, gid=SOMEBODY)
    async with running(tree):
        assert tree.ask(DIGESTS[0], uid=NOBODY, gid=NOBODY) is None
        assert tree.ask(DIGESTS[0], uid=NOBODY, gid=SOMEBODY) is not None
        tree.others.answer.set()
    assert [uid for _, uid, _ in tree.others.asked] == [NOBODY]


async def test_a_fetch_that_fails_is_a_miss(tree: Tree) -> None:
    tree.others.error = QuotaExceeded("uid 0 has had enough")
    tree.others.answer.set()
    async with running(tree):
        batch = tree.ask(DIGESTS[0])
        assert batch is not None
        await batch.wait()
        assert tree.ask(DIGESTS[1]) is not None


async def test_who_waits_is_woken_when_the_mount_ends(tree: Tree) -> None:
    woken = []

    async def wait(batch: Batch) -> None:
        await batch.wait()
        woken.append(batch.digests)

    with trio.fail_after(60):
        async with running(tree) as nursery:
            under_way = tree.ask(DIGESTS[0])
            assert under_way is not None
            nursery.start_soon(wait, under_way)
            await until(lambda: tree.others.asked == [(BOUND, 0, [DIGESTS[0]])])
            never_begun = tree.ask(DIGESTS[1])
            assert never_begun is not None
            nursery.start_soon(wait, never_begun)
            nursery.cancel_scope.cancel()
    assert sorted(woken) == [[digest] for digest in DIGESTS[:2]]
    assert tree.ask(DIGESTS[2]) is None


def test_directories_lead_to_blocks_of_others(tree: Tree) -> None:
    for key in (b"kv", b"kv/", b"kv/0f", b"kv/0f/"):
        found = tree.fetches.directory(Name(BOUND, key))
        assert isinstance(found, Directory)
        assert found.name == Name(BOUND, key.removesuffix(b"/") + b"/")
    for key in (b"", b"k", b"kv/0", b"kv/0F", b"kv/0f/0f", b"kv/zz", b"a/kv"):
        assert tree.fetches.directory(Name(BOUND, key)) is None
    assert tree.fetches.directory(Name(BUCKET, b"kv")) is None
    assert Fetches(tree.store, tree.nodes, tree.backings, None).directory(Name(BOUND, b"kv")) is None
