"""A Conductor that follows a store which real engines with several caches share: of each prompt it says, before it is
asked, as many cached tokens as the engine then finds there.

The engines have nothing else: no prefix cache, or an empty one. The store is so small that prompts take each other's
blocks away, of windows and states before those of full attention, and some are on NVMe alone.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from kvfs.client import Client
from kvfs.client.blocks import Blocks
from kvfs.keys import prefix_hashes
from tests.engines import tiny_gemma, tiny_lfm2
from tests.engines.engine import BLOCK_TOKENS, Engines
from tests.engines.test_conducted_engines import ask
from tests.engines.test_followed_caches import prompts
from tests.engines.test_proxy import LOOK_S, START_S, Server, proxy, vllm_server
from tests.engines.test_vllm_connector import connector
from tests.engines.tiny_families import GEMMA_4, GEMMA_4_LARGE, LLAMA_4, MISTRAL
from tests.support.conductors import NAMESPACE
from tests.support.door import ON_DIRECTORY, need_mount
from tests.support.own_ports import own_port
from tests.support.service import Service, has_written
from tests.support.waits import eventually

pytestmark = [
    pytest.mark.engine,
    pytest.mark.mount,
    pytest.mark.timeout(900),
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
]

NO_CACHE: Final = ("--no-enable-prefix-caching",)


class Case(NamedTuple):
    """A model, and what its engine and store are started with."""

    write_model: Callable[[Path], None]
    boundary_tokens: int = BLOCK_TOKENS
    """How far apart the boundaries are at which prompts go on."""
    branch_tokens: int = 1
    """Prompts leave their root behind a multiple of so many tokens. A part of a block is told beside the one with which
    it came: to prompts that leave within that, less is predicted than they find."""
    has_full: bool = True
    """Whether it has layers of full attention."""
    has_further: bool = False
    """Whether these are of two groups."""
    slots: int = 160
    """Blocks in the store's memory: two or three of the prompts."""
    nvme: str = "24MiB"
    flags: tuple[str, ...] = NO_CACHE
    """vLLM's."""


FAMILIES: Final = {
    "windows": Case(tiny_gemma.write_model),
    "windows alone": Case(MISTRAL.write, has_full=False, slots=64, nvme="8MiB"),
    "windows with longer blocks": Case(GEMMA_4.write, 2 * BLOCK_TOKENS),
    "windows with shorter blocks": Case(
        GEMMA_4_LARGE.write, 2 * BLOCK_TOKENS, branch_tokens=2 * BLOCK_TOKENS
    ),
    "two groups of full attention": Case(tiny_gemma.write_more_full, has_further=True),
    "chunks": Case(LLAMA_4.write),
    "states": Case(
        tiny_lfm2.write_model,
        nvme="16MiB",
        flags=(
            *("--enable-prefix-caching", "--prefix-cache-retention-interval", "96"),
            *("--compilation-config", '{"custom_ops": ["none"]}'),
        ),
    ),
}
MARKS: Final = "marks"
"""A model of which nobody computes anything: the test stores its blocks itself."""
PROMPTS: Final = 60
LATER: Final = 20


def evictions(client: Client) -> int:
    return int(client.status()["evictions"])


