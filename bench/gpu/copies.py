"""Copies and checksums on a GPU, each beside one copy of the same bytes: python -m bench.gpu.copies [--json FILE]

Responsibility: copies of many pieces between a device and registered memory, and within a device, as a `Copier` starts
them, by the driver's batch, and by the package's kernel with other numbers of thread blocks; checksums; loads that are
checked on the device behind their copies.

All ways of one size take turns, the first one last in every other round; a figure is the median of the rounds. A
round is timed on the host, from the start of its copies to their completion event, so it has what starting them
costs. On the stand-in (KVFS_LIBCUDA) the same program runs, and its figures mean nothing.

Concurrency: one thread.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

from bench.gpu.memory import Area, Listed, device_area, exported_area, host_area
from kvfs._native.cuda.copies import Copier, Plan
from kvfs._native.cuda.driver import Context, Event, Module, Stream, open_driver
from kvfs._native.cuda.images import CHECKSUM_THREADS, COPY_THREADS, kernel_image
from kvfs.limits import KIB, MIB

ROUNDS = 15
MOST_BYTES = 64 * MIB
MOST_PIECES = 8192
FEW_PIECES = 64
"""Of a small load: a block by layers."""
SIZES = [4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, MIB, 2 * MIB]
LINK_BLOCKS = [1, 2, 4, 8]
DEVICE_BLOCKS = [132, 264]
Start = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Figure:
    """A rate in GB/s (1e9 bytes), its baseline's, and how much of it that is; `start_us` is what starting it took."""

    name: str
    value: float
    baseline: float
    ratio: float
    start_us: float

    def __str__(self) -> str:
        rates = f"{self.value:9.2f} GB/s  {self.baseline:9.2f}  x {self.ratio:5.2f}"
        return f"{self.name:44} {rates}  start {self.start_us:8.1f} us"


