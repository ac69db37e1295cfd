"""The figure of a block that comes by UCX from another process, against a message of `ucx_perftest` alone.

Responsibility: one function, from seconds to a Result. The fetch is the one of `bench.remote`, with `[cluster]
transport = "ucx"` on both sides; the baseline is UCX's own program, which sends messages of 1 MiB to and fro by tag
(`tag_lat`: half of the way there and back, the median of its run) from one place in memory to one, waits for nothing
but the other, and verifies nothing. Both take what UCX chooses of its transports for endpoints that notice a failure
(`-e`), and sleep while they wait (`-E sleep`).

`ucx_perftest` takes a quarter of a second to start: it runs once in RUN_FETCHES fetches.

Concurrency: one trio thread and the store's native threads; two processes of `ucx_perftest` beside.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from subprocess import DEVNULL
from typing import Final

import trio

from bench.measure import Result
from bench.ports import free_ports
from bench.remote import SET_BYTES, beside_fetches, other_machine
from kvfs.errors import DeadlinePassed, DeviceMissing
from kvfs.limits import MIB

RUN_FETCHES: Final = 16
MESSAGES: Final = 200
FIRST_MESSAGES: Final = 20
"""That a run sends before those that count."""
AS_KVFS: Final = ("-e", "-E", "sleep")
"""Endpoints that notice failures, and sleep."""
START_S: Final = 10.0


def ucx_get_1m(seconds: float) -> Result:
    """Return the time of a fetch of one block of 1 MiB by UCX. Raises DeviceMissing without `ucx_perftest`."""
    program = shutil.which("ucx_perftest")
    if program is None:
        raise DeviceMissing("ucx_perftest, which UCX is measured against, is missing (Debian's ucx-utils)")
    with (
        tempfile.TemporaryDirectory(prefix="kvfs-bench-") as name,
        other_machine(Path(name), MIB, transport="ucx") as (port, _, _),
    ):
        count, side = SET_BYTES // MIB, Messages(program)
        measure = partial(beside_fetches, "remote.ucx_get_1m", Path(name), port, side, 1, count, seconds)
        return trio.run(partial(measure, transport="ucx"))


class Messages:
    """Sends messages of 1 MiB by `ucx_perftest`."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._took_us = 0.0

    async def __call__(self, turn: int) -> float:
        """Return the us that a message takes, measured anew in each RUN_FETCHES turns."""
        if turn % RUN_FETCHES == 0:
            self._took_us = await self._run()
        return self._took_us

    async def _run(self) -> float:
        [port] = free_ports(1)
        answer = b""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve, port)
            with trio.move_on_after(START_S):
                while not answer:  # it ends at once while the other does not listen yet
                    answer = await self._ask(port)
            nursery.cancel_scope.cancel()
        if not answer:
            raise DeadlinePassed(f"ucx_perftest measured nothing within {START_S:g} s")
        return float(answer.split(b",")[1])

    async def _serve(self, port: int) -> None:
        command = [self._program, "-p", str(port), *AS_KVFS]
        await trio.run_process(command, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, check=False)

    async def _ask(self, port: int) -> bytes:
        """Return the line of figures: iterations, the median in us, and more; nothing where it could not connect."""
        messages = ["-t", "tag_lat", "-s", str(MIB), "-n", str(MESSAGES), "-w", str(FIRST_MESSAGES), *AS_KVFS]
        done = await trio.run_process(
            [self._program, "127.0.0.1", "-p", str(port), *messages, "-f", "-v"],
            stdin=DEVNULL,
            capture_stdout=True,
            stderr=DEVNULL,
            check=False,
            env=os.environ | {"UCX_LOG_LEVEL": "fatal"},
        )
        return b"" if done.returncode else done.stdout.splitlines()[-1]
