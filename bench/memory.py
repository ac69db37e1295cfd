"""Figures of memory alone: copying.

Responsibility: one function for each figure.
"""

from __future__ import annotations

import mmap
import os

from bench.doors import FILES
from bench.measure import Plan, Result, Side, compare
from kvfs.limits import MIB


def memcpy_1m(seconds: float) -> Result:
    """Copy 1 MiB from huge pages of the doors' working set's size into one buffer; for information."""
    with mmap.mmap(-1, FILES * MIB) as source, mmap.mmap(-1, MIB) as target:
        source.madvise(mmap.MADV_HUGEPAGE)
        source.write(os.urandom(MIB) * FILES)
        with memoryview(source) as view, memoryview(target) as into:

            def copy(n: int) -> None:
                start = n % FILES * MIB
                into[:] = view[start : start + MIB]

            return compare("memcpy.1m", Side(copy), None, Plan(seconds, batch=FILES))
