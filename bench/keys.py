"""Figures of prefix hashes, against plain SHA-256 of the same tokens.

Responsibility: one function for each figure. Both sides hash 1,000 blocks of 512 tokens, which is a prompt of
512,000 tokens: the chain hashes 16 bytes more for each block and cannot run ahead of itself, so it can come near
one SHA-256 over the same buffer and no nearer than 0.97.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from dataclasses import replace
from random import Random
from typing import Any

from bench.measure import Plan, Result, Side, compare
from kvfs.keys import Namespace, prefix_hashes

BLOCKS = 1000
BLOCK_TOKENS = 512
NAMESPACE = Namespace.of_one_device(
    model="example/model",
    revision="0123456789abcdef",
    dtype="bfloat16",
    layout="LKTHD",
    block_tokens=BLOCK_TOKENS,
)


def _tokens() -> array[int]:
    random = Random(7)
    return array("I", (random.randrange(150_000) for _ in range(BLOCKS * BLOCK_TOKENS)))


def _against_sha256(name: str, tokens: array[int], namespace: Namespace, seconds: float) -> Result:
    words = array("I", tokens).tobytes()

    def chain(_: int) -> None:
        prefix_hashes(namespace, tokens)

    def plain(_: int) -> None:
        hashlib.sha256(words).digest()

    return compare(name, Side(chain), Side(plain), Plan(seconds, batch=5))


def sha256_512(seconds: float) -> Result:
    """Hash tokens that are 32-bit unsigned already, the canonical form."""
    return _against_sha256("keys.sha256_512", _tokens(), NAMESPACE, seconds)


def sha256_512_int64(seconds: float) -> Result:
    """Hash tokens as 64-bit integers, which are checked and narrowed on the way."""
    return _against_sha256("keys.sha256_512_int64", array("q", _tokens()), NAMESPACE, seconds)


def xxh3_512(seconds: float) -> Result:
    """Compare the hash for one trust domain with the same SHA-256."""
    return _against_sha256("keys.xxh3_512", _tokens(), replace(NAMESPACE, hash="xxh3_128"), seconds)


def measure(seconds: float = 1.0) -> list[dict[str, Any]]:
    """Return every figure as {name, value, unit, baseline, ratio}; ratio is how many times as fast as SHA-256."""
    return [figure(seconds).as_json() for figure in (sha256_512, sha256_512_int64, xxh3_512)]


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
