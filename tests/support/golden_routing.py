"""The golden decisions of every policy: `python -m tests.support.golden_routing > tests/golden/routing.json`.

They change when a policy does; then read the difference before you commit it.
"""

from __future__ import annotations

import json
import random
from typing import Any

from scheduler.routing.policies import POLICIES
from scheduler.routing.route import route
from tests.support.clusters import scene

SCENES = 40


def decisions() -> dict[str, list[dict[str, Any]]]:
    """For each policy what it decides in each scene."""
    return {policy: [_decision(policy, number) for number in range(SCENES)] for policy in POLICIES}


def _decision(policy: str, number: int) -> dict[str, Any]:
    question = scene(random.Random(number))
    found = route(*question, policy=policy, turn=number, seed=7)
    if found.prefill is None:
        return {"prefill": None}
    blocks = -(-question.prompt.tokens // question.prompt.block_tokens)
    return {
        "prefill": found.prefill.instance,
        "decode": None if found.decode is None else found.decode.instance,
        "ranges": [[piece.action.value, piece.blocks, piece.source] for piece in found.ranges(blocks)],
        "ttft_s": round(found.ttft_s, 6),
        "tbt_s": None if found.decode is None else round(found.decode.tbt_s, 6),
    }


def text() -> str:
    """One line a decision, so that a difference shows which."""
    parts = []
    for policy, found in decisions().items():
        lines = ",\n".join("  " + json.dumps(decision) for decision in found)
        parts.append(f'"{policy}": [\n{lines}\n]')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    print(text(), end="")
