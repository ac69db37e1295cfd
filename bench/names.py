"""Figures of names on a mount whose store has the NVMe tier: made, found, listed, renamed and removed.

Responsibility: one function for each figure, from places to a Result. Both sides run the very same system calls, one in
a cache bucket of the mount, the other in a directory of the filesystem that the tier's segments lie on.

What is renamed or removed on the mount was synced before, so that the log has it and each change needs a record.
On the disk nothing is: a removal there costs least while the file has no blocks.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns

from bench.measure import Plan, Result, Side, compare
from bench.places import serve
from kvfs.limits import KIB, MIB

DRAM_BYTES = 512 * MIB
NVME_BYTES = 512 * MIB
FILES = 128
"""Files that are renamed, found or removed in turn."""
LISTED_FILES = 10_000
REMOVED_FILES = 10_000
SYNC_EVERY = 256
"""Of many files, how many are made before one is synced: what was queued before it is on the device then, too."""


@dataclass(frozen=True, slots=True)
class NamePlaces:
    """Directories to measure in."""

    mount: Path
    """A bucket on the mount."""
    disk: Path
    """A directory on the same filesystem as the service's segments."""


@contextmanager
def open_name_places(folder: Path) -> Iterator[NamePlaces]:
    """Run a service with both tiers in `folder`, and stop it at the end."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvfs-bench-", dir=folder)))
        sizes = ("--dram", str(DRAM_BYTES), "--nvme", str(NVME_BYTES))
        mount, _ = stack.enter_context(serve(home, *sizes))
        places = NamePlaces(mount / "bench", home / "disk")
        for directory in (places.mount, places.disk):
            directory.mkdir()
            stack.callback(shutil.rmtree, directory)
        yield places


def rename(places: NamePlaces, seconds: float) -> Result:
    with _files(places.mount, is_synced=True) as subject, _files(places.disk) as baseline:
        return compare("mount.rename", _rename(subject), _rename(baseline), Plan(seconds, batch=FILES))


def unlink(places: NamePlaces, seconds: float) -> Result:
    with _files(places.mount, is_synced=True) as subject, _files(places.disk) as baseline:
        sides = _unlink(subject, is_synced=True), _unlink(baseline)
        return compare("mount.unlink", *sides, Plan(seconds, batch=FILES))


def stat(places: NamePlaces, seconds: float) -> Result:
    with _files(places.mount) as subject, _files(places.disk) as baseline:
        return compare("mount.stat", _stat(subject), _stat(baseline), Plan(seconds, batch=64, inner=32))


def create_close_4k(places: NamePlaces, seconds: float) -> Result:
    """Make a file, write 4 KiB, close it."""
    with _directory(places.mount) as subject, _directory(places.disk) as baseline:
        return compare(
            "mount.create_close_4k", _create(subject), _create(baseline), Plan(seconds, batch=FILES)
        )


def readdir_10k(places: NamePlaces, seconds: float) -> Result:
    """List names and types; the figures are of one entry."""
    with _listed(places.mount) as subject, _listed(places.disk) as baseline:
        found = compare("mount.readdir_10k", _list(subject), _list(baseline), Plan(seconds, batch=4))
    assert found.baseline is not None
    return Result(found.name, found.value / LISTED_FILES, "us", found.baseline / LISTED_FILES, found.ratio)


def remove_10k(places: NamePlaces, seconds: float) -> Result:
    """Remove a directory of 10,000 files of 4 KiB, as `rm -r` does, once; the figures are of one file."""
    took = [_remove_many(where) for where in (places.mount, places.disk)]
    return Result("mount.remove_10k", took[0], "us", took[1], took[1] / took[0])


# --- sides -----------------------------------------------------------------------------------------------
@contextmanager
def _directory(where: Path) -> Iterator[Path]:
    directory = where / "files"
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def _write(path: Path, *, is_synced: bool) -> None:
    with path.open("wb", buffering=0) as file:
        file.write(bytes(4 * KIB))
        if is_synced:
            os.fsync(file)


@contextmanager
def _files(where: Path, *, is_synced: bool = False) -> Iterator[list[str]]:
    with _directory(where) as directory:
        files = [directory / f"file-{n:03}" for n in range(FILES)]
        for file in files:
            _write(file, is_synced=is_synced)
        yield [str(file) for file in files]


@contextmanager
def _listed(where: Path) -> Iterator[Path]:
    with _directory(where) as directory:
        _make_many(directory, LISTED_FILES)
        yield directory


def _make_many(directory: Path, count: int) -> None:
    for n in range(count):
        _write(directory / f"file-{n:05}", is_synced=n % SYNC_EVERY == 0 or n + 1 == count)


def _rename(files: list[str]) -> Side:
    names = [(file, f"{file}-renamed") for file in files]

    def move(n: int) -> None:
        names[n % FILES] = target, source = names[n % FILES][::-1]
        os.rename(source, target)

    return Side(move)


def _unlink(files: list[str], *, is_synced: bool = False) -> Side:
    def make() -> None:
        for file in files:
            _write(Path(file), is_synced=is_synced)

    return Side(lambda n: os.unlink(files[n % FILES]), make)


def _stat(files: list[str]) -> Side:
    return Side(lambda n: os.stat(files[n % FILES]))


def _create(directory: Path) -> Side:
    payload, made = os.urandom(4 * KIB), deque[str]()

    def make(n: int) -> None:
        name = f"{directory}/file-{n}"
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(descriptor, payload)
        os.close(descriptor)
        made.append(name)

    def trim() -> None:
        while made:
            os.unlink(made.popleft())

    return Side(make, trim)


def _list(directory: Path) -> Side:
    def read(n: int) -> None:
        with os.scandir(directory) as entries:
            if sum(entry.is_file() for entry in entries) != LISTED_FILES:
                raise EOFError("a short listing")

    return Side(read)


def _remove_many(where: Path) -> float:
    directory = where / "many"
    directory.mkdir()
    _make_many(directory, REMOVED_FILES)
    start = perf_counter_ns()
    shutil.rmtree(directory)
    return (perf_counter_ns() - start) / (1000 * REMOVED_FILES)
