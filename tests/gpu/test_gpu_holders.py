"""Who is on a device by its driver's NVML: a process is listed while it has a context, and not after it was killed."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from kvfs import limits
from kvfs._native.cuda.driver import Device
from kvfs.errors import KvfsError
from tests.gpu.conftest import ON_GPU
from tests.support.gpu_peers import Peer
from tests.support.waits import eventually
from tiers.hbm.exported_segments import ExportedSegments
from tiers.hbm.holders.asked_holders import AskedHolders
from tiers.hbm.holders.nvml import Nvml
from tiers.hbm.tier import HbmTier

SEGMENT = 8 << 20


def listed(device: Device) -> str:
    """Say whom NVML lists, and what it may refuse."""
    try:
        return str(sorted(Nvml()(device.uuid)))
    except KvfsError as error:
        return str(error)


@pytest.mark.skipif(not ON_GPU, reason="the stand-in for the driver lists nobody")
def test_a_killed_process_is_known_to_be_off_the_device(
    device: Device, peer: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where NVML lists it by the pid that it has here; where not, its draft has to wait, and that is right, too."""
    monkeypatch.setattr(limits, "HBM_DRAIN_S", 3600.0)
    holders = AskedHolders(Nvml())
    maker = ExportedSegments(device, SEGMENT)
    tier = HbmTier(maker, SEGMENT, holders=holders, segment_bytes=SEGMENT, max_slots=8)
    other = peer()
    client = tier.attach(other.pid, os.pidfd_open(other.pid))
    draft = tier.reserve(SEGMENT, client)
    fd, _ = tier.map_segment(client, tier.place(draft).segment)
    other.order("map", fd, number=0, size_bytes=SEGMENT)
    other.order("write", number=0, offset=0, seed=1, size_bytes=SEGMENT)

    def is_looked_for() -> bool:
        tier.sweep()
        return client.was_listed or client.unlisted > 1 or holders.missing() != []

    eventually(is_looked_for, "who is on the device was asked")
    print(f"pid {other.pid} in {os.readlink('/proc/self/ns/pid')}: NVML lists {listed(device)}")
    other.kill()
    if client.was_listed:
        eventually(lambda: tier.sweep() == SEGMENT, "its draft is free")
        assert other.pid not in Nvml()(device.uuid)
    else:
        print(f"it is not known by that pid: {holders.missing() or 'no reason is known'}")
        assert tier.sweep() == 0
    print(f"afterwards NVML lists {listed(device)}")
    tier.close()
