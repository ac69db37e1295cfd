"""The drafts of a mount over a real store, without the kernel."""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvfs.errors import Superseded
from kvfs.index.rows import RETIRED
from kvfs.limits import STALE_RETRY_S
from mounts.drafts.keeper import DraftKeeper
from mounts.kernel.backing import PlainBackings
from mounts.kernel.call_queue import NoCalls
from mounts.kernel.nodes import Node, NodeTable
from mounts.kernel.open_draft import OpenDraft
from mounts.tree import name_ops
from mounts.tree.handles import OpenFiles
from mounts.tree.opener import FileOpener
from mounts.tree.store_changes import StoreChanges
from mounts.tree.view import View
from tiers.model.objects import Attributes, Name, ObjectInfo
from tiers.nvme.large_draft import LargeDraft
from tiers.recovery.start import StoreOptions, open_store
from tiers.store.store import Store

MIB = 1 << 20


class Queue(NoCalls):
    """Calls that the loop has queued, which a test makes."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def catch_up(self) -> None:
        if self.calls:
            self.calls.pop()()

    def is_behind(self) -> bool:
        return bool(self.calls)


@pytest.mark.parametrize("how", ["rename", "seal"])
def test_a_file_renamed_to_a_name_that_another_door_takes_meanwhile_leaves_it_whole(
    tmp_path: Path, how: str
) -> None:
    """The rename is queued while the other door changes the name, and handled when that notifies of it."""
    with open_store(
        StoreOptions(tmp_path / "data", dram_bytes=16 * MIB, max_slots=64, backing="directory")
    ) as store:
        store.create_bucket(b"bucket", uid=0, gid=0)
        backings = PlainBackings()
        backings.invalidate_entry = lambda parent, name: None  # type: ignore[method-assign]
        backings.invalidate_attr = lambda nodeid: None  # type: ignore[method-assign]
        queue = Queue()
        view = View(store, backings, queue)
        parent = view.nodes.add(view.nodes.root, b"bucket", directory=True, ino=2)
        node = view.drafts.create(parent, b"temporary", mode=0o644, uid=0, gid=0)
        node.lookups = 1
        view.drafts.open(node, opened := draft_of(node), writable=True)
        view.drafts.close(node, opened, writable=True)
        opened.answered = True
        queue.calls = [lambda: name_ops.renamed(view, node, parent, parent, b"file", 1)]
        source, target = Name(b"bucket", b"other"), Name(b"bucket", b"file")
        info = store.seal(store.reserve(uid=0), source, Attributes())
        store.listeners.append(StoreChanges(view).on_change)
        if how == "rename":
            store.rename(source, target)
        else:
            info = store.seal(store.reserve(uid=0), target, Attributes())
        assert not queue.calls
        assert node.draft is None
        row = store.names.get(b"bucket", b"file")
        assert row is not None
        assert not row.flags & RETIRED, "a start would drop what was answered"
        found = store.lookup(target)
        assert isinstance(found, ObjectInfo)
        assert found.key == info.key


async def test_a_call_that_looks_again_empties_nothing_for_the_next_call(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The name was gone when the thread came back, and is another file's when it reads."""
    with open_store(
        StoreOptions(tmp_path / "data", dram_bytes=16 * MIB, max_slots=64, backing="directory")
    ) as store:
        store.create_bucket(b"bucket", uid=0, gid=0)
        backings = PlainBackings()
        backings.invalidate_entry = lambda parent, name: None  # type: ignore[method-assign]
        backings.invalidate_attr = lambda nodeid: None  # type: ignore[method-assign]
        view = View(store, backings, NoCalls())
        files = OpenFiles(view)
        opener = FileOpener(view, files)
        async with trio.open_nursery() as nursery:
            view.drafts.publisher.run_in(nursery)
            view.retries.run_in(nursery)
            parent = view.nodes.add(view.nodes.root, b"bucket", directory=True, ino=2)
            gone = view.nodes.add(parent, b"file", directory=False, ino=3)
            gone.lookups = 1
            opener.expect_retry(gone, os.O_WRONLY | os.O_TRUNC, uid=0, pid=7)
            view.nodes.unlink(gone, unresolved=False)
            assert await opener.look_again(parent, b"file", pid=7) is None
            draft = store.reserve(uid=0)
            descriptor = store.open_draft(draft)
            os.write(descriptor, b"another file")
            os.close(descriptor)
            info = store.seal(draft, Name(b"bucket", b"file"), Attributes())
            node = await opener.look_again(parent, b"file", pid=7)
            assert node is not None
            node.lookups = 1
            assert view.attributes(node).st_size == len(b"another file")
            with pytest.raises(Superseded):
                await opener.open(node, os.O_RDONLY, uid=0, pid=7)
            found = await opener.look_again(parent, b"file", pid=7)
            assert found is not None
            number, is_sealed = await opener.open(found, os.O_RDONLY, uid=0, pid=7)
            assert is_sealed
            assert found.info is not None
            assert found.info.key == info.key
            files.release(number)
            nursery.cancel_scope.cancel()


