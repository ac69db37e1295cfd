"""The cost model: reference figures, and a fit that finds the truth."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.errors import InvalidRequest
from scheduler.routing.cost import DEVICES, MODELS, CostModel, table_costs
from scheduler.routing.cost_fit import CostFitter, LinearFit

TABLE = table_costs()


# --- the table -------------------------------------------------------------------------------------------
def test_the_reference_model() -> None:
    """LLaMA3-70B on eight A800: the figures of the model that the reference tables were made with."""
    assert TABLE.prefill_s(131_072, 0) == pytest.approx(30.4, rel=0.01)
    assert TABLE.kv_token_bytes == 320 * 1024
    assert TABLE.step_fixed_s == pytest.approx(0.0206, rel=0.01)
    assert TABLE.step_context_s == pytest.approx(29e-9, rel=0.01)
    assert TABLE.kv_capacity_tokens == pytest.approx(1.33e6, rel=0.1)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("device", DEVICES)
def test_every_entry_makes_sense(model: str, device: str) -> None:
    costs = table_costs(model, device)
    assert costs.prefill_s(8192, 0) > costs.prefill_s(8192, 4096) > costs.prefill_s(4096, 4096) > 0
    assert costs.step_s(10_000, 2) > costs.step_s(10_000, 1) > costs.step_s(0, 1)
    assert costs.kv_capacity_tokens > 10_000


def test_unknown_names_and_what_does_not_fit_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="gpt-9"):
        table_costs("gpt-9")
    with pytest.raises(InvalidRequest, match="abacus"):
        table_costs(device="abacus")
    with pytest.raises(InvalidRequest, match="does not fit into 1 x a100-80g"):
        table_costs("llama3-70b", "a100-80g", devices=1)


def test_cached_layers_stream_in_while_others_compute() -> None:
    """A prompt that is all there takes as long as its cache needs from host memory."""
    assert TABLE.prefill_s(100_000, 100_000) == pytest.approx(100_000 * 327_680 / 128e9)
    assert TABLE.prefill_s(100, 100) == TABLE.prefill_fixed_s


# --- the fit ---------------------------------------------------------------------------------------------
def truth(prefill: float, decode: float) -> CostModel:
    return replace(
        TABLE,
        prefill_token_s=TABLE.prefill_token_s * prefill,
        prefill_pair_s=TABLE.prefill_pair_s * prefill * 1.3,
    ).slowed_decode(decode)


def observed(true: CostModel, count: int) -> CostFitter:
    rng = random.Random(0)
    fitter = CostFitter(TABLE)
    for _ in range(count):
        tokens = rng.randint(100, 60_000)
        cached = rng.choice((0, tokens // 2))
        fitter.observe_prefill(tokens, cached, true.prefill_s(tokens, cached))
        requests = rng.randint(1, 40)
        context = requests * rng.randint(500, 20_000)
        fitter.observe_step(context, requests, true.step_s(context, requests))
    return fitter


def test_without_observations_the_table_stands() -> None:
    costs = CostFitter(TABLE).costs()
    assert costs.prefill_s(9000, 512) == pytest.approx(TABLE.prefill_s(9000, 512))
    assert costs.step_s(90_000, 9) == pytest.approx(TABLE.step_s(90_000, 9))


@settings(max_examples=25, deadline=None)
@given(st.floats(0.3, 4), st.floats(0.3, 4))
def test_the_fit_finds_the_truth(prefill: float, decode: float) -> None:
    true = truth(prefill, decode)
    fitted = observed(true, 300).costs()
    for tokens, cached in ((1000, 0), (30_000, 0), (60_000, 30_000)):
        assert fitted.prefill_s(tokens, cached) == pytest.approx(true.prefill_s(tokens, cached), rel=0.01)
    assert fitted.step_s(200_000, 20) == pytest.approx(true.step_s(200_000, 20), rel=0.01)


def test_the_fit_follows_a_change() -> None:
    fit = LinearFit((1.0,))
    for value in [1.0] * 3000 + [2.0] * 3000:
        fit.observe((1.0,), value)
    assert list(fit.coefficients()) == pytest.approx([2.0], rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 50_000), st.floats(1e-4, 100)), max_size=60))
def test_no_coefficient_is_negative(seen: list[tuple[int, float]]) -> None:
    fitter = CostFitter(TABLE)
    for tokens, seconds in seen:
        fitter.observe_prefill(tokens, 0, seconds)
        fitter.observe_step(tokens, 1 + tokens % 7, seconds)
    costs = fitter.costs()
    assert min(costs.prefill_token_s, costs.prefill_pair_s, costs.prefill_fixed_s) >= 0
    assert min(costs.step_fixed_s, costs.step_context_s, costs.step_request_s) >= 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_are_none_are_refused(seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="above 0"):
        CostFitter(TABLE).observe_step(1000, 1, seconds)
