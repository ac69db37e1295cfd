"""The native FUSE loop on its own: raw requests in, raw replies out, no mount and no pyfuse3.

A SOCK_SEQPACKET socket pair stands in for /dev/fuse: the loop reads one request a message and writes one
reply a message, as it does there. What it cannot stand in for is the kernel's backing ioctls, so passthrough
is off here and backings are descriptors. Table and slot files are a real DRAM tier's.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import select
import shutil
import socket
import stat
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs._native import fuse_loop
from kvfs._native.fuse_loop import Call, FuseLoop
from kvfs.errors import KvfsError
from tiers.base import Extent, SealHeader, object_key
from tiers.dram import DramTier

MIB = 1 << 20
WAIT_S = 10.0
"""No answer takes this long; waiting for longer is a failure."""
CALLS_CAPACITY = 1024
"""FL_CALLS of the native loop."""
SPARES = 64
"""FL_SPARES of the native loop."""
NOREPLACE, EXCHANGE = 1, 2
TICK_NS = 20_000_000
"""The kernel's clock for file times lags behind by a tick, 10 ms at most."""
VALID_S = 7
DOUBTS = 100
"""Names without a node that the loop keeps, at most."""
ROOT = 1
BUFFER_BYTES = 128 * 1024

# Opcodes, include/uapi/linux/fuse.h.
LOOKUP, FORGET, GETATTR, SETATTR, MKDIR, UNLINK, RENAME, OPEN = 1, 2, 3, 4, 9, 10, 12, 14
READ, WRITE, STATFS, RELEASE, GETXATTR, FLUSH, INIT = 15, 16, 17, 18, 22, 25, 26
CREATE, INTERRUPT, BATCH_FORGET, FALLOCATE, READDIRPLUS, RENAME2, LSEEK = 35, 36, 42, 43, 44, 45, 46
EVERY_OPCODE = range(1, 53)

ATTR = struct.Struct("<6Q10I")
"""ino size blocks atime mtime ctime | atimensec mtimensec ctimensec mode nlink uid gid rdev blksize flags"""
ENTRY = struct.Struct("<4Q2I")
IN_HEADER = struct.Struct("<IIQQIIIHH")
OUT_HEADER = struct.Struct("<IiQ")
KEEP_CACHE, NOFLUSH = 1 << 1, 1 << 5
EXTENDED, KILLPRIV_V2, ALLOW_MMAP, PASSTHROUGH = 1 << 30, 1 << 28, 1 << 4, 1 << 5


@dataclass(frozen=True)
class Attr:
    """struct fuse_attr, what is looked at here."""

    ino: int
    size: int
    mtime_ns: int
    mode: int
    uid: int

    @classmethod
    def parse(cls, raw: bytes) -> Attr:
        values = ATTR.unpack(raw[: ATTR.size])
        return cls(values[0], values[1], values[4] * 10**9 + values[7], values[9], values[11])


@dataclass(frozen=True)
class Request:
    """What reached the FUSE library."""

    opcode: int
    unique: int
    nodeid: int
    body: bytes


