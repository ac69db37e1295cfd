"""Small models of further families with random weights: what each one's layers keep of a prompt is of another kind.

Responsibility: `Family.write` writes `config.json` and `model.safetensors` (a few MB) for a given seed, as
`tiny_llama.py` does for a Llama.

What a layer adds to the residual stream outweighs the embeddings, and recurrent states forget slowly, so that the
outputs depend on the whole prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCABULARY = 1024
HIDDEN = 128
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
INTERMEDIATE = 128
EXPERTS = 4
WINDOW = 64
CHUNK = 128
"""Tokens of a chunk of local attention, within which alone its layers read."""
LATENT = 512
ROTARY = 64
"""Of MLA: what its heads have in common of a token, of which the second is rotated; vLLM's kernel for CPUs has no other
sizes."""
MLA_DIM = 128
WIDE_DIM = 64
"""Of the heads of Gemma 4's full attention, of others HEAD_DIM."""
MAMBA_HEADS = 8
STATE = 32
CONVOLVED = 4
DELTA_HEADS = 2
DELTA_DIM = 128
"""Of 32 vLLM has no gated delta nets on CPUs."""
DECAY = -5.0
"""The logarithm of how fast a state forgets, so slowly that it still has what is several blocks behind."""

Tensors = Iterator[tuple[str, tuple[int, ...], float]]
"""Names, shapes and gains: the standard deviation times the square root of the inputs. One axis: all are the gain."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "float32",
}


@dataclass(frozen=True)
class Family:
    """A model's configuration, and the tensors of each kind of layer."""

    architecture: str
    layers: tuple[str, ...]
    """The kind of each, a key of LAYERS."""
    config: dict[str, Any] = field(default_factory=dict)

    def write(self, directory: Path, seed: int = 0) -> None:
        """Write the model into `directory`, which is made; float32 throughout."""
        rng = np.random.default_rng(seed)
        tensors = {}
        for name, shape, gain in self._tensors():
            if len(shape) == 1:
                tensors[name] = np.full(shape, gain, dtype=np.float32)
            else:  # experts in one tensor have their inputs first, convolutions one
                inputs = shape[1] if len(shape) == 3 and shape[1] > 1 else shape[-1]
                scaled = rng.standard_normal(shape) * gain / np.sqrt(inputs)
                tensors[name] = scaled.astype(np.float32)
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        own = {"architectures": [self.architecture], "num_hidden_layers": len(self.layers)}
        (directory / "config.json").write_text(json.dumps({**_COMMON, **own, **self.config}, indent=1))

    def _tensors(self) -> Tensors:
        yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN), 0.5
        yield "model.norm.weight", (HIDDEN,), 1.0
        yield "lm_head.weight", (VOCABULARY, HIDDEN), 3.0
        for index, kind in enumerate(self.layers):
            for name, shape, gain in LAYERS[kind]():
                yield f"model.layers.{index}.{name}", shape, gain


def _norms() -> Tensors:
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.weight", (HIDDEN,), 1.0


def _attention(head_dim: int = HEAD_DIM, kv_heads: int = KV_HEADS, gates: int = 0) -> Tensors:
    yield "self_attn.q_proj.weight", ((HEADS + gates) * head_dim, HIDDEN), 1.0
    yield "self_attn.k_proj.weight", (kv_heads * head_dim, HIDDEN), 1.0
    yield "self_attn.v_proj.weight", (kv_heads * head_dim, HIDDEN), 4.0
    yield "self_attn.o_proj.weight", (HIDDEN, HEADS * head_dim), 4.0


def _mlp(name: str = "mlp", width: int = INTERMEDIATE) -> Tensors:
    yield f"{name}.gate_proj.weight", (width, HIDDEN), 2.0
    yield f"{name}.up_proj.weight", (width, HIDDEN), 2.0
    yield f"{name}.down_proj.weight", (HIDDEN, width), 2.0


def _mistral() -> Tensors:
    yield from _norms()
    yield from _attention()
    yield from _mlp()