@dataclass
class Directory:
    """A directory of a mount whose kernel is the test."""

    store: Store
    view: View
    files: OpenFiles
    opener: FileOpener
    queue: Queue
    node: Node

    def write(self, component: bytes) -> Node:
        """Make a file and close it; it is not published yet."""
        drafts = self.view.drafts
        node = drafts.create(self.node, component, mode=0o644, uid=0, gid=0)
        node.lookups = 1
        drafts.open(node, opened := draft_of(node), writable=True)
        drafts.close(node, opened, writable=True)
        return node

    def replace(self, component: bytes) -> None:
        """Seal an object under this name through another door."""
        self.store.seal(self.store.reserve(uid=0), Name(b"bucket", component), Attributes())


@asynccontextmanager
async def directory_in(path: Path) -> AsyncIterator[Directory]:
    options = StoreOptions(path / "data", dram_bytes=16 * MIB, max_slots=64, backing="directory")
    with open_store(options) as store:
        store.create_bucket(b"bucket", uid=0, gid=0)
        backings = PlainBackings()
        backings.invalidate_entry = lambda parent, name: None  # type: ignore[method-assign]
        backings.invalidate_attr = lambda nodeid: None  # type: ignore[method-assign]
        view = View(store, backings, queue := Queue())
        store.listeners.append(StoreChanges(view).on_change)
        files = OpenFiles(view)
        async with trio.open_nursery() as nursery:
            view.drafts.publisher.run_in(nursery)
            view.retries.run_in(nursery)
            node = view.nodes.add(view.nodes.root, b"bucket", directory=True, ino=2)
            yield Directory(store, view, files, FileOpener(view, files), queue, node)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY])
async def test_a_thread_that_comes_back_opens_what_takes_the_name_while_it_is_looked_up(
    tmp_path: Path, flags: int, autojump_clock: MockClock
) -> None:
    """Its second ESTALE would be the program's: however often the name is replaced, what was found stays for it."""
    async with directory_in(tmp_path) as directory:
        opener = directory.opener
        opener.expect_retry(directory.write(b"file"), flags, uid=0, pid=7)
        directory.queue.calls = [lambda: directory.replace(b"file")]
        found = await opener.look_again(directory.node, b"file", pid=7)
        assert not directory.queue.calls
        assert found is not None
        found.lookups += 1
        directory.replace(b"file")
        number, is_sealed = await opener.open(found, flags, uid=0, pid=7)
        assert is_sealed == (flags == os.O_RDONLY)
        assert directory.view.retries.get(7) is None
        directory.files.release(number)


