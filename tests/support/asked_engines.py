"""Engines that say what they are: vLLM's answers to a Conductor's questions, and a stub that gives them.

Responsibility: `answers`, with changes, and `AskedEngine`, a `StubEngine` that also misbehaves there. Concurrency: one
trio thread.
"""

from __future__ import annotations

import json
from typing import Any

import trio

from scheduler.conductor.feeds.engine_answers import Answers
from tests.support.conductors import NAMESPACE
from tests.support.stub_engines import Asked, Message, StubEngine, send

WEIGHTS = "memory 00112233445566778899aabbccddeeff"
HEAD = "# HELP vllm:kvfs_info What a Conductor knows this engine's blocks by.\n# TYPE vllm:kvfs_info gauge\n"
CACHE = 'vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="None"} 1.0\n'


def models(*names: str, **parents: str) -> bytes:
    cards: list[dict[str, Any]] = [{"id": name, "object": "model", "max_model_len": 1024} for name in names]
    cards += [{"id": name, "parent": parent, "root": "/lora"} for name, parent in parents.items()]
    return json.dumps({"object": "list", "data": cards}).encode()


def sources(rank: int = 0, **changes: Any) -> dict[str, Any]:
    given = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://10.0.0.1:5561",
        "replay_endpoint": "tcp://*:5570",
        "buffer_steps": 10_000,
        "topic": "vllm-0",
    }
    return {str(rank): given | changes}


def info(value: str = "1.0", **changes: str) -> str:
    given = {
        "engine": "0",
        "model_name": "m",
        "namespace": NAMESPACE.canonical.decode(),
        "weights": WEIGHTS,
        "role": "kv_both",
        "store_topic": "node",
        "store_endpoint": "tcp://10.0.0.1:5561",
        "store_replay": "tcp://0.0.0.0:5558",
        "store_peer": "10.0.0.3:9400",
    }
    escaped = {
        key: text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        for key, text in (given | changes).items()
    }
    return "vllm:kvfs_info{" + ",".join(f'{k}="{v}"' for k, v in escaped.items()) + "} " + value + "\n"


def running(*ranks: int) -> str:
    """Return the samples of data-parallel ranks without requests."""
    return "".join(f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} 0.0\n' for rank in ranks)


def answers(**changes: Any) -> Answers:
    given: dict[str, Any] = {
        "models": models("m"),
        "sources": json.dumps(sources()).encode(),
        "metrics": HEAD + info() + CACHE,
    }
    given |= changes
    if isinstance(given["sources"], dict):
        given["sources"] = json.dumps(given["sources"]).encode()
    return Answers(**given)


class AskedEngine(StubEngine):
    """Says what it is, as it is set to."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.said = answers(**{"sources": None, "metrics": info(store_topic=""), **changes})
        self.raw: bytes | None = None
        """What it sends to whoever asks, in place of an answer."""
        self.silent = False
        self.tokens_seen: set[bytes | None] = set()

    async def _answer(self, stream: trio.SocketStream, message: Message) -> bool:
        path = message.url.decode()
        if path not in ("/v1/models", "/kv_event_sources", "/metrics"):
            return await super()._answer(stream, message)
        self.asked.append(Asked(path, message.headers, {}))
        if path == "/v1/models":
            self.tokens_seen.add(message.headers.get(b"authorization"))
        if self.silent:
            await trio.sleep_forever()
        if self.raw is not None:
            await stream.send_all(self.raw)
            return False
        found = {"/v1/models": self.said.models, "/kv_event_sources": self.said.sources}.get(
            path, self.said.metrics.encode()
        )
        await send(stream, 404 if found is None else 200, found or b"{}")
        return True
