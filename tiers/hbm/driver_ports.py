"""What the HBM tier needs of a device: segments as file descriptors, and who is on it.

Responsibility: the ports. The service has no context on the device: a segment is made, exported and from then on known
by its descriptor alone, which holds a reference of its own.

Concurrency: called on the service's thread.
"""

from __future__ import annotations

from typing import Protocol


class SegmentMaker(Protocol):
    """Makes memory on one device."""

    @property
    def device(self) -> str:
        """Return the UUID of the device."""
        ...

    def make(self, size_bytes: int) -> int:
        """Make a segment; return the descriptor that stands for it: it is there until that is closed here and every
        client has unmapped it. Raises NoSpace where the device is out of memory, DeviceFailed."""
        ...


class DeviceHolders(Protocol):
    """Says which processes are on a device."""

    def __call__(self, device: str) -> frozenset[int] | None:
        """Return the pids of the processes that have work or memory there; None where that is not known."""
        ...


def unknown_holders(device: str) -> None:
    """Stand for a `DeviceHolders` where nothing says who is on the device."""
