"""The cost of listing a large directory for other processes: `python -m bench.listing --names 100000`.

Responsibility: put many names into a directory of an empty store, serve it, list it again and again in one process
while another creates files elsewhere, each right after the last, and time both; in between the creates are timed
alone. The listing reads names and types, as `find` and `os.listdir` do. The directory of the creates has
too many names for the native loop to know them, so that each create needs the thread that lists.

The figures are milliseconds, with no baseline but the creates alone. Concurrency: two processes beside the service.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

from bench.places import serve
from kvfs import limits
from kvfs.limits import MIB
from tiers.model.objects import Attributes, Name
from tiers.recovery.start import StoreOptions, open_store

BUCKET: Final = b"b"
DRAM_BYTES: Final = 512 * MIB
ALONE_S: Final = 1.0
"""How long files are created without a listing beside them, in each round."""


def seed(data: Path, count: int) -> None:
    """Make the directory `many/`, with so many empty directories, and `beside/`."""
    with open_store(StoreOptions(data, dram_bytes=DRAM_BYTES)) as store:
        store.create_bucket(BUCKET, uid=0, gid=0)
        store.make_directory(Name(BUCKET, b"many/"), Attributes(mode=0o755))
        store.make_directory(Name(BUCKET, b"beside/"), Attributes(mode=0o755))
        for i in range(limits.MAX_LEARNED_NAMES + 1):
            store.make_directory(Name(BUCKET, b"beside/%d/" % i), Attributes(mode=0o755))
        for i in range(count):
            store.make_directory(Name(BUCKET, b"many/block-%06x/" % i), Attributes(mode=0o755))


def make_files(directory: Path, count: int) -> None:
    """Make empty files, through the mount: objects in DRAM end with the process that seeds."""
    for i in range(count):
        os.close(os.open(directory / f"block-{i:06x}", os.O_WRONLY | os.O_CREAT))


def create_until(directory: str, until: Event) -> list[float]:
    """Create and remove one file after another; return the milliseconds of each creation."""
    times, number = [], 0
    while not until.is_set():
        path = f"{directory}/{os.getpid()}-{number % 8}"
        number += 1
        start = time.perf_counter_ns()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        times.append((time.perf_counter_ns() - start) / 1e6)
        os.close(descriptor)
        os.unlink(path)
    return times


def creator(directory: str, until: Event, results: Any) -> None:
    results.put(create_until(directory, until))


class Creates:
    """Create files in another process during a `with` block; `times` are there after it."""

    def __init__(self, directory: Path) -> None:
        self._until = multiprocessing.Event()
        self._results: Any = multiprocessing.Queue()
        self._process = multiprocessing.Process(
            target=creator, args=(str(directory), self._until, self._results)
        )
        self.times: list[float] = []

    def __enter__(self) -> Creates:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._until.set()
        self.times = self._results.get()
        self._process.join()


def list_names(directory: Path) -> float:
    """List a directory; return the milliseconds."""
    start = time.perf_counter_ns()
    with os.scandir(directory) as entries:
        for _ in entries:
            pass
    return (time.perf_counter_ns() - start) / 1e6


def summary(times: list[float]) -> dict[str, float]:
    cuts = quantiles(times, n=100)
    return {"p50": median(times), "p99": cuts[98], "max": max(times), "count": len(times)}


def measure_round(mount: Path, listings: int) -> dict[str, Any]:
    """Time the creates alone, then beside `listings` listings, and the median listing."""
    bucket = mount / BUCKET.decode()
    beside_where = bucket / "beside"
    with Creates(beside_where) as alone:
        time.sleep(ALONE_S)
    with Creates(beside_where) as beside:
        taken = [list_names(bucket / "many") for _ in range(listings)]
    quiet = list_names(bucket / "many")
    return {
        "alone": summary(alone.times),
        "beside": summary(beside.times),
        "listing": median(taken),
        "quiet": quiet,
    }


def median_of(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each field."""
    merged: dict[str, Any] = {}
    for key, value in rounds[0].items():
        values = [each[key] for each in rounds]
        merged[key] = median_of(values) if isinstance(value, dict) else round(median(values), 3)
    return merged


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.listing", description=__doc__)
    parser.add_argument("--names", type=int, default=100_000)
    parser.add_argument("--kind", choices=("directories", "files"), default="directories")
    parser.add_argument("--mode", choices=("passthrough", "native", "plain"), default="passthrough")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--listings", type=int, default=3, help="beside the creates of one round")
    options = parser.parse_args()
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvfs-bench-")))
        seed(home / "data", options.names if options.kind == "directories" else 0)
        mount, _ = stack.enter_context(serve(home, "--dram", str(DRAM_BYTES), "--mode", options.mode))
        if options.kind == "files":
            make_files(mount / BUCKET.decode() / "many", options.names)
        rounds = [measure_round(mount, options.listings) for _ in range(options.rounds)]
    print(json.dumps({"what": vars(options), "ms": median_of(rounds)}, indent=1))


if __name__ == "__main__":
    main()