class Gpu:
    """Holds what all figures use of one device."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.stream: Stream = context.stream()
        self.done: Event = context.event()
        self.copier = Copier(context, kernel_image("copy"))
        self._copies: Module = context.load_module(kernel_image("copy"))
        self._checksums: Module = context.load_module(kernel_image("xxh3"))

    def copy_by_kernel(self, pieces: Listed, blocks: int) -> None:
        self._copies.launch("kvfs_copy", self.stream, blocks, COPY_THREADS, [pieces.address, pieces.rows])
        self.done.record(self.stream)

    def hash(self, columns: Listed) -> None:
        """Start checksums of objects in columns: addresses, sizes, and where the checksums go."""
        count = columns.rows
        parts = [columns.address + 8 * count * column for column in range(3)]
        self._checksums.launch("kvfs_xxh3", self.stream, count, CHECKSUM_THREADS, parts)
        self.done.record(self.stream)

    def copy(self, to: int, source: int, size_bytes: int) -> None:
        self.stream.copy(to, source, size_bytes)
        self.done.record(self.stream)

    def start(self, plan: Plan, *, within_device: bool = False) -> None:
        self.copier.start(plan, self.stream, self.done, within_device=within_device)

    def start_and_hash(self, plan: Plan, columns: Listed) -> None:
        self.start(plan)
        self.hash(columns)

    def compared(self, moved_bytes: int, ways: dict[str, Start]) -> Iterator[Figure]:
        """Measure ways to do the same; the last is the baseline."""
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for turn in range(ROUNDS + 2):
            for name in ways if turn % 2 else reversed(ways):
                sample = self._timed(ways[name])
                if turn >= 2:
                    seen[name].append(sample)
        rates = {name: moved_bytes / median(s for s, _ in samples) / 1e9 for name, samples in seen.items()}
        baseline = rates[list(ways)[-1]]
        for name, rate in rates.items():
            start_us = median(s for _, s in seen[name]) * 1e6
            yield Figure(name, rate, baseline, rate / baseline, start_us)

    def _timed(self, start: Start) -> tuple[float, float]:
        began = perf_counter()
        start()
        started = perf_counter()
        self.done.synchronize()
        return perf_counter() - began, started - began


def drawn(to: Area, source: Area, count: int, size_bytes: int) -> list[tuple[int, int, int]]:
    """Draw pieces of one size, both sides scattered over twice their bytes."""
    draw = random.Random(size_bytes)
    targets, sources = (draw.sample(range(2 * count), count) for _ in range(2))
    return [
        (to.address + size_bytes * target, source.address + size_bytes * start, size_bytes)
        for target, start in zip(targets, sources, strict=True)
    ]


def planned(to: Area, source: Area, pieces: list[tuple[int, int, int]]) -> Plan:
    packed = b"".join(number.to_bytes(8, sys.byteorder) for piece in pieces for number in piece)
    return Plan(packed, [(to.address, to.size_bytes)], [(source.address, source.size_bytes)])


def copy_figures(gpu: Gpu, name: str, to: Area, source: Area, blocks: list[int]) -> Iterator[Figure]:
    """Measure all sizes in one direction: the copier, the driver's batch, and the kernel, against one copy."""
    within = blocks is DEVICE_BLOCKS
    for size in SIZES:
        for count in sorted({FEW_PIECES, min(MOST_PIECES, MOST_BYTES // size)}):
            if count * size > MOST_BYTES:
                continue
            pieces = drawn(to, source, count, size)
            plan, label = planned(to, source, pieces), f"{name} {count} x {size // KIB} KiB"
            with Listed(gpu.context, pieces) as listed:
                ways: dict[str, Start] = {
                    f"{label} copier": partial(gpu.start, plan, within_device=within),
                    f"{label} batch": partial(plan.start, gpu.stream, gpu.done),
                }
                ways |= {f"{label} kernel x{n}": partial(gpu.copy_by_kernel, listed, n) for n in blocks}
                ways[f"{label} one"] = partial(gpu.copy, to.address, source.address, count * size)
                yield from gpu.compared(count * size, ways)


def directions(gpu: Gpu) -> Iterator[Figure]:
    """Measure host to device, device to host, and within a device, the same from another allocation's descriptor."""
    area_bytes = 2 * MOST_BYTES
    with (
        host_area(gpu.context, area_bytes) as host,
        device_area(gpu.context, area_bytes) as first,
        device_area(gpu.context, area_bytes) as second,
        exported_area(gpu.context, area_bytes) as shared,
    ):
        yield from copy_figures(gpu, "h2d", first, host, LINK_BLOCKS)
        yield from copy_figures(gpu, "d2h", host, first, LINK_BLOCKS)
        yield from copy_figures(gpu, "d2d", second, first, DEVICE_BLOCKS)
        for size in (64 * KIB, 4 * MIB, MOST_BYTES):
            label = f"one copy of {size // KIB} KiB"
            ways: dict[str, Start] = {
                f"{label} from a descriptor": partial(gpu.copy, second.address, shared.address, size),
                f"{label} of its own": partial(gpu.copy, second.address, first.address, size),
            }
            yield from gpu.compared(size, ways)


def checksum_figures(gpu: Gpu) -> Iterator[Figure]:
    """Measure checksums of what lies on the device, against a copy of it within the device."""
    for count, size in [(1, 2 * MIB), (64, 2 * MIB), (128, 2 * MIB), (1024, 64 * KIB), (4096, 16 * KIB)]:
        with device_area(gpu.context, count * size) as source, device_area(gpu.context, count * size) as to:
            addresses = [source.address + size * place for place in range(count)]
            with Listed(gpu.context, [addresses, [size] * count, [0] * count], rows=count) as columns:
                ways: dict[str, Start] = {
                    f"checksum {count} x {size // KIB} KiB": partial(gpu.hash, columns),
                    f"copy of {count} x {size // KIB} KiB": partial(
                        gpu.copy, to.address, source.address, count * size
                    ),
                }
                yield from gpu.compared(count * size, ways)


def verified_figures(gpu: Gpu) -> Iterator[Figure]:
    """Measure loads from registered memory with the checksums on the device behind them, against the same without."""
    for count, size in [(8, 2 * MIB), (64, 2 * MIB), (1024, 64 * KIB)]:
        with (
            device_area(gpu.context, 2 * count * size) as to,
            host_area(gpu.context, 2 * count * size) as source,
        ):
            pieces = drawn(to, source, count, size)
            plan = planned(to, source, pieces)
            columns = [[target for target, _, _ in pieces], [size] * count, [0] * count]
            with Listed(gpu.context, columns, rows=count) as listed:
                ways: dict[str, Start] = {
                    f"load and check {count} x {size // KIB} KiB": partial(gpu.start_and_hash, plan, listed),
                    f"load {count} x {size // KIB} KiB": partial(gpu.start, plan),
                }
                yield from gpu.compared(count * size, ways)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.copies", description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    driver = open_driver()
    device = driver.devices()[0]
    print(f"{device.name}, CUDA {driver.version}, {driver.path}")
    gpu = Gpu(device.retain_context())
    figures = []
    for measured in (checksum_figures(gpu), verified_figures(gpu), directions(gpu)):
        for figure in measured:
            print(figure, flush=True)
            figures.append(asdict(figure))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
