"""The simulator and the plan: conservation, repeatability, reference figures, and families of generated traffic.

The reference figures need the public conversation trace (KVFS_TRACE_DIR); everything else runs without.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.config.sizes import parse_duration, parse_rate
from kvfs.errors import InvalidRequest
from scheduler.routing.admission import Mode, Slo
from scheduler.routing.cost import table_costs
from scheduler.routing.policies import POLICIES
from scheduler.routing.queues import Discipline
from scheduler.simulation.event_queue import Events
from scheduler.simulation.nodes import BlockLru, DecodeNode
from scheduler.simulation.options import Options
from scheduler.simulation.plan import Site, plan
from scheduler.simulation.results import Outcome
from scheduler.simulation.reuse import reused_blocks, stack_distances
from scheduler.simulation.simulate import Simulation, simulate
from scheduler.simulation.traces import Request, read_trace
from tests.support.lru_leaf_first import LruLeafFirst
from tests.support.seeds import rounds
from tests.support.service import run_kvfs
from tests.support.simulated_runs import check_end
from tests.support.trace_families import FAMILIES
from tests.support.traces import small_trace, write_trace

TRACE = "mooncake_conversation_trace.jsonl.zst"
COSTS = table_costs()


@pytest.fixture(scope="module")
def conversation() -> list[Request]:
    folder = os.environ.get("KVFS_TRACE_DIR")
    if not folder:
        pytest.skip(f"set KVFS_TRACE_DIR to the folder that holds {TRACE}")
    return read_trace(Path(folder) / TRACE)


# --- parts -----------------------------------------------------------------------------------------------
def test_events_come_in_order_of_time_and_then_of_scheduling() -> None:
    events = Events()
    seen: list[str] = []
    for when_s, name in ((2.0, "c"), (1.0, "a"), (2.0, "d"), (1.5, "b")):
        events.at(when_s, seen.append, name)
    while events.next_s < float("inf"):
        events.step()
    assert (seen, events.now_s) == (["a", "b", "c", "d"], 2.0)
    events.at(0.0, seen.append, "late")
    assert events.next_s == 2.0


chains = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 8)), max_size=40)


@given(chains, st.integers(0, 20))
def test_the_cache_is_lru_leaf_first(uses: list[tuple[int, int]], capacity: int) -> None:
    """Chains share their first two blocks; each use touches a chain up to some depth."""
    fast, policy = BlockLru(capacity), LruLeafFirst[int]()
    for chain, depth in uses:
        blocks = [n if n < 2 else chain * 100 + n for n in range(depth)]
        for place in reversed(range(depth)):
            fast.use(blocks[place])
            if blocks[place] in policy:
                policy.touch(blocks[place], 0.0)
            else:
                parent = blocks[place - 1] if place else None
                policy.insert(blocks[place], size_bytes=1, parent=parent, now=0.0)
        expected = [key for unit in policy.victims(len(policy) - capacity, 0.0) for key in unit]
        assert [block for block, _ in fast.evict()] == expected
        for key in expected:
            policy.remove(key)


@given(chains, st.integers(1, 25))
def test_stack_distances_are_what_the_cache_finds(uses: list[tuple[int, int]], capacity: int) -> None:
    requests = [
        Request(0.0, depth * 512, 1, tuple(n if n < 2 else chain * 100 + n for n in range(depth)))
        for chain, depth in uses
    ]
    cache = BlockLru(capacity)
    for request, distances in zip(requests, stack_distances(requests), strict=True):
        found = next((n for n, block in enumerate(request.blocks) if block not in cache), len(request.blocks))
        assert reused_blocks(distances, capacity) == found
        assert distances == sorted(distances)
        for block in reversed(request.blocks):
            cache.use(block)
        list(cache.evict())


def test_a_batch_of_one_decodes_step_by_step() -> None:
    ended: list[tuple[int, float, float]] = []
    node = DecodeNode(COSTS, float("inf"), lambda *end: ended.append(end))
    node.join(7, 1000, 21, 5.0)
    node.advance(100.0)
    steps = [COSTS.step_s(1000 + n, 1) for n in range(20)]
    [(number, end_s, tbt_s)] = ended
    assert number == 7
    assert end_s == pytest.approx(5.0 + sum(steps))
    assert tbt_s == pytest.approx((steps[-1] + steps[-2]) / 2)
    assert (node.requests, node.context_tokens) == (0, 0)


joins = st.lists(
    st.tuples(st.floats(0, 5), st.integers(1, 50_000), st.integers(1, 60)), min_size=1, max_size=30
)


@given(joins, st.lists(st.floats(0, 10), max_size=10))
def test_batches_end_all_requests_whenever_they_are_looked_at(
    requests: list[tuple[float, int, int]], looks: list[float]
) -> None:
    """Advancing in pieces is advancing at once, and no request is lost."""

    def run(pieces: list[float]) -> dict[int, tuple[float, float]]:
        ended: dict[int, tuple[float, float]] = {}
        node = DecodeNode(COSTS, float("inf"), lambda number, *end: ended.update({number: end}))
        moments = sorted(
            [*((at_s, n) for n, (at_s, _, _) in enumerate(requests)), *((at, -1) for at in pieces)]
        )
        for at_s, n in moments:
            node.advance(at_s)
            if n >= 0:
                node.join(n, *requests[n][1:], at_s)
        node.advance(float("inf"))
        assert (node.requests, node.context_tokens) == (0, 0)
        return ended

    assert run(looks) == run([])
    assert len(run([])) == len(requests)


# --- runs ------------------------------------------------------------------------------------------------
@settings(max_examples=rounds(20, 40), deadline=None)
@given(
    st.integers(0, 1000),
    st.sampled_from(list(POLICIES)),
    st.sampled_from(Discipline),
    st.sampled_from(Mode),
    st.integers(1, 4),
    st.integers(0, 3),
    st.booleans(),
)
def test_every_request_ends_once(
    seed: int, policy: str, discipline: Discipline, mode: Mode, prefill: int, decode: int, fitted: bool
) -> None:
    options = Options(
        policy=policy,
        discipline=discipline,
        admission=mode,
        prefill=prefill,
        decode=decode,
        slo=Slo(10.0, 0.05),
        cache_blocks=500,
        decode_factor=1.9,
        fitted=fitted,
    )
    simulation = Simulation(small_trace(seed, 60), options)
    result = simulation.run()
    check_end(simulation)
    for record in result.records:
        if record.outcome is Outcome.DONE:
            assert record.ttft_s >= record.prefill_s * 0.999999 > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_runs_are_equal(policy: str) -> None:
    options = Options(policy=policy, decode=2, prefill=2, admission=Mode.DEFAULT, slo=Slo(30.0, 0.03), seed=4)
    trace = small_trace(1, 300)
    assert simulate(trace, options).figures() == simulate(trace, options).figures()


@pytest.mark.parametrize("shared", [False, True])
def test_a_session_that_moves_takes_its_own_blocks_along(shared: bool) -> None:
    """Its instance is busy at 41 s, the other one idle. What another session used since stays where it is."""
    system, own = (0, 1), tuple(range(10, 60))
    trace = [
        Request(0.0, 52 * 512, 1, system + own),
        Request(1.0, 70 * 512, 1, tuple(range(100, 170))),
        Request(40.0, 60 * 512, 1, tuple(range(200, 260))),
        Request(41.0, 53 * 512, 1, (*system, *own, 60)),
    ]
    if shared:
        trace.insert(2, Request(30.0, 3 * 512, 1, (*system, 300)))
    simulation = Simulation(trace, Options(prefill=2, cache_blocks=120))
    simulation.run()
    first, second = ({b for b in (*system, *own) if b in cache} for cache in simulation._caches.dram)
    assert first == (set(system) if shared else set())
    assert second == {*own} | (set() if shared else set(system))
    assert [simulation._caches.index.holders(block) for block in (0, 10)] == [0b01 if shared else 0b10, 0b10]


def test_a_long_prompt_keeps_nobody_from_what_another_has_made_of_it() -> None:
    """It begins with the system prompt that all have, and takes 13 s; the second request makes that, too, in 1.3 s."""
    system = (0, 1, 2, 3)
    shared = (*system, *range(10, 30))
    trace = [
        Request(0.0, 150 * 512, 1, (*system, *range(100, 246))),
        Request(0.1, 24 * 512, 1, shared),
        Request(6.0, 25 * 512, 1, (*shared, 50)),
    ]
    alone, _, last = (record.prefill_s for record in simulate(trace, Options(prefill=2)).records)
    assert alone > 10
    assert last < 0.2


def test_the_seed_matters_to_random() -> None:
    runs = [simulate(small_trace(), Options(policy="random", seed=seed)).figures() for seed in (1, 2)]
    assert runs[0]["ttft_mean_s"] != runs[1]["ttft_mean_s"]


@pytest.mark.parametrize(
    "change", [{"policy": "best"}, {"prefill": 0}, {"decode": -1}, {"speed": 0.0}, {"decode_factor": -1.0}]
)
def test_options_out_of_range_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=str(next(iter(change.values())))):
        simulate([], replace(Options(), **change))


def test_an_empty_trace_is_no_work() -> None:
    assert simulate([], Options()).figures()["requests"] == 0


def test_limits_that_nobody_can_keep_and_years_between_requests_come_to_an_end() -> None:
    trace = [Request(at_s, 1000, 10, (n,)) for n, at_s in enumerate((0.0, 1e9, 8e12))]
    options = Options(prefill=1, decode=1, admission=Mode.DEFAULT, slo=Slo(tbt_s=0.001), fitted=True)
    assert simulate(trace, options).figures()["rejected"] == 3
    assert simulate(trace, replace(options, slo=Slo())).figures()["rejected"] == 0
    assert plan(trace, Site(COSTS, 2, 1 << 30, 0, Slo())).unlimited.hit_ratio == 0


def test_learned_costs_decide_nearly_as_well_as_known_ones() -> None:
    """The table is wrong by a factor of 2 about decoding; what it costs to learn that is the first seconds'."""
    options = Options(
        prefill=2, decode=1, speed=1.5, admission=Mode.DEFAULT, slo=Slo(30.0, 0.05), decode_factor=2.0
    )
    trace = small_trace(2, 600)
    known, learned = (simulate(trace, replace(options, fitted=fitted)).figures() for fitted in (False, True))
    assert learned["goodput_tokens"] >= 0.85 * known["goodput_tokens"]
    none = simulate(trace, replace(options, admission=Mode.NONE)).figures()
    assert learned["goodput_tokens"] >= 2 * none["goodput_tokens"]


