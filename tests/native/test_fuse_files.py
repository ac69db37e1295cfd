"""Attributes, opens and bytes of files in the native FUSE loop."""

from __future__ import annotations

import errno
import os
import stat
import struct
import subprocess

import pytest

from kvfs import limits
from kvfs._native.fuse import loop as fuse_loop
from kvfs.errors import KvfsError
from tests.support.fuse_stand import (
    BUFFER_BYTES,
    FALLOCATE,
    FLUSH,
    FLUSH_IN,
    GETATTR,
    GETATTR_IN,
    GETXATTR,
    KEEP_CACHE,
    LOOKUP,
    LSEEK,
    NOFLUSH,
    OPEN,
    READ,
    RELEASE,
    ROOT,
    VALID_S,
    WRITE,
    Attr,
    Request,
    Stand,
    fallocate_in,
    lseek_in,
    open_descriptors,
    open_in,
    read_in,
    release_in,
    settled_descriptors,
    write_in,
)
from tests.support.waits import eventually

# --- attributes ---------------------------------------------------------------------------------------------


def test_getattr_of_a_draft_is_that_of_its_slot(stand: Stand) -> None:
    extent = stand.draft(10)
    stand.fill(extent, b"12345")
    descriptor = stand.tier.open_draft(extent)
    os.utime(descriptor, ns=(10**9, 1234 * 10**9 + 5))
    os.close(descriptor)
    reply = stand.ask(GETATTR, 10, GETATTR_IN)
    found = Attr.parse(reply[16:])
    assert struct.unpack_from("<Q", reply) == (0,), "a draft changes without a request: never cached"
    assert found == Attr(77, 5, 1234 * 10**9 + 5, stat.S_IFREG | 0o600, 5)
    stand.tier.abort(extent)


def test_getattr_of_sealed_objects_and_directories(stand: Stand) -> None:
    stand.sealed(10, b"123")
    stand.loop.node_directory(11, 99, mode=stat.S_IFDIR | 0o711, uid=8, gid=9, mtime_ns=10**9 + 1)
    for nodeid, expected in (
        (10, Attr(88, 3, 1_500_000_001, stat.S_IFREG | 0o644, 5)),
        (11, Attr(99, 0, 10**9 + 1, stat.S_IFDIR | 0o711, 8)),
    ):
        reply = stand.ask(GETATTR, nodeid, GETATTR_IN)
        assert struct.unpack_from("<Q", reply) == (VALID_S,)
        assert Attr.parse(reply[16:]) == expected
    stand.nothing_else()
    assert stand.loop.stats()["native_getattrs"] == 2


@pytest.mark.parametrize("state", ["unknown", "dead", "aborted"])
def test_getattr_of_what_is_not_known_here_is_relayed(stand: Stand, state: str) -> None:
    if state == "dead":
        stand.sealed(10, b"")
        stand.loop.node_dead(10)
    elif state == "aborted":
        stand.tier.abort(stand.draft(10))
    unique = stand.send(GETATTR, 10, GETATTR_IN)
    request = stand.relayed()
    assert (request.opcode, request.unique, request.nodeid) == (GETATTR, unique, 10)


# --- opens --------------------------------------------------------------------------------------------------


def test_open_read_release_of_a_sealed_object(stand: Stand) -> None:
    extent = stand.sealed(10, b"0123456789")
    handle, flags, backing = struct.unpack("<QIi", stand.ask(OPEN, 10, open_in(), uid=41, pid=42))
    assert (flags, backing) == (NOFLUSH | KEEP_CACHE, 0)
    assert stand.loop.opens(10) == 1
    assert stand.ask(READ, 10, read_in(handle, 2, 3)) == b"234"
    assert stand.ask(READ, 10, read_in(handle, 8, 100)) == b"89"
    assert stand.ask(READ, 10, read_in(handle, 100, 100)) == b""
    again = struct.unpack_from("<Q", stand.ask(OPEN, 10, open_in()))[0]
    assert stand.loop.drain_opens() == [(10, 41, 42), (10, 0, 0)]
    assert stand.loop.drain_opens() == []
    assert stand.ask(RELEASE, 10, release_in(handle)) == b""
    assert stand.loop.opens(10) == 1
    assert stand.tier.held(extent)
    assert stand.ask(READ, 10, read_in(again, 0, 1)) == b"0"
    stand.ask(RELEASE, 10, release_in(again))
    assert stand.loop.opens(10) == 0
    # The thread of the last READ may close its descriptor after the answer.
    eventually(lambda: not stand.tier.held(extent), "the slot is held by nobody")
    stand.ask(RELEASE, 10, release_in(again))  # once too often
    assert stand.loop.opens(10) == 0
    stand.nothing_else()


