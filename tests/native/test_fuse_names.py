"""Names in the native FUSE loop: look-ups, directories whose names are all known, and forgetting."""

from __future__ import annotations

import errno
import os
import stat
import struct
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs._native.fuse import loop as fuse_loop
from kvfs._native.fuse.loop import Call
from kvfs.errors import KvfsError
from tests.support.fuse_stand import (
    ATTR,
    BATCH_FORGET,
    CALLS_CAPACITY,
    CREATE,
    ENTRY,
    FORGET,
    LOOKUP,
    RENAME,
    RENAME2,
    ROOT,
    UNLINK,
    UNRESOLVED_NAMES,
    VALID_S,
    Request,
    Stand,
    attr_of_entry,
    known_directory,
    outcome,
)
from tests.support.waits import WAIT_S

# --- names --------------------------------------------------------------------------------------------------


def test_linked_names_are_answered_natively(stand: Stand) -> None:
    stand.sealed(10, b"sealed", name=b"s")
    draft = stand.draft(11, name=b"d")
    stand.fill(draft, b"so far")
    stand.loop.node_directory(12, 99, mode=stat.S_IFDIR | 0o750, uid=1, gid=2, mtime_ns=5)
    stand.loop.link(ROOT, b"dir", 12)
    for name, nodeid, ino, size, valid_s in (
        (b"s", 10, 88, 6, VALID_S),
        (b"d", 11, 77, 6, 0),
        (b"dir", 12, 99, 0, VALID_S),
    ):
        reply = stand.ask(LOOKUP, ROOT, name + b"\0")
        assert ENTRY.unpack_from(reply)[:4] == (nodeid, 0, VALID_S, valid_s)
        found = attr_of_entry(reply)
        assert (found.ino, found.size) == (ino, size)
    stand.nothing_else()
    assert stand.loop.stats()["native_lookups"] == 3
    stand.tier.abort(draft)


def test_unknown_names_become_calls_in_order(stand: Stand) -> None:
    create = struct.pack("<IIII", os.O_RDWR, stat.S_IFREG | 0o640, 0o22, 0) + b"made\0"
    uniques = [
        stand.send(LOOKUP, ROOT, b"who\0", uid=3, pid=4),
        stand.send(CREATE, ROOT, create, uid=3),
        stand.send(RENAME, ROOT, struct.pack("<Q", 9) + b"old\0new\0"),
        stand.send(RENAME2, ROOT, struct.pack("<QII", 9, 1, 0) + b"old2\0new2\0"),
        stand.send(UNLINK, ROOT, b"gone\0"),
        stand.send(LOOKUP, ROOT, b"x" * 255 + b"\0"),
    ]
    calls = stand.calls(6)
    assert [call.unique for call in calls] == uniques
    opcodes = [LOOKUP, CREATE, RENAME2, RENAME2, UNLINK, LOOKUP]
    assert [call.opcode for call in calls] == opcodes
    assert (calls[0].name, calls[0].uid, calls[0].pid, calls[0].nodeid) == (b"who", 3, 4, ROOT)
    assert (calls[1].name, calls[1].flags, calls[1].mode) == (b"made", os.O_RDWR, stat.S_IFREG | 0o640)
    assert (calls[2].name, calls[2].other, calls[2].new_name, calls[2].flags) == (b"old", 9, b"new", 0)
    assert (calls[3].name, calls[3].other, calls[3].new_name, calls[3].flags) == (b"old2", 9, b"new2", 1)
    assert calls[4].name == b"gone"
    assert calls[5].name == b"x" * 255
    assert (fuse_loop.LOOKUP, fuse_loop.CREATE, fuse_loop.RENAME, fuse_loop.UNLINK) == (1, 35, 45, 10)
    stand.nothing_else()


def test_calls_are_answered(stand: Stand) -> None:
    stand.sealed(10, b"bytes")
    draft = stand.draft(11)
    first, second, third, fourth = (stand.send(LOOKUP, ROOT, b"n\0") for _ in range(4))
    stand.calls(4)
    stand.loop.answer_status(first, errno.ENOENT)
    assert stand.reply() == (first, -errno.ENOENT, b"")
    stand.loop.answer_entry(second, 10)
    unique, error, body = stand.reply()
    assert (unique, error, ENTRY.unpack_from(body)[0], attr_of_entry(body).size) == (second, 0, 10, 5)
    assert stand.acquire(11, draft) == 1
    stand.loop.answer_created(third, 11, 4711)
    unique, error, body = stand.reply()
    assert (unique, error, ENTRY.unpack_from(body)[0], attr_of_entry(body).ino) == (third, 0, 11, 77)
    assert struct.unpack("<QIi", body[ENTRY.size + ATTR.size :]) == (4711, 0, 0)
    stand.loop.answer_entry(fourth, 999)  # a node that is not known
    assert stand.reply() == (fourth, -errno.ESTALE, b"")
    assert stand.loop.release(11) == 0
    stand.tier.abort(draft)
    stand.nothing_else()


