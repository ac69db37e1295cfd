"""Figures of the engines' client: batches of blocks against copying memory, on a live service.

Responsibility: one function for each figure, from places to a Result. The baseline of a read or a write is a copy of
as many bytes between memory of huge pages; both sides have the same destination (reads) or the same source (writes),
and walk a working set of 128 MiB, four times a last-level cache of 32 MiB, so that bytes come from memory on both
sides. The baseline of a match is py-lmdb's getmulti of the same keys.

Concurrency: one thread of one process beside the service.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random

import lmdb

import kvfs
from bench.doors import FILES
from bench.keys import NAMESPACE
from bench.measure import Plan, Result, Side, compare
from bench.places import Places
from kvfs.limits import KIB, MIB

BATCH = 16
MATCHED = 64
KEPT_BLOCKS = 16
"""Blocks that are put before they are removed: half the drafts granted ahead, so that no put waits for more."""
KEPT_BYTES = 64 * MIB
"""Bytes that are put before they are removed."""


def get_into_1m(places: Places, seconds: float) -> Result:
    with open_blocks(places) as blocks, _memory(FILES * MIB) as source, _memory(MIB) as into:
        keys, places_of = _fill(blocks, FILES, MIB), [into]

        def read(n: int) -> None:
            if blocks.get_into([keys[n % FILES]], places_of) != [MIB]:
                raise EOFError("a miss")

        def copy(n: int) -> None:
            start = n % FILES * MIB
            into[:] = source[start : start + MIB]

        return compare("client.get_into_1m", Side(read), Side(copy), Plan(seconds, batch=FILES))


def get_into_4k(places: Places, seconds: float) -> Result:
    """Read in a random order that is the same on both sides."""
    size, count = 4 * KIB, FILES * MIB // (4 * KIB)
    order = Random(4).sample(range(count), count)
    with open_blocks(places) as blocks, _memory(FILES * MIB) as source, _memory(size) as into:
        keys, places_of = _fill(blocks, count, size), [into]

        def read(n: int) -> None:
            if blocks.get_into([keys[order[n % count]]], places_of) != [size]:
                raise EOFError("a miss")

        def copy(n: int) -> None:
            start = order[n % count] * size
            into[:] = source[start : start + size]

        return compare("client.get_into_4k", Side(read), Side(copy), Plan(seconds, batch=64, inner=32))


def batch16_get_into_1m(places: Places, seconds: float) -> Result:
    """Read 16 blocks in one call, each into its own memory, which both sides fill in turn."""
    with open_blocks(places) as blocks, _memory(FILES * MIB) as source, _memory(BATCH * MIB) as into:
        keys = _fill(blocks, FILES, MIB)
        pieces = [into[i * MIB : (i + 1) * MIB] for i in range(BATCH)]

        def read(n: int) -> None:
            start = n * BATCH % FILES
            if blocks.get_into(keys[start : start + BATCH], pieces) != [MIB] * BATCH:
                raise EOFError("a miss")

        def copy(n: int) -> None:
            start = n * BATCH % FILES * MIB
            for i, piece in enumerate(pieces):
                piece[:] = source[start + i * MIB : start + (i + 1) * MIB]

        try:
            return compare(
                "client.batch16_get_into_1m", Side(read), Side(copy), Plan(seconds, batch=FILES // BATCH)
            )
        finally:
            for piece in pieces:
                piece.release()


def put_1m(places: Places, seconds: float) -> Result:
    return _put("client.put_1m", places, seconds, MIB)


def put_4m(places: Places, seconds: float) -> Result:
    return _put("client.put_4m", places, seconds, 4 * MIB)


def batch16_put_64k(places: Places, seconds: float) -> Result:
    return _put("client.batch16_put_64k", places, seconds, 64 * KIB, 16)


def batch16_put_1m(places: Places, seconds: float) -> Result:
    return _put("client.batch16_put_1m", places, seconds, MIB, 16)


def batch8_put_4m(places: Places, seconds: float) -> Result:
    return _put("client.batch8_put_4m", places, seconds, 4 * MIB, 8)


def put_1m_full(places: Places, seconds: float) -> Result:
    """Put into a store that is full, so that each block evicts an older one; nothing is removed."""
    return _put("client.put_1m_full", places, seconds, MIB, fill=True)


def _put(
    name: str, places: Places, seconds: float, size: int, count: int = 1, *, fill: bool = False
) -> Result:
    """Put `count` new blocks in one call, from memory that is walked in order; remove them after each batch of calls,
    unless the store is to be kept full."""
    around = FILES * MIB // (size * count)
    with open_blocks(places) as blocks, _memory(FILES * MIB) as source, _memory(FILES * MIB) as into:
        made: list[bytes] = []
        pieces = [source[at : at + size] for at in range(0, FILES * MIB, size)]
        groups = [pieces[at : at + count] for at in range(0, len(pieces), count)]
        if fill:
            _fill_up(blocks, places, pieces)

        def put(n: int) -> None:
            keys = [os.urandom(16) for _ in range(count)] if count > 1 else [os.urandom(16)]
            made.extend(keys)
            if blocks.put(keys, groups[n % around]) != [True] * count:
                raise EOFError("not new")

        def trim() -> None:
            if not fill:
                blocks.remove(made)
            made.clear()

        def copy(n: int) -> None:
            start = n * 37 % around * size * count
            for i, piece in enumerate(groups[n % around]):
                into[start + i * size : start + (i + 1) * size] = piece

        batch = max(1, min(KEPT_BYTES // (size * count), KEPT_BLOCKS // count))
        try:
            return compare(name, Side(put, trim), Side(copy), Plan(seconds, batch=batch))
        finally:
            trim()
            for piece in pieces:
                piece.release()


def _fill_up(blocks: kvfs.Blocks, places: Places, pieces: list[memoryview]) -> None:
    """Put blocks until the store evicts: as many bytes as it has, and a half."""
    found = os.statvfs(places.mount)
    for n in range(found.f_blocks * found.f_frsize * 3 // 2 // len(pieces[0])):
        blocks.put([os.urandom(16)], [pieces[n % len(pieces)]])


def match_64(places: Places, seconds: float) -> Result:
    """Match 64 keys that are all there, of 32,768, in a list as engines have them."""
    count = FILES * MIB // (4 * KIB)
    with open_blocks(places) as blocks, _lmdb() as environment:
        keys = _fill(blocks, count, 16)
        prompts = [Random(n).sample(keys, MATCHED) for n in range(256)]
        with environment.begin(write=True) as transaction:
            for key in keys:
                transaction.put(key, bytes(48))

        def match(n: int) -> None:
            if blocks.match(prompts[n % 256]) != MATCHED:
                raise EOFError("a miss")

        with environment.begin() as transaction, transaction.cursor() as cursor:

            def look_up(n: int) -> None:
                if len(cursor.getmulti(prompts[n % 256])) != MATCHED:
                    raise EOFError("a miss")

            return compare("client.match_64", Side(match), Side(look_up), Plan(seconds, batch=64, inner=8))


# --- what both sides work on -----------------------------------------------------------------------------
@contextmanager
def open_blocks(places: Places) -> Iterator[kvfs.Blocks]:
    """Open blocks of a bucket of its own, which is removed at the end."""
    name = f"bench-blocks-{os.getpid()}"
    with kvfs.connect(places.mount.parent) as client:
        try:
            with client.blocks(NAMESPACE, bucket=name) as blocks:
                yield blocks
        finally:
            while found := [entry.key for entry in client.list(f"{name}/", delimiter=None)]:
                blocks_left = client.blocks(NAMESPACE, bucket=name)
                blocks_left.remove([bytes.fromhex(str(key)[-32:]) for key in found])
            client.remove_bucket(name)


def _fill(blocks: kvfs.Blocks, count: int, size: int) -> list[bytes]:
    """Put blocks of random bytes and read each once; return their keys."""
    keys = [os.urandom(16) for _ in range(count)]
    data, into = os.urandom(size), bytearray(size)
    for at in range(0, count, 64):
        some = keys[at : at + 64]
        blocks.put(some, [data] * len(some))
    if any(result != size for key in keys for result in blocks.get_into([key], [into])):
        raise EOFError("the service evicts what is measured: give it more memory")
    return keys


@contextmanager
def _memory(size: int) -> Iterator[memoryview]:
    """Map memory of huge pages, where the machine has them, written once."""
    with mmap.mmap(-1, size) as mapping:
        mapping.madvise(mmap.MADV_HUGEPAGE)
        with memoryview(mapping) as view:
            chunk = os.urandom(min(size, MIB))
            for at in range(0, size, len(chunk)):
                view[at : at + len(chunk)] = chunk
            yield view


@contextmanager
def _lmdb() -> Iterator[lmdb.Environment]:
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvfs-bench-"))
        environment = lmdb.open(directory, map_size=64 * MIB, sync=False)
        stack.callback(environment.close)
        yield environment
