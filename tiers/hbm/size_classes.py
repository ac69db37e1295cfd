"""The sizes that slots of a segment have.

Invariants: eight sizes for each power of two, so a slot is at most an eighth larger than what it is for; the sizes of
KV blocks, small numbers times a power of two, are such sizes themselves. Concurrency: pure functions.
"""

from __future__ import annotations

from kvfs import limits

_STEPS = 8


def slot_bytes_for(size_bytes: int) -> int:
    """Return the size of the slots that take so many bytes."""
    if size_bytes <= limits.HBM_MIN_SLOT_BYTES:
        return limits.HBM_MIN_SLOT_BYTES
    step = (1 << (size_bytes - 1).bit_length() - 1) // _STEPS
    return -(-size_bytes // step) * step
