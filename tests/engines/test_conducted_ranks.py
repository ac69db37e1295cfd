"""`kvfs proxy --conduct` in front of one real vLLM server with two data-parallel ranks, each with a cache of its own.

The Conductor has found the ranks by the server's metrics, hears each one's events, and says with each request which one
is to work.
"""

from __future__ import annotations

import re
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from tests.engines.engine import Engines
from tests.engines.test_conducted_engines import Stand, alone, ask, conducted, prompts
from tests.support.door import ON_DIRECTORY
from tests.support.held_ports import held_neighbours

pytestmark = [
    pytest.mark.engine,
    pytest.mark.mount,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
]

RANKS = 2


@pytest.fixture(scope="module")
def stand(engines: Engines) -> Iterator[Stand]:
    first, second = held_neighbours()  # rank 1 publishes one port higher than rank 0
    with (
        first,
        second,
        conducted(engines, "ranks", 1, first.number, "--data-parallel-size", str(RANKS)) as made,
    ):
        yield made


def names(stand: Stand) -> list[str]:
    return [f"{urlsplit(stand.servers[0].url).netloc}@{rank}" for rank in range(RANKS)]


def prompt_tokens(stand: Stand) -> Counter[str]:
    """Count the tokens of prompts that each rank had."""
    with urllib.request.urlopen(f"{stand.servers[0].url}/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(r'^vllm:prompt_tokens_total\{.*engine="(\d+)".*\} (\S+)$', text, re.MULTILINE)
    return Counter({rank: int(float(value)) for rank, value in found})


def test_each_rank_is_an_instance_that_says_what_it_holds(stand: Stand) -> None:
    status = stand.status()
    assert sorted(each["name"] for each in status["instances"]) == names(stand)
    assert {each["url"] for each in status["instances"]} == {stand.servers[0].url}
    assert len(status["streams"]) == RANKS + 1
    assert status["unregistered"] == {}


def test_what_a_rank_has_is_computed_there_and_both_work(stand: Stand) -> None:
    made = prompts()
    server = stand.servers[0]
    expected = [alone(server, prompt) for prompt in made]
    before, decided = prompt_tokens(stand), len(stand.decisions())
    with ThreadPoolExecutor(5) as pool:
        for turn in range(2):
            found = list(pool.map(lambda prompt: ask(stand.url, prompt)[0], made[turn::2]))
            assert found == expected[turn::2]
    decisions = stand.decisions()[decided:]
    assert [each.outcome for each in decisions] == ["done"] * len(made)
    assert {each.decode for each in decisions} == set(names(stand))
    # The second of each pair finds what the first has in common with it.
    assert all(each.predicted_tokens >= 640 for each in decisions[5:]), decisions
    assert all((each.cached_tokens or 0) >= 640 for each in decisions[5:]), decisions
    assert stand.distrusted() == []
    # Ranks worked as the Conductor had decided: every prompt has 740 tokens.
    chosen = Counter(each.decode.partition("@")[2] for each in decisions)
    assert prompt_tokens(stand) - before == Counter({rank: 740 * count for rank, count in chosen.items()})
