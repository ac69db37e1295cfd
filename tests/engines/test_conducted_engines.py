"""`kvfs proxy --conduct` in front of two real vLLM servers on one store that publishes its events.

The Conductor in the proxy's process has asked the engines what they are. What it predicts is compared with what engines
report, answers with those of one engine that has nothing cached (a salt of its own). The last test kills a server.
"""

from __future__ import annotations

import json
import random
import shutil
import socket
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from tests.engines.engine import BLOCK_TOKENS, Engines
from tests.engines.spoken_words import FIRST_WORD, word, write_tokenizer
from tests.engines.test_proxy import LOOK_S, START_S, Server, proxy, vllm_server
from tests.engines.test_proxy import ask as ask_streamed
from tests.engines.test_proxy import cached as cached_of
from tests.engines.test_vllm_connector import connector
from tests.engines.tiny_llama import VOCABULARY
from tests.support.door import ON_DIRECTORY, need_mount
from tests.support.own_ports import own_port
from tests.support.service import Service
from tests.support.waits import eventually

pytestmark = [
    pytest.mark.engine,
    pytest.mark.mount,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
]

MODEL_TOKENS = 30_000
_rng = random.Random(71)


def words(count: int) -> str:
    return " ".join(word(_rng.randrange(FIRST_WORD, VOCABULARY)) for _ in range(count))


def prompts() -> list[list[int]]:
    """Five pairs that have 640 tokens in common, and then 100 of their own: over and under a leg's worth."""
    made = []
    for _ in range(5):
        common = [_rng.randrange(2, VOCABULARY) for _ in range(640)]
        made += [common + [_rng.randrange(2, VOCABULARY) for _ in range(100)] for _ in range(2)]
    return made


@dataclass(frozen=True)
class Decision:
    """A row of `/v1/decisions`."""

    id: str
    outcome: str
    decode: str
    prefill: str
    predicted_tokens: int
    cached_tokens: int | None


@dataclass
class Stand:
    servers: list[Server]
    url: str
    """The proxy's, with /v1."""
    conductor: str

    def status(self) -> Any:
        return self._json("/v1/instances")

    def decisions(self) -> list[Decision]:
        rows = self._json("/v1/decisions").get("rows", [])
        return [Decision(row[0], row[4], row[5], row[6], row[7], row[8]) for row in rows]

    def is_current(self) -> bool:
        """Whether it has heard all three publishers out."""
        streams = self.status()["streams"]
        return len(streams) == 3 and {each["knowledge"] for each in streams} == {"current"}

    def set_roles(self, *roles: str) -> None:
        for server, role in zip(self.servers, roles, strict=True):
            body = json.dumps({"role": role}).encode()
            name = urlsplit(server.url).netloc
            urllib.request.urlopen(f"{self.conductor}/v1/instances/{name}/role", body, timeout=60).close()

    def distrusted(self) -> list[str]:
        return [each["name"] for each in self.status()["instances"] if each["distrusted"]]

    def _json(self, path: str) -> Any:
        with urllib.request.urlopen(self.conductor + path, timeout=60) as answer:
            return json.loads(answer.read())


@pytest.fixture(scope="module")
def stand(engines: Engines) -> Iterator[Stand]:
    with conducted(engines, "conducted", 2, own_port(), "--max-model-len", str(MODEL_TOKENS)) as made:
        yield made


