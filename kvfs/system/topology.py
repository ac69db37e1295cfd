"""Where this machine's RDMA cards are, how far its NUMA nodes are from each other, and what its caches hold, as the
kernel says.

Responsibility: values out of sysfs, and which cards are nearest to some nodes. Invariants: a card of which the kernel
does not say where it is, as of one that is software, is as near as any. Concurrency: reads /sys when it is asked, for
caches once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

SYS: Final = Path("/sys")
_USUAL_CACHE_BYTES: Final = 32 << 20
_ACTIVE: Final = "4:"
"""Of a port's state, as `4: ACTIVE` (Linux, drivers/infiniband/core/sysfs.c)."""


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of a card that is up."""

    name: str
    """As UCX_NET_DEVICES has it: `mlx5_0:1`."""
    numa_node: int | None
    """None where the kernel does not say."""


def list_numbers(text: str) -> set[int]:
    """Return the numbers of a list as the kernel writes it: `0-1,3`."""
    ranges = (each.split("-") for each in text.strip().split(",") if each)
    return {number for each in ranges for number in range(int(each[0]), int(each[-1]) + 1)}


def rdma_ports(sys: Path = SYS) -> list[RdmaPort]:
    """Return the ports that are up, by name."""
    ports = []
    for card in sorted(sys.glob("class/infiniband/*")):
        node = None
        with suppress(OSError, ValueError):
            said = int((card / "device/numa_node").read_text())
            node = said if said >= 0 else None
        for port in sorted(card.glob("ports/*"), key=lambda path: int(path.name)):
            with suppress(OSError):
                if (port / "state").read_text().startswith(_ACTIVE):
                    ports.append(RdmaPort(f"{card.name}:{port.name}", node))
    return ports


def node_distances(sys: Path = SYS) -> dict[int, dict[int, int]]:
    """Return how far nodes are from each other, 10 from themselves (ACPI's SLIT); nothing where none are known."""
    nodes = sys / "devices/system/node"
    try:
        online = sorted(list_numbers((nodes / "online").read_text()))
        rows = {node: (nodes / f"node{node}/distance").read_text().split() for node in online}
    except OSError:
        return {}
    return {node: dict(zip(online, map(int, row), strict=True)) for node, row in rows.items()}


def nearest_ports(
    ports: Sequence[RdmaPort], nodes: Collection[int], distances: Mapping[int, Mapping[int, int]]
) -> list[RdmaPort]:
    """Return the ports that are nearest to any of these nodes; all, where nothing says that some are nearer."""

    def distance(port: RdmaPort, node: int) -> int | None:
        return None if port.numa_node is None else distances.get(node, {}).get(port.numa_node)

    near = set()
    for node in nodes:
        known = {each: far for each in ports if (far := distance(each, node)) is not None}
        near |= {each for each in ports if each not in known or known[each] == min(known.values())}
    return [each for each in ports if each in near] if near else list(ports)


@cache
def last_level_cache_bytes(sys: Path = SYS) -> int:
    """Return what the largest cache of the first processor holds; where the kernel does not say, as much as many have.

    The C library says of some processors what all of their caches hold together (sysconf, _SC_LEVEL3_CACHE_SIZE).
    """
    sizes = [_USUAL_CACHE_BYTES]
    with suppress(OSError, ValueError):
        caches = sorted((sys / "devices/system/cpu/cpu0/cache").glob("index*/size"))
        sizes = [int(each.read_text().strip().removesuffix("K")) << 10 for each in caches] or sizes
    return max(sizes)
