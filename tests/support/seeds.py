"""The seeds of what tests draw, and the one command that repeats a test with its seed.

Responsibility: the gate (`make test`, `.ci/run`) draws from the seeds that are written here, so that it says the same
twice; `make soak` draws new ones, each in KVFS_TEST_SEED of a process of its own (`tests.support.run_soak`). What draws
is marked `seeded`, or is Hypothesis's, whose seed is `--hypothesis-seed`; without one it draws from a test's text.

Concurrency: constants and pure functions.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
GATE_SEED: Final = 1
"""As good as any other: each parameter of a test is a configuration of its own, and draws from it anew."""
_DRAWN: Final = os.environ.get("KVFS_TEST_SEED")
SEED: Final = GATE_SEED if _DRAWN is None else int(_DRAWN)

FOUND: Final[dict[str, dict[int, str]]] = {
    "damage": {
        872: "with the index lost, a name of a cache had again what it had: allowed, and forbidden here"
    },
    "edge records": {
        920181049: "a slot of a block with the key of a named object was taken over under that name: no start",
        539436889: "a record of such a block was taken for that object: no start",
    },
}
"""Harness -> seeds that found something once -> what that was."""


def seeds(harness: str) -> list[int]:
    """Return the seeds of a run: the one of the environment, else the gate's and those that once found something."""
    return [SEED] if _DRAWN is not None else [GATE_SEED, *FOUND[harness]]


def rounds(gate: int, soak: int) -> int:
    """Return how often a harness draws: more often where the seed is new than where each run repeats the last."""
    return gate if _DRAWN is None else soak


def repeat_command(
    test: str, seed: int, hypothesis_seed: int | str | None = None, environ: Mapping[str, str] = os.environ
) -> str:
    """Return the shell's line that runs a test (its node id, or a file) with the same seed and the same counts."""
    counts = {name: value for name, value in environ.items() if name.startswith("KVFS_TEST_")}
    counts["KVFS_TEST_SEED"] = str(seed)
    words = [f"{name}={shlex.quote(value)}" for name, value in sorted(counts.items())]
    python = Path(sys.executable)
    words += [
        str(python.relative_to(ROOT) if python.is_relative_to(ROOT) else python),
        "-m",
        "pytest",
        shlex.quote(test),
    ]
    if hypothesis_seed is not None:
        words.append(f"--hypothesis-seed={hypothesis_seed}")
    return " ".join(words)
