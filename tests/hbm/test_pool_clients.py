"""Clients of a pool in other processes: they share blocks, die in a copy, hang, and what they had is reused in time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvfs import limits
from kvfs.errors import LimitExceeded, NoSpace, Superseded
from tests.conformance.tier_suite import block_header
from tests.support.device_pools import MIB, Clock, Holders, MappedPool, MemorySegments
from tests.support.waits import WAIT_S
from tiers.hbm.clients import PoolClient, Standing, standing
from tiers.hbm.tier import HbmTier
from tiers.model.tier import Extent

SLOT = 256 << 10
CHILD = """
import mmap, socket, sys
from kvfs._native.hbm.hazards import ClientHazards
door = socket.socket(fileno=int(sys.argv[1]))
_, fds, _, _ = socket.recv_fds(door, 1, 3)
leases, segment = ClientHazards(fds[0], fds[1]), mmap.mmap(fds[2], 0)
while order := door.recv(100).split():
    numbers = [int(number) for number in order[1:]]
    if order[0] == b"lease":
        door.send(b"%d" % leases.publish(*numbers))
    elif order[0] == b"read":
        door.send(segment[numbers[0] : numbers[0] + numbers[1]])
    elif order[0] == b"clear":
        leases.clear(numbers[0])
        door.send(b"ok")
    elif order[0] == b"copy":
        segment[numbers[0] : numbers[0] + 4] = b"copy"
        door.send(b"begun")
        while True:
            segment[numbers[0] + 4 : numbers[0] + numbers[1]] = b"x" * (numbers[1] - 4)
"""


class Child:
    """A client in another process, with segment 0 mapped."""

    def __init__(self, tier: HbmTier) -> None:
        self.door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        number = theirs.fileno()
        self.process = subprocess.Popen([sys.executable, "-c", CHILD, str(number)], pass_fds=[number])
        theirs.close()
        self.door.settimeout(WAIT_S)
        self.client: PoolClient = tier.attach(self.process.pid, os.pidfd_open(self.process.pid))
        segment, _ = tier.map_segment(self.client, 0)
        socket.send_fds(self.door, [b"."], [tier.generations.fd, self.client.hazards.fd, segment])

    def ask(self, *order: object) -> bytes:
        self.door.send(" ".join(map(str, order)).encode())
        return self.door.recv(4096)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Stand:
    """A tier with a clock and a list of who is on the device, and clients."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.holders = Holders(self.clock, set())
        self.maker = MemorySegments()
        self.tier = HbmTier(
            self.maker, 2 * MIB, holders=self.holders, segment_bytes=MIB, max_slots=64, clock=self.clock
        )
        self.here = MappedPool(self.tier)
        self.children: list[Child] = []

    @property
    def on_device(self) -> set[int]:
        assert self.holders.pids is not None
        return self.holders.pids

    def child(self, *, is_seen: bool = True) -> Child:
        """A client on the device, which the tier has seen there where it is told who is."""
        self.children.append(Child(self.tier))
        if self.holders.pids is not None and is_seen:
            self.on_device.add(self.children[-1].process.pid)
        self.ask()
        return self.children[-1]

    def ask(self) -> int:
        """Sweep until what is asked for now was taken in; return the bytes that became free."""
        return self.tier.sweep() + self.tier.sweep()

    def put(self, payload: bytes, number: int = 1) -> Extent:
        draft = self.here.reserve(len(payload))
        self.here.write(draft, payload)
        return self.here.seal(draft, block_header(number)).extent

    def fill(self) -> dict[Extent, bytes]:
        """Put blocks of 256 KiB until there is no room."""
        blocks: dict[Extent, bytes] = {}
        try:
            while True:
                payload = bytes([len(blocks) + 1]) * (SLOT)
                blocks[self.put(payload, len(blocks))] = payload
        except NoSpace:
            return blocks

    def check(self, blocks: dict[Extent, bytes]) -> None:
        for extent, payload in blocks.items():
            with self.here.lease(extent) as lease:
                assert lease.bytes() == payload


@pytest.fixture
def stand() -> Iterator[Stand]:
    with made() as stand:
        yield stand


@contextmanager
def made() -> Iterator[Stand]:
    stand = Stand()
    try:
        yield stand
    finally:
        for child in stand.children:
            child.kill()
            child.door.close()
        stand.here.close()


