"""What `make soak` does with runs that are red or hang, how it ends, and how a red test says what repeats it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.run_remains import processes
from tests.support.seeds import ROOT, SEED, repeat_command, seeds

CONFTEST: Final = "from tests.conftest import pytest_configure, pytest_runtest_makereport\n"
HEAD: Final = "import os, pathlib, subprocess, sys, time, pytest\nfrom tests.support.seeds import SEED\n"
GREEN: Final = "@pytest.mark.seeded\ndef test_it(tmp_path): (tmp_path / 'left').write_bytes(b'bytes')\n"
RED: Final = """@pytest.mark.seeded
def test_it(tmp_path):
    (tmp_path / 'left').write_text(str(SEED))
    assert SEED < 0
"""
DRAWN: Final = """from hypothesis import Phase, given, settings, strategies
@settings(phases=[Phase.generate])
@given(strategies.integers(0, 1 << 60))
def test_it(number): assert number < 1000, f'drew {number}'
"""
HANGS: Final = """@pytest.mark.seeded
def test_it():
    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'], start_new_session=True)
    pathlib.Path(os.environ['KVFS_TEST_HANGS']).write_text(os.environ['TMPDIR'])
    time.sleep(3600)
"""


class Bench:
    """Harnesses of its own, and what `run_soak` makes of them."""

    def __init__(self, path: Path) -> None:
        self.path, self.tests, self.out = path, path / "harnesses", path / "soak"
        self.tests.mkdir()
        (self.tests / "conftest.py").write_text(CONFTEST)
        (path / "tmp").mkdir()
        self.soaks: list[subprocess.Popen[str]] = []

    def harness(self, name: str, text: str) -> None:
        (self.tests / f"test_{name}.py").write_text(HEAD + text)

    def start(self, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        """Start one of at most 200 seconds, and what is begun then."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVFS_TEST_")}
        command = [sys.executable, "-m", "tests.support.run_soak", "--tests", str(self.tests)]
        soak = subprocess.Popen(
            [*command, "--out", str(self.out), *arguments],
            cwd=ROOT,
            env=kept | {"TMPDIR": str(self.path / "tmp"), "SOAK_S": "200", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.soaks.append(soak)
        return soak

    def end(self) -> None:
        for soak in self.soaks:
            soak.terminate()
            soak.communicate()

    def logs(self) -> dict[str, str]:
        return {file.stem: file.read_text() for file in self.out.glob("*.log")}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.end()
    assert os.listdir(tmp_path / "tmp") == []


def until_lines(soak: subprocess.Popen[str], *patterns: str, when: Callable[[], bool] = lambda: True) -> None:
    """Read what it says until each pattern was in a line that came when it was to, then end it."""
    assert soak.stdout is not None
    missing, said = list(patterns), ""
    for line in soak.stdout:
        said += line
        missing = [pattern for pattern in missing if not (re.search(pattern, line) and when())]
        if not missing:
            break
    soak.send_signal(signal.SIGTERM)
    assert not missing, said


def test_it_goes_on_after_a_red_run_and_keeps_its_log_and_command(bench: Bench) -> None:
    bench.harness("red", RED)
    bench.harness("green", GREEN)
    soak = bench.start("--only", "red,green")
    until_lines(soak, r"RED   red \d+", r"green green \d+, \d+ s: 1 passed", r"RED   red \d+.*1 failed")
    said, _ = soak.communicate(timeout=120)
    assert soak.returncode == 1
    assert "red\n" in said
    logs = bench.logs()
    assert all(name.startswith("red-") for name in logs)
    name, log = next(iter(logs.items()))
    seed = name.removeprefix("red-")
    assert f"KVFS_TEST_SEED={seed} " in log.split("\n")[0]
    assert f"--hypothesis-seed={seed}" in log.split("\n")[0]
    assert log.split("\n")[0] in said
    assert "to repeat it" in log
    [left] = (bench.out / name).rglob("left")
    assert left.read_text() == seed


def test_the_command_of_a_red_run_draws_the_same(bench: Bench) -> None:
    bench.harness("drawn", DRAWN)
    soak = bench.start("--only", "drawn")
    until_lines(soak, "RED   drawn")
    soak.communicate(timeout=120)
    log = next(iter(bench.logs().values()))
    again = subprocess.run(log.split("\n")[0], shell=True, cwd=ROOT, capture_output=True, text=True)
    [drew, same] = [set(re.findall(r"drew \d+", text)) for text in (log, again.stdout)]
    assert drew
    assert same == drew


def test_its_seconds_end_it(bench: Bench) -> None:
    bench.harness("green", GREEN)
    soak = bench.start("--only", "green", SOAK_S="1e-9")
    said, _ = soak.communicate(timeout=120)
    assert said.endswith("soak: 0 runs, 0 red\n")
    assert soak.returncode == 0


def test_a_run_that_hangs_is_ended_with_all_that_it_started(bench: Bench) -> None:
    bench.harness("hangs", HANGS)
    where = bench.path / "where"
    soak = bench.start("--only", "hangs", "--hang-s", "8", KVFS_TEST_HANGS=str(where))
    # A run that is ended before it could say where it is shows nothing yet.
    until_lines(soak, "RED   hangs .*ended, it took more than 8 s", when=where.exists)
    soak.communicate(timeout=120)
    assert soak.returncode == 1
    assert list(processes(Path(where.read_text()))) == []
    assert next(iter(bench.logs().values()))


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        (["--only", "gren"], {}, "soak: --only gren: no harness has this in its name, of\ngreen fuzz\n"),
        ([], {"SOAK_S": "0"}, "soak: SOAK_S=0 is no number of seconds above 0\n"),
        ([], {"SOAK_S": "soon"}, "soak: SOAK_S=soon is no number of seconds above 0\n"),
        (["--tests", "tests/none"], {}, "soak: the tests cannot be collected\n"),
    ],
)
def test_what_it_cannot_do_is_said(
    bench: Bench, arguments: list[str], environ: dict[str, str], message: str
) -> None:
    bench.harness("green", GREEN)
    soak = bench.start(*arguments, **environ)
    said, _ = soak.communicate(timeout=120)
    assert message in said
    assert soak.returncode == 1


