"""Calls of Mooncake's store whose answers are compared: what it says (recorded once) and what kvfs says.

`answers` makes them on any class with that surface, in a fixed order, and returns label -> answer as JSON values (bytes
in hex). Run as a program it records the real ones:

    mooncake_master --port 50951 & python mooncake_scenario.py 127.0.0.1:50951 > ../golden/mooncake.json
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any

SIZE = 4096
GIB = 1 << 30


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if type(value).__name__ == "BufferHandle":
        return {"size": value.size(), "bytes": bytes(memoryview(value)).hex()}
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    return value


class _Recorder:
    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}

    def __call__(self, label: str, do: Callable[..., Any], *arguments: Any) -> None:
        assert label not in self.answers, label
        try:
            self.answers[label] = _plain(do(*arguments))
        except Exception as error:
            self.answers[label] = f"raises {type(error).__name__}"


def answers(store_class: Any, setup: tuple[Any, ...]) -> dict[str, Any]:
    """All answers, of a store that is empty."""
    say, store = _Recorder(), store_class()
    say("setup", store.setup, *setup)
    _values(say, store)
    memory = ctypes.create_string_buffer(8 * SIZE)
    _buffers(say, store, memory, ctypes.addressof(memory))
    _removals(say, store)
    say("close", store.close)
    return say.answers


def _values(say: _Recorder, store: Any) -> None:
    say("missing: is_exist", store.is_exist, "missing")
    say("missing: get", store.get, "missing")
    say("missing: get_size", store.get_size, "missing")
    say("missing: get_buffer", store.get_buffer, "missing")
    say("put", store.put, "value", b"first")
    say("put again", store.put, "value", b"second")
    say("get after put again", store.get, "value")
    say("get_size", store.get_size, "value")
    say("is_exist", store.is_exist, "value")
    say("put of an empty value", store.put, "empty", b"")
    say("put of an empty key", store.put, "", b"value")
    say("get of an empty key", store.get, "")
    say("is_exist of an empty key", store.is_exist, "")
    say("batch_is_exist", store.batch_is_exist, ["value", "missing", "value"])
    say("batch_is_exist of none", store.batch_is_exist, [])
    say("put_parts", store.put_parts, "parts", b"one,", b"two,", bytearray(b"three"))
    say("get of parts", store.get, "parts")
    say("put_parts of nothing", store.put_parts, "no parts")
    say("put_parts with an empty one", store.put_parts, "one empty", b"", b"x")
    say("put_batch", store.put_batch, ["batch 1", "batch 2"], [b"1", b"22"])
    say("put_batch of unequal lists", store.put_batch, ["batch 3"], [])
    say("get_batch", store.get_batch, ["batch 1", "missing", "batch 2"])
    say("get_buffer", store.get_buffer, "parts")
    say("batch_get_buffer", store.batch_get_buffer, ["batch 2", "missing"])
    say("upsert", store.upsert, "value", b"third")
    say("get after upsert", store.get, "value")
    say("upsert of a new key", store.upsert, "upserted", b"new")
    say("a key with every character", store.put, "a/b@c d\u00fc\u4e16 ", b"odd")
    say("get of that", store.get, "a/b@c d\u00fc\u4e16 ")


def _buffers(say: _Recorder, store: Any, memory: Any, at: int) -> None:
    for i in range(8):
        memory[i * SIZE : (i + 1) * SIZE] = bytes([65 + i]) * SIZE
    say("put_from unregistered memory", store.put_from, "unregistered", at, SIZE)
    say("register_buffer", store.register_buffer, at, 8 * SIZE)
    say("register_buffer again", store.register_buffer, at, 8 * SIZE)
    say("put_from", store.put_from, "from", at, SIZE)
    say("put_from again", store.put_from, "from", at + SIZE, SIZE)
    say("put_from of nothing", store.put_from, "from nothing", at, 0)
    say(
        "batch_put_from",
        store.batch_put_from,
        ["b0", "from", "b2"],
        [at, at + SIZE, at + 2 * SIZE],
        [SIZE, SIZE, 7],
    )
    say("batch_put_from of unequal lists", store.batch_put_from, ["b3", "b4"], [at], [SIZE])
    say("get_into", store.get_into, "from", at + 3 * SIZE, SIZE)
    say("bytes of get_into", lambda: bytes(memory[3 * SIZE : 3 * SIZE + 4]))
    say("get_into a larger place", store.get_into, "b2", at + 3 * SIZE, SIZE)
    say("get_into a smaller place", store.get_into, "from", at + 3 * SIZE, SIZE - 1)
    say("get_into of a missing key", store.get_into, "missing", at, SIZE)
    say(
        "batch_get_into",
        store.batch_get_into,
        ["b0", "missing", "b2", "from"],
        [at + i * SIZE for i in range(4, 8)],
        [SIZE, SIZE, SIZE, 16],
    )
    say(
        "bytes of batch_get_into",
        lambda: bytes(memory[4 * SIZE : 4 * SIZE + 2]) + bytes(memory[6 * SIZE : 6 * SIZE + 2]),
    )
    say("batch_get_into of unequal lists", store.batch_get_into, ["b0", "b2"], [at], [SIZE])
    many = [[at, at + 2 * SIZE], [at + SIZE]], [[3, 5], [4]]
    say("batch_put_from_multi_buffers", store.batch_put_from_multi_buffers, ["m0", "m1"], *many)
    say("get of multi buffers", store.get_batch, ["m0", "m1"])
    into = [[at + 5 * SIZE, at + 6 * SIZE], [at + 7 * SIZE], [at + 7 * SIZE + 64]], [[3, 5], [4], [4]]
    say("batch_get_into_multi_buffers", store.batch_get_into_multi_buffers, ["m0", "m1", "missing"], *into)
    say(
        "bytes of that",
        lambda: bytes(memory[5 * SIZE : 5 * SIZE + 3]) + bytes(memory[6 * SIZE : 6 * SIZE + 5]),
    )
    say("unregister_buffer", store.unregister_buffer, at)
    say("unregister_buffer again", store.unregister_buffer, at)


def _removals(say: _Recorder, store: Any) -> None:
    say("remove of a missing key", store.remove, "missing")
    say("remove of what was just read", store.remove, "m0")
    say("remove of what was just read, by force", store.remove, "m0", True)
    say("is_exist after remove", store.is_exist, "m0")
    say("remove_all by force", store.remove_all, True)
    say("remove_all of nothing", store.remove_all, True)
    say("is_exist after remove_all", store.is_exist, "value")


if __name__ == "__main__":
    from mooncake.store import MooncakeDistributedStore

    here = ("127.0.0.1", "P2PHANDSHAKE", GIB // 4, GIB // 16, "tcp", "", sys.argv[1])
    print(json.dumps(answers(MooncakeDistributedStore, here), indent=1))
