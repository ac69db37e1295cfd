"""What the simulator has by option: lower tiers, hand-overs, coupled instances, failures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.errors import InvalidRequest
from scheduler.routing.admission import Mode, Slo
from scheduler.routing.cost import table_costs
from scheduler.routing.policies import POLICIES
from scheduler.routing.queues import Discipline
from scheduler.routing.roles import Rules
from scheduler.simulation.coupled import run_prefill
from scheduler.simulation.nodes import DecodeNode
from scheduler.simulation.options import Failure, LowerTier, Options
from scheduler.simulation.results import Outcome
from scheduler.simulation.simulate import Simulation, simulate
from scheduler.simulation.traces import Request
from tests.support import golden_simulation
from tests.support.service import run_kvfs
from tests.support.simulated_runs import check_end
from tests.support.trace_families import FAMILIES
from tests.support.traces import small_trace, write_trace

COSTS = table_costs()
GOLDEN = Path(__file__).parents[1] / "golden" / "simulation.json"
NVME = LowerTier("nvme", 2_000, 12e9, 0.0001)
COLD = LowerTier("cold", 100_000, 5e9, 0.05, depth=16, shared=True)


def test_runs_without_options_are_golden() -> None:
    assert golden_simulation.text() == GOLDEN.read_text()


failures = st.lists(
    st.builds(Failure, st.integers(0, 1), st.floats(0, 40), st.floats(0.1, 20), st.booleans()), max_size=4
)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1000),
    st.sampled_from(list(POLICIES)),
    st.sampled_from(Mode),
    st.sampled_from([(), (NVME,), (NVME, COLD), (replace(COLD, blocks=50),)]),
    st.sampled_from([float("inf"), 5e9]),
    failures,
    st.booleans(),
)
def test_every_request_ends_once(
    seed: int,
    policy: str,
    mode: Mode,
    tiers: tuple[LowerTier, ...],
    handover_bytes_s: float,
    failures: list[Failure],
    replicates: bool,
) -> None:
    options = Options(
        policy=policy,
        admission=mode,
        prefill=2,
        decode=2,
        slo=Slo(20.0, 0.05),
        cache_blocks=300,
        tiers=tiers,
        handover_bytes_s=handover_bytes_s,
        failures=tuple(failures),
        replicates=replicates,
    )
    simulation = Simulation(small_trace(seed, 60), options)
    simulation.run()
    check_end(simulation)
    assert not any(each.draining for each in simulation._cluster.prefill + simulation._cluster.decode)


# --- lower tiers -----------------------------------------------------------------------------------------
def test_a_tier_is_as_fast_as_its_depth_hides_its_latency() -> None:
    tier = LowerTier("nvme", 10, bytes_s=10e9, latency_s=0.001, depth=4)
    assert tier.rate(1_000_000) == 4e9
    assert replace(tier, depth=32).rate(1_000_000) == 10e9
    assert replace(tier, latency_s=0.0).rate(1_000_000) == 10e9


def test_what_dram_evicts_is_loaded_from_nvme_in_the_time_that_takes() -> None:
    """One prompt of 100 blocks, another that evicts it, and the first again: 16.8 GB at 12 GB/s instead of 5 s."""
    trace = [
        Request(at_s, 100 * 512, 1, tuple(range(first, first + 100)))
        for at_s, first in ((0.0, 0), (30.0, 1000), (60.0, 0))
    ]
    options = Options(prefill=1, cache_blocks=100)
    without, with_nvme = (simulate(trace, replace(options, tiers=tiers)).records for tiers in ((), (NVME,)))
    assert without[2].ttft_s == pytest.approx(without[0].ttft_s)
    block_bytes = 512 * COSTS.kv_token_bytes
    load_s = NVME.latency_s + 100 * block_bytes / NVME.rate(block_bytes)
    assert with_nvme[2].ttft_s == pytest.approx(load_s + COSTS.prefill_s(51200, 51200))


def test_lower_tiers_serve_what_a_small_dram_cannot() -> None:
    trace = FAMILIES["chat"](11, 600)
    options = Options(prefill=4, cache_blocks=400, speed=0.6)
    shares = [
        simulate(trace, replace(options, tiers=tiers)).reused_share for tiers in ((), (NVME,), (NVME, COLD))
    ]
    assert shares[0] + 0.02 < shares[1] < shares[2] + 1e-9


# --- hand-overs ------------------------------------------------------------------------------------------
def test_a_hand_over_is_part_of_the_time_to_the_first_token() -> None:
    [record] = simulate(
        [Request(0.0, 10_000, 20, tuple(range(20)))],
        Options(prefill=1, decode=1, handover_bytes_s=10e9, handover_s=0.03),
    ).records
    sent_s = 0.03 + 10_000 * COSTS.kv_token_bytes / 10e9
    assert record.ttft_s == pytest.approx(COSTS.prefill_s(10_000, 0) + sent_s)


# --- coupled instances -----------------------------------------------------------------------------------
def test_chunks_run_beside_the_batch_and_slow_it_down() -> None:
    gaps: list[float] = []
    node = DecodeNode(COSTS, float("inf"), lambda number, at_s, tbt_s: gaps.append(tbt_s))
    node.join(0, 1000, 40, 0.0)
    end_s = run_prefill(node, COSTS, (8192, 0), 1024, 0.1)
    node.advance(float("inf"))
    chunks = [COSTS.compute_s(end, end - 1024) for end in range(1024, 8193, 1024)]
    assert end_s == pytest.approx(0.1 + sum(chunks), abs=0.05)
    tail = sorted(chunks)[-4:]
    assert gaps == [pytest.approx(sum(tail) / 4, abs=0.002)]


def test_a_whole_prompt_stalls_the_batch_of_its_instance() -> None:
    trace = [Request(0.0, 1000, 100, (1, 2)), Request(0.5, 50_000, 100, tuple(range(100, 198)))]
    coupled = Options(prefill=1, coupled=True)
    whole, chunked = (simulate(trace, replace(coupled, chunk_tokens=n)).records for n in (0, 512))
    apart = simulate(trace, Options(prefill=1, decode=1)).records
    assert whole[0].tbt_s > 5 * chunked[0].tbt_s > 5 * apart[0].tbt_s
    assert chunked[1].ttft_s > whole[1].ttft_s >= 0.99 * apart[1].ttft_s


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0, 256, 2048]), st.sampled_from(list(POLICIES)))
def test_coupled_instances_answer_everything(seed: int, chunk_tokens: int, policy: str) -> None:
    options = Options(prefill=3, coupled=True, chunk_tokens=chunk_tokens, policy=policy, cache_blocks=500)
    result = simulate(small_trace(seed, 60), options)
    assert [record.outcome for record in result.records] == [Outcome.DONE] * 60
    assert all(record.ttft_s >= 0.999999 * record.prefill_s > 0 for record in result.records)


# --- failures --------------------------------------------------------------------------------------------
def test_a_failed_prefill_is_made_again_elsewhere_and_its_cache_is_gone() -> None:
    blocks = tuple(range(100))
    trace = [Request(0.0, 51200, 1, blocks), Request(40.0, 51200, 1, blocks)]
    options = Options(prefill=2, failures=(Failure(0, 2.0, 10.0),))
    first, again = simulate(trace, options).records
    assert first.ttft_s == pytest.approx(2.0 + COSTS.prefill_s(51200, 0))
    assert (first.retries, again.retries) == (1, 0)
    late = replace(options, failures=(Failure(0, 30.0, 1.0),))
    [_, again] = simulate(trace, late).records
    assert again.ttft_s == pytest.approx(COSTS.prefill_s(51200, 0))


def test_what_waits_for_blocks_of_a_failed_instance_is_routed_again() -> None:
    """The third prompt waits on the other instance for blocks of the first, behind which a long one is queued, and the
    fourth waits there for both."""
    blocks = tuple(range(100))
    trace = [
        Request(0.0, 51200, 1, blocks),
        Request(0.6, 76800, 1, tuple(range(500, 650))),
        Request(1.0, 51712, 1, (*blocks, 100)),
        Request(1.2, 52224, 1, (*blocks, 100, 101)),
    ]
    failures = (Failure(1, 0.5, 0.4), Failure(0, 2.0, 100.0))
    records = simulate(trace, Options(prefill=2, failures=failures)).records
    assert [record.retries for record in records] == [1, 1, 1, 1]
    assert records[0].ttft_s == pytest.approx(2.0 + COSTS.prefill_s(51200, 0))
    assert all(record.outcome is Outcome.DONE for record in records)


def test_a_request_goes_on_where_its_decode_instance_failed() -> None:
    trace = [Request(0.0, 5000, 200, tuple(range(10)))]
    calm = Options(prefill=1, decode=2, handover_s=0.5)
    [whole] = simulate(trace, calm).records
    [broken] = simulate(trace, replace(calm, failures=(Failure(0, 2.0, 1.0, decode=True),))).records
    assert (broken.retries, broken.outcome, broken.ttft_s) == (1, Outcome.DONE, whole.ttft_s)
    assert broken.tbt_s > whole.tbt_s + 0.5 / 20
    everywhere = tuple(Failure(n, 2.0, 1.0, decode=True) for n in (0, 1))
    [record] = simulate(trace, replace(calm, failures=everywhere)).records
    assert record.outcome is Outcome.REJECTED


@pytest.mark.parametrize(
    "change",
    [
        {"tiers": (replace(NVME, depth=0),)},
        {"handover_bytes_s": 0.0},
        {"chunk_tokens": -1},
        {"coupled": True, "decode": 1},
        {"failures": (Failure(8, 1.0, 1.0),)},
    ],
)
def test_options_out_of_range_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        simulate([], replace(Options(), **change))


# --- the command line ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (("--coupled", "--chunk", "512"), Options(decode=0, coupled=True, chunk_tokens=512)),
        (("--relabel", "--replicate", "--group", "4"), Options(relabels=Rules(), replicates=True, group=4)),
        (("--relay", "--queue", "length-aware"), Options(relay=True, discipline=Discipline.LENGTH_AWARE)),
        (
            ("--cache-blocks", "50", "--tiers", "nvme:500:1GB/s", "--failures", "prefill:1:10s:5s"),
            Options(cache_blocks=50, tiers=(LowerTier("nvme", 500, 1e9),), failures=(Failure(1, 10.0, 5.0),)),
        ),
        (("--handover", "10GB/s"), Options(handover_bytes_s=10e9)),
    ],
)
def test_the_command_takes_the_options(tmp_path: Path, arguments: tuple[str, ...], options: Options) -> None:
    trace = small_trace(0, 80)
    write_trace(tmp_path / "trace.jsonl", trace)
    done = run_kvfs(
        "simulate", str(tmp_path / "trace.jsonl"), "--json", "--prefill", "4", "--decode", "4", *arguments
    )
    assert (done.returncode, done.stderr) == (0, "")
    decode = 0 if options.coupled else 4
    expected = replace(options, prefill=4, decode=decode, slo=Slo(ttft_s=30.0))
    assert json.loads(done.stdout) == simulate(trace, expected).figures()
