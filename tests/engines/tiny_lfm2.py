"""A small LFM2 with random weights, of short convolutions and full attention.

Responsibility: write `config.json` and `model.safetensors` (about 4 MB) for a given seed, as `tiny_llama.py` does for a
Llama. Of six layers every third one is of full attention. A convolution reads what went into its last four tokens:
the recurrent state that vLLM keeps of it.

What a layer adds to the residual stream outweighs the embeddings, which are also the output's, so that the outputs
depend on more than the last token.

vLLM 0.32 computes it wrongly on a CPU unless its own kernels are off (`custom_ops` none): that of RMSNorm reads other
rows of an attention's queries, which are a slice of a larger tensor. Without them its likelihoods are those of
transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCABULARY = 1024
LAYERS = 6
FULL_EVERY = 3
CONVOLVED = 5
HIDDEN = 128
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
INTERMEDIATE = 256
MAX_TOKENS = 8192

CONFIG: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": INTERMEDIATE,
    "layer_types": ["conv" if (layer + 1) % FULL_EVERY else "full_attention" for layer in range(LAYERS)],
    "conv_L_cache": CONVOLVED,
    "conv_bias": False,
    "conv_dim": HIDDEN,
    "block_dim": HIDDEN,
    "block_multiple_of": 64,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_TOKENS,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "float32",
}

# Standard deviation of each weight times the square root of its inputs, i.e. its gain.
_SHARED = {
    "feed_forward.w1": ((INTERMEDIATE, HIDDEN), 2.0),
    "feed_forward.w3": ((INTERMEDIATE, HIDDEN), 2.0),
    "feed_forward.w2": ((HIDDEN, INTERMEDIATE), 2.0),
}
_ATTENTION = {
    "self_attn.q_proj": ((HEADS * HEAD_DIM, HIDDEN), 1.0),
    "self_attn.k_proj": ((KV_HEADS * HEAD_DIM, HIDDEN), 1.0),
    "self_attn.v_proj": ((KV_HEADS * HEAD_DIM, HIDDEN), 4.0),
    "self_attn.out_proj": ((HIDDEN, HEADS * HEAD_DIM), 4.0),
}
_CONVOLUTION = {
    "conv.in_proj": ((3 * HIDDEN, HIDDEN), 1.5),
    "conv.out_proj": ((HIDDEN, HIDDEN), 2.0),
}


def write_model(directory: Path, seed: int = 0) -> None:
    """Write the model into `directory`, which is made; float32 throughout."""
    rng = np.random.default_rng(seed)

    def normal(shape: tuple[int, ...], gain: float) -> np.ndarray[Any, Any]:
        scaled: np.ndarray[Any, Any] = rng.standard_normal(shape) * gain / np.sqrt(shape[-1])
        return scaled.astype(np.float32)

    def norm(size: int, weight: float = 1.0) -> np.ndarray[Any, Any]:
        return np.full(size, weight, dtype=np.float32)

    tensors = {
        "model.embed_tokens.weight": normal((VOCABULARY, HIDDEN), 0.5),
        "model.embedding_norm.weight": norm(HIDDEN, 7.0),
    }
    for layer, kind in enumerate(CONFIG["layer_types"]):
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.{name}.weight": norm(HIDDEN) for name in ("operator_norm", "ffn_norm")}
        if kind == "conv":
            tensors[f"{prefix}.conv.conv.weight"] = normal((HIDDEN, 1, CONVOLVED), 2.0)
        else:
            for name in ("q_layernorm", "k_layernorm"):
                tensors[f"{prefix}.self_attn.{name}.weight"] = norm(HEAD_DIM)
        own = _CONVOLUTION if kind == "conv" else _ATTENTION
        for name, (shape, gain) in {**_SHARED, **own}.items():
            tensors[f"{prefix}.{name}.weight"] = normal(shape, gain)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=1))
