"""Object groups of a hybrid model through LMCache's server; runs under the engines' python, without a GPU.

Reads a JSON request from standard input, writes a JSON reply to the path given as the only argument:

    {"address": path}    ->    {check: answer}
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest.mock import patch

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.multiprocess.modules.lmcache_driven_transfer import LMCacheDrivenTransferModule

from kvfs.connectors.lmcache_rules import object_locks
from kvfs.connectors.lmcache_rules.object_keys import layout_of
from tests.engines.lmcache_server import (
    CHUNKS,
    LAYOUTS,
    ONE_GROUP,
    OTHER_TYPES,
    RANKS,
    TWO_GROUPS,
    EngineRank,
    Server,
    at_load,
    content,
)


# --- checks ------------------------------------------------------------------------------------------------
def check_round(address: str) -> dict[str, Any]:
    with Server(address, LAYOUTS) as writer:
        found: dict[str, Any] = {"store": writer.store(1)}
        sizes = [layout_of(each).size_bytes for each in LAYOUTS.values()]
        found["usage is of all objects"] = (
            writer.adapter.get_usage().total_bytes_used == RANKS * CHUNKS * sum(sizes)
        )
        # vLLM keeps the state of few chunks, and of a window the blocks of the last ones.
        writer.store(2, {1: {2, 3, 4, 5}, 2: {1, 3}})
        writer.store(3, {1: {0, 2, 3, 5}, 2: {1, 2, 4}})
    with Server(address, LAYOUTS) as reader:
        found["all"], found["again"] = reader.look_up(1), reader.look_up(1)
        found["few states"], found["window with a gap"] = reader.look_up(2), reader.look_up(3)
        found["nothing"] = reader.look_up(4)
        found["locked at the end"] = reader.adapter.report_status()["locked"]
    with Server(address, LAYOUTS, revision="2") as other:
        found["other weights"] = other.look_up(1)
    with Server(address, OTHER_TYPES) as other:
        found["other element types"] = other.look_up(1)
    swapped = {0: LAYOUTS[1], 1: LAYOUTS[0], 2: LAYOUTS[2]}
    with Server(address, swapped, windows=[2, -1, 1]) as other:
        found["other order of groups"] = other.look_up(1)
    with Server(address, ONE_GROUP) as other:
        found["full attention alone"] = other.look_up(1)
    return found


def check_evictions(address: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with Server(address, LAYOUTS) as writer:
        for prompt in range(10, 17):
            writer.store(prompt)
        evicted = {
            "a window's last chunk of one rank": (11, 1, 1, 5),
            "a window's old chunk": (12, 1, 0, 1),
            "a state of one rank": (13, 2, 1, 5),
            "full attention": (14, 0, 0, 2),
        }
        for prompt, group, rank, chunk in evicted.values():
            writer.adapter.delete(writer.keys(prompt, group, rank)[chunk : chunk + 1])
    with Server(address, LAYOUTS) as reader:
        found |= {name: reader.look_up(prompt) for name, (prompt, *_) in evicted.items()}
    with Server(address, LAYOUTS) as reader:
        at_load(reader, reader.adapter.delete)
        found["all, after the look-up"] = reader.look_up(10)
    with Server(address, LAYOUTS) as reader:
        lost = reader.keys(16, 1, 0)[4:5]

        def lose(keys: list[ObjectKey]) -> None:
            reader.adapter.submit_unlock(lost)
            reader.adapter.delete(lost)

        at_load(reader, lose)
        found["a window's, after look-up and unlock"] = reader.look_up(16)
        found["locked at the end"] = reader.adapter.report_status()["locked"]
    with Server(address, LAYOUTS) as reader, patch.object(object_locks, "CONNECTOR_LOCKS", 5):
        locked = []
        at_load(reader, lambda keys: locked.append(reader.adapter.report_status()["locked"]))
        found["more than can be locked"] = [*reader.look_up(15), locked]
    return found


def check_sizes(address: str) -> dict[str, Any]:
    """Objects of other sizes than their layout's under their keys."""
    found: dict[str, Any] = {}
    with Server(address, LAYOUTS) as writer:
        writer.store(21)
        writer.store(22)
        size = layout_of(LAYOUTS[1]).size_bytes
        for prompt, chunk, of in ((21, 5, size + 64), (22, 4, size - 64)):
            key = writer.keys(prompt, 1, 1)[chunk]
            writer.plant(writer.digest(key), content(key, of))
    with Server(address, LAYOUTS) as reader:
        found["longer"], found["shorter"] = reader.look_up(21), reader.look_up(22)
        # Without a look-up: one that does not fit is no other's miss.
        some = reader.all_keys(21)
        objects = [
            memory
            for group, described in LAYOUTS.items()
            for memory in reader.storage.reserve_write(
                [each for each in some if each.object_group_id == group], described
            ).values()
        ]
        bitmap = reader.adapter._load(some, objects)
        found["missed by a load of all"] = [
            [key.object_group_id, i % CHUNKS] for i, key in enumerate(some) if not bitmap.test(i)
        ]
        found["loaded right"] = all(
            bytes(memory.byte_array) == content(key, memory.get_size())
            for i, (key, memory) in enumerate(zip(some, objects, strict=True))
            if bitmap.test(i)
        )
    return found


