"""What a GPU and its driver are like: python -m bench.gpu.facts

Responsibility: facts that the design of the GPU tier rests on, printed one a line: attributes, what a process without
a context takes of the device, what a context takes, what making, mapping and registering memory cost, and how long the
smallest operations take.

Concurrency: one thread; each fact that a context would spoil comes from a process of its own.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

from bench.gpu.memory import MADV_POPULATE_WRITE, device_area, host_area
from kvfs._native.cuda.driver import Context, Device, open_driver
from kvfs.errors import KvfsError
from kvfs.limits import GIB, MIB

SEGMENT_BYTES = 128 * MIB
ATTRIBUTES = {
    75: "compute capability, major",
    76: "compute capability, minor",
    91: "registered memory has its host address",
    99: "registration of host memory",
    102: "virtual memory management",
    103: "export as POSIX descriptors",
    113: "read-only registration",
    115: "memory pools",
    125: "events between processes",
    141: "virtual memory management of host memory",
}
WITHOUT_CONTEXT = """
import sys
from kvfs._native.cuda.driver import open_driver
device = open_driver().devices()[0]
allocation = device.create(1 << 30)
print(allocation.export(), flush=True)
sys.stdin.read()
"""
WITH_CONTEXT = """
import sys
from kvfs._native.cuda.driver import open_driver
context = open_driver().devices()[0].retain_context()
print(context.memory_bytes, flush=True)
sys.stdin.read()
"""


def fact(name: str, value: object) -> None:
    print(f"{name:64} {value}", flush=True)


def microseconds(call: Callable[[], object], turns: int = 2000) -> float:
    samples = []
    for _ in range(turns):
        began = perf_counter()
        call()
        samples.append(perf_counter() - began)
    return round(median(samples) * 1e6, 2)


def milliseconds(call: Callable[[], object]) -> float:
    began = perf_counter()
    call()
    return round((perf_counter() - began) * 1e3, 2)


def taken_by_a_process(code: str) -> dict[str, object]:
    """Return what the device has less while a process runs, and whether the driver lists the process."""
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    before = nvml.nvmlDeviceGetMemoryInfo(handle).used
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        used = nvml.nvmlDeviceGetMemoryInfo(handle).used - before
        listed = [
            (entry.pid, entry.usedGpuMemory) for entry in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        ]
        pid = process.pid
        process.kill()
        began = perf_counter()
        while nvml.nvmlDeviceGetMemoryInfo(handle).used > before and perf_counter() - began < 5:
            pass
        gone_ms = round((perf_counter() - began) * 1e3, 1)
    after = [entry.pid for entry in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    return {
        "MiB": round(used / MIB, 1),
        "own pid": pid,
        "listed (pid, bytes)": listed,
        "free after a kill, ms": gone_ms,
        "listed afterwards": after,
    }


def registration(context: Context, size_bytes: int, *, populate: bool, huge: bool) -> str:
    """Return what registering memory of a file in memory costs."""
    fd = os.memfd_create("slots", 0x0004 if huge else 0)  # MFD_HUGETLB
    try:
        os.ftruncate(fd, size_bytes)
        with mmap.mmap(fd, size_bytes) as pages:
            populated_ms = milliseconds(lambda: pages.madvise(MADV_POPULATE_WRITE)) if populate else 0.0
            began = perf_counter()
            held = context.register(ctypes.addressof(ctypes.c_char.from_buffer(pages)), size_bytes)
            register_ms = round((perf_counter() - began) * 1e3, 1)
            unregister_ms = milliseconds(held.unregister)
    except (OSError, KvfsError) as error:
        return f"not here: {error}"
    finally:
        os.close(fd)
    return f"populate {populated_ms} ms, register {register_ms} ms, unregister {unregister_ms} ms"


def read_only_registration(context: Context, path: Path) -> str:
    path.write_bytes(os.urandom(MIB))
    fd = os.open(path, os.O_RDWR)
    try:
        with mmap.mmap(fd, MIB, prot=mmap.PROT_READ | mmap.PROT_WRITE) as pages:
            context.register(
                ctypes.addressof(ctypes.c_char.from_buffer(pages)), MIB, read_only=True
            ).unregister()
    except (OSError, KvfsError) as error:
        return f"refused: {error}"
    finally:
        os.close(fd)
        path.unlink()
    return "taken"


def segments(device: Device) -> None:
    made = []
    create_us = microseconds(lambda: made.append(device.create(SEGMENT_BYTES)), 4)
    fact("cuMemCreate of 128 MiB, us", create_us)
    fact("export, us", microseconds(lambda: os.close(made[0].export()), 100))
    maps = []
    fact(
        "reserve, map and set access to 128 MiB, us",
        microseconds(lambda: maps.append(device.map(made[0])), 100),
    )
    fact("unmap, us", microseconds(lambda: maps.pop().unmap(), 100))
    fact("release, us", microseconds(lambda: made.pop().release(), 4))


def smallest(context: Context) -> None:
    stream, event = context.stream(), context.event()
    area, host = device_area(context, 4 * MIB), host_area(context, 4 * MIB)

    def copied(size_bytes: int, to: int, source: int) -> float:
        def one() -> None:
            stream.copy(to, source, size_bytes)
            event.record(stream)
            event.synchronize()

        return microseconds(one, 500)

    def marked() -> None:
        event.record(stream)
        event.query()

    fact("event: record and query, us", microseconds(marked))
    for size in (4 << 10, 64 << 10, MIB):
        fact(f"host to device, {size >> 10} KiB, waited for, us", copied(size, area.address, host.address))
        fact(f"device to host, {size >> 10} KiB, waited for, us", copied(size, host.address, area.address))
    fact("within the device, 64 KiB, waited for, us", copied(64 << 10, area.address + MIB, area.address))
    for each in (area, host):
        each.close()


def main() -> None:
    device = open_driver().devices()[0]
    fact("device", f"{device.name}, {device.uuid}, {device.total_bytes} bytes")
    fact("granularity of allocations, bytes", device.granularity_bytes)
    for number, name in ATTRIBUTES.items():
        fact(f"attribute {number}: {name}", device.attribute(number))
    try:
        fact(
            "a process with 1 GiB made and exported, no context",
            json.dumps(taken_by_a_process(WITHOUT_CONTEXT)),
        )
        fact("a process with a context and nothing else", json.dumps(taken_by_a_process(WITH_CONTEXT)))
    except ImportError as error:
        fact("what processes take", f"not measured: {error}")
    segments(device)
    began = perf_counter()
    context = device.retain_context()
    fact("making the primary context, ms", round((perf_counter() - began) * 1e3, 1))
    for size in (GIB, 4 * GIB):
        for populate, huge in ((True, False), (False, False), (True, True)):
            kind = (
                f"{'huge pages' if huge else 'small pages'}, {'populated' if populate else 'not populated'}"
            )
            fact(
                f"registering {size // GIB} GiB, {kind}",
                registration(context, size, populate=populate, huge=huge),
            )
    for folder in ("/dev/shm", "/var/tmp"):
        fact(
            f"registering a file in {folder}",
            read_only_registration(context, Path(folder) / f"kvfs-{os.getpid()}"),
        )
    smallest(context)


if __name__ == "__main__":
    main()