def test_processes_share_blocks(stand: Stand) -> None:
    extent = stand.put(b"block one")
    child = stand.child()
    place = stand.tier.place(extent)
    lease = child.ask("lease", extent.slot, extent.generation)
    assert child.ask("read", place.offset_bytes, 9) == b"block one"
    assert stand.tier.held(extent)
    assert stand.tier.free(extent) == place.slot_bytes
    other = stand.put(b"block two")
    assert stand.tier.place(other).offset_bytes != place.offset_bytes
    assert child.ask("read", place.offset_bytes, 9) == b"block one"
    assert stand.tier.sweep() == 0
    child.ask("clear", lease.decode())
    assert stand.tier.sweep() == place.slot_bytes
    assert stand.tier.place(stand.put(b"block three")).offset_bytes == place.offset_bytes


def test_a_dead_clients_leases_end_with_its_process(stand: Stand) -> None:
    extent = stand.put(b"block")
    child = stand.child()
    child.ask("lease", extent.slot, extent.generation)
    stand.tier.end(child.client)
    stand.tier.free(extent)
    assert stand.tier.sweep() == 0, "the process lives, and may read"
    child.kill()
    assert stand.tier.sweep() > 0
    assert stand.tier.usage().held_bytes == 0


def kill_in_copy(stand: Stand, *, is_seen: bool = True) -> tuple[Child, int, int]:
    """Kill a client in the copy to its draft; return it, and where the draft was."""
    stand.put(bytes(SLOT))  # makes segment 0
    child = stand.child(is_seen=is_seen)
    draft = stand.tier.reserve(SLOT, child.client)
    place = stand.tier.place(draft)
    assert place.segment == 0
    assert child.ask("copy", place.offset_bytes, SLOT) == b"begun"
    child.kill()
    return child, place.offset_bytes, place.slot_bytes


def test_what_a_killed_client_may_still_write_is_not_reused(stand: Stand) -> None:
    """Its device completes the copy after all others have filled the pool."""
    child, start, size_bytes = kill_in_copy(stand)
    stand.tier.sweep()
    blocks = stand.fill()
    stand.clock.now_s += limits.HBM_HANG_S - 1
    stand.tier.sweep()
    blocks |= stand.fill()
    assert stand.tier.describe()["quarantined_bytes_by_pid"] == {child.process.pid: size_bytes}
    stand.here.map(0)[start : start + size_bytes] = b"\xee" * size_bytes
    stand.check(blocks)
    stand.on_device.clear()
    assert stand.ask() == size_bytes
    assert stand.tier.describe()["quarantined_bytes_by_pid"] == {}
    stand.put(bytes(SLOT))


def test_where_nobody_knows_who_is_on_the_device_the_wait_is_bounded(stand: Stand) -> None:
    stand.holders.pids = None
    kill_in_copy(stand)
    stand.tier.sweep()
    stand.clock.now_s += limits.HBM_DRAIN_S - 0.1
    assert stand.tier.sweep() == 0
    stand.clock.now_s += 0.1
    assert stand.tier.sweep() == SLOT


def drained(stand: Stand) -> bool:
    """Say whether a killed client's drafts wait for HBM_DRAIN_S, and no longer."""
    if stand.ask():
        return False
    stand.clock.now_s += limits.HBM_DRAIN_S
    return stand.tier.sweep() == SLOT


def test_a_client_that_nobody_saw_on_the_device_is_not_known_to_be_off(stand: Stand) -> None:
    """It may be listed by another pid, of another namespace."""
    child, *_ = kill_in_copy(stand, is_seen=False)
    assert child.process.pid not in stand.on_device
    assert drained(stand)


def test_a_listing_with_pids_of_nobody_here_says_nothing(stand: Stand) -> None:
    kill_in_copy(stand)
    stand.on_device.clear()
    stand.holders.is_ours = False
    assert drained(stand)


def test_a_client_that_was_seen_among_pids_of_nobody_here_was_not_seen(stand: Stand) -> None:
    stand.holders.is_ours = False
    kill_in_copy(stand)
    stand.on_device.clear()
    stand.holders.is_ours = True
    assert drained(stand)


