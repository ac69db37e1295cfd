"""Store or load blocks with the code of vLLM's `fs` offloading tier; runs under the engines' python.

The tier itself refuses to start on a CPU, so its functions are called as its worker threads call them: the
O_DIRECT probe, the batch of stores, the batch of look-ups, the batch of loads, in C or in Python. Reads a
JSON request from standard input, writes a JSON reply to the path given as the only argument:

    {"action": "store" | "load", "directory": path, "names": [file name], "block_bytes": int, "native": bool}

A block's content follows from its place in `names` (`content`). Reply: {"direct": bool, "found": [bool],
"right": [bool]}: whether O_DIRECT works there, which names were there before, which loads gave the right bytes.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Sequence
from typing import Any


def content(number: int, size: int) -> bytes:
    return b"".join((number << 32 | i).to_bytes(8, "little") for i in range(size // 8))


def look_up(paths: Sequence[str], *, native: bool) -> list[bool]:
    if native:
        from vllm.fs_io_C import batch_lookup

        return list(batch_lookup(paths))
    return [os.path.exists(path) for path in paths]


def run(request: dict[str, Any]) -> dict[str, Any]:
    from vllm.v1.kv_offload.tiering.fs import io

    io._HAS_FSIO_C = request["native"]  # where there is none, the look-up's import fails
    directory, size = request["directory"], request["block_bytes"]
    paths = [os.path.join(directory, name) for name in request["names"]]
    os.makedirs(directory, exist_ok=True)
    memory = mmap.mmap(-1, len(paths) * size)
    offsets = [i * size for i in range(len(paths))]
    direct = io.probe_o_direct(directory)
    found = look_up(paths, native=request["native"])
    right: list[bool] = []
    with memoryview(memory) as view:
        if request["action"] == "store":
            for i, offset in enumerate(offsets):
                view[offset : offset + size] = content(i, size)
            io.batch_store_block(paths, view, offsets, size, direct)
        else:
            io.batch_load_block(paths, view, offsets, size, direct)
            right = [bytes(view[o : o + size]) == content(i, size) for i, o in enumerate(offsets)]
    return {"direct": direct, "found": found, "right": right}


if __name__ == "__main__":
    reply = [run(request) for request in json.load(sys.stdin)]
    with open(sys.argv[1], "w") as file:
        json.dump(reply, file)
