"""`kvfs proxy` in front of two real vLLM servers on one store: one prefills, the other decodes.

Outputs are compared with those of an engine without any cache (`test_vllm.py` shows that they depend on every token of
the prompt). The last test kills a server.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engines.engine import MAX_TOKENS, Engines, Run, kill, vllm, whole_blocks
from tests.engines.run_engine import ENVIRONMENT
from tests.engines.test_vllm_connector import connector
from tests.engines.tiny_llama import VOCABULARY
from tests.support.door import ON_DIRECTORY
from tests.support.forked import Forked
from tests.support.own_ports import own_port
from tests.support.service import ROOT, Service
from tests.support.waits import eventually

pytestmark = [
    pytest.mark.engine,
    pytest.mark.mount,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
]

START_S = 400.0
LOOK_S = 0.1
"""Between looks whether a server is up, which take the processor that it starts on half a millisecond each."""
_rng = random.Random(31)
PROMPTS = {
    f"{tokens} tokens": [_rng.randrange(2, VOCABULARY) for _ in range(tokens)] for tokens in (600, 751, 900)
}


@dataclass
class Server:
    """One engine's server."""

    process: Forked
    url: str
    log: Path

    def is_up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-8000:]
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except OSError:
            return False

    def external_hits(self) -> int:
        """Prompt tokens that its connector found in the store."""
        return self._metric("vllm:external_prefix_cache_hits_total")

    def running(self) -> int:
        """Requests that it computes."""
        return self._metric("vllm:num_requests_running")

    def generated(self) -> int:
        """Tokens of all its answers."""
        return self._metric("vllm:generation_tokens_total")

    def _metric(self, name: str) -> int:
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            text = answer.read().decode()
        found = re.findall(rf"^{name}\{{.*\}} (\S+)$", text, re.MULTILINE)
        return int(sum(map(float, found)))

    def kill(self) -> None:
        kill(self.process)


@contextmanager
def vllm_server(
    engines: Engines, name: str, settings: dict[str, Any], *more: str, model: str = ""
) -> Iterator[Server]:
    """Start vLLM's OpenAI server with the connector; it runs until the end or its `kill`.

    `model`: a directory that has a tokenizer too.
    """
    port = own_port()
    command = ["-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--model", str(engines.work / (model or "model"))]
    command += [] if model else ["--skip-tokenizer-init"]
    command += ["--enforce-eager", "--dtype", "float32", "--block-size", "32", "--max-model-len", "1024"]
    command += ["--enable-prompt-tokens-details", "--served-model-name", "tiny", "--seed", "0"]
    command += ["--kv-transfer-config", json.dumps(settings), *more]
    own = {key: value for key, value in ENVIRONMENT.items() if "MULTIPROCESSING" not in key}
    environment = {**os.environ, **own, "PYTHONPATH": str(ROOT)}
    with (engines.work / f"{name}.log").open("wb") as log:
        process = vllm(engines.python).fork(
            command, path=[str(ROOT)], environment=environment, work=engines.work, output=log
        )
    server = Server(process, f"http://127.0.0.1:{port}", engines.work / f"{name}.log")
    try:
        yield server
    finally:
        if process.poll() is None:
            server.kill()


PROXY = f"""
from kvfs import limits
limits.HEALTH_TIMEOUT_S = limits.PROBE_WAIT_S = {START_S}
from tests.support.own_ports import own_port
from kvfs.cli.main import main
main()
"""
"""Two engines on two processors are silent for seconds; what is killed closes its connections."""


