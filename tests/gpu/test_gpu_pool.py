"""The HBM pool's segments in several processes: what one writes all others read, and nothing is lost with a process."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from kvfs import limits
from kvfs._native.cuda.driver import Device
from kvfs._native.hash.hashing import xxh3_64
from kvfs._native.hbm.hazards import ClientHazards
from kvfs.errors import NoSpace, Superseded
from tests.conformance.tier_suite import block_header
from tests.gpu.conftest import ON_GPU
from tests.gpu.peer import pattern
from tests.support.gpu_peers import Peer
from tests.support.seeds import SEED
from tiers.hbm.exported_segments import ExportedSegments
from tiers.hbm.handover import HandedBlock
from tiers.hbm.tier import HbmTier
from tiers.model.tier import Extent, Sealed

MIB = 1 << 20
SEGMENT = 8 * MIB
SIZES = [4 << 10, 64 << 10, 100_000, 2 * MIB]

MakePeer = Callable[[], Peer]


@dataclass
class PoolPeer:
    """A process with a pool's segments mapped, and the leases that the test takes for it."""

    tier: HbmTier
    peer: Peer
    tokens: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.client = self.tier.attach(self.peer.pid, os.pidfd_open(self.peer.pid))
        self.leases = ClientHazards(self.tier.generations.fd, self.client.hazards.fd)

    def map(self, number: int) -> None:
        if number not in self.tokens:
            fd, self.tokens[number] = self.tier.map_segment(self.client, number)
            self.peer.order("map", fd, number=number, size_bytes=SEGMENT)

    def put(self, number: int, size_bytes: int) -> Sealed:
        """Seal a block of the pattern of `number`."""
        draft = self.tier.reserve(size_bytes, self.client)
        place = self.tier.place(draft)
        self.map(place.segment)
        self.peer.order(
            "write", number=place.segment, offset=place.offset_bytes, seed=number, size_bytes=size_bytes
        )
        return self.tier.seal(draft, self.client, block_header(number), xxh3_64(pattern(number, size_bytes)))

    def read(self, extent: Extent, size_bytes: int) -> list[int]:
        """Return the checksums of what is leased: of a copy, and the device's own."""
        lease = self.leases.publish(extent.slot, extent.generation)
        try:
            place = self.tier.place(extent)
            self.map(place.segment)
            found: list[int] = self.peer.order(
                "checksums", number=place.segment, offset=place.offset_bytes, size_bytes=size_bytes
            )
            return found
        finally:
            self.leases.clear(lease)


def make_tier(device: Device, segments: int) -> HbmTier:
    return HbmTier(
        ExportedSegments(device, SEGMENT), segments * SEGMENT, segment_bytes=SEGMENT, max_slots=1024
    )


@pytest.mark.seeded
def test_three_processes_share_blocks_and_one_is_killed_now_and_then(device: Device, peer: MakePeer) -> None:
    draw = random.Random(f"{SEED}.pool")
    tier = make_tier(device, 4)
    peers = [PoolPeer(tier, peer()) for _ in range(3)]
    live: dict[Extent, tuple[int, int]] = {}
    for number in range(1, 301):
        actor = draw.randrange(3)
        match draw.choices(["put", "read", "free", "kill"], [10, 20, 5, 0.3])[0]:
            case "put":
                size_bytes = draw.choice(SIZES)
                try:
                    live[peers[actor].put(number, size_bytes).extent] = number, size_bytes
                except NoSpace:
                    victim = draw.choice(list(live))
                    tier.free(victim)
                    del live[victim]
            case "read" if live:
                extent = draw.choice(list(live))
                seed, size_bytes = live[extent]
                expected = xxh3_64(pattern(seed, size_bytes))
                assert peers[actor].read(extent, size_bytes) == [expected, expected]
            case "free" if live:
                extent = draw.choice(list(live))
                del live[extent]
                tier.free(extent)
                with pytest.raises(Superseded):
                    peers[actor].read(extent, 1024)
            case "kill":
                peers[actor].peer.kill()
                tier.sweep()
                peers[actor] = PoolPeer(tier, peer())
        assert {sealed.extent for sealed in tier.sealed()} == set(live)
    for extent, (seed, size_bytes) in live.items():
        expected = xxh3_64(pattern(seed, size_bytes))
        assert [each.read(extent, size_bytes) for each in peers] == [[expected, expected]] * 3
    tier.close()


def test_blocks_outlive_the_service_and_are_checked_on_the_device(device: Device, peer: MakePeer) -> None:
    before = make_tier(device, 2)
    holder = PoolPeer(before, peer())
    sealed = [holder.put(number, 64 << 10) for number in range(1, 5)]
    places = [before.place(each.extent) for each in sealed]
    (segment,) = {place.segment for place in places}
    before.close()

    holder.peer.order(
        "write", number=segment, offset=places[3].offset_bytes + 1000, seed=99, size_bytes=1
    )  # a byte changes while there is no service
    after = make_tier(device, 2)
    client = after.attach(holder.peer.pid, os.pidfd_open(holder.peer.pid))
    handed = [
        HandedBlock(
            place.offset_bytes,
            each.size_bytes,
            each.header,
            holder.peer.order(
                "checksums", number=segment, offset=place.offset_bytes, size_bytes=each.size_bytes
            )[1],
        )
        for each, place in zip(sealed, places, strict=True)
    ]
    expected = {each.header.key: each.checksum for each in sealed}
    fd = holder.peer.receive("descriptor", number=segment)
    adopted = after.adopt(client, fd, holder.tokens[segment], handed, expected.get)
    assert [each is not None for each in adopted] == [True, True, True, False]
    reader = PoolPeer(after, peer())
    holder.peer.kill()
    for number, each in enumerate(adopted[:3], start=1):
        assert each is not None
        value = xxh3_64(pattern(number, 64 << 10))
        assert reader.read(each.extent, each.size_bytes) == [value, value]
    after.close()


@pytest.mark.skipif(not ON_GPU, reason="the stand-in takes no memory for a descriptor")
def test_a_device_that_is_full_is_a_full_tier(device: Device, peer: MakePeer) -> None:
    segment_bytes = limits.HBM_SEGMENT_BYTES
    most = -(-device.total_bytes // segment_bytes)
    maker = ExportedSegments(device, segment_bytes)
    tier = HbmTier(maker, 2 * most * segment_bytes, segment_bytes=segment_bytes, max_slots=4096)
    other = peer()
    client = tier.attach(other.pid, os.pidfd_open(other.pid))
    drafts: list[Extent] = []
    with suppress(NoSpace):
        while len(drafts) <= most:
            drafts.append(tier.reserve(segment_bytes, client))
    assert most // 2 < len(drafts) < most
    with pytest.raises(NoSpace, match=device.uuid):
        tier.reserve(segment_bytes, client)
    tier.abort(drafts.pop(), client)
    tier.reserve(segment_bytes, client)
    tier.detach(client)
    tier.close()
