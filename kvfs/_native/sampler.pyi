"""Samples of memory that is too large to be read: enough to tell whether it changed."""

from collections.abc import Sequence

LINE_BYTES: int
"""What is read at each place."""

def sample(addresses: Sequence[int], sizes: Sequence[int], budget: int) -> bytes:
    """16 bytes, XXH3 over lines of each area of memory: `budget` in all, and of each that is not empty one at least.

    Small areas are read whole, the others share alike; in each even part of an area one line is read, at a place that
    looks random and is always the same. The caller holds the memory. Raises InvalidRequest.
    """

def lines_read(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """The numbers of the lines that `sample` reads of each area: for memory that only its owner can read."""
