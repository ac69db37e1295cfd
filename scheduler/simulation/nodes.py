"""Simulated nodes: a prefill instance's DRAM cache and a decode instance's batches.

Responsibility: what happens on a node, as opposed to what the scheduler believes. A node decides only which block is
evicted and whether a batch can take a request.

Concurrency: none; clocks are the caller's.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from math import ceil

from scheduler.routing.cost import CostModel

TAIL_SHARE = 0.1
"""The TBT of a request is the mean of this share of its gaps, the longest."""


class BlockLru:
    """A cache of equal blocks, least recently used first out. Used from a prefix's last block to its first it evicts
    as the reference of leaf-first orders does, at a tenth of its cost.

    A use is numbered; `used` is its number, by default the one after the last.
    """

    __slots__ = ("_blocks", "_clock", "_order", "_taken", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._clock = 0
        self._blocks: OrderedDict[int, int] = OrderedDict()
        self._taken: dict[int, int] = {}
        """Blocks of other caches that were not used since, each with its last use."""
        self._order: list[tuple[int, int]] = []
        """A heap of (use, block) of those, with some that were used since."""

    def __contains__(self, block: int) -> bool:
        return block in self._blocks or block in self._taken

    def __len__(self) -> int:
        return len(self._blocks) + len(self._taken)

    def blocks(self) -> list[int]:
        """Return all blocks that are here."""
        return [*self._blocks, *self._taken]

    def use(self, block: int, used: int | None = None) -> None:
        """Insert a block, or make it the last to be evicted."""
        self._clock = self._clock + 1 if used is None else used
        if self._taken:
            self._taken.pop(block, None)
        self._blocks[block] = self._clock
        self._blocks.move_to_end(block)

    def used(self, block: int) -> int:
        """Return the last use of a block that is here."""
        return self._blocks[block] if block in self._blocks else self._taken[block]

    def remove(self, block: int) -> None:
        """Remove a block that is here."""
        if self._taken.pop(block, None) is None:
            del self._blocks[block]

    def take(self, block: int, used: int) -> None:
        """Insert a block of another cache, which was last used then."""
        self._taken[block] = used
        heappush(self._order, (used, block))

    def cool(self, block: int) -> None:
        """Make a block the first to be evicted."""
        if block in self:
            self._taken.pop(block, None)
            self._blocks[block] = 0
            self._blocks.move_to_end(block, last=False)

    def oldest(self) -> int:
        """Return the last use of the block that is evicted next for another one; -1 while there is room."""
        return -1 if len(self) < self.capacity or not len(self) else self._next()[0]

    def evict(self) -> Iterator[tuple[int, int]]:
        """Evict blocks until the capacity is kept, and yield each with its last use."""
        blocks, taken, capacity = self._blocks, self._taken, self.capacity
        while len(blocks) + len(taken) > capacity:
            if not taken:
                yield blocks.popitem(last=False)
                continue
            used, block = self._next()
            if taken.pop(block, None) is None:
                del blocks[block]
            yield block, used

    def _next(self) -> tuple[int, int]:
        while self._order and self._taken.get(self._order[0][1]) != self._order[0][0]:
            heappop(self._order)
        block = next(iter(self._blocks), None)
        if block is None or (self._order and self._order[0][0] < self._blocks[block]):
            return self._order[0]
        return self._blocks[block], block


class _Decoding:
    __slots__ = ("context", "first_step", "number", "output_tokens", "paused_s", "since_s")

    def __init__(
        self, number: int, context: int, output_tokens: int, since_s: float, paused_s: float
    ) -> None:
        self.number = number
        self.context = context
        self.output_tokens = output_tokens
        self.since_s = since_s
        self.paused_s = paused_s
        self.first_step = 0


class DecodeNode:
    """Continuous batching: requests join between steps, and every step gives each request of the batch a token.

    `ended` is called with number, time and TBT of each request that is done.
    """

    def __init__(
        self, costs: CostModel, tbt_limit_s: float, ended: Callable[[int, float, float], None]
    ) -> None:
        self._costs = costs
        self._tbt_limit_s = tbt_limit_s
        self._ended = ended
        self._clock_s = 0.0
        self._steps_s: list[float] = []
        self._batch: list[tuple[int, int, _Decoding]] = []
        self._batch_tokens = 0
        self._joining: deque[_Decoding] = deque()
        self._joining_tokens = 0

    @property
    def requests(self) -> int:
        """Return how many requests are in the batch, or join it at the next step."""
        return len(self._batch) + len(self._joining)

    @property
    def context_tokens(self) -> int:
        """Return their context in tokens, all together."""
        return self._batch_tokens + self._joining_tokens

    def takes(self, tokens: int) -> bool:
        """Return whether a step with a request of this context would keep the limit, and its context has room."""
        context = self.context_tokens + tokens
        return (
            context <= self._costs.kv_capacity_tokens
            and self._costs.step_s(context, self.requests + 1) <= self._tbt_limit_s
        )

    def join(
        self, number: int, tokens: int, output_tokens: int, now_s: float, *, paused_s: float = 0.0
    ) -> None:
        """Add a prefilled request, whose first token is out at `now_s`, at the end of the step that runs.

        `paused_s`: the gap before that token, of a request that another instance had begun to decode.
        """
        if output_tokens <= 1:
            self._ended(number, now_s, paused_s)
            return
        self._joining.append(_Decoding(number, tokens, output_tokens, now_s, paused_s))
        self._joining_tokens += tokens

    def advance(self, until_s: float) -> None:
        """Run the steps that end by `until_s`."""
        while True:
            if self._joining and self._joining[0].since_s <= self._clock_s:
                self._let_in()
            if self._batch:
                if not self._run(until_s):
                    return
                self._end_all()
                continue
            if not self._joining or self._joining[0].since_s > until_s:
                self._clock_s = max(self._clock_s, until_s)
                return
            self._clock_s = max(self._clock_s, self._joining[0].since_s)

    def _run(self, until_s: float) -> bool:
        """Run steps until a request ends or may join, and return True; False once the next one would end too late."""
        requests, left = len(self._batch), self._batch[0][0] - len(self._steps_s)
        joins_s = self._joining[0].since_s if self._joining else float("inf")
        while left > 0 and joins_s > self._clock_s:
            duration_s = self._costs.step_s(self._batch_tokens, requests)
            if self._clock_s + duration_s > until_s:
                break
            self._clock_s += duration_s
            self._steps_s.append(duration_s)
            self._batch_tokens += requests
            left -= 1
        return left <= 0 or joins_s <= self._clock_s

    def _end_all(self) -> None:
        """End the requests whose last token was that of the last step."""
        while self._batch and self._batch[0][0] <= len(self._steps_s):
            self._end(heappop(self._batch)[2])

    def step(self, compute_s: float) -> float:
        """Run one step with `compute_s` of prefill beside the batch, and return its end. Prefill and batch share what a
        step takes whatever is in it: the weights are read once."""
        if self._joining and self._joining[0].since_s <= self._clock_s:
            self._let_in()
        beside_s = max(compute_s - self._costs.step_fixed_s, 0.0)
        self._steps_s.append(self._costs.step_s(self._batch_tokens, len(self._batch)) + beside_s)
        self._clock_s += self._steps_s[-1]
        self._batch_tokens += len(self._batch)
        self._end_all()
        return self._clock_s

    def finish_step(self, now_s: float) -> float:
        """Run the step that is under way at `now_s`, if any, and return when the next one may begin."""
        self.advance(now_s)
        if self._batch and self._clock_s < now_s:
            self.step(0.0)
        return self._clock_s

    def fail(self) -> list[tuple[int, int]]:
        """Remove all requests; return the number of each, and how many of its tokens are out."""
        running = [
            (each.number, 1 + len(self._steps_s) - each.first_step) for _, _, each in sorted(self._batch)
        ]
        lost = running + [(each.number, 1) for each in self._joining]
        self._batch.clear()
        self._joining.clear()
        self._batch_tokens = self._joining_tokens = 0
        return lost

    def _let_in(self) -> None:
        while self._joining and self._joining[0].since_s <= self._clock_s:
            request = self._joining.popleft()
            self._joining_tokens -= request.context
            self._batch_tokens += request.context
            request.first_step = len(self._steps_s)
            last_step = request.first_step + request.output_tokens - 1
            heappush(self._batch, (last_step, request.number, request))

    def _end(self, request: _Decoding) -> None:
        gaps_s = self._steps_s[request.first_step :]
        self._batch_tokens -= request.context + len(gaps_s)
        if request.paused_s:
            gaps_s.append(request.paused_s)
        gaps_s.sort(reverse=True)
        worst = gaps_s[: ceil(len(gaps_s) * TAIL_SHARE)]
        self._ended(request.number, self._clock_s, sum(worst) / len(worst))
