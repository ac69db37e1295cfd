"""Slow requests of the native FUSE loop: nobody else waits for them, and each file's own requests stay in order.

What is slow is a file whose reads, writes and allocations wait until the test lets them go. The loop stands between
two sockets, as in `tests.support.fuse_stand`.
"""

from __future__ import annotations

import os
import random
import resource
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvfs._native.fuse import loop as fuse_loop
from tests.support.fuse_stand import (
    FALLOCATE,
    FLUSH,
    FLUSH_IN,
    GETATTR,
    GETATTR_IN,
    LOOKUP,
    OPEN,
    READ,
    RELEASE,
    RENAME,
    ROOT,
    SETATTR,
    STATFS,
    WRITE,
    Stand,
    fallocate_in,
    known_directory,
    make_stand,
    open_in,
    read_in,
    release_in,
    write_in,
)
from tests.support.held_files import HeldFiles, held_files
from tests.support.waits import WAIT_S
from tiers.dram.tier import DramTier

THREADS = 4


@dataclass
class Slow(Stand):
    """A stand with files that answer when they are let go."""

    def __init__(self, stand: Stand, files: HeldFiles, stack: ExitStack) -> None:
        super().__init__(**vars(stand))
        self.files = files
        self.stack = stack

    def slow(self, nodeid: int, *, name: bytes = b"") -> None:
        """A file being written, whose bytes are slow."""
        extent = self.draft(nodeid, name=name)
        self.lent.append(extent)
        descriptor = os.open(self.files.path(nodeid), os.O_RDWR)
        self.loop.acquire(nodeid, descriptor)
        os.close(descriptor)
        slot = Path(self.tier.directory) / f"{extent.slot:08x}"
        aside = slot.with_name(f"aside-{extent.slot}")
        slot.rename(aside)
        slot.symlink_to(self.files.path(nodeid))
        self.stack.callback(aside.rename, slot)

    def check_others(self) -> None:
        """Whoever waits for nothing is answered: natively, as a call, and through the library."""
        self.ask(GETATTR, ROOT, GETATTR_IN)
        looked = self.send(LOOKUP, ROOT, b"nothing\0")
        [call] = self.calls(1)
        assert call.unique == looked
        asked = self.send(STATFS, ROOT)
        assert self.relayed().unique == asked
        assert not self.readable(self.kernel)


@pytest.fixture
def stand(tier: DramTier, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Slow]:
    slots = os.open(tier.directory, os.O_RDONLY | os.O_DIRECTORY)
    with ExitStack() as stack:
        made = make_stand(tier, slots, THREADS, passthrough=getattr(request, "param", False))
        files = stack.enter_context(held_files(tmp_path))
        slow = Slow(made, files, stack)
        yield slow
        files.let_go()
        made.loop.stop()
        made.kernel.close()
        made.library.close()
    for extent in slow.lent:
        tier.abort(extent)
    os.close(slots)
    os.close(made.device)


BODIES = {
    READ: read_in(1, 0, 100),
    WRITE: write_in(1, 0, b"x" * 100),
    FALLOCATE: fallocate_in(0, 100),
}


@pytest.mark.mount
@pytest.mark.parametrize("stand", [False, True], ids=["native", "passthrough-refused"], indirect=True)
@pytest.mark.parametrize("opcode", BODIES, ids=["read", "write", "fallocate"])
def test_slow_requests_stop_nobody_else(stand: Slow, opcode: int) -> None:
    """As many at once as there are threads but one, also where passthrough was asked for and is not to be had."""
    uniques = set()
    for count in range(1, THREADS):
        stand.slow(10 + count)
        uniques.add(stand.send(opcode, 10 + count, BODIES[opcode]))
        stand.files.held(count)
        stand.check_others()
    stand.files.let_go()
    assert {stand.reply()[:2] for _ in uniques} == {(unique, 0) for unique in uniques}


@pytest.mark.mount
def test_more_slow_requests_than_threads_are_all_answered(stand: Slow) -> None:
    uniques = set()
    for number in range(2 * THREADS):
        stand.slow(10 + number)
        uniques.add(stand.send(WRITE, 10 + number, BODIES[WRITE]))
    stand.files.held(THREADS)
    stand.files.let_go()
    assert {stand.reply()[:2] for _ in uniques} == {(unique, 0) for unique in uniques}
    stand.check_others()


@pytest.mark.mount
@pytest.mark.parametrize("first", [WRITE, FALLOCATE], ids=["write", "fallocate"])
def test_requests_of_one_file_keep_their_order(stand: Slow, first: int) -> None:
    stand.slow(10)
    stand.slow(11)
    asked = [stand.send(first, 10, BODIES[first])]
    stand.files.held(1)
    asked.append(stand.send(FLUSH, 10, FLUSH_IN))
    stand.check_others()
    asked.append(stand.send(RELEASE, 10, release_in(4711)))
    stand.check_others()
    other = stand.send(FLUSH, 11, FLUSH_IN)
    assert stand.reply()[:2] == (other, 0)
    stand.files.let_go()
    assert {stand.reply()[:2] for _ in asked} == {(unique, 0) for unique in asked}
    [call] = stand.calls(1)
    assert (call.opcode, call.other) == (fuse_loop.RELEASE, 4711)


