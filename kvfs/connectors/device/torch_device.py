"""The CUDA driver's device that a PyTorch device is.

Responsibility: find it, and make what loads blocks onto it and stores them from it.
Concurrency: no state.
"""

from __future__ import annotations

import logging
from functools import partial

import torch

from kvfs._native.cuda.driver import open_driver
from kvfs.connectors.device.copies import DeviceCopies, copies_in
from kvfs.errors import DeviceMissing, KvfsError

log = logging.getLogger("kvfs.connectors")


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
