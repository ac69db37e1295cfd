"""What takes long shows on a terminal's stderr how far it is, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler.routing.admission import Slo
from scheduler.routing.cost import table_costs
from scheduler.simulation.plan import Site, plan
from scheduler.simulation.traces import PROGRESS_LINES
from tests.support.service import run_kvfs
from tests.support.terminal import on_a_terminal
from tests.support.traces import small_trace, write_trace

PLAN_STEPS = ["find what is used again", "measure pools of blocks", "simulate splits of the instances"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write_trace(path, small_trace(requests=60))
    return path


@pytest.mark.parametrize(
    ("command", "steps"),
    [
        (
            ["replay", "--policy", "lru-leaf", "--capacity", "50"],
            ["read trace.jsonl", "number the blocks", "lru-leaf 50"],
        ),
        (["plan", "--instances", "2"], ["read trace.jsonl", *PLAN_STEPS]),
        (["simulate", "--prefill", "1", "--decode", "1"], ["read trace.jsonl", "simulate"]),
    ],
    ids=lambda value: value[0],
)
def test_steps_show_on_a_terminal_alone(trace: Path, command: list[str], steps: list[str]) -> None:
    shown = on_a_terminal("-m", "kvfs", command[0], str(trace), *command[1:])
    assert [step for step in steps if step not in shown] == []
    piped = run_kvfs(command[0], str(trace), *command[1:])
    assert (piped.returncode, piped.stderr) == (0, "")


def test_each_pass_of_a_plan_says_how_far_it_is() -> None:
    """From its first request, or size, to its last."""
    told: dict[str, list[tuple[int, int]]] = {}

    def start(step: str) -> Callable[[int, int], None]:
        reports = told.setdefault(step, [])
        return lambda done, total: reports.append((done, total))

    requests = small_trace(requests=2 * PROGRESS_LINES + 1)
    plan(requests, Site(table_costs(), 4, 100 << 30, 0, Slo(30.0, 0.1)), start=start)
    assert list(told) == PLAN_STEPS
    for reports in told.values():
        counts, totals = [done for done, _ in reports], {total for _, total in reports}
        assert counts == sorted(counts)
        assert (counts[0], {counts[-1]}) == (0, totals)
    assert told[PLAN_STEPS[0]] == [(done, len(requests)) for done in (0, 1024, 2048, 2049)]
    assert len(told[PLAN_STEPS[1]]) > 5
