"""What is measured on a storage device: reads of 1 MiB at queue depth 8, checksums verified, against fio.

Responsibility: one function for each figure, from a folder on the device to a Result. One side reads objects that a
store has on the device only, one after the other and again; fio (https://fio.readthedocs.io) reads a written file of
the same size, from its start to its end and again, and verifies nothing. Both go around the page cache. Where the
store's segments are on a block device without a filesystem, it and fio have a loop device each, over files there.

The sides take turns in rounds of seconds, each going first in every other one, and the figure is the median of
the rounds: a neighbour on the same device moves single rounds by a tenth.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

import trio

from bench.measure import Result
from kvfs.errors import DeviceMissing
from kvfs.limits import GIB, MIB
from tiers.device.device import Device, Kind, open_device
from tiers.model.objects import Attributes, Name, ObjectInfo
from tiers.recovery.start import NvmeOptions, StoreOptions, start_store
from tiers.store.store import Store

FILE_BYTES = 1 * GIB
READ_BYTES = MIB
DRAM_BYTES = 64 * MIB
DEPTH = 8
ROUND_S = 2.0
LEAST_ROUNDS = 3
TIER_SHARE = 2
"""How many times the objects' bytes the tier has, in files or on a device."""


@dataclass(slots=True)
class Objects:
    """A store whose objects are on the device only."""

    store: Store
    device: Device
    infos: list[ObjectInfo]


def read_1m_qd8(folder: Path, seconds: float, *, kind: Kind = "auto", size_bytes: int = FILE_BYTES) -> Result:
    """Return MiB/s of objects read through the store, beside fio's io_uring. Needs 2.5 times `size_bytes` in `folder`.

    Raises DeviceMissing without fio.
    """
    return trio.run(partial(_read_files, folder, seconds, kind, size_bytes))


def device_read_1m(
    folder: Path, seconds: float, *, kind: Kind = "auto", size_bytes: int = FILE_BYTES
) -> Result:
    """Return MiB/s of objects read through a store on a block device, beside fio's io_uring on another. Needs root, and
    3 times `size_bytes` in `folder`.

    Raises DeviceMissing without fio, or loop devices.
    """
    return trio.run(partial(_read_devices, folder, seconds, kind, size_bytes))


async def _read_files(folder: Path, seconds: float, kind: Kind, size_bytes: int) -> Result:
    fio = _find_fio()
    with tempfile.TemporaryDirectory(prefix="kvfs-bench-", dir=folder) as name:
        file = Path(name) / "fio"
        await _write_file(file, kind, size_bytes)
        async with _stored(Path(name) / "store", kind, size_bytes) as subject:
            baseline = partial(_run_fio, fio, file, size_bytes)
            return await _measure("nvme.read_1m_qd8", subject, baseline, seconds)


async def _read_devices(folder: Path, seconds: float, kind: Kind, size_bytes: int) -> Result:
    fio = _find_fio()
    with tempfile.TemporaryDirectory(prefix="kvfs-bench-", dir=folder) as name, ExitStack() as attached:
        files = [Path(name) / "fio.img", Path(name) / "segments.img"]
        await _write_file(files[0], kind, size_bytes)
        with files[1].open("xb") as file:  # what the store does not find empty it refuses
            os.posix_fallocate(file.fileno(), 0, TIER_SHARE * size_bytes)
        read, segments = (attached.enter_context(_loop_device(file)) for file in files)
        async with _stored(Path(name) / "store", kind, size_bytes, (segments,)) as subject:
            baseline = partial(_run_fio, fio, read, size_bytes)
            return await _measure("nvme.device_read_1m", subject, baseline, seconds)


def _find_fio() -> str:
    """Return the program. Raises DeviceMissing."""
    fio = shutil.which("fio")
    if fio is None:
        raise DeviceMissing("fio, which the device is measured against, is missing: make bench installs it")
    return fio


async def _measure(
    name: str, subject: Objects, baseline: Callable[[], Awaitable[float]], seconds: float
) -> Result:
    values, others = await _in_turns(partial(_read_verified, subject), baseline, seconds)
    value, other = median(values), median(others)
    return Result(name, value, "MiB/s", other, value / other)


