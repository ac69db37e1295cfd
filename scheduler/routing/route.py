"""Which instance prefills a prompt, which decodes it, and where each range of its blocks comes from.

Responsibility: `route`, a pure function of the prompt, the cluster's state, the cost model and the clock. It
weighs every instance that takes work and returns all of them with their predicted figures.

Predicted TTFT of an instance: its queue, or the time until the blocks that it does not have are there if that is
later, and then the prefill of the tokens that are not reused. Ranges of the prompt go the way that is ready
first: used in place, loaded from another source, or recomputed. Predicted TBT: one step of the batch with
everything that is committed.

Concurrency: none. Nothing here changes what it is given.
"""

from __future__ import annotations

from kvfs.errors import InvalidRequest
from scheduler.routing.cluster import Cluster
from scheduler.routing.cost import CostModel
from scheduler.routing.decisions import Decision, DecodeCandidate, Prompt
from scheduler.routing.policies import POLICIES, View, steps_of


def route(
    prompt: Prompt,
    cluster: Cluster,
    costs: CostModel,
    now_s: float,
    *,
    policy: str = "default",
    turn: int = 0,
    seed: int = 0,
) -> Decision:
    """Choose instances for a prompt among all that take work; nothing is changed.

    `turn` counts decisions: round robin and random take their place from it and from `seed`.
    Raises InvalidRequest for a policy that is not in POLICIES.
    """
    try:
        chosen = POLICIES[policy]
    except KeyError:
        raise InvalidRequest(f"policy {policy!r}: there are {', '.join(POLICIES)}") from None
    view = View(prompt, steps_of(prompt, cluster, costs, now_s), cluster, costs, now_s, turn, seed)
    considered = tuple(chosen.plan(view))
    decodes = decode_candidates(cluster, prompt, costs)
    return Decision(
        policy,
        now_s - prompt.arrival_s,
        min(considered, key=lambda candidate: candidate.score, default=None),
        min(decodes, key=lambda candidate: candidate.score, default=None),
        considered,
        decodes,
    )


def decode_candidates(cluster: Cluster, prompt: Prompt, costs: CostModel) -> tuple[DecodeCandidate, ...]:
    """Return a candidate for every decode instance that takes work, with the prompt's context added."""
    growth, tokens = cluster.growth_tokens, prompt.tokens
    reserved = None if prompt.holds_reservation else cluster.reserved_decode
    alone = int(tokens + growth)
    alone_s = costs.step_s(alone, 1) if alone <= costs.kv_capacity_tokens else float("inf")
    found = []
    for n, instance in enumerate(cluster.decode):
        if instance.draining:
            continue
        context, requests = instance.active_tokens + tokens, instance.active_requests + 1
        tbt_now_s = costs.step_s(context, requests)
        context += instance.committed_tokens
        requests += instance.committed_requests
        grown = int(context + growth * requests)
        tbt_s = costs.step_s(grown, requests)
        found.append(DecodeCandidate(n, tbt_now_s, tbt_s, grown, alone_s, n == reserved))
    return tuple(found)
