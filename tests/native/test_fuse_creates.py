"""Files that the native FUSE loop creates and renames by itself."""

from __future__ import annotations

import os
import stat
import struct
import time

import pytest

from kvfs._native.fuse import loop as fuse_loop
from kvfs.errors import KvfsError
from tests.support.fuse_stand import (
    ATTR,
    CALLS_CAPACITY,
    CREATE,
    ENTRY,
    EXCHANGE,
    LOOKUP,
    NOREPLACE,
    RENAME,
    RENAME2,
    ROOT,
    SPARES,
    TICK_NS,
    UNLINK,
    VALID_S,
    WRITE,
    Stand,
    attr_of_entry,
    known_directory,
    outcome,
    write_in,
)
from tests.support.waits import WAIT_S

# --- what the loop does by itself ----------------------------------------------------------------------------


def create_in(name: bytes, flags: int = os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode: int = 0o640) -> bytes:
    return struct.pack("<IIII", flags, stat.S_IFREG | mode, 0o22, 0) + name + b"\0"


def rename_in(parent: int, name: bytes, new_name: bytes) -> bytes:
    return struct.pack("<Q", parent) + name + b"\0" + new_name + b"\0"


def test_a_spare_draft_is_given_to_a_create(stand: Stand) -> None:
    known_directory(stand, 20)
    extent = stand.spare(30, fh=4711)
    began_ns = time.time_ns()
    reply = stand.ask(CREATE, 20, create_in(b"new"), uid=3, pid=4)
    assert ENTRY.unpack_from(reply)[:4] == (30, 0, VALID_S, 1)
    attr = attr_of_entry(reply)
    assert (attr.ino, attr.size, attr.mode, attr.uid) == (77, 0, stat.S_IFREG | 0o640, 3)
    assert began_ns - TICK_NS <= attr.mtime_ns <= time.time_ns()
    assert struct.unpack_from("<QIi", reply, ENTRY.size + ATTR.size) == (4711, 0, 0)
    [call] = stand.calls(1)
    assert (call.opcode, call.nodeid, call.other, call.offset) == (fuse_loop.CREATED, 20, 30, 4711)
    assert (call.name, call.mode, call.uid, call.pid) == (b"new", stat.S_IFREG | 0o640, 3, 4)
    assert stand.loop.spares == 0
    stand.ask(WRITE, 30, write_in(4711, 0, b"bytes"))
    reply = stand.ask(LOOKUP, 20, b"new\0")
    found = attr_of_entry(reply)
    assert (ENTRY.unpack_from(reply)[0], found.size, found.mtime_ns >= attr.mtime_ns) == (30, 5, True)
    assert stand.loop.release(30) == 0
    assert stand.loop.node_drop(30) == 2  # both lookups
    stand.nothing_else()
    stand.tier.abort(extent)


@pytest.mark.parametrize(
    "case",
    ["no spare", "unknown", "taken", "unresolved", "not ASCII", "too long", "reader", "quota", "no file"],
)
def test_what_is_not_plainly_free_to_create_is_a_call(stand: Stand, case: str) -> None:
    known_directory(stand, 20, b"unresolved", room=10)
    extent = stand.spare(30, fh=4711)
    stand.loop.link(20, b"taken", 10)
    name = {"taken": b"taken", "unresolved": b"unresolved", "not ASCII": "ü".encode(), "too long": b"n" * 11}
    request = create_in(name.get(case, b"name"), flags=os.O_RDONLY if case == "reader" else os.O_RDWR)
    if case == "no file":
        request = request[:4] + struct.pack("<I", stat.S_IFIFO | 0o600) + request[8:]
    stand.loop.relay_opens(case == "quota")
    if case == "no spare":
        assert stand.loop.spare_take() == 30
        assert stand.loop.spare_take() == 0
    unique = stand.send(CREATE, ROOT if case == "unknown" else 20, request)
    [call] = stand.calls(1)
    assert (call.unique, call.opcode) == (unique, CREATE)
    stand.nothing_else()
    assert (stand.loop.spares, stand.loop.spare_take()) == ((0, 0) if case == "no spare" else (1, 30))
    stand.tier.abort(extent)