# --- generated traffic ------------------------------------------------------------------------------------
SHORT = [family for family in FAMILIES if not family.startswith("long")]
"""The long ones are in tests/scheduler/test_drawn_runs.py."""


@pytest.mark.parametrize("cache_blocks", [1500, 5859])
@pytest.mark.parametrize("seed", [11, 12])
@pytest.mark.parametrize("family", SHORT)
def test_the_default_does_not_lose_to_algorithm_1(family: str, seed: int, cache_blocks: int) -> None:
    trace = FAMILIES[family](seed, 1200)
    mean = {
        policy: simulate(trace, Options(policy=policy, cache_blocks=cache_blocks)).figures()["ttft_mean_s"]
        for policy in ("kvcache-centric", "default")
    }
    assert mean["default"] <= 1.0000001 * mean["kvcache-centric"]


@pytest.mark.parametrize("family", SHORT)
def test_counting_what_is_in_flight_wastes_less_and_serves_more(family: str) -> None:
    trace = FAMILIES[family](21, 1200)
    base = Options(decode=2, decode_factor=2.0, slo=Slo(30.0, 0.06))
    found = {mode: simulate(trace, replace(base, admission=mode)).figures() for mode in Mode}
    default = found[Mode.DEFAULT]
    for mode in (Mode.NONE, Mode.EARLY):
        assert default["goodput_tokens"] >= found[mode]["goodput_tokens"]
    assert default["wasted_prefill_s"] <= 0.05 * found[Mode.NONE]["wasted_prefill_s"]


