"""The mount's node table against a naive tree, with a recorder in the native loop's place."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvfs.errors import Superseded
from mounts.kernel.nodes import INDEX_BITS, ROOT_ID, Node, NodeTable
from mounts.kernel.open_draft import OpenDraft
from tiers.model.objects import Draft, Name, ObjectInfo
from tiers.model.tier import Extent, object_key

COMPONENTS = (b"a", b"b", b"c\xff")
NAMES = st.sampled_from(COMPONENTS)


@dataclass
class RecordingMirror:
    """What the native loop would know: edges, and lookups that it answered by itself."""

    edges: dict[tuple[int, bytes], int] = field(default_factory=dict)
    lookups: dict[int, int] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    doubts: set[tuple[int, bytes]] = field(default_factory=set)

    def link(self, parent: int, name: bytes, nodeid: int) -> None:
        assert nodeid not in self.dropped
        self.edges[parent, name] = nodeid

    def unlink(self, parent: int, name: bytes, nodeid: int) -> None:
        if self.edges.get((parent, name)) == nodeid:
            del self.edges[parent, name]

    def mark_unresolved(self, parent: int, name: bytes, nodeid: int) -> None:
        self.unlink(parent, name, nodeid)
        self.doubts.add((parent, name))

    def node_drop(self, nodeid: int) -> int:
        assert nodeid not in self.dropped, "dropped twice"
        if self.lookups.get(nodeid, 0) == 0:
            self.dropped.add(nodeid)
        return self.lookups.get(nodeid, 0)


@dataclass(eq=False)
class Entry:
    """One file or directory of the model. `parent` is where it is, or was when its name went."""

    node: Node
    parent: Entry | None
    component: bytes
    directory: bool
    linked: bool = True
    lookups: int = 0
    handles: int = 0
    draft: bool = False
    key: int | None = None


def make_info(number: int) -> ObjectInfo:
    return ObjectInfo(
        name=None,
        key=object_key(number),
        extent=Extent(number, 2),
        tier="dram",
        object_id=number,
        ino=number,
        size_bytes=0,
        mode=0o644,
        uid=0,
        gid=0,
        mtime_ns=0,
        ctime_ns=0,
        sequence=number,
        pinned=False,
        hits=0,
    )


def make_draft(slot: int) -> OpenDraft:
    return OpenDraft(Draft(Extent(slot, 1), uid=0, size_hint_bytes=0), mode=0o644, uid=0, gid=0, ctime_ns=0)


class NodesAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.mirror = RecordingMirror()
        self.table = NodeTable(self.mirror)
        self.entries: list[Entry] = []
        self.ever = {ROOT_ID}
        self.keys = 0

    @initialize()
    def begin(self) -> None:
        self.root = Entry(self.table.root, None, b"", directory=True)
        self.entries = [self.root]

    # --- the model ----------------------------------------------------------------------------------------

    def child(self, parent: Entry, component: bytes) -> Entry | None:
        for entry in self.entries:
            if entry.linked and entry.parent is parent and entry.component == component:
                return entry
        return None

    def name_of(self, entry: Entry) -> Name:
        parts: list[bytes] = []
        current: Entry | None = entry
        while current is not None and current.parent is not None:
            parts.insert(0, current.component)
            current = current.parent
        if len(parts) < 2:
            return Name(b"".join(parts), b"")
        return Name(parts[0], b"/".join(parts[1:]) + (b"/" if entry.directory else b""))

    def is_below(self, entry: Entry, above: Entry) -> bool:
        current: Entry | None = entry
        while current is not None and current is not above:
            current = current.parent
        return current is above

    def needed(self, entry: Entry) -> bool:
        native = self.mirror.lookups.get(entry.node.nodeid, 0)
        return (
            entry.parent is None
            or entry.lookups + native + entry.handles > 0
            or entry.draft
            or any(other.parent is entry for other in self.entries)
        )

    def drop_unneeded(self, entry: Entry) -> None:
        """`entry` has one thing less that kept it: it may go, and its parents after it."""
        current: Entry | None = entry
        while current is not None and current in self.entries and not self.needed(current):
            self.entries.remove(current)
            current = current.parent

    # --- choices ------------------------------------------------------------------------------------------

    def choose(self, data: st.DataObject, which: list[Entry]) -> Entry | None:
        return data.draw(st.sampled_from(which)) if which else None

    def directories(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.directory and entry.linked]

    def files(self) -> list[Entry]:
        return [entry for entry in self.entries if not entry.directory]

    def linked(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.linked and entry.parent is not None]

    # --- rules --------------------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        component=NAMES,
        directory=st.booleans(),
        keep=st.sampled_from(["lookup", "native", "draft"]),
    )
    def add(self, data: st.DataObject, component: bytes, directory: bool, keep: str) -> None:
        parent = self.choose(data, self.directories())
        assert parent is not None
        old = self.child(parent, component)
        if old is not None and old.directory:
            return  # a directory is not replaced by add
        node = self.table.add(parent.node, component, directory=directory, ino=len(self.ever))
        assert node.nodeid not in self.ever
        self.ever.add(node.nodeid)
        entry = Entry(node, parent, component, directory)
        self.entries.append(entry)
        if keep == "native":
            self.mirror.lookups[node.nodeid] = 1
        elif keep == "draft" and not directory:
            self.table.set_draft(node, make_draft(len(self.ever)))
            entry.draft = True
        else:
            node.lookups += 1
            entry.lookups = 1
        if old is not None:
            old.linked = False
            self.drop_unneeded(old)

    @rule(data=st.data())
    def unlink(self, data: st.DataObject) -> None:
        entry = self.choose(data, self.linked())
        if entry is None or any(other.parent is entry and other.linked for other in self.entries):
            return
        self.table.unlink(entry.node)
        self.table.release(entry.node)
        entry.linked = False
        self.drop_unneeded(entry)

    @rule(data=st.data(), component=NAMES)
    def move(self, data: st.DataObject, component: bytes) -> None:
        entry = self.choose(data, self.linked())
        parent = self.choose(data, self.directories())
        if entry is None or parent is None or self.is_below(parent, entry):
            return
        old = self.child(parent, component)
        if old is not None and old is not entry:
            full = any(other.parent is old and other.linked for other in self.entries)
            if old.directory != entry.directory or full or self.is_below(parent, old):
                return
        self.table.move(entry.node, parent.node, component)
        if old is entry:
            return
        former, entry.parent, entry.component = entry.parent, parent, component
        if old is not None:
            old.linked = False
            self.drop_unneeded(old)
        assert former is not None
        self.drop_unneeded(former)

    @rule(data=st.data())
    def look_up(self, data: st.DataObject) -> None:
        if (entry := self.choose(data, self.linked())) is not None:
            entry.node.lookups += 1
            entry.lookups += 1

    @rule(data=st.data(), count=st.integers(1, 3))
    def look_up_natively(self, data: st.DataObject, count: int) -> None:
        if (entry := self.choose(data, self.linked())) is not None:
            nodeid = entry.node.nodeid
            self.mirror.lookups[nodeid] = self.mirror.lookups.get(nodeid, 0) + count

    @rule(data=st.data(), share=st.integers(1, 4))
    def drop_lookups(self, data: st.DataObject, share: int) -> None:
        """Drop lookups as the kernel does: some of its lookups, the native ones first; a call comes with their last."""
        native = self.mirror.lookups
        known = [e for e in self.entries if e.parent is not None and e.lookups + native.get(e.node.nodeid, 0)]
        if (entry := self.choose(data, known)) is None:
            return
        here = native.get(entry.node.nodeid, 0)
        count = min(share, here + entry.lookups)
        taken = min(here, count)
        if here:
            native[entry.node.nodeid] = here - taken
        if here > taken:
            return
        entry.lookups -= count - taken
        self.table.drop_lookups(entry.node, count - taken)
        self.drop_unneeded(entry)

    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        if (entry := self.choose(data, self.files())) is not None:
            entry.node.handles += 1
            entry.handles += 1

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        if (entry := self.choose(data, [e for e in self.files() if e.handles])) is not None:
            entry.node.handles -= 1
            entry.handles -= 1
            self.table.release(entry.node)
            self.drop_unneeded(entry)

    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        """A draft becomes an object, or an object another one."""
        if (entry := self.choose(data, [e for e in self.files() if e.draft or e.key is not None])) is None:
            return
        self.keys += 1
        entry.draft, entry.key = False, self.keys
        self.table.set_draft(entry.node, None)
        self.table.set_object(entry.node, make_info(self.keys))
        self.table.release(entry.node)
        self.drop_unneeded(entry)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if (entry := self.choose(data, [e for e in self.files() if e.draft])) is None:
            return
        self.table.unlink(entry.node)
        self.table.set_draft(entry.node, None)
        self.table.release(entry.node)
        entry.linked = entry.draft = False
        self.drop_unneeded(entry)

    @precondition(lambda self: len(self.entries) > 4)
    @rule()
    def drop_everything(self) -> None:
        """Release all that kept nodes: only the root is left, and no edge."""
        for entry in list(self.entries):
            node = entry.node
            self.mirror.lookups.pop(node.nodeid, None)
            if entry.draft:
                self.table.set_draft(node, None)
            if entry.parent is not None:
                node.handles = 0
                self.table.drop_lookups(node, entry.lookups)
        self.entries = [self.root]
        assert len(self.table) == 1
        assert not self.mirror.edges

    # --- what always holds --------------------------------------------------------------------------------

    @invariant()
    def nodes_are_those_of_the_model(self) -> None:
        assert {node.nodeid for node in self.table} == {entry.node.nodeid for entry in self.entries}
        assert self.table.find(ROOT_ID) is self.table.root
        indexes = [nodeid & (1 << INDEX_BITS) - 1 for nodeid in (entry.node.nodeid for entry in self.entries)]
        assert len(set(indexes)) == len(indexes)
        for nodeid in self.mirror.dropped:
            assert self.table.find(nodeid) is None

    @invariant()
    def edges_are_mirrored(self) -> None:
        expected = {
            (e.parent.node.nodeid, e.component): e.node.nodeid
            for e in self.entries
            if e.linked and e.parent is not None
        }
        assert self.mirror.edges == expected
        for entry in self.entries:
            for component in COMPONENTS:
                found = self.child(entry, component)
                assert self.table.child(entry.node, component) is (found.node if found else None)

    @invariant()
    def names_follow_the_tree(self) -> None:
        for entry in self.entries:
            name = self.name_of(entry)
            assert self.table.name(entry.node) == name
            if entry.linked and entry.parent is not None:
                assert self.table.resolve(name) is entry.node
                expected = self.table.child_name(entry.parent.node, entry.component)
                assert entry.parent.parent is None or expected == Name(
                    name.bucket, name.key.removesuffix(b"/")
                )

    @invariant()
    def drafts_are_found(self) -> None:
        for entry in self.entries:
            if not entry.directory:
                continue
            drafts = [e for e in self.entries if e.draft and e.linked]
            direct = {e.component: e.node for e in drafts if e.parent is entry}
            assert self.table.drafts_in(entry.node) == direct
            assert self.table.has_drafts_below(entry.node) == any(self.is_below(e, entry) for e in drafts)

    @invariant()
    def objects_are_found(self) -> None:
        for entry in self.entries:
            if entry.key is not None:
                found = self.table.of_object(object_key(entry.key).digest)
                assert found is (entry.node if entry.linked else None)


NodesAgainstModel.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestNodesAgainstModel = NodesAgainstModel.TestCase


def test_a_dropped_nodeid_is_superseded_also_when_its_index_is_used_again() -> None:
    table = NodeTable(RecordingMirror())
    first = table.add(table.root, b"a", directory=False, ino=7)
    table.release(first)
    second = table.add(table.root, b"a", directory=False, ino=8)
    index = (1 << INDEX_BITS) - 1
    assert first.nodeid & index == second.nodeid & index
    assert first.nodeid != second.nodeid
    with pytest.raises(Superseded, match=str(first.nodeid)):
        table.get(first.nodeid)


def test_a_replaced_node_that_nothing_keeps_goes_at_once() -> None:
    table = NodeTable(RecordingMirror())
    first = table.add(table.root, b"a", directory=False, ino=7)
    table.add(table.root, b"a", directory=False, ino=8)
    assert table.find(first.nodeid) is None


def test_a_directory_kept_for_a_child_goes_when_the_child_moves_out() -> None:
    table = NodeTable(RecordingMirror())
    directory = table.add(table.root, b"d", directory=True, ino=7)
    node = table.add(directory, b"a", directory=False, ino=8)
    node.lookups = 1
    table.release(directory)
    assert table.find(directory.nodeid) is directory
    table.move(node, table.root, b"a")
    assert table.find(directory.nodeid) is None


def test_what_a_move_replaces_goes_when_nothing_keeps_it() -> None:
    table = NodeTable(RecordingMirror())
    first = table.add(table.root, b"a", directory=False, ino=7)
    table.move(table.add(table.root, b"b", directory=False, ino=8), table.root, b"a")
    assert table.find(first.nodeid) is None


def test_a_dropped_name_resolves_to_nothing() -> None:
    table = NodeTable(RecordingMirror())
    assert table.resolve(Name(b"bucket", b"a/b")) is None
