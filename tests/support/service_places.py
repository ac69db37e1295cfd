"""Where the services of the crash tests run, what one holds of them meanwhile, and what a run came to.

Concurrency: one test's thread.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from tests.support.service_journal import digest_of


@dataclass(frozen=True)
class Place:
    """Where a service runs, and what it runs short of."""

    name: str
    dram: str = "32MiB"
    nvme: str = "0"
    s3: bool = False
    mode: str = "passthrough"
    full_nvme: bool = False
    held: bool = False
    full_disk: bool = False
    damage: bool = False
    edges: bool = False
    renames: bool = False
    """Whether the load is mostly renames, and kills come in the middle of them."""


PLACES: Final = {
    place.name: place
    for place in (
        Place("dram", s3=True, edges=True),
        Place("nvme", nvme="32MiB"),
        Place("gateway", nvme="32MiB", s3=True, mode="native", edges=True),
        Place("renames", nvme="32MiB", renames=True),
        Place("full-nvme", nvme="24MiB", full_nvme=True),
        Place("held", dram="24MiB", held=True),
        Place("held-nvme", dram="24MiB", nvme="32MiB", held=True, mode="native"),
        Place("full-disk", dram="24MiB", nvme="24MiB", full_disk=True),
        Place("damage", nvme="32MiB", damage=True),
        Place("plain", nvme="32MiB", mode="plain", edges=True),
    )
}


@dataclass(slots=True)
class Tally:
    """What a run came to."""

    lives: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    said: Counter[str] = field(default_factory=Counter)
    right: int = 0
    missing: int = 0
    checks: int = 0
    most_lines: int = 0
    most_bytes: int = 0

    def __str__(self) -> str:
        return (
            f"{self.lives} lives, ended by {dict(self.ends)}; {self.right} names found right, {self.missing} of caches "
            f"missed; {self.checks} checks; at most {self.most_lines} log lines in a life and "
            f"{self.most_bytes >> 20} MiB of memory\n{dict(self.said.most_common())}"
        )


@dataclass
class Lease:
    """Bytes that this process holds open, whatever becomes of the service."""

    what: str
    descriptor: int
    value: str
    is_slot: bool
    """Whether it is a descriptor of the slot itself, which outlives the service."""

    def end(self) -> None:
        with suppress(OSError):  # its service may be gone
            os.close(self.descriptor)

    def wrong(self) -> str:
        try:
            data, size = bytearray(), os.fstat(self.descriptor).st_size
            while part := os.pread(self.descriptor, 1 << 20, len(data)):
                data += part
        except OSError as error:
            return f"held {self.what}: {error}" if self.is_slot else ""
        if digest_of(bytes(data)) == self.value:
            return ""
        return f"held {self.what}: {len(data)} of {size} bytes, not those that were opened"
