"""`kvfs top` in a terminal and without one, of a store and of a Conductor."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from kvfs.cli.top.frame import frame, plain, text_of
from kvfs.client import connect
from kvfs.watch.panels import Column, Figure, Panel, Snapshot, Unit
from tests.scheduler.conductor.test_command import TOKEN, running, settings
from tests.support.service import ROOT, Service, run_kvfs
from tests.support.waits import WAIT_S

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ALTERNATE, _BACK, _HOME = "\x1b[?1049h", "\x1b[?1049l", "\x1b[H"


class Terminal:
    """`kvfs top` in a pseudoterminal."""

    def __init__(self, *arguments: str, columns: int = 100, rows: int = 40) -> None:
        self._own, theirs = pty.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(theirs)
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvfs", "top", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=ROOT,
            env={**environment, "TERM": "xterm", "KVFS_CONDUCTOR_TOKEN": TOKEN},
        )
        self._theirs = theirs
        self.text = ""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._own, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._own, keys.encode())

    def screen(self) -> list[str]:
        """The lines of the last whole picture."""
        pictures = self.text.split(_HOME)
        return _ESCAPES.sub("", pictures[-2] if len(pictures) > 2 else pictures[-1]).split("\r\n")

    def until(self, pattern: str) -> None:
        """Read on until the screen has this."""
        end = time.monotonic() + WAIT_S
        while not re.search(pattern, "\n".join(self.screen())):
            assert time.monotonic() < end, self.screen()
            self.read()

    def read(self, timeout_s: float = 0.1) -> bool:
        """Read some of what it wrote, 4 KiB at most; whether something came."""
        if not select.select([self._own], [], [], timeout_s)[0]:
            return False
        self.text += os.read(self._own, 1 << 16).decode(errors="replace")
        return True

    def ended(self) -> int:
        """The exit code, once it has ended; what it wrote last is read."""
        end = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < end
            self.read()
        while self.read():
            pass
        return self.process.returncode

    def is_as_before(self) -> bool:
        return (
            self.text.rstrip().endswith("\x1b[?25h" + _BACK)
            and termios.tcgetattr(self._theirs) == self.before
        )

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._own)
        os.close(self._theirs)


@contextmanager
def terminal(*arguments: str, columns: int = 100, rows: int = 40) -> Iterator[Terminal]:
    made = Terminal(*arguments, columns=columns, rows=rows)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Service(mode="off", nvme="64MiB") as service:
        yield service


def test_a_store_in_a_terminal_from_its_first_look_to_q(service: Service) -> None:
    with terminal("--at", str(service.data)) as shown:
        shown.until(r"Tiers[\s\S]*dram[\s\S]*nvme")
        assert _ALTERNATE in shown.text
        shown.until(r"figures of the last \d+ s  q quits")
        with connect(service.data) as client:
            client.create_bucket("top")
        shown.until(r"session  bucket_create")
        shown.press("q")
        assert shown.ended() == 0
        assert shown.is_as_before(), shown.text[-200:]


def test_it_follows_the_size_of_the_terminal_and_scrolls(service: Service) -> None:
    with terminal("--at", str(service.data), columns=120, rows=50) as shown:
        shown.until("Tiers")
        assert max(map(len, shown.screen())) > 60
        shown.resize(60, 8)
        end = time.monotonic() + WAIT_S
        while len(lines := shown.screen()) > 9 or max(map(len, lines)) > 60:
            assert time.monotonic() < end, lines
            shown.read()
        assert str(service.data) in shown.screen()[0]
        shown.press("jj\x1b[B")
        shown.until(r"\A(?!.*kvfs-test)")
        shown.press("g")
        shown.until(r"\A.*kvfs-test")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_signal_leaves_the_terminal_as_it_was(service: Service, number: signal.Signals, code: int) -> None:
    with terminal("--at", str(service.data)) as shown:
        shown.until("Tiers")
        shown.process.send_signal(number)
        assert shown.ended() == code
        assert shown.is_as_before(), shown.text[-200:]


def test_it_goes_on_with_a_service_that_was_killed_and_started_again() -> None:
    with Service(mode="off") as service, terminal("--at", str(service.data), columns=200) as shown:
        shown.until("figures of the last")
        service.kill()
        shown.until("trying again")
        service.restart()
        shown.until("q quits")


def test_a_conductor_in_a_terminal_and_without_one(tmp_path: Path) -> None:
    with running(settings(tmp_path, tokens=[TOKEN])) as (_, url):
        with terminal("--at", url) as shown:
            shown.until("! no instance is registered")
            shown.until(r"figures of the last \d+ s")
            shown.press("q")
            assert shown.ended() == 0
        done = run_kvfs("top", "--at", url, environment={"KVFS_CONDUCTOR_TOKEN": TOKEN})
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("Conductor  ")
        assert "\x1b" not in done.stdout
        environment = {"KVFS_CONDUCTOR_TOKEN": TOKEN}
        status = run_kvfs("conductor", "status", "--at", url, environment=environment)
        assert status.stdout.splitlines()[1:] == done.stdout.splitlines()[1:]
        denied = run_kvfs("top", "--at", url, environment={"KVFS_CONDUCTOR_TOKEN": "x"})
        assert (denied.returncode, "401" in denied.stderr) == (4, True)


def test_without_a_terminal_a_store_is_shown_once(service: Service) -> None:
    done = run_kvfs("top", "--at", str(service.data))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{service.data}  " in done.stdout.splitlines()[0]
    assert "figures since the start" in done.stdout
    assert (
        run_kvfs("top", "--once", "--at", str(service.data)).stdout.splitlines()[1:4]
        == done.stdout.splitlines()[1:4]
    )


@pytest.mark.parametrize("at", ["http://127.0.0.1:1", "/nowhere"])
def test_nobody_there_is_a_line_and_code_4(at: str) -> None:
    done = run_kvfs("top", "--at", at)
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (4, 1, "")
    assert at in done.stderr


def test_text_from_elsewhere_is_no_markup_and_moves_no_cursor() -> None:
    name = "[bold]b[/bold] \x1b[2J\x07\u202e end"
    found = Snapshot(
        kind="store",
        name=name,
        at_s=0,
        window_s=0,
        problems=(name,),
        panels=(
            Panel(
                title="t",
                figures=(Figure(title=name, value=name),),
                columns=(Column("c"),),
                rows=((name,),),
            ),
        ),
    )
    console = Console(width=200, force_terminal=True)
    with console.capture() as capture:
        console.print(frame(found))
    text = capture.get()
    assert "\x1b[2J" not in text
    assert "\u202e" not in text
    assert _ESCAPES.sub("", text).count(plain(name)) == 5
    assert plain(name) == r"[bold]b[/bold] \x1b[2J\x07\u202e end"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "s", "-"),
        (0, "s", "0 s"),
        (2.5e-5, "s", "25 us"),
        (0.0123, "s", "12.3 ms"),
        (75.0, "s", "75 s"),
        (0.5, "share", "50.0%"),
        (1234.4, "per_s", "1,234/s"),
        (0.333, "per_s", "0.33/s"),
        (1234567, "", "1,234,567"),
        (True, "", "yes"),
        (1048576, "bytes", "1 MiB"),
    ],
)
def test_values_are_shown_with_their_units(value: float | None, unit: Unit, text: str) -> None:
    assert text_of(value, unit) == text
