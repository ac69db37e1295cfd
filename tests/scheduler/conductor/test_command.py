"""`kvfs conductor` as a process: started, asked, killed and started anew, over TLS."""

from __future__ import annotations

import json
import re
import signal
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import msgspec
import pytest
import trio

from kvfs.config.load import load
from kvfs.errors import ConfigError
from tests.support.asked_engines import AskedEngine
from tests.support.certificates import certificate
from tests.support.conductors import instance
from tests.support.forked import Forked
from tests.support.service import run_kvfs, running_kvfs
from tests.support.waits import WAIT_S

TOKEN = "a token of the test"


@contextmanager
def running(config: Path) -> Iterator[tuple[Forked, str]]:
    with running_kvfs("conductor", "run", "--config", str(config)) as (process, said):
        lines = [said.readline() for _ in range(3)]
        assert lines[2] == "ready\n", lines
        yield process, lines[0].split()[1]


def kvfs(*arguments: str, token: str = "") -> subprocess.CompletedProcess[str]:
    environment = {"KVFS_CONDUCTOR_TOKEN": token, "COLUMNS": "200"}
    return run_kvfs("conductor", *arguments, environment=environment, timeout_s=120)


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


async def test_engines_of_a_file_are_asked_and_routed_to(tmp_path: Path) -> None:
    engines = [AskedEngine(), AskedEngine()]
    config = settings(tmp_path, engines=[each.url for each in engines])

    def route() -> set[str]:
        with running(config) as (_, url):
            bodies = [{"model": "m", "tokens": [n] * 2000} for n in range(8)]
            asked = [Request(f"{url}/v1/route", json.dumps(body).encode()) for body in bodies]
            return {json.load(urlopen(each, timeout=WAIT_S))["decode_url"] for each in asked}

    async with trio.open_nursery() as nursery:
        for engine in engines:
            await nursery.start(engine.run)
        assert await trio.to_thread.run_sync(route) == {each.url for each in engines}
        nursery.cancel_scope.cancel()


WRONG_URLS = {
    "scheme": "ftp://h:1",
    "no host": "http://:1",
    "no port": "http://h:0",
    "a high port": "http://h:65536",
    "no number": "http://h:x",
    "a path": "http://h:1/v1",
    "a slash": "http://h:1/",
    "a query": "http://h:1?x",
    "a fragment": "http://h:1#x",
    "a blank": "http://h :1",
    "a line": "http://h:1\n",
    "a letter that no host has": "http://h\u00e9:1",
    "no IPv6 address": "http://[::::]:1",
    "IPv6 without brackets": "http://fd00::3:1",
}


@pytest.mark.parametrize("section", ["conductor", "proxy"])
@pytest.mark.parametrize("key", ["engines", "prefill", "decode"])
@pytest.mark.parametrize("url", WRONG_URLS.values(), ids=WRONG_URLS)
def test_an_engine_s_url_is_checked_in_the_file_and_on_the_command_line(
    section: str, key: str, url: str, tmp_path: Path
) -> None:
    file = tmp_path / "kvfs.toml"
    file.write_text(f"[{section}]\n{key} = {json.dumps(['http://good:1', url])}\n")
    for path, flags in ((file, None), (None, {(section, key): ["http://good:1", url]})):
        with pytest.raises(ConfigError) as caught:
            load(path, flags)
        assert f"[{section}] {key} = {url!r}: must be http://HOST:PORT or https://" in str(caught.value)


def test_a_user_in_a_url_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {("conductor", "engines"): ["http://me:a secret@h:1"]})
    assert "[conductor] engines = 'http://...@h:1': must be http://HOST:PORT" in str(caught.value)


@pytest.mark.parametrize("section", ["conductor", "proxy"])
@pytest.mark.parametrize(
    "urls",
    [
        ("http://h:1", "http://h:1"),
        ("http://h", "http://H:80"),
        ("http://h:443", "https://h"),
        ("http://[fd00::3]:1", "http://[fd00:0::3]:1"),
    ],
)
def test_no_address_is_named_twice(section: str, urls: tuple[str, str]) -> None:
    first, second = urls
    for keys in (("engines", "engines"), ("prefill", "decode")):
        flags: dict[tuple[str, str], list[str]] = {}
        for key, url in zip(keys, urls, strict=True):
            flags.setdefault((section, key), []).append(url)
        with pytest.raises(ConfigError) as caught:
            load(None, flags)
        said = f"[{section}]: {keys[1]} = {second!r}: the address of {keys[0]} = {first!r}; each engine"
        assert said in str(caught.value)


def test_addresses_that_differ_are_taken() -> None:
    urls = ("http://h", "http://h:81", "https://h", "http://h_1.x-y:1", "http://[::1]:80", "http://127.0.0.1")
    for section in ("conductor", "proxy"):
        settings = load(None, {(section, "engines"): urls})
        assert getattr(settings, section).engines == urls


def test_what_is_wrong_is_a_line_and_an_exit_code(tmp_path: Path) -> None:
    nobody = kvfs("status", "--at", "http://127.0.0.1:1")
    assert (nobody.returncode, nobody.stderr.startswith("kvfs: http://127.0.0.1:1")) == (4, True)
    wrong = kvfs("run", "--config", str(settings(tmp_path, cost_model="gpt-9")))
    assert (wrong.returncode, "'gpt-9' is not in the table" in wrong.stderr) == (2, True)
    twice = kvfs("run", "--engine", "http://h:1", "--prefill", "http://h:1")
    named = "prefill = 'http://h:1': the address of engines = 'http://h:1'"
    assert (twice.returncode, named in twice.stderr) == (2, True), twice.stderr
    taken = kvfs("run", "--listen", "127.0.0.1:0", "--events", "tcp://nowhere")
    assert (taken.returncode, "tcp://nowhere" in taken.stderr) == (2, True)
