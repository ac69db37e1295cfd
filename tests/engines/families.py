"""One small model of a family through engines with `KVFSConnector`, and what the tests of families ask of it.

`filler` computes in steps of 96 tokens and ends; `hitter` is begun afterwards and loads. The reference is an engine
without the connector that takes the same steps: with recurrent layers the end of a step is where vLLM cuts a prompt.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvfs.groups import Group
from tests.engines.engine import Engines, Run, same_output
from tests.engines.test_vllm_hybrid import connector
from tests.engines.tiny_families import VOCABULARY, Family
from tests.support.service import Service

ANSWER = 8
STEP = 96
_rng = random.Random(94)


def tokens(count: int) -> list[int]:
    return [_rng.randrange(2, VOCABULARY) for _ in range(count)]


STORED = {f"of {count}": tokens(count) for count in (50, 71, 320, 411, 999)}
LONG = STORED["of 320"]
CHANGED = {"of 320, an early token changed": [*LONG[:90], LONG[90] ^ 3, *LONG[91:]]}


@dataclass(frozen=True)
class Case:
    """A family and what is known of its cache."""

    family: Family
    block_tokens: int | None
    """None: as many as vLLM chooses for the processor; with recurrent layers a block of attention is no smaller than a
    state, and of whole pieces that the processor's kernels take."""
    groups: tuple[Group, ...] = (Group(),)
    """Of its cache."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of its engines."""

    def loads(self, blocks: list[int]) -> int:
        """Blocks of all groups that hits of so many blocks take."""
        return sum(len(group.needed(0, count)) for count in blocks for group in self.groups)


@dataclass(frozen=True)
class Runs:
    case: Case
    reference: Run
    filler: Run
    hitter: Run

    def wrong(self, run: Run) -> list[str]:
        """Prompts whose outputs are not those of the reference."""
        return [name for name in run.names if not same_output(run.output(name), self.reference.output(name))]


def run(python: str, directory: Path, service: Service, case: Case) -> Runs:
    case.family.write(directory / "model")
    engines, settings = Engines(python, directory), connector(service)
    more = {"batched_tokens": STEP, **case.settings}
    with engines.start("plain", None, **more) as plain:
        reference = plain.generate({**STORED, **CHANGED}, max_tokens=ANSWER)
    with engines.start("filler", None, connector=settings, **more) as filler:
        filled = filler.generate(STORED, max_tokens=ANSWER)
    with engines.start("hitter", None, connector=settings, **more) as hitter:
        return Runs(case, reference, filled, hitter.generate(STORED, max_tokens=ANSWER))


def check_outputs(runs: Runs) -> None:
    """The outputs are those without kvfs, which are others where a token that is loaded is another one."""
    assert runs.wrong(runs.filler) + runs.wrong(runs.hitter) == []
    [changed] = CHANGED
    assert not same_output(runs.reference.output(changed), runs.reference.output("of 320"))


def check_hits(runs: Runs) -> None:
    """The second engine computes no whole block, and loads of each group what its layers read."""
    case, hitter, said = runs.case, runs.hitter, f"filler: {runs.filler.counts}, hitter: {runs.hitter.counts}"
    assert set(runs.reference.cached_tokens) == set(runs.filler.cached_tokens) == {0}, said
    block_tokens = case.block_tokens or hitter.block_tokens
    blocks = [(len(prompt) - 1) // block_tokens for prompt in STORED.values()]
    wanted = [count * block_tokens for count in blocks]
    assert hitter.cached_tokens == wanted, f"{hitter.cached_tokens}, not {wanted}; {said}"
    assert hitter.counts["loaded_blocks"] == case.loads(blocks), said
    assert hitter.counts["failed_blocks"] == runs.filler.counts["dropped_blocks"] == 0, said
