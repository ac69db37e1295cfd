"""Segments of a CUDA device: allocated, exported and released at once, so that the descriptor is all that is kept.

Responsibility: the `SegmentMaker` over a driver's device, and whether a device can be one.

Invariants: no context is made: a fault in one would end the service. Concurrency: the service's thread only; an
allocation is a call of the driver, which waits for no client.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from kvfs.errors import DeviceMissing, NoSpace, OutOfResources


class Exported(Protocol):
    """An allocation of a device."""

    def export(self) -> int:
        """Return a new descriptor, which keeps the memory after the allocation is released."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class ExportingDevice(Protocol):
    """A device of a driver."""

    @property
    def uuid(self) -> str:
        """Return the device's UUID as text."""

    @property
    def granularity_bytes(self) -> int:
        """Return the unit of allocations in bytes: a segment's size is a multiple of it."""

    @property
    def shares_memory(self) -> bool:
        """Return whether other processes can map what is exported."""

    def create(self, size_bytes: int) -> Exported:
        """Allocate memory that can be exported. Raises OutOfResources."""
        ...


class ExportedSegments:
    """Makes the segments of one device."""

    def __init__(self, device: ExportingDevice, segment_bytes: int) -> None:
        """Take a device. Raises DeviceMissing for one whose memory cannot be shared, and says why."""
        self.device = device.uuid
        self._device = device
        if not device.shares_memory:
            raise DeviceMissing(f"device {device.uuid} exports no memory as descriptors")
        if segment_bytes % device.granularity_bytes:
            raise DeviceMissing(
                f"device {device.uuid} allocates in units of {device.granularity_bytes} bytes, "
                f"of which a segment of {segment_bytes} is no multiple"
            )

    def make(self, size_bytes: int) -> int:
        """Make a segment. Raises NoSpace where the device is out of memory."""
        try:
            with self._device.create(size_bytes) as allocation:
                return allocation.export()
        except OutOfResources as error:
            raise NoSpace(f"device {self.device} has no room for {size_bytes} bytes: {error}") from error