def check_bare_keys(address: str) -> dict[str, Any]:
    """Objects under keys without a layout."""
    found: dict[str, Any] = {}
    size = layout_of(LAYOUTS[0]).size_bytes
    with Server(address, LAYOUTS) as writer:
        for key in writer.all_keys(31):
            writer.plant_bare(key, layout_of(LAYOUTS[key.object_group_id]).size_bytes)
        for rank in range(RANKS):
            for chunk, key in enumerate(writer.keys(32, 0, rank)):
                writer.plant_bare(key, size if chunk < 3 else size - 64)
    with Server(address, ONE_GROUP) as reader:
        found["one group"] = reader.look_up(31)
        found["of another size"] = reader.look_up(32)
    with Server(address, LAYOUTS) as reader:
        found["several groups"] = reader.look_up(31)
    with Server(address, ONE_GROUP) as reader:
        reader.adapter.delete(reader.all_keys(31))
        found["one group, deleted"] = reader.look_up(31)
    return found


def check_serde(address: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with Server(address, ONE_GROUP, revision="serde", serde="fp8") as writer:
        found["store"] = writer.store(41)
    with Server(address, ONE_GROUP, revision="serde", serde="fp8") as reader:
        found["hits"] = reader.look_up(41)[0]
    with Server(address, ONE_GROUP, revision="serde") as reader:
        found["without serde"] = reader.look_up(41)
    groups: dict[str, Any] = {"windows": [-1, 1], "revision": "serde"}
    with Server(address, TWO_GROUPS, **groups, serde="fp8") as writer:
        found["store of groups"] = [writer.store(prompt) for prompt in (42, 43)]
        found["usage"] = writer.adapter.get_usage().total_bytes_used
    with Server(address, TWO_GROUPS, **groups, serde="fp8") as reader:
        found["hits of groups"] = reader.look_up(42)
    with Server(address, TWO_GROUPS, **groups) as both:
        found["groups without serde"] = [set(both.store(42)) == {True}, both.look_up(42)]
    return found


def check_delete(address: str) -> dict[str, Any]:
    with Server(address, LAYOUTS) as writer:
        writer.store(51)
        keys = writer.all_keys(51)
        digests = [writer.digest(key) for key in keys]
        blocks = writer.adapter._link.blocks(writer.adapter._namespace)
        there = sum(blocks.exists(digests))
        writer.adapter.delete(keys)
        usage = writer.adapter.get_usage().total_bytes_used
        return {"there": there, "left": sum(blocks.exists(digests)), "usage": usage}


def check_engine(address: str) -> dict[str, Any]:
    """From the caches of an engine's ranks through LMCache's copies into the caches of another's."""
    full = list(range(1, 2 * CHUNKS + 1))
    window = [0, 0, 0, 0, *full[4:]]
    states = [0, 2, 0, 4, 0, 6]
    found: dict[str, Any] = {}
    with Server(address, LAYOUTS, revision="engine") as server:
        transfers = LMCacheDrivenTransferModule(server.context)
        writers = [EngineRank(server, transfers, rank) for rank in range(RANKS)]
        for writer in writers:
            writer.compute()
        objects = RANKS * (CHUNKS + 4 + 3)
        found["store"] = server.stores(
            objects, lambda: found.update(copied=[each.store(1, [full, window, states]) for each in writers])
        )
        transfers.close()
    with Server(address, LAYOUTS, revision="engine") as server:
        transfers = LMCacheDrivenTransferModule(server.context)
        readers = [EngineRank(server, transfers, rank) for rank in range(RANKS)]
        request, hits = server.hits(1)
        found["hits"] = hits
        found["retrieve"] = [each.retrieve(1, request, hits, [full, full, states]) for each in readers]
        transfers.close()
    needed = [full, full, full[-4:], states[-1:], states[-1:]]
    found["equal"] = [
        [
            torch.equal(_blocks(one, some), _blocks(two, some))
            for one, two, some in zip(writer.layers, reader.layers, needed, strict=True)
        ]
        for writer, reader in zip(writers, readers, strict=True)
    ]
    return found


def _blocks(layer: torch.Tensor, some: list[int]) -> torch.Tensor:
    """Return some blocks of a layer of attention or of states."""
    return layer[:, some] if layer.dim() == 5 else layer[some]


CHECKS = {
    "engine": check_engine,
    "round": check_round,
    "evictions": check_evictions,
    "sizes": check_sizes,
    "bare keys": check_bare_keys,
    "serde": check_serde,
    "delete": check_delete,
}


def main() -> None:
    address = json.loads(sys.stdin.readline())["address"]
    reply = {name: check(address) for name, check in CHECKS.items()}
    with open(sys.argv[1], "w") as file:
        json.dump(reply, file)


if __name__ == "__main__":
    main()
