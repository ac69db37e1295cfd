"""Chats through `kvfs proxy` in front of two real vLLM servers: all that clients shape an answer by.

One server prefills, the other decodes and has no prefix cache of its own, by load and by a Conductor in the proxy; or
that Conductor has both do both. Each streamed answer is compared with that of the first server alone: samples, stop
strings, log probabilities, templates and calls of tools are the same whoever prefilled.
"""

from __future__ import annotations

import json
import random
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.engines.engine import LOGPROB_TOLERANCE, Engines
from tests.engines.spoken_words import FIRST_WORD, SPACE, word, write_tokenizer
from tests.engines.test_conducted_engines import published
from tests.engines.test_proxy import LOOK_S, START_S, Server, proxy, vllm_server
from tests.engines.test_vllm_connector import connector
from tests.engines.tiny_llama import VOCABULARY
from tests.support.door import ON_DIRECTORY
from tests.support.own_ports import own_port
from tests.support.service import Service
from tests.support.waits import eventually

pytestmark = [
    pytest.mark.engine,
    pytest.mark.mount,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
]

TOOL = word(120)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [3, 7]}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
]
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "two samples of a seed": {"temperature": 0.7, "seed": 5, "n": 2},
    "log probabilities": {"temperature": 0, "logprobs": True, "top_logprobs": 3},
    "tools in the template": {"temperature": 0, "tools": TOOLS, "tool_choice": "none"},
    "a template of its own": {
        "temperature": 0,
        "chat_template": "{% for message in messages %}{{ message.content }} {% endfor %}" + word(130),
    },
    "an assistant's turn that goes on": {
        "temperature": 0,
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
}
CALL = {
    "max_tokens": 150,
    "ignore_eos": False,
    "tools": TOOLS,
    "parallel_tool_calls": False,
    "logit_bias": {str(SPACE): -100},  # which JSON may have anywhere
}
CALLS: dict[str, dict[str, Any]] = {
    "of a tool that is named": {"tool_choice": {"type": "function", "function": {"name": TOOL}}},
    "of some tool": {"tool_choice": "required"},
    "found in what the model says": {
        "tool_choice": "auto",
        "structured_outputs": {
            "choice": [
                "<tool_call>"
                + json.dumps({"name": TOOL, "arguments": {"city": city, "days": 3}})
                + "</tool_call>"
                for city in ("Oslo", "Rome")
            ]
        },
    },
}
"""The small model says nothing that a parser knows unless it may say nothing else."""
FRONTS = ["apart by load", "apart by a Conductor", "mixed by a Conductor"]


@pytest.fixture(scope="module")
def events() -> str:
    """Where the first server's events go: to the Conductor of the front that is there."""
    return f"tcp://127.0.0.1:{own_port()}"