@pytest.mark.mount
def test_truncation_follows_the_writes_before_it(stand: Slow) -> None:
    stand.slow(10)
    writing = stand.send(WRITE, 10, BODIES[WRITE])
    stand.files.held(1)
    truncating = stand.send(SETATTR, 10, bytes(88))
    stand.check_others()
    stand.files.let_go()
    assert stand.reply()[:2] == (writing, 0)
    assert stand.relayed().unique == truncating


@pytest.mark.mount
def test_a_rename_follows_the_writes_before_it(stand: Slow) -> None:
    known_directory(stand, 20)
    stand.slow(10)
    stand.loop.link(20, b"old", 10)
    writing = stand.send(WRITE, 10, BODIES[WRITE])
    stand.files.held(1)
    renaming = stand.send(RENAME, 20, struct.pack("<Q", 20) + b"old\0new\0")
    stand.check_others()
    stand.files.let_go()
    # The write has ended before the rename begins; which of the two threads answers first is not promised.
    assert {stand.reply()[:2] for _ in range(2)} == {(writing, 0), (renaming, 0)}
    [call] = stand.calls(1)
    assert (call.opcode, call.new_name) == (fuse_loop.RENAMED, b"new")


def test_overlapping_writes_end_as_they_were_sent(stand: Slow) -> None:
    """Without a wait for any answer: the last one to a place is what stays."""
    order = random.Random(25)
    files = {nodeid: stand.draft(nodeid) for nodeid in range(10, 14)}
    wanted = {nodeid: bytearray(5000) for nodeid in files}
    for nodeid, extent in files.items():
        stand.acquire(nodeid, extent)
        stand.ask(WRITE, nodeid, write_in(1, 0, bytes(5000)))
    stand.lent += files.values()
    for _ in range(100):
        batch = []
        for _ in range(8):
            nodeid, at, value = order.choice(list(files)), order.randrange(1000), order.randrange(256)
            wanted[nodeid][at : at + 4000] = bytes([value]) * 4000
            batch.append(stand.send(WRITE, nodeid, write_in(1, at, bytes([value]) * 4000)))
        assert {stand.reply()[0] for _ in batch} == set(batch)
    for nodeid, expected in wanted.items():
        assert stand.ask(READ, nodeid, read_in(1, 0, 8000)) == expected


# --- ends ---------------------------------------------------------------------------------------------------


def test_an_unmount_is_no_failure(stand: Slow) -> None:
    stand.kernel.close()
    assert stand.readable(stand.loop.ended_fd, WAIT_S)
    assert stand.loop.failure is None


def test_the_end_of_the_library_ends_the_mount(stand: Slow) -> None:
    """Its requests would wait for ever; what needs no library is answered until then."""
    stand.library.shutdown(socket.SHUT_RDWR)
    assert stand.readable(stand.loop.ended_fd, WAIT_S)
    assert "library" in str(stand.loop.failure)
    stand.sealed(10, b"x")
    stand.ask(OPEN, 10, open_in())


def test_a_reply_that_the_device_refuses_ends_the_mount(stand: Slow) -> None:
    stand.kernel.shutdown(socket.SHUT_RD)
    stand.send(GETATTR, ROOT, GETATTR_IN)
    assert stand.readable(stand.loop.ended_fd, WAIT_S)
    assert "Broken pipe" in str(stand.loop.failure)


def test_a_device_that_fails_ends_the_mount(stand: Slow) -> None:
    stand.send(GETATTR, ROOT, GETATTR_IN)
    assert stand.readable(stand.kernel, WAIT_S)
    stand.kernel.close()  # with the reply unread: a connection that is reset
    assert stand.readable(stand.loop.ended_fd, WAIT_S)
    assert "reset" in str(stand.loop.failure)


def test_a_loop_without_memory_does_not_start(tier: DramTier) -> None:
    slots = os.open(tier.directory, os.O_RDONLY | os.O_DIRECTORY)
    kernel, device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    loop = fuse_loop.FuseLoop(
        device.fileno(),
        slots,
        tier.table,
        passthrough=False,
        threads=2,
        buffer_size=512 << 20,
        largest_object=1,
        attr_valid_s=1,
        unresolved_names=1,
    )
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (128 << 20), before[1]))
    try:
        with pytest.raises(OSError, match="Cannot allocate memory"):
            loop.start()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        loop.stop()
        for each in (kernel, device):
            each.close()
        os.close(slots)


# --- names --------------------------------------------------------------------------------------------------

NAMES = 300_000
MOST_MOVED = 64
"""Names moved at once as the table grows: those of one place, 20 and less."""


def test_the_table_of_names_grows_in_small_steps(stand: Slow) -> None:
    stand.sealed(10, b"x")
    stand.loop.node_directory(20, 20, mode=stat.S_IFDIR | 0o755, uid=0, gid=0, mtime_ns=5)
    for number in range(NAMES):
        stand.loop.link(20, b"%d" % number, 10)
    assert 0 < stand.loop.stats()["most_names_moved"] <= MOST_MOVED
    for number in range(0, NAMES, 997):
        assert stand.ask(LOOKUP, 20, b"%d\0" % number)[:8] == struct.pack("<Q", 10)
    for number in range(0, NAMES, 2):
        stand.loop.unlink(20, b"%d" % number, 10)
    for number in range(1, NAMES, 2 * 991):
        assert stand.ask(LOOKUP, 20, b"%d\0" % number)[:8] == struct.pack("<Q", 10)
    stand.send(LOOKUP, 20, b"0\0")
    assert [call.name for call in stand.calls(1)] == [b"0"]
