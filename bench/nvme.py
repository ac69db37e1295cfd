"""What is measured on a storage device: reads of 1 MiB at queue depth 8, checksums verified, against fio.

Responsibility: one function for each figure, from a folder on the device to a Result. Both sides read a file of
their own, of the same size and written the same way, from its start to its end and again, around the page cache;
fio (https://fio.readthedocs.io) verifies nothing and keeps nothing.

The sides take turns in rounds of seconds, each going first in every other one, and the figure is the median of
the rounds: a neighbour on the same device moves single rounds by a tenth.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

import trio
import xxhash

from bench.measure import Result
from kvfs.errors import DeviceMissing
from kvfs.limits import GIB, MIB
from tiers.device import Device, Kind, open_device

FILE_BYTES = 1 * GIB
READ_BYTES = MIB
DEPTH = 8
ROUND_S = 2.0
LEAST_ROUNDS = 3


@dataclass(slots=True)
class DeviceFile:
    """A file that the device wrote, with what its pieces of READ_BYTES hash to."""

    device: Device
    fd: int
    checksums: list[int] = field(default_factory=list)


def read_1m_qd8(folder: Path, seconds: float, *, kind: Kind = "auto", size_bytes: int = FILE_BYTES) -> Result:
    """MiB/s of the device beside fio's io_uring. Needs twice `size_bytes` in `folder`. Raises DeviceMissing."""
    return trio.run(partial(_read_against_fio, folder, seconds, kind, size_bytes))


async def _read_against_fio(folder: Path, seconds: float, kind: Kind, size_bytes: int) -> Result:
    fio = shutil.which("fio")
    if fio is None:
        raise DeviceMissing("fio, which the device is measured against, is missing (package fio)")
    with tempfile.TemporaryDirectory(prefix="kvfs-bench-", dir=folder) as name:
        async with _file(Path(name) / "device", kind, size_bytes) as subject:
            async with _file(Path(name) / "fio", kind, size_bytes):
                pass
            values, others = await _in_turns(
                partial(_read_verified, subject),
                partial(_run_fio, fio, Path(name) / "fio", size_bytes),
                seconds,
            )
        value, baseline = median(values), median(others)
        return Result("nvme.read_1m_qd8", value, "MiB/s", baseline, value / baseline)


async def _in_turns(
    subject: Callable[[], Awaitable[float]], baseline: Callable[[], Awaitable[float]], seconds: float
) -> tuple[list[float], list[float]]:
    values: list[float] = []
    others: list[float] = []
    deadline = trio.current_time() + seconds
    while trio.current_time() < deadline or len(values) < LEAST_ROUNDS:
        if len(values) % 2:
            others.append(await baseline())
            values.append(await subject())
        else:
            values.append(await subject())
            others.append(await baseline())
    return values, others


@asynccontextmanager
async def _file(path: Path, kind: Kind, size_bytes: int) -> AsyncIterator[DeviceFile]:
    """Written whole and synced: reads of preallocated but unwritten extents never reach the device."""
    device = open_device(kind, DEPTH)
    try:
        file = DeviceFile(device, device.open_file(path, size_bytes, create=True))
        async with device.buffer() as buffer:
            piece = buffer[:READ_BYTES]
            for offset in range(0, size_bytes, READ_BYTES):
                piece[:] = os.urandom(READ_BYTES)
                file.checksums.append(xxhash.xxh3_64_intdigest(piece))
                await device.write(file.fd, offset, piece)
        await device.sync(file.fd)
        yield file
    finally:
        await device.aclose()


async def _read_verified(file: DeviceFile) -> float:
    """One round: MiB/s."""
    numbers, moved, started = count(), 0, trio.current_time()
    deadline = started + ROUND_S

    async def read() -> None:
        nonlocal moved
        async with file.device.buffer() as buffer:
            while trio.current_time() < deadline:
                piece = next(numbers) % len(file.checksums)
                await file.device.read(
                    file.fd, piece * READ_BYTES, buffer[:READ_BYTES], checksum=file.checksums[piece]
                )
                moved += READ_BYTES

    async with trio.open_nursery() as nursery:
        for _ in range(DEPTH):
            nursery.start_soon(read)
    return moved / MIB / (trio.current_time() - started)


async def _run_fio(fio: str, path: Path, size_bytes: int) -> float:
    """One round: MiB/s."""
    command = [
        *(fio, "--name=read", f"--filename={path}", f"--size={size_bytes}", "--allow_file_create=0"),
        *("--ioengine=io_uring", "--direct=1", "--rw=read", f"--bs={READ_BYTES}", f"--iodepth={DEPTH}"),
        *("--time_based", f"--runtime={ROUND_S}", "--output-format=json"),
    ]
    done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
    if done.returncode != 0:
        raise DeviceMissing(f"fio: {done.stderr.decode(errors='replace').strip()}")
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"]) / MIB


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.nvme", description=__doc__)
    parser.add_argument("folder", type=Path, help="on the device, with space for twice the size")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--kind", choices=("auto", "io_uring", "threads"), default="auto")
    parser.add_argument("--mib", type=int, default=FILE_BYTES // MIB, help="size of each file")
    options = parser.parse_args()
    result = read_1m_qd8(options.folder, options.seconds, kind=options.kind, size_bytes=options.mib * MIB)
    print(json.dumps(result.as_json()))


if __name__ == "__main__":
    main()