def _gpt_oss() -> Tensors:
    yield from _norms()
    yield from _attention()
    for name, width in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        yield f"self_attn.{name}_proj.bias", (width * HEAD_DIM,), 0.1
    yield "self_attn.o_proj.bias", (HIDDEN,), 0.1
    yield "self_attn.sinks", (HEADS,), 1.0
    yield "mlp.router.weight", (EXPERTS, HIDDEN), 1.0
    yield "mlp.router.bias", (EXPERTS,), 0.1
    yield "mlp.experts.gate_up_proj", (EXPERTS, HIDDEN, 2 * INTERMEDIATE), 2.0
    yield "mlp.experts.gate_up_proj_bias", (EXPERTS, 2 * INTERMEDIATE), 0.1
    yield "mlp.experts.down_proj", (EXPERTS, INTERMEDIATE, HIDDEN), 2.0
    yield "mlp.experts.down_proj_bias", (EXPERTS, HIDDEN), 0.1


def _gemma_4(head_dim: int, kv_heads: int, own: str = "qkv") -> Tensors:
    """`own`: what a layer computes itself. One that shares the cache of an earlier one computes queries alone, and
    values that are the keys need no weights."""
    gains = {"input": 1.0, "post_attention": 2.0, "pre_feedforward": 1.0, "post_feedforward": 2.0}
    for name, gain in gains.items():
        yield f"{name}_layernorm.weight", (HIDDEN,), gain
    for name in own:
        yield f"self_attn.{name}_proj.weight", ((HEADS if name == "q" else kv_heads) * head_dim, HIDDEN), 1.0
        if name in "qk":
            yield f"self_attn.{name}_norm.weight", (head_dim,), 0.5
    yield "self_attn.o_proj.weight", (HIDDEN, HEADS * head_dim), 1.0
    yield from _mlp()


def _llama_4() -> Tensors:
    yield from _norms()
    yield from _attention()
    yield from _mlp("feed_forward")


def _llama_4_experts() -> Tensors:
    yield from _norms()
    yield from _attention()
    yield from _mlp("feed_forward.shared_expert")
    yield "feed_forward.router.weight", (EXPERTS, HIDDEN), 1.0
    yield "feed_forward.experts.gate_up_proj", (EXPERTS, HIDDEN, 2 * INTERMEDIATE), 2.0
    yield "feed_forward.experts.down_proj", (EXPERTS, INTERMEDIATE, HIDDEN), 2.0


def _mla() -> Tensors:
    yield from _norms()
    yield "self_attn.q_proj.weight", (HEADS * (MLA_DIM + ROTARY), HIDDEN), 1.0
    yield "self_attn.kv_a_proj_with_mqa.weight", (LATENT + ROTARY, HIDDEN), 1.0
    yield "self_attn.kv_a_layernorm.weight", (LATENT,), 1.0
    yield "self_attn.kv_b_proj.weight", (HEADS * 2 * MLA_DIM, LATENT), 2.0
    yield "self_attn.o_proj.weight", (HIDDEN, HEADS * MLA_DIM), 3.0


def _deepseek() -> Tensors:
    yield from _mla()
    yield from _mlp()


