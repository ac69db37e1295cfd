"""Engines that speak OpenAI's interface on real loopback sockets, and misbehave when they are asked to.

Responsibility: `StubEngine`, a server whose answers say which prompt they answer, and `Asker`, a client of the proxy
that sees bytes as they come. Concurrency: one trio thread, that of the proxy under test.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httptools
import trio

from kvfs.config.settings import HandOver
from kvfs.http.server import Certificate, listen
from scheduler.conductor.planning.planner import Role
from scheduler.conductor.values import Router
from scheduler.proxy.proxy import Proxy, ProxyOptions
from scheduler.proxy.upstream.engines import EngineAddress
from tests.support.held_ports import HeldPort
from tests.support.waits import until

WORDS = [f"w{n} " for n in range(1000)]
PROMPT = "x" * 4000
"""About 1,000 tokens by the estimate, so that a prefill leg pays."""


class Message:
    """One HTTP message, as httptools finds it."""

    def __init__(self, kind: type[Any]) -> None:
        self._parser = kind(self)
        self.url, self.body = b"", b""
        self.headers: dict[bytes, bytes] = {}
        self.pieces: list[bytes] = []
        self.head_done = self.done = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.head_done = True

    def on_body(self, data: bytes) -> None:
        self.body += data
        self.pieces.append(data)

    def on_message_complete(self) -> None:
        self.done = True

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    @property
    def method(self) -> str:
        return str(self._parser.get_method().decode())

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[str]:
        return [each.removeprefix("data: ") for each in self.body.decode().split("\n\n") if each]


async def receive_message(stream: trio.SocketStream, kind: type[Any]) -> Message | None:
    message = Message(kind)
    while not message.done:
        data = await stream.receive_some(65536)
        if not data:
            return None
        message.feed(data)
    return message


@dataclass
class Asked:
    """A request that reached an engine."""

    path: str
    headers: dict[bytes, bytes]
    body: dict[str, Any]
    gone: trio.Event = field(default_factory=trio.Event)
    """Set when its connection ended before its answer did."""


class StubEngine:
    """See the module's header. `behave` is called for each completion, and may raise or take its time."""

    def __init__(self, role: Role = "both") -> None:
        self.role: Role = role
        self.asked: list[Asked] = []
        self.accepted = 0
        self.healthy = True
        self.health_asked = 0
        self.health_late = False
        """Whether it says nothing at /health, though it works on requests."""
        self.frozen = False
        """Whether it takes connections and says nothing on any."""
        self.closes_second = False
        """Whether it closes a connection that is used again, without an answer."""
        self.models = ["m"]
        self.models_status = self.tokenize_status = 200
        self.keeps_answers = True
        """Whether it has each response that it is asked for."""
        self.reads_bodies = True
        """Whether bodies are JSON."""
        self.needs_room = False
        """Whether it does nothing without a bootstrap room, as SGLang's engines that are started for one side."""
        self.prefiller: StubEngine | None = None
        """Whom it waits for to have its room as well, where it is `joined`."""
        self.behaviour = "well"
        self.cached_tokens = 0
        self.prefill_params: dict[str, Any] | None = None
        self.prefill_token_s = self.step_s = 0.0
        """How long `timed` takes for each token of a prompt, one prompt after the other, and of an answer."""
        self._device = trio.Lock()
        self.sent_s = float("inf")
        self.tokens: Callable[[dict[str, Any]], list[int]] = lambda body: list(range(1000))
        self.go = trio.Event()
        """What a behaviour with a pause waits for."""
        self.began = trio.Event()
        """Set when the head of an answer is sent by `pause_after_the_head`."""
        self.certificate: Certificate | None = None
        self.host = "127.0.0.1"
        self._held = HeldPort()
        self.port = self._held.number
        self._scope = trio.CancelScope()

    @property
    def url(self) -> str:
        return f"{'http' if self.certificate is None else 'https'}://{self.host}:{self.port}"

    @property
    def address(self) -> EngineAddress:
        return EngineAddress(self.url, self.role)

    @property
    def completions(self) -> list[Asked]:
        return [each for each in self.asked if each.path.endswith("completions")]

    def waits(self) -> bool:
        """Return whether it has waited to send for some time: nobody takes what it sends."""
        return trio.current_time() - self.sent_s > 0.2

    def die(self) -> None:
        """Close all sockets, as the end of a process does."""
        self._scope.cancel()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self._scope = trio.CancelScope()
        with self._scope:
            listeners: Any = await trio.open_tcp_listeners(self.port, host=self.host)
            if self.certificate is not None:
                context = self.certificate.context()
                listeners = [trio.SSLListener(each, context, https_compatible=True) for each in listeners]
            task_status.started()
            await trio.serve_listeners(self._serve, listeners)

    async def _serve(self, stream: trio.SocketStream) -> None:
        self.accepted += 1
        answered = 0
        try:
            while True:
                message = await receive_message(stream, httptools.HttpRequestParser)
                if message is None or (self.closes_second and answered):
                    return
                answered += 1
                if self.frozen:
                    await trio.sleep_forever()
                if not await self._answer(stream, message):
                    return
        except (trio.BrokenResourceError, httptools.HttpParserError):
            pass
        finally:
            await trio.aclose_forcefully(stream)

    async def _answer(self, stream: trio.SocketStream, message: Message) -> bool:
        path = message.url.decode().partition("?")[0]
        if path == "/health":
            self.health_asked += 1
            if self.health_late:
                await trio.sleep_forever()
            await send(stream, 200 if self.healthy else 503, b"{}")
            return True
        if path == "/v1/models":
            entries = [{"id": model, "object": "model", "owned_by": self.url} for model in self.models]
            await send(stream, self.models_status, json.dumps({"object": "list", "data": entries}).encode())
            return True
        asked = Asked(path, message.headers, message.json() if message.body and self.reads_bodies else {})
        self.asked.append(asked)
        if path == "/tokenize":
            tokens = self.tokens(asked.body)
            body = json.dumps({"count": len(tokens), "tokens": tokens}).encode()
            await send(stream, self.tokenize_status, body)
            return True
        if path.startswith("/v1/responses/") and not self.keeps_answers:
            await send(stream, 404, b'{"error": {"message": "no such response", "code": 404}}')
            return True
        if not path.endswith("completions"):
            await send(stream, 200, json.dumps({"path": path, "method": message.method}).encode())
            return True
        if self.needs_room and asked.body.get("bootstrap_room") is None:
            await send(
                stream, 400, b'{"message": "Disaggregated request received without bootstrap room id"}'
            )
            return True
        return await self._watched(stream, asked, partial(BEHAVIOURS[self.behaviour], self, stream, asked))

    async def _watched(self, stream: trio.SocketStream, asked: Asked, answer: Callable[[], Any]) -> bool:
        """Run an answer until it ends or the client does."""
        alive = False

        async def watch() -> None:
            with suppress(trio.BrokenResourceError):
                await stream.receive_some(1)
            asked.gone.set()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            with suppress(trio.BrokenResourceError):
                alive = await answer()
            nursery.cancel_scope.cancel()
        return alive and not asked.gone.is_set()

    # --- answers ---------------------------------------------------------------------------------------------
    def usage(self, asked: Asked) -> dict[str, Any]:
        n = asked.body.get("max_tokens") or 4
        details = {"cached_tokens": self.cached_tokens}
        return {"prompt_tokens": 1000, "completion_tokens": n, "prompt_tokens_details": details}

    def whole(self, asked: Asked) -> bytes:
        count = asked.body.get("max_tokens") or 4
        choices = [
            {"index": n, "text": "".join(WORDS[:count]), "finish_reason": "length"}
            for n in range(asked.body.get("n") or 1)
        ]
        answer = {"id": "c", "object": "text_completion", "choices": choices, "usage": self.usage(asked)}
        if self.prefill_params is not None and "kv_transfer_params" in asked.body:
            answer["kv_transfer_params"] = self.prefill_params
        return json.dumps(answer).encode()

    def events(self, asked: Asked) -> list[bytes]:
        count = asked.body.get("max_tokens") or 4
        chat = asked.path.endswith("chat/completions")
        events = [
            event({"id": "c", "choices": [{"index": n, **delta(chat, WORDS[at])}]})
            for at in range(count)
            for n in range(asked.body.get("n") or 1)
        ]
        if (asked.body.get("stream_options") or {}).get("include_usage"):
            events.append(event({"id": "c", "choices": [], "usage": self.usage(asked)}))
        return [*events, b"data: [DONE]\n\n"]

    async def well(self, stream: trio.SocketStream, asked: Asked) -> bool:
        if not asked.body.get("stream"):
            await send(stream, 200, self.whole(asked))
            return True
        await begin_stream(stream)
        for each in self.events(asked):
            await send_chunk(stream, each)
        await stream.send_all(b"0\r\n\r\n")
        return True

    async def large(self, stream: trio.SocketStream, asked: Asked) -> bool:
        """More than all buffers take, in events of 50 KB."""
        await begin_stream(stream)
        for n in range(400):
            await send_chunk(stream, event({"choices": [{"index": n, "text": "x" * 50_000}]}))
            self.sent_s = trio.current_time()
        await send_chunk(stream, b"data: [DONE]\n\n")
        await stream.send_all(b"0\r\n\r\n")
        return True

    async def timed(self, stream: trio.SocketStream, asked: Asked) -> bool:
        async with self._device:
            await trio.sleep(self.prefill_token_s * len(asked.body["prompt"]))
        await begin_stream(stream)
        for each in self.events(asked):
            await send_chunk(stream, each)
            await trio.sleep(self.step_s)
        await stream.send_all(b"0\r\n\r\n")
        return True

    async def die_before(self, stream: trio.SocketStream, asked: Asked) -> bool:
        return False

    async def die_in_the_head(self, stream: trio.SocketStream, asked: Asked) -> bool:
        await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-")
        return False

    async def die_after(self, stream: trio.SocketStream, asked: Asked) -> bool:
        """Two events and a half."""
        if not asked.body.get("stream"):
            await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b"x" * 500)
            return False
        await begin_stream(stream)
        for each in self.events(asked)[:2]:
            await send_chunk(stream, each)
        await send_chunk(stream, self.events(asked)[2][:20])
        return False

    async def joined(self, stream: trio.SocketStream, asked: Asked) -> bool:
        """Answer once the engine that prefills has the same room."""
        other, room = self.prefiller, asked.body["bootstrap_room"]
        assert other is not None
        await until(lambda: any(each.body.get("bootstrap_room") == room for each in other.completions))
        return await self.well(stream, asked)

    async def pause(self, stream: trio.SocketStream, asked: Asked) -> bool:
        """Wait before the first byte."""
        await self.go.wait()
        return await self.well(stream, asked)

    async def pause_after_the_head(self, stream: trio.SocketStream, asked: Asked) -> bool:
        body = self.whole(asked)
        await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
        self.began.set()
        await self.go.wait()
        await stream.send_all(body)
        return True

    async def pause_inside(self, stream: trio.SocketStream, asked: Asked) -> bool:
        await begin_stream(stream)
        events = self.events(asked)
        await send_chunk(stream, events[0])
        await self.go.wait()
        for each in events[1:]:
            await send_chunk(stream, each)
        await stream.send_all(b"0\r\n\r\n")
        return True

    async def trickle(self, stream: trio.SocketStream, asked: Asked) -> bool:
        """Send an event every few milliseconds until `go`."""
        await begin_stream(stream)
        events = self.events(asked)
        while not self.go.is_set():
            await send_chunk(stream, events[0])
            with trio.move_on_after(0.005):
                await self.go.wait()
        await send_chunk(stream, events[-1])
        await stream.send_all(b"0\r\n\r\n")
        return True

    async def cut(self, stream: trio.SocketStream, asked: Asked) -> bool:
        """Events in pieces of 7 bytes."""
        await begin_stream(stream)
        data = b"".join(self.events(asked))
        for at in range(0, len(data), 7):
            await send_chunk(stream, data[at : at + 7])
            await trio.lowlevel.checkpoint()
        await stream.send_all(b"0\r\n\r\n")
        return True

    async def garbage(self, stream: trio.SocketStream, asked: Asked) -> bool:
        await stream.send_all(b"\x00\x01 this is no HTTP\r\n\r\n")
        return False

    async def huge_head(self, stream: trio.SocketStream, asked: Asked) -> bool:
        await stream.send_all(b"HTTP/1.1 200 OK\r\n")
        for n in range(1000):
            await stream.send_all(b"X-%d: %b\r\n" % (n, b"y" * 1000))
        return False

    async def huge_event(self, stream: trio.SocketStream, asked: Asked) -> bool:
        await begin_stream(stream)
        for _ in range(40):
            await send_chunk(stream, b"x" * 65536)
        return False

    async def busy(self, stream: trio.SocketStream, asked: Asked) -> bool:
        await send(stream, 503, b"overloaded")
        return True

    async def wrong(self, stream: trio.SocketStream, asked: Asked) -> bool:
        await send(stream, 400, b'{"detail": "no"}')
        return True