@dataclass
class Stand:
    """A running loop between two sockets: the kernel's place and the library's."""

    tier: DramTier
    loop: FuseLoop
    kernel: socket.socket
    library: socket.socket
    device: int
    uniques: Iterator[int] = field(default_factory=lambda: itertools.count(2, 2))
    objects: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    lent: list[Extent] = field(default_factory=list)
    """Drafts that are given back at the end."""

    # --- the kernel's side --------------------------------------------------------------------------------

    def send(self, opcode: int, nodeid: int, body: bytes = b"", *, pid: int = 0, uid: int = 0) -> int:
        """One request; its `unique`."""
        unique = next(self.uniques)
        size = IN_HEADER.size + len(body)
        self.kernel.sendall(IN_HEADER.pack(size, opcode, unique, nodeid, uid, 0, pid, 0, 0) + body)
        return unique

    def reply(self) -> tuple[int, int, bytes]:
        """(unique, error, body) of the next reply or notification."""
        raw = self.kernel.recv(2 * MIB)
        size, error, unique = OUT_HEADER.unpack_from(raw)
        assert size == len(raw)
        return unique, error, raw[OUT_HEADER.size :]

    def ask(self, opcode: int, nodeid: int, body: bytes = b"", *, pid: int = 0, uid: int = 0) -> bytes:
        """One request answered natively. Raises OSError with the errno of the reply."""
        unique = self.send(opcode, nodeid, body, pid=pid, uid=uid)
        answered, error, reply = self.reply()
        assert answered == unique
        if error:
            raise OSError(-error, os.strerror(-error))
        return reply

    def nothing_else(self) -> None:
        """No reply is outstanding, and everything sent so far has been read: one more request shows it."""
        with pytest.raises(OSError, match="No data"):
            self.ask(GETXATTR, ROOT, struct.pack("<II", 0, 0) + b"security.capability\0")
        assert not self.readable(self.library)
        assert not self.readable(self.kernel)

    @staticmethod
    def readable(what: socket.socket | int, timeout_s: float = 0.0) -> bool:
        return bool(select.select([what], [], [], timeout_s)[0])

    # --- the library's side -------------------------------------------------------------------------------

    def relayed(self) -> Request:
        raw = self.library.recv(2 * MIB)
        size, opcode, unique, nodeid, *_ = IN_HEADER.unpack_from(raw)
        assert size == len(raw)
        return Request(opcode, unique, nodeid, raw[IN_HEADER.size :])

    def answer(self, unique: int, body: bytes = b"", *, error: int = 0) -> None:
        """The library's reply."""
        self.library.sendall(OUT_HEADER.pack(OUT_HEADER.size + len(body), -error, unique) + body)

    # --- the service's side -------------------------------------------------------------------------------

    def calls(self, count: int) -> list[Call]:
        """The next `count` calls."""
        found: list[Call] = []
        while len(found) < count:
            assert self.readable(self.loop.calls_fd, WAIT_S), f"{len(found)} calls instead of {count}"
            found += self.loop.take_calls()
        assert len(found) == count
        return found

    def draft(self, nodeid: int, *, name: bytes = b"", ino: int = 77) -> Extent:
        """A draft of the tier behind a node."""
        extent = self.tier.reserve()
        self.loop.node_draft(
            nodeid, ino, extent.slot, extent.generation, mode=stat.S_IFREG | 0o600, uid=5, gid=6
        )
        if name:
            self.loop.link(ROOT, name, nodeid)
        return extent

    def spare(self, nodeid: int, *, fh: int) -> Extent:
        """A draft of the tier for a CREATE to come."""
        extent = self.draft(nodeid)
        descriptor = self.tier.open_draft(extent)
        try:
            self.loop.spare_add(nodeid, fh, descriptor)
        except KvfsError:
            self.lent.append(extent)
            raise
        finally:
            os.close(descriptor)
        return extent

    def fill(self, extent: Extent, data: bytes) -> None:
        descriptor = self.tier.open_draft(extent)
        os.write(descriptor, data)
        os.close(descriptor)

    def sealed(self, nodeid: int, data: bytes, *, name: bytes = b"", ino: int = 88) -> Extent:
        """A sealed object of the tier behind a node."""
        draft = self.tier.reserve()
        self.fill(draft, data)
        number = next(self.objects)
        extent = self.tier.seal(draft, SealHeader(object_key(number), number, number)).extent
        self.loop.node_sealed(
            nodeid,
            ino,
            extent.slot,
            extent.generation,
            size_bytes=len(data),
            mode=stat.S_IFREG | 0o644,
            uid=5,
            gid=6,
            mtime_ns=1_500_000_001,
            ctime_ns=2_000_000_002,
        )
        if name:
            self.loop.link(ROOT, name, nodeid)
        return extent

    def acquire(self, nodeid: int, extent: Extent) -> int:
        """An open handle on a draft, as Python's CREATE makes it."""
        descriptor = self.tier.open_draft(extent)
        try:
            return self.loop.acquire(nodeid, descriptor)
        finally:
            os.close(descriptor)


