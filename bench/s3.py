"""What is measured at the S3 door: signed requests over 8 connections to one worker, against nginx and a bare handler.

Responsibility: one function for each figure. For GETs nginx serves the same bytes from a tmpfs of the kind that lies
under the store, by sendfile, with one worker process. For PUTs `bench.put_handler` receives them into files on such a
tmpfs. `wrk` sends the requests to both sides, in turns. A request is signed once and sent again and again: signatures
are verified each time all the same. A PUT is unsigned payload with CRC64NVME into a bucket with opaque ETags.

What the ratios hold beside the servers: `wrk` runs on the same machine, and on two cores its own processor time is part
of either rate, the same of both.
"""

from __future__ import annotations

import base64
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from hmac import digest as hmac_digest
from pathlib import Path
from statistics import median

from awscrt.checksums import crc64nvme

from bench.measure import Result
from bench.places import tmpfs
from bench.ports import free_ports
from gateway.auth.canonical import canonical_request, string_to_sign
from gateway.auth.sigv4 import signing_key
from gateway.protocol.request import Request
from kvfs.client import connect
from kvfs.errors import DeviceMissing, KvfsError
from kvfs.limits import KIB, MIB, STOP_WAIT_S

CONNECTIONS = 8
TURNS = 5
"""Each side runs so often, one after the other; the figure is the median."""
WARM_UP_S = 0.3
ACCESS, SECRET = "KVFSBENCH", "a secret of the benchmark's own"
BUCKET = "bench"
SIZES = {"1m": MIB, "64k": 64 * KIB, "4k": 4 * KIB}
_RATE = re.compile(r"Requests/sec:\s+([0-9.]+)")

_NGINX = """
daemon off; worker_processes 1; pid {home}/nginx.pid; error_log {home}/error.log;
events {{ worker_connections 64; }}
http {{
    access_log off; sendfile on; tcp_nopush on; tcp_nodelay on; keepalive_requests 1000000000;
    client_body_temp_path {home}/a; proxy_temp_path {home}/b; fastcgi_temp_path {home}/c;
    uwsgi_temp_path {home}/d; scgi_temp_path {home}/e;
    server {{ listen 127.0.0.1:{port}; root {root}; }}
}}
"""
_CONFIG = """
[s3]
listen = "127.0.0.1:0"
opaque_etags = ["{bucket}"]
credentials = [{{ access_key = "{access}", secret_key = "{secret}" }}]
"""


@dataclass(frozen=True, slots=True)
class Sides:
    """The gateway, and what it is compared with."""

    other: str
    kvfs: str
    home: Path


def get_1m(seconds: float) -> Result:
    return _get("s3.get_1m", "1m", seconds)


def get_4k(seconds: float) -> Result:
    return _get("s3.get_4k", "4k", seconds)


def put_1m(seconds: float) -> Result:
    return _put("s3.put_1m", "1m", seconds)


def put_64k(seconds: float) -> Result:
    return _put("s3.put_64k", "64k", seconds)


def _get(name: str, file: str, seconds: float) -> Result:
    with _sides(_nginx) as sides:
        return _compare(name, _request(sides.kvfs, "GET", file), [f"{sides.other}/{file}"], seconds)


def _put(name: str, file: str, seconds: float) -> Result:
    with _sides(_put_handler) as sides:
        body = sides.home / "root" / file
        checksum = base64.b64encode(crc64nvme(body.read_bytes()).to_bytes(8, "big")).decode()
        put = _request(sides.kvfs, "PUT", "put", {"x-amz-checksum-crc64nvme": checksum})
        script = ["-s", str(_script(sides.home, body))]
        return _compare(name, [*put, *script], [f"{sides.other}/put", *script], seconds)


def _compare(name: str, subject: list[str], baseline: list[str], seconds: float) -> Result:
    """Return requests a second of both sides; each turn is a part of `seconds`."""
    turn_s = max(seconds / TURNS, 1.0)
    rates: tuple[list[float], list[float]] = ([], [])
    for side in (subject, baseline):
        _rate(side, WARM_UP_S)
    for turn in range(TURNS):
        order = ((subject, rates[0]), (baseline, rates[1]))
        for side, found in order if turn % 2 else reversed(order):
            found.append(_rate(side, turn_s))
    value, other = median(rates[0]), median(rates[1])
    return Result(name, value, "req/s", other, value / other)


def _rate(arguments: list[str], seconds: float) -> float:
    """Return requests a second. Raises KvfsError where an answer was a failure."""
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{max(1, round(seconds))}s", *arguments]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = _RATE.search(text)
    if found is None or "Non-2xx" in text or "Socket errors" in text:
        raise KvfsError(f"bench: requests failed: {text}")
    return float(found[1])


