"""A simulated instance that prefills and decodes: chunks of one prompt run in the steps of its batch.

Responsibility: when a prefill ends. A step computes one chunk of the prompt beside a token for each request of the
batch, so both slow the other down (chunked prefill, Sarathi-Serve, OSDI 2024). A chunk that is the whole prompt stalls
the batch for as long as the prompt takes.

Invariants: what an instance prefills is all that joins its batch, so the end of a prefill is known when it begins.

Concurrency: none; clocks are the caller's.
"""

from __future__ import annotations

from scheduler.routing.cost import CostModel
from scheduler.simulation.nodes import DecodeNode


def run_prefill(
    node: DecodeNode, costs: CostModel, lengths: tuple[int, int], chunk_tokens: int, now_s: float
) -> float:
    """Run a prefill of `lengths` (tokens, and how many are reused) beside a batch; return when it ends.

    It begins once there is room for its context, and in chunks of `chunk_tokens`, all of it for 0.
    """
    tokens, begin = lengths
    clock_s = node.finish_step(now_s)
    while node.requests and node.context_tokens + tokens > costs.kv_capacity_tokens:
        clock_s = node.step(0.0)
    loaded_s = clock_s + begin * costs.kv_token_bytes / costs.host_bytes_s
    while begin < tokens:
        end = min(begin + chunk_tokens, tokens) if chunk_tokens else tokens
        clock_s = node.step(costs.compute_s(end, begin))
        begin = end
    return max(clock_s, loaded_s, now_s + costs.prefill_fixed_s)