def test_open_of_a_superseded_object_is_relayed(stand: Stand) -> None:
    """Python says ESTALE, and keeps what the thread finds then for it."""

    def open_relayed(nodeid: int) -> None:
        unique = stand.send(OPEN, nodeid, open_in())
        assert stand.relayed() == Request(OPEN, unique, nodeid, open_in())
        stand.answer(unique, error=errno.ESTALE)
        assert stand.reply() == (unique, -errno.ESTALE, b"")

    extent = stand.sealed(10, b"old")
    handle = struct.unpack_from("<Q", stand.ask(OPEN, 10, open_in()))[0]
    stand.tier.free(extent)
    open_relayed(10)
    assert stand.ask(READ, 10, read_in(handle, 0, 9)) == b"old", "who has it open keeps its bytes"
    stand.ask(RELEASE, 10, release_in(handle))
    open_relayed(10)
    stand.sealed(11, b"")
    stand.loop.node_dead(11)
    open_relayed(11)
    assert stand.loop.drain_opens() == [(10, 0, 0)]
    assert [stand.loop.opens(10), stand.loop.opens(11)] == [0, 0]


def test_a_thread_that_is_expected_is_passed_on(stand: Stand) -> None:
    stand.sealed(10, b"bytes")
    stand.loop.link(ROOT, b"file", 10)
    stand.loop.expect(42, True)
    stand.loop.expect(42, True)
    unique = stand.send(LOOKUP, ROOT, b"file\0", pid=42)
    (call,) = stand.calls(1)
    assert (call.unique, call.pid) == (unique, 42)
    stand.loop.answer_entry(unique, 10)
    assert stand.reply()[:2] == (unique, 0)
    unique = stand.send(OPEN, 10, open_in(), pid=42)
    assert stand.relayed().unique == unique
    stand.answer(unique, error=errno.ESTALE)
    assert stand.reply()[:2] == (unique, -errno.ESTALE)
    stand.ask(OPEN, 10, open_in(), pid=43)
    stand.loop.expect(42, False)
    stand.loop.expect(42, False)
    stand.ask(OPEN, 10, open_in(), pid=42)
    for thread in range(limits.MAX_STALE_RETRIES):
        stand.loop.expect(thread + 1, True)
    with pytest.raises(KvfsError):
        stand.loop.expect(limits.MAX_STALE_RETRIES + 1, True)


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC])
def test_open_for_writing_is_relayed(stand: Stand, flags: int) -> None:
    stand.sealed(10, b"")
    unique = stand.send(OPEN, 10, open_in(flags))
    assert stand.relayed() == Request(OPEN, unique, 10, open_in(flags))
    stand.answer(unique, struct.pack("<QIi", 5, 1, 0))
    assert stand.reply() == (unique, 0, struct.pack("<QIi", 5, 1, 0))


def test_opens_are_relayed_where_the_library_wants_them(stand: Stand) -> None:
    stand.sealed(10, b"")
    stand.loop.relay_opens(True)
    stand.send(OPEN, 10, open_in())
    assert stand.relayed().opcode == OPEN
    stand.loop.relay_opens(False)
    stand.ask(OPEN, 10, open_in())


def test_the_slot_is_open_only_as_long_as_a_handle_of_its_node(stand: Stand) -> None:
    stand.sealed(10, b"x")
    before = settled_descriptors(stand.tier)
    handles = [struct.unpack_from("<Q", stand.ask(OPEN, 10, open_in()))[0] for _ in range(20)]
    assert len(open_descriptors()) == len(before) + 1
    for handle in handles:
        stand.ask(READ, 10, read_in(handle, 0, 1))
        stand.ask(RELEASE, 10, release_in(handle))
    stand.nothing_else()
    # The thread of the last READ may close its descriptor after the answer.
    eventually(lambda: open_descriptors() == before, "the slot's descriptor is closed")


def test_a_dropped_node_lets_go_of_its_slot(stand: Stand) -> None:
    extent = stand.draft(10)
    before = open_descriptors()
    stand.acquire(10, extent)
    assert stand.loop.node_drop(10) == 0
    assert open_descriptors() == before
    with pytest.raises(KvfsError):
        stand.acquire(10, extent)
    with pytest.raises(KvfsError):
        stand.loop.release(10)
    stand.tier.abort(extent)


# --- bytes --------------------------------------------------------------------------------------------------


def test_read_and_write_of_a_draft(stand: Stand) -> None:
    extent = stand.draft(10)
    assert stand.acquire(10, extent) == 1
    data = os.urandom(BUFFER_BYTES)
    assert struct.unpack("<II", stand.ask(WRITE, 10, write_in(1, 3, data))) == (len(data), 0)
    assert stand.ask(READ, 10, read_in(1, 0, 5)) == b"\0\0\0" + data[:2]
    assert stand.ask(READ, 10, read_in(1, 3, 4 * BUFFER_BYTES)) == data, "at most a buffer"
    assert struct.unpack("<II", stand.ask(WRITE, 10, write_in(1, 0, b"abc", size=1000))) == (3, 0)
    assert Attr.parse(stand.ask(GETATTR, 10, GETATTR_IN)[16:]).size == len(data) + 3
    assert stand.loop.release(10) == 0
    stand.send(READ, 10, read_in(1, 0, 5))
    assert stand.relayed().opcode == READ, "nobody has it open here"
    stand.tier.abort(extent)


