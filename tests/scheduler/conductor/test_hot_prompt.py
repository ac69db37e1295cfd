"""One system prompt at half of the traffic, with a Conductor and its engines as processes in real time.

Engines take as long for a prefill as the Conductor predicts: 0.25 s for the system prompt, 0.35 s for a chat's first
turn, 0.05 to 0.1 s for what comes after them, beside which a busy machine's own time is little. Places are counted, and
no time is judged.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Final

import trio

from tests.support.conductors import BLOCK_TOKENS, tokens
from tests.support.fleet import Costs, Fleet, Prefilled

COSTS: Final = Costs("llama3-70b", "a100-80g", 3)
ROOM_BLOCKS: Final = 20_000
"""More than all prompts have: nothing is evicted."""
CLIENTS: Final = 32
TURNS: Final = 3
"""Of each client's chat after its first, and as many questions."""
SYSTEM: Final = tokens(0, 60 * BLOCK_TOKENS)
FIRST_TURN: Final = 80 * BLOCK_TOKENS
"""Tokens. To make it anew takes longer than to wait where the system prompt's requests wait."""
TURN: Final = 8 * BLOCK_TOKENS
QUESTION: Final = 22 * BLOCK_TOKENS + 7
"""Tokens behind the system prompt."""


class Traffic:
    """Clients that each ask by turns: a question behind the system prompt, and the next turn of a chat of their own."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._drawn = 0
        self._chats = [self._draw(FIRST_TURN) for _ in range(CLIENTS)]
        self.questions: list[Prefilled] = []
        self.turns: list[list[Prefilled]] = [[] for _ in range(CLIENTS)]
        """By client, those of its chat."""

    def _draw(self, count: int) -> list[int]:
        """Draw tokens that no other prompt has."""
        self._drawn += 1
        return tokens(self._drawn, count)

    async def begin(self) -> None:
        """Ask for the first turn of each chat."""
        async with trio.open_nursery() as nursery:
            for number in range(CLIENTS):
                nursery.start_soon(self._turn, number)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(CLIENTS):
                nursery.start_soon(self._client, number)

    async def _client(self, number: int) -> None:
        for _ in range(TURNS):
            self.questions.append(await self.ask([*SYSTEM, *self._draw(QUESTION)]))
            self._chats[number] += self._draw(TURN)
            await self._turn(number)

    async def _turn(self, number: int) -> None:
        self.turns[number].append(await self.ask([*self._chats[number]]))

    async def ask(self, prompt: list[int]) -> Prefilled:
        found = await self._fleet.ask(prompt)
        assert found is not None, self._fleet.counts
        return found


async def test_it_is_spread_made_once_by_each_engine_and_chats_stay_where_they_are(tmp_path: Path) -> None:
    """One engine of four has it before the traffic comes."""
    with Fleet(tmp_path, capacity=ROOM_BLOCKS, quick=False, costs=COSTS) as fleet:
        await fleet.start()
        await fleet.found_up()
        traffic = Traffic(fleet)
        made = [await traffic.ask(SYSTEM)]
        await traffic.begin()
        await fleet.settled([SYSTEM])
        await traffic.run()
        assert fleet.counts["unanswered"] == fleet.counts["engine failed"] == 0, fleet.counts
    spread = Counter(each.engine for each in traffic.questions)
    assert len(spread) >= 3, spread
    assert max(spread.values()) < 0.5 * len(traffic.questions), spread
    made += [each for each in traffic.questions if each.cached_tokens < len(SYSTEM)]
    assert max(Counter(each.engine for each in made).values()) == 1, f"each makes it once: {made}"
    moves = [one.engine != other.engine for turns in traffic.turns for one, other in pairwise(turns)]
    assert sum(moves) < 0.1 * len(moves), f"{sum(moves)} of {len(moves)} turns went elsewhere"
