"""The native FUSE loop on its own: INIT, what it relays, what it notifies of, malformed requests and its end."""

from __future__ import annotations

import errno
import os
import random
import socket
import struct
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.fuse_stand import (
    ALLOW_MMAP,
    ATTR,
    BUFFER_BYTES,
    CALLS_CAPACITY,
    CREATE,
    EVERY_OPCODE,
    EXTENDED,
    GETATTR,
    GETATTR_IN,
    IN_HEADER,
    INIT,
    INTERRUPT,
    KILLPRIV_V2,
    LOOKUP,
    MIB,
    MKDIR,
    OPEN,
    PASSTHROUGH,
    READ,
    READDIRPLUS,
    RENAME,
    RENAME2,
    ROOT,
    SETATTR,
    STATFS,
    UNLINK,
    WRITE,
    Attr,
    Stand,
    attr_of_entry,
    entry_out,
    open_in,
    read_in,
    write_in,
)
from tests.support.processes import Helper, task_state
from tests.support.processor_waits import within
from tests.support.waits import WAIT_S, eventually

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
        _ask_past_others(stand, WRITE, write_in(1, 0, b"right", size=1 << 20))
        stand.send(opcode, 10, b"\xff" * size)
        assert _ask_past_others(stand, READ, read_in(1, 0, 1 << 20)) == b"right"
        while stand.readable(stand.library):
            stand.relayed()
    for call in stand.loop.take_calls():
        assert b"right" not in call.name + call.new_name
    stand.loop.release(10)
    stand.tier.abort(extent)


def _ask_past_others(stand: Stand, opcode: int, body: bytes) -> bytes:
    """Ask, and pass over what answers earlier requests, which may have an answer or none."""
    unique = stand.send(opcode, 10, body)
    while (reply := stand.reply())[0] != unique:
        pass
    assert reply[1] == 0
    return reply[2]


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
    with within(1.0, os.getpid()):
        stand.loop.stop()
        stand.loop.stop()


def fill_the_relay(stand: Stand) -> None:
    for _ in range(1000):
        stand.send(STATFS, ROOT, bytes(100_000))


def test_stop_ends_promptly_when_the_library_reads_nothing(stand: Stand) -> None:
    """The relay's socket is full: a thread of the loop waits in the middle of a relay."""
    stand.kernel.settimeout(0.3)
    with pytest.raises(TimeoutError):
        fill_the_relay(stand)
    rescue = threading.Timer(30.0, stand.library.shutdown, (socket.SHUT_RDWR,))  # where it hangs
    rescue.start()
    try:
        with within(2.0, os.getpid()):
            stand.loop.stop()
    finally:
        rescue.cancel()
        rescue.join()


def idle_threads() -> list[str]:
    """The states of this process's threads that take only what time is left."""
    threads = [int(name) for name in os.listdir("/proc/self/task")]
    idle = [thread for thread in threads if os.sched_getscheduler(thread) == os.SCHED_IDLE]
    return [task_state(Path(f"/proc/self/task/{thread}")) for thread in idle]


def usual_waits_s() -> float:
    """Return how long this process's other threads were kept waiting for a processor."""
    threads = [int(name) for name in os.listdir("/proc/self/task")]
    usual = [thread for thread in threads if os.sched_getscheduler(thread) != os.SCHED_IDLE]
    return sum(int(Path(f"/proc/self/task/{each}/schedstat").read_text().split()[1]) for each in usual) / 1e9


def stolen_s() -> float:
    """Return how long one of the machine's processors was somebody else's, on average: the pauses of a virtual one,
    which are nobody's wait."""
    steal = Path("/proc/stat").read_text().split(maxsplit=9)[8]
    return int(steal) / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)


def test_a_request_waits_for_no_thread_that_takes_only_what_time_is_left(stand: Stand) -> None:
    """Where others use up the processors, one that is woken with a lock may run again 0.9 s later. 150 bursts waited
    1.2 to 5 s for that, and at most 0.04 s without."""
    stand.sealed(10, b"x")
    with ExitStack() as stack:
        for _ in range(2 * len(os.sched_getaffinity(0))):
            stack.enter_context(Helper("print('works', flush=True)\nwhile True: pass")).expect("works")
        lost_s, stolen_before_s = 0.0, stolen_s()
        for _ in range(200):
            before_s, began_s = usual_waits_s(), time.monotonic()
            for _ in range(3):  # a burst
                stand.ask(GETATTR, 10, GETATTR_IN)
            took_s = time.monotonic() - began_s
            lost_s += took_s - (usual_waits_s() - before_s)
            time.sleep(0.0004)  # Not synchronisation: the burst ends.
        pauses_s = stolen_s() - stolen_before_s
    assert lost_s - pauses_s < 0.5


def test_processors_are_kept_awake_in_a_burst_alone(stand: Stand) -> None:
    processors = len(os.sched_getaffinity(0))
    wanted = processors if 1 < processors <= 4 else 0
    eventually(lambda: idle_threads() == ["S"] * wanted, "nobody spins before the first request")

    stand.sealed(10, b"x")

    def are_awake() -> bool:
        for _ in range(3):
            stand.ask(GETATTR, 10, GETATTR_IN)
        return "R" in idle_threads()

    if wanted:
        eventually(are_awake, "they spin in a burst")
    eventually(lambda: idle_threads() == ["S"] * wanted, "they sleep after it")
