"""A hot prefix of a model with windows is copied to another machine's store before an engine wants it there.

A Conductor orders it: what one machine's engine computed the store of another fetches, of each cache group. The engine
there then finds all of it, as was predicted, and answers as the first one does.
"""

from __future__ import annotations

import json
import random
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from tests.engines import tiny_gemma
from tests.engines.engine import BLOCK_TOKENS, Engines, whole_blocks
from tests.engines.test_conducted_engines import alone, ask
from tests.engines.test_proxy import LOOK_S, START_S, proxy, vllm_server
from tests.engines.test_vllm_peers import fetched_blocks, two_machines, unmounted
from tests.support.door import ON_DIRECTORY
from tests.support.own_ports import own_port
from tests.support.waits import eventually

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
]

_rng = random.Random(93)
PROMPT: Final = [_rng.randrange(2, tiny_gemma.VOCABULARY) for _ in range(900)]
BLOCKS: Final = whole_blocks(PROMPT) // BLOCK_TOKENS
COPIED_S: Final = 180.0
"""A sweep of 30 s, and a node that asks again after 75 s at most, since nobody answered at first."""
WINDOW_BLOCKS: Final = 2 * (tiny_gemma.WINDOW // BLOCK_TOKENS)
"""Of both groups of windows, behind a prefix."""


def test_a_hot_prefix_is_there_with_its_windows_before_it_is_wanted(
    engine_python: str, work: Path, tmp_path: Path
) -> None:
    engines = Engines(engine_python, work / "copies")
    tiny_gemma.write_model(engines.work / "model")
    door, events = f"127.0.0.1:{own_port()}", f"tcp://127.0.0.1:{own_port()}"
    config = engines.work / "kvfs.toml"
    config.write_text(f'[conductor]\nlisten = "{door}"\nevents = "{events}"\ncopies = true\n')
    first, second = (
        f'conductor = "http://{door}"\nconductor_topic = "node-{n}"\n'
        f'[events]\ntopic = "node-{n}"\npublish = "{events}"\nreplay = "tcp://*:{own_port()}"\n'
        for n in range(2)
    )

    def post(path: str, values: dict[str, Any] | None = None, method: str = "POST") -> dict[str, Any]:
        body = None if values is None else json.dumps(values).encode()
        asked = urllib.request.Request(f"http://{door}/v1/{path}", body, method=method)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return dict(json.loads(answer.read() or b"{}"))

    def held() -> list[int]:
        """Return how many tokens of the prompt each machine is known to serve."""
        found = post("match", {"model": "tiny", "tokens": PROMPT})["instances"]
        return [found[name] for name in names]

    with two_machines(tmp_path, (first, second)) as (services, _), ExitStack() as stack:
        servers = [
            stack.enter_context(
                vllm_server(engines, f"on-{n}", unmounted(service), "--no-enable-prefix-caching")
            )
            for n, service in enumerate(services)
        ]
        for server in servers:
            eventually(server.is_up, "it answers", START_S, every_s=LOOK_S)
        given = [option for server in servers for option in ("--engine", server.url)]
        stack.enter_context(proxy("--conduct", *given, "--config", str(config)))

        def instances() -> list[dict[str, Any]]:
            return list(post("instances", method="GET")["instances"])

        eventually(lambda: len(instances()) == 2, "the engines have said what they are")
        names = [each["name"] for server in servers for each in instances() if each["url"] == server.url]
        answer, _ = ask(f"{servers[0].url}/v1", PROMPT)
        eventually(lambda: held() == [BLOCKS * BLOCK_TOKENS, 0], "what the first engine stored is told")
        for _ in range(6):
            route = post("route", {"model": "tiny", "tokens": PROMPT, "exclude": names[:1]})
            assert route["decode"] == names[1]
            post(f"reservations/{route['id']}", method="DELETE")
        eventually(
            lambda: held() == [BLOCKS * BLOCK_TOKENS] * 2, "the prefix was copied", COPIED_S, every_s=LOOK_S
        )
        assert fetched_blocks(services[1]) == BLOCKS + WINDOW_BLOCKS
        assert ask(f"{servers[1].url}/v1", PROMPT) == (answer, BLOCKS * BLOCK_TOKENS)
        assert fetched_blocks(services[1]) == BLOCKS + WINDOW_BLOCKS
        assert answer == alone(servers[1], PROMPT)
