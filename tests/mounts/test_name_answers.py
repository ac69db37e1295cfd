"""When a removal or rename on the mount is answered: once it is in the index and shown, and before what follows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.errors import Exists, NotFound
from mounts.kernel.backing import PlainBackings
from mounts.kernel.call_queue import NoCalls
from mounts.kernel.nodes import Node
from mounts.tree import name_ops
from mounts.tree.view import View
from tiers.model.objects import Attributes, Name
from tiers.recovery.start import StoreOptions, open_store
from tiers.store.store import Store

MIB = 1 << 20
BUCKET = b"bucket"


class Loop(PlainBackings):
    """Backings that keep what the native loop would answer for each name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[bytes, int] = {}
        self.dead: set[int] = set()

    def node_dead(self, nodeid: int) -> None:
        self.dead.add(nodeid)

    def link(self, parent: int, name: bytes, nodeid: int) -> None:
        self.names[name] = nodeid

    def unlink(self, parent: int, name: bytes, nodeid: int) -> None:
        self.names.pop(name, None)

    mark_unresolved = unlink

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        pass


class Door:
    """A mount's view of one directory, and the order of what happens in a change."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.loop = Loop()
        self.view = View(store, self.loop, NoCalls())
        bucket = self.view.need(self.view.nodes.root, BUCKET)
        bucket.lookups = 1
        self.here = name_ops.make_directory(self.view, bucket, b"here", mode=0o755, uid=0, gid=0)
        self.here.lookups = 1
        self.steps: list[str] = []
        store.journal.removed = lambda object_id, *, behind=False: self.steps.append("logged")  # type: ignore[method-assign]
        store.journal.renamed = lambda *_, **__: self.steps.append("logged")  # type: ignore[method-assign]

    def make(self, component: bytes) -> Node:
        self.store.seal(self.store.reserve(uid=0), Name(BUCKET, b"here/" + component), Attributes())
        node = self.view.need(self.here, component)
        node.lookups = 1
        return node

    def names(self) -> set[bytes]:
        """What the index has in the directory, which the loop has, too."""
        entries = self.store.names.list(BUCKET, prefix=b"here/", after=b"here/").entries
        found = {entry.name.removeprefix(b"here/") for entry in entries}
        assert {name for name in self.loop.names if name not in (BUCKET, b"here")} == found
        return found

    def rename(self, old: bytes, new: bytes, flags: int = 0) -> None:
        name_ops.rename(self.view, self.here, old, self.here, new, flags, self.answer)

    def remove(self, component: bytes) -> None:
        name_ops.remove_file(self.view, self.here, component, self.answer)

    def answer(self) -> None:
        self.steps.append("answered with " + b" ".join(sorted(self.names())).decode())


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    options = StoreOptions(tmp_path / "data", dram_bytes=16 * MIB, max_slots=64, backing="directory")
    with open_store(options) as store:
        store.create_bucket(BUCKET, uid=0, gid=0)
        yield Door(store)


def test_a_removal_is_answered_before_its_record_and_a_rename_too(door: Door) -> None:
    door.make(b"one")
    door.rename(b"one", b"two")
    assert door.steps == ["answered with two", "logged"]
    door.steps.clear()
    door.remove(b"two")
    assert door.steps == ["answered with ", "logged"]


def test_whoever_has_a_removed_file_open_sees_it_without_a_link_from_the_answer_on(door: Door) -> None:
    node = door.make(b"one")
    seen: list[tuple[bool, int]] = []
    name_ops.remove_file(
        door.view,
        door.here,
        b"one",
        lambda: seen.append((node.nodeid in door.loop.dead, door.view.attributes(node).st_nlink)),
    )
    assert seen == [(True, 0)]


@pytest.mark.parametrize("why", ["kept in the log", "pinned"])
def test_what_waits_for_the_device_is_answered_last(door: Door, why: str) -> None:
    node = door.make(b"one")
    if why == "pinned":
        door.store.set_attributes(door.view.nodes.name(node), pinned=True)
        door.view.refresh(node)
    else:
        door.store.journal.is_kept = lambda object_id: True  # type: ignore[method-assign]
    door.rename(b"one", b"two")
    assert door.steps == ["logged", "answered with two"]
    door.steps.clear()
    door.remove(b"two")
    assert door.steps == ["logged", "answered with "]


def test_a_rename_over_another_file_is_answered_once_that_is_gone(door: Door) -> None:
    door.make(b"one")
    door.make(b"two")
    door.rename(b"one", b"two")
    assert door.steps == ["logged", "answered with two"]


def test_a_draft_is_answered_last_and_a_rename_to_the_same_name_at_once(door: Door) -> None:
    node = door.view.drafts.create(door.here, b"draft", mode=0o644, uid=0, gid=0)
    node.lookups = 1
    steps: list[str] = []
    name_ops.rename(
        door.view, door.here, b"draft", door.here, b"moved", 0, lambda: steps.append(node.component.decode())
    )
    name_ops.rename(door.view, door.here, b"moved", door.here, b"moved", 0, lambda: steps.append("the same"))
    name_ops.remove_file(door.view, door.here, b"moved", lambda: steps.append(f"linked {node.linked}"))
    assert steps == ["moved", "the same", "linked False"]


def test_what_fails_is_not_answered_as_done(door: Door) -> None:
    door.make(b"one")
    door.make(b"two")
    with pytest.raises(Exists):
        door.rename(b"one", b"two", name_ops.RENAME_NOREPLACE)
    with pytest.raises(NotFound):
        door.rename(b"three", b"four")
    with pytest.raises(NotFound):
        door.remove(b"three")
    assert door.steps == []
    assert door.names() == {b"one", b"two"}


def test_times_of_the_directory_are_the_same_on_the_mount_and_elsewhere(door: Door) -> None:
    shown: list[int] = []
    door.loop.touch = lambda nodeid, when_ns: bool(shown.append(when_ns))  # type: ignore[method-assign, func-returns-value]
    door.make(b"one")
    door.rename(b"one", b"two")
    door.remove(b"two")
    found = door.view.attributes(door.here)
    assert found.st_mtime_ns == found.st_ctime_ns == shown[-1]
    assert len(shown) == 2