def test_a_sealed_object_takes_no_bytes(stand: Stand) -> None:
    stand.sealed(10, b"x")
    handle = struct.unpack_from("<Q", stand.ask(OPEN, 10, open_in()))[0]
    with pytest.raises(OSError, match="Bad file descriptor"):
        stand.ask(WRITE, 10, write_in(handle, 0, b"y"))
    with pytest.raises(OSError, match="Bad file descriptor"):
        stand.ask(FALLOCATE, 10, fallocate_in(0, 10))
    stand.ask(RELEASE, 10, release_in(handle))


def test_fallocate_and_lseek_of_a_draft(stand: Stand) -> None:
    extent = stand.draft(10)
    assert stand.ask(FALLOCATE, 10, fallocate_in(0, 8192)) == b""
    assert Attr.parse(stand.ask(GETATTR, 10, GETATTR_IN)[16:]).size == 8192
    stand.fill(extent, bytes(8192))
    assert struct.unpack("<Q", stand.ask(LSEEK, 10, lseek_in(0, os.SEEK_HOLE))) == (8192,)
    with pytest.raises(OSError, match="No such device or address"):
        stand.ask(LSEEK, 10, lseek_in(8192, os.SEEK_DATA))
    with pytest.raises(OSError, match="File too large"):
        stand.ask(FALLOCATE, 10, fallocate_in(1, stand.tier.largest_object_bytes))
    assert Attr.parse(stand.ask(GETATTR, 10, GETATTR_IN)[16:]).size == 8192
    with pytest.raises(OSError, match="not supported"):
        stand.ask(FALLOCATE, ROOT, fallocate_in(0, 10))
    with pytest.raises(OSError, match="Invalid"):
        stand.ask(LSEEK, ROOT, lseek_in(0, os.SEEK_DATA))
    stand.tier.abort(extent)
    with pytest.raises(OSError, match="Stale"):
        stand.ask(FALLOCATE, 10, fallocate_in(0, 10))


def test_lseek_of_what_has_no_slot(stand: Stand) -> None:
    """All of it is data."""
    stand.loop.node_offloaded(
        10, 77, size_bytes=5000, mode=stat.S_IFREG | 0o600, uid=5, gid=6, mtime_ns=0, ctime_ns=0
    )
    assert struct.unpack("<Q", stand.ask(LSEEK, 10, lseek_in(4999, os.SEEK_DATA))) == (4999,)
    assert struct.unpack("<Q", stand.ask(LSEEK, 10, lseek_in(7, os.SEEK_HOLE))) == (5000,)
    with pytest.raises(OSError, match="No such device or address"):
        stand.ask(LSEEK, 10, lseek_in(5000, os.SEEK_DATA))


def test_flush_of_a_draft(stand: Stand) -> None:
    extent = stand.draft(10)
    assert not stand.loop.flushed(10)
    assert stand.ask(FLUSH, 10, FLUSH_IN, pid=os.getpid()) == b""
    assert stand.loop.flushed(10)
    assert not stand.loop.killed(10)
    descriptor = stand.tier.open_draft(extent)
    os.ftruncate(descriptor, stand.tier.largest_object_bytes + 1)
    os.close(descriptor)
    with pytest.raises(OSError, match="File too large"):
        stand.ask(FLUSH, 10, FLUSH_IN, pid=os.getpid())
    stand.tier.abort(extent)


def test_flush_of_a_killed_writer_is_remembered(stand: Stand) -> None:
    """A zombie's status says how it ended, as that of a process in the middle of its exit does."""
    extent = stand.draft(10)
    with subprocess.Popen(["sleep", "60"]) as writer:
        writer.kill()
        os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)
        stand.ask(FLUSH, 10, FLUSH_IN, pid=writer.pid)
        assert stand.loop.killed(10)
    stand.ask(FLUSH, 10, FLUSH_IN, pid=os.getpid())
    assert not stand.loop.killed(10)
    stand.tier.abort(extent)


def test_flush_of_a_directory_is_relayed(stand: Stand) -> None:
    unique = stand.send(FLUSH, ROOT, FLUSH_IN)
    assert stand.relayed() == Request(FLUSH, unique, ROOT, FLUSH_IN)


def test_release_of_a_library_handle_is_answered_and_becomes_a_call(stand: Stand) -> None:
    assert stand.ask(RELEASE, 10, release_in(4711)) == b""
    calls = stand.calls(1)
    assert [(call.opcode, call.nodeid, call.other) for call in calls] == [(fuse_loop.RELEASE, 10, 4711)]


def test_extended_attributes_that_nobody_has(stand: Stand) -> None:
    ask = struct.pack("<II", 0, 0)
    for name in (b"security.capability\0", b"system.posix_acl_access\0"):
        with pytest.raises(OSError, match="No data"):
            stand.ask(GETXATTR, 10, ask + name)
    stand.send(GETXATTR, 10, ask + b"user.kvfs.state\0")
    assert stand.relayed().body == ask + b"user.kvfs.state\0"