def test_a_listing_from_before_the_exit_says_nothing(stand: Stand) -> None:
    """A process may begin work after it was asked who is there."""
    stand.put(bytes(SLOT))
    child = stand.child()
    stand.tier.reserve(SLOT, child.client)
    stand.on_device.clear()
    stand.holders.ask(stand.maker.device)
    child.kill()
    assert stand.tier.sweep() == 0
    assert stand.tier.sweep() == SLOT, "it was asked for after the exit"


def test_the_wait_begins_anew_while_the_client_is_listed(stand: Stand) -> None:
    kill_in_copy(stand)
    stand.ask()
    stand.clock.now_s += limits.HBM_DRAIN_S
    stand.ask()
    stand.holders.pids = None
    assert drained(stand)


def test_who_is_there_is_asked_while_it_matters(stand: Stand) -> None:
    """Of a living client until it is seen, or was looked for often enough; of one that exited until it has gone."""
    stand.put(b"in a segment that a client can map")
    for _ in range(2 * limits.HBM_LISTINGS):
        stand.tier.sweep()
    assert stand.holders.asked == limits.HBM_LISTINGS
    child = stand.child()
    asked = stand.holders.asked
    stand.ask()
    assert stand.holders.asked == asked
    child.kill()
    stand.ask()
    assert stand.holders.asked == asked + 2
    stand.on_device.clear()
    stand.ask()
    asked = stand.holders.asked
    stand.ask()
    assert stand.holders.asked == asked


def test_a_hung_clients_segments_are_out_of_use_until_it_ends(stand: Stand) -> None:
    stand.put(bytes(SLOT))
    child = stand.child()
    stand.tier.reserve(SLOT, child.client)
    stand.tier.end(child.client)
    stand.clock.now_s += limits.HBM_HANG_S
    stand.tier.sweep()
    pid = child.process.pid
    assert stand.tier.describe()["blocked_bytes_by_pid"] == {pid: MIB}
    assert {stand.tier.place(extent).segment for extent in stand.fill()} == {1}
    with pytest.raises(Superseded):
        stand.tier.reserve(1, child.client)
    child.kill()
    stand.on_device.clear()
    assert stand.ask() > 0
    assert stand.tier.describe()["blocked_bytes_by_pid"] == {}
    assert {stand.tier.place(extent).segment for extent in stand.fill()} == {0}


def test_a_client_that_detaches_returns_its_drafts_at_once(stand: Stand) -> None:
    stand.put(bytes(SLOT))
    child = stand.child()
    stand.tier.reserve(SLOT, child.client)
    stand.tier.detach(child.client)
    assert len(stand.fill()) == 7


def test_another_clients_draft_is_not_sealed(stand: Stand) -> None:
    stand.put(b"first")
    draft = stand.tier.reserve(1, stand.child().client)
    with pytest.raises(Superseded):
        stand.here.seal(draft, block_header(1))
    with pytest.raises(Superseded):
        stand.here.abort(draft)


def test_clients_are_bounded(stand: Stand) -> None:
    clients = [
        stand.tier.attach(os.getpid(), os.pidfd_open(os.getpid())) for _ in range(limits.HBM_CLIENTS - 1)
    ]
    with pytest.raises(LimitExceeded, match=str(limits.HBM_CLIENTS)):
        stand.tier.attach(os.getpid(), os.pidfd_open(os.getpid()))
    stand.tier.detach(clients[0])
    stand.tier.attach(os.getpid(), os.pidfd_open(os.getpid()))


@pytest.mark.parametrize(
    ("ended_s", "exited_s", "on_device", "expected"),
    [
        (None, None, True, Standing.ACTIVE),
        (90.0, None, False, Standing.DRAINING),
        (90.0, 95.0, True, Standing.DRAINING),
        (90.0, 100.0, False, Standing.OFF_DEVICE),
        (90.0, 100.0, None, Standing.DRAINING),
        (60.0, 100.0 - limits.HBM_DRAIN_S, None, Standing.OFF_DEVICE),
        (100.0 - limits.HBM_HANG_S, None, False, Standing.HUNG),
        (100.0 - limits.HBM_HANG_S, 95.0, True, Standing.HUNG),
    ],
)
def test_standing(
    ended_s: float | None, exited_s: float | None, on_device: bool | None, expected: Standing
) -> None:
    assert standing(ended_s=ended_s, exited_s=exited_s, on_device=on_device, now_s=100.0) is expected
