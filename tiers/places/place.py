"""Where a segment lies, and what every kind of place does.

Responsibility: `Place`, a value, and `Places`, the port of `tiers.places.segment_files` and `.block_devices`.

Concurrency: the service's trio thread; only the async calls await.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Place:
    """Says where the bytes of one segment are."""

    path: Path
    """A file, or a block device."""
    start: int = 0
    """The byte of it where the segment begins; 0: all of the file is the segment."""

    @property
    def name(self) -> str:
        """Return how reports call the segment."""
        return f"{self.path} from {self.start}" if self.start else self.path.name

    def read(self, at: int, length: int) -> bytes:
        """Read bytes of the segment, fewer at its end. Raises OSError."""
        with self.path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), length, self.start + at)


class Places(Protocol):
    """Holds the segments of one pool."""

    segment_bytes: int
    first_sequence: int
    """No segment has a life that is older: what a device held before it was taken is never read."""

    def numbers(self) -> Sequence[int]:
        """List the segments that there are or shall be, in the order in which they are filled."""

    def exists(self, number: int) -> bool:
        """Return whether the segment is there."""

    def is_wanted(self, number: int) -> bool:
        """Return whether the capacity has the segment; another is used only as long as something counts in it."""

    def place(self, number: int) -> Place:
        """Return where the segment is, or is to be."""

    def size_bytes(self, number: int) -> int:
        """Return how many bytes of a segment are there. Raises OSError."""

    def open(self, number: int) -> int:
        """Open a segment on the device; return the descriptor. Raises NotFound, DeviceFailed."""

    async def create(self, number: int) -> int:
        """Make a segment and open it. Raises NoSpace, DeviceAway, DeviceFailed."""

    async def lengthen(self, number: int) -> None:
        """Give a segment that was cut its whole size. Raises NoSpace, DeviceAway, DeviceFailed."""

    def remove(self, number: int) -> None:
        """Let go of a segment that is closed and not wanted."""

    def set_aside(self, number: int) -> None:
        """Have no start read a segment again that is closed or unreadable, whatever it holds. Raises OSError."""

    def spare(self, taken: Sequence[int]) -> int:
        """Return the number of a segment beyond the capacity, for a repair. Raises NoSpace."""

    def close(self) -> None:
        """Let go of what holds the places; their segments are closed."""
