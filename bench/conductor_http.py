"""What a Conductor's process takes: routes of prompts by 64 hashes over 32 connections, and watching 256 instances.

Responsibility: the figures. Routes: `wrk` sends a route and then its end, in turns on each connection, so that queues
stay as short as those of a cluster in use. The figure is the routes, each with its end, in a second of the process's
own processor time: `wrk` and whatever else runs on the machine are no part of it. 16 instances, whose caches hold
nothing.

Routes have no baseline: the same door without a decision is `/healthz`, whose figure is printed on stderr, with the
rates by the clock. Watching is the share of one core that a Conductor without requests takes for 256 instances, which
are one process here (`bench.stub_engine`); its baseline is what it takes without any.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from threading import Thread
from time import perf_counter, sleep
from typing import Any, Final
from urllib.request import Request, urlopen

from bench import keys
from bench.measure import Result
from bench.proxy import child
from kvfs.errors import DeviceMissing

INSTANCES: Final = 16
CONNECTIONS: Final = 32
HASHES: Final = 64
TURNS: Final = 3
WATCHED: Final = 256
SETTLE_S: Final = 1.0
"""After so long every instance has been asked on a connection that is kept."""
_RATE = re.compile(r"Requests/sec:\s+([0-9.]+)")
_SCRIPT = """
local bodies = {{ {bodies} }}
local n = 0
local routed = {{}}
local headers = {{ ["Content-Type"] = "application/json" }}
request = function()
  local id = table.remove(routed)
  if id then
    local path = "/v1/reservations/" .. id
    return wrk.format("DELETE", path, headers)
  end
  n = n % #bodies + 1
  return wrk.format("POST", "/v1/route", headers, bodies[n])
end
response = function(status, _, body)
  local found = string.match(body, '"id":"([^"]+)"')
  if status == 200 and found then routed[#routed + 1] = found end
end
"""


def route_http(seconds: float) -> Result:
    """Measure routes in a second."""
    if shutil.which("wrk") is None:
        raise DeviceMissing("bench: conductor.route_http needs wrk")
    with (
        tempfile.TemporaryDirectory(prefix="kvfs-bench-") as name,
        idle_engine() as engine,
        running_conductor() as (process, url),
    ):
        script = Path(name) / "route.lua"
        script.write_text(_SCRIPT.format(bodies=",\n".join(f"'{body}'" for body in _bodies())))
        for number in range(INSTANCES):
            _post(f"{url}/v1/instances", instance(number, engine))
        rates, walls = [], []
        for _ in range(TURNS):
            before, before_s = _routed(url), _cpu_s(process.pid)
            walls.append(_wrk(seconds / TURNS, script, url) / 2)
            rates.append((_routed(url) - before) / (_cpu_s(process.pid) - before_s))
        before_s = _cpu_s(process.pid)
        plain = _wrk(seconds / TURNS, None, f"{url}/healthz")
        plain_s = (_cpu_s(process.pid) - before_s) / (plain * max(round(seconds / TURNS), 1))
    print(
        f"bench: conductor: {median(walls):.0f} routes/s by the clock; without a decision {plain:.0f} requests/s by "
        f"the clock, {1 / plain_s:.0f} in a second of the processor",
        file=sys.stderr,
    )
    return Result("conductor.route_http", median(rates), "1/s")


def watched_256(seconds: float) -> Result:
    """Measure the share of a core that 256 instances take which no request goes to."""
    with child("bench.stub_engine") as (_, port), running_conductor() as (process, url):
        alone = _share(process.pid, seconds)
        for number in range(WATCHED):
            _post(f"{url}/v1/instances", instance(number, f"http://127.0.0.1:{port}"))
        sleep(SETTLE_S)
        return Result("conductor.watched_256", _share(process.pid, seconds), "%", alone)


def _share(pid: int, seconds: float) -> float:
    """Return the percentage of one core that a process takes."""
    began_s, before_s = perf_counter(), _cpu_s(pid)
    sleep(seconds)
    return 100 * (_cpu_s(pid) - before_s) / (perf_counter() - began_s)


def _bodies() -> list[str]:
    rng = random.Random(1)
    return [
        json.dumps(
            {
                "model": "m",
                "length": HASHES * keys.NAMESPACE.block_tokens + 5,
                "hashes": [rng.randbytes(16).hex() for _ in range(HASHES)],
            }
        )
        for _ in range(64)
    ]


def instance(number: int, url: str) -> dict[str, Any]:
    """Return an instance as a Conductor is told of it."""
    return {
        "name": f"i{number}",
        "url": url,
        "model": "m",
        "namespace": keys.NAMESPACE.as_mapping(),
        "engine_topic": f"engine-{number}",
    }


def _post(url: str, value: Any) -> None:
    request = Request(url, json.dumps(value).encode(), {"Content-Type": "application/json"}, method="POST")
    with urlopen(request) as answer:
        answer.read()


def _routed(url: str) -> int:
    with urlopen(f"{url}/v1/instances") as answer:
        return int(json.loads(answer.read())["counts"].get("routed", 0))


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wrk(seconds: float, script: Path | None, url: str) -> float:
    command = ["wrk", "-t", "1", "-c", str(CONNECTIONS), "-d", f"{max(round(seconds), 1)}s"]
    command += ["-s", str(script)] if script is not None else []
    done = subprocess.run([*command, url], capture_output=True, text=True, check=True)
    found = _RATE.search(done.stdout)
    assert found is not None
    return float(found[1])


class _Metrics(BaseHTTPRequestHandler):
    """Answer as an idle engine does."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def idle_engine() -> Iterator[str]:
    """Answer a Conductor's probes at the address that this yields."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Metrics) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def running_conductor(*arguments: str, events: str = "*") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a Conductor's process, which listens for events at a port; yield it and its door once it answers."""
    command = [sys.executable, "-m", "kvfs", "conductor", "run", "--log-level", "error"]
    command += ["--listen", "127.0.0.1:0", "--events", f"tcp://127.0.0.1:{events}", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            while process.stdout.readline().strip() != "ready":
                assert process.poll() is None
            yield process, url
        finally:
            process.terminate()
            process.wait()
