"""The golden runs of the simulator: `python -m tests.support.golden_simulation > tests/golden/simulation.json`.

What a run leaves out by default stays out: options for more leave these figures as they are. They change when a policy
does; then read the difference before you commit it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from scheduler.routing.admission import Mode, Slo
from scheduler.routing.policies import POLICIES
from scheduler.routing.queues import Discipline
from scheduler.simulation.options import Options
from scheduler.simulation.simulate import simulate
from tests.support.trace_families import FAMILIES
from tests.support.traces import small_trace

SHOWN = ("rejected", "ttft_mean_s", "ttft_p50_s", "ttft_max_s", "tbt_p90_s", "goodput_tokens", "reused_share")


def runs() -> dict[str, dict[str, Any]]:
    """Return figures by the name of a run."""
    found = {}
    overload = Options(
        discipline=Discipline.LENGTH_AWARE,
        prefill=3,
        decode=2,
        slo=Slo(10.0, 0.05),
        decode_factor=1.9,
        cache_blocks=500,
    )
    for policy in POLICIES:
        for mode in Mode:
            options = replace(overload, policy=policy, admission=mode)
            found[f"{policy}, {mode.value}"] = simulate(small_trace(3, 300), options)
    for family in ("chat", "hot prompts", "long chats"):
        options = Options(prefill=4, cache_blocks=400, fitted=family == "chat")
        found[family] = simulate(FAMILIES[family](5, 300), options)
    return {name: {key: _rounded(run.figures()[key]) for key in SHOWN} for name, run in found.items()}


def _rounded(value: float) -> float:
    """Return what is the same for sum() of each Python."""
    return round(value, 9)


def text() -> str:
    """One line a run, so that a difference shows which."""
    lines = (f"{json.dumps(name)}: {json.dumps(figures)}" for name, figures in runs().items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    print(text(), end="")
