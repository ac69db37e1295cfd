"""Samples of memory that is too large to read whole, to detect changes."""

from collections.abc import Sequence

LINE_BYTES: int
"""Bytes read at each place."""

def sample(addresses: Sequence[int], sizes: Sequence[int], budget: int) -> bytes:
    """Return 16 bytes, XXH3 over lines of each area of memory: `budget` in all, at least one of each area not empty.

    Small areas are read whole, the others in equal shares; one line is read in each even part of an area, at a
    pseudo-random place that is always the same. REQUIRES that the memory stays. Raises InvalidRequest.
    """

def lines_read(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Return the numbers of the lines that `sample` reads of each area, for memory that only a device reads."""