def test_the_name_of_a_draft_moves_to_a_free_one(stand: Stand) -> None:
    known_directory(stand, 20)
    known_directory(stand, 21, b"unresolved")
    draft = stand.draft(10)
    stand.loop.link(20, b"old", 10)
    stand.sealed(11, b"")
    stand.loop.link(20, b"sealed", 11)
    stand.ask(RENAME, 20, rename_in(21, b"old", b"new"))
    [first] = stand.calls(1)  # nobody waits for it, and it is told of all the same
    assert (first.opcode, first.nodeid, first.other, first.offset) == (fuse_loop.RENAMED, 20, 21, 10)
    assert (first.name, first.new_name) == (b"old", b"new")
    assert [outcome(stand, 20, b"old"), outcome(stand, 21, b"new")] == [0, 10]
    stand.ask(RENAME2, 21, struct.pack("<QII", 20, NOREPLACE, 0) + b"new\0again\0")
    [second] = stand.calls(1)
    assert (second.nodeid, second.other, second.name, second.new_name) == (21, 20, b"new", b"again")
    for parent, body in (
        (20, rename_in(20, b"sealed", b"free")),
        (20, rename_in(20, b"none", b"free")),
        (20, rename_in(20, b"again", b"sealed")),
        (20, rename_in(20, b"again", b"again")),
        (20, rename_in(21, b"again", b"unresolved")),
        (20, rename_in(ROOT, b"again", b"free")),
        (20, rename_in(20, b"again", "ü".encode())),
    ):
        unique = stand.send(RENAME, parent, body)
        assert [(call.unique, call.opcode) for call in stand.calls(1)] == [(unique, fuse_loop.RENAME)]
    unique = stand.send(RENAME2, 20, struct.pack("<QII", 20, EXCHANGE, 0) + b"again\0free\0")
    assert [(call.unique, call.flags) for call in stand.calls(1)] == [(unique, EXCHANGE)]
    assert outcome(stand, 20, b"again") == 10
    stand.nothing_else()
    stand.tier.abort(draft)


def test_the_library_takes_nothing_from_a_file_that_it_has_not_heard_of(stand: Stand) -> None:
    known_directory(stand, 20)
    former = stand.draft(10)
    stand.loop.link(20, b"tmp", 10)
    extent = stand.spare(30, fh=4711)
    stand.ask(RENAME, 20, rename_in(20, b"tmp", b"name"))
    stand.ask(CREATE, 20, create_in(b"tmp"))
    stand.loop.unlink(20, b"tmp", 10)  # as when the former draft is dropped just then
    stand.loop.mark_unresolved(20, b"tmp", 10)
    stand.loop.mark_unresolved(20, b"tmp", 0)  # as when another door seals an object of this name
    stand.loop.clear_unresolved(20, b"tmp")
    assert [call.opcode for call in stand.calls(2)] == [fuse_loop.RENAMED, fuse_loop.CREATED]
    assert [outcome(stand, 20, b"tmp"), outcome(stand, 20, b"name")] == [30, 10]
    stand.loop.release(30)
    for made in (former, extent):
        stand.tier.abort(made)
    stand.nothing_else()


def test_what_the_loop_cannot_tell_it_does_not_do(stand: Stand) -> None:
    known_directory(stand, 20)
    draft = stand.draft(10)
    stand.loop.link(20, b"old", 10)
    extent = stand.spare(30, fh=4711)
    for _ in range(CALLS_CAPACITY):
        stand.send(UNLINK, 20, b"x\0")
    stand.send(RENAME, 20, rename_in(20, b"old", b"new"))
    assert stand.relayed().opcode == RENAME
    stand.send(CREATE, 20, create_in(b"new"))
    assert stand.relayed().opcode == CREATE
    stand.calls(CALLS_CAPACITY)
    assert [outcome(stand, 20, b"old"), outcome(stand, 20, b"new"), stand.loop.spares] == [10, 0, 1]
    assert stand.loop.spare_take() == 30
    for made in (draft, extent):
        stand.tier.abort(made)
    stand.nothing_else()


def test_spares_have_a_limit_and_a_draft_behind_them(stand: Stand) -> None:
    extents = [stand.spare(30 + number, fh=number) for number in range(SPARES)]
    with pytest.raises(KvfsError):
        stand.spare(30 + SPARES, fh=1)
    stand.loop.node_drop(30 + SPARES)
    with pytest.raises(KvfsError):
        stand.loop.spare_add(1, 1, stand.device)
    assert stand.loop.spares == SPARES
    assert sorted(stand.loop.spare_take() for _ in range(SPARES)) == list(range(30, 30 + SPARES))
    for extent in (*extents, stand.lent.pop()):
        stand.tier.abort(extent)


def test_who_watches_for_calls_is_not_told_of_them(stand: Stand) -> None:
    assert not stand.loop.await_calls(1_000_000)
    stand.loop.watch_calls(True)
    unique = stand.send(UNLINK, ROOT, b"x\0")
    assert stand.loop.await_calls(int(WAIT_S * 1e9))
    assert not stand.readable(stand.loop.calls_fd)
    stand.loop.watch_calls(False)
    assert [call.unique for call in stand.calls(1)] == [unique]
    assert not stand.readable(stand.loop.calls_fd)
    stand.loop.watch_calls(True)
    stand.loop.watch_calls(False)
    assert not stand.readable(stand.loop.calls_fd)
    stand.nothing_else()
