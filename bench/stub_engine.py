"""An engine that takes next to nothing: answers to OpenAI's requests that are made before they are asked for.

Responsibility: `python -m bench.stub_engine` prints its port and serves until it is killed. A stream has an event every
PAUSE_S, so that each goes on by itself. Concurrency: one asyncio loop.
"""

from __future__ import annotations

import asyncio
import json
import re

PAUSE_S = 0.004
PROMPT_TOKENS = 1_000
_TOKENS = re.compile(rb'"max_tokens":\s*(\d+)')
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


_COMPLETION = _answer({"id": "c", "choices": [{"index": 0, "text": "w"}], "usage": _USAGE})
_TOKENIZED = _answer({"count": PROMPT_TOKENS, "tokens": list(range(PROMPT_TOKENS))})
_DELTA = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1, "model": "m"}
_TOKEN = _event({**_DELTA, "choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}]})
_LAST = _event({**_DELTA, "choices": [], "usage": _USAGE}) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Connection(asyncio.Protocol):
    """One connection, with one request at a time."""

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
        if request.startswith(b"POST /tokenize"):
            self._transport.write(_TOKENIZED)
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
