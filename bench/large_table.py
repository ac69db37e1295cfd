"""Figures of a table with ten million blocks.

Responsibility: match 64 prefix hashes in tables of a million and of ten million entries on a tmpfs of the service's
kind, each as full as a store of that size makes it. Keys are drawn from all of the table, so that most lookups miss the
caches.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Final

from bench.measure import Plan, Result, Side, compare
from bench.places import tmpfs
from kvfs._native.shared.table import Table
from kvfs.errors import DeviceMissing
from kvfs.keys import key_at
from kvfs.limits import GIB

MATCHED: Final = 64
PROMPTS: Final = 1 << 14
"""A million keys: their entries are 64 MiB, more than a last-level cache has for one process."""
SMALL, LARGE = 1_000_000, 10_000_000
ENTRIES: Final = {SMALL: 1 << 21, LARGE: 1 << 24}
"""Places of the index: a table is at most 75 percent full."""
SIZE_BYTES: Final = 2 * GIB


def match_64_10m(seconds: float) -> Result:
    """Compare ten million entries with one million."""
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGESIZE") < SIZE_BYTES + GIB:
        raise DeviceMissing(
            f"bench: tables of ten million blocks need {SIZE_BYTES + GIB >> 30} GiB of free memory"
        )
    with (
        tempfile.TemporaryDirectory(prefix="kvfs-bench-") as name,
        tmpfs(Path(name) / "tables", "within_size", SIZE_BYTES) as place,
        ExitStack() as stack,
    ):
        large, small = (_matcher(stack, place, count) for count in (LARGE, SMALL))
        return compare("table.match_64_10m", Side(large), Side(small), Plan(seconds, batch=256, inner=4))


def _matcher(stack: ExitStack, place: Path, count: int) -> Callable[[int], None]:
    keys = os.urandom(16 * count)
    table = Table.create(place / str(count), bytes(16), 1, ENTRIES[count])
    stack.callback(table.close)
    for n in range(count):
        table.put(key_at(keys, n), 2, 0, 2, 4096)
    draw = Random(count).randrange
    prompts = [b"".join(key_at(keys, draw(count)) for _ in range(MATCHED)) for _ in range(PROMPTS)]

    def match(n: int) -> None:
        if table.match(prompts[n % PROMPTS]) != MATCHED:
            raise EOFError("a miss")

    return match
