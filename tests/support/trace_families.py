"""Families of request traces with fixed seeds, beside the public trace.

Responsibility: what real traffic has been seen to look like, each in its extreme. Sizes are such that eight
prefill instances of the default cost table are busy most of the time and their caches overflow.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from scheduler.traces import BLOCK_TOKENS, Request


class _Ids:
    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> tuple[int, ...]:
        first, self._next = self._next, self._next + count
        return tuple(range(first, self._next))


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def _arrivals(rng: random.Random, rate: float) -> Iterator[float]:
    now_s = 0.0
    while True:
        now_s += rng.expovariate(rate)
        yield now_s


def _turns(
    seed: int, requests: int, *, rate: float, new_tokens: float, sessions: int, stay: float
) -> list[Request]:
    """Sessions whose prompt grows by each turn; a session goes on with chance `stay`."""
    rng, ids = random.Random(seed), _Ids()
    system = ids.take(2)
    live: list[tuple[int, tuple[int, ...]]] = []
    trace: list[Request] = []
    arrivals = _arrivals(rng, rate)
    while len(trace) < requests:
        at_s = next(arrivals)
        begin = len(live) < sessions or rng.random() < 0.2
        tokens, full = (2 * BLOCK_TOKENS, system) if begin else live.pop(rng.randrange(len(live)))
        tokens += int(rng.lognormvariate(0, 1) * new_tokens) + 1
        if tokens > 126_000:
            continue
        blocks = full + ids.take(_blocks(tokens) - len(full))
        answer = rng.randint(20, 600)
        trace.append(Request(at_s, tokens, answer, blocks))
        if rng.random() < stay:
            live.append((tokens + answer, blocks[: tokens // BLOCK_TOKENS]))
    return trace


def chat(seed: int, requests: int) -> list[Request]:
    """Many sessions of a few turns behind one system prompt."""
    return _turns(seed, requests, rate=6.0, new_tokens=4_000, sessions=300, stay=0.75)


def agents(seed: int, requests: int) -> list[Request]:
    """Few sessions of many quick turns on long contexts."""
    return _turns(seed, requests, rate=14.0, new_tokens=1_200, sessions=120, stay=0.97)


def documents(seed: int, requests: int) -> list[Request]:
    """Questions about long documents, a few of them popular: Zipf over 400 documents."""
    rng, ids = random.Random(seed), _Ids()
    shelf = [ids.take(rng.randint(20, 200)) for _ in range(400)]
    weights = [1 / (rank + 1) for rank in range(len(shelf))]
    arrivals = _arrivals(rng, 5.0)
    trace = []
    for _ in range(requests):
        document = rng.choices(shelf, weights)[0]
        question = rng.randint(30, 1500)
        tokens = len(document) * BLOCK_TOKENS + question
        trace.append(
            Request(next(arrivals), tokens, rng.randint(20, 400), document + ids.take(_blocks(question)))
        )
    return trace


def hot_prompts(seed: int, requests: int) -> list[Request]:
    """Eight long system prompts that nearly all requests share."""
    rng, ids = random.Random(seed), _Ids()
    prompts = [ids.take(rng.randint(10, 60)) for _ in range(8)]
    arrivals = _arrivals(rng, 16.0)
    trace = []
    for _ in range(requests):
        prompt = rng.choices(prompts, (8, 6, 4, 3, 2, 1, 1, 1))[0]
        own = int(rng.lognormvariate(8.0, 0.8)) + 1
        tokens = len(prompt) * BLOCK_TOKENS + own
        trace.append(Request(next(arrivals), tokens, rng.randint(20, 400), prompt + ids.take(_blocks(own))))
    return trace


def bursts(seed: int, requests: int) -> list[Request]:
    """The same chats, arriving in bursts every three seconds."""
    trace = chat(seed, requests)
    return [
        Request(request.arrival_s // 3 * 3, request.input_tokens, request.output_tokens, request.blocks)
        for request in trace
    ]


def strangers(seed: int, requests: int) -> list[Request]:
    """Nothing is ever read again."""
    rng, ids = random.Random(seed), _Ids()
    arrivals = _arrivals(rng, 4.0)
    trace = []
    for _ in range(requests):
        tokens = min(int(rng.lognormvariate(9.0, 1.0)) + 1, 126_000)
        trace.append(Request(next(arrivals), tokens, rng.randint(20, 400), ids.take(_blocks(tokens))))
    return trace


FAMILIES: dict[str, Callable[[int, int], list[Request]]] = {
    "chat": chat,
    "agents": agents,
    "documents": documents,
    "hot prompts": hot_prompts,
    "bursts": bursts,
    "strangers": strangers,
}
