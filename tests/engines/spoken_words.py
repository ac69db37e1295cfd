"""A tokenizer for the small Llama: one word a token, a chat template with tools, and letters for what has other text.

Responsibility: write `tokenizer.json` and `tokenizer_config.json` beside a model.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

from tests.engines.tiny_llama import VOCABULARY

_SPECIAL = ("<s>", "</s>", "<unk>")
_SPACE = "\u0120"
"""As the byte-level coding writes it."""
_OWN = [_SPACE + name for name in ("system", "user", "assistant", "tool")]
_LETTERS = [*string.ascii_letters, *string.digits, *string.punctuation, _SPACE]
"""What a grammar spells, and who writes JSON."""
FIRST_WORD = len(_SPECIAL) + len(_OWN) + len(_LETTERS)
"""Tokens before it are special, the template's own, or letters."""
SPACE = FIRST_WORD - 1
"""The letter."""
TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %} tool {{ tool.function.name }}{% endfor %}"
    "{% for message in messages %} {{ message.role }} {{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %} assistant{% endif %}"
)


def word(token: int) -> str:
    return f"w{token}"


def write_tokenizer(directory: Path) -> None:
    """Write the tokenizer's files into a model's directory."""
    names = [*_SPECIAL, *_OWN, *_LETTERS, *(_SPACE + word(token) for token in range(FIRST_WORD, VOCABULARY))]
    by_bytes = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
    by_words = {"type": "Split", "pattern": {"Regex": " ?[^ ]+"}, "behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(token, name) for token, name in enumerate(_SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [by_words, by_bytes]},
        "post_processor": None,
        "decoder": by_bytes,
        "model": {
            "type": "BPE",
            "vocab": {name: token for token, name in enumerate(names)},
            "merges": [],
            "unk_token": "<unk>",
            "ignore_merges": True,  # a word that is there is a token
        },
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
