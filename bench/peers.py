"""kvfs's client beside other stores of KV blocks: `python -m bench.peers --python SIDE_ENVIRONMENT/bin/python`.

Responsibility: start each peer that an environment given has, in a process of its own (`bench.peer_store`), run the
same work on kvfs and on it in turns, and print medians and ratios. A peer that is not installed is named, and left out.

Each turn is a median of its own; the figure is the median of those. Peers' environments are apart from kvfs's.

Concurrency: one thread; one process works at a time, the others wait for a line.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import IO

from rich.console import Console
from rich.table import Table

import kvfs
from bench import peer_store
from bench.client import open_blocks
from bench.peer_store import BATCH, FIGURES, LARGE, STORES, memory, need, timed_us, works
from bench.places import open_places
from kvfs.errors import KvfsError
from kvfs.limits import MIB

TURNS = 5
SECONDS = 5.0
END_S = 20.0
TITLES = {
    "mooncake": "Mooncake, TCP",
    "mooncake_local": "Mooncake, one process",
    "redis": "Redis, Unix socket",
    "lmcache_fs": "LMCache fs, tmpfs",
}
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 * MIB), "MALLOC_TRIM_THRESHOLD_": str(512 * MIB)}
"""For peers' processes. By default glibc maps memory of a MiB anew for each use, and the page faults then cost Redis's
client more than its work: a put took 1,920 us, with this 340, and 16 gets 18 ms, with this 4.5."""

Times = tuple[float, float]
"""Median and 99th percentile, in us."""
Run = Callable[[str, float], Times]
"""Figure and seconds to its times."""


class KvfsStore:
    """Call as peers are called: a block or a batch for each call, into memory of the caller's."""

    def __init__(self, blocks: kvfs.Blocks, into: memoryview) -> None:
        self._blocks = blocks
        self._places = [into[i * MIB : (i + 1) * MIB] for i in range(BATCH)]
        self._first = {size: [into[:size]] for size in (4 * peer_store.KIB, MIB)}

    def key(self, digest: bytes) -> bytes:
        return digest

    def piece(self, data: memoryview) -> memoryview:
        return data

    def put(self, key: bytes, piece: memoryview) -> None:
        need(self._blocks.put([key], [piece]) == [True])

    def put_batch(self, keys: Sequence[bytes], pieces: Sequence[memoryview]) -> None:
        need(self._blocks.put(keys, pieces) == [True] * len(keys))

    def get(self, key: bytes, size: int) -> memoryview:
        need(self._blocks.get_into([key], self._first[size]) == [size])
        return self._first[size][0]

    def get_batch(self, keys: Sequence[bytes]) -> None:
        need(self._blocks.get_into(keys, self._places) == [MIB] * BATCH)

    def match(self, keys: Sequence[bytes]) -> None:
        need(self._blocks.match(keys) == len(keys))

    def remove(self, keys: Sequence[bytes]) -> None:
        self._blocks.remove(keys)


@contextmanager
def open_peer(python: str, name: str, folder: Path) -> Iterator[Run | str]:
    """Start what runs its figures; or, where it is not installed, why."""
    with (
        open(folder / f"{name}.log", "w+") as log,
        side_process(python, str(peer_store.__file__), name, str(folder), errors=log) as (to, replies),
    ):

        def run(figure: str, seconds: float) -> Times:
            print("run", figure, seconds, file=to, flush=True)
            p50, p99 = _reply(replies, name, log).split()
            return float(p50), float(p99)

        said = _reply(replies, name, log)
        yield run if said == "ready" else said.removeprefix("missing: ")


@contextmanager
def side_process(
    python: str, program: str, *arguments: str, errors: IO[str] | None = None
) -> Iterator[tuple[IO[str], IO[str]]]:
    """Run a program of the benches in an environment apart; yield what it reads and what it says. The end of its input
    ends it. `errors` gets its standard error; None: this process's own."""
    with subprocess.Popen(
        [python, "-P", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=_environment(python),
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdin, process.stdout
        finally:
            process.stdin.close()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.terminate()


def _reply(replies: IO[str], name: str, log: IO[str]) -> str:
    if line := replies.readline():
        return line.strip()
    log.seek(0)
    raise KvfsError(f"bench: {name} ended: {log.read()[-2000:]}")


def _environment(python: str) -> dict[str, str]:
    """Set paths: Mooncake's wheel needs CUDA's runtime, and LMCache's is unpacked beside what engines.mk installs."""
    home = Path(python).absolute().parent.parent
    libraries = [str(each) for each in home.glob("lib/python*/site-packages/nvidia/cuda_runtime/lib")]
    extra = {"LD_LIBRARY_PATH": libraries, "PYTHONPATH": [str(home / "wheels")]}
    joined = {name: ":".join([*each, os.environ.get(name, "")]).strip(":") for name, each in extra.items()}
    return {**os.environ, **KEEP_MEMORY, **{name: value for name, value in joined.items() if value}}


def _enter_first(stack: ExitStack, pythons: list[str], name: str, folder: Path) -> Run | None:
    """Return the peer in the first environment that has it."""
    for python in pythons:
        found = stack.enter_context(open_peer(python, name, folder))
        if not isinstance(found, str):
            return found
        print(f"bench: {name} is missing in {python}, left out: {found}", file=sys.stderr)
    return None


def measure(pythons: list[str], seconds: float) -> dict[str, dict[str, Times]]:
    """Return times by figure and store, kvfs first: medians of turns."""
    with ExitStack() as stack:
        places = stack.enter_context(open_places(None))
        print(f"bench: the mount runs in this mode: {places.mode}", file=sys.stderr)
        blocks = stack.enter_context(open_blocks(places))
        ours = works(KvfsStore(blocks, memory(BATCH * MIB)), memory(LARGE * MIB))
        stores: dict[str, Run] = {"kvfs": lambda figure, turn_s: timed_us(ours[figure], turn_s)}
        for name in STORES:
            if (run := _enter_first(stack, pythons, name, places.plain)) is not None:
                stores[name] = run
        found: dict[str, dict[str, Times]] = {}
        for figure in FIGURES:
            turns = [
                {name: run(figure, seconds / TURNS) for name, run in stores.items()} for _ in range(TURNS)
            ]
            found[figure] = {
                name: (median(turn[name][0] for turn in turns), median(turn[name][1] for turn in turns))
                for name in stores
            }
            print(f"bench: {figure} done", file=sys.stderr)
        return found


def print_table(found: dict[str, dict[str, Times]]) -> None:
    peers = [name for name in TITLES if name in found[FIGURES[0]]]
    table = Table(
        "figure", "kvfs, us", caption="median / p99; in parentheses: a peer's median by that of kvfs"
    )
    for name in peers:
        table.add_column(f"{TITLES[name]}, us", justify="right", no_wrap=True)
    table.add_column("ahead of kvfs")
    for figure, times in found.items():
        ours, p99 = times["kvfs"]
        cells = [
            f"{times[name][0]:.1f} / {times[name][1]:.0f} ({times[name][0] / ours:.2f})" for name in peers
        ]
        ahead = ", ".join(name for name in peers if times[name][0] < ours) or "none"
        table.add_row(figure, f"{ours:.1f} / {p99:.0f}", *cells, ahead)
    Console(width=max(Console().width, 120)).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--python",
        action="append",
        metavar="PATH",
        help="of an environment with peers; may be given several times; default: this one",
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="per figure and store (default: %(default)s)"
    )
    options = parser.parse_args()
    print_table(measure(options.python or [sys.executable], options.seconds))


if __name__ == "__main__":
    main()
