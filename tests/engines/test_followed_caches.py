"""A Conductor that follows the events of real engines whose layers have several caches: of each prompt it says, before
it is asked, as many cached tokens as the engine then finds.

The engines have caches so small that prompts take each other's blocks away, of windows and states before those of full
attention. No store is below them.
"""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import pytest

from kvfs.namespace_groups import KIND, LAYERS, WINDOW
from kvfs.namespaces import Namespace
from scheduler.conductor.values import CacheGroup
from tests.engines import tiny_families, tiny_gemma, tiny_lfm2
from tests.engines.engine import BLOCK_TOKENS, Engine, Engines
from tests.engines.tiny_families import CHUNK, GEMMA_4, GEMMA_4_LARGE, LLAMA_4, MISTRAL
from tests.engines.tiny_families import WINDOW as WINDOW_TOKENS
from tests.scheduler.proxy.test_conductor_routes import process
from tests.support.own_ports import own_port
from tests.support.waits import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


class Case(NamedTuple):
    """A model and what is known of its caches."""

    write_model: Callable[[Path], None]
    full_tokens: int = BLOCK_TOKENS
    """Tokens of a block of full attention."""
    cache_blocks: int = 160
    """Of all groups: two or three of the prompts."""
    settings: Mapping[str, Any] = {}
    """Of its engine."""
    extra: Mapping[str, str] = {}
    """Of its namespace, by which it is known to have no layers of full attention."""
    groups: tuple[CacheGroup, ...] = ()
    """What is said of its caches, where its events do not say it: how long a chunk is."""


FAMILIES: Final = {
    "windows": Case(tiny_gemma.write_model),
    "windows alone": Case(
        MISTRAL.write,
        cache_blocks=100,
        settings={"retained_tokens": None},
        extra={KIND: "SlidingWindowSpec", WINDOW: str(WINDOW_TOKENS), LAYERS: "all"},
    ),
    "states": Case(tiny_lfm2.write_model, settings={"native_layers": True, "retained_tokens": 96}),
    "chunks": Case(
        LLAMA_4.write,
        groups=(
            *(
                CacheGroup(
                    group=n, kind="chunked_local_attention", block_tokens=BLOCK_TOKENS, chunk_tokens=CHUNK
                )
                for n in range(3)
            ),
            CacheGroup(group=3, kind="full_attention", block_tokens=BLOCK_TOKENS),
        ),
    ),
    "windows with longer blocks": Case(GEMMA_4.write),
    "windows with shorter blocks": Case(GEMMA_4_LARGE.write, 2 * BLOCK_TOKENS),
}


class Follower:
    """A Conductor's door, and the events that its engine is told to publish to it."""

    def __init__(self, url: str, events: dict[str, Any]) -> None:
        self._url, self.events = url, events

    def held(self, prompt: list[int]) -> int:
        """Return how many tokens of a prompt the engine is known to go on from."""
        body = json.dumps({"model": "m", "tokens": prompt}).encode()
        with urllib.request.urlopen(f"{self._url}/v1/match", body, timeout=60) as answer:
            return int(json.load(answer)["instances"]["engine"])

    def heard_events(self) -> int:
        """Return how many events have come of the engine."""
        return int(self._stream()["events"])

    def blocks(self) -> tuple[int, list[int]]:
        """Return how many blocks the engine has of full attention, and of each other kind of layers."""
        stream = self._stream()
        return stream["blocks"]["GPU"], [count for _, _, count in stream["windows"] + stream["chunks"]]

    def _stream(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self._url}/v1/instances", timeout=60) as answer:
            [stream] = json.load(answer)["streams"]
        return dict(stream)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def follower(tmp_path: Path, family: str) -> Iterator[Follower]:
    events, replay = f"tcp://127.0.0.1:{own_port()}", f"tcp://127.0.0.1:{own_port()}"
    case = FAMILIES[family]
    namespace = Namespace.of_one_device(
        model="m",
        revision="1",
        dtype="float32",
        layout="LKTHD",
        block_tokens=case.full_tokens,
        extra=case.extra,
    )
    instance = {
        "name": "engine",
        "url": "http://127.0.0.1:1",
        "model": "m",
        "routable": False,
        "namespace": namespace.as_mapping(),
        "groups": msgspec.to_builtins(case.groups),
        "engine_topic": "engine",
        "engine_replay": replay,
    }
    (tmp_path / "instances.json").write_text(json.dumps([instance]))
    given = ("conductor", "run", "--listen", "127.0.0.1:0", "--events", events)
    with process(*given, "--instances", str(tmp_path / "instances.json"), lines=3, log=tmp_path / "log") as (
        _,
        address,
    ):
        settings = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "engine", "endpoint": events}
        yield Follower(address, {**settings, "replay_endpoint": replay})


@pytest.fixture
def engine(family: str, engine_python: str, work: Path, follower: Follower) -> Iterator[Engine]:
    case, directory = FAMILIES[family], work / f"followed-{family}"
    case.write_model(directory / "model")
    started = Engines(engine_python, directory).start(
        "followed",
        None,
        prefix_caching=True,
        batched_tokens=96,
        model_tokens=2048,
        cache_blocks=case.cache_blocks,
        events=follower.events,
        **case.settings,
    )
    with started as engine:
        yield engine


def prompts(count: int, branch_tokens: int = 1) -> Iterator[list[int]]:
    """Yield chats and branches of three roots, each of whole blocks and a part, which leave their root behind a
    multiple of `branch_tokens`."""
    rng = random.Random(17)
    vocabulary = min(tiny_gemma.VOCABULARY, tiny_lfm2.VOCABULARY, tiny_families.VOCABULARY)
    roots = [[rng.randrange(2, vocabulary) for _ in range(1200)] for _ in range(3)]
    for number in range(count):
        root = roots[number % 2 if number % 5 else 2]
        shared = rng.randrange(64, len(root))
        shared -= shared % branch_tokens
        tail = [rng.randrange(2, vocabulary) for _ in range(rng.randrange(1, 200))]
        prompt = root[:shared] + tail
        yield prompt if len(prompt) % BLOCK_TOKENS else prompt[:-1]


def test_what_is_predicted_is_what_the_engine_finds(family: str, follower: Follower, engine: Engine) -> None:
    found = []
    for number, prompt in enumerate(prompts(60)):
        predicted = follower.held(prompt)
        found.append((predicted, engine.generate({"prompt": prompt}, max_tokens=1).cached("prompt")))
        said = engine.published_events()
        eventually(
            lambda said=said: follower.heard_events() == said,
            f"it hears what the engine says: {number}, {found}",
        )
    assert [predicted for predicted, _ in found] == [cached for _, cached in found]
    assert 10 < sum(cached > 0 for _, cached in found) < 55, found
    full, others = follower.blocks()
    if FAMILIES[family].extra:
        assert full == 0 < min(others)
    else:
        assert [count for count in others if 0 < count < full], (
            "other layers have fewer, and decide where a prompt goes on"
        )
