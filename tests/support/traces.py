"""Traces for tests: written to files, and a small one that is made up."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import zstandard

from scheduler.simulation.traces import BLOCK_TOKENS, Request


def write_trace(path: Path, requests: Iterable[Request]) -> None:
    """Write `requests` in the format that `read_trace` reads; packed if the name ends in `.zst`."""
    with path.open("wb") as file, _packed(file, path) as sink:
        for request in requests:
            values = {
                "timestamp": _whole(request.arrival_s * 1000),
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "hash_ids": request.blocks,
            }
            sink.write(json.dumps(values).encode() + b"\n")


def small_trace(seed: int = 0, requests: int = 400) -> list[Request]:
    """Return a generated conversation: sessions of several turns behind one system prompt, the same for equal
    arguments.

    Each turn's prompt is the one before, its answer and something new, so its full blocks are read again and its
    partial tail is not.
    """
    rng = random.Random(seed)
    system_tokens, open_sessions = 700, 24
    fresh_id = iter(range(1, 1 << 62)).__next__
    sessions: list[tuple[int, tuple[int, ...]]] = []
    trace = []
    now = 0.0
    for _ in range(requests):
        now += rng.expovariate(3.0)
        session: tuple[int, tuple[int, ...]]
        if len(sessions) < open_sessions or rng.random() < 0.4:
            session = system_tokens, (0,)
        else:
            session = sessions.pop(rng.randrange(len(sessions)))
        tokens, full = session
        tokens += int(rng.lognormvariate(7.0, 1.0)) + 1
        blocks = full + tuple(fresh_id() for _ in range(_blocks(tokens) - len(full)))
        answer = rng.randint(20, 800)
        trace.append(Request(round(now, 3), tokens, answer, blocks))
        if rng.random() < 0.7 and tokens < 64_000:
            sessions.append((tokens + answer, blocks[: tokens // BLOCK_TOKENS]))
            del sessions[: -2 * open_sessions]
    return trace


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def _whole(value: float) -> int | float:
    """Return an integer where it is one, as the public traces have it."""
    rounded = round(value, 3)
    return int(rounded) if rounded == int(rounded) else rounded


@contextmanager
def _packed(file: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    if path.suffix != ".zst":
        yield file
        return
    with zstandard.ZstdCompressor(level=9).stream_writer(file, closefd=False) as sink:
        yield sink