def make_stand(tier: DramTier, slots: int, threads: int = 1, *, passthrough: bool = False) -> Stand:
    kernel, device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kernel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MIB)
    device.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MIB)
    device.setblocking(False)
    descriptor = device.detach()
    loop = FuseLoop(
        descriptor,
        slots,
        tier.table,
        passthrough=passthrough,
        threads=threads,
        buffer_size=BUFFER_BYTES,
        largest_object=tier.largest_object_bytes,
        attr_valid_s=VALID_S,
        doubts=DOUBTS,
    )
    library = socket.socket(fileno=os.dup(loop.library_fd))
    kernel.settimeout(WAIT_S)
    library.settimeout(WAIT_S)
    loop.node_directory(ROOT, ROOT, mode=stat.S_IFDIR | 0o755, uid=0, gid=0, mtime_ns=3_000_000_003)
    loop.start()
    return Stand(tier, loop, kernel, library, descriptor)


@pytest.fixture(scope="module")
def tier() -> Iterator[DramTier]:
    base = Path(tempfile.mkdtemp(prefix="kvfs-loop-"))
    made = DramTier.open(base / "dram", 16 * MIB, store_id=bytes(16), max_slots=512, mode="directory")
    yield made
    made.close()
    shutil.rmtree(base)


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"])
def stand(tier: DramTier, request: pytest.FixtureRequest) -> Iterator[Stand]:
    before = settled_descriptors(tier)
    slots = os.open(tier.directory, os.O_RDONLY | os.O_DIRECTORY)
    made = make_stand(tier, slots, request.param)
    yield made
    for extent in made.lent:
        tier.abort(extent)
    began = time.monotonic()
    made.loop.stop()
    assert time.monotonic() - began < WAIT_S
    made.kernel.close()
    made.library.close()
    os.close(slots)
    os.close(made.device)
    del made.loop
    assert settled_descriptors(tier) == before


def open_descriptors() -> set[str]:
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


def settled_descriptors(tier: DramTier) -> set[str]:
    """With the tier's own ones gone: for checksums, and for slots that were held."""
    tier.wait_checksums(WAIT_S)
    tier.sweep()
    return open_descriptors()


def open_in(flags: int = os.O_RDONLY) -> bytes:
    return struct.pack("<II", flags, 0)


def release_in(handle: int) -> bytes:
    return struct.pack("<QIIQ", handle, 0, 0, 0)


def read_in(handle: int, offset: int, size: int) -> bytes:
    return struct.pack("<QQIIQII", handle, offset, size, 0, 0, 0, 0)


def write_in(handle: int, offset: int, data: bytes, size: int | None = None) -> bytes:
    return struct.pack("<QQIIQII", handle, offset, len(data) if size is None else size, 0, 0, 0, 0) + data


def fallocate_in(offset: int, length: int, mode: int = 0) -> bytes:
    return struct.pack("<QQQII", 0, offset, length, mode, 0)


def lseek_in(offset: int, whence: int) -> bytes:
    return struct.pack("<QQII", 0, offset, whence, 0)


def entry_out(nodeid: int, ino: int) -> bytes:
    return ENTRY.pack(nodeid, 0, 1, 1, 0, 0) + ATTR.pack(ino, *([0] * 15))


def attr_of_entry(reply: bytes) -> Attr:
    return Attr.parse(reply[ENTRY.size :])


FLUSH_IN = struct.pack("<QIIQ", 1, 0, 0, 0)
GETATTR_IN = struct.pack("<IIQ", 0, 0, 0)


# --- INIT ---------------------------------------------------------------------------------------------------


def init_reply(stand: Stand, offered: int, offered2: int, flags: int, flags2: int) -> tuple[int, int, int]:
    """(flags, flags2, max_stack_depth) that the kernel sees after the library answered with these flags."""
    unique = stand.send(INIT, 0, struct.pack("<5I", 7, 45, 0, offered, offered2) + bytes(44))
    request = stand.relayed()
    assert (request.opcode, request.unique) == (INIT, unique)
    stand.answer(
        unique, struct.pack("<4IHHIIHHII", 7, 38, 0, flags, 12, 9, MIB, 1, 256, 0, flags2, 0) + bytes(24)
    )
    answered, error, body = stand.reply()
    assert (answered, error) == (unique, 0)
    found_flags, found_flags2, depth = (
        *struct.unpack_from("<I", body, 12),
        *struct.unpack_from("<II", body, 32),
    )
    return found_flags, found_flags2, depth


