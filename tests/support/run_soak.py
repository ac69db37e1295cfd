"""`make soak`: what draws, with a new seed for each run, until SOAK_S seconds are over or somebody ends it.

Responsibility: find the harnesses (files with tests that are `seeded` or Hypothesis's, and `make fuzz`), run one after
the other, each with a seed of its own in a process of its own, and go on after a red one. Of a red run its log, its
command and what it left in its temporary directory (up to a bound) stay in `soak/`; nothing else stays of any.

Concurrency: one thread, one run at a time. A run's processes are those whose TMPDIR lies in the run's directory.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.crash_harness import fast_directory
from tests.support.leftovers import FAST_VARIABLE
from tests.support.run_remains import processes
from tests.support.seeds import ROOT, repeat_command
from tests.support.service import detach_mounts

MARKS: Final = "(seeded or hypothesis) and not engine"
TEST_S: Final = 1200
"""A test that takes so long is ended: five times what it has in the gate, where it draws less (`rounds`) and has the
machine for itself."""
PYTEST: Final = (
    sys.executable,
    "-m",
    "pytest",
    "-c",
    "pyproject.toml",
    "-q",
    "-p",
    "no:cacheprovider",
    f"--timeout={TEST_S}",
    "-m",
    MARKS,
)
SEEDS: Final = 1 << 31
FUZZ_S: Final = 60
HANG_S: Final = 1800.0
"""A run that takes so long is ended, and red."""
MOST_RED: Final = 50
"""Then something is broken, and more of the same says nothing new."""
MOST_LOG_BYTES: Final = 1 << 20
"""Of a red run's log, from its end."""
MOST_KEPT_BYTES: Final = 64 << 20
"""Of what a red run left in its temporary directory, else none of it."""
NO_TESTS: Final = 5
"""Pytest's exit code where a file draws nothing on this machine, as without PyTorch."""


@dataclass(frozen=True)
class Harness:
    name: str
    file: str = ""
    """Of tests; none for the fuzzers of native parsers."""

    def command(self, seed: int, base: Path) -> list[str]:
        if not self.file:
            return ["packaging/fuzz", sys.executable, str(FUZZ_S), str(seed)]
        return [*PYTEST, f"--hypothesis-seed={seed}", f"--basetemp={base / 'pytest'}", self.file]

    def repeat(self, seed: int) -> str:
        """Return the shell's line that does the same; the log of a run has one for each red test."""
        if not self.file:
            return f"make fuzz FUZZ_S={FUZZ_S} SEED={seed}"
        return f'{repeat_command(self.file, seed, hypothesis_seed=seed)} -m "{MARKS}"'


@dataclass
class Run:
    harness: Harness
    seed: int
    outcome: str = "green"
    took_s: float = 0.0
    said: str = ""

    def __str__(self) -> str:
        return f"{self.outcome:5} {self.harness.name} {self.seed}, {self.took_s:.0f} s: {self.said}"


def harnesses(tests: str) -> list[Harness]:
    """Return all there are, as pytest collects them."""
    # With a folder of its own: else pytest clears away what other runs left, and one that it cannot makes it red.
    with tempfile.TemporaryDirectory(prefix="soak-") as base:
        command = [*PYTEST, "--collect-only", f"--basetemp={base}/pytest", tests]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"soak: the tests cannot be collected\n{done.stdout}")
    named = sorted({line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line})
    # Pytest names files outside of the checkout from where it was told to look.
    files = [name if (ROOT / name).exists() else f"{tests}/{name}" for name in named]
    return [*(Harness(Path(file).stem.removeprefix("test_"), file) for file in files), Harness("fuzz")]


def picked(all_: list[Harness], only: str) -> list[Harness]:
    """Return those whose names have one of the words in them. Exits if a word is in none."""
    words = [word for word in only.split(",") if word]
    for word in words:
        if not any(word in each.name for each in all_):
            raise SystemExit(
                f"soak: --only {word}: no harness has this in its name, of\n" + " ".join(e.name for e in all_)
            )
    return [each for each in all_ if not words or any(word in each.name for word in words)]


