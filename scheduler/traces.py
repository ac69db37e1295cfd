"""Request traces: what arrived when, and which blocks each prompt is made of.

Responsibility: read and write traces in the format of the public Mooncake traces, packed or not, and make a
small one for examples and tests. One JSON object a line: `timestamp` (ms), `input_length` and `output_length`
(tokens), `hash_ids` (prefix hashes of the prompt's blocks of BLOCK_TOKENS tokens, the last perhaps partial:
equal id, equal whole prefix). Other fields are ignored.

Invariants: what `read_trace` returns is in order of arrival (lines of equal arrival keep theirs), and every
value was checked; a bad one is an InvalidRequest that names file, line and field.

Concurrency: plain functions; nothing is kept.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kvfs.errors import InvalidRequest, LimitExceeded
from kvfs.limits import MAX_TRACE_LINE_BYTES, MAX_TRACE_REFERENCES, MAX_TRACE_REQUEST_BLOCKS

BLOCK_TOKENS = 512
"""Tokens of a block in these traces."""

PROGRESS_LINES = 1024
"""Lines between two calls of a progress function."""

Progress = Callable[[int, int], None]
"""Told how many bytes of the file were read, and how many there are."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt: when it came, how long it and its answer are, and the prefix hashes of its blocks."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


def read_trace(path: str | Path, *, progress: Progress | None = None) -> list[Request]:
    """All requests of a `.jsonl` or `.jsonl.zst` trace, in order of arrival.

    Raises InvalidRequest, LimitExceeded (a line, a request or the trace is too long), OSError.
    """
    path = Path(path)
    requests: list[Request] = []
    references = 0
    for number, line in _lines(path, progress):
        if line.isspace():
            continue
        request = _parse(line, f"{path}: line {number}")
        references += len(request.blocks)
        if references > MAX_TRACE_REFERENCES:
            raise LimitExceeded(f"{path}: line {number}: more than {MAX_TRACE_REFERENCES} blocks in all")
        requests.append(request)
    requests.sort(key=lambda request: request.arrival_s)
    return requests


def write_trace(path: str | Path, requests: Iterable[Request]) -> None:
    """Write `requests` in the format that `read_trace` reads; packed if the name ends in `.zst`."""
    path = Path(path)
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
    """A generated conversation: sessions of several turns behind one system prompt, the same for equal arguments.

    Each turn's prompt is the one before, its answer and something new, so its full blocks are read again and
    its partial tail is not.
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
    """An integer where it is one, as the public traces have it."""
    rounded = round(value, 3)
    return int(rounded) if rounded == int(rounded) else rounded


# --- lines -----------------------------------------------------------------------------------------------
def _lines(path: Path, progress: Progress | None) -> Iterator[tuple[int, bytes]]:
    total = path.stat().st_size
    with path.open("rb") as file, _unpacked(file, path) as source:
        number = 0
        while line := _read_line(source, path, number + 1):
            number += 1
            if progress is not None and number % PROGRESS_LINES == 0:
                progress(file.tell(), total)
            yield number, line
    if progress is not None:
        progress(total, total)


def _read_line(source: IO[bytes], path: Path, number: int) -> bytes:
    try:
        line = source.readline(MAX_TRACE_LINE_BYTES + 1)
    except _unpacking_errors() as error:
        raise InvalidRequest(f"{path}: line {number}: not zstd: {error}") from None
    if len(line) > MAX_TRACE_LINE_BYTES:
        raise LimitExceeded(f"{path}: line {number}: longer than {MAX_TRACE_LINE_BYTES} bytes")
    return line


@contextmanager
def _unpacked(file: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    if path.suffix != ".zst":
        yield file
        return
    reader = _zstandard(path).ZstdDecompressor().stream_reader(file, read_across_frames=True)
    with io.BufferedReader(reader) as source:
        yield source


@contextmanager
def _packed(file: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    if path.suffix != ".zst":
        yield file
        return
    with _zstandard(path).ZstdCompressor(level=9).stream_writer(file, closefd=False) as sink:
        yield sink


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ModuleNotFoundError:
        raise InvalidRequest(
            f"{path}: packed traces need the module zstandard: pip install 'kvfs[replay]', or unpack it first"
        ) from None
    return zstandard


def _unpacking_errors() -> tuple[type[Exception], ...]:
    """Looked up only when reading failed, so that plain files need no zstandard."""
    try:
        import zstandard
    except ModuleNotFoundError:
        return ()
    return (zstandard.ZstdError,)


# --- values ----------------------------------------------------------------------------------------------
def _parse(line: bytes, where: str) -> Request:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{where}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidRequest(f"{where}: must be a JSON object")
    arrival_ms = _field(values, "timestamp", where)
    if not _is_number(arrival_ms) or not 0 <= arrival_ms < 1 << 53:
        raise InvalidRequest(f"{where}: timestamp = {arrival_ms!r:.40}: must be milliseconds, 0 or more")
    return Request(
        arrival_ms / 1000,
        _count(values, "input_length", where),
        _count(values, "output_length", where),
        _hashes(_field(values, "hash_ids", where), where),
    )


def _field(values: dict[str, Any], name: str, where: str) -> Any:
    try:
        return values[name]
    except KeyError:
        raise InvalidRequest(f"{where}: {name} is missing") from None


def _is_number(value: object) -> bool:
    return type(value) is int or type(value) is float


def _count(values: dict[str, Any], name: str, where: str) -> int:
    value = _field(values, name, where)
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise InvalidRequest(f"{where}: {name} = {value!r:.40}: must be a whole number of tokens below 2^31")
    return value


def _hashes(ids: object, where: str) -> tuple[int, ...]:
    if not isinstance(ids, list):
        raise InvalidRequest(f"{where}: hash_ids = {ids!r:.40}: must be a list")
    if len(ids) > MAX_TRACE_REQUEST_BLOCKS:
        raise LimitExceeded(f"{where}: hash_ids has {len(ids)} blocks: at most {MAX_TRACE_REQUEST_BLOCKS}")
    for value in ids:
        if type(value) is not int or not 0 <= value < 1 << 64:
            raise InvalidRequest(f"{where}: hash_ids holds {value!r:.40}: must be integers of 64 bits")
    return tuple(ids)
