"""Why a request went where it went: the last decisions, in words and numbers.

Responsibility: keep what each decision weighed, and render it when asked. Concurrency: one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import asdict

from kvfs.errors import NotFound
from kvfs.limits import MAX_REMEMBERED_DECISIONS
from scheduler.conductor.planning.planner import Plan, PrefillFigures
from scheduler.conductor.values import Range
from scheduler.routing.admission import Admission, Verdict
from scheduler.routing.decisions import Action, DecodeCandidate


class Weighed(msgspec.Struct, frozen=True):
    """One decision and what it was made of."""

    id: str
    model: str
    at_s: float
    tokens: int
    block_tokens: int
    plan: Plan
    """Its figures are those of that moment."""
    admission: Admission
    names: tuple[str, ...]
    """Of the slots."""
    sources: Mapping[int, str]
    excluded: tuple[str, ...]
    degraded: str


class Explanations:
    """Keep the last limits.MAX_REMEMBERED_DECISIONS."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Weighed] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, weighed: Weighed) -> None:
        """Keep a decision with all that was weighed; over the limit the oldest one is dropped."""
        self._kept[weighed.id] = weighed
        if len(self._kept) > MAX_REMEMBERED_DECISIONS:
            self._kept.popitem(last=False)

    def explain(self, id: str) -> dict[str, Any]:
        """Return a decision as JSON values. Raises NotFound."""
        found = self._kept.get(id)
        if found is None:
            raise NotFound(
                f"decision {id[:64]!r}: not among the last {MAX_REMEMBERED_DECISIONS} of this process"
            )
        return render(found)


def render(found: Weighed) -> dict[str, Any]:
    """Return a decision with all its candidates as JSON values."""
    decision = found.plan.decision
    considered = sorted(found.plan.considered(), key=lambda each: each.score)
    return {
        "id": found.id,
        "model": found.model,
        "words": words(found),
        "policy": decision.policy,
        "verdict": found.admission.verdict.value,
        "reason": found.admission.reason.value,
        "degraded": found.degraded,
        "excluded": list(found.excluded),
        "tokens": found.tokens,
        "block_tokens": found.block_tokens,
        "held_blocks": found.plan.held_blocks,
        "waited_s": decision.waited_s,
        "ttft_s": _finite(decision.ttft_s),
        "chosen": {
            "prefill": None if decision.prefill is None else found.names[decision.prefill.instance],
            "decode": None if decision.decode is None else found.names[decision.decode.instance],
        },
        "ranges": list(map(asdict, ranges(found))),
        "prefill": [_prefill(each, found) for each in considered],
        "decode": [_decode(each, found) for each in found.plan.considered_decode()],
    }


def words(found: Weighed) -> str:
    """Say why, in one or two sentences."""
    chosen, decode = found.plan.decision.prefill, found.plan.decision.decode
    if chosen is None or decode is None:
        return f"Refused: {found.admission.reason.value}."
    name, block_tokens = found.names[chosen.instance], found.block_tokens
    reused = min(chosen.reused_blocks * block_tokens, found.tokens)
    text = (
        f"{name} prefills: {reused} of {found.tokens} tokens are reused, it starts "
        f"after {max(chosen.queue_s, chosen.ready_s):.3f} s and takes {chosen.prefill_s:.3f} s: the first token comes "
        f"after {chosen.ttft_s:.3f} s."
    )
    others = [each for each in found.plan.considered() if each.instance != chosen.instance]
    if others:
        other = min(others, key=lambda each: each.score)
        text += (
            f" {found.names[other.instance]}, the next, would reuse {other.reused_blocks * block_tokens} tokens and "
            f"take {other.ttft_s:.3f} s; scores {chosen.score:.3f} and {other.score:.3f}."
        )
    text += f" {found.names[decode.instance]} decodes, {decode.tbt_s * 1e3:.1f} ms a step."
    if found.admission.verdict is not Verdict.ADMIT:
        verdict = "Deferred" if found.admission.verdict is Verdict.DEFER else "Refused"
        text = f"{verdict}: {found.admission.reason.value}. " + text
    return text + (f" {found.degraded[0].upper()}{found.degraded[1:]}." if found.degraded else "")


def ranges(found: Weighed) -> tuple[Range, ...]:
    """Return how the instance gets each range of blocks."""
    return tuple(
        Range(
            first_block=first_block,
            blocks=blocks,
            action=action.value,
            source=found.sources[source] if action is Action.LOAD and source is not None else "",
        )
        for first_block, blocks, action, source in found.plan.decision.ranges(
            found.tokens // found.block_tokens
        )
    )


def _prefill(each: PrefillFigures, found: Weighed) -> Mapping[str, Any]:
    return {
        "instance": found.names[each.instance],
        "score": each.score,
        "ttft_s": each.ttft_s,
        "queue_s": each.queue_s,
        "ready_s": each.ready_s,
        "prefill_s": each.prefill_s,
        "reused_blocks": each.reused_blocks,
        "loaded_blocks": each.loaded_blocks,
        "delay_s": each.delay_s,
    }


def _decode(each: DecodeCandidate, found: Weighed) -> Mapping[str, Any]:
    return {
        "instance": found.names[each.instance],
        "tbt_now_s": each.tbt_now_s,
        "tbt_s": each.tbt_s,
        "context_tokens": each.context_tokens,
        "alone_s": _finite(each.alone_s),
        "reserved": each.reserved,
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if abs(value) != float("inf") else None
