"""A flipped bit in a page's header of the name index costs no name: not at the start, and not when rows come later."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import pytest

from kvfs.index.names import NameIndex
from kvfs.index.rows import BucketRow, NameRow
from tests.support.seeds import SEED, rounds
from tiers.recovery.index_check import IndexReader, IndexWalk

PAGE_BYTES = 4096
NAMES = {b"k%04d" % number: number for number in range(1, 1200)}
LATER = {b"k%04dx" % number: 5000 + number for number in range(1, 1200)}
HEADER_BITS = 48
"""Flags and the bounds of the free room, from byte 10 of a page on."""


def row(identity: int) -> NameRow:
    return NameRow(identity, identity, 1, 0o644, 0, 0, 0, 0, identity, 0, b"", b"")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of an index whose names came in no order, so that no page is full."""
    path = tmp_path_factory.mktemp("whole")
    order = list(NAMES)
    random.Random(1).shuffle(order)
    with NameIndex.open(path, map_size_bytes=1 << 20) as names:
        names.put_bucket(BucketRow(b"b", 1, "cache", 0, 0, 0o755, 0, 0))
        for key in order:
            names.put(b"b", key, row(NAMES[key]))
    return (path / "data.mdb").read_bytes()


def headers(data: bytes) -> list[int]:
    """Where the pages of a tree, in use or left by older transactions, begin."""
    pages = range(2 * PAGE_BYTES, len(data), PAGE_BYTES)
    return [
        at
        for at in pages
        if struct.unpack_from("<Q", data, at)[0] == at // PAGE_BYTES and data[at + 10] in (1, 2)
    ]


def names_of(path: Path) -> set[bytes]:
    with IndexReader(path) as reader:
        return {key for _, key, found in reader.rows() if found is not None}


def later(path: Path) -> int:
    """Put names between all others in a process of its own, which a damaged page may end; its exit code.

    A hundred at a time: later transactions write over pages that earlier ones let go.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with NameIndex.open(path) as names:
                rows = [(b"b\0" + key, row(number).encode()) for key, number in LATER.items()]
                for at in range(0, len(rows), 100):
                    names.put_many(rows[at : at + 100])
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.seeded
def test_damaged_headers_are_found_or_harmless(whole: bytes, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    file, copy = tmp_path / "data.mdb", tmp_path / "data.new"
    found = 0
    for number in range(rounds(gate=50, soak=150)):
        at, bit = rng.choice(headers(whole)), rng.randrange(HEADER_BITS)
        damaged = bytearray(whole)
        damaged[at + 10 + bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        where = f"KVFS_TEST_SEED={SEED}, flip {number}: bit {bit} of the page at {at}"
        with IndexWalk(tmp_path, copy=copy) as walk:
            if not walk.is_whole():
                found += 1
                continue
            copy.replace(file)
        assert names_of(tmp_path) == set(NAMES), where
        assert later(tmp_path) == 0, where
        assert names_of(tmp_path) == {*NAMES, *LATER}, where
        (tmp_path / "lock.mdb").unlink()
    assert found, f"KVFS_TEST_SEED={SEED}"
