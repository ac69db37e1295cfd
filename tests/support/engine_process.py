"""An engine as a process: a cache, HTTP as engines answer it, events over ZeroMQ, and faults in what it publishes.

Responsibility: `python -m tests.support.engine_process PORT TOPIC CAPACITY REPLAY COSTS EVENTS...` prefills, publishes
what its cache gains and evicts to each of EVENTS, and says at `/holds` what it really has. REPLAY is the endpoint where
it answers requests for replays, empty for none. COSTS is `MODEL DEVICE DEVICES` of the table of costs: each prefill
takes that long, one after the other; empty: no time. `POST /fault` sets what goes wrong next.

Concurrency: one trio thread.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from functools import partial
from typing import Any

import httptools
import msgspec
import trio

from kvfs.events.kv_events import GPU, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvfs.events.sockets import Publisher
from kvfs.keys import prefix_hashes, split_keys
from scheduler.routing.cost import CostModel, table_costs
from scheduler.simulation.nodes import BlockLru
from tests.support.conductors import BLOCK_TOKENS, NAMESPACE
from tests.support.stub_engines import receive_message, send


class Faults(msgspec.Struct):
    """What goes wrong, in numbers of batches or seconds."""

    drop: int = 0
    double: int = 0
    swap: int = 0
    hold: bool = False
    """Whether batches are kept back until this is false again."""
    metrics_s: float = 0.0
    clear: bool = False
    """Whether the cache is emptied, with an event that says so."""


class FaultySender:
    """A PUB socket that loses, doubles, swaps and holds back what is sent."""

    def __init__(self, sockets: list[Any]) -> None:
        self._sockets, self.faults = sockets, Faults()
        self._held: list[list[bytes]] = []

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        faults = self.faults
        if faults.drop:
            faults.drop -= 1
            return
        batches = [frames]
        if faults.double:
            faults.double -= 1
            batches = [frames, frames]
        self._held += batches
        if faults.swap and len(self._held) < 2:
            return
        if faults.swap:
            faults.swap -= 1
            self._held.reverse()
        if not faults.hold:
            self.flush(flags)

    def flush(self, flags: int) -> None:
        held, self._held = self._held, []
        for frames in held:
            for socket in self._sockets:
                socket.send_multipart(frames, flags)


class EngineProcess:
    def __init__(
        self, topic: str, capacity: int, replay: str, costs: CostModel | None, events: list[str]
    ) -> None:
        self.cache = BlockLru(capacity)
        self.costs, self._device = costs, trio.Lock()
        self.names: dict[int, bytes] = {}
        self.publisher = Publisher(events[0], topic=topic, replay_endpoint=replay or None)
        others = [Publisher(each, topic=topic) for each in events[1:]]
        self.sender = FaultySender([each._sender for each in (self.publisher, *others)])
        self._others = others
        self.publisher._sender = self.sender  # type: ignore[assignment]
        self.started_s = time.time()
        self.running = 0

    async def prefill(self, tokens: list[int]) -> int:
        """Make a prompt's blocks, in the time that it takes; return how many tokens of it were there already."""
        async with self._device:
            hashes = self._names_of(tokens)
            cached = min(self._held(hashes), (len(tokens) - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
            if self.costs is not None:
                await trio.sleep(self.costs.prefill_s(len(tokens), cached))
            self._store(tokens, hashes)
            return cached

    def _held(self, hashes: list[int]) -> int:
        """Count the blocks that are in the cache, from the first on."""
        return next((at for at, name in enumerate(hashes) if name not in self.cache), len(hashes))

    def _names_of(self, tokens: list[int]) -> list[int]:
        keys = split_keys(prefix_hashes(NAMESPACE, tokens))
        hashes = [int.from_bytes(key[:8], "big") for key in keys]
        self.names |= dict(zip(hashes, keys, strict=True))
        return hashes

    def _store(self, tokens: list[int], hashes: list[int]) -> None:
        """Put a prompt's blocks into the cache, and publish what that changes."""
        held = self._held(hashes)
        for name in reversed(hashes):
            self.cache.use(name)
        gone = [name for name, _ in self.cache.evict()]
        events: list[KVEvent] = []
        if hashes[held:]:
            events.append(
                BlockStored(
                    block_hashes=list(hashes[held:]),
                    parent_block_hash=hashes[held - 1] if held else None,
                    token_ids=tokens[held * BLOCK_TOKENS : len(hashes) * BLOCK_TOKENS],
                    block_size=BLOCK_TOKENS,
                    lora_id=None,
                    medium=GPU,
                    lora_name=None,
                )
            )
        if gone:
            events.append(BlockRemoved(list(gone), GPU))
        if events:
            self.publisher.publish(events)

    def fault(self, faults: Faults) -> None:
        self.sender.faults = faults
        if faults.clear:
            self.cache = BlockLru(self.cache.capacity)
            self.publisher.publish([AllBlocksCleared()])
        if not faults.hold and not faults.swap:
            self.sender.flush(1)

    def holds(self) -> list[str]:
        return [key.hex() for name, key in self.names.items() if name in self.cache]

    # --- HTTP ---------------------------------------------------------------------------------------------
    async def serve(self, stream: trio.SocketStream) -> None:
        async with stream:
            with suppress(trio.BrokenResourceError, httptools.HttpParserError):
                while (message := await receive_message(stream, httptools.HttpRequestParser)) is not None:
                    try:
                        answer = await self._answer(message.url.decode(), message.body)
                    except (ValueError, KeyError, RecursionError) as error:
                        await send(stream, 400, json.dumps({"error": {"message": repr(error)}}).encode())
                    else:
                        await send(stream, 200, answer)

    async def _answer(self, path: str, body: bytes) -> bytes:
        if path == "/metrics":
            await trio.sleep(self.sender.faults.metrics_s)
            return f"process_start_time_seconds {self.started_s}\nvllm:num_requests_running {self.running}\n".encode()
        if path == "/fault":
            self.fault(msgspec.json.decode(body, type=Faults))
        elif path == "/holds":
            return json.dumps(self.holds()).encode()
        elif path == "/tokenize":
            return json.dumps({"tokens": [int(word) for word in json.loads(body)["prompt"].split()]}).encode()
        elif path.endswith("completions"):
            prompt = json.loads(body)["prompt"]
            tokens = [int(word) for word in prompt.split()] if isinstance(prompt, str) else prompt
            details = {"cached_tokens": await self.prefill(tokens)}
            usage = {"prompt_tokens": len(tokens), "completion_tokens": 1, "prompt_tokens_details": details}
            choices = [{"index": 0, "text": "w", "finish_reason": "length"}]
            return json.dumps({"id": "c", "choices": choices, "usage": usage}).encode()
        return b"{}"


async def main(*arguments: str) -> None:
    port, topic, capacity, replay, table, *events = arguments
    costs = None
    if table:
        model, device, devices = table.split()
        costs = table_costs(model, device, devices=int(devices))
    engine = EngineProcess(topic, int(capacity), replay, costs, events)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.publisher.serve_replays)
        await nursery.start(partial(trio.serve_tcp, engine.serve, int(port), host="127.0.0.1"))
        print("ready", flush=True)
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
