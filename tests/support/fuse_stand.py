"""A stand for the native FUSE loop on its own: raw requests in, raw replies out, no mount and no pyfuse3.

A SOCK_SEQPACKET socket pair stands in for /dev/fuse: the loop reads one request a message and writes one
reply a message, as it does there. What it cannot stand in for is the kernel's backing ioctls, so passthrough
is off here and backings are descriptors. Table and slot files are a real DRAM tier's.
"""

from __future__ import annotations

import errno
import itertools
import os
import select
import shutil
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvfs._native.fuse.loop import Call, FuseLoop
from kvfs.errors import KvfsError
from tests.support.waits import WAIT_S
from tiers.dram.tier import DramTier
from tiers.model.tier import Extent, SealHeader, object_key

MIB = 1 << 20
"""No answer takes this long; waiting for longer is a failure."""
CALLS_CAPACITY = 1024
"""FL_CALLS of the native loop."""
SPARES = 256
"""FL_SPARES of the native loop."""
NOREPLACE, EXCHANGE = 1, 2
TICK_NS = 20_000_000
"""The kernel's clock for file times lags behind by a tick, 10 ms at most."""
VALID_S = 7
UNRESOLVED_NAMES = 100
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
        unresolved_names=UNRESOLVED_NAMES,
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
    assert settled_descriptors(tier) - before == set()  # garbage of earlier tests may go meanwhile


def open_descriptors() -> set[str]:
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


def settled_descriptors(tier: DramTier) -> set[str]:
    """With the tier's own ones gone: for checksums, and for slots that were held."""
    tier.checksums.wait(WAIT_S)
    tier.sweep()
    return open_descriptors()


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