@contextmanager
def _loop_device(file: Path) -> Iterator[Path]:
    """Attach a block device whose sectors are a file's, past the page cache. Raises DeviceMissing."""
    try:
        path = _losetup("--find", "--show", "--direct-io=on", str(file))
    except (OSError, subprocess.CalledProcessError) as error:
        why = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        raise DeviceMissing(f"a loop device, which this is measured on, cannot be had: {why}") from error
    try:
        yield Path(path)
    finally:
        _losetup("--detach", path)


def _losetup(*arguments: str) -> str:
    return subprocess.run(
        ["losetup", *arguments], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


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


async def _write_file(path: Path, kind: Kind, size_bytes: int) -> None:
    """Write the whole file and sync it: reads of preallocated but unwritten extents never reach the device."""
    device = open_device(kind, DEPTH)
    try:
        fd = await device.create_file(path, size_bytes)
        async with device.buffer() as buffer:
            piece = buffer[:READ_BYTES]
            for offset in range(0, size_bytes, READ_BYTES):
                piece[:] = os.urandom(READ_BYTES)
                await device.write(fd, offset, piece)
        await device.sync(fd)
    finally:
        await device.aclose()


@asynccontextmanager
async def _stored(
    path: Path, kind: Kind, size_bytes: int, devices: tuple[Path, ...] = ()
) -> AsyncIterator[Objects]:
    """Open a store with `size_bytes` of objects, durable on the device, none of them in DRAM."""
    device = open_device(kind, DEPTH)
    try:
        store = await start_store(
            StoreOptions(
                path,
                dram_bytes=DRAM_BYTES,
                nvme=NvmeOptions(device, TIER_SHARE * size_bytes, devices=devices),
            )
        )
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.run)
                infos = [await _put(store, number) for number in range(size_bytes // READ_BYTES)]
                yield Objects(store, device, infos)
                nursery.cancel_scope.cancel()
        finally:
            store.close()
    finally:
        with trio.CancelScope(shield=True):
            await device.aclose()


async def _put(store: Store, number: int) -> ObjectInfo:
    """Return one object, written to the device and evicted from DRAM."""
    if number == 0:
        store.create_bucket(b"bench", uid=0, gid=0)
    name = Name(b"bench", b"%d" % number)
    draft = store.reserve(READ_BYTES, uid=0)
    descriptor = store.open_draft(draft)
    try:
        os.write(descriptor, os.urandom(READ_BYTES))
    finally:
        os.close(descriptor)
    info = store.seal(draft, name, Attributes())
    await store.journal.persist(info.object_id)
    store.evict(names=[name])
    found = store.lookup(name)
    assert isinstance(found, ObjectInfo)
    assert found.extent is None
    return found


async def _read_verified(objects: Objects) -> float:
    """Return one round: MiB/s."""
    numbers, moved, started = count(), 0, trio.current_time()
    deadline = started + ROUND_S

    async def read() -> None:
        nonlocal moved
        async with objects.device.buffer() as buffer:
            while trio.current_time() < deadline:
                info = objects.infos[next(numbers) % len(objects.infos)]
                size_bytes = await objects.store.read_into(info, buffer)
                moved += size_bytes  # not in one: the other readers' sums would be lost

    async with trio.open_nursery() as nursery:
        for _ in range(DEPTH):
            nursery.start_soon(read)
    return moved / MIB / (trio.current_time() - started)


async def _run_fio(fio: str, path: Path, size_bytes: int) -> float:
    """Return one round: MiB/s."""
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
    parser.add_argument("folder", type=Path, help="on the device, with space for 2.5 times the size")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--kind", choices=("auto", "io_uring", "threads"), default="auto")
    parser.add_argument("--mib", type=int, default=FILE_BYTES // MIB, help="size of each file")
    options = parser.parse_args()
    result = read_1m_qd8(options.folder, options.seconds, kind=options.kind, size_bytes=options.mib * MIB)
    print(json.dumps(result.as_json()))


if __name__ == "__main__":
    main()
