"""Families of request traces with fixed seeds, beside the public trace.

Responsibility: what real traffic has been seen to look like, each in its extreme. Sizes are such that eight
prefill instances of the default cost table are busy most of the time and their caches overflow.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from scheduler.simulation.traces import BLOCK_TOKENS, Request


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


def long_agents(seed: int, requests: int, *, sessions: int = 24) -> list[Request]:
    """A few agents whose context grows from 50,000 tokens or more to 200,000, then starts over; some fork back."""
    rng, ids = random.Random(seed), _Ids()
    system = ids.take(8)

    def begin() -> _Agent:
        tokens = rng.randint(50_000, 120_000)
        return _Agent(tokens, system + ids.take(tokens // BLOCK_TOKENS - 8), rng.randint(120_000, 200_000))

    agents = [begin() for _ in range(sessions)]
    events = [(rng.expovariate(0.05), n) for n in range(sessions)]
    heapq.heapify(events)
    trace: list[Request] = []
    while len(trace) < requests:
        at_s, n = heapq.heappop(events)
        agent = agents[n]
        agent.tokens += int(rng.lognormvariate(0, 1) * 1500) + 1
        blocks = agent.full + ids.take(_blocks(agent.tokens) - len(agent.full))
        answer = rng.randint(50, 800)
        trace.append(Request(at_s, agent.tokens, answer, blocks))
        agent.full = blocks[: agent.tokens // BLOCK_TOKENS]
        agent.tokens += answer
        if agent.tokens > agent.most:
            agents[n] = begin()
        elif rng.random() < 0.02:
            agent.tokens = int(agent.tokens * rng.uniform(0.5, 1))
            agent.full = agent.full[: agent.tokens // BLOCK_TOKENS]
        heapq.heappush(events, (at_s + rng.lognormvariate(0, 1) * 20, n))
    return trace


@dataclass(slots=True)
class _Agent:
    tokens: int
    full: tuple[int, ...]
    most: int


def long_chats(seed: int, requests: int) -> list[Request]:
    """Chats of many turns on long contexts, as many at each moment once all have begun: one that ends is followed by
    another, and the first are somewhere in their middle."""
    rng, ids = random.Random(seed), _Ids()
    systems = [ids.take(rng.randint(1, 8)) for _ in range(rng.randint(1, 4))]
    first, grow = rng.uniform(2_000, 20_000), rng.uniform(500, 2_500)
    turns, think_s = rng.randint(8, 40), rng.uniform(20, 120)

    def begin(said: int) -> _Agent:
        system, tokens = rng.choice(systems), int(rng.expovariate(1 / first)) + int(said * grow)
        full = system + ids.take(tokens // BLOCK_TOKENS)
        return _Agent(len(full) * BLOCK_TOKENS, full, turns - said)

    chats = [begin(rng.randrange(turns)) for _ in range(rng.randint(60, 200))]
    events = [(rng.uniform(0, 5 * think_s), n) for n in range(len(chats))]
    heapq.heapify(events)
    trace: list[Request] = []
    while len(trace) < requests:
        at_s, n = heapq.heappop(events)
        chat = chats[n]
        chat.tokens = min(chat.tokens + int(rng.expovariate(1 / grow)) + 1, 126_000)
        blocks = chat.full + ids.take(_blocks(chat.tokens) - len(chat.full))
        answer = rng.randint(20, 600)
        trace.append(Request(at_s, chat.tokens, answer, blocks))
        chat.full, chat.most = blocks[: chat.tokens // BLOCK_TOKENS], chat.most - 1
        chat.tokens += answer
        if not chat.most or chat.tokens > 125_000:
            chats[n] = begin(0)
        heapq.heappush(events, (at_s + rng.expovariate(1 / think_s), n))
    return trace


def forks(seed: int, requests: int) -> list[Request]:
    """Sessions that fork: a turn is sent again as it was, tried in several ways at once, or taken up from an earlier
    one."""
    rng, ids = random.Random(seed), _Ids()
    system = ids.take(4)
    live = [(4 * BLOCK_TOKENS, system)]
    arrivals, trace = _arrivals(rng, 3.0), list[Request]()
    while len(trace) < requests:
        at_s = next(arrivals)
        begin = len(live) < 40 or rng.random() < 0.05
        tokens, full = live[0] if begin else live.pop(1 + rng.randrange(len(live) - 1))
        for _ in range(rng.choice((1, 1, 1, 1, 2, 4))):
            longer = tokens + int(rng.lognormvariate(0, 1) * (8_000 if begin else 1_500)) + 1
            blocks = full + ids.take(_blocks(longer) - len(full))
            request = Request(at_s, longer, rng.randint(20, 600), blocks)
            trace += [request] * (2 if rng.random() < 0.05 else 1)
            if rng.random() < 0.9 and longer < 120_000:
                live.append((longer + request.output_tokens, blocks[: longer // BLOCK_TOKENS]))
        if rng.random() < 0.3:
            live.append((tokens, full))
        if len(live) > 200:
            del live[1 : len(live) - 150]
    return trace[:requests]


FAMILIES: dict[str, Callable[[int, int], list[Request]]] = {
    "chat": chat,
    "agents": agents,
    "documents": documents,
    "hot prompts": hot_prompts,
    "bursts": bursts,
    "strangers": strangers,
    "long chats": long_chats,
    "long agents": long_agents,
    "forks": forks,
}


def diurnal(seed: int, requests: int, *, period_s: float = 1200.0, rate: float = 2.2) -> list[Request]:
    """Days of `period_s`: long documents with short answers at noon, short questions with long answers at midnight."""
    rng, ids = random.Random(seed), _Ids()
    trace: list[Request] = []
    for at_s in _arrivals(rng, rate):
        if len(trace) == requests:
            break
        day = 0.5 - 0.5 * math.cos(2 * math.pi * at_s / period_s)
        if rng.random() < day:
            tokens, answer = int(rng.lognormvariate(0, 0.5) * 14_000) + 1, rng.randint(50, 300)
        else:
            tokens, answer = int(rng.lognormvariate(0, 0.5) * 1_500) + 1, rng.randint(1_500, 3_000)
        tokens = min(tokens, 120_000)
        trace.append(Request(at_s, tokens, answer, ids.take(_blocks(tokens))))
    return trace


def one_system_prompt(seed: int, requests: int, *, rate: float = 8.0, until: float = 2 / 3) -> list[Request]:
    """Chats, and as many requests behind one long system prompt, which nobody sends after a share `until` of them."""
    rng, ids = random.Random(seed), _Ids()
    system = tuple(-1 - n for n in range(60))
    others = iter(chat(seed, requests))
    trace: list[Request] = []
    for at_s in _arrivals(rng, rate):
        if len(trace) == requests:
            break
        if rng.random() < 0.5 and len(trace) < until * requests:
            own = int(rng.lognormvariate(7.5, 0.8)) + 1
            tokens = len(system) * BLOCK_TOKENS + own
            blocks = system + tuple(1 << 40 | block for block in ids.take(_blocks(own)))
            trace.append(Request(at_s, tokens, rng.randint(20, 400), blocks))
        else:
            trace.append(replace(next(others), arrival_s=at_s))
    return trace