def _request(url: str, method: str, key: str, headers: dict[str, str] | None = None) -> list[str]:
    """Return wrk's arguments for a signed request with an unsigned payload."""
    host, path = url.partition("://")[2], f"/{BUCKET}/{key}"
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    said = {
        "host": host,
        "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
        "x-amz-date": now,
        **(headers or {}),
    }
    names = tuple(name.encode() for name in sorted(said))
    request = Request(
        method, path.encode(), b"", [(name.encode(), value.encode()) for name, value in said.items()], host
    )
    signed = b";".join(names)
    canonical = canonical_request(request, b"", names, signed, b"UNSIGNED-PAYLOAD")
    scope = f"{now[:8]}/us-east-1/s3/aws4_request"
    key_bytes = signing_key(SECRET, now[:8], "us-east-1")
    signature = hmac_digest(key_bytes, string_to_sign(now, scope, canonical).encode(), "sha256").hex()
    names_text = signed.decode()
    credential = f"AWS4-HMAC-SHA256 Credential={ACCESS}/{scope}, SignedHeaders={names_text}"
    lines = [f"{name}: {value}" for name, value in said.items() if name != "host"]
    lines.append(f"Authorization: {credential}, Signature={signature}")
    return [part for line in lines for part in ("-H", line)] + [f"{url}{path}"]


def _script(home: Path, body: Path) -> Path:
    """Write a script that has wrk send the file as a body."""
    script = home / "put.lua"
    script.write_text(
        f'local file = io.open("{body}", "rb")\nwrk.method = "PUT"\nwrk.body = file:read("*all")\nfile:close()\n'
    )
    return script


# --- servers -------------------------------------------------------------------------------------------------
@contextmanager
def _sides(serving: Callable[[Path, Path], AbstractContextManager[str]]) -> Iterator[Sides]:
    """Run the gateway and another server, which `serving` begins with a directory of its own and that of the files."""
    _need("wrk")
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvfs-bench-s3-")))
        home.chmod(0o755)
        root = stack.enter_context(tmpfs(home / "root", "within_size"))
        root.chmod(0o755)
        for name, size in SIZES.items():
            (root / name).write_bytes(os.urandom(size))
        other = stack.enter_context(serving(home, root))
        files = {name: (root / name).read_bytes() for name in SIZES}
        kvfs = stack.enter_context(gateway(home, files))
        yield Sides(other, kvfs, home)


def _need(program: str) -> None:
    if shutil.which(program) is None:
        raise DeviceMissing(f"{program} is missing: make bench installs it")


@contextmanager
def _put_handler(home: Path, root: Path) -> Iterator[str]:
    log, command = home / "handler.log", [sys.executable, "-m", "bench.put_handler", str(root)]

    def port(text: str) -> str:
        return text.partition("port ")[2].strip() if text.endswith("\n") else ""

    with _process(command, {"stdout": log}, port) as found:
        yield f"http://127.0.0.1:{found}"


@contextmanager
def _nginx(home: Path, root: Path) -> Iterator[str]:
    _need("nginx")
    [port] = free_ports(1)
    (home / "nginx.conf").write_text(_NGINX.format(home=home, port=port, root=root))
    command = ["nginx", "-c", str(home / "nginx.conf"), "-g", f"user {_user()};"]
    with _process(command, {}, lambda _: _answers(port)):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def gateway(home: Path, files: Mapping[str, bytes]) -> Iterator[str]:
    """Run and give the URL of a service of its own with these objects in BUCKET."""
    config = home / "kvfs.toml"
    config.write_text(_CONFIG.format(bucket=BUCKET, access=ACCESS, secret=SECRET))
    (home / "mnt").mkdir()
    places = ["--mount", str(home / "mnt"), "--data", str(home / "data"), "--config", str(config)]
    command = [sys.executable, "-m", "kvfs", "serve", *places, "--dram", "512MiB", "--nvme", "0", "--no-keep"]
    log = home / "log"

    def listening(text: str) -> str:
        found = re.search(r"S3 +(http://\S+)", text)
        return found[1] if found and "ready" in text else ""

    with _process(command, {"stdout": log}, listening) as url:
        with connect(home / "data" / "kvfs.sock") as client:
            client.create_bucket(BUCKET)
            for name, data in files.items():
                client.put(f"{BUCKET}/{name}", data)
        yield url


@contextmanager
def _process(command: list[str], files: dict[str, Path], ready: Callable[[str], str]) -> Iterator[str]:
    """Run a server until the end of the block. Raises KvfsError where it does not come up."""
    log = files.get("stdout", Path(os.devnull))
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        end = time.monotonic() + 20
        while not (found := ready(log.read_text() if log.is_file() else "")):
            if process.poll() is not None or time.monotonic() > end:
                raise KvfsError(f"bench: {command[0]} does not start")
            time.sleep(0.02)
        yield found
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(port: int) -> str:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return ""
    return "answers"


def _user() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name
