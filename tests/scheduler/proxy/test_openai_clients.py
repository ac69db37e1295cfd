"""`kvfs proxy` as people start it, and the client that people use, unmodified."""

from __future__ import annotations

import re
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httptools
import openai
import pytest
import trio

from tests.support.asked_engines import AskedEngine, models
from tests.support.certificates import certificate as make_certificate
from tests.support.forked import Forked
from tests.support.processor_waits import within
from tests.support.service import run_kvfs, running_kvfs
from tests.support.stub_engines import (
    PROMPT,
    WORDS,
    Message,
    Stand,
    StubEngine,
    proxy_stand,
)
from tests.support.waits import WAIT_S


def client(stand: Stand) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{stand.port}/v1", api_key="k", max_retries=0)


async def test_openai_s_client_completes() -> None:
    def use() -> None:
        with client(stand) as api:
            whole = api.completions.create(model="m", prompt=PROMPT, max_tokens=6, n=2)
            assert [choice.text for choice in whole.choices] == ["".join(WORDS[:6])] * 2
            assert whole.usage is not None
            assert whole.usage.completion_tokens == 6
            streamed = api.completions.create(model="m", prompt=PROMPT, max_tokens=6, stream=True)
            assert "".join(part.choices[0].text for part in streamed) == "".join(WORDS[:6])

    async with proxy_stand("prefill", "decode") as stand:
        await trio.to_thread.run_sync(use)


async def test_openai_s_client_chats() -> None:
    def use() -> None:
        with client(stand) as api:
            parts = list(
                api.chat.completions.create(
                    model="m",
                    messages=[{"role": "user", "content": PROMPT}],
                    max_tokens=6,
                    stream=True,
                    stream_options={"include_usage": True},
                )
            )
            text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
            assert text == "".join(WORDS[:6])
            assert parts[-1].usage is not None

    async with proxy_stand("prefill", "decode") as stand:
        await trio.to_thread.run_sync(use)


async def test_openai_s_client_raises_its_own_errors() -> None:
    def use() -> None:
        with client(stand) as api:
            with pytest.raises(openai.BadRequestError, match="stream"):
                api.completions.create(model="m", prompt="p", extra_body={"stream": "x"})
            with pytest.raises(openai.NotFoundError):
                api.files.list()
            stand.engines[0].behaviour = "die_after"
            with pytest.raises(openai.APIError, match="the answer ends here"):
                list(api.completions.create(model="m", prompt="p", stream=True))
            stand.engines[0].behaviour = "die_before"
            with pytest.raises(openai.InternalServerError, match=r"engines failed|no engine answers"):
                api.completions.create(model="m", prompt="p")

    async with proxy_stand() as stand:
        await trio.to_thread.run_sync(use)


@asynccontextmanager
async def command(*arguments: str) -> AsyncIterator[tuple[Forked, str, int]]:
    """`kvfs proxy`, with the scheme and port that it prints."""
    with running_kvfs("proxy", "--listen", "127.0.0.1:0", *arguments) as (process, said):
        text = ""
        with trio.fail_after(WAIT_S):
            while not text.endswith("ready\n"):
                line = await trio.to_thread.run_sync(said.readline, abandon_on_cancel=True)
                assert line
                text += line
        found = re.search(r"(https?)://127.0.0.1:(\d+)/v1", text)
        assert found is not None
        yield process, found[1], int(found[2])


async def test_the_command_with_tls_and_tokens(tmp_path: Path) -> None:
    """A stop waits for what is in flight, and a client behind TLS that goes away is noticed as others are."""
    certificate, key = make_certificate(tmp_path)
    config = tmp_path / "kvfs.toml"
    token = "a-token-of-some-length"
    config.write_text(f'[proxy]\ntokens = ["{token}"]\ncertificate = "{certificate}"\nkey = "{key}"\n')
    context = ssl.create_default_context(cafile=str(certificate))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
    request = f'{head}Content-Length: 15\r\n\r\n{{"prompt": "p"}}'.encode()
    engine = StubEngine()
    engine.behaviour = "pause"
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        async with command("--engine", engine.url, "--config", str(config)) as (process, scheme, port):
            assert scheme == "https"

            async def ask() -> trio.SSLStream[trio.SocketStream]:
                plain = await trio.open_tcp_stream("127.0.0.1", port)
                stream = trio.SSLStream(plain, context, server_hostname="127.0.0.1", https_compatible=True)
                await stream.send_all(request)
                return stream

            count = len(engine.completions)
            gone = await ask()
            while len(engine.completions) == count:  # noqa: ASYNC110 it notifies nobody
                await trio.sleep(0.01)
            await trio.aclose_forcefully(gone)
            with within(2.0, process.pid), trio.fail_after(WAIT_S):
                await engine.completions[0].gone.wait()
            stays = await ask()
            while len(engine.completions) == 1:  # noqa: ASYNC110 it notifies nobody
                await trio.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            engine.go.set()
            message = Message(httptools.HttpResponseParser)
            while not message.done:
                message.feed(bytes(await stays.receive_some(4096)))
            assert message.status == 200
            await trio.aclose_forcefully(stays)
            assert await trio.to_thread.run_sync(process.wait, WAIT_S) == 0
        nursery.cancel_scope.cancel()


async def test_the_command_asks_its_engines_and_routes_by_what_they_say(tmp_path: Path) -> None:
    config = tmp_path / "kvfs.toml"
    config.write_text('[conductor]\nlisten = "127.0.0.1:0"\nevents = "tcp://127.0.0.1:*"\n')
    one, other = AskedEngine(), AskedEngine(models=models("n"))
    async with trio.open_nursery() as nursery:
        for engine in (one, other):
            await nursery.start(engine.run)
        urls = ("--engine", one.url, "--decode", other.url)
        async with command("--conduct", *urls, "--config", str(config)) as (_, _, port):

            def use() -> None:
                with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as api:
                    for model in ("m", "n", "n"):
                        api.completions.create(model=model, prompt="p", max_tokens=2)
                    with pytest.raises(openai.NotFoundError, match="no instance of it"):
                        api.completions.create(model="x", prompt="p")

            await trio.to_thread.run_sync(use)
        assert [len(engine.completions) for engine in (one, other)] == [1, 2]
        nursery.cancel_scope.cancel()


WRONG = {
    "no engines": ([], "has no engines that decode"),
    "only prefill": (["--prefill", "http://h:1"], "has no engines that decode"),
    "scheme": (["--engine", "ftp://h:1"], "[proxy] engines"),
    "path": (["--engine", "http://h:99999"], "must be http://HOST:PORT"),
    "nothing to conduct": (["--conduct"], "has no engines that decode"),
    "two Conductors": (["--conduct", "--engine", "http://h:1", "--conductor", "http://h:2"], "leave out"),
    "an engine twice": (["--conduct", "--engine", "http://h:1", "--decode", "http://h:1"], "named once"),
    "hand-over": (["--engine", "http://h:1", "--hand-over", "pigeon"], "must be 'store', 'nixl'"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named(arguments: list[str], message: str) -> None:
    done = run_kvfs("proxy", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
