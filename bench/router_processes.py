"""Routers as processes, for `bench.peer_routers`: releases in an environment of their own, and `kvfs proxy`.

Responsibility: install, start, wait until one serves. All are in front of the same two engines, one that prefills and
one that decodes, and go by what these have cached, as far as they know.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from time import monotonic, sleep
from typing import Final, NamedTuple

from bench import keys
from bench.ports import free_ports

RELEASES: Final = {"vllm-router": "0.1.17", "sglang-router": "0.3.2"}
START_S: Final = 30.0
POLL_S: Final = 0.1
TWO_LEGS: Final = {"tbt_slo_s": 0.02, "fitted": False}
"""A limit that any prefill in the decode engine's batch breaks: each request has both legs, as with the releases."""
_PORT = re.compile(r"http://127\.0\.0\.1:(\d+)")


class Pair(NamedTuple):
    """The ports of the two engines."""

    prefill: int
    decode: int


class Running(NamedTuple):
    """A router that serves."""

    pid: int
    port: int


# --- the environment -------------------------------------------------------------------------------------
def install(home: Path) -> dict[str, str]:
    """Install the releases in an environment, made if it is not there; return why one could not be, by name."""
    python = home / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
    reasons = {}
    for name, version in RELEASES.items():
        command = [str(python), "-m", "pip", "install", "--quiet", f"{name}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reasons[name] = reason_of(done.stderr)
    return reasons


def reason_of(errors: str) -> str:
    """Return what pip's errors end with."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    said = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (said or lines or ["pip did not say why"])[-1]


# --- releases --------------------------------------------------------------------------------------------
@contextmanager
def open_release(name: str, home: Path, engines: Pair, folder: Path) -> Iterator[Running]:
    """Start a release. Raises RuntimeError with the end of its log where it does not serve."""
    port, metrics_port = free_ports(2)
    command = command_of(name, home, port, metrics_port, engines)
    with (
        open(folder / f"{name}.log", "w+") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            if not _serves(process, port):
                log.seek(0)
                raise RuntimeError(f"it does not serve: {log.read()[-500:].strip() or 'it said nothing'}")
            yield Running(process.pid, port)
        finally:
            process.kill()


def command_of(name: str, home: Path, port: int, metrics_port: int, engines: Pair) -> list[str]:
    """Return how a release is started."""
    prefill, decode = (f"http://127.0.0.1:{each}" for each in engines)
    common = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
    common += ["--policy", "cache_aware", "--log-level", "error", "--decode", decode, "--prefill", prefill]
    program = str(home / "bin" / name)
    if name == "vllm-router":
        return [program, "--vllm-pd-disaggregation", *common]
    return [program, "launch", "--pd-disaggregation", *common]


def _serves(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until a router says that it is well; return whether it does before it ends, and in time."""
    deadline = monotonic() + START_S
    while process.poll() is None and monotonic() < deadline:
        try:
            if get(port, "/health")[0] == 200:
                return True
        except (OSError, HTTPException):
            pass
        sleep(POLL_S)
    return False


def get(port: int, path: str) -> tuple[int, bytes]:
    """Return status and body of an answer. Raises OSError, HTTPException."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=START_S)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()


# --- kvfs ------------------------------------------------------------------------------------------------
@contextmanager
def open_kvfs(engines: Pair, folder: Path) -> Iterator[Running]:
    """Start a proxy with a Conductor in its process. Raises RuntimeError where it does not serve."""
    config, instances = folder / "kvfs.toml", folder / "instances.json"
    instances.write_text(
        json.dumps([_instance("prefill", engines.prefill), _instance("decode", engines.decode)])
    )
    conductor: dict[str, object] = {"listen": "127.0.0.1:0", "events": "tcp://127.0.0.1:*"}
    conductor |= {"instances": str(instances), **TWO_LEGS}
    # Such values look the same in JSON and in TOML.
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in conductor.items()]
    config.write_text("".join(["[conductor]\n", *lines]))
    command = [sys.executable, "-m", "kvfs", "proxy", "--listen", "127.0.0.1:0"]
    command += ["--config", str(config), "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Running(process.pid, port_in(process.stdout))
        finally:
            process.terminate()


def port_in(lines: Iterable[str]) -> int:
    """Return the port that a proxy names before it is ready. Raises RuntimeError."""
    port = None
    for line in lines:
        found = _PORT.search(line)
        port = port or (int(found[1]) if found else None)
        if line.strip() == "ready" and port is not None:
            return port
    raise RuntimeError("kvfs proxy did not start")


def _instance(role: str, port: int) -> dict[str, object]:
    url, namespace = f"http://127.0.0.1:{port}", keys.NAMESPACE.as_mapping()
    return {"name": role, "url": url, "model": "m", "namespace": namespace, "role": role}