def test_init_gets_what_the_library_does_not_know(stand: Stand) -> None:
    offered = EXTENDED | KILLPRIV_V2 | 1
    flags, flags2, depth = init_reply(stand, offered, ALLOW_MMAP | PASSTHROUGH, 1, 0xFF00)
    assert flags == EXTENDED | KILLPRIV_V2 | 1
    assert flags2 == ALLOW_MMAP  # the library set no EXTENDED: its flags2 is not to be read
    assert depth == 0


def test_init_asks_for_nothing_that_the_kernel_did_not_offer(stand: Stand) -> None:
    flags, flags2, _ = init_reply(stand, 1, ALLOW_MMAP, EXTENDED | 1, 1 << 7)
    assert flags == EXTENDED | 1
    assert flags2 == 1 << 7


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


def outcome(stand: Stand, parent: int, name: bytes) -> int | None:
    """What LOOKUP of a name comes to: the nodeid, 0 where it does not exist, None for a call."""
    unique = stand.send(LOOKUP, parent, name + b"\0")
    either: list[socket.socket | int] = [stand.kernel, stand.loop.calls_fd]
    while not stand.readable(stand.kernel):
        if stand.readable(stand.loop.calls_fd):
            [call] = stand.calls(1)
            assert (call.unique, call.name) == (unique, name)
            return None
        select.select(either, [], [], WAIT_S)
    answered, error, body = stand.reply()
    assert (answered, error in (0, -errno.ENOENT)) == (unique, True)
    return 0 if error else int(ENTRY.unpack_from(body)[0])


def known_directory(stand: Stand, nodeid: int, names: bytes = b"", room: int = 255) -> None:
    stand.loop.node_directory(nodeid, nodeid, mode=stat.S_IFDIR | 0o755, uid=0, gid=0, mtime_ns=5)
    stand.loop.know_names(nodeid, room, names)


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
    stand.loop.doubt(20, b"mine", 11)
    assert outcome(stand, 20, b"mine") == 10
    stand.loop.undoubt(20, b"mine")
    assert outcome(stand, 20, b"mine") == 10
    stand.loop.doubt(20, b"mine", 10)
    assert outcome(stand, 20, b"mine") is None
    stand.loop.undoubt(20, b"mine")
    stand.loop.undoubt(20, b"other")
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


def test_too_many_doubts_make_a_directory_unknown(stand: Stand) -> None:
    known_directory(stand, 20)
    known_directory(stand, 21)
    for number in range(DOUBTS):
        stand.loop.doubt(20, b"%d" % number, 0)
        stand.loop.doubt(20, b"%d" % number, 0)
    assert [outcome(stand, 20, name) for name in (b"none", b"7")] == [0, None]
    stand.loop.doubt(21, b"one more", 0)
    assert [outcome(stand, 21, b"none"), outcome(stand, 20, b"none")] == [None, 0]
    assert stand.loop.node_drop(20) == 0  # and with it its doubts
    known_directory(stand, 21)
    for number in range(DOUBTS):
        stand.loop.doubt(21, b"%d" % number, 0)
    assert [outcome(stand, 21, name) for name in (b"none", b"7")] == [0, None]
    stand.nothing_else()


