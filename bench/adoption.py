"""Figures of a store with a million objects: its start after a stop, its stop, its memory.

Responsibility: fill a service of its own with small blocks, or named objects of a cache, through its client, stop it,
start it on what it left, and time the first that is read. All figures of one kind come from one such run of `kvfs
bench`, which takes two minutes for blocks and ten for named objects, and LEAST_BYTES of memory.

Figures: seconds from the start of the process to the first hit; seconds of its processors until then; seconds from
SIGTERM to the end of the process; bytes of its anonymous memory for each object (the table and the payloads are shared
memory), over those of the same service with none. There is no baseline.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

import kvfs
from bench import keys
from bench.measure import Result
from bench.places import wait_ready
from kvfs.errors import DeviceMissing, KvfsError
from kvfs.limits import GIB, KIB, STOP_WAIT_S
from kvfs.system import linux

OBJECTS: Final = 1_000_000
PAYLOAD_BYTES: Final = 4 * KIB
CHAIN_BLOCKS: Final = 64
"""Blocks of one prompt, each the parent of the next, put at once."""
DRAM_BYTES: Final = 7 * GIB
LEAST_BYTES: Final = 8 * GIB
"""Of memory that is available: the objects take 4 GiB, the table 0.4."""
BUCKET: Final = "bench"
NAMESPACE: Final = replace(keys.NAMESPACE, block_tokens=16)


@dataclass(frozen=True, slots=True)
class Adopted:
    """One run."""

    start_s: float
    cpu_s: float
    stop_s: float
    bytes_before: float
    """For each object, of the service that was filled."""
    bytes_after: float
    """For each object, of the one that took them over."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What the service is filled with, and how one of them is read back."""

    fill: Callable[[kvfs.Client, int], None]
    read: Callable[[kvfs.Client, int], bytes]


def start_adopt_1m(_: float) -> Result:
    return Result("start.adopt_1m", measure().start_s, "s")


def start_adopt_1m_cpu(_: float) -> Result:
    return Result("start.adopt_1m_cpu", measure().cpu_s, "s")


def stop_keep_1m(_: float) -> Result:
    return Result("stop.keep_1m", measure().stop_s, "s")


def memory_block_filled(_: float) -> Result:
    return Result("memory.block_filled", measure().bytes_before, "bytes")


def memory_block_adopted(_: float) -> Result:
    return Result("memory.block_adopted", measure().bytes_after, "bytes")


def start_adopt_1m_files(_: float) -> Result:
    return Result("start.adopt_1m_files", measure("files").start_s, "s")


def start_adopt_1m_files_cpu(_: float) -> Result:
    return Result("start.adopt_1m_files_cpu", measure("files").cpu_s, "s")


def stop_keep_1m_files(_: float) -> Result:
    return Result("stop.keep_1m_files", measure("files").stop_s, "s")


def memory_object_filled(_: float) -> Result:
    return Result("memory.object_filled", measure("files").bytes_before, "bytes")


def memory_object_adopted(_: float) -> Result:
    return Result("memory.object_adopted", measure("files").bytes_after, "bytes")


@cache
def measure(kind: str = "blocks", count: int = OBJECTS) -> Adopted:
    """Run it once for a kind. Raises DeviceMissing where there is too little memory."""
    available = _meminfo("MemAvailable")
    if available < LEAST_BYTES * count // OBJECTS:
        raise DeviceMissing(f"bench: a million objects need {LEAST_BYTES >> 30} GiB of available memory")
    with tempfile.TemporaryDirectory(prefix="kvfs-bench-") as name:
        home = Path(name)
        try:
            return _measure(home, KINDS[kind], count)
        finally:
            with suppress(OSError):  # where it is none, it is a directory
                linux.unmount(home / "data/dram", linux.MNT_DETACH)


def _measure(home: Path, kind: Kind, count: int) -> Adopted:
    with _service(home) as process, kvfs.connect(home / "mnt") as client:
        empty = _anonymous_bytes(process.pid)
        kind.fill(client, count)
        filled = _anonymous_bytes(process.pid)
        client.close()
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(2 * STOP_WAIT_S)
        stop_s = time.monotonic() - began
    began = time.monotonic()
    with _service(home) as process, kvfs.connect(home / "mnt") as client:
        if kind.read(client, count // 2) != payload_of(count // 2):
            raise KvfsError("bench: an object that was stored before the restart is not the same")
        start_s, cpu_s = time.monotonic() - began, _cpu_s(process.pid)
        while client.status()["unverified"]:
            time.sleep(0.1)
        adopted = _anonymous_bytes(process.pid)
    return Adopted(start_s, cpu_s, stop_s, (filled - empty) / count, (adopted - empty) / count)


@contextmanager
def _service(home: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a service that keeps what it has for the next one."""
    command = [
        sys.executable,
        "-m",
        "kvfs",
        "serve",
        "--mount",
        str(home / "mnt"),
        "--data",
        str(home / "data"),
    ]
    command += ["--nvme", "0", "--dram", str(DRAM_BYTES), "--slots", str(1 << 20), "--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            wait_ready(process)
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(2 * STOP_WAIT_S)


def _fill_blocks(client: kvfs.Client, count: int) -> None:
    with client.blocks(NAMESPACE, bucket=BUCKET) as opened:
        for first in range(0, count, CHAIN_BLOCKS):
            numbers = range(first, min(first + CHAIN_BLOCKS, count))
            digests = [digest_of(number) for number in numbers]
            opened.put(digests, [payload_of(number) for number in numbers], [None, *digests[:-1]])


def _read_block(client: kvfs.Client, number: int) -> bytes:
    with client.blocks(NAMESPACE, bucket=BUCKET) as opened:
        into = bytearray(PAYLOAD_BYTES)
        opened.get_into([digest_of(number)], [into])
        return bytes(into)


def _fill_files(client: kvfs.Client, count: int) -> None:
    client.create_bucket(BUCKET)
    for number in range(count):
        client.put(_name_of(number), payload_of(number))


def _read_file(client: kvfs.Client, number: int) -> bytes:
    return client.get(_name_of(number))


def _name_of(number: int) -> str:
    """Name a file as engines do: in a directory of its own, named by a hash."""
    return f"{BUCKET}/model/{digest_of(number).hex()}/layer.safetensors"


KINDS: Final = {"blocks": Kind(_fill_blocks, _read_block), "files": Kind(_fill_files, _read_file)}


def payload_of(number: int) -> bytes:
    return digest_of(number) + bytes(PAYLOAD_BYTES - 16)


def digest_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()[:16]


def _anonymous_bytes(pid: int) -> int:
    return _field(Path(f"/proc/{pid}/status"), "RssAnon")


def _meminfo(name: str) -> int:
    return _field(Path("/proc/meminfo"), name)


def _field(file: Path, name: str) -> int:
    """Return the bytes of a line that says kB."""
    line = next(each for each in file.read_text().splitlines() if each.startswith(f"{name}:"))
    return int(line.split()[1]) * KIB


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
