"""Copies between a device's memory and another: planned once, started as one."""

from collections.abc import Sequence
from typing import final

from typing_extensions import Buffer

from kvfs._native.cuda.driver import Event, Stream

@final
class Plan:
    """Plan copies, merged where they lie side by side at both ends.

    `pieces` holds 64-bit numbers, three a piece: destination address, source address, bytes. Both sides of a piece lie
    inside one of the regions (address, bytes): mappings, allocations, registrations. Raises InvalidRequest where one
    does not, or where a destination overlaps another or a source; LimitExceeded above limits.MAX_COPY_PIECES.
    """

    def __init__(
        self, pieces: Buffer, destinations: Sequence[tuple[int, int]], sources: Sequence[tuple[int, int]]
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...
    def copies(self) -> list[tuple[int, int, int]]:
        """Return (destination, source, bytes) of what is to be copied, by destination."""

    def start(self, stream: Stream, done: Event, after: Event | None = None) -> None:
        """Start the copies on a side stream, behind `after`; record `done` behind them.

        The memory stays the copies' until `done` is reached. Raises the driver's error when nothing is in flight any
        more; what the destinations hold is unknown then.
        """