class Soak:
    """Runs and what they came to."""

    def __init__(self, out: Path, hang_s: float) -> None:
        self.out, self.hang_s = out, hang_s
        self.runs: list[Run] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ended = False

    def red(self) -> list[Run]:
        return [run for run in self.runs if run.outcome == "RED"]

    def end(self, *_: object) -> None:
        """End the run under way, which counts for nothing, and begin no other. A handler of signals."""
        self._is_ended = True
        if self._process is not None:
            self._process.kill()

    def go_on(self, chosen: list[Harness], end_s: float) -> None:
        """Run each of the chosen once, in a new order, then again; what is begun before the end is not cut off."""
        chance = random.SystemRandom()
        while True:
            for harness in chance.sample(chosen, len(chosen)):
                if self._is_ended or time.monotonic() >= end_s or len(self.red()) >= MOST_RED:
                    return
                run = Run(harness, chance.randrange(SEEDS))
                self.do(run)
                if self._is_ended:
                    return
                self.runs.append(run)
                print(f"{time.strftime('%H:%M:%S')} {run}", flush=True)

    def do(self, run: Run) -> None:
        """Do one, and leave nothing of it but what a red one has to say."""
        base, fast = (Path(tempfile.mkdtemp(prefix="soak-", dir=place)) for place in (None, fast_directory()))
        try:
            self.wait(run, base, fast)
            end_processes(base)
            if run.outcome == "RED" and not self._is_ended:
                self.keep(run, base)
        finally:
            end_processes(base)
            for directory in (base, fast):
                detach_mounts(directory)
                shutil.rmtree(directory)

    def wait(self, run: Run, base: Path, fast: Path) -> None:
        environ = {"KVFS_TEST_SEED": str(run.seed), "TMPDIR": str(base), FAST_VARIABLE: str(fast)}
        began_s = time.monotonic()
        with (base / "log").open("wb") as log:
            process = self._process = subprocess.Popen(
                run.harness.command(run.seed, base),
                cwd=ROOT,
                env=os.environ | environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C ends the soak, which ends the run
            )
        if self._is_ended:  # a signal came before there was a process to end
            process.kill()
        try:
            code = process.wait(self.hang_s)
            run.outcome = {0: "green", NO_TESTS: "none"}.get(code, "RED")
            run.said = last_line(base / "log")
        except subprocess.TimeoutExpired:
            run.outcome, run.said = "RED", f"ended, it took more than {self.hang_s:g} s"
        finally:
            process.kill()
            process.wait()
        run.took_s = time.monotonic() - began_s

    def keep(self, run: Run, base: Path) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        name = f"{run.harness.name}-{run.seed}"
        log = (base / "log").read_bytes()[-MOST_LOG_BYTES:]
        head = f"{run.harness.repeat(run.seed)}\n{run.said}\n\n"
        (self.out / f"{name}.log").write_bytes(head.encode() + log)
        left = base / "pytest"
        detach_mounts(base)
        if sum(file.lstat().st_size for file in left.rglob("*")) <= MOST_KEPT_BYTES and left.exists():
            shutil.copytree(left, self.out / name, symlinks=True, ignore=special, dirs_exist_ok=True)

    def summary(self) -> str:
        red = self.red()
        lines = [f"\n{run.harness.name} {run.seed}: {run.harness.repeat(run.seed)}" for run in red]
        return (
            f"soak: {len(self.runs)} runs, {len(red)} red"
            + "".join(lines)
            + (f"\nlogs: {self.out}" if red else "")
        )


def special(directory: str, names: list[str]) -> list[str]:
    """Return those of the names that are no files, directories or links: what a copy cannot take."""
    paths = {name: Path(directory, name) for name in names}
    return [name for name, at in paths.items() if not (at.is_symlink() or at.is_file() or at.is_dir())]


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip("= ") for line in reversed(lines) if line.strip()), "")


def end_processes(base: Path) -> None:
    """Kill what a run has left, until there is nothing more."""
    while pids := processes(base):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)  # the kernel tells only a parent of an end


def seconds(text: str) -> float:
    with suppress(ValueError):
        if (found := float(text)) > 0:
            return found
    raise SystemExit(f"soak: SOAK_S={text} is no number of seconds above 0")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description="SOAK_S says for how many seconds.")
    parser.add_argument(
        "--only", default="", metavar="WORD,WORD", help="harnesses with one of them in their names"
    )
    parser.add_argument("--tests", default="tests", help="where the harnesses are")
    parser.add_argument("--out", type=Path, default=ROOT / "soak", help="where the red runs are kept")
    parser.add_argument("--hang-s", type=float, default=HANG_S, help="ends a run that takes longer")
    options = parser.parse_args()
    end_s = time.monotonic() + seconds(os.environ.get("SOAK_S", "inf"))
    chosen = picked(harnesses(options.tests), options.only)
    print(f"soak: {' '.join(each.name for each in chosen)}", flush=True)
    soak = Soak(options.out, options.hang_s)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, soak.end)
    soak.go_on(chosen, end_s)
    print(soak.summary())
    return 1 if soak.red() else 0


if __name__ == "__main__":
    sys.exit(main())
