"""An engine that takes next to nothing: answers to OpenAI's requests that are made before they are asked for.

Responsibility: `python -m bench.stub_engine` prints its port and serves until it is killed. A stream has an event every
PAUSE_S, so that each goes on by itself. A prompt's first token depends on all of it, and an answer names blocks as that
of vLLM's NixlConnector does, for routers that want them. `/served` is how many completions there were.

Concurrency: one asyncio loop.
"""

from __future__ import annotations

import asyncio
import json
import re
import zlib

PAUSE_S = 0.004
PROMPT_TOKENS = 1_000
_TOKENS = re.compile(rb'"max_(?:completion_)?tokens":\s*(\d+)')
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_USAGE = {
    "prompt_tokens": PROMPT_TOKENS,
    "completion_tokens": 1,
    "prompt_tokens_details": {"cached_tokens": 0},
}


def _answer(value: object) -> bytes:
    body = json.dumps(value).encode()
    return _HEAD % (len(body), body)


def _event(value: object) -> bytes:
    data = b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


_BLOCKS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [1],
    "remote_engine_id": "e",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
}
_COMPLETION = _answer(
    {"id": "c", "choices": [{"index": 0, "text": "w"}], "usage": _USAGE, "kv_transfer_params": _BLOCKS}
)
_REST_OF_TOKENS = b"".join(b",%d" % token for token in range(1, PROMPT_TOKENS))
_DELTA = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1, "model": "m"}
_TOKEN = _event({**_DELTA, "choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}]})
_LAST = _event({**_DELTA, "choices": [], "usage": _USAGE}) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def _tokenized(request: bytes) -> bytes:
    first = zlib.crc32(request[request.find(b"\r\n\r\n") :])
    body = b'{"count":%d,"tokens":[%d%b]}' % (PROMPT_TOKENS, first, _REST_OF_TOKENS)
    return _HEAD % (len(body), body)


class Connection(asyncio.Protocol):
    """One connection, with one request at a time."""

    served = 0
    """Completions, on all connections."""

    def __init__(self) -> None:
        self._data = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return
        found = re.search(rb"(?i)content-length: (\d+)", self._data[:end])
        length = int(found[1]) if found else 0
        if len(self._data) < end + 4 + length:
            return
        request, self._data = self._data, b""
        self._serve(request)

    def _serve(self, request: bytes) -> None:
        assert self._transport is not None
        Connection.served += request.startswith((b"POST /v1/completions", b"POST /v1/chat/completions"))
        if request.startswith(b"POST /tokenize"):
            self._transport.write(_tokenized(request))
        elif request.startswith(b"GET /served"):
            self._transport.write(_answer(Connection.served))
        elif b'"stream":true' not in request:
            self._transport.write(_COMPLETION)
        else:
            tokens = _TOKENS.search(request)
            self._transport.write(_STREAM + _TOKEN)
            self._go_on(int(tokens[1]) - 1 if tokens else 0)

    def _go_on(self, left: int) -> None:
        assert self._transport is not None
        if left:
            asyncio.get_running_loop().call_later(PAUSE_S, self._next, left)
        else:
            self._transport.write(_LAST)

    def _next(self, left: int) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(_TOKEN)
            self._go_on(left - 1)


async def _run() -> None:
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_run())