# --- reference figures -----------------------------------------------------------------------------------
REFERENCE = {
    "round-robin": (4.98, 20.6),
    "least-queued": (1.74, 3.68),
    "local": (1.30, 1.79),
    "kvcache-centric": (1.17, 1.40),
}


@pytest.mark.parametrize("policy", REFERENCE)
def test_baselines_come_within_a_tenth_of_the_reference(conversation: list[Request], policy: str) -> None:
    for speed, reference in zip((1.0, 1.5), REFERENCE[policy], strict=True):
        found = simulate(conversation, Options(policy=policy, speed=speed)).figures()
        assert found["ttft_mean_s"] == pytest.approx(reference, rel=0.1)


@pytest.mark.parametrize(("speed", "ideal_s"), [(1.0, 1.15), (1.5, 1.35), (1.8, 1.90), (2.0, 3.63)])
def test_the_default_is_within_three_percent_of_the_ideal(
    conversation: list[Request], speed: float, ideal_s: float
) -> None:
    assert simulate(conversation, Options(speed=speed)).figures()["ttft_mean_s"] <= 1.03 * ideal_s


def test_the_length_aware_queue_at_twice_the_arrivals(conversation: list[Request]) -> None:
    options = Options(speed=2.0, discipline=Discipline.LENGTH_AWARE)
    assert simulate(conversation, options).figures()["ttft_mean_s"] <= 2.6


@pytest.mark.timeout(180)
def test_overload(conversation: list[Request]) -> None:
    base = Options(decode=8, decode_factor=2.0, speed=2.0, slo=Slo(30.0, 0.06))
    found = {mode: simulate(conversation, replace(base, admission=mode)).figures() for mode in Mode}
    default, early = found[Mode.DEFAULT], found[Mode.EARLY]
    assert default["rejected"] <= 0.87 * early["rejected"]
    assert default["wasted_prefill_s"] <= 0.05 * early["wasted_prefill_s"]
    assert default["goodput_tokens"] >= max(found[mode]["goodput_tokens"] for mode in (Mode.NONE, Mode.EARLY))


