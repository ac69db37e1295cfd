"""kvfs's proxy beside released routers: what is parsed, what is left out and why, and a run of kvfs's alone."""

from __future__ import annotations

import io
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from bench import peer_routers, router_processes
from bench.conductor_http import idle_engine
from bench.peer_routers import FIGURES, KVFS
from bench.proxy import Asker, body, cpu_us, request
from bench.router_processes import RELEASES, Pair

ENGINES = Pair(prefill=1, decode=2)


def program(home: Path, name: str, *lines: str) -> None:
    """Make a program of an environment that runs these lines."""
    (home / "bin").mkdir(exist_ok=True)
    path = home / "bin" / name
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        (
            "ERROR: Could not find a version\nERROR: No matching distribution found for x==1\n\n",
            "No matching",
        ),
        ("WARNING: no place\nERROR: the disk is full\nWARNING: there is a new pip\n", "the disk is full"),
        ("Traceback:\n  OSError: broken\n", "OSError: broken"),
        ("", "pip did not say why"),
    ],
)
def test_what_pip_says_is_the_reason(errors: str, reason: str) -> None:
    assert router_processes.reason_of(errors).startswith(reason)


def test_a_wheel_that_cannot_be_had_is_named_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program(tmp_path, "python", "echo ERROR: no wheel for this machine >&2", "exit 1")
    assert router_processes.install(tmp_path) == dict.fromkeys(RELEASES, "no wheel for this machine")
    found = peer_routers.measure(tmp_path, 0.05, turns=1)
    assert list(found) == [KVFS]
    said = capsys.readouterr().err
    for name, version in RELEASES.items():
        assert f"{name} {version} is left out: no wheel for this machine" in said
    taken = found[KVFS]
    assert taken["prefills"] == 1.0
    assert min(taken["known"], taken["new"], taken["token"]) > 0


def test_a_release_that_ends_is_left_out_with_its_last_words(tmp_path: Path) -> None:
    program(tmp_path, "vllm-router", "echo these engines do not please me", "exit 3")
    with (
        pytest.raises(RuntimeError, match="does not serve: these engines do not please me"),
        router_processes.open_release("vllm-router", tmp_path, ENGINES, tmp_path),
    ):
        pass


@pytest.mark.parametrize("name", RELEASES)
def test_releases_go_by_what_engines_have_cached(name: str) -> None:
    command = router_processes.command_of(name, Path("/home"), 30, 31, ENGINES)
    assert command[0] == f"/home/bin/{name}"
    given = dict(pairwise(command))
    assert (given["--port"], given["--prometheus-port"]) == ("30", "31")
    assert (given["--prefill"], given["--decode"]) == ("http://127.0.0.1:1", "http://127.0.0.1:2")
    assert given["--policy"] == "cache_aware"


def test_a_proxy_names_its_port_before_it_is_ready() -> None:
    lines = ["OpenAI   http://127.0.0.1:4711/v1\n", "ready\n", "more\n"]
    assert router_processes.port_in(lines) == 4711
    with pytest.raises(RuntimeError, match="did not start"):
        router_processes.port_in(lines[:1])


def test_the_table_has_a_row_for_each_figure_and_a_column_for_each_router() -> None:
    taken = {figure: float(number) for number, figure in enumerate(FIGURES)}
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(peer_routers.table_of({KVFS: taken, "another 1.2": taken}))
    text = console.export_text()
    assert "another 1.2" in text
    for number, title in enumerate(FIGURES.values()):
        [row] = [line for line in text.splitlines() if title in line]
        assert row.count(f"{number:.2f}") == 2


def test_a_refusal_is_no_answer() -> None:
    with idle_engine() as url:
        asker = Asker(int(url.rpartition(":")[2]))
        with pytest.raises(ConnectionError, match="501"):
            asker.ask(request(body(1, stream=False)), b"}")
        asker.close()


def test_cpu_of_all_threads_is_counted(tmp_path: Path) -> None:
    """Those of a process whose first thread waits for another."""
    script = tmp_path / "busy.py"
    script.write_text(
        "import threading, time\n"
        "def work():\n"
        "    while time.thread_time() < 0.3: pass\n"
        "    print('done', flush=True)\n"
        "    threading.Event().wait()\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert cpu_us(process.pid) > 300_000
        finally:
            process.kill()