NAMED = [b"a", b"b", b"c"]
STEPS = st.tuples(
    st.sampled_from(["link", "unlink", "doubt", "undoubt", "know", "unknow", "move", "dead"]),
    st.sampled_from(NAMED),
    st.sampled_from(NAMED),
    st.sampled_from([10, 11]),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(steps=st.lists(STEPS, max_size=12))
def test_lookups_follow_a_model_of_the_names(
    stand: Stand, steps: list[tuple[str, bytes, bytes, int]]
) -> None:
    """The model: a dictionary from name to nodeid, 0 for a doubt, and whether all names are known."""
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
            case "doubt":
                stand.loop.doubt(directory, name, nodeid)
                if held == nodeid:
                    del edges[name]
                if known and name not in edges:
                    edges[name] = 0
            case "undoubt":
                stand.loop.undoubt(directory, name)
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
    ["no spare", "unknown", "taken", "doubtful", "not ASCII", "too long", "reader", "quota", "no file"],
)
def test_what_is_not_plainly_free_to_create_is_a_call(stand: Stand, case: str) -> None:
    known_directory(stand, 20, b"doubtful", room=10)
    extent = stand.spare(30, fh=4711)
    stand.loop.link(20, b"taken", 10)
    name = {"taken": b"taken", "doubtful": b"doubtful", "not ASCII": "ü".encode(), "too long": b"n" * 11}
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
    known_directory(stand, 21, b"doubtful")
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
        (20, rename_in(21, b"again", b"doubtful")),
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
    stand.loop.doubt(20, b"tmp", 10)
    stand.loop.doubt(20, b"tmp", 0)  # as when another door seals an object of this name
    stand.loop.undoubt(20, b"tmp")
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
    assert not stand.tier.held(extent)
    stand.ask(RELEASE, 10, release_in(again))  # once too often
    assert stand.loop.opens(10) == 0
    stand.nothing_else()