def test_reuse_over_capacity_is_the_reference_of_eviction(conversation: list[Request]) -> None:
    distances = stack_distances(conversation)
    references = sum(len(request.blocks) for request in conversation)
    for capacity, ratio in ((5_000, 0.1118), (10_000, 0.2116), (30_000, 0.3257), (50_000, 0.3546)):
        found = sum(reused_blocks(row, capacity) for row in distances)
        assert round(found / references, 4) == ratio


# --- the plan --------------------------------------------------------------------------------------------
def test_a_plan_of_a_trace_with_reuse() -> None:
    site = Site(COSTS, 4, 100 << 30, 0, Slo(30.0, 0.1))
    found = plan(small_trace(), site)
    assert [reuse.hit_ratio for reuse in found.curve] == sorted(reuse.hit_ratio for reuse in found.curve)
    assert found.curve[-1].hit_ratio == found.unlimited.hit_ratio
    assert found.dram.saved_s <= found.both.saved_s <= found.unlimited.saved_s < found.prefill_s
    assert 0 < found.break_even_bytes_s < COSTS.network_bytes_s
    assert found.best is not None
    assert all(
        found.best.figures["goodput_tokens"] >= split.figures["goodput_tokens"] for split in found.splits
    )
    assert {split.prefill + split.decode for split in found.splits} == {4}


def test_a_plan_without_reuse_says_so(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.jsonl", FAMILIES["strangers"](1, 60))
    done = run_kvfs("plan", str(tmp_path / "trace.jsonl"), "--instances", "2")
    assert done.returncode == 0, done.stderr
    assert "do not pay" in done.stdout
    done = run_kvfs("plan", str(tmp_path / "trace.jsonl"), "--instances", "2", "--json")
    assert json.loads(done.stdout)["break_even_bytes_s"] is None


def test_an_empty_plan_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        plan([], Site(COSTS, 4, 1, 0, Slo()))


# --- the command line ------------------------------------------------------------------------------------
@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    write_trace(path, small_trace(0, 80))
    return path


def test_simulate_prints_figures(trace_file: Path) -> None:
    done = run_kvfs(
        "simulate", str(trace_file), "--json", "--policy", "local", "--tbt-slo", "60ms", "--seed", "3"
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert set(found) >= {
        "policy",
        "speed",
        "requests",
        "rejected",
        "ttft_mean_s",
        "ttft_p90_s",
        "slo_attainment",
        "goodput_tokens",
        "wasted_prefill_s",
    }
    assert (found["policy"], found["requests"], found["tbt_slo_s"]) == ("local", 80, 0.06)
    again = run_kvfs(
        "simulate", str(trace_file), "--json", "--policy", "local", "--tbt-slo", "60", "--seed", "3"
    )
    assert json.loads(again.stdout) == found
    assert "ttft_mean_s" in run_kvfs("simulate", str(trace_file)).stdout


def test_plan_prints_a_page_or_json(trace_file: Path) -> None:
    done = run_kvfs("plan", str(trace_file), "--instances", "4", "--network", "100Gbit", "--dram", "100GiB")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Cache logistics pay" in done.stdout
    found = json.loads(run_kvfs("plan", str(trace_file), "--instances", "4", "--json").stdout)
    assert found["best"] in found["splits"]


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_plots_are_written(trace_file: Path, tmp_path: Path, command: str) -> None:
    done = run_kvfs(command, str(trace_file), "--plot", str(tmp_path / "plot.svg"))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")
    done = run_kvfs(command, str(trace_file), "--plot", str(tmp_path / "plot.xyz"))
    assert done.returncode == 1
    assert "xyz" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--queue", "lifo"], 2, "length-aware"),
        (["--admission", "all"], 2, "early"),
        (["--policy", "best"], 1, "kvcache-centric"),
        (["--tbt-slo", "fast"], 2, "60ms"),
        (["--network", "fast"], 2, "100Gbit"),
        (["--model", "gpt-9"], 1, "llama3-70b"),
        (["--speed", "0"], 1, "above 0"),
    ],
)
def test_bad_arguments_are_named(trace_file: Path, arguments: list[str], code: int, said: str) -> None:
    done = run_kvfs("simulate", str(trace_file), *arguments)
    assert done.returncode == code
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_rates_and_durations() -> None:
    assert [parse_rate(text) for text in ("100Gbit", "12.5GB/s", "8Mbit/s", "1kB")] == [
        12.5e9,
        12.5e9,
        1e6,
        1e3,
    ]
    assert [parse_duration(text) for text in ("30", "60ms", "1.5 s", "2min")] == [30, 0.06, 1.5, 120]
    for bad in ("0GB", "GB", "5", "-1GB", "5 furlongs"):
        with pytest.raises(ValueError, match="a rate is"):
            parse_rate(bad)
    for bad in ("0", "", "-1s", "1h"):
        with pytest.raises(ValueError, match="a duration is"):
            parse_duration(bad)
