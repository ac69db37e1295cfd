"""Keep a `transformers` cache by prompt prefix: the shortest connector.

    prompts = PromptCache(model, "/mnt/kvfs")
    cache, known = prompts.load(input_ids)     # as many tokens as are stored, at least one fewer than the prompt has
    output = model.generate(input_ids, past_key_values=cache)
    prompts.save(input_ids, cache)

Responsibility: cut keys and values of all layers into blocks of tokens, and put them together again. Invariants: only
whole blocks are kept; a block is [layer, key or value, token, head, element] ("LKTHD") in the model's element type;
weights and configuration are in the namespace. Concurrency: none.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from transformers import DynamicCache

from kvfs.connectors.common import Link, address_of, chain_parents, model_revision
from kvfs.errors import InvalidRequest
from kvfs.keys import HASH_BYTES, prefix_hashes
from kvfs.namespaces import Namespace


class PromptCache:
    """Prompts of one model, one sequence at a time."""

    def __init__(
        self, model: Any, address: str | None = None, *, block_tokens: int = 64, revision: str | None = None
    ) -> None:
        """`revision`: which weights, where they are not files of a directory or the hub's. Raises InvalidRequest."""
        config = model.config
        self._heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self._elements = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._layers, self._dtype, self._device = config.num_hidden_layers, model.dtype, model.device
        self.namespace = Namespace(
            model=str(config.name_or_path or config.model_type),
            revision=model_revision(str(config.name_or_path), revision),
            dtype=str(self._dtype).removeprefix("torch."),
            layout="LKTHD",
            block_tokens=block_tokens,
            tensor_shards=1,
            tensor_rank=0,
            pipeline_shards=1,
            pipeline_rank=0,
            lora="",
            salt="",
            hash="sha256",
            extra={
                "engine": "transformers",
                "config": hashlib.sha256(config.to_json_string().encode()).hexdigest(),
            },
        )
        self._link = Link(address_of({"address": address}), name="transformers")
        self._link.open(self.namespace)

    def load(self, input_ids: torch.Tensor) -> tuple[DynamicCache, int]:
        """A cache of the longest stored prefix, and how many tokens that is. `input_ids`: int64, [1, tokens]."""
        keys = self._keys(input_ids[:, :-1])
        cache, blocks = DynamicCache(), self._link.blocks(self.namespace)
        hits = 0 if blocks is None else self._link.attempt(lambda: blocks.match(keys), 0)
        if blocks is None or not hits:
            return cache, 0
        tokens = self.namespace.block_tokens
        shape = (hits, self._layers, 2, tokens, self._heads, self._elements)
        stored = torch.empty(shape, dtype=self._dtype)
        missed = [-1] * hits
        sizes = self._link.attempt(lambda: blocks.get_into(keys[: hits * HASH_BYTES], list(stored)), missed)
        block_bytes = stored[0].nbytes
        hits = next((i for i, size in enumerate(sizes) if size != block_bytes), hits)
        if not hits:
            return cache, 0
        # [layer, key or value, head, token, element], the tokens of all blocks in a row.
        whole = (
            stored[:hits]
            .permute(1, 2, 4, 0, 3, 5)
            .reshape(self._layers, 2, 1, self._heads, -1, self._elements)
        )
        for layer in range(self._layers):
            key, value = whole[layer].to(self._device)
            cache.update(key.contiguous(), value.contiguous(), layer)
        return cache, hits * tokens

    def save(self, input_ids: torch.Tensor, cache: DynamicCache) -> int:
        """Store the whole blocks of a prompt that `cache` has; how many were new."""
        keys, blocks = self._keys(input_ids[:, : cache.get_seq_length()]), self._link.blocks(self.namespace)
        if blocks is None or not keys or not self._link.is_up:
            return 0
        count, tokens = len(keys) // HASH_BYTES, self.namespace.block_tokens
        layers = [
            torch.stack((layer.keys[0, :, : count * tokens], layer.values[0, :, : count * tokens]))
            for layer in cache.layers
        ]
        # [layer, key or value, head, token, element] -> [block, layer, key or value, token, head, element]
        whole = torch.stack(layers).reshape(self._layers, 2, self._heads, count, tokens, self._elements)
        whole = whole.permute(3, 0, 1, 4, 2, 5).contiguous().cpu()
        split = [keys[at : at + HASH_BYTES] for at in range(0, len(keys), HASH_BYTES)]
        new: list[bool] = []
        return sum(self._link.attempt(lambda: blocks.put(split, list(whole), chain_parents(split)), new))

    def close(self) -> None:
        self._link.close()

    def _keys(self, input_ids: torch.Tensor) -> bytes:
        if input_ids.dim() != 2 or input_ids.shape[0] != 1:
            raise InvalidRequest(f"input_ids of shape {tuple(input_ids.shape)}, not one sequence [1, tokens]")
        return prefix_hashes(self.namespace, input_ids[0].cpu().numpy())
