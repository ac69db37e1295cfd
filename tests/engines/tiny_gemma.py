"""A small Gemma 3 with random weights, of sliding windows and full attention.

Responsibility: write `config.json` and `model.safetensors` (about 5 MB) for a given seed, as `tiny_llama.py` does for a
Llama. Of six layers every third one is of full attention, so that vLLM makes three cache groups of two layers each.

Gemma normalises what a layer adds to the residual stream. The embeddings are small here, and the norms behind
attention and MLP have a gain of 2, so that what a layer reads of the prompt outweighs the last token's embedding. Some
prompts still repeat one token: compare likelihoods as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCABULARY = 1024
LAYERS = 6
FULL = range(2, LAYERS, 3)
WINDOW = 64
HIDDEN = 128
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
INTERMEDIATE = 256
MAX_TOKENS = 8192

CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "query_pre_attn_scalar": HEAD_DIM,
    "sliding_window": WINDOW,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_TOKENS,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}

# Standard deviation of each weight times the square root of its inputs, i.e. its gain.
GAINS = {
    "self_attn.q_proj": ((HEADS * HEAD_DIM, HIDDEN), 1.0),
    "self_attn.k_proj": ((KV_HEADS * HEAD_DIM, HIDDEN), 1.0),
    "self_attn.v_proj": ((KV_HEADS * HEAD_DIM, HIDDEN), 4.0),
    "self_attn.o_proj": ((HIDDEN, HEADS * HEAD_DIM), 4.0),
    "mlp.gate_proj": ((INTERMEDIATE, HIDDEN), 4.0),
    "mlp.up_proj": ((INTERMEDIATE, HIDDEN), 4.0),
    "mlp.down_proj": ((HIDDEN, INTERMEDIATE), 4.0),
}
# A norm multiplies by one more than its weight.
NORMS = {
    "input_layernorm": (HIDDEN, 0.0),
    "post_attention_layernorm": (HIDDEN, 1.0),
    "pre_feedforward_layernorm": (HIDDEN, 0.0),
    "post_feedforward_layernorm": (HIDDEN, 1.0),
    "self_attn.q_norm": (HEAD_DIM, 0.0),
    "self_attn.k_norm": (HEAD_DIM, 0.0),
}


def write_model(directory: Path, seed: int = 0, full: Sequence[int] = FULL) -> None:
    """Write the model into `directory`, which is made; float32 throughout. `full`: the layers of full attention."""
    rng = np.random.default_rng(seed)

    def normal(shape: tuple[int, int], gain: float) -> np.ndarray[Any, Any]:
        scaled: np.ndarray[Any, Any] = rng.standard_normal(shape) * gain / np.sqrt(shape[1])
        return scaled.astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": normal((VOCABULARY, HIDDEN), 0.5),
        "model.norm.weight": np.full(HIDDEN, 7.0, dtype=np.float32),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, (size, weight) in NORMS.items():
            tensors[f"{prefix}.{name}.weight"] = np.full(size, weight, dtype=np.float32)
        for name, (shape, gain) in GAINS.items():
            tensors[f"{prefix}.{name}.weight"] = normal(shape, gain)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    kinds = ["full_attention" if layer in full else "sliding_attention" for layer in range(LAYERS)]
    (directory / "config.json").write_text(json.dumps({**CONFIG, "layer_types": kinds}, indent=1))


def write_more_full(directory: Path) -> None:
    """Write a model that has more layers of full attention than of windows: vLLM makes two groups of them."""
    write_model(directory, full=[1, 2, 4, 5])
