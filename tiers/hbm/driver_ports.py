"""What the HBM tier needs of a device: segments as file descriptors, and who is on it.

Responsibility: the ports. The service has no context on the device: a segment is made, exported and from then on known
by its descriptor alone, which holds a reference of its own.

Concurrency: called on the service's thread.
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Listing:
    """Holds what was said once of who is on a device."""

    pids: frozenset[int]
    asked_s: float
    """When the question was begun, by `time.monotonic`."""
    is_ours: bool = True
    """Whether each pid is of a process that this service sees: else they may be of another namespace."""


class DeviceHolders(Protocol):
    """Says which processes are on a device."""

    def listing(self, device: str) -> Listing | None:
        """Return what is known now; None where nothing is, or nothing of late."""
        ...

    def ask(self, device: str) -> None:
        """Have it known anew soon; nobody waits for that."""
        ...

    def missing(self) -> list[str]:
        """Say on which devices it is not known, and why."""
        ...


class NoHolders:
    """Stands for `DeviceHolders` where nothing says who is on a device."""

    def listing(self, device: str) -> None:
        """Know nothing."""

    def ask(self, device: str) -> None:
        """Do nothing."""

    def missing(self) -> list[str]:
        """Say nothing."""
        return []
