"""Figures of what a Conductor's index is asked: which instances hold how much of a prompt of 4,096 tokens.

Responsibility: one function for the cases of Mooncake's benchmark of its indexer, and one for readers beside a writer.
A prompt in blocks of 16 tokens and 1 to 64 replicas, which all hold it (common), of which one holds it and each other a
prompt as long (disjoint), of which none holds it (miss), of which one is asked about (filtered). The writer adds and
removes a block without a pause. A query begins with tokens: hashing is part of it, the same on both sides, and all that
a miss takes. The baseline is the Python index, whose keys are ready, behind one lock where several threads ask.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import median
from time import perf_counter_ns
from typing import Final

from bench import keys
from bench.measure import Plan, Result, Side, compare
from kvfs._native.cluster.index import ClusterIndex
from kvfs.keys import HASH_BYTES, prefix_hashes, split_keys
from scheduler.routing.prefix_index import PrefixIndex

TOKENS: Final = 4_096
BLOCK_TOKENS: Final = 16
MANY: Final = 64
READERS: Final = 4
TURNS: Final = 6
BATCH: Final = 64
NAMESPACE: Final = replace(keys.NAMESPACE, block_tokens=BLOCK_TOKENS)
CASES: Final = {
    "common1": ("common", 1),
    "common8": ("common", 8),
    "common64": ("common", MANY),
    "disjoint64": ("disjoint", MANY),
    "miss64": ("miss", MANY),
    "filtered64": ("filtered", MANY),
}

Answer = dict[int, int]
"""Blocks that each replica holds; one that holds none is left out."""
Query = Callable[[], Answer]


@dataclass(frozen=True, slots=True)
class Case:
    """The same blocks in both indexes, and the question of both."""

    index: ClusterIndex
    prefixes: PrefixIndex
    native: Query
    python: Query


def query(name: str, seconds: float) -> Result:
    """Ask both indexes in turns."""
    case = case_of(*CASES[name])
    return compare(
        f"conductor.query_{name}",
        Side(lambda _: case.native()),
        Side(lambda _: case.python()),
        Plan(seconds, BATCH),
    )


def query_readers64(seconds: float) -> Result:
    """Ask from several threads while another one writes, one index at a time, in turns."""
    case = case_of("common", MANY)
    lock, block = threading.Lock(), bytes(HASH_BYTES)

    def write_native() -> None:
        case.index.add(0, block)
        case.index.remove(0, block)

    def write_python() -> None:
        with lock:
            case.prefixes.add(0, 0)
            case.prefixes.invalidate(0, 0)

    def locked() -> Answer:
        with lock:
            return case.python()

    sides: list[tuple[Query, Callable[[], None]]] = [(case.native, write_native), (locked, write_python)]
    samples: list[list[float]] = [[], []]
    for _ in range(TURNS):
        for (ask, write), times in zip(sides, samples, strict=True):
            times += read_beside(ask, write, seconds / TURNS / len(sides))
    values, others = (sorted(times) for times in samples)
    value, other = median(values), median(others)
    p99, other_p99 = (times[len(times) * 99 // 100] for times in (values, others))
    return Result("conductor.query_readers64", value, "us", other, other / value, p99, other_p99)


def read_beside(ask: Query, write: Callable[[], None], seconds: float) -> list[float]:
    """Return how many microseconds each query of all readers took."""
    deadline = perf_counter_ns() + int(seconds * 1e9)
    samples: list[list[float]] = [[] for _ in range(READERS)]

    def read(times: list[float]) -> None:
        while not times or perf_counter_ns() < deadline:
            begin = perf_counter_ns()
            ask()
            times.append((perf_counter_ns() - begin) / 1000)

    with _writing(write):
        readers = [threading.Thread(target=read, args=(times,)) for times in samples]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    return [time for times in samples for time in times]


@contextmanager
def _writing(write: Callable[[], None]) -> Iterator[None]:
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            write()

    writer = threading.Thread(target=run)
    writer.start()
    try:
        yield
    finally:
        stop.set()
        writer.join()


@cache
def case_of(kind: str, replicas: int) -> Case:
    """Fill both indexes for a case."""
    tokens = _prompt(0)
    index, prefixes = ClusterIndex(replicas * TOKENS), PrefixIndex()
    for replica in range(replicas):
        held = prefix_hashes(NAMESPACE, _prompt(replica) if kind == "disjoint" else tokens)
        index.add(replica, held)
        for number in _numbers(held):
            prefixes.add(number, replica)
    asked = _prompt(replicas) if kind == "miss" else tokens
    numbers = _numbers(prefix_hashes(NAMESPACE, asked))
    native, mask = (_ask_one, 1) if kind == "filtered" else (_ask_all, (1 << replicas) - 1)
    python = partial(_ask_python, prefixes, asked, numbers, mask)
    return Case(index, prefixes, partial(native, index, asked), python)


def _prompt(number: int) -> array[int]:
    """Make prompts that differ from the first token on."""
    tokens = array("I", (100 + n % 30_000 for n in range(TOKENS)))
    tokens[0] += number
    return tokens


def _numbers(hashes: bytes) -> list[int]:
    return [int.from_bytes(key, "big") for key in split_keys(hashes)]


# --- the queries -----------------------------------------------------------------------------------------
def _ask_all(index: ClusterIndex, tokens: array[int]) -> Answer:
    return dict(index.match(prefix_hashes(NAMESPACE, tokens)))


def _ask_one(index: ClusterIndex, tokens: array[int]) -> Answer:
    (depth,) = index.depths(prefix_hashes(NAMESPACE, tokens), [1])
    return {0: depth} if depth else {}


def _ask_python(prefixes: PrefixIndex, tokens: array[int], numbers: list[int], mask: int) -> Answer:
    prefix_hashes(NAMESPACE, tokens)
    return depths_of(prefixes, numbers, mask)


def depths_of(prefixes: PrefixIndex, numbers: list[int], mask: int) -> Answer:
    """Return how many blocks, from the first on without a gap, each source in a mask holds."""
    ends: list[tuple[int, int]] = []
    depth = 0
    for run in prefixes.runs(numbers):
        ends.append((mask & ~run.holders, depth))
        mask &= run.holders
        depth += run.blocks
    ends.append((mask, depth))
    return {source: depth for mask, depth in ends if depth for source in _sources(mask)}


def _sources(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
