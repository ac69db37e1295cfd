"""Completion of `kvfs` in a bash that has it from `kvfs --install-completion`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.cli.main import COMMANDS
from tests.support.service import ROOT
from tests.support.waits import WAIT_S

PROGRAM = f"""#!{sys.executable}
import sys
sys.path.insert(0, "{ROOT}")
from kvfs.__main__ import main
main()
"""
"""What pip makes as `kvfs`: completion is for the name of the program."""
BASH = shutil.which("bash")
COMPLETE = """
completer=$(complete -p kvfs | sed -n 's/.*-F \\([^ ]*\\) .*/\\1/p')
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
$completer kvfs "${COMP_WORDS[$COMP_CWORD]}" kvfs
printf '%s\\n' "${COMPREPLY[@]}"
"""
"""What bash does at TAB, with the words so far as its arguments."""

pytestmark = pytest.mark.skipif(BASH is None, reason="needs bash")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a home directory with a `kvfs` on the path, and install the completion there."""
    home = tmp_path_factory.mktemp("home")
    (home / "bin").mkdir()
    program = home / "bin" / "kvfs"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    assert "completion installed" in bash(home, "kvfs --install-completion\n:")
    return home


def bash(home: Path, script: str, *arguments: str, interactive: bool = False) -> str:
    done = subprocess.run(
        [str(BASH), *(["-i"] if interactive else ["--norc"]), "-c", script, "bash", *arguments],
        env={**os.environ, "HOME": str(home), "PATH": f"{home}/bin{os.pathsep}{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        start_new_session=True,
    )
    assert done.returncode == 0, done
    return done.stdout


def completed(home: Path, *words: str) -> set[str]:
    return set(bash(home, COMPLETE, "kvfs", *words, interactive=True).split())


def test_every_command_is_offered(home: Path) -> None:
    assert completed(home, "") == {command.name for command in COMMANDS}


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["sta"], {"stat", "status"}),
        (["bucket", "cr"], {"create"}),
        (["conductor", "ru"], {"run"}),
        (["serve", "--no-m"], {"--no-mount"}),
        (["serve", "--dram", "1GiB", "--nv"], {"--nvme"}),
        (["bucket", "create", "--cl"], {"--class"}),
        (["fsck", "--check"], {"--check-only"}),
        (["plan", "trace.jsonl", "--inst"], {"--instances"}),
    ],
    ids=lambda names: " ".join(sorted(names)),
)
def test_commands_and_options_are_completed(home: Path, words: list[str], offered: set[str]) -> None:
    assert completed(home, *words) == offered