@contextmanager
def conducted(engines: Engines, name: str, count: int, port: int, *flags: str) -> Iterator[Stand]:
    """Run servers that say to the Conductor of a proxy, at this port, what they hold, as their store does."""
    need_mount()
    shutil.copytree(engines.work / "model", engines.work / name)
    write_tokenizer(engines.work / name)
    door, events = own_port(), f"tcp://127.0.0.1:{port}"
    config = engines.work / f"{name}.toml"
    config.write_text(
        f'[events]\npublish = "{events}"\nreplay = "tcp://*:{own_port()}"\ntopic = "node"\n'
        f'[conductor]\nlisten = "127.0.0.1:{door}"\nevents = "{events}"\n'
    )
    with ExitStack() as stack:
        service = stack.enter_context(Service(nvme="256MiB", arguments=["--config", str(config)]))
        servers = [
            stack.enter_context(
                vllm_server(
                    engines,
                    f"{name}-{number}",
                    connector(service, revision=name),
                    *("--kv-events-config", published(f"{name}-{number}", events), *flags),
                    model=name,
                )
            )
            for number in range(count)
        ]
        for server in servers:
            eventually(server.is_up, "it answers", START_S, every_s=LOOK_S)
        arguments = [argument for server in servers for argument in ("--engine", server.url)]
        url = stack.enter_context(proxy("--conduct", *arguments, "--config", str(config)))
        made = Stand(servers, url, f"http://127.0.0.1:{door}")
        eventually(made.is_current, "the Conductor has heard all publishers")
        yield made
        assert not service.complaints()


def published(topic: str, events: str) -> str:
    return json.dumps(
        {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "topic": topic,
            "endpoint": events,
            "replay_endpoint": f"tcp://*:{own_port()}",
        }
    )


def ask(url: str, prompt: Sequence[int], **more: Any) -> tuple[list[int], int]:
    """Complete a prompt; return the tokens of the answer, and how many of the prompt were cached."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, **more}
    request = urllib.request.Request(
        f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        found = json.loads(answer.read())
    details = found["usage"]["prompt_tokens_details"] or {}
    return found["choices"][0]["token_ids"], int(details.get("cached_tokens") or 0)


def alone(server: Server, prompt: Sequence[int]) -> list[int]:
    """Return what one engine answers that has nothing of the prompt."""
    tokens, cached = ask(f"{server.url}/v1", prompt, cache_salt=f"salt {_rng.random()}")
    assert cached == 0
    return tokens


def client(stand: Stand) -> openai.OpenAI:
    return openai.OpenAI(base_url=stand.url, api_key="none", max_retries=0, timeout=300)


def chat(api: openai.OpenAI, messages: list[Any], **more: Any) -> tuple[str, int, int]:
    """Stream a chat; return its text, and the prompt's tokens, all and cached."""
    parts = list(
        api.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, **more},
        )
    )
    usage = parts[-1].usage
    assert usage is not None
    details = usage.prompt_tokens_details
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    return text, usage.prompt_tokens, (details and details.cached_tokens) or 0


def test_the_engines_are_known_by_what_they_said(stand: Stand) -> None:
    status = stand.status()
    assert {each["url"] for each in status["instances"]} == {each.url for each in stand.servers}
    assert {each["model"] for each in status["instances"]} == {"tiny"}
    assert {each["role"] for each in status["instances"]} == {"both"}
    assert {each["stream"] for each in status["streams"]} == {"conducted-0", "conducted-1", "node"}
    assert status["unregistered"] == {}


def test_a_second_turn_finds_what_was_predicted(stand: Stand) -> None:
    """It goes where the first was computed, or what that one stored is loaded."""
    with client(stand) as api:
        first: list[Any] = [{"role": "user", "content": words(900)}]
        text, tokens, cached = chat(api, first)
        assert cached == 0
        again = [*first, {"role": "assistant", "content": text}, {"role": "user", "content": words(30)}]
        _, _, cached_again = chat(api, again)
    # A client that is answered does not wait for the report of that.
    eventually(lambda: stand.decisions()[-1].outcome != "answering", "the request is over")
    decision = stand.decisions()[-1]
    assert decision.outcome == "done"
    assert decision.cached_tokens == cached_again
    # An answer's last block may be known a moment later.
    assert tokens // BLOCK_TOKENS * BLOCK_TOKENS <= decision.predicted_tokens <= cached_again