def test_a_file_that_lost_its_name_before_it_is_answered_is_no_error(stand: Stand) -> None:
    """The library has opened it by then; the kernel asks again for all that it was told of it."""
    stand.sealed(10, b"bytes")
    stand.loop.node_dead(10)
    unique = stand.send(LOOKUP, ROOT, b"n\0")
    stand.calls(1)
    stand.loop.answer_created(unique, 10, 4711)
    answered, error, body = stand.reply()
    assert (answered, error) == (unique, 0)
    nodeid, _, entry_valid, attr_valid, *_ = ENTRY.unpack_from(body)
    assert (nodeid, entry_valid, attr_valid) == (10, 0, 0)
    assert struct.unpack("<QIi", body[ENTRY.size + ATTR.size :]) == (4711, 0, 0)
    stand.nothing_else()


def test_a_name_no_longer_linked_is_a_call_again(stand: Stand) -> None:
    stand.sealed(10, b"", name=b"a")
    stand.loop.unlink(ROOT, b"a", 10)
    unique = stand.send(LOOKUP, ROOT, b"a\0")
    assert [call.unique for call in stand.calls(1)] == [unique]
    extent = stand.sealed(11, b"", name=b"b")
    stand.tier.free(extent)  # evicted: the library looks for it elsewhere
    assert [stand.send(LOOKUP, ROOT, b"b\0")] == [call.unique for call in stand.calls(1)]
    stand.sealed(12, b"", name=b"c")
    stand.loop.node_dead(12)
    assert [stand.send(LOOKUP, ROOT, b"c\0")] == [call.unique for call in stand.calls(1)]
    stand.nothing_else()


def test_many_names_are_found(stand: Stand) -> None:
    stand.sealed(10, b"")
    for number in range(5000):
        stand.loop.link(ROOT + number % 7, b"n%d" % number, 10)
    for number in range(0, 5000, 2):
        stand.loop.unlink(ROOT + number % 7, b"n%d" % number, 10)
    for number in range(1, 5000, 502):
        stand.ask(LOOKUP, ROOT + number % 7, b"n%d\0" % number)
    for number in range(0, 5000, 500):
        stand.send(LOOKUP, ROOT + number % 7, b"n%d\0" % number)
    assert [call.name for call in stand.calls(10)] == [b"n%d" % number for number in range(0, 5000, 500)]


def test_more_calls_than_the_queue_holds_are_relayed(stand: Stand) -> None:
    for number in range(CALLS_CAPACITY):
        stand.send(LOOKUP, ROOT, b"n%d\0" % number)
    stand.nothing_else()
    over = stand.send(LOOKUP, ROOT, b"over\0")
    assert stand.relayed() == Request(LOOKUP, over, ROOT, b"over\0")
    assert stand.loop.stats()["relayed"] == 1
    calls = stand.calls(CALLS_CAPACITY)
    assert [call.name for call in calls] == [b"n%d" % number for number in range(CALLS_CAPACITY)]
    stand.send(LOOKUP, ROOT, b"again\0")
    assert [call.name for call in stand.calls(1)] == [b"again"]


def test_the_calls_descriptor_is_readable_only_while_calls_wait(stand: Stand) -> None:
    """A descriptor that stays readable makes the service spin. The calls are taken as fast as they come, as
    the service does it from its other handlers, which meets the moment between queueing and waking."""
    for _ in range(300):
        left = 32
        for _ in range(left):
            stand.send(LOOKUP, ROOT, b"n\0")
        deadline = time.monotonic() + WAIT_S
        while left:
            left -= len(stand.loop.take_calls())
            assert time.monotonic() < deadline
        stand.nothing_else()  # whoever queued the last call has done with it
        assert not stand.readable(stand.loop.calls_fd)


# --- directories whose names are all known -------------------------------------------------------------------


