"""KV events against vLLM's own classes: it reads what kvfs writes, and kvfs follows what it publishes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest
import trio

from kvfs.events.engine_index import EngineIndex
from kvfs.events.event_streams import Engine
from kvfs.events.kv_events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, encode_batch
from kvfs.events.sockets import Subscriber
from tests.engines.scripts import fork_script
from tests.support.own_ports import own_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

WAIT_S = 120.0
BATCHES = 9
HASH = bytes(range(16))
OURS = [
    Batch(1.5, [AllBlocksCleared()], 0),
    Batch(
        2.5,
        [
            BlockStored(
                [HASH, HASH[::-1]], None, [], 32, None, "CPU", None, locality="LOCAL", ownership="kvfs"
            ),
            BlockStored([HASH], HASH[::-1], [], 32, None, "STORAGE", "lora@1"),
            BlockRemoved([HASH], "CPU", locality="LOCAL", ownership="kvfs"),
        ],
        0,
    ),
]


async def test_vllm_reads_our_batches_and_we_follow_its_publisher(engine_python: str, work: Path) -> None:
    index, engine = EngineIndex(), Engine("vllm-0", 0)
    reply = work / "events.json"
    replay = f"tcp://127.0.0.1:{own_port()}"
    with Subscriber(index, "tcp://127.0.0.1:*", replays={engine.topic: replay}) as subscriber:
        request = {
            "payloads": [encode_batch(batch).hex() for batch in OURS],
            "connect": subscriber.endpoint,
            "replay": replay,
            "topic": engine.topic,
            "batches": BATCHES,
        }
        asked, begin = os.pipe()
        with (work / "events.log").open("wb") as log:
            process = fork_script(engine_python, work, "events", reply, path=(), output=log, asked=asked)
        os.close(asked)
        try:
            os.write(begin, json.dumps(request).encode() + b"\n")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(subscriber.run)
                with trio.fail_after(WAIT_S):
                    while index.counts["batches"] < BATCHES:
                        assert process.poll() is None, (work / "events.log").read_text()
                        await trio.sleep(0.05)
                nursery.cancel_scope.cancel()
        finally:
            os.close(begin)
            process.wait()

    answer = json.loads(reply.read_text())
    assert answer["types"] == [[type(event).__name__ for event in batch.events] for batch in OURS]
    assert answer["hashes"][1] == [[HASH.hex(), HASH[::-1].hex()], [HASH.hex()], [HASH.hex()]]
    again = [msgspec.msgpack.decode(bytes.fromhex(payload)) for payload in answer["again"]]
    # By value: how many bytes the length of a map has is by how many fields a class has, of which most are left out.
    assert again == [msgspec.msgpack.decode(encode_batch(batch)) for batch in OURS], (
        "vLLM's classes hold more or less than ours"
    )

    held = {number for number in range(BATCHES + 1) if index.holders(number.to_bytes(32, "big"))}
    assert held == set(range(BATCHES + 1)) - {1, 3, 5, 7}
    assert index.counts["lost"] == 0
