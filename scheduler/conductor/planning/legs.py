"""Which instances a decision's candidates make: one that does both, or a prefill leg and a decode leg.

Responsibility: a pure choice by the instances' roles. The policy weighs every instance as prefill and as decode; roles
are labels, so a decode instance may prefill what is not worth a leg of its own, and one that does both need not be
handed it.

Invariants: a decision whose prefill and decode instances are the same has no leg. Among instances that do both, the
policy's own choice stands unless its batch would break the limit of the request and another's would not. Where engines
can be joined only as two legs, an instance labelled for one side does nothing alone, nor with one that does both.

Concurrency: none.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvfs.limits import PREFILL_LEG_TOKENS
from scheduler.conductor.planning.planner import Role
from scheduler.routing.admission import Slo
from scheduler.routing.cost import CostModel
from scheduler.routing.decisions import Decision, DecodeCandidate, PrefillCandidate, Prompt


def choose(
    decision: Decision,
    roles: Sequence[Role],
    prompt: Prompt,
    costs: CostModel,
    slo: Slo,
    *,
    both_legs: bool = False,
) -> Decision:
    """Return the decision with the instances that its roles allow; `both_legs`: see `Question`."""

    def fits(candidate: DecodeCandidate) -> bool:
        fast = candidate.tbt_s <= slo.tbt_s and not candidate.reserved
        return fast and candidate.context_tokens <= costs.kv_capacity_tokens

    first = decision.prefill
    if first is not None and roles[first.instance] == "both":
        own = next((each for each in decision.considered_decode if each.instance == first.instance), None)
        if own is not None and fits(own):
            return decision._replace(decode=own)
    prefillers = sorted(
        (each for each in decision.considered if roles[each.instance] != "decode"),
        key=lambda each: each.score,
    )
    decoders = {
        each.instance: each for each in decision.considered_decode if roles[each.instance] != "prefill"
    }
    paired = [each for n, each in decoders.items() if not both_legs or roles[n] == "decode"]
    fitting = {n for n, each in decoders.items() if fits(each) and (not both_legs or roles[n] == "both")}
    decode = min(paired, key=lambda each: each.score, default=None)
    alone = _alone(decision, prefillers, roles, prompt, slo, fitting)
    if alone is not None:
        return decision._replace(prefill=alone, decode=decoders[alone.instance])
    first = prefillers[0] if prefillers else None
    if first is not None and roles[first.instance] == "both":
        decode = decoders.get(first.instance)
    return decision._replace(prefill=first, decode=decode)


def _alone(
    decision: Decision,
    prefillers: Sequence[PrefillCandidate],
    roles: Sequence[Role],
    prompt: Prompt,
    slo: Slo,
    fitting: set[int],
) -> PrefillCandidate | None:
    """Return the instance that does both; None where there are to be two legs, or no batch has room."""
    first = prefillers[0] if prefillers else None
    if first is not None and roles[first.instance] == "both":
        return next((each for each in prefillers if each.instance in fitting), None)
    by_ttft = sorted(decision.considered, key=lambda each: each.ttft_s)
    for each in by_ttft:
        if roles[each.instance] != "prefill" and each.instance in fitting:
            computed = prompt.tokens - each.reused_blocks * prompt.block_tokens
            # A prefill stalls the instance's batch for as long as it takes. Among those that do both the policy chose.
            sooner = first is None or (each.ttft_s < first.ttft_s and each.prefill_s <= slo.tbt_s)
            if computed < PREFILL_LEG_TOKENS or (sooner and roles[each.instance] == "decode"):
                return each
    return None
