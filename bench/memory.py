"""What is measured without any door: copying and hashing.

Responsibility: one function for each figure.
"""

from __future__ import annotations

import mmap
import os
from array import array
from hashlib import sha256
from random import Random

from bench.doors import FILES
from bench.measure import Plan, Result, Side, compare
from kvfs.keys import Namespace, prefix_hashes
from kvfs.limits import MIB

TOKENS = 1024
BLOCK_TOKENS = 16


def memcpy_1m(seconds: float) -> Result:
    """Information only: 1 MiB from a mapping of the doors' working set's size, in huge pages, into one buffer."""
    with mmap.mmap(-1, FILES * MIB) as source, mmap.mmap(-1, MIB) as target:
        source.madvise(mmap.MADV_HUGEPAGE)
        source.write(os.urandom(MIB) * FILES)
        with memoryview(source) as view, memoryview(target) as into:

            def copy(n: int) -> None:
                start = n % FILES * MIB
                into[:] = view[start : start + MIB]

            return compare("memcpy.1m", Side(copy), None, Plan(seconds, batch=FILES))


def prefix_hash_1k(seconds: float) -> Result:
    """A prompt of 1,024 tokens in blocks of 16, against the same 64 chained SHA-256 by hashlib."""
    namespace = Namespace(
        model="bench",
        revision="1",
        dtype="bfloat16",
        layout="LKTHD",
        block_tokens=BLOCK_TOKENS,
        tensor_shards=1,
        tensor_rank=0,
        pipeline_shards=1,
        pipeline_rank=0,
        lora="",
        salt="",
        hash="sha256",
    )
    random = Random(1)
    tokens = array("I", (random.randrange(1 << 17) for _ in range(TOKENS)))
    packed, step = tokens.tobytes(), BLOCK_TOKENS * tokens.itemsize

    def native(_: int) -> None:
        prefix_hashes(namespace, tokens)

    def chain(_: int) -> None:
        parent = namespace.digest
        for start in range(0, len(packed), step):
            parent = sha256(parent + packed[start : start + step]).digest()[:16]

    return compare(
        "keys.prefix_hash_1k",
        Side(native),
        Side(chain),
        Plan(seconds, batch=64),
    )