@contextmanager
def proxy(*arguments: str) -> Iterator[str]:
    """Run `kvfs proxy`; yield its URL."""
    command = [sys.executable, "-c", PROXY, "proxy", "--listen", "127.0.0.1:0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[1]
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def reference(engines: Engines) -> Run:
    """One engine alone, which ends before the servers start."""
    return engines.run("proxy-reference", PROMPTS, None)


@pytest.fixture(scope="module")
def servers(engines: Engines, service: Service, reference: Run) -> Iterator[tuple[Server, Server]]:
    """One that prefills and one that decodes, which has no prefix cache of its own."""
    settings = connector(service, revision="proxy")  # a namespace of its own
    with ExitStack() as stack:
        prefill = stack.enter_context(vllm_server(engines, "prefill", settings))
        decode = stack.enter_context(vllm_server(engines, "decode", settings, "--no-enable-prefix-caching"))
        for server in (prefill, decode):
            eventually(server.is_up, "it answers", START_S, every_s=LOOK_S)
        yield prefill, decode


@dataclass
class Outcome:
    """A streamed answer."""

    tokens: list[int]
    usage: dict[str, Any]
    last: str


def ask(
    url: str, prompt: list[int], max_tokens: int = MAX_TOKENS, began: threading.Event | None = None
) -> Outcome:
    """Complete a prompt of token ids, streamed; `began` is set at the first token."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    outcome = Outcome([], {}, "")
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            data = line.decode().strip().removeprefix("data: ")
            if not data:
                continue
            outcome.last = data
            if data == "[DONE]" or "error" in (event := json.loads(data)):
                break
            outcome.usage = event.get("usage") or outcome.usage
            for choice in event["choices"]:
                outcome.tokens += choice.get("token_ids") or []
            if began is not None and outcome.tokens:
                began.set()
    return outcome


def cached(outcome: Outcome) -> int:
    return int((outcome.usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def test_streams_are_those_of_one_engine_alone(servers: tuple[Server, Server], reference: Run) -> None:
    prefill, decode = servers
    with proxy("--prefill", prefill.url, "--decode", decode.url) as url:

        def handed_over(prompt: list[int]) -> tuple[Outcome, int]:
            """The answer, and of how many tokens the decode engine found what the other had stored."""
            before = decode.external_hits()
            return ask(url, prompt), decode.external_hits() - before

        for name, prompt in PROMPTS.items():
            first, tokens = handed_over(prompt)
            assert first.tokens == reference.output(name)[0], name
            assert first.last == "[DONE]"
            assert cached(first) == 0, "what the prefill engine had of it"
            again, tokens_again = handed_over(prompt)
            assert again.tokens == first.tokens
            # It waits 50 ms for seals and computes the rest; once they are there it computes no whole block.
            if max(tokens, tokens_again) < whole_blocks(prompt):
                eventually(
                    lambda prompt=prompt: handed_over(prompt)[1] == whole_blocks(prompt), "all is found"
                )
    # Whoever asks the decode engine itself gets its own count.
    assert cached(ask(f"{decode.url}/v1", PROMPTS["900 tokens"])) == whole_blocks(PROMPTS["900 tokens"])


def test_an_engine_that_is_killed_inside_streams(servers: tuple[Server, Server], reference: Run) -> None:
    """The stream there ends with an error event, the other goes on, and what comes after goes there."""
    outcomes: list[Outcome] = []
    short = PROMPTS["600 tokens"][:20]
    with proxy("--engine", servers[0].url, "--engine", servers[1].url) as url:
        streams = []

        def stream() -> None:
            """Have a stream begin, at the engine with fewer."""
            began = threading.Event()
            streams.append(threading.Thread(target=lambda: outcomes.append(ask(url, short, 900, began))))
            streams[-1].start()
            assert began.wait(120)

        stream()
        eventually(lambda: any(server.running() for server in servers), "an engine says that it computes")
        idle = next(server for server in servers if not server.running())
        stream()
        idle.kill()  # now, as its stream has just begun: that of the other may have ended while this one waited
        for thread in streams:
            thread.join()
        broken, whole = sorted(outcomes, key=lambda outcome: outcome.last == "[DONE]")
        assert json.loads(broken.last)["error"]["code"] == "engine_failed"
        assert len(whole.tokens) == 900
        assert whole.tokens[: len(broken.tokens)] == broken.tokens
        for name, prompt in PROMPTS.items():
            assert ask(url, prompt).tokens == reference.output(name)[0]
