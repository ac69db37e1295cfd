"""vLLM's own event classes at both ends; runs under the engines' python.

Reads a JSON request from standard input, writes a JSON reply to the path given as the only argument:

    {"payloads": [hex], "connect": endpoint, "replay": endpoint, "topic": str, "batches": int}

`payloads` are decoded with `KVEventBatch` as vLLM's subscribers do, and encoded again: reply `{"types": [[name]],
"hashes": [[[hex or int]]], "again": [hex]}`. Then vLLM's `ZmqEventPublisher` sends `batches` batches to `connect`,
batch i with blocks i and i + 1 (bytes), then empty ones, since what is sent before the connection is there is only
missed once something later arrives; and answers replays, until standard input ends.
"""

from __future__ import annotations

import json
import select
import sys
from typing import Any

import msgspec
from vllm.distributed.kv_events import (
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)


def plain(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value


def decode(payloads: list[str]) -> dict[str, Any]:
    decoder, encoder = msgspec.msgpack.Decoder(KVEventBatch), msgspec.msgpack.Encoder()
    batches = [decoder.decode(bytes.fromhex(payload)) for payload in payloads]
    return {
        "types": [[type(event).__name__ for event in batch.events] for batch in batches],
        "hashes": [
            [[plain(h) for h in getattr(event, "block_hashes", [])] for event in batch.events]
            for batch in batches
        ],
        "again": [encoder.encode(batch).hex() for batch in batches],
    }


def publish(request: dict[str, Any]) -> ZmqEventPublisher:
    publisher = ZmqEventPublisher(
        0, endpoint=request["connect"], replay_endpoint=request["replay"], topic=request["topic"]
    )
    for i in range(request["batches"]):
        hashes = [i.to_bytes(32, "big"), (i + 1).to_bytes(32, "big")]
        stored = BlockStored(
            block_hashes=hashes,
            parent_block_hash=None,
            token_ids=list(range(32)),
            block_size=16,
            lora_id=None,
            medium="GPU",
            lora_name=None,
        )
        gone = BlockRemoved(block_hashes=[hashes[0]], medium="GPU")
        publisher.publish(KVEventBatch(ts=1.0, events=[stored, gone] if i % 2 else [stored]))
    return publisher


def main() -> None:
    request = json.loads(sys.stdin.readline())
    reply = decode(request["payloads"])
    publisher = publish(request)
    with open(sys.argv[1], "w") as file:
        json.dump(reply, file)
    while not select.select([sys.stdin], [], [], 0.05)[0]:
        publisher.publish(KVEventBatch(ts=1.0, events=[]))
    publisher.shutdown()


if __name__ == "__main__":
    main()
