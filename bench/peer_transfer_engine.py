"""Mooncake's Transfer Engine over TCP, in an environment that has it: `python -P peer_transfer_engine.py ROLE ...`.

Responsibility: the two ends that `bench.peer_transfers` measures, whose environment needs no Mooncake; imports nothing
of kvfs. The time of a transfer is taken here, without the way to who asks for it.

Protocol, in lines: `holder` has SET_BYTES in registered memory, says its name and the address of that, and ends with
its input. `asker NAME ADDRESS` says "ready", then answers each "FIRST COUNT SIZE", blocks by number and bytes, with the
us that it took to read them into registered memory of its own; "check" with "right" if what it has read last is the
holder's.

Concurrency: one thread calls.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import random
import sys
import time
from typing import Any

SET_BYTES = 96 << 20
SEED = 7


def open_engine() -> tuple[Any, memoryview, int]:
    """Start an engine; return it with its registered memory and where that is. Raises ImportError."""
    engine = importlib.import_module("mooncake.engine").TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError("the engine does not start")
    area = memoryview(mmap.mmap(-1, SET_BYTES))
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    if engine.register_memory(address, SET_BYTES):
        raise RuntimeError("the memory cannot be registered")
    return engine, area, address


def content() -> bytes:
    """Return what the holder's first MiB has."""
    return random.Random(SEED).randbytes(1 << 20)


def hold() -> None:
    """Hold blocks until the input ends."""
    engine, area, address = open_engine()
    piece = content()
    for at in range(0, SET_BYTES, len(piece)):
        area[at : at + len(piece)] = piece
    say(f"127.0.0.1:{engine.get_rpc_port()} {address}")
    sys.stdin.read()


def ask(holder: str, remote: int) -> None:
    """Read blocks as the input says."""
    engine, area, local = open_engine()
    for at in range(0, SET_BYTES, mmap.PAGESIZE):
        area[at] = 1
    say("ready")
    for line in sys.stdin:
        if line == "check\n":
            say("right" if bytes(area[: 1 << 20]) == content() else "wrong")
            continue
        first, count, size = map(int, line.split())
        places = [(first + i) * size % SET_BYTES for i in range(count)]
        began = time.perf_counter_ns()
        if count == 1:
            failed = engine.transfer_sync_read(holder, local + places[0], remote + places[0], size)
        else:
            here, there = [local + at for at in places], [remote + at for at in places]
            failed = engine.batch_transfer_sync_read(holder, here, there, [size] * count)
        took_us = (time.perf_counter_ns() - began) / 1000
        if failed:
            raise RuntimeError(f"a transfer failed: {failed}")
        say(f"{took_us}")


def say(line: str) -> None:
    """Write a line to the descriptor that was the standard output: the engine logs to that."""
    os.write(REPLIES, f"{line}\n".encode())


if __name__ == "__main__":
    REPLIES = os.dup(1)
    os.dup2(2, 1)
    try:
        hold() if sys.argv[1] == "holder" else ask(sys.argv[2], int(sys.argv[3]))
    except ImportError as error:
        say(f"missing: {error}")
    os._exit(0)  # the engine's threads do not end by themselves