@dataclass
class Followed:
    server: Server
    service: Service
    conductor: str
    case: Case
    _numbers: Iterator[int] = field(default_factory=lambda: count(2))

    def held(self, prompt: list[int], model: str = "tiny") -> int:
        """Return how many tokens of a prompt the store is known to serve."""
        [held] = self.post("match", {"model": model, "tokens": prompt})["instances"].values()
        return int(held)

    def post(self, question: str, values: dict[str, Any]) -> dict[str, Any]:
        """Ask the Conductor."""
        body = json.dumps(values).encode()
        with urllib.request.urlopen(f"{self.conductor}/v1/{question}", body, timeout=60) as answer:
            return dict(json.load(answer))

    def ask(self, prompt: list[int]) -> int:
        """Ask the engine a prompt, of which it is to find what the store is known to have; return how many tokens."""
        self._forget()
        predicted, before = self.held(prompt), self.evictions()
        _, found = ask(f"{self.server.url}/v1", prompt, max_tokens=1)
        assert found == predicted, (
            f"of {len(prompt)} tokens {found} were found, not {predicted} as predicted; {self.held(prompt)} are known "
            f"now, and {self.evictions() - before} objects were evicted meanwhile"
        )
        self._hear()
        return found

    def evictions(self) -> int:
        with self.service.client() as client:
            return evictions(client)

    def restart(self) -> None:
        """Stop the store and start it, and wait until all is known of it again."""
        self.service.stop()
        self.service.restart()
        self._hear()
        eventually(
            lambda: [each["knowledge"] for each in self.streams()] == ["current"],
            "the store is followed again",
        )

    def _hear(self) -> None:
        """Wait until the store is at rest, and the Conductor knows what it has.

        What waits to be written to NVMe takes the place of other blocks there. Once nothing does, a mark is removed
        that was stored before: events come in order, so that whoever hears of that has heard of all that went.
        """
        last = [next(self._numbers)] * (self.case.boundary_tokens + 1)

        def is_told() -> bool:
            """The engine stores one prompt after the other: what it has stored of others is told as well."""
            ask(f"{self.server.url}/v1", last, max_tokens=1)
            return self.held(last) == self.case.boundary_tokens

        eventually(is_told, "what the engine stores is told")
        with self.service.client() as client, client.blocks(NAMESPACE) as blocks:
            eventually(lambda: self._is_marked(client, blocks), "a mark stays until all is written")

    def _is_marked(self, client: Client, blocks: Blocks) -> bool:
        """Store a mark, and remove it once nothing waits to be written; return whether it was there until then, and
        took nothing with it.

        A full store may evict what is new and was never read. That the mark has gone is written as well: of 150 times
        14 a segment of NVMe was reclaimed for that, and what else was in it evicted.
        """
        tokens = [next(self._numbers)] * NAMESPACE.block_tokens
        mark = prefix_hashes(NAMESPACE, tokens)
        blocks.put(mark, [b"mark"])
        eventually(
            lambda: self.held(tokens, MARKS) > 0 or not blocks.match(mark), "the mark is told, or evicted"
        )
        eventually(lambda: has_written(client, 0), "nothing waits to be written")
        before = evictions(client)
        if not blocks.remove(mark):
            return False
        eventually(lambda: self.held(tokens, MARKS) == 0, "all that went is told")
        eventually(lambda: has_written(client, 0), "that the mark has gone is written")
        return evictions(client) == before

    def streams(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self.conductor}/v1/instances", timeout=60) as answer:
            return list(json.load(answer)["streams"])

    def _forget(self) -> None:
        """Have the engine drop what it keeps itself."""
        urllib.request.urlopen(f"{self.server.url}/reset_prefix_cache", b"", timeout=60).close()


@pytest.fixture(params=FAMILIES)
def followed(
    request: pytest.FixtureRequest, engine_python: str, work: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Followed]:
    need_mount()
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    case, name = FAMILIES[request.param], request.param.replace(" ", "-")
    engines = Engines(engine_python, work / f"stored-{name}")
    case.write_model(engines.work / "model")
    door, events = own_port(), f"tcp://127.0.0.1:{own_port()}"
    config = engines.work / "kvfs.toml"
    config.write_text(
        f'[events]\npublish = "{events}"\nreplay = "tcp://*:{own_port()}"\ntopic = "node"\n'
        f'[conductor]\nlisten = "127.0.0.1:{door}"\nevents = "{events}"\n'
    )
    with ExitStack() as stack:
        arguments = ["--config", str(config), "--slots", str(case.slots)]
        service = stack.enter_context(Service(dram="16MiB", nvme=case.nvme, arguments=arguments))
        server = stack.enter_context(
            vllm_server(
                engines,
                "engine",
                connector(service, revision=name),
                *("--max-model-len", "2048", "--max-num-batched-tokens", "96", *case.flags),
            )
        )
        eventually(server.is_up, "it answers", START_S, every_s=LOOK_S)
        stack.enter_context(proxy("--conduct", "--engine", server.url, "--config", str(config)))
        made = Followed(server, service, f"http://127.0.0.1:{door}", case)
        eventually(
            lambda: [each["knowledge"] for each in made.streams()] == ["current"], "the store is followed"
        )
        [stream] = made.streams()
        assert stream["windows"] + stream["chunks"], "the engine has said which layers it has"
        marks = {"name": MARKS, "url": "http://127.0.0.1:1", "model": MARKS, "routable": False}
        made.post("instances", {**marks, "namespace": NAMESPACE.as_mapping(), "store_topic": "node"})
        yield made
        assert not service.complaints()


def test_what_is_predicted_is_what_the_engine_finds(followed: Followed) -> None:
    """Also once the store was stopped and started: it says again what it has, of which layers, beside what."""
    asked = prompts(PROMPTS + LATER, followed.case.branch_tokens)
    found = [followed.ask(prompt) for prompt in islice(asked, PROMPTS)]
    assert 10 < sum(cached > 0 for cached in found) < PROMPTS - 2, found
    [stream] = followed.streams()
    assert (None in [length for _, length, _ in stream["windows"]]) == followed.case.has_further
    beside = [count for _, _, count in stream["windows"] + stream["chunks"]]
    assert beside
    if followed.case.has_full:
        assert all(stream["blocks"][medium] for medium in ("CPU", "STORAGE")), stream
        assert all(0 < each < sum(stream["blocks"].values()) for each in beside), stream
    else:
        assert all(beside), stream
    with followed.service.client() as client:
        status = client.status()
    assert min(status["evictions"], status["promotions"]) > 0, "blocks went, and came up from NVMe"
    followed.restart()
    found = [followed.ask(prompt) for prompt in asked]
    assert sum(cached > 0 for cached in found) > LATER // 2, found