def test_open_of_a_superseded_object_is_stale(stand: Stand) -> None:
    extent = stand.sealed(10, b"old")
    handle = struct.unpack_from("<Q", stand.ask(OPEN, 10, open_in()))[0]
    stand.tier.free(extent)
    with pytest.raises(OSError, match="Stale"):
        stand.ask(OPEN, 10, open_in())
    assert stand.ask(READ, 10, read_in(handle, 0, 9)) == b"old", "who has it open keeps its bytes"
    stand.ask(RELEASE, 10, release_in(handle))
    with pytest.raises(OSError, match="Stale"):
        stand.ask(OPEN, 10, open_in())
    stand.sealed(11, b"")
    stand.loop.node_dead(11)
    with pytest.raises(OSError, match="Stale"):
        stand.ask(OPEN, 11, open_in())
    assert stand.loop.drain_opens() == [(10, 0, 0)]
    assert [stand.loop.opens(10), stand.loop.opens(11)] == [0, 0]


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
    assert open_descriptors() == before


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
    stand.loop.node_away(
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


# --- what is relayed ----------------------------------------------------------------------------------------


def test_replies_get_stable_inode_numbers(stand: Stand) -> None:
    stand.sealed(10, b"", ino=1234)
    unique = stand.send(MKDIR, ROOT, struct.pack("<II", 0o755, 0) + b"d\0")
    assert stand.relayed().unique == unique
    stand.answer(unique, entry_out(10, ino=10))
    assert attr_of_entry(stand.reply()[2]).ino == 1234
    stand.loop.relay_opens(True)
    unique = stand.send(SETATTR, 10, bytes(88))
    stand.relayed()
    stand.answer(unique, struct.pack("<QII", 1, 0, 0) + ATTR.pack(10, *([0] * 15)))
    assert Attr.parse(stand.reply()[2][16:]).ino == 1234
    unique = stand.send(GETATTR, 99, GETATTR_IN)
    stand.relayed()
    stand.answer(unique, struct.pack("<QII", 1, 0, 0) + ATTR.pack(99, *([0] * 15)))
    assert Attr.parse(stand.reply()[2][16:]).ino == 99, "a node that is not known keeps what the library said"


def test_relayed_lookups_get_stable_inode_numbers(stand: Stand) -> None:
    stand.sealed(10, b"", ino=1234)
    for _ in range(CALLS_CAPACITY):
        stand.send(LOOKUP, ROOT, b"n\0")
    unique = stand.send(LOOKUP, ROOT, b"over\0")
    assert stand.relayed().unique == unique
    stand.answer(unique, entry_out(10, ino=10))
    assert attr_of_entry(stand.reply()[2]).ino == 1234


def dirent_plus(nodeid: int, name: bytes, offset: int) -> bytes:
    entry = entry_out(nodeid, nodeid) + struct.pack("<QQII", nodeid, offset, len(name), 8) + name
    return entry + bytes(-len(entry) % 8)


def test_listings_get_stable_inode_numbers(stand: Stand) -> None:
    stand.sealed(10, b"", ino=1234)
    stand.sealed(11, b"", ino=1235)
    unique = stand.send(READDIRPLUS, ROOT, read_in(1, 0, 4096))
    stand.relayed()
    names = [(0, b"."), (10, b"a"), (12, b"a longer name"), (11, b"12345678")]
    page = b"".join(dirent_plus(nodeid, name, i) for i, (nodeid, name) in enumerate(names))
    stand.answer(unique, page)
    _, error, body = stand.reply()
    assert error == 0
    assert len(body) == len(page)
    at, found = 0, []
    for _, name in names:
        found.append((attr_of_entry(body[at:]).ino, struct.unpack_from("<Q", body, at + 128)[0]))
        at += len(dirent_plus(0, name, 0))
    assert found == [(0, 0), (1234, 1234), (12, 12), (1235, 1235)]


def test_a_listing_cut_short_does_no_harm(stand: Stand) -> None:
    page = dirent_plus(10, b"a", 1)
    for cut in (page[:-1], page[:144] + struct.pack("<II", 1 << 31, 8) + page[152:], page[:100]):
        unique = stand.send(READDIRPLUS, ROOT, read_in(1, 0, 4096))
        stand.relayed()
        stand.answer(unique, cut)
        assert stand.reply() == (unique, 0, cut)


def test_errors_and_notifications_of_the_library_pass_unchanged(stand: Stand) -> None:
    unique = stand.send(MKDIR, ROOT, struct.pack("<II", 0o755, 0) + b"d\0")
    stand.relayed()
    stand.answer(unique, error=errno.EEXIST)
    assert stand.reply() == (unique, -errno.EEXIST, b"")
    stand.answer(0, b"notification", error=-3)
    assert stand.reply() == (0, 3, b"notification")


def test_many_requests_in_flight_find_their_replies(stand: Stand) -> None:
    """Answered in another order than asked, with uniques that collide in the table of requests in flight."""
    order = random.Random(46)
    stand.uniques = iter(order.sample(range(2, 1 << 60, 2), 5000))
    for nodeid in range(10, 40):
        stand.sealed(nodeid, b"", ino=1000 + nodeid)
    asked: dict[int, int] = {}
    for i in range(4000):
        asked[stand.send(SETATTR, 10 + i % 30, bytes(88))] = 10 + i % 30
        assert stand.relayed().nodeid == 10 + i % 30
    for unique in order.sample(list(asked), len(asked)):
        stand.answer(unique, struct.pack("<QII", 1, 0, 0) + ATTR.pack(7, *([0] * 15)))
        answered, _, body = stand.reply()
        assert (answered, Attr.parse(body[16:]).ino) == (unique, 1000 + asked[unique])


def test_interrupts_are_dropped(stand: Stand) -> None:
    stand.send(INTERRUPT, 0, struct.pack("<Q", 2))
    stand.nothing_else()


def test_requests_fail_when_the_library_is_gone(stand: Stand) -> None:
    stand.library.shutdown(socket.SHUT_RDWR)
    with pytest.raises(OSError, match="Input/output"):
        stand.ask(STATFS, ROOT)
    stand.sealed(10, b"x")
    stand.ask(OPEN, 10, open_in())  # what needs no library goes on


# --- invalidations ------------------------------------------------------------------------------------------


def test_invalidations_are_notifications(stand: Stand) -> None:
    stand.loop.invalidate_entry(12, b"name")
    assert stand.reply() == (0, 3, struct.pack("<QII", 12, 4, 0) + b"name\0")
    stand.loop.invalidate_attr(13)
    assert stand.reply() == (0, 2, struct.pack("<Qqq", 13, -1, 0))
    stand.loop.invalidate_entry(14, b"x" * 255)
    assert stand.reply() == (0, 3, struct.pack("<QII", 14, 255, 0) + b"x" * 255 + b"\0")
    stand.loop.invalidate_entry(15, b"x" * 256)  # no name is as long
    stand.nothing_else()


# --- malformed requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("opcode", EVERY_OPCODE)
def test_short_requests_do_no_harm(stand: Stand, opcode: int) -> None:
    """A header without its body, after a request that left other bytes in the buffer: the loop must not take
    those for it. The kernel sends no such request, so all that counts is that bytes and loop are intact."""
    extent = stand.draft(10, name=b"a")
    stand.acquire(10, extent)
    stand.ask(WRITE, 10, write_in(1, 0, b"right"))
    for size in (0, 3, 8):
        stand.ask(WRITE, 10, write_in(1, 0, b"right", size=1 << 20))
        stand.send(opcode, 10, b"\xff" * size)
        while stand.readable(stand.kernel, 0.01):
            stand.reply()
        while stand.readable(stand.library):
            stand.relayed()
        assert stand.ask(READ, 10, read_in(1, 0, 1 << 20)) == b"right"
    for call in stand.loop.take_calls():
        assert b"right" not in call.name + call.new_name
    stand.loop.release(10)
    stand.tier.abort(extent)


def test_a_request_shorter_than_it_says_does_no_harm(stand: Stand) -> None:
    extent = stand.draft(10)
    stand.acquire(10, extent)
    stand.kernel.sendall(
        IN_HEADER.pack(100_000, WRITE, 1000, 10, 0, 0, 0, 0, 0) + write_in(1, 0, b"abc", size=90_000)
    )
    while stand.readable(stand.kernel, 0.01):
        stand.reply()
    assert len(stand.ask(READ, 10, read_in(1, 0, 1 << 20))) <= 3
    stand.kernel.sendall(b"short")
    stand.nothing_else()
    stand.loop.release(10)
    stand.tier.abort(extent)


@pytest.mark.parametrize(
    ("opcode", "before"), [(LOOKUP, 0), (UNLINK, 0), (RENAME, 8), (RENAME2, 16), (CREATE, 16)]
)
def test_names_without_an_end_end_with_the_request(stand: Stand, opcode: int, before: int) -> None:
    body = bytes(before)
    stand.send(opcode, ROOT, body + b"x" * (BUFFER_BYTES + 4096 - IN_HEADER.size - before))
    assert stand.relayed().opcode == opcode, "too long for a call"
    stand.send(opcode, ROOT, body + b"y" * 40)
    stand.send(opcode, ROOT, body + b"z" * 8)
    assert [(call.name, call.new_name) for call in stand.calls(2)] == [(b"y" * 40, b""), (b"z" * 8, b"")]
    stand.nothing_else()


# --- ends ---------------------------------------------------------------------------------------------------


def test_the_end_of_the_device_is_reported(stand: Stand) -> None:
    assert not stand.readable(stand.loop.ended_fd)
    stand.kernel.close()
    assert stand.readable(stand.loop.ended_fd, WAIT_S)


def test_stop_ends_promptly_with_requests_waiting(stand: Stand) -> None:
    for _ in range(10):
        stand.send(LOOKUP, ROOT, b"n\0")
        stand.send(STATFS, ROOT)
    stand.relayed()
    began = time.monotonic()
    stand.loop.stop()
    stand.loop.stop()
    assert time.monotonic() - began < 1.0


def fill_the_relay(stand: Stand) -> None:
    for _ in range(1000):
        stand.send(STATFS, ROOT, bytes(100_000))


def test_stop_ends_promptly_when_the_library_reads_nothing(stand: Stand) -> None:
    """The relay's socket is full: a thread of the loop waits in the middle of a relay."""
    stand.kernel.settimeout(0.3)
    with pytest.raises(TimeoutError):
        fill_the_relay(stand)
    rescue = threading.Timer(5.0, stand.library.shutdown, (socket.SHUT_RDWR,))  # where it hangs
    rescue.start()
    began = time.monotonic()
    stand.loop.stop()
    took_s = time.monotonic() - began
    rescue.cancel()
    rescue.join()
    assert took_s < 2.0