@pytest.fixture(scope="module")
def servers(engines: Engines, service: Service, events: str) -> Iterator[tuple[Server, Server]]:
    shutil.copytree(engines.work / "model", engines.work / "spoken")
    write_tokenizer(engines.work / "spoken")
    settings = connector(service, revision="chats")
    with ExitStack() as stack:
        flags = ["--trust-request-chat-template", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        said = ["--kv-events-config", published("chats-1", events)]
        first = stack.enter_context(vllm_server(engines, "chats-1", settings, *flags, *said, model="spoken"))
        flags.append("--no-enable-prefix-caching")
        second = stack.enter_context(vllm_server(engines, "chats-2", settings, *flags, model="spoken"))
        for server in (first, second):
            eventually(server.is_up, "it answers", START_S, every_s=LOOK_S)
        yield first, second


@dataclass(frozen=True)
class Front:
    """A proxy before both servers."""

    servers: tuple[Server, Server]
    url: str
    conductor: str
    """Its Conductor's door; empty where load routes."""
    is_mixed: bool
    first_chat: int
    """The number of its first chat: no front has those of another."""

    def status(self) -> Any:
        with urllib.request.urlopen(f"{self.conductor}/v1/instances", timeout=60) as answer:
            return json.loads(answer.read())

    def is_current(self) -> bool:
        """Whether the Conductor has both servers, and has heard out the one that publishes."""
        status = self.status()
        known = [each["knowledge"] for each in status["streams"]]
        return len(status["instances"]) == 2 and known == ["current"]

    def drain(self, server: Server, *, draining: bool) -> None:
        body, name = json.dumps({"draining": draining}).encode(), urlsplit(server.url).netloc
        urllib.request.urlopen(f"{self.conductor}/v1/instances/{name}/drain", body, timeout=60).close()

    def ask_each(self, number: int, **more: Any) -> list[list[dict[str, Any]]]:
        """Have each server answer a chat, the second first: it has nothing of that, and the store neither."""
        answers = []
        for drained in self.servers:
            self.drain(drained, draining=True)
            try:
                answers.append(chat(self.url, number, **more))
            finally:
                self.drain(drained, draining=False)
        return answers


@pytest.fixture(scope="module", params=FRONTS)
def front(
    request: pytest.FixtureRequest, engines: Engines, servers: tuple[Server, Server], events: str
) -> Iterator[Front]:
    first, second = (server.url for server in servers)
    is_mixed, by_load = request.param.startswith("mixed"), request.param.endswith("load")
    flags = ["--engine", first, "--engine", second] if is_mixed else ["--prefill", first, "--decode", second]
    door = "" if by_load else f"127.0.0.1:{own_port()}"
    if door:
        config = engines.work / "chats.toml"
        config.write_text(f'[conductor]\nlisten = "{door}"\nevents = "{events}"\n')
        flags += ["--conduct", "--config", str(config)]
    with proxy(*flags) as url:
        first_chat = 200 * FRONTS.index(request.param)
        made = Front(servers, url.removesuffix("/v1"), door and f"http://{door}", is_mixed, first_chat)
        if door:
            eventually(made.is_current, "the Conductor has heard the first server out")
        yield made
        if door:
            counts = made.status()["counts"]
            assert counts["routed"] > 0
            assert counts.get("degraded", 0) == 0, "a prompt's tokens, or all caches, were not known"


def chat(url: str, number: int, **more: Any) -> list[dict[str, Any]]:
    """Stream a chat of 700 words; return the choices, each with its text, calls, reason and log probabilities."""
    rng = random.Random(number)
    said = [
        " ".join(word(rng.randrange(FIRST_WORD, VOCABULARY)) for _ in range(count)) for count in (650, 20, 30)
    ]
    roles = ("user", "assistant", "assistant" if more.get("continue_final_message") else "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    body = {
        "model": "tiny",
        "messages": messages,
        "max_tokens": 24,
        "stream": True,
        "ignore_eos": True,
        **more,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    choices: list[dict[str, Any]] = [
        {"text": "", "calls": {}, "reason": None, "logprobs": []} for _ in range(more.get("n", 1))
    ]
    last = ""
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            last = line.decode().strip().removeprefix("data: ") or last
            if last == "[DONE]" or not line.strip():
                continue
            for choice in json.loads(last)["choices"]:
                found = choices[choice["index"]]
                found["text"] += choice["delta"].get("content") or ""
                for call in choice["delta"].get("tool_calls") or []:
                    name, arguments = found["calls"].get(call["index"], ("", ""))
                    part = call["function"]
                    found["calls"][call["index"]] = (
                        name + (part.get("name") or ""),
                        arguments + (part.get("arguments") or ""),
                    )
                found["reason"] = choice["finish_reason"] or found["reason"]
                found["logprobs"] += (choice.get("logprobs") or {}).get("content") or []
    assert last == "[DONE]"
    return choices


def same(found: list[dict[str, Any]], alone: list[dict[str, Any]]) -> None:
    """Compare choices; log probabilities within what another order of sums makes of them."""
    for one, other in zip(found, alone, strict=True):
        assert [one[each] for each in ("text", "calls", "reason")] == [
            other[each] for each in ("text", "calls", "reason")
        ]
        assert len(one["logprobs"]) == len(other["logprobs"])
        for mine, its in zip(one["logprobs"], other["logprobs"], strict=True):
            assert mine["token"] == its["token"]
            assert [each["token"] for each in mine["top_logprobs"]] == [
                each["token"] for each in its["top_logprobs"]
            ]
            assert mine["logprob"] == pytest.approx(its["logprob"], abs=LOGPROB_TOLERANCE)


def handed_over(front: Front, number: int, **more: Any) -> list[dict[str, Any]]:
    """Have one engine prefill and the other decode."""
    second = front.servers[1]

    def ask() -> tuple[list[dict[str, Any]], int]:
        before = second.external_hits()
        return chat(front.url, number, **more), second.external_hits() - before

    found, tokens = ask()
    # The decode engine waits 50 ms for seals and computes the rest; once they are there it finds all of them.
    if tokens < 640:
        eventually(lambda: ask()[1] >= 640, "the decode engine finds what the other stored")
    return found


def compared(front: Front, number: int, **more: Any) -> list[dict[str, Any]]:
    """Return an answer that is the same as that of one engine alone, of each engine where both do both."""
    number += front.first_chat
    answers = front.ask_each(number, **more) if front.is_mixed else [handed_over(front, number, **more)]
    alone = chat(front.servers[0].url, number, **more)
    for found in answers:
        same(found, alone)
    return answers[0]


@pytest.mark.parametrize("case", CASES)
def test_a_chat_is_that_of_one_engine_alone(front: Front, case: str) -> None:
    more = CASES[case]
    found = compared(front, list(CASES).index(case), **more)
    assert all(each["text"] for each in found)
    if "logprobs" in more:
        assert len(found[0]["logprobs"]) == 24
    if "n" in more:
        assert found[0]["text"] != found[1]["text"]


@pytest.mark.parametrize("case", CALLS)
def test_a_call_is_that_of_one_engine_alone(front: Front, case: str) -> None:
    [found] = compared(front, 50 + list(CALLS).index(case), **CALL | CALLS[case], temperature=0)
    [(name, arguments)] = found["calls"].values()
    assert name == TOOL
    assert json.loads(arguments)["city"] in ("Oslo", "Rome")


def test_a_chat_stops_where_one_engine_alone_stops(front: Front) -> None:
    alone, number = front.servers[0].url, front.first_chat + 100
    whole = chat(alone, number, temperature=0)[0]["text"]
    stop = whole.split()[7]
    found = chat(front.url, number, temperature=0, stop=[stop])
    assert found[0]["reason"] == "stop"
    assert found[0]["text"].split() == whole.split()[: whole.split().index(stop)]
    same(found, chat(alone, number, temperature=0, stop=[stop]))