# --- seeds -------------------------------------------------------------------------------------------------------
def test_a_command_has_the_seed_and_the_counts() -> None:
    environ = {"KVFS_TEST_KILLS": "7", "KVFS_TEST_SEED": "1", "HOME": "/root"}
    command = repeat_command("tests/x.py::test_y[a b]", 5, 6, environ)
    *counts, python, _, _, test, last = shlex.split(command)
    assert counts == ["KVFS_TEST_KILLS=7", "KVFS_TEST_SEED=5"]
    assert (ROOT / python).exists()
    assert (test, last) == ("tests/x.py::test_y[a b]", "--hypothesis-seed=6")
    assert "--hypothesis-seed" not in repeat_command("tests/x.py", 5)


def test_a_drawn_seed_is_the_only_one() -> None:
    assert seeds("damage")[0] == SEED
    code = "from tests.support.seeds import seeds; print(seeds('damage'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"KVFS_TEST_SEED": "9"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[9]\n"


def test_what_draws_is_marked() -> None:
    """And nothing draws from a seed that nobody knows."""
    hidden = re.compile(
        r"SystemRandom|(?<![\w.])random\.(random|randrange|randint|choices?|shuffle|sample)\("
    )
    unmarked = []
    for file in (ROOT / "tests").rglob("test_*.py"):
        text = file.read_text()
        # With rounds alone it is Hypothesis that draws, whose tests soak finds by themselves.
        imported = re.sub(r"seeds import rounds$", "", text, flags=re.M) if "@given(" in text else text
        draws = "tests.support.seeds import" in imported or "run_state_machine_as_test" in text
        if file != Path(__file__) and draws and "pytest.mark.seeded" not in text:
            unmarked.append(file.name)
        elif file != Path(__file__) and hidden.search(text):
            unmarked.append(f"{file.name}: {hidden.findall(text)}")
    assert unmarked == []
