"""Figures of doors: tmpfs and the mount.

Responsibility: one function for each figure, from places to a Result. Both sides of a comparison run the very
same operation on another directory, with the same sizes, offsets and destination.

The working set is 128 files of 1 MiB, read in turn: four times a last-level cache of 32 MiB, so that bytes
come from memory on both sides. Everything is read once before it is timed.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

from bench.measure import Operation, Plan, Result, Side, compare
from bench.places import Places
from kvfs.limits import KIB, MIB

FILES = 128
KEPT_FILES = 16
"""Files that a writing side leaves before it deletes the oldest: bounds what both sides hold."""


def tmpfs_pread_1m(places: Places, seconds: float) -> Result:
    """Compare the backing tmpfs with one of default pages: the effect of the page size alone."""
    with _read_side(places.backing, _pread_1m) as subject, _read_side(places.plain, _pread_1m) as baseline:
        return compare("tmpfs.pread_1m", subject, baseline, Plan(seconds, batch=FILES))


def mount_pread_1m(places: Places, seconds: float) -> Result:
    with _read_side(places.mount, _pread_1m) as subject, _read_side(places.backing, _pread_1m) as baseline:
        return compare("mount.pread_1m", subject, baseline, Plan(seconds, batch=FILES))


def mount_pread_4k(places: Places, seconds: float) -> Result:
    with _read_side(places.mount, _pread_4k) as subject, _read_side(places.backing, _pread_4k) as baseline:
        return compare("mount.pread_4k", subject, baseline, Plan(seconds, batch=64, inner=32))


def mount_open_read_close_1m(places: Places, seconds: float) -> Result:
    with _files(places.mount) as subject, _files(places.backing) as baseline:
        return compare(
            "mount.open_read_close_1m",
            Side(_open_read_close(subject)),
            Side(_open_read_close(baseline)),
            Plan(seconds, batch=32),
        )


def mount_create_write_rename_1m(places: Places, seconds: float) -> Result:
    """Compare with a tmpfs of default pages, where a path connector would write otherwise."""
    with _write_side(places.mount) as subject, _write_side(places.plain) as baseline:
        return compare("mount.create_write_rename_1m", subject, baseline, Plan(seconds, batch=KEPT_FILES))


# --- sides -----------------------------------------------------------------------------------------------
@contextmanager
def _files(where: Path) -> Iterator[list[Path]]:
    """Make the working set, written in one piece each and read once."""
    payload = os.urandom(MIB)
    files = [where / f"read-{n:03}" for n in range(FILES)]
    for file in files:
        file.write_bytes(payload)
    try:
        for file in files:
            file.read_bytes()
        yield files
    finally:
        for file in files:
            file.unlink(missing_ok=True)


@contextmanager
def _read_side(where: Path, make: Callable[[list[int]], Operation]) -> Iterator[Side]:
    with ExitStack() as stack:
        descriptors = []
        for file in stack.enter_context(_files(where)):
            descriptors.append(os.open(file, os.O_RDONLY))
            stack.callback(os.close, descriptors[-1])
        yield Side(make(descriptors))


def _pread_1m(descriptors: list[int]) -> Operation:
    into, preadv = [bytearray(MIB)], os.preadv

    def read(n: int) -> None:
        if preadv(descriptors[n % FILES], into, 0) != MIB:
            raise EOFError("a short read")

    return read


def _pread_4k(descriptors: list[int]) -> Operation:
    """Read 4 KiB at places in a random order that is the same on both sides."""
    into, preadv, random = [bytearray(4 * KIB)], os.preadv, Random(4)
    offsets = [random.randrange(MIB // (4 * KIB)) * 4 * KIB for _ in range(1021)]

    def read(n: int) -> None:
        if preadv(descriptors[n % FILES], into, offsets[n % 1021]) != 4 * KIB:
            raise EOFError("a short read")

    return read


def _open_read_close(files: list[Path]) -> Operation:
    into, names = [bytearray(MIB)], [str(file) for file in files]

    def read(n: int) -> None:
        descriptor = os.open(names[n % FILES], os.O_RDONLY)
        try:
            if os.preadv(descriptor, into, 0) != MIB:
                raise EOFError("a short read")
        finally:
            os.close(descriptor)

    return read


@contextmanager
def _write_side(where: Path) -> Iterator[Side]:
    payload, made = os.urandom(MIB), deque[str]()

    def write(n: int) -> None:
        draft, name = f"{where}/draft-{n}", f"{where}/sealed-{n}"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            if os.write(descriptor, payload) != MIB:
                raise EOFError("a short write")
        finally:
            os.close(descriptor)
        os.rename(draft, name)
        made.append(name)

    def trim(keep: int = KEPT_FILES) -> None:
        while len(made) > keep:
            os.unlink(made.popleft())

    try:
        yield Side(write, trim)
    finally:
        trim(0)
