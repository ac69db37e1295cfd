"""Fetches of blocks between two processes beside Mooncake's Transfer Engine over TCP, which has no blocks, only memory:
`python -m bench.peer_transfers --python SIDE_ENVIRONMENT/bin/python`.

Responsibility: both move the same bytes over loopback, batch by batch in turns. A fetch asks for blocks by their
hashes, receives them into drafts, verifies and seals them; the engine reads registered memory into such, at addresses
that are known, and verifies nothing. Its time is its own (`bench.peer_transfer_engine`), so that no pipe counts.

Concurrency: one trio thread; the engine's processes wait for a line while kvfs works.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO

import trio
from rich.console import Console
from rich.table import Table

from bench import peer_transfer_engine
from bench.measure import Result
from bench.peers import side_process
from bench.remote import SET_BYTES, beside_fetches, other_machine
from kvfs.errors import DeviceMissing, KvfsError
from kvfs.limits import MIB

BATCHES = {"get_1m": 1, "batch16_1m": 16}
SECONDS = 10.0


class Engine:
    """Two processes of the Transfer Engine, one of which reads from the other."""

    def __init__(self, to: IO[str], replies: IO[str], size_bytes: int) -> None:
        self._to, self._replies, self._size_bytes = to, replies, size_bytes

    async def read(self, batch: int, first: int) -> float:
        """Read a batch of blocks; return the us that it took."""
        return float(self.say(f"{first} {batch} {self._size_bytes}"))

    def check(self) -> None:
        """Compare what is here with what the other process has. Raises KvfsError."""
        if self.say("check") != "right":
            raise KvfsError("bench: the Transfer Engine read other bytes than there are")

    def say(self, line: str) -> str:
        """Say a line; return the answer."""
        print(line, file=self._to, flush=True)
        return answer(self._replies)


def answer(replies: IO[str]) -> str:
    """Return the next line of a process. Raises DeviceMissing where it says what is missing, or has ended."""
    line = replies.readline().strip()
    if not line or line.startswith("missing: "):
        raise DeviceMissing(f"bench: the Transfer Engine: {line or 'a process has ended; see above'}")
    return line


@contextmanager
def open_engine(python: str, size_bytes: int) -> Iterator[Engine]:
    """Start both processes. Raises DeviceMissing."""
    with ExitStack() as stack:
        program = str(peer_transfer_engine.__file__)
        _, said = stack.enter_context(side_process(python, program, "holder"))
        to, replies = stack.enter_context(side_process(python, program, "asker", *answer(said).split()))
        answer(replies)
        engine = Engine(to, replies, size_bytes)
        engine.say(f"0 1 {MIB}")
        engine.check()
        yield engine


def measure(python: str, batch: int, seconds: float) -> Result:
    """Measure batches of blocks of 1 MiB; the baseline is the engine. Raises DeviceMissing."""
    with (
        tempfile.TemporaryDirectory(prefix="kvfs-bench-") as name,
        open_engine(python, MIB) as engine,
        other_machine(Path(name), MIB) as (port, _, _),
    ):
        side = partial(engine.read, batch)
        count = SET_BYTES // MIB
        return trio.run(partial(beside_fetches, name, Path(name), port, side, batch, count, seconds))


def main() -> None:
    """Print both for each figure, and how many times as fast kvfs is."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peer_transfers", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--python", default=sys.executable, help="of an environment with Mooncake (default: this one)"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="per figure (default: %(default)s)")
    options = parser.parse_args()
    table = Table(
        "figure", "kvfs, us", "Mooncake's Transfer Engine, us", "times as fast", caption="median / p99"
    )
    try:
        for figure, batch in BATCHES.items():
            found = measure(options.python, batch, options.seconds)
            ours = f"{found.value:.0f} / {found.p99 or 0:.0f}"
            theirs = f"{found.baseline or 0:.0f} / {found.baseline_p99 or 0:.0f}"
            table.add_row(figure, ours, theirs, f"{found.ratio or 0:.2f}")
    except DeviceMissing as error:
        sys.exit(str(error))
    Console().print(table)


if __name__ == "__main__":
    main()
