"""`kvfs proxy --conduct` in front of a prefill and a decode engine, each on a machine of its own.

The Conductor asks the engines where their stores are read, the proxy tells the decode engine, and its service fetches
what was prefilled. Answers are those of one engine that has nothing cached.
"""

from __future__ import annotations

import json
import random
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest

from tests.engines.engine import BLOCK_TOKENS, Engines, whole_blocks
from tests.engines.spoken_words import write_tokenizer
from tests.engines.test_conducted_engines import alone, ask
from tests.engines.test_proxy import LOOK_S, START_S, Server, proxy, vllm_server
from tests.engines.test_vllm_peers import fetched_blocks, two_machines, unmounted
from tests.engines.tiny_llama import VOCABULARY
from tests.support.door import ON_DIRECTORY
from tests.support.own_ports import own_port
from tests.support.service import Service
from tests.support.waits import eventually

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
]

_rng = random.Random(92)
PROMPT = [_rng.randrange(2, VOCABULARY) for _ in range(900)]


class Stand(NamedTuple):
    services: list[Service]
    servers: list[Server]
    """The one that prefills, and the one that decodes."""
    url: str


@pytest.fixture(scope="module")
def stand(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    shutil.copytree(engines.work / "model", engines.work / "peers")
    write_tokenizer(engines.work / "peers")
    door, config = own_port(), engines.work / "peers.toml"
    config.write_text(f'[conductor]\nlisten = "127.0.0.1:{door}"\nevents = "tcp://127.0.0.1:{own_port()}"\n')
    with two_machines(tmp_path_factory.mktemp("peers")) as (services, _), ExitStack() as stack:
        servers = [
            stack.enter_context(vllm_server(engines, f"peers-{number}", unmounted(service), model="peers"))
            for number, service in enumerate(services)
        ]
        for server in servers:
            eventually(server.is_up, "it answers", START_S, every_s=LOOK_S)
        roles = ["--prefill", servers[0].url, "--decode", servers[1].url]
        url = stack.enter_context(proxy("--conduct", *roles, "--config", str(config)))

        def count_instances() -> int:
            with urllib.request.urlopen(f"http://127.0.0.1:{door}/v1/instances", timeout=60) as answer:
                return len(json.loads(answer.read())["instances"])

        eventually(lambda: count_instances() == len(servers), "the engines have said what they are")
        yield Stand(services, servers, url)


def test_what_one_machine_prefilled_the_other_goes_on_with(stand: Stand) -> None:
    tokens, cached = ask(stand.url, PROMPT)
    assert cached == 0, "the usage is the prefill engine's"
    blocks = whole_blocks(PROMPT) // BLOCK_TOKENS
    assert fetched_blocks(stand.services[1]) == blocks
    assert tokens == alone(stand.servers[0], PROMPT)
    # Without its machine the decode engine computes the prompt.
    stand.services[0].kill()
    stand.servers[0].kill()
    other = PROMPT[::-1]
    assert ask(stand.url, other)[0] == alone(stand.servers[1], other)
    assert fetched_blocks(stand.services[1]) == blocks