def _deepseek_experts() -> Tensors:
    yield from _mla()
    yield "mlp.gate.weight", (EXPERTS, HIDDEN), 1.0
    yield from _mlp("mlp.shared_experts", INTERMEDIATE // 2)
    for index in range(EXPERTS):
        yield from _mlp(f"mlp.experts.{index}", INTERMEDIATE // 2)


def _granite_4(kind: str) -> Tensors:
    yield from _norms()
    yield from _attention() if kind == "attention" else _mamba_2()
    yield "shared_mlp.input_linear.weight", (2 * INTERMEDIATE, HIDDEN), 2.0
    yield "shared_mlp.output_linear.weight", (HIDDEN, INTERMEDIATE), 2.0


def _mamba_2() -> Tensors:
    inner = MAMBA_HEADS * HEAD_DIM
    convolved = inner + 2 * STATE
    yield "mamba.in_proj.weight", (inner + convolved + MAMBA_HEADS, HIDDEN), 1.0
    yield "mamba.conv1d.weight", (convolved, 1, CONVOLVED), 2.0
    yield "mamba.conv1d.bias", (convolved,), 0.0
    yield from (("mamba.A_log", (MAMBA_HEADS,), DECAY), ("mamba.dt_bias", (MAMBA_HEADS,), 0.0))
    yield "mamba.D", (MAMBA_HEADS,), 1.0
    yield "mamba.norm.weight", (inner,), 1.0
    yield "mamba.out_proj.weight", (HIDDEN, inner), 4.0


def _qwen_3_next(kind: str) -> Tensors:
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.weight", (HIDDEN,), 0.0
    yield from _gated_attention() if kind == "attention" else _delta_net()
    yield "mlp.gate.weight", (EXPERTS, HIDDEN), 1.0
    yield from _mlp("mlp.shared_expert", INTERMEDIATE // 2)
    yield "mlp.shared_expert_gate.weight", (1, HIDDEN), 1.0
    for index in range(EXPERTS):
        yield from _mlp(f"mlp.experts.{index}", INTERMEDIATE // 2)


def _gated_attention() -> Tensors:
    yield from _attention(DELTA_DIM, HEADS, gates=HEADS)
    yield "self_attn.q_norm.weight", (DELTA_DIM,), 0.0
    yield "self_attn.k_norm.weight", (DELTA_DIM,), 0.0


def _delta_net() -> Tensors:
    inner = DELTA_HEADS * DELTA_DIM
    yield "linear_attn.in_proj_qkvz.weight", (4 * inner, HIDDEN), 1.0
    yield "linear_attn.in_proj_ba.weight", (2 * DELTA_HEADS, HIDDEN), 1.0
    yield "linear_attn.conv1d.weight", (3 * inner, 1, CONVOLVED), 2.0
    yield from (("linear_attn.A_log", (DELTA_HEADS,), DECAY), ("linear_attn.dt_bias", (DELTA_HEADS,), 0.0))
    yield "linear_attn.norm.weight", (DELTA_DIM,), 1.0
    yield "linear_attn.out_proj.weight", (HIDDEN, inner), 4.0


LAYERS: dict[str, Callable[[], Tensors]] = {
    "Mistral": _mistral,
    "gpt-oss": _gpt_oss,
    "Llama 4": _llama_4,
    "Llama 4, experts": _llama_4_experts,
    "Gemma 4, window": lambda: _gemma_4(HEAD_DIM, KV_HEADS),
    "Gemma 4, full": lambda: _gemma_4(WIDE_DIM, KV_HEADS),
    "Gemma 4, window, shared": lambda: _gemma_4(HEAD_DIM, KV_HEADS, "q"),
    "Gemma 4, full, shared": lambda: _gemma_4(WIDE_DIM, KV_HEADS, "q"),
    "Gemma 4, window, more heads": lambda: _gemma_4(HEAD_DIM, HEADS),
    "Gemma 4, full, keys as values": lambda: _gemma_4(WIDE_DIM, 1, "qk"),
    "DeepSeek": _deepseek,
    "DeepSeek, experts": _deepseek_experts,
    "Granite 4, Mamba": lambda: _granite_4("mamba"),
    "Granite 4, attention": lambda: _granite_4("attention"),
    "Qwen3-Next, delta net": lambda: _qwen_3_next("delta net"),
    "Qwen3-Next, attention": lambda: _qwen_3_next("attention"),
}
"""The tensors of each kind of layer."""

MISTRAL = Family(
    "MistralForCausalLM",
    ("Mistral",) * 4,  # of fewer the end of a prompt of 320 tokens reads nothing of its first 90
    {"model_type": "mistral", "head_dim": HEAD_DIM, "sliding_window": WINDOW},
)
GPT_OSS = Family(
    "GptOssForCausalLM",
    ("gpt-oss",) * 4,
    {
        "model_type": "gpt_oss",
        "head_dim": HEAD_DIM,
        "attention_bias": True,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
)
_GEMMA_4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": HEAD_DIM,
    "global_head_dim": WIDE_DIM,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 0,
}
GEMMA_4 = Family(  # as the small ones: the last layers have no keys and values of their own
    "Gemma4ForCausalLM",
    (
        *(("Gemma 4, window",) * 2 + ("Gemma 4, full",)) * 2,
        "Gemma 4, window, shared",
        "Gemma 4, full, shared",
    ),
    {
        **_GEMMA_4,
        "num_kv_shared_layers": 2,
        "layer_types": [
            *(["sliding_attention"] * 2 + ["full_attention"]) * 2,
            "sliding_attention",
            "full_attention",
        ],
    },
)
GEMMA_4_LARGE = Family(  # as the large ones: full attention has fewer heads, and its values are its keys
    "Gemma4ForCausalLM",
    ("Gemma 4, window, more heads", "Gemma 4, window, more heads", "Gemma 4, full, keys as values") * 2,
    {
        **_GEMMA_4,
        "num_key_value_heads": HEADS,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
)
LLAMA_4 = Family(
    "Llama4ForCausalLM",
    ("Llama 4", "Llama 4, experts") * 2,
    {
        "model_type": "llama4_text",
        "head_dim": HEAD_DIM,
        "intermediate_size_mlp": INTERMEDIATE,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": CHUNK,
        "no_rope_layers": [1, 1, 1, 0],
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
        "use_qk_norm": True,
    },
)
LLAMA_4_FULL = replace(  # vLLM makes three groups of its layers of full attention
    LLAMA_4,
    config={
        **LLAMA_4.config,
        "no_rope_layers": [1, 0, 0, 0],
        "layer_types": ["chunked_attention"] + ["full_attention"] * 3,
    },
)
DEEPSEEK = Family(
    "DeepseekV2ForCausalLM",
    ("DeepSeek", "DeepSeek, experts", "DeepSeek, experts"),
    {
        "model_type": "deepseek_v2",
        "num_key_value_heads": HEADS,
        "moe_intermediate_size": INTERMEDIATE // 2,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": LATENT,
        "q_lora_rank": None,
        "qk_nope_head_dim": MLA_DIM,
        "qk_rope_head_dim": ROTARY,
        "v_head_dim": MLA_DIM,
    },
)
GRANITE_4 = Family(
    "GraniteMoeHybridForCausalLM",
    ("Granite 4, Mamba", "Granite 4, Mamba", "Granite 4, attention") * 2,
    {
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "mamba", "attention"] * 2,
        "shared_intermediate_size": INTERMEDIATE,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_heads": MAMBA_HEADS,
        "mamba_d_head": HEAD_DIM,
        "mamba_n_groups": 1,
        "mamba_d_state": STATE,
        "mamba_d_conv": CONVOLVED,
        "mamba_expand": 2,
        "mamba_chunk_size": 32,
        "position_embedding_type": "nope",
        "attention_multiplier": HEAD_DIM**-0.5,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
    },
)
QWEN_3_NEXT = Family(
    "Qwen3NextForCausalLM",
    ("Qwen3-Next, delta net", "Qwen3-Next, delta net", "Qwen3-Next, attention") * 2,
    {
        "model_type": "qwen3_next",
        "head_dim": DELTA_DIM,
        "num_key_value_heads": HEADS,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
        "full_attention_interval": 3,
        "linear_num_key_heads": DELTA_HEADS,
        "linear_num_value_heads": DELTA_HEADS,
        "linear_key_head_dim": DELTA_DIM,
        "linear_value_head_dim": DELTA_DIM,
        "linear_conv_kernel_dim": CONVOLVED,
        "partial_rotary_factor": 0.25,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": INTERMEDIATE // 2,
        "shared_expert_intermediate_size": INTERMEDIATE // 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
)
