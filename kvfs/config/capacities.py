"""Memory and block devices of this machine: the share that the DRAM tier takes by default, its bound, and the NUMA
nodes that it may lie on.

Responsibility: a capacity that cannot be had is refused before anything is made, with what could be had.

Concurrency: reads /proc, /sys and devices once, at start-up.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from kvfs.config.sizes import format_size
from kvfs.errors import ConfigError
from kvfs.limits import (
    DEFAULT_SLOTS,
    DRAM_BYTES_PER_SLOT,
    DRAM_SHARE_OF_AVAILABLE,
    KIB,
    MAX_NUMA_NODES,
    MAX_SLOTS,
    MIB,
    MIN_DRAM_BYTES,
)
from kvfs.system.topology import list_numbers

_NODES = Path("/sys/devices/system/node")
_STATUS = Path("/proc/self/status")


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, int) else value


NumaNodes = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=MAX_NUMA_NODES, strict=True)], ...],
    BeforeValidator(_listed),
    Field(max_length=MAX_NUMA_NODES),
]
"""Numbers of nodes; a number may stand alone."""


def default_dram_bytes() -> int:
    """Return a quarter of the memory that is free for use now, within this process's memory cgroup; whole MiB."""
    return max(_free_memory_bytes() // DRAM_SHARE_OF_AVAILABLE // MIB * MIB, MIN_DRAM_BYTES)


def default_slots(capacity_bytes: int) -> int:
    """Return as many slots as small blocks fill a DRAM tier of this capacity, or a small tier's objects of any size."""
    return min(max(capacity_bytes // DRAM_BYTES_PER_SLOT, DEFAULT_SLOTS), MAX_SLOTS)


def check_dram_bytes(capacity_bytes: int) -> None:
    """Check that the memory of this machine, or of the memory cgroup, is as large. Raises ConfigError."""
    memory_bytes = min(_meminfo_bytes("MemTotal"), _cgroup_bytes()[0])
    if capacity_bytes > memory_bytes:
        raise ConfigError(
            f"[dram] capacity = '{format_size(capacity_bytes)}': there are {format_size(memory_bytes)} of memory here, "
            f"{format_size(_free_memory_bytes())} of it free now; the default would be "
            f"'{format_size(default_dram_bytes())}'"
        )


def check_numa_nodes(nodes: Sequence[int], capacity_bytes: int) -> None:
    """Check that this process may use the memory of nodes, and that it is as large. Raises ConfigError."""
    allowed = _allowed_nodes()
    shown = f"[dram] numa_nodes = {list(nodes)}"
    for node in nodes:
        if node not in allowed:
            raise ConfigError(
                f"{shown}: node {node} has no memory for this process; those that have: {sorted(allowed)}"
            )
    memory_bytes = sum(_meminfo_bytes("MemTotal", _NODES / f"node{node}" / "meminfo") for node in {*nodes})
    if capacity_bytes > memory_bytes:
        raise ConfigError(
            f"{shown}: they have {format_size(memory_bytes)} of memory, less than [dram] capacity = "
            f"'{format_size(capacity_bytes)}'"
        )


def _allowed_nodes() -> set[int]:
    """Return the nodes with memory that this process may use, as its cpuset says; none where the kernel knows none."""
    try:
        status, there = (
            _STATUS.read_text(errors="replace"),
            list_numbers((_NODES / "has_memory").read_text()),
        )
    except OSError:
        return set()
    _, has_cpusets, allowed = status.partition("Mems_allowed_list:")
    return list_numbers(allowed.partition("\n")[0]) & there if has_cpusets else there


def block_devices_bytes(paths: Sequence[Path]) -> int:
    """Return what block devices have together. Raises ConfigError."""
    total_bytes = 0
    for path in paths:
        with block_device(path, os.O_RDONLY) as (_, size_bytes):
            total_bytes += size_bytes
    return total_bytes


@contextmanager
def block_device(path: Path, flags: int) -> Iterator[tuple[int, int]]:
    """Open a block device; yield its descriptor and its size in bytes. Raises ConfigError where it is none, cannot be
    opened, or, with O_EXCL, is in use."""
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        in_use = "it is mounted, part of another device, or used by another process"
        why = in_use if error.errno == errno.EBUSY else error.strerror
        raise ConfigError(f"[nvme] device = '{path}': {why}") from None
    try:
        if not stat.S_ISBLK(os.fstat(descriptor).st_mode):
            raise ConfigError(f"[nvme] device = '{path}': no block device")
        yield descriptor, os.lseek(descriptor, 0, os.SEEK_END)
    finally:
        os.close(descriptor)


def _free_memory_bytes() -> int:
    most_bytes, used_bytes = _cgroup_bytes()
    return min(_meminfo_bytes("MemAvailable"), max(most_bytes - used_bytes, 0))


def _meminfo_bytes(name: str, path: Path = Path("/proc/meminfo")) -> int:
    for line in path.read_text().splitlines():
        _, is_it, value = line.partition(f"{name}:")
        if is_it:  # of a node there are words before it
            return int(value.split()[0]) * KIB
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_bytes() -> tuple[int, int]:
    """Return what the version 2 memory cgroup may use and does: tmpfs pages are charged to it, whatever /proc says."""
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        path = next(line[len("0::/") :] for line in groups if line.startswith("0::/"))
        group = Path("/sys/fs/cgroup") / path
        most = (group / "memory.max").read_text().strip()
        used_bytes = int((group / "memory.current").read_text())
        return (_UNBOUNDED if most == "max" else int(most)), used_bytes
    except (OSError, StopIteration, ValueError):
        return _UNBOUNDED, 0


_UNBOUNDED = 1 << 62
