"""Request traces: what is read, what is refused and with which words, and the generated trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs import limits
from kvfs.errors import InvalidRequest, LimitExceeded
from scheduler.simulation.traces import BLOCK_TOKENS, Request, read_trace
from tests.support.traces import small_trace, write_trace

GOOD = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 5]}

arrivals = st.integers(0, 10**9).map(lambda ms: ms / 1000)
blocks = st.lists(st.integers(0, 2**64 - 1), max_size=5).map(tuple)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """The last block may be partial, and a partial block may have no hash."""
    hashes = draw(blocks)
    tokens = len(hashes) * BLOCK_TOKENS + draw(
        st.integers(1 - BLOCK_TOKENS if hashes else 0, BLOCK_TOKENS - 1)
    )
    return Request(draw(arrivals), tokens, draw(st.integers(0, limits.MAX_TRACE_OUTPUT_TOKENS)), hashes)


def trace_file(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.zst"])
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    trace = small_trace(requests=3000)
    write_trace(tmp_path / name, trace)
    seen: list[tuple[int, int]] = []
    assert read_trace(tmp_path / name, progress=lambda done, total: seen.append((done, total))) == trace
    size = (tmp_path / name).stat().st_size
    assert len(seen) > 2
    assert seen[-1] == (size, size)
    assert sorted(seen) == seen


@given(trace=st.lists(requests(), min_size=1, max_size=5))
def test_every_request_survives_the_format(
    tmp_path_factory: pytest.TempPathFactory, trace: list[Request]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write_trace(path, trace)
    assert read_trace(path) == sorted(trace, key=lambda request: request.arrival_s)


def test_arrival_orders_and_blank_lines_and_more_fields_are_passed_over(tmp_path: Path) -> None:
    late = json.dumps(GOOD | {"timestamp": 9.5, "model": "m"})
    found = read_trace(trace_file(tmp_path, late, "", json.dumps(GOOD), "  "))
    assert found == [Request(0.0095, 600, 7, (0, 5)), Request(1.5, 600, 7, (0, 5))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "must be a JSON object"),
        (json.dumps({"timestamp": 1}), "input_length is missing"),
        (json.dumps(GOOD | {"timestamp": "1"}), "timestamp = '1'"),
        (json.dumps(GOOD | {"timestamp": float("nan")}), "timestamp = nan"),
        (json.dumps(GOOD | {"timestamp": -1}), "timestamp = -1"),
        (json.dumps(GOOD | {"input_length": True}), "input_length = True"),
        (json.dumps(GOOD | {"output_length": 1 << 31}), "output_length = 2147483648"),
        (json.dumps(GOOD | {"output_length": 1 << 30}), "output_length = 1073741824: at most 1048576"),
        (
            json.dumps(GOOD | {"input_length": 1 << 30}),
            "input_length = 1073741824: 2097152 blocks of 512 tokens",
        ),
        (
            json.dumps(GOOD | {"input_length": 512}),
            "input_length = 512: 1 blocks of 512 tokens, the last with",
        ),
        (json.dumps(GOOD | {"hash_ids": [1, 2, 3]}), "but hash_ids has 3"),
        (json.dumps(GOOD | {"hash_ids": 4}), "hash_ids = 4"),
        (json.dumps(GOOD | {"hash_ids": [1, -2]}), "hash_ids holds -2"),
        (json.dumps(GOOD | {"hash_ids": [1, 1 << 64]}), "hash_ids holds 18446744073709551616"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = trace_file(tmp_path, json.dumps(GOOD), line)
    with pytest.raises((InvalidRequest, LimitExceeded)) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path}: line 2: ")
    assert message in str(error.value)


def test_lengths_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = json.dumps(GOOD | {"hash_ids": [0] * (limits.MAX_TRACE_REQUEST_BLOCKS + 1)})
    with pytest.raises(
        LimitExceeded, match=f"line 1: hash_ids has .* at most {limits.MAX_TRACE_REQUEST_BLOCKS}"
    ):
        read_trace(trace_file(tmp_path, many))
    with pytest.raises(LimitExceeded, match=f"line 2: longer than {limits.MAX_TRACE_LINE_BYTES}"):
        read_trace(trace_file(tmp_path, json.dumps(GOOD), " " * limits.MAX_TRACE_LINE_BYTES + "{}"))
    monkeypatch.setattr("scheduler.simulation.traces.MAX_TRACE_REFERENCES", 3)
    with pytest.raises(LimitExceeded, match="line 2: more than 3 blocks"):
        read_trace(trace_file(tmp_path, json.dumps(GOOD), json.dumps(GOOD)))


def test_a_trace_without_a_request_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"trace\.jsonl: there is no request in it"):
        read_trace(trace_file(tmp_path, "", " "))


def test_a_packed_trace_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.zst"
    path.write_text(json.dumps(GOOD))
    with pytest.raises(InvalidRequest, match=r"line 1: not zstd"):
        read_trace(path)


def test_the_generated_trace_is_a_conversation() -> None:
    trace = small_trace()
    assert trace == small_trace()
    assert trace != small_trace(seed=1)
    assert len(trace) == 400
    seen: set[int] = set()
    hits = 0
    for request in trace:
        assert len(request.blocks) == -(-request.input_tokens // BLOCK_TOKENS)
        assert request.blocks[0] == 0
        hit = next((at for at, key in enumerate(request.blocks) if key not in seen), len(request.blocks))
        assert not seen.intersection(request.blocks[hit:])
        hits += hit
        seen.update(request.blocks)
    assert 0.3 < hits / sum(len(request.blocks) for request in trace) < 0.8
