"""The scheduler's half of the vLLM connector over a store and a clock that a test has in its hands.

Responsibility: a table of keys that answers at once, fetches that end when a test says so, requests of random tokens,
what a plan stores of them, and what layers read of a group; the fixture that all tests of it import.

Concurrency: one test's thread.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import pytest

from kvfs import prefix_hashes
from kvfs.connectors.vllm_scheduler import Planner, Rank, Step
from kvfs.groups import Group
from kvfs.keys import split_keys
from kvfs.limits import CONNECTOR_MATCH_S
from kvfs.namespaces import Namespace
from tests.support.stores import NAMESPACE

BLOCK = NAMESPACE.block_tokens
RANKS: list[Rank] = [(0, 0), (0, 1)]


def namespaces() -> dict[Rank, Namespace]:
    fields = {**NAMESPACE.as_mapping(), "tensor_shards": 2}
    return {rank: Namespace.from_mapping({**fields, "tensor_rank": rank[1]}) for rank in RANKS}


class AskedFetch(NamedTuple):
    keys: list[bytes]
    hint: str | None
    timeout_s: float
    future: Future[int]


class FakeBlocks:
    """The shared table: a set of keys."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.below: set[bytes] = set()
        self.trials: list[Future[int]] = []
        self.fetches: list[AskedFetch] = []

    def match(self, keys: bytes, *, timeout_s: float) -> int:
        hits = self.exists(keys, timeout_s=timeout_s)
        return hits.index(False) if False in hits else len(hits)

    def exists(self, keys: bytes, *, timeout_s: float) -> list[bool]:
        assert timeout_s <= CONNECTOR_MATCH_S, "the scheduler must not wait"
        return [key in self.keys for key in split_keys(keys)]

    def below_dram(self, keys: bytes, *, timeout_s: float) -> list[bool]:
        assert timeout_s <= CONNECTOR_MATCH_S, "the scheduler must not wait"
        return [key in self.keys & self.below for key in split_keys(keys)]

    def prefetch(self, keys: bytes, *, timeout_s: float) -> Future[int]:
        self.trials.append(Future())
        return self.trials[-1]

    def fetch(self, keys: bytes, *, hint: str | None, timeout_s: float) -> Future[int]:
        self.fetches.append(AskedFetch(list(split_keys(keys)), hint, timeout_s, Future()))
        return self.fetches[-1].future

    def bring(self, asked: AskedFetch, count: int | None = None) -> None:
        """End a fetch with its first blocks here."""
        self.keys.update(asked.keys[:count])
        asked.future.set_result(len(asked.keys[:count]))


class FakeLink:
    def __init__(self) -> None:
        self.store: FakeBlocks | None = FakeBlocks()
        self.parents: dict[bytes, bytes] = {}
        """Of blocks that are not stored behind the one before."""
        self.is_up = True

    def open(self, namespace: Namespace) -> FakeBlocks | None:
        return self.store

    def blocks(self, namespace: Namespace) -> FakeBlocks | None:
        return self.store

    def attempt(self, do: Callable[[], Any], otherwise: Any) -> Any:
        return do()


class FakeRequest:
    def __init__(self, name: str, tokens: Sequence[int], params: Any = None) -> None:
        self.request_id = name
        self.kv_transfer_params = params
        self.all_token_ids = list(tokens)
        self.num_prompt_tokens = len(tokens)
        self.lora_request = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


@pytest.fixture(autouse=True)
def no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "_extra", lambda self, tracked, first, last, size: [None] * (last - first))


class Clock:
    """Seconds that pass when a test says so."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def planner(
    link: FakeLink,
    *,
    store_generated: bool = True,
    fetches_any: bool = False,
    clock: Clock | None = None,
) -> Planner:
    made = Planner(
        link,  # type: ignore[arg-type]
        BLOCK,
        store_generated=store_generated,
        is_async=True,
        fetches_any=fetches_any,
        clock=clock or Clock(),
    )
    made.set_namespaces(namespaces())
    return made


def keys_of(tokens: Sequence[int]) -> dict[Rank, list[bytes]]:
    return {
        rank: list(split_keys(prefix_hashes(namespace, list(tokens))))
        for rank, namespace in namespaces().items()
    }


def read_back(group: Group, end: int) -> int:
    """Return how many of the blocks before the block `end` layers read from there on that do not read all."""
    assert group.window_blocks is not None
    return end % group.window_blocks if group.is_chunked else group.window_blocks


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=count)


def stored_blocks(plan: Any) -> list[int]:
    return [block for run in plan.stores for block in run.block_ids]


def stored_keys(plan: Any) -> set[bytes]:
    return {key for run in plan.stores for keys in run.keys.values() for key in split_keys(keys)}


def prefilled(made: Planner, tokens: Sequence[int], *, step: int | None = None) -> tuple[Any, set[bytes]]:
    """What a prefill leg answers, in steps of so many tokens, and the blocks that it stores."""
    request = FakeRequest("prefill", tokens, {"do_remote_decode": True})
    hits, _ = made.match(request, 0)
    assert hits is not None
    stored, blocks = set[bytes](), list(range(len(tokens) // BLOCK + 1))
    for before in range(hits, len(tokens), step or len(tokens)):
        after = min(before + (step or len(tokens)), len(tokens))
        stored |= stored_keys(made.plan([Step("prefill", before, after, blocks)]))
    request.all_token_ids.append(7)  # its only token
    return made.finished(request), stored
