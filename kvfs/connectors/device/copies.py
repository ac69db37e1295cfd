"""The CUDA driver's copies of blocks for the memory of one device: loads and stores.

Responsibility: make both, or neither.
Concurrency: see `kvfs.connectors.device.loads` and `kvfs.connectors.device.stores`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvfs._native.cuda.driver import Context
from kvfs.connectors.device.loads import DeviceLoads
from kvfs.connectors.device.stores import DeviceStores


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
