"""Costs of prefill, transfer and decode: the formulas that every decision predicts with.

Responsibility: seconds from token counts and bytes. The coefficients come from a table of models and devices
(`table_costs`) or from observation (`scheduler.routing.cost_fit`); both give the same immutable `CostModel`.

Source: the analytic model of the Mooncake paper (FAST'25): per layer a(n^2 - p^2)d + b(n - p)d^2 operations to
prefill n tokens of which p are cached, with a = 2 (causal attention) and b = 22; decode is bound by memory: the
weights and each token's KV cache are read once per step.

Concurrency: none; values never change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from kvfs.errors import InvalidRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients of one model on one kind of instance. All times are in seconds."""

    prefill_fixed_s: float
    """Time of every prefill, however short."""
    prefill_token_s: float
    """Time of each token that is computed: projections and feed-forward layers."""
    prefill_pair_s: float
    """Time of each pair of n^2 - p^2: attention over the tokens before."""
    kv_token_bytes: int
    """KV cache of one token, all layers."""
    host_bytes_s: float
    """From host memory into the device, layer by layer, while earlier layers compute."""
    network_bytes_s: float
    """From one node to others."""
    step_fixed_s: float
    """Time of a decode step of an empty batch: launch overhead and the weights."""
    step_context_s: float
    """Time of each token of context in the batch."""
    step_request_s: float
    """Time of each request in the batch."""
    kv_capacity_tokens: int
    """Context that one decode instance holds."""

    def prefill_s(self, tokens: int, cached: int) -> float:
        """Return the prefill time of `tokens`, of which the first `cached` have their KV cache on the instance.

        Cached layers stream in while the ones before them compute, so the longer of the two counts.
        """
        compute_s = self.compute_s(tokens, cached) + self.prefill_fixed_s
        stream_s = cached * self.kv_token_bytes / self.host_bytes_s
        return compute_s if compute_s > stream_s else stream_s

    def compute_s(self, end: int, begin: int) -> float:
        """Return the time to compute the tokens of a prompt from `begin` to `end`, as a part of a longer step."""
        return self.prefill_pair_s * (end * end - begin * begin) + self.prefill_token_s * (end - begin)

    def step_s(self, context_tokens: int, requests: int) -> float:
        """Return the time of one decode step of a batch."""
        return self.step_fixed_s + self.step_context_s * context_tokens + self.step_request_s * requests

    def slowed_decode(self, factor: float) -> CostModel:
        """Return a model whose decode steps are `factor` times as long."""
        return replace(
            self,
            step_fixed_s=self.step_fixed_s * factor,
            step_context_s=self.step_context_s * factor,
            step_request_s=self.step_request_s * factor,
        )


@dataclass(frozen=True, slots=True)
class Model:
    """The figures of a model that the cost formulas use; sizes are from its published configuration."""

    layers: int
    attention_width: int
    """Query heads x head size: the `d` of the attention term."""
    token_operations: float
    """Multiply-adds of one token outside attention, times two."""
    weight_bytes: int
    kv_token_bytes: int


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator; peak figures of its data sheet (dense 16-bit)."""

    operations_s: float
    memory_bytes_s: float
    memory_bytes: int


def _dense(
    layers: int, hidden: int, heads: int, kv_heads: int, head: int, ffn: int, parameters: float
) -> Model:
    """Describe a dense decoder with gated feed-forward layers, in 16 bits."""
    projections = 2 * hidden * heads * head + 2 * hidden * kv_heads * head
    return Model(
        layers=layers,
        attention_width=heads * head,
        token_operations=2.0 * layers * (projections + 3 * hidden * ffn),
        weight_bytes=int(2 * parameters),
        kv_token_bytes=layers * 2 * kv_heads * head * 2,
    )


MODELS = {
    # The paper's own operation count for its 70B dummy model (b = 22), so that its figures can be met.
    "llama3-70b": Model(80, 8192, 80 * 22 * 8192.0**2, int(2 * 70.6e9), 80 * 2 * 8 * 128 * 2),
    "llama3-8b": _dense(32, 4096, 32, 8, 128, 14336, 8.03e9),
    "qwen2.5-7b": _dense(28, 3584, 28, 4, 128, 18944, 7.62e9),
    "qwen2.5-72b": _dense(80, 8192, 64, 8, 128, 29568, 72.7e9),
}

DEVICES = {
    "a100-80g": Device(312e12, 2.039e12, 80 * 10**9),
    "a800-80g": Device(312e12, 2.039e12, 80 * 10**9),
    "h100-sxm": Device(989e12, 3.35e12, 80 * 10**9),
    "h200": Device(989e12, 4.8e12, 141 * 10**9),
}

COMPUTE_EFFICIENCY = 0.5
"""Share of the peak operations that prefill reaches."""
MEMORY_EFFICIENCY = 0.69
"""Share of the peak memory rate that decode reaches: 141 GB of weights in 12.6 ms on eight A800."""
PREFILL_FIXED_S = 0.020
STEP_OVERHEAD_S = 0.008
STEP_REQUEST_S = 0.0001
KV_MEMORY_SHARE = 0.85
"""Share of an instance's device memory that is left for weights and KV cache."""
HOST_BYTES_S = 128e9
NETWORK_BYTES_S = 87e9


def table_costs(
    model: str = "llama3-70b",
    device: str = "a800-80g",
    *,
    devices: int = 8,
    network_bytes_s: float = NETWORK_BYTES_S,
) -> CostModel:
    """Return the costs of `model` on instances of `devices` x `device`, from the table: where a fit begins.

    Raises InvalidRequest for names that are not in the table, and where the weights do not fit.
    """
    spec, chip = _find(MODELS, "model", model), _find(DEVICES, "device", device)
    operations_s = devices * chip.operations_s * COMPUTE_EFFICIENCY
    memory_bytes_s = devices * chip.memory_bytes_s * MEMORY_EFFICIENCY
    room_bytes = devices * chip.memory_bytes * KV_MEMORY_SHARE - spec.weight_bytes
    if room_bytes < spec.kv_token_bytes:
        raise InvalidRequest(f"{model} does not fit into {devices} x {device}")
    return CostModel(
        prefill_fixed_s=PREFILL_FIXED_S,
        prefill_token_s=spec.token_operations / operations_s,
        prefill_pair_s=2.0 * spec.layers * spec.attention_width / operations_s,
        kv_token_bytes=spec.kv_token_bytes,
        host_bytes_s=HOST_BYTES_S,
        network_bytes_s=network_bytes_s,
        step_fixed_s=STEP_OVERHEAD_S + spec.weight_bytes / memory_bytes_s,
        step_context_s=spec.kv_token_bytes / memory_bytes_s,
        step_request_s=STEP_REQUEST_S,
        kv_capacity_tokens=int(room_bytes / spec.kv_token_bytes),
    )


def _find(table: dict[str, T], kind: str, name: str) -> T:
    try:
        return table[name]
    except KeyError:
        raise InvalidRequest(f"{kind} {name!r} is not in the table: {', '.join(table)}") from None