def test_what_has_no_edge_does_not_exist_where_all_names_are_known(stand: Stand) -> None:
    stand.sealed(10, b"")
    known_directory(stand, 20, b"other/stranger", room=8)
    stand.loop.link(20, b"mine", 10)
    assert [outcome(stand, 20, name) for name in (b"mine", b"other", b"stranger", b"none")] == [
        10,
        None,
        None,
        0,
    ]
    assert outcome(stand, 20, b"too long!") is None  # which error it is, the library says
    assert outcome(stand, ROOT, b"none") is None
    stand.loop.unlink(20, b"mine", 11)  # not what it leads to
    assert outcome(stand, 20, b"mine") == 10
    stand.loop.mark_unresolved(20, b"mine", 11)
    assert outcome(stand, 20, b"mine") == 10
    stand.loop.clear_unresolved(20, b"mine")
    assert outcome(stand, 20, b"mine") == 10
    stand.loop.mark_unresolved(20, b"mine", 10)
    assert outcome(stand, 20, b"mine") is None
    stand.loop.clear_unresolved(20, b"mine")
    stand.loop.clear_unresolved(20, b"other")
    assert [outcome(stand, 20, name) for name in (b"mine", b"other", b"stranger")] == [0, 0, None]
    assert stand.loop.drain_misses() == 3
    assert stand.loop.drain_misses() == 0
    stand.loop.know_names(20, 0, b"")
    assert [outcome(stand, 20, name) for name in (b"mine", b"none")] == [None, None]
    known_directory(stand, 20)
    assert outcome(stand, 20, b"stranger") == 0
    stand.loop.node_dead(20)
    assert outcome(stand, 20, b"none") is None
    stand.nothing_else()


def test_too_many_unresolved_names_make_a_directory_unknown(stand: Stand) -> None:
    known_directory(stand, 20)
    known_directory(stand, 21)
    for number in range(UNRESOLVED_NAMES):
        stand.loop.mark_unresolved(20, b"%d" % number, 0)
        stand.loop.mark_unresolved(20, b"%d" % number, 0)
    assert [outcome(stand, 20, name) for name in (b"none", b"7")] == [0, None]
    stand.loop.mark_unresolved(21, b"one more", 0)
    assert [outcome(stand, 21, b"none"), outcome(stand, 20, b"none")] == [None, 0]
    assert stand.loop.node_drop(20) == 0  # and with it its unresolved names
    known_directory(stand, 21)
    for number in range(UNRESOLVED_NAMES):
        stand.loop.mark_unresolved(21, b"%d" % number, 0)
    assert [outcome(stand, 21, name) for name in (b"none", b"7")] == [0, None]
    stand.nothing_else()


