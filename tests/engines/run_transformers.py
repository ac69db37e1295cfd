"""`PromptCache` with a real transformers model; runs under the engines' python.

Reads a JSON request from standard input, writes a JSON reply to the path given as the only argument:

    {"model": directory, "address": path, "prompts": [[token id]], "new_tokens": int}

Each prompt is generated without a cache, then with what is stored, and saved; all prompts are gone through twice.
Reply:
{"plain": [[id]], "first": [[id]], "second": [[id]], "known": [[tokens loaded] x 2], "new_blocks": [[count] x 2]}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvfs.connectors.transformers import PromptCache


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


def main() -> None:
    request = json.loads(sys.stdin.readline())
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32)
    prompts = [torch.tensor([prompt]) for prompt in request["prompts"]]
    cached = PromptCache(model, request["address"], block_tokens=16)
    reply: dict[str, Any] = {"known": [], "new_blocks": []}
    reply["plain"] = [generate(model, prompt, request["new_tokens"]) for prompt in prompts]
    for turn in ("first", "second"):
        outputs, known, new = [], [], []
        for prompt in prompts:
            cache, tokens = cached.load(prompt)
            known.append(tokens)
            outputs.append(generate(model, prompt, request["new_tokens"], past_key_values=cache))
            new.append(cached.save(prompt, cache))
        reply[turn] = outputs
        reply["known"].append(known)
        reply["new_blocks"].append(new)
    with open(sys.argv[1], "w") as file:
        json.dump(reply, file)


if __name__ == "__main__":
    main()