async def test_a_create_whose_name_was_made_and_removed_meanwhile_makes_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The task that would have opened the name finds it free."""
    async with directory_in(tmp_path) as directory:
        opener, flags = directory.opener, os.O_RDWR | os.O_CREAT
        opener.expect_retry(None, flags, uid=0, pid=7)
        made, number = await opener.open_existing(directory.node, b"file", flags, 0o640, uid=3, gid=4, pid=7)
        found = directory.view.attributes(made)
        assert (found.st_mode, found.st_uid, found.st_gid) == (stat.S_IFREG | 0o640, 3, 4)
        assert directory.view.retries.get(7) is None
        directory.files.release(number)


def test_a_file_that_is_removed_before_it_is_published_is_described_as_it_was(tmp_path: Path) -> None:
    """To a stat(2) whose look-up came before the removal, and whose attributes come after it."""
    with open_store(
        StoreOptions(tmp_path / "data", dram_bytes=16 * MIB, max_slots=64, backing="directory")
    ) as store:
        store.create_bucket(b"bucket", uid=0, gid=0)
        backings = PlainBackings()
        backings.invalidate_entry = lambda parent, name: None  # type: ignore[method-assign]
        view = View(store, backings, NoCalls())
        parent = view.nodes.add(view.nodes.root, b"bucket", directory=True, ino=2)
        node = view.drafts.create(parent, b"file", mode=0o640, uid=3, gid=4)
        node.lookups = 1
        opened = draft_of(node)
        view.drafts.open(node, opened, writable=True)
        assert not isinstance(opened.draft, LargeDraft)
        view.drafts.contents.truncate_slot(opened.draft, 5_000)
        view.drafts.close(node, opened, writable=True)
        view.gone(node)
        assert node.draft is None
        found = view.attributes(node)
        assert (found.st_size, found.st_nlink, found.attr_timeout) == (5_000, 0, 0)
        assert (found.st_mode, found.st_uid, found.st_gid) == (stat.S_IFREG | 0o640, 3, 4)


def draft_of(node: Node) -> OpenDraft:
    assert node.draft is not None
    return node.draft


async def test_a_reader_publishes_no_draft_that_its_writer_has_not_opened(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    with open_store(
        StoreOptions(tmp_path / "data", dram_bytes=16 * MIB, max_slots=64, backing="directory")
    ) as store:
        store.create_bucket(b"bucket", uid=0, gid=0)
        name = Name(b"bucket", b"file")
        info = store.seal(store.reserve(uid=0), name, Attributes())
        backings = PlainBackings()
        backings.invalidate_entry = lambda parent, name: None  # type: ignore[method-assign]
        backings.invalidate_attr = lambda nodeid: None  # type: ignore[method-assign]
        nodes = NodeTable(backings)
        keeper = DraftKeeper(store, nodes, backings, NoCalls())
        async with trio.open_nursery() as nursery:
            keeper.publisher.run_in(nursery)
            parent = nodes.add(nodes.root, b"bucket", directory=True, ino=2)
            node = nodes.add(parent, b"file", directory=False, ino=info.ino)
            node.lookups = 1
            nodes.set_object(node, info)
            replacement = await keeper.rewrite(node, info, uid=0, keep_bytes=False, thread=7)
            assert replacement is node, "nobody has the object open"
            assert replacement.draft is not None
            opened = replacement.draft
            keeper.open(replacement, opened, writable=False)
            keeper.close(replacement, opened, writable=False)
            await trio.sleep(STALE_RETRY_S)
            assert replacement.draft is opened
            keeper.end_wait(replacement, opened, 7)
            assert replacement.draft is None
            assert not replacement.linked
            found = store.lookup(name)
            assert isinstance(found, ObjectInfo)
            assert found.key == info.key
            nursery.cancel_scope.cancel()


class Notices(PlainBackings):
    """Backings that note what the loop would answer for a name when its notice goes to the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[tuple[int, bytes], int] = {}
        self.dead: set[int] = set()
        self.sent: list[bytes] = []

    def link(self, parent: int, name: bytes, nodeid: int) -> None:
        self.names[parent, name] = nodeid

    def unlink(self, parent: int, name: bytes, nodeid: int) -> None:
        self.names.pop((parent, name), None)

    mark_unresolved = unlink

    def node_dead(self, nodeid: int) -> None:
        self.dead.add(nodeid)

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        left = self.names.get((parent, name))
        assert left is None, f"a lookup after the notice of {name!r} is answered by node {left}"
        self.sent.append(name)

    def invalidate_attr(self, nodeid: int) -> None:
        pass


@pytest.mark.parametrize("how", ["killed writer", "removed by another door"])
def test_a_name_is_taken_from_its_node_before_the_kernel_is_told(tmp_path: Path, how: str) -> None:
    with open_store(
        StoreOptions(tmp_path / "data", dram_bytes=16 * MIB, max_slots=64, backing="directory")
    ) as store:
        store.create_bucket(b"bucket", uid=0, gid=0)
        backings = Notices()
        view = View(store, backings, NoCalls())
        parent = view.nodes.add(view.nodes.root, b"bucket", directory=True, ino=2)
        if how == "killed writer":
            node = view.drafts.create(parent, b"file", mode=0o644, uid=0, gid=0)
            node.lookups = 1
            view.drafts.open(node, opened := draft_of(node), writable=True)
            backings.note_flush(node.nodeid, killed=True)
            view.drafts.close(node, opened, writable=True)
        else:
            name = Name(b"bucket", b"file")
            store.seal(store.reserve(uid=0), name, Attributes())
            found = view.find(parent, b"file")
            assert found is not None
            node = found
            node.lookups = 1
            store.listeners.append(StoreChanges(view).on_change)
            store.remove(name)
        assert backings.sent == [b"file"]
        assert backings.dead == {node.nodeid}
