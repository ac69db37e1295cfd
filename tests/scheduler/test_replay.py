"""`kvfs replay`: what it prints, draws and refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvfs._native.evict.policy import POLICIES, replay
from kvfs.errors import InvalidRequest
from scheduler.simulation.cache_replay import PackedTrace, capacity_blocks, hit_ratio, pack
from scheduler.simulation.traces import Request
from tests.support.service import run_kvfs
from tests.support.traces import small_trace, write_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "small.jsonl"
    write_trace(path, small_trace())
    return path


def good(*arguments: str) -> str:
    done = run_kvfs("replay", *arguments)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def bad(*arguments: str) -> str:
    done = run_kvfs("replay", *arguments)
    assert done.returncode == 1, done
    assert done.stderr.startswith("kvfs: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    return done.stderr


def test_json_is_one_object_for_each_policy_and_capacity(trace: Path) -> None:
    shown = json.loads(
        good(str(trace), "--policy", "min", "--policy", "lru-leaf", "--capacity", "50,10%", "--json")
    )
    packed = pack(small_trace())
    tenth = packed.unique // 10
    assert [(point["policy"], point["capacity_blocks"]) for point in shown] == [
        (policy, capacity) for policy in ("min", "lru-leaf") for capacity in sorted((50, tenth))
    ]
    for point in shown:
        assert set(point) == {"policy", "capacity_blocks", "hit_ratio"}
        found = hit_ratio(packed, point["policy"], point["capacity_blocks"])
        assert point["hit_ratio"] == found.hit_ratio


def test_the_table_has_all_policies_and_capacities(trace: Path) -> None:
    shown = good(str(trace))
    for policy in POLICIES:
        assert policy in shown
    for capacity in ("20", "0.98 %", "1,023", "49.98 %"):  # 1 % and 50 % of 2,047 blocks, rounded down
        assert capacity in shown
    assert "400 requests" in shown
    assert "references a second" in shown


def test_a_packed_trace_is_the_same(trace: Path, tmp_path: Path) -> None:
    packed = tmp_path / "small.jsonl.zst"
    write_trace(packed, small_trace())
    arguments = ("--capacity", "100", "--json")
    assert good(str(packed), *arguments) == good(str(trace), *arguments)


def test_hits_are_counted_from_a_share_of_the_requests_on(trace: Path) -> None:
    """With room for all, hits are what the unlimited cache has: counted here by hand."""
    requests = small_trace()
    seen: set[int] = set()
    hits = []
    for request in requests:
        hits.append(sum(block in seen for block in request.blocks))
        seen.update(request.blocks)
    for share in (0.0, 0.5, 0.99):
        first = int(len(requests) * share)
        expected = sum(hits[first:]) / sum(len(request.blocks) for request in requests[first:])
        (point,) = json.loads(
            good(str(trace), "--policy", "arc", "--capacity", "100%", "--measure-from", str(share), "--json")
        )
        assert point["hit_ratio"] == pytest.approx(expected)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_plot_is_drawn(trace: Path, tmp_path: Path, suffix: str) -> None:
    plot = tmp_path / f"curve{suffix}"
    good(str(trace), "--policy", "lru-leaf", "--plot", str(plot))
    assert plot.read_bytes().startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "fifo"], "no policy is called 'fifo'"),
        (["--capacity", "many"], "capacity 'many'"),
        (["--capacity", "0"], "capacity '0' is 0 blocks"),
        (["--capacity", "0.0001%"], "is 0 blocks"),
        (["--capacity", "nan%"], "capacity 'nan%'"),
        (["--capacity", str(1 << 32)], "below 2^32"),
        (["--capacity", ",".join(map(str, range(1, 300)))], "at most 1000 replays"),
        (["--measure-from", "1"], "must be in [0, 1)"),
        (["--plot", "curve.bmp"], "must end in .png"),
    ],
)
def test_what_cannot_be_is_named(trace: Path, arguments: list[str], message: str) -> None:
    assert message in bad(str(trace), *arguments)


def test_a_trace_that_is_none(tmp_path: Path) -> None:
    assert "No such file" in bad(str(tmp_path / "none.jsonl"))
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert "there is no request in it" in bad(str(empty))
    empty.write_text('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": []}')
    assert "capacity '1%' is 0 blocks" in bad(str(empty))
    assert "no blocks in the requests" in bad(str(empty), "--capacity", "5")
    empty.write_text("{}")
    assert "line 1: timestamp is missing" in bad(str(empty))


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from scheduler.reports.plots import check_plot

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InvalidRequest, match=r"pip install 'kvfs\[plot\]'"):
        check_plot(Path("curve.svg"))


def test_a_request_without_blocks_is_replayed() -> None:
    trace = pack([Request(0.0, 0, 1, ()), Request(1.0, 512, 1, (7,)), Request(2.0, 512, 1, (7,))])
    assert [hit_ratio(trace, policy, 1).hit_ratio for policy in POLICIES] == [0.5] * len(POLICIES)


def test_progress_is_told_to_the_end() -> None:
    trace = pack(small_trace())
    for policy in POLICIES:
        told: list[tuple[int, int]] = []
        hit_ratio(trace, policy, 100, progress=lambda done, total, told=told: told.append((done, total)))
        assert told[-1] == (400, 400)


def test_arrays_that_do_not_fit_are_refused() -> None:
    from array import array

    trace = PackedTrace.of([[1, 2], [1, 3]])
    hits = array("I", bytes(8))
    for start, ids, unique, message in (
        (array("Q", [0, 2]), trace.ids, 3, "end with the number"),
        (array("Q", [0, 5, 4]), trace.ids, 3, "starts before"),
        (trace.start, trace.ids, 2, "block 2 of a trace of 2"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            replay("arc", start, ids, unique, 1, hits)
    with pytest.raises(InvalidRequest, match="room for the hits"):
        replay("arc", trace.start, trace.ids, 3, 1, hits[:1])


def test_capacities() -> None:
    assert [capacity_blocks(text, 182_790) for text in ("2%", "5.0%", "5,000", "10_000", "100%")] == [
        3655,
        9139,
        5000,
        10000,
        182790,
    ]
