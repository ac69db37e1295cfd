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
from tests.support.device_pools import MIB, Clock, MappedPool, MemorySegments
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
        self.on_device: set[int] | None = set()
        self.maker = MemorySegments()
        self.tier = HbmTier(
            self.maker, 2 * MIB, holders=self.holders, segment_bytes=MIB, max_slots=64, clock=self.clock
        )
        self.here = MappedPool(self.tier)
        self.children: list[Child] = []

    def holders(self, device: str) -> frozenset[int] | None:
        assert device == self.maker.device
        return None if self.on_device is None else frozenset(self.on_device)

    def child(self) -> Child:
        self.children.append(Child(self.tier))
        if self.on_device is not None:
            self.on_device.add(self.children[-1].process.pid)
        return self.children[-1]

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


def kill_in_copy(stand: Stand) -> tuple[Child, int, int]:
    """Kill a client in the copy to its draft; return it, and where the draft was."""
    stand.put(bytes(SLOT))  # makes segment 0
    child = stand.child()
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
    assert stand.on_device is not None
    stand.on_device.clear()
    assert stand.tier.sweep() == size_bytes
    assert stand.tier.describe()["quarantined_bytes_by_pid"] == {}
    stand.put(bytes(SLOT))


def test_where_nobody_knows_who_is_on_the_device_the_wait_is_bounded(stand: Stand) -> None:
    stand.on_device = None
    kill_in_copy(stand)
    stand.tier.sweep()
    stand.clock.now_s += limits.HBM_DRAIN_S - 0.1
    assert stand.tier.sweep() == 0
    stand.clock.now_s += 0.1
    assert stand.tier.sweep() == SLOT


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
    assert stand.on_device is not None
    stand.on_device.clear()
    assert stand.tier.sweep() > 0
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