NAMED = [b"a", b"b", b"c"]
STEPS = st.tuples(
    st.sampled_from(["link", "unlink", "mark", "clear", "know", "unknow", "move", "dead"]),
    st.sampled_from(NAMED),
    st.sampled_from(NAMED),
    st.sampled_from([10, 11]),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(steps=st.lists(STEPS, max_size=12))
def test_lookups_follow_a_model_of_the_names(
    stand: Stand, steps: list[tuple[str, bytes, bytes, int]]
) -> None:
    """The model: a dictionary from name to nodeid, 0 for an unresolved one, and whether all names are known."""
    directory = next(stand.objects) + 1000
    while len(stand.lent) < 2:
        stand.lent.append(stand.draft(10 + len(stand.lent)))
    known_directory(stand, directory)
    edges: dict[bytes, int] = {}
    known = True
    for step, name, other, nodeid in steps:
        held = edges.get(name)
        match step:
            case "link":
                stand.loop.link(directory, name, nodeid)
                edges[name] = nodeid
            case "unlink":
                stand.loop.unlink(directory, name, nodeid)
                if held == nodeid:
                    del edges[name]
            case "mark":
                stand.loop.mark_unresolved(directory, name, nodeid)
                if held == nodeid:
                    del edges[name]
                if known and name not in edges:
                    edges[name] = 0
            case "clear":
                stand.loop.clear_unresolved(directory, name)
                if held == 0:
                    del edges[name]
            case "know" | "unknow":
                known = step == "know"
                known_directory(stand, directory, other if known else b"", room=255 if known else 0)
                edges = {key: node for key, node in edges.items() if node != 0}
                if known:
                    edges.setdefault(other, 0)
            case "move":
                unique = stand.send(
                    RENAME, directory, struct.pack("<Q", directory) + name + b"\0" + other + b"\0"
                )
                [call] = stand.calls(1)
                if known and held and other not in edges:
                    assert (call.opcode, call.offset, stand.reply()) == (
                        fuse_loop.RENAMED,
                        held,
                        (unique, 0, b""),
                    )
                    edges[other] = edges.pop(name)
                else:
                    assert call.opcode == fuse_loop.RENAME
            case "dead":
                stand.loop.node_dead(directory)
                known = False
                edges = {key: node for key, node in edges.items() if node != 0}
        for each in NAMED:
            expected = edges[each] or None if each in edges else 0 if known else None
            assert outcome(stand, directory, each) == expected, (step, each)
    for each in list(edges):
        stand.loop.unlink(directory, each, edges[each])
    stand.loop.node_drop(directory)


# --- forgetting ---------------------------------------------------------------------------------------------


def look_up(stand: Stand, name: bytes, times: int) -> None:
    for _ in range(times):
        stand.ask(LOOKUP, ROOT, name + b"\0")


def forgotten(calls: list[Call]) -> list[tuple[int, int, int]]:
    return [(call.opcode, call.nodeid, call.other) for call in calls]


def test_forget_takes_from_the_native_lookups_first(stand: Stand) -> None:
    stand.sealed(10, b"", name=b"a")
    look_up(stand, b"a", 3)
    stand.send(FORGET, 10, struct.pack("<Q", 2))
    stand.nothing_else()
    assert stand.loop.take_calls() == []
    assert stand.loop.node_drop(10) == 1  # one is left, so the node stays
    stand.send(FORGET, 10, struct.pack("<Q", 3))
    assert forgotten(stand.calls(1)) == [(fuse_loop.FORGET, 10, 2)]
    assert stand.loop.node_drop(10) == 0
    stand.send(FORGET, 10, struct.pack("<Q", 4))  # nothing counted here: all of it is the library's
    assert forgotten(stand.calls(1)) == [(fuse_loop.FORGET, 10, 4)]
    stand.nothing_else()


def test_the_last_native_lookup_forgotten_is_reported(stand: Stand) -> None:
    stand.sealed(10, b"", name=b"a")
    look_up(stand, b"a", 2)
    stand.send(FORGET, 10, struct.pack("<Q", 2))
    assert forgotten(stand.calls(1)) == [(fuse_loop.FORGET, 10, 0)]


def test_lookups_answered_for_calls_are_native_ones(stand: Stand) -> None:
    stand.sealed(10, b"")
    stand.loop.answer_entry(stand.send(LOOKUP, ROOT, b"a\0"), 10)
    stand.loop.answer_created(stand.send(LOOKUP, ROOT, b"a\0"), 10, 1)
    stand.calls(2)
    stand.reply(), stand.reply()
    assert stand.loop.node_drop(10) == 2


def test_batch_forget(stand: Stand) -> None:
    for nodeid, name in ((10, b"a"), (11, b"b"), (12, b"c")):
        stand.sealed(nodeid, b"", name=name)
        look_up(stand, name, 2)
    pairs = struct.pack("<6Q", 10, 1, 11, 2, 12, 5)
    stand.send(BATCH_FORGET, 0, struct.pack("<II", 3, 0) + pairs)
    assert forgotten(stand.calls(2)) == [(fuse_loop.FORGET, 11, 0), (fuse_loop.FORGET, 12, 3)]
    assert [stand.loop.node_drop(nodeid) for nodeid in (10, 11, 12)] == [1, 0, 0]
    stand.nothing_else()


def test_what_a_full_queue_cannot_take_of_a_forget_is_relayed(stand: Stand) -> None:
    for nodeid, name in ((10, b"a"), (11, b"b"), (12, b"c")):
        stand.sealed(nodeid, b"", name=name)
        look_up(stand, name, 2)
    for _ in range(CALLS_CAPACITY - 1):
        stand.send(LOOKUP, ROOT, b"n\0")
    pairs = struct.pack("<6Q", 10, 3, 12, 6, 11, 1)
    stand.send(BATCH_FORGET, 0, struct.pack("<II", 3, 0) + pairs)
    request = stand.relayed()
    assert request.opcode == BATCH_FORGET
    assert request.body[8:] == struct.pack("<6Q", 10, 0, 12, 4, 11, 0)
    stand.send(FORGET, 12, struct.pack("<Q", 9))
    assert stand.relayed().body == struct.pack("<Q", 9)
    assert forgotten(stand.calls(CALLS_CAPACITY)[-1:]) == [(fuse_loop.FORGET, 10, 1)]


def test_a_dead_node_does_not_come_back_to_take_an_index(stand: Stand) -> None:
    """`node_dead` of a node that was dropped: its index belongs to whoever takes it next."""
    stand.sealed(10 | 1 << 24, b"")
    stand.loop.node_drop(10 | 1 << 24)
    stand.loop.node_dead(10 | 1 << 24)
    stand.sealed(10 | 2 << 24, b"")
    with pytest.raises(KvfsError, match=str(10 | 3 << 24)):
        stand.sealed(10 | 3 << 24, b"")  # taken
