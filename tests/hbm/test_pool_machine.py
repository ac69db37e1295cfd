"""A pool beside a plain model, on memory files, every byte compared: clients come, write, lease, die and are hung."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvfs.errors import NoSpace, Superseded
from tests.conformance.tier_suite import block_header
from tests.support.device_pools import MIB, Clock, Holders, MappedLease, MappedPool, MemorySegments
from tiers.hbm.tier import HbmTier
from tiers.model.tier import Extent

SIZES = [0, 5_000, 300_000, 300_001]


def pattern(draft: Extent, size_bytes: int) -> bytes:
    return f"{draft.slot}.{draft.generation}/".encode() * (size_bytes // 4 + 1)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


class PoolMachine(RuleBasedStateMachine):
    """`drafts` and `live` are the model; `dead` drafts may be written by a device long after their client."""

    @initialize()
    def start(self) -> None:
        self.clock = Clock()
        self.on_device: set[int] = set()
        self.holders = Holders(self.clock, self.on_device)
        self.tier = HbmTier(
            MemorySegments(),
            6 * MIB,
            holders=self.holders,
            segment_bytes=MIB,
            max_slots=40,
            clock=self.clock,
        )
        self.clients: list[tuple[MappedPool, subprocess.Popen[bytes]]] = []
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.drafts: dict[Extent, tuple[MappedPool, bytes]] = {}
        self.live: dict[Extent, bytes] = {}
        self.leases: list[tuple[MappedPool, MappedLease, bytes]] = []
        self.dead: dict[int, list[tuple[MappedPool, int, int, int]]] = {}
        self.number = 0

    @rule()
    def attach(self) -> None:
        if len(self.clients) < 3:
            process = subprocess.Popen(["sleep", "1000"])
            self.clients.append((MappedPool(self.tier, process.pid), process))
            self.on_device.add(process.pid)

    def client(self, choice: int) -> MappedPool:
        return self.clients[choice % len(self.clients)][0]

    @precondition(lambda self: self.clients)
    @rule(choice=st.integers(0, 9), size_bytes=st.sampled_from(SIZES))
    def reserve(self, choice: int, size_bytes: int) -> None:
        client = self.client(choice)
        try:
            draft = client.reserve(size_bytes)
        except NoSpace:
            return
        payload = pattern(draft, size_bytes)[:size_bytes]
        client.write(draft, payload)
        self.drafts[draft] = client, payload

    @precondition(lambda self: self.drafts)
    @rule(choice=st.integers(0, 99), keep=st.booleans())
    def end_draft(self, choice: int, keep: bool) -> None:
        draft = list(self.drafts)[choice % len(self.drafts)]
        client, payload = self.drafts.pop(draft)
        if not keep:
            client.abort(draft)
            return
        self.number += 1
        self.live[client.seal(draft, block_header(self.number)).extent] = payload

    @precondition(lambda self: self.clients and self.live)
    @rule(choice=st.integers(0, 99))
    def lease(self, choice: int) -> None:
        client = self.client(choice)
        extent = list(self.live)[choice % len(self.live)]
        self.leases.append((client, client.lease(extent), self.live[extent]))

    @precondition(lambda self: self.leases)
    @rule(choice=st.integers(0, 99))
    def end_lease(self, choice: int) -> None:
        self.leases.pop(choice % len(self.leases))[1].close()

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 99))
    def free(self, choice: int) -> None:
        extent = list(self.live)[choice % len(self.live)]
        del self.live[extent]
        self.tier.free(extent)
        with pytest.raises(Superseded):
            self.tier.free(extent)

    @precondition(lambda self: self.clients)
    @rule(choice=st.integers(0, 9), killed=st.booleans())
    def end_client(self, choice: int, killed: bool) -> None:
        """A session ends; its process may live on. Its leases are its own then, and its device goes on writing."""
        client, process = self.clients.pop(choice % len(self.clients))
        if killed:
            end(process)
        self.tier.end(client.client)
        late = self.dead.setdefault(process.pid, [])
        for draft, (owner, _) in list(self.drafts.items()):
            if owner is client:
                place = self.tier.place(draft)
                late.append((client, place.segment, place.offset_bytes, place.slot_bytes))
                del self.drafts[draft]
        self.leases = [entry for entry in self.leases if entry[0] is not client]
        self.processes[process.pid] = process

    @precondition(lambda self: self.dead)
    @rule(choice=st.integers(0, 9))
    def write_late(self, choice: int) -> None:
        for client, segment, start, size_bytes in list(self.dead.values())[choice % len(self.dead)]:
            client.maps[segment][start : start + size_bytes] = b"\xee" * size_bytes

    @precondition(lambda self: self.dead)
    @rule(choice=st.integers(0, 9))
    def leave_device(self, choice: int) -> None:
        pid = list(self.dead)[choice % len(self.dead)]
        del self.dead[pid]
        end(self.processes.pop(pid))
        self.on_device.discard(pid)

    @rule(is_ours=st.booleans())
    def list_strangers(self, is_ours: bool) -> None:
        """Have listings with pids that are of no process here, or without."""
        self.holders.is_ours = is_ours

    @rule(passed_s=st.sampled_from([0.0, 11.0, 31.0]))
    def sweep(self, passed_s: float) -> None:
        self.clock.now_s += passed_s
        self.tier.sweep()

    @rule(segments=st.integers(1, 6))
    def resize(self, segments: int) -> None:
        for sealed in self.tier.resize(segments * MIB):
            del self.live[sealed.extent]
        for client in [client for client, _ in self.clients]:
            for number in self.tier.to_unmap(client.client):
                if not any(lease._map is client.maps[number] for _, lease, _ in self.leases):
                    client.unmap(number)

    @invariant()
    def bytes_are_what_was_written(self) -> None:
        if not hasattr(self, "tier"):
            return
        for _, lease, payload in self.leases:
            assert lease.bytes() == payload, "a leased block changed"
        for reader in (client for client, _ in self.clients[:1]):
            for extent, payload in self.live.items():
                with reader.lease(extent) as lease:
                    assert lease.bytes() == payload, "a sealed block changed"
        for client, payload in self.drafts.values():
            assert client.client.ended_s is None
            assert len(payload) <= MIB

    @invariant()
    def accounts_balance(self) -> None:
        if not hasattr(self, "tier"):
            return
        usage, shown = self.tier.usage(), self.tier.describe()
        assert {sealed.extent for sealed in self.tier.sealed()} == set(self.live)
        assert usage.used_bytes <= shown["segment_bytes"] <= 6 * MIB
        assert usage.slots >= len(self.drafts) + len(self.live)
        assert usage.held_bytes == self.tier.charged_bytes(0)

    def teardown(self) -> None:
        if not hasattr(self, "tier"):
            return
        for process in [process for _, process in self.clients] + list(self.processes.values()):
            end(process)
        self.tier.close()


@pytest.mark.seeded
def test_a_pool_against_a_model() -> None:
    run_state_machine_as_test(
        PoolMachine, settings=settings(max_examples=100, stateful_step_count=60, deadline=None)
    )
