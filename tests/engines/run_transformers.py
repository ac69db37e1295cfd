"""`PromptCache` with real transformers models; runs under the engines' python.

Reads a JSON request from standard input, writes a JSON reply to the path given as the only argument:

    {"model": directory, "copy": one with equal files, "address": path, "prompts": [[token id]], "new_tokens": int}

Each prompt is generated without a cache, then with what is stored, and saved; all prompts are gone through once per
case, over models whose weights are changed in memory between the cases. Reply, by case:
{"plain": [[id]], "cached": [[id]], "known": [tokens loaded], "new_blocks": [count]}, and "late": what a save gave after
the weights had changed since the load.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvfs.connectors.transformers import PromptCache


class LowRank(torch.nn.Module):
    """An adapter beside a projection, in the way of PEFT's."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.base_layer = base
        self.down = torch.nn.Linear(base.in_features, 4, bias=False)
        self.up = torch.nn.Linear(4, base.out_features, bias=False)
        self.scaling = {"default": 8.0}
        self._disable_adapters = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base_layer(x)
        if not self._disable_adapters:
            out = out + self.scaling["default"] * self.up(self.down(x))
        return out

    def delta(self) -> torch.Tensor:
        delta: torch.Tensor = self.scaling["default"] * self.up.weight @ self.down.weight
        return delta


def generate(model: Any, prompt: torch.Tensor, new_tokens: int, **more: Any) -> list[int]:
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        **more,
    )
    return [int(token) for token in output[0, prompt.shape[1] :]]


class Turns:
    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.prompts = [torch.tensor([prompt]) for prompt in request["prompts"]]
        self.reply: dict[str, Any] = {}

    def model(self, directory: str) -> tuple[Any, PromptCache]:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        return model, PromptCache(model, self.request["address"], block_tokens=16)

    def turn(self, name: str, model: Any, cached: PromptCache) -> None:
        new_tokens = self.request["new_tokens"]
        found: dict[str, list[Any]] = {"plain": [], "cached": [], "known": [], "new_blocks": []}
        for prompt in self.prompts:
            found["plain"].append(generate(model, prompt, new_tokens))
            cache, tokens = cached.load(prompt)
            found["known"].append(tokens)
            found["cached"].append(generate(model, prompt, new_tokens, past_key_values=cache))
            found["new_blocks"].append(cached.save(prompt, cache))
        self.reply[name] = found


def attached(model: Any) -> LowRank:
    layer = model.model.layers[1].self_attn
    layer.v_proj = LowRank(layer.v_proj)
    adapter: LowRank = layer.v_proj
    return adapter


def quantised(model: Any) -> Any:
    quantize: Any = torch.ao.quantization.quantize_dynamic
    return quantize(copy.deepcopy(model), {torch.nn.Linear}, dtype=torch.qint8)


@torch.no_grad()
def main() -> None:
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(
        1
    )  # the model is tiny, and threads that wait for each other are slow beside other work
    turns = Turns(json.loads(sys.stdin.readline()))
    model, cached = turns.model(turns.request["model"])
    turns.turn("first", model, cached)
    turns.turn("second", model, cached)
    turns.turn("equal files elsewhere", *turns.model(turns.request["copy"]))

    # The weights are not the files', though the configuration names their directory.
    config = AutoConfig.from_pretrained(turns.request["model"])
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight, source in zip(made.parameters(), model.parameters(), strict=True):
        weight.copy_(source.roll(1, 0))
    made_cached = PromptCache(made, turns.request["address"], block_tokens=16)
    turns.turn("from config", made, made_cached)
    turns.turn("from config, again", made, made_cached)

    row = model.model.layers[0].self_attn.k_proj.weight[5]
    row.mul_(-4)
    turns.turn("a row changed in place", model, cached)
    row.mul_(-0.25)
    turns.turn("changed back", model, cached)

    adapter = attached(model)
    turns.turn("adapter attached", model, cached)
    turns.turn("adapter attached, again", model, cached)
    adapter.scaling["default"] = 2.0
    turns.turn("adapter scaled", model, cached)
    adapter.scaling["default"] = 8.0
    adapter._disable_adapters = True
    turns.turn("adapter disabled", model, cached)
    model.model.layers[1].self_attn.v_proj = adapter.base_layer
    adapter.base_layer.weight.add_(adapter.delta())
    turns.turn("adapter merged", model, cached)
    turns.turn("files, at last", *turns.model(turns.request["model"]))

    # Values that no tensor has.
    files, files_cached = turns.model(turns.request["model"])
    norm, attention = files.model.layers[0].input_layernorm, files.model.layers[0].self_attn
    epsilon, norm.variance_epsilon = norm.variance_epsilon, 1.0
    turns.turn("epsilon of a norm", files, files_cached)
    norm.variance_epsilon, attention.scaling = epsilon, 8 * attention.scaling
    turns.turn("scaling of an attention", files, files_cached)

    # Weights in packed objects, of which the second model's were trained.
    files, _ = turns.model(turns.request["model"])
    for name in ("quantised", "trained and quantised"):
        packed = quantised(files)
        turns.turn(name, packed, PromptCache(packed, turns.request["address"], block_tokens=16))
        files.model.layers[0].self_attn.v_proj.weight.mul_(-2)

    # What was computed with other weights than those that the model has when it is saved is nobody's.
    prompt = turns.prompts[0] ^ 1
    cache, _ = cached.load(prompt)
    generate(model, prompt, 1, past_key_values=cache)
    row.mul_(-4)
    turns.reply["late"] = cached.save(prompt, cache)
    with open(sys.argv[1], "w") as file:
        json.dump(turns.reply, file)


if __name__ == "__main__":
    main()
