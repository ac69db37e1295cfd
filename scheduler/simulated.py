"""Simulated nodes: a prefill instance's DRAM cache and a decode instance's batches.

Responsibility: what happens on a node, as opposed to what the scheduler believes. Neither decides anything but
which block goes and whether a batch can take a request.

Concurrency: none; clocks are the caller's.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from math import ceil

from scheduler.cost import CostModel

TAIL_SHARE = 0.1
"""The TBT of a request is the mean of this share of its gaps, the longest."""


class BlockLru:
    """Least recently used, of equal blocks. Whoever touches a prefix from its last block to its first has
    `tiers.eviction.LruLeafFirst` at a tenth of its cost."""

    __slots__ = ("_blocks", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def use(self, block: int) -> None:
        """Insert it or make it the last to go."""
        self._blocks[block] = None
        self._blocks.move_to_end(block)

    def cool(self, block: int) -> None:
        """Make it the first to go."""
        if block in self._blocks:
            self._blocks.move_to_end(block, last=False)

    def evict(self) -> Iterator[int]:
        """What goes until the capacity is kept."""
        while len(self._blocks) > self.capacity:
            yield self._blocks.popitem(last=False)[0]


class _Decoding:
    __slots__ = ("context", "first_step", "number", "output_tokens", "since_s")

    def __init__(self, number: int, context: int, output_tokens: int, since_s: float) -> None:
        self.number = number
        self.context = context
        self.output_tokens = output_tokens
        self.since_s = since_s
        self.first_step = 0


class DecodeNode:
    """Continuous batching: requests join between steps, and every step gives each request of the batch a token.

    `ended` is told number, time and TBT of each request that is through.
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
        return len(self._batch) + len(self._joining)

    @property
    def context_tokens(self) -> int:
        return self._batch_tokens + self._joining_tokens

    def takes(self, tokens: int) -> bool:
        """Whether a step with a request of this context would keep the limit, and its context has room."""
        context = self.context_tokens + tokens
        return (
            context <= self._costs.kv_capacity_tokens
            and self._costs.step_s(context, self.requests + 1) <= self._tbt_limit_s
        )

    def join(self, number: int, tokens: int, output_tokens: int, now_s: float) -> None:
        """A prefilled request, whose first token is out at `now_s`, joins at the end of the step that runs."""
        if output_tokens <= 1:
            self._ended(number, now_s, 0.0)
            return
        self._joining.append(_Decoding(number, tokens, output_tokens, now_s))
        self._joining_tokens += tokens

    def advance(self, until_s: float) -> None:
        """Run the steps that end by `until_s`."""
        step_s, steps, batch = self._costs.step_s, self._steps_s, self._batch
        while True:
            if self._joining and self._joining[0].since_s <= self._clock_s:
                self._let_in()
            if not batch:
                if not self._joining or self._joining[0].since_s > until_s:
                    self._clock_s = max(self._clock_s, until_s)
                    return
                self._clock_s = max(self._clock_s, self._joining[0].since_s)
                continue
            duration_s = step_s(self._batch_tokens, len(batch))
            if self._clock_s + duration_s > until_s:
                return
            self._clock_s += duration_s
            steps.append(duration_s)
            self._batch_tokens += len(batch)
            while batch and batch[0][0] <= len(steps):
                self._end(heappop(batch)[2])

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
        gaps_s.sort(reverse=True)
        worst = gaps_s[: ceil(len(gaps_s) * TAIL_SHARE)]
        self._ended(request.number, self._clock_s, sum(worst) / len(worst))
