"""The drafts of a mount over a real store, without the kernel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvfs.errors import Superseded
from kvfs.limits import OPEN_PROMISE_S
from kvfs.name_rows import RETIRED
from mounts import names
from mounts.backing import PlainBackings
from mounts.drafts import DraftKeeper
from mounts.files import OpenFiles
from mounts.nodes import Node, NodeTable, OpenDraft
from mounts.view import View
from tiers.model import Attributes, Name, ObjectInfo
from tiers.store import TieredStore

MIB = 1 << 20


@pytest.mark.parametrize("how", ["rename", "seal"])
def test_a_file_renamed_to_a_name_that_another_door_takes_meanwhile_leaves_it_whole(
    tmp_path: Path, how: str
) -> None:
    """The rename is queued while the other door changes the name, and handled when that tells of it."""
    with TieredStore.open(tmp_path / "data", dram_bytes=16 * MIB, max_slots=64, backing="directory") as store:
        store.create_bucket(b"bucket", uid=0, gid=0)
        backings = PlainBackings()
        backings.invalidate_entry = lambda parent, name: None  # type: ignore[method-assign]
        backings.invalidate_attr = lambda nodeid: None  # type: ignore[method-assign]
        view = View(store, backings, None)
        parent = view.nodes.add(view.nodes.root, b"bucket", directory=True, ino=2)
        node = view.drafts.create(parent, b"temporary", mode=0o644, uid=0, gid=0)
        node.lookups = 1
        view.drafts.open(node, opened := draft_of(node), writable=True)
        view.drafts.close(node, opened, writable=True)
        opened.answered = True
        queued = [lambda: names.renamed(view, node, parent, parent, b"file", 1)]
        source, target = Name(b"bucket", b"other"), Name(b"bucket", b"file")
        info = store.seal(store.reserve(uid=0), source, Attributes())
        view.catch_up = lambda: queued.pop()() if queued else None
        store.listeners.append(view.on_change)
        if how == "rename":
            store.rename(source, target)
        else:
            info = store.seal(store.reserve(uid=0), target, Attributes())
        assert not queued
        assert node.draft is None
        row = store.names.get(b"bucket", b"file")
        assert row is not None
        assert not row.flags & RETIRED, "a start would drop what was answered"
        found = store.lookup(target)
        assert isinstance(found, ObjectInfo)
        assert found.key == info.key


async def test_a_call_that_was_told_to_look_again_empties_nothing_for_the_next_call(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The name was gone when the thread came back, and is another file's when it reads."""
    with TieredStore.open(tmp_path / "data", dram_bytes=16 * MIB, max_slots=64, backing="directory") as store:
        store.create_bucket(b"bucket", uid=0, gid=0)
        backings = PlainBackings()
        backings.invalidate_entry = lambda parent, name: None  # type: ignore[method-assign]
        backings.invalidate_attr = lambda nodeid: None  # type: ignore[method-assign]
        view = View(store, backings, None)
        files = OpenFiles(view)
        async with trio.open_nursery() as nursery:
            view.drafts.run_in(nursery)
            view.promises.run_in(nursery)
            parent = view.nodes.add(view.nodes.root, b"bucket", directory=True, ino=2)
            gone = view.nodes.add(parent, b"file", directory=False, ino=3)
            gone.lookups = 1
            files.promise(gone, os.O_WRONLY | os.O_TRUNC, uid=0, pid=7)
            view.nodes.unlink(gone, doubt=False)
            assert await files.look_again(parent, b"file", pid=7) is None
            draft = store.reserve(uid=0)
            descriptor = store.open_draft(draft)
            os.write(descriptor, b"another file")
            os.close(descriptor)
            info = store.seal(draft, Name(b"bucket", b"file"), Attributes())
            node = await files.look_again(parent, b"file", pid=7)
            assert node is not None
            node.lookups = 1
            assert view.attributes(node).st_size == len(b"another file")
            with pytest.raises(Superseded):
                await files.open(node, os.O_RDONLY, uid=0, pid=7)
            found = await files.look_again(parent, b"file", pid=7)
            assert found is not None
            number, is_sealed = await files.open(found, os.O_RDONLY, uid=0, pid=7)
            assert is_sealed
            assert found.info is not None
            assert found.info.key == info.key
            files.release(number)
            nursery.cancel_scope.cancel()


def draft_of(node: Node) -> OpenDraft:
    assert node.draft is not None
    return node.draft


async def test_a_reader_publishes_no_draft_that_its_writer_has_not_opened(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    with TieredStore.open(tmp_path / "data", dram_bytes=16 * MIB, max_slots=64, backing="directory") as store:
        store.create_bucket(b"bucket", uid=0, gid=0)
        name = Name(b"bucket", b"file")
        info = store.seal(store.reserve(uid=0), name, Attributes())
        backings = PlainBackings()
        backings.invalidate_entry = lambda parent, name: None  # type: ignore[method-assign]
        backings.invalidate_attr = lambda nodeid: None  # type: ignore[method-assign]
        nodes = NodeTable(backings)
        keeper = DraftKeeper(store, nodes, backings)
        async with trio.open_nursery() as nursery:
            keeper.run_in(nursery)
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
            await trio.sleep(OPEN_PROMISE_S)
            assert replacement.draft is opened
            keeper.come_back(replacement, opened, 7)
            assert replacement.draft is None
            assert not replacement.linked
            found = store.lookup(name)
            assert isinstance(found, ObjectInfo)
            assert found.key == info.key
            nursery.cancel_scope.cancel()
