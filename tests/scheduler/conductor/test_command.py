"""`kvfs conductor` as a process: started, asked, killed and started anew, over TLS."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import msgspec

from tests.support.certificates import certificate
from tests.support.conductors import instance
from tests.support.service import ROOT
from tests.support.waits import WAIT_S

TOKEN = "a token of the test"


@contextmanager
def running(config: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "kvfs", "conductor", "run", "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(3)]
            assert lines[2] == "ready\n", lines
            yield process, lines[0].split()[1]
        finally:
            process.kill()


def kvfs(*arguments: str, token: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "KVFS_CONDUCTOR_TOKEN": token, "COLUMNS": "200"}
    command = [sys.executable, "-m", "kvfs", "conductor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)


def settings(where: Path, **more: Any) -> Path:
    file = where / "kvfs.toml"
    lines = [f"{name} = {json.dumps(value)}" for name, value in more.items()]
    file.write_text(
        "\n".join(["[conductor]", 'listen = "127.0.0.1:0"', 'events = "tcp://127.0.0.1:*"', *lines])
    )
    return file


def test_killed_and_started_anew_it_has_its_instances_and_says_that_it_knows_nothing(tmp_path: Path) -> None:
    file = tmp_path / "instances.json"
    file.write_bytes(msgspec.json.encode([instance("a", url="http://127.0.0.1:1")]))
    config = settings(tmp_path, instances=str(file), tokens=[TOKEN])
    for _ in range(2):
        with running(config) as (process, url):
            shown = kvfs("status", "--at", url, "--json", token=TOKEN)
            assert shown.returncode == 0, shown.stderr
            found = json.loads(shown.stdout)
            assert [each["name"] for each in found["instances"]] == ["a"]
            assert [each["knowledge"] for each in found["streams"]] == ["unknown"]
            page = kvfs("status", "--at", url, token=TOKEN).stdout
            assert (
                "! engine-a: nothing was heard of it, so nothing is known of its cache" in page.splitlines()
            )
            for row in (r"a +(ready|unreachable) +0 +0 s", r"engine-a +unknown +- +no blocks"):
                assert re.search(rf"^{row}", page, re.MULTILINE), page
            denied = kvfs("status", "--at", url, token="another")
            assert (denied.returncode, "401" in denied.stderr) == (4, True)
            process.send_signal(signal.SIGKILL)
            process.wait(WAIT_S)


def test_it_stops_when_it_is_asked_to_and_speaks_tls(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    with running(settings(tmp_path, certificate=str(cert), key=str(key))) as (process, url):
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=str(cert))
        with urlopen(Request(f"{url}/healthz"), context=context, timeout=WAIT_S) as answer:
            assert answer.read() == b"ok\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0


def test_what_is_wrong_is_a_line_and_an_exit_code(tmp_path: Path) -> None:
    nobody = kvfs("status", "--at", "http://127.0.0.1:1")
    assert (nobody.returncode, nobody.stderr.startswith("kvfs: http://127.0.0.1:1")) == (4, True)
    wrong = kvfs("run", "--config", str(settings(tmp_path, cost_model="gpt-9")))
    assert (wrong.returncode, "'gpt-9' is not in the table" in wrong.stderr) == (2, True)
    twice = kvfs("run", "--engine", "http://h:1", "--prefill", "http://h:1")
    assert (twice.returncode, "an engine is named twice" in twice.stderr) == (2, True)
    taken = kvfs("run", "--listen", "127.0.0.1:0", "--events", "tcp://nowhere")
    assert (taken.returncode, "tcp://nowhere" in taken.stderr) == (2, True)
