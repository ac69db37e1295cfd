"""A small Llama whose greedy output depends on every token of its prompt.

Responsibility: write `config.json` and `model.safetensors` (about 4 MB) for a given seed; nothing else is
needed where the engine is given token ids and no tokenizer.

The weights are drawn so that an equal output proves an equal KV cache. With the usual small
initialisation the residual stream is the last token's embedding, the output repeats one token, and any
cache would do. Here every projection but the queries' and keys' has a gain of 4: attention averages the
whole prompt, the average outweighs the last token's embedding, and each layer amplifies a difference. One
changed token of a hundred then changes the output within some 20 tokens (`test_vllm.py` shows it for each
position), while the rounding of float32 is far too small to.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCABULARY = 1024
LAYERS = 4
HIDDEN = 128
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
INTERMEDIATE = 256
MAX_TOKENS = 32_768

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_TOKENS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
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


def write_model(directory: Path, seed: int = 0) -> None:
    """Write the model into `directory`, which is made; float32 throughout."""
    rng = np.random.default_rng(seed)

    def normal(shape: tuple[int, int], gain: float) -> np.ndarray[Any, Any]:
        scaled: np.ndarray[Any, Any] = rng.standard_normal(shape) * gain / np.sqrt(shape[1])
        return scaled.astype(np.float32)

    ones = np.ones(HIDDEN, dtype=np.float32)
    tensors = {
        "model.embed_tokens.weight": rng.standard_normal((VOCABULARY, HIDDEN)).astype(np.float32),
        "model.norm.weight": ones,
        "lm_head.weight": normal((VOCABULARY, HIDDEN), 4.0),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = ones
        tensors[f"{prefix}.post_attention_layernorm.weight"] = ones
        for name, (shape, gain) in GAINS.items():
            tensors[f"{prefix}.{name}.weight"] = normal(shape, gain)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=1))