BEHAVIOURS: dict[str, Callable[[StubEngine, trio.SocketStream, Asked], Any]] = {
    name: getattr(StubEngine, name)
    for name in (
        *(
            "well",
            "large",
            "timed",
            "die_before",
            "die_in_the_head",
            "die_after",
            "joined",
            "pause",
            "pause_after_the_head",
            "pause_inside",
            "cut",
            "garbage",
        ),
        *("trickle", "huge_head", "huge_event", "busy", "wrong"),
    )
}


def delta(chat: bool, word: str) -> dict[str, Any]:
    return {"delta": {"content": word}} if chat else {"text": word}


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


async def send(stream: trio.SocketStream, status: int, body: bytes) -> None:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    await stream.send_all(head.encode() + body)


async def begin_stream(stream: trio.SocketStream) -> None:
    await stream.send_all(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
    )


async def send_chunk(stream: trio.SocketStream, data: bytes) -> None:
    await stream.send_all(b"%x\r\n%b\r\n" % (len(data), data))


# --- the client --------------------------------------------------------------------------------------------
class Asker:
    """One connection to the proxy."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream

    async def send(
        self, path: str, body: Any = None, method: str = "POST", headers: dict[str, str] | None = None
    ) -> None:
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "Host: proxy", f"Content-Length: {len(data)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        await self.stream.send_all("\r\n".join([*lines, "\r\n"]).encode() + data)

    async def ask(self, path: str, body: Any = None, **more: Any) -> Message:
        await self.send(path, body, **more)
        return await self.answer()

    async def answer(self) -> Message:
        message = await receive_message(self.stream, httptools.HttpResponseParser)
        assert message is not None, "the proxy closed the connection without a whole answer"
        return message

    async def first_bytes(self) -> Message:
        """Receive until the body begins."""
        message = Message(httptools.HttpResponseParser)
        while not message.body:
            data = await self.stream.receive_some(65536)
            assert data
            message.feed(data)
        return message

    async def rest(self, message: Message) -> Message:
        while not message.done:
            data = await self.stream.receive_some(65536)
            assert data, message.body
            message.feed(data)
        return message


async def leave(stream: trio.SocketStream, how: str) -> None:
    """Close a connection, or `reset` it."""
    if how == "reset":
        stream.setsockopt(1, 13, b"\1\0\0\0\0\0\0\0")  # SO_LINGER of no time
    await trio.aclose_forcefully(stream)


class Stand:
    """A proxy in front of stub engines."""

    def __init__(self, proxy: Proxy, port: int, engines: list[StubEngine], nursery: trio.Nursery) -> None:
        self.proxy, self.port, self.engines, self._nursery = proxy, port, engines, nursery

    async def asker(self) -> Asker:
        return Asker(await trio.open_tcp_stream("127.0.0.1", self.port))

    async def ask(self, path: str, body: Any = None, **more: Any) -> Message:
        asker = await self.asker()
        async with asker.stream:
            return await asker.ask(path, body, **more)

    async def restart(self, engine: StubEngine) -> None:
        await self._nursery.start(engine.run)


@asynccontextmanager
async def proxy_stand(
    *roles: Role,
    hand_over: HandOver = "store",
    router: Router | None = None,
    engine_certificate: Certificate | None = None,
    **options: Any,
) -> AsyncIterator[Stand]:
    """Run a proxy in front of engines with these roles."""
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        engines = [StubEngine(role) for role in roles or ("both",)]
        for engine in engines:
            engine.certificate = engine_certificate
            await nursery.start(engine.run)
        addresses = [engine.address for engine in engines]
        proxy = Proxy(ProxyOptions(engines=addresses, hand_over=hand_over, **options), router)
        sockets = listen("127.0.0.1", 0, shared=False)
        port = sockets[0].getsockname()[1]
        await nursery.start(proxy.serve, sockets)
        yield Stand(proxy, port, engines, nursery)
        nursery.cancel_scope.cancel()
