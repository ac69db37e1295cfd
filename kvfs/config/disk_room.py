"""What tiers take of filesystems, against what is free there: defaults, and bounds before anything is made.

Responsibility: tiers whose files lie on one filesystem are added up. What cannot be had is refused with the keys, the
free space and sizes that can.

Concurrency: reads filesystems once, at start-up.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvfs.config.sizes import format_size
from kvfs.errors import ConfigError
from kvfs.limits import (
    DRAM_SHARE_OF_AVAILABLE,
    MAX_DEFAULT_NVME_BYTES,
    MIB,
    MIN_DRAM_BYTES,
    MIN_NVME_BYTES,
    NVME_SHARE_OF_FREE,
)


@dataclass(frozen=True, slots=True)
class TierFiles:
    """The files of one tier: what they are to take, and what they take already."""

    name: str
    capacity_bytes: int
    directory: Path
    """It, or the directory above it that is there, says which filesystem."""
    kind: str
    taken_bytes: int
    missing_bytes: int
    least_bytes: int

    @property
    def setting(self) -> str:
        """Return the setting as a refusal names it."""
        where = " (in a plain directory)" if self.name == "dram" else ""
        return f"[{self.name}] capacity = '{format_size(self.capacity_bytes)}'{where}"


def dram_files(capacity_bytes: int, data: Path) -> TierFiles:
    """Return what a DRAM tier takes that lies in a plain directory, under the data directory."""
    taken_bytes = _slots_bytes(data)
    missing_bytes = max(capacity_bytes - taken_bytes, 0)
    return TierFiles("dram", capacity_bytes, data, "slots", taken_bytes, missing_bytes, MIN_DRAM_BYTES)


def segment_files(capacity_bytes: int, directory: Path) -> TierFiles:
    """Return what the NVMe tier takes.

    A start with all its files needs no more, also where the capacity is no multiple of theirs, or one of them was cut.
    """
    sizes_bytes = _segment_sizes_bytes(directory)
    segment_bytes, missing_bytes = max(sizes_bytes, default=0), capacity_bytes
    if segment_bytes:
        missing_bytes = max((capacity_bytes // segment_bytes - len(sizes_bytes)) * segment_bytes, 0)
    return TierFiles(
        "nvme", capacity_bytes, directory, "segment files", sum(sizes_bytes), missing_bytes, MIN_NVME_BYTES
    )


def check_disks(tiers: Sequence[TierFiles]) -> None:
    """Check that each filesystem has room for the files that are missing there. Raises ConfigError."""
    filesystems: dict[int, list[TierFiles]] = {}
    for tier in tiers:
        if tier.missing_bytes:
            filesystems.setdefault(_existing(tier.directory).stat().st_dev, []).append(tier)
    for group in filesystems.values():
        free_bytes = _free_bytes(group[0].directory)
        if sum(tier.missing_bytes for tier in group) > free_bytes:
            raise ConfigError(_refusal(group, free_bytes))


def default_nvme_bytes(directory: Path) -> int:
    """Return what the segment files there take, else a share of the free space; 0 if that is little."""
    taken_bytes = sum(_segment_sizes_bytes(directory))
    if taken_bytes:
        return taken_bytes
    share = _free_bytes(directory) // NVME_SHARE_OF_FREE
    return min(share, MAX_DEFAULT_NVME_BYTES) if share >= MIN_NVME_BYTES else 0


def default_dram_on_disk_bytes(data: Path) -> int:
    """Return the share of a disk that a DRAM tier in a plain directory takes at most, where none is asked for."""
    share_bytes = (_slots_bytes(data) + _free_bytes(data)) // DRAM_SHARE_OF_AVAILABLE
    return max(share_bytes // MIB * MIB, MIN_DRAM_BYTES)


def _refusal(group: list[TierFiles], free_bytes: int) -> str:
    settings = " and ".join(tier.setting for tier in group)
    kinds = " and ".join(tier.kind for tier in group)
    taken_bytes = sum(tier.taken_bytes for tier in group)
    return (
        f"{settings}: the filesystem of {group[0].directory} has {format_size(free_bytes)} free, and "
        f"{format_size(taken_bytes)} in {kinds}; {_advice(group, taken_bytes + int(free_bytes * _PROPOSED_SHARE))}"
    )


def _advice(group: list[TierFiles], most_bytes: int) -> str:
    """Return which capacities are possible, in the proportion in which they were asked for."""
    possible_bytes = _shares(group, most_bytes)
    if possible_bytes[-1] < group[-1].least_bytes and group[-1].name == "nvme":
        possible_bytes = [*_shares(group[:-1], most_bytes), 0]
    if group[0].name == "dram" and possible_bytes[0] < MIN_DRAM_BYTES:
        return f"a DRAM tier takes at least {format_size(MIN_DRAM_BYTES)}"
    if possible_bytes == [0]:
        return "0 is no tier"
    if len(group) == 1:
        return f"'{format_size(possible_bytes[0])}' is possible"
    dram, nvme = (format_size(each) if each else "0" for each in possible_bytes)
    return f"[dram] capacity = '{dram}' with [nvme] capacity = '{nvme}' is possible"


def _shares(group: list[TierFiles], most_bytes: int) -> list[int]:
    asked_bytes = sum(tier.capacity_bytes for tier in group)
    return [most_bytes * tier.capacity_bytes // asked_bytes // MIB * MIB for tier in group]


def _segment_sizes_bytes(directory: Path) -> list[int]:
    return [file.stat().st_size for file in directory.glob("*.seg")]


def _slots_bytes(data: Path) -> int:
    """Return what slots in a plain directory take: those of a tmpfs are on no disk."""
    slots = data / "dram" / "slots"
    with suppress(FileNotFoundError, PermissionError):
        if slots.stat().st_dev == data.stat().st_dev:
            with os.scandir(slots) as entries:
                return sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries)
    return 0


def _existing(directory: Path) -> Path:
    while not os.path.exists(directory):
        directory = directory.parent
    return directory


def _free_bytes(directory: Path) -> int:
    found = os.statvfs(_existing(directory))
    return found.f_bavail * found.f_frsize


_PROPOSED_SHARE = 0.9
"""Of the free space, where more was asked for: the index and files that others write need room, too."""
