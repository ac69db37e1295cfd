"""A tokenizer for the small Llama: one word a token, and a chat template with tools.

Responsibility: write `tokenizer.json` and `tokenizer_config.json` beside a model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.engines.tiny_llama import VOCABULARY

FIRST_WORD = 16
"""Tokens before it are special, unknown, or the template's own."""
_OWN = ("<s>", "</s>", "<unk>", "system", "user", "assistant", "tool")
TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %} tool {{ tool.function.name }}{% endfor %}"
    "{% for message in messages %} {{ message.role }} {{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %} assistant{% endif %}"
)


def word(token: int) -> str:
    return f"w{token}"


def write_tokenizer(directory: Path) -> None:
    """Write the tokenizer's files into a model's directory."""
    vocabulary = {name: token for token, name in enumerate(_OWN)}
    vocabulary |= {word(token): token for token in range(len(_OWN), VOCABULARY)}
    special = [_added(token, _OWN[token]) for token in range(3)]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": 1 << 15,
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def _added(token: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": content, "special": True, **flags}
