"""The HBM pool on the stand-in: its segments cross a process boundary as descriptors, and copies go into its slots."""

from __future__ import annotations

import array
import ctypes
import os
import subprocess
import sys

import pytest

from kvfs._native.cuda.copies import Plan
from kvfs._native.cuda.driver import Context, Device, Driver
from kvfs.errors import NoSpace
from tests.conformance.tier_suite import block_header
from tests.support.cuda_standin import Standin
from tiers.hbm.exported_segments import ExportedSegments
from tiers.hbm.tier import HbmTier

SEGMENT = 4 << 20
BLOCK = 64 << 10
READER = """
import ctypes, sys
from kvfs._native.cuda.driver import open_driver

driver = open_driver(sys.argv[1])
fd, segment_bytes, offset, size_bytes = map(int, sys.argv[2:])
mapping = driver.devices()[0].map(driver.import_allocation(fd, segment_bytes), writable=False)
sys.stdout.buffer.write(ctypes.string_at(mapping.address + offset, size_bytes))
"""


def test_a_block_is_copied_into_a_slot_and_read_in_another_process(
    standin: Standin, driver: Driver, device: Device, context: Context
) -> None:
    tier = HbmTier(ExportedSegments(device, SEGMENT), 2 * SEGMENT, segment_bytes=SEGMENT, max_slots=64)
    client = tier.attach(os.getpid(), os.pidfd_open(os.getpid()))
    payload = os.urandom(BLOCK)
    host = ctypes.create_string_buffer(payload, BLOCK)
    registration = context.register(ctypes.addressof(host), BLOCK)
    draft = tier.reserve(BLOCK, client)
    place = tier.place(draft)
    segment_fd, _ = tier.map_segment(client, place.segment)
    with driver.import_allocation(segment_fd, SEGMENT) as allocation, device.map(allocation) as mapping:
        to = mapping.address + place.offset_bytes
        plan = Plan(
            array.array("Q", [to, registration.address, BLOCK]),
            [(to, place.slot_bytes)],
            [(registration.address, BLOCK)],
        )
        stream, done = context.stream(), context.event()
        plan.start(stream, done)
        done.synchronize()
        sealed = tier.seal(draft, client, block_header(1))
        for each in (done, stream):
            each.destroy()
        registration.unregister()
    command = [sys.executable, "-c", READER, standin.path]
    numbers = (segment_fd, SEGMENT, tier.place(sealed.extent).offset_bytes, BLOCK)
    run = [*command, *map(str, numbers)]
    assert subprocess.run(run, check=True, capture_output=True, pass_fds=[segment_fd]).stdout == payload
    tier.detach(client)
    tier.close()


def test_a_device_without_room_is_a_full_tier_and_has_room_again(standin: Standin, device: Device) -> None:
    tier = HbmTier(ExportedSegments(device, SEGMENT), 2 * SEGMENT, segment_bytes=SEGMENT, max_slots=64)
    client = tier.attach(os.getpid(), os.pidfd_open(os.getpid()))
    standin.set_faults("cuMemCreate:2:1")
    with pytest.raises(NoSpace, match="no room for 4194304 bytes"):
        tier.reserve(BLOCK, client)
    assert tier.usage().used_bytes == 0
    standin.set_faults()
    tier.abort(tier.reserve(BLOCK, client), client)
    tier.detach(client)
    tier.close()
