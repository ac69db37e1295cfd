"""Keep a `transformers` cache by prompt prefix: the shortest connector.

    prompts = PromptCache(model, "/mnt/kvfs")
    cache, known = prompts.load(input_ids)     # as many tokens as are stored, at least one fewer than the prompt has
    output = model.generate(input_ids, past_key_values=cache)
    prompts.save(input_ids, cache)

Responsibility: cut keys and values of all layers into blocks of tokens, and join them again. Invariants: only whole
blocks are kept; a block is [layer, key or value, token, head, element] ("LKTHD") in the model's element type. The
namespace has configuration and files; the first block's hash has the model in memory at each call: samples of its
tensors, and all settings of its modules. A cache is saved only while the model is the same as at its load.
Concurrency: none.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers import DynamicCache

from kvfs.connectors.common import (
    Link,
    address_of,
    architecture_of,
    chain_parents,
    config_digest,
    model_revision,
)
from kvfs.connectors.memory import Contents
from kvfs.errors import InvalidRequest
from kvfs.keys import HASH_BYTES, prefix_hashes, split_keys
from kvfs.namespaces import Namespace


class PromptCache:
    """Load and save caches of one model, one sequence at a time."""

    def __init__(
        self, model: Any, address: str | None = None, *, block_tokens: int = 64, revision: str | None = None
    ) -> None:
        """Connect. `revision`: what else identifies the model, if anything.

        Raises InvalidRequest, also for a model whose modules cannot be looked into.
        """
        config = model.config
        Contents(model)
        self._model = model
        self._heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self._elements = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._layers, self._dtype, self._device = config.num_hidden_layers, model.dtype, model.device
        self._loaded: weakref.WeakKeyDictionary[DynamicCache, bytes] = weakref.WeakKeyDictionary()
        """Caches that `load` returned, and the digest of the model then."""
        self.namespace = Namespace.of_one_device(
            model=architecture_of(config),
            revision=_revision(str(config.name_or_path or ""), revision),
            dtype=str(self._dtype).removeprefix("torch."),
            layout="LKTHD",
            block_tokens=block_tokens,
            extra={"engine": "transformers", "config": config_digest(config)},
        )
        self._link = Link(address_of({"address": address}), name="transformers")
        self._link.open(self.namespace)

    def load(self, input_ids: torch.Tensor) -> tuple[DynamicCache, int]:
        """Return a cache of the longest stored prefix, and its tokens. `input_ids`: int64, [1, tokens]."""
        weights = Contents(self._model).digest()
        keys = self._keys(input_ids[:, :-1], weights)
        cache, blocks = DynamicCache(), self._link.blocks(self.namespace)
        self._loaded[cache] = weights
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
        # [layer, key or value, head, token, element], the tokens of all blocks in a row: put in order on the device.
        whole = (
            stored[:hits]
            .to(self._device)
            .permute(1, 2, 4, 0, 3, 5)
            .reshape(self._layers, 2, 1, self._heads, -1, self._elements)
        )
        for layer in range(self._layers):
            key, value = whole[layer]
            cache.update(key.contiguous(), value.contiguous(), layer)
        return cache, hits * tokens

    def save(self, input_ids: torch.Tensor, cache: DynamicCache) -> int:
        """Store the whole blocks of a prompt in `cache`; return how many were new.

        A cache that `load` returned before the model changed is not stored; one that is not from `load` is taken as
        computed by the present model.
        """
        weights = Contents(self._model).digest()
        if self._loaded.get(cache, weights) != weights:
            return 0
        keys = self._keys(input_ids[:, : cache.get_seq_length()], weights)
        blocks = self._link.blocks(self.namespace)
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
        split = split_keys(keys)
        new: list[bool] = []
        return sum(self._link.attempt(lambda: blocks.put(split, list(whole), chain_parents(split)), new))

    def close(self) -> None:
        """Close the client."""
        self._link.close()

    def _keys(self, input_ids: torch.Tensor, weights: bytes) -> bytes:
        if input_ids.dim() != 2 or input_ids.shape[0] != 1:
            raise InvalidRequest(f"input_ids of shape {tuple(input_ids.shape)}, not one sequence [1, tokens]")
        count = input_ids.shape[1] // self.namespace.block_tokens
        extra = [weights, *[None] * (count - 1)] if count else None
        return prefix_hashes(self.namespace, input_ids[0].cpu().numpy(), extra=extra)


def _revision(name: str, given: str | None) -> str:
    """Return the name of the weights' files; "memory" without files: the tensors in memory identify them."""
    try:
        return model_revision(name, given)
    except InvalidRequest:
        return "memory"
