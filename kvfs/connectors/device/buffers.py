"""Memory that a device copies to and from.

Responsibility: register memory of this process with a device.
Concurrency: whoever has a buffer has it alone.
"""

from __future__ import annotations

import ctypes
import mmap

from kvfs._native.cuda.driver import Context
from kvfs.limits import CONNECTOR_STAGING_BYTES


def buffer_bytes(block_bytes: int) -> int:
    """Return the bytes of a buffer for blocks of up to so many: CONNECTOR_STAGING_BYTES, or one larger block."""
    return -(-max(CONNECTOR_STAGING_BYTES, block_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE


class Buffer:
    """Registered memory."""

    def __init__(self, context: Context, size_bytes: int) -> None:
        """Raises what `kvfs.errors.from_cuda` does."""
        self.pages = mmap.mmap(-1, size_bytes)
        self._registration = context.register(
            ctypes.addressof(ctypes.c_char.from_buffer(self.pages)), size_bytes
        )
        self.region = (self._registration.address, size_bytes)
        """Where the device sees it, and its bytes."""

    def close(self) -> None:
        """Give the memory back; no copy may be under way."""
        self._registration.unregister()
