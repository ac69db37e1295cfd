"""The CUDA driver's copies for the caches of one device: loads and stores.

Responsibility: find the driver's device that a PyTorch device is, and make what loads onto it and stores from it.
Concurrency: see `kvfs.connectors.device.loads` and `kvfs.connectors.device.stores`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from kvfs._native.cuda.driver import Context, open_driver
from kvfs.connectors.device.loads import DeviceLoads
from kvfs.connectors.device.stores import DeviceStores
from kvfs.errors import DeviceMissing, KvfsError

log = logging.getLogger("kvfs.connectors")


@dataclass(frozen=True, slots=True)
class DeviceCopies:
    """Both directions; each is closed by itself."""

    loads: DeviceLoads
    stores: DeviceStores


def copies_in(context: Context, block_bytes: int, compute_stream: Callable[[], int]) -> DeviceCopies:
    """Return copies of blocks of up to so many bytes in a context; `compute_stream` returns the driver's handle of the
    stream that the calling thread computes on. Raises what `kvfs.errors.from_cuda` does."""
    loads = DeviceLoads(context, block_bytes, compute_stream)
    try:
        return DeviceCopies(loads, DeviceStores(context, block_bytes, compute_stream))
    except BaseException:
        loads.close()
        raise


def copies_of(device: torch.device, block_bytes: int) -> DeviceCopies | None:
    """Return copies of blocks of up to so many bytes; None, which the log explains, for a device that PyTorch's own
    copies are for."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        known = {each.uuid: each for each in open_driver().devices()}
        if uuid not in known:
            raise DeviceMissing(f"the CUDA driver knows no device {uuid}")
        stream_of = partial(torch.cuda.current_stream, device)
        return copies_in(known[uuid].retain_context(), block_bytes, lambda: stream_of().cuda_stream)
    except KvfsError as error:
        log.warning("blocks are loaded and stored by PyTorch's copies, which stall a step: %s", error)
        return None