@pytest.mark.parametrize("roles", [("both", "both"), ("prefill", "decode")])
def test_answers_are_those_of_one_engine_and_nobody_is_distrusted(
    stand: Stand, roles: tuple[str, str]
) -> None:
    stand.set_roles(*roles)
    try:
        before = len(stand.decisions())
        for prompt in prompts():
            assert ask(stand.url, prompt)[0] == alone(stand.servers[0], prompt)
        decisions = stand.decisions()[before:]
    finally:
        stand.set_roles("both", "both")
    assert [each.outcome for each in decisions] == ["done"] * 10
    names = [urlsplit(server.url).netloc for server in stand.servers]
    legs = [(each.prefill, each.decode) for each in decisions if each.prefill]
    if roles == ("prefill", "decode"):
        assert set(legs) == {(names[0], names[1])}
        assert len(legs) >= 5
    else:
        assert legs == []
    # The second of each pair finds what the first has in common with it, wherever it goes.
    assert all(each.predicted_tokens >= 640 for each in decisions[1::2]), decisions
    assert all((each.cached_tokens or 0) >= 640 for each in decisions[1::2]), decisions
    assert stand.distrusted() == []


def test_a_long_prompt_is_handed_over_whole(stand: Stand) -> None:
    """All of its blocks come from the store, however many, into an answer that is streamed, and one that is not."""
    prompt = [_rng.randrange(2, VOCABULARY) for _ in range(20_000)]
    stand.set_roles("prefill", "decode")
    try:
        streamed = ask_streamed(stand.url, prompt, 24)
        decision = stand.decisions()[-1]
    finally:
        stand.set_roles("both", "both")
    names = tuple(urlsplit(server.url).netloc for server in stand.servers)
    assert (decision.outcome, decision.prefill, decision.decode) == ("done", *names)
    tokens = alone(stand.servers[0], prompt)
    assert streamed.tokens == tokens
    # A hit leaves a token to compute; usage tells what the prefill engine had found, which was nothing.
    assert cached_of(streamed) == 0
    again = ask_streamed(stand.url, prompt, 24)
    whole = 20_000 // BLOCK_TOKENS * BLOCK_TOKENS - BLOCK_TOKENS
    assert (again.tokens, cached_of(again)) == (tokens, whole)
    assert ask(stand.url, prompt) == (tokens, whole)


def test_a_client_that_leaves_a_silent_prefill_ends_it(stand: Stand) -> None:
    generated = sum(server.generated() for server in stand.servers)
    prompt = [_rng.randrange(2, VOCABULARY) for _ in range(MODEL_TOKENS - 1_000)]
    body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 500, "ignore_eos": True}).encode()
    parts = urlsplit(stand.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=300) as gone:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        gone.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        eventually(lambda: any(server.running() for server in stand.servers), "an engine computes it")
    eventually(lambda: stand.decisions()[-1].outcome == "cancelled", "the decision says that it left")
    eventually(lambda: not any(server.running() for server in stand.servers), "no engine computes it")
    assert sum(server.generated() for server in stand.servers) == generated


def test_openai_s_client_streams_and_gets_its_own_errors(stand: Stand) -> None:
    messages: list[Any] = [{"role": "user", "content": words(100)}]
    with client(stand) as api:
        text, tokens, _ = chat(api, messages)
        assert tokens > 100
        with openai.OpenAI(base_url=f"{stand.servers[1].url}/v1", api_key="none", timeout=300) as one:
            assert text == chat(one, messages, cache_salt="salt")[0]
        with pytest.raises(openai.NotFoundError, match="no instance of it"):
            api.completions.create(model="another", prompt="p")


def test_an_engine_that_is_killed_is_passed_over(stand: Stand) -> None:
    dead, alive = stand.servers
    made = prompts()[:4]
    expected = [alone(alive, prompt) for prompt in made]
    dead.kill()
    assert [ask(stand.url, prompt)[0] for prompt in made] == expected
    assert {each.decode for each in stand.decisions()[-4:]} == {urlsplit(alive.url).netloc}
    assert all(each.outcome == "done" for each in stand.decisions()[-4:])
