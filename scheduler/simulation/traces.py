"""Request traces: what arrived when, and which blocks each prompt is made of.

Responsibility: read traces in the format of the public Mooncake traces, packed or not. One JSON object a line:
`timestamp` (ms), `input_length` and `output_length` (tokens), `hash_ids` (prefix hashes of the prompt's blocks of
BLOCK_TOKENS tokens, the last perhaps partial: equal id, equal whole prefix). Other fields are ignored.

Invariants: what `read_trace` returns is in order of arrival (lines of equal arrival keep theirs), and every
value was checked; a bad one is an InvalidRequest that names file, line and field.

Concurrency: plain functions; nothing is kept.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import zstandard

from kvfs.errors import InvalidRequest, LimitExceeded
from kvfs.limits import (
    MAX_TRACE_LINE_BYTES,
    MAX_TRACE_OUTPUT_TOKENS,
    MAX_TRACE_REFERENCES,
    MAX_TRACE_REQUEST_BLOCKS,
)

BLOCK_TOKENS = 512
"""Tokens of a block in these traces."""

PROGRESS_LINES = 1024
"""Lines between two calls of a progress function, and requests."""

Progress = Callable[[int, int], None]
"""Called with how much is done (bytes read, requests replayed), and how much there is."""

Steps = Callable[[str], Progress]
"""Called with the name of a step that begins; returns the step's progress function."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt: when it came, how long it and its answer are, and the prefix hashes of its blocks."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


def read_trace(path: str | Path, *, progress: Progress | None = None) -> list[Request]:
    """Return all requests of a `.jsonl` or `.jsonl.zst` trace, in order of arrival.

    Raises InvalidRequest (a bad line, or none), LimitExceeded (a line, a request or the trace is too long), OSError.
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
    if not requests:
        raise InvalidRequest(f"{path}: there is no request in it")
    requests.sort(key=lambda request: request.arrival_s)
    return requests


def untold(done: int, total: int) -> None:
    """Report progress to nobody."""


def untold_steps(_: str) -> Progress:
    """Begin a step that nobody follows."""
    return untold


def counted(items: Sequence[T], progress: Progress, *, every: int = PROGRESS_LINES) -> Iterator[T]:
    """Yield the items; report their number before the first, after each `every`, and after the last."""
    for number, item in enumerate(items):
        if number % every == 0:
            progress(number, len(items))
        yield item
    progress(len(items), len(items))


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
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"{path}: line {number}: not zstd: {error}") from None
    if len(line) > MAX_TRACE_LINE_BYTES:
        raise LimitExceeded(f"{path}: line {number}: longer than {MAX_TRACE_LINE_BYTES} bytes")
    return line


@contextmanager
def _unpacked(file: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    if path.suffix != ".zst":
        yield file
        return
    reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
    with io.BufferedReader(reader) as source:
        yield source


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
    tokens, blocks = _count(values, "input_length", where), _hashes(_field(values, "hash_ids", where), where)
    if not tokens // BLOCK_TOKENS <= len(blocks) <= -(-tokens // BLOCK_TOKENS):
        raise InvalidRequest(
            f"{where}: input_length = {tokens}: {-(-tokens // BLOCK_TOKENS)} blocks of {BLOCK_TOKENS} tokens, the last "
            f"with or without a hash, but hash_ids has {len(blocks)}"
        )
    answer_tokens = _count(values, "output_length", where)
    if answer_tokens > MAX_TRACE_OUTPUT_TOKENS:
        raise LimitExceeded(f"{where}: output_length = {answer_tokens}: at most {MAX_TRACE_OUTPUT_TOKENS}")
    return Request(arrival_ms / 1000, tokens, answer_tokens, blocks)


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
