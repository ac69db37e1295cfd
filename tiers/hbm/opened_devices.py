"""The devices whose memory a service shares, found by the CUDA driver.

Responsibility: open the driver, take the devices that were asked for, and say why others are left out: a machine
without a GPU has a service all the same.

Invariants: no context is made. Concurrency: called once, at the start.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvfs import limits
from kvfs._native.cuda.driver import Device, open_driver
from kvfs.config.sizes import format_size
from kvfs.errors import DeviceMissing, KvfsError
from tiers.hbm.device_pools import SharedDevice
from tiers.hbm.exported_segments import ExportedSegments

_SLICE = " MIG "
"""In the name of a part of a GPU, whose memory other processes cannot map."""


def open_devices(capacity_bytes: int, uuids: Sequence[str]) -> tuple[list[SharedDevice], list[str]]:
    """Return these devices (none named: all), with so many bytes of each; and why others are not among them."""
    try:
        known = {device.uuid: device for device in open_driver().devices()}
    except KvfsError as error:
        return [], [f"no GPU memory for blocks: {error}"]
    shared, missing = [], [] if known else ["no GPU memory for blocks: the CUDA driver knows no device"]
    for uuid in uuids or known:
        try:
            shared.append(_shared(known.get(uuid), uuid, capacity_bytes))
        except KvfsError as error:
            missing.append(f"no GPU memory for blocks: {error}")
    return shared, missing


def _shared(device: Device | None, uuid: str, capacity_bytes: int) -> SharedDevice:
    if device is None:
        raise DeviceMissing(f"the CUDA driver knows no device {uuid}")
    if _SLICE in device.name:
        raise DeviceMissing(f"device {uuid} is a part of a GPU ({device.name}), which shares no memory")
    if capacity_bytes > device.total_bytes:
        total, wanted = format_size(device.total_bytes), format_size(capacity_bytes)
        raise DeviceMissing(f"device {uuid} has {total}, [hbm] capacity = '{wanted}' is more")
    return SharedDevice(ExportedSegments(device, limits.HBM_SEGMENT_BYTES), capacity_bytes)
