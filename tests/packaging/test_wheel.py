"""The wheel in an environment of its own: what it has, and that a client and its commands need nothing of the service.

KVFS_TEST_WHEELS names the versions of Python, or interpreters, to test with; by default the one that runs the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Final

import pytest

from kvfs.cli.main import COMMANDS
from kvfs.client import connect
from tests.support.service import ROOT, Service
from tests.support.wheels import build_wheel, install_wheel

pytestmark = pytest.mark.timeout(900)  # a version's first build compiles everything

PACKAGES: Final = ("kvfs", "tiers", "mounts", "gateway", "scheduler")
SERVICE_COMMANDS: Final = (
    "serve",
    "gateway",
    "umount",
    "drop",
    "fsck",
    "device",
    "nvmeof",
    "top",
    "bench",
    "simulate",
    "plan",
    "replay",
    "credentials",
    "conductor",
    "proxy",
)
UTILITY_CODE: Final = Path("kvfs/_native/shared/_kvfs_utility_code")
"""What Cython makes for all modules at once, without a source."""
CLIENT: Final = """
import array, importlib.metadata, re, sys

import kvfs, kvfs.client, kvfs.connectors.adapters, kvfs.connectors.common, kvfs.compat.mooncake

loaded = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
assert {name for name in loaded if name[0] != "_"} == {"cython_runtime", "kvfs", "xxhash"}, sorted(loaded)
assert "site-packages" in kvfs.__file__, kvfs.__file__
installed = {found.name.lower().replace("-", "_") for found in importlib.metadata.distributions()}
required = [text.replace('"', "'") for text in importlib.metadata.requires("kvfs")]
server = {re.split("[^a-z0-9_]", text)[0] for text in required if "extra == 'server" in text}
assert len(server) > 5 and "pyfuse3" in server, server
assert server & installed == {"kvfs"}, installed

namespace = kvfs.Namespace(
    model="m", revision="1", dtype="int8", layout="LTC", block_tokens=2, tensor_shards=1, tensor_rank=0,
    pipeline_shards=1, pipeline_rank=0, lora="", salt="", hash="sha256", extra={},
)
with kvfs.connect(sys.argv[1]) as client, client.blocks(namespace) as blocks:
    hashes = kvfs.prefix_hashes(namespace, array.array("i", range(8)))
    keys = [hashes[at : at + 16] for at in range(0, len(hashes), 16)]
    assert blocks.put(keys, [bytes([i]) * 4096 for i in range(4)], [None, *keys[:-1]]) == [True] * 4
    into = [bytearray(4096) for _ in keys]
    assert (blocks.match(keys), blocks.get_into(keys, into)) == (4, [4096] * 4)
    assert [buffer[0] for buffer in into] == [0, 1, 2, 3]
    blocks.remove(keys)
"""


class Installed(Service):
    """A service of an environment with a wheel; nothing of the checkout is on its path."""

    def __init__(self, programs: Path, *, mode: str, dram: str) -> None:
        super().__init__(mode=mode, dram=dram, environment={"PYTHONPATH": "", "PYTHONSAFEPATH": "1"})
        self.programs = programs

    def command(self) -> list[str]:
        return [str(self.programs / "kvfs"), *super().command()[3:]]


@pytest.fixture(scope="module", params=os.environ.get("KVFS_TEST_WHEELS", sys.executable).split())
def wheel(request: pytest.FixtureRequest) -> Path:
    return build_wheel(request.param)


def python_of(wheel: Path) -> str:
    """The interpreter that the wheel is for."""
    version = wheel.name.split("-")[2].removeprefix("cp3")
    if int(version) == sys.version_info.minor:
        return sys.executable
    return str(ROOT / f"build/wheel/3.{version}/bin/python")


@pytest.fixture(scope="module")
def client_alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel and what it requires."""
    return install_wheel(wheel, python_of(wheel), tmp_path_factory.mktemp("client"))


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the command line, too."""
    return install_wheel(wheel, python_of(wheel), tmp_path_factory.mktemp("commands"), extra="[cli]")


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Service(mode="off") as service:
        yield service


def test_it_has_every_module_stub_page_and_kernel_and_no_source_of_native_code(wheel: Path) -> None:
    held = {PurePath(name) for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {
        path.relative_to(ROOT)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file()
    }
    wanted = {
        path
        for path in sources
        if path.suffix in (".py", ".pyi", ".ptx") or path.name == "py.typed" or path.parent.name == "static"
    }
    native = {path.with_suffix("") for path in sources if path.suffix == ".pyx"}
    assert {path for path in held if path.suffix != ".so"} == wanted
    if not list(ROOT.glob("kvfs/_native/remote/ucx.*.so")):  # no headers of UCX here
        native.remove(Path("kvfs/_native/remote/ucx"))
    native.add(UTILITY_CODE)
    assert {path.with_name(path.name.partition(".")[0]) for path in held if path.suffix == ".so"} == native


def test_a_client_needs_nothing_of_the_service(client_alone: Path, service: Service, tmp_path: Path) -> None:
    done = subprocess.run(
        [client_alone / "python", "-X", "dev", "-c", CLIENT, service.data],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    assert done.returncode == 0


def test_a_client_alone_says_what_its_commands_need(client_alone: Path, tmp_path: Path) -> None:
    done = run(client_alone, tmp_path, "status")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith(": pip install 'kvfs[cli]'\n")


def run(programs: Path, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [programs / "kvfs", *arguments],
        cwd=directory,
        env={**os.environ, "COLUMNS": "160", "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def test_commands_of_the_client_work(programs: Path, service: Service, tmp_path: Path) -> None:
    at = ["--at", str(service.data)]
    with connect(service.data) as client:
        client.create_bucket("shown")
        client.put("shown/a", b"bytes")
    for arguments, shown in (
        (["status", *at], "1 objects"),
        (["ls", *at, "shown"], "a\n"),
        (["stat", *at, "shown/a"], "5 bytes"),
        (["bucket", "list", *at], "shown"),
        (["rm", "-r", *at, "shown"], ""),
    ):
        done = run(programs, tmp_path, *arguments)
        assert (done.returncode, done.stderr) == (0, ""), arguments
        assert shown in done.stdout


@pytest.mark.parametrize("command", SERVICE_COMMANDS)
def test_commands_of_the_service_say_which_extra_they_need(
    programs: Path, tmp_path: Path, command: str
) -> None:
    done = run(programs, tmp_path, command, "--help")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.endswith(": pip install 'kvfs[server]'\n")


@pytest.mark.parametrize(
    "command", sorted({command.name or "" for command in COMMANDS} - set(SERVICE_COMMANDS))
)
def test_the_other_commands_show_their_help(programs: Path, tmp_path: Path, command: str) -> None:
    done = run(programs, tmp_path, command, "--help")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_service_without_a_mount_needs_no_compiler(wheel: Path, tmp_path: Path) -> None:
    """All that it requires comes as wheels, and pyfuse3, which does not, is not among it."""
    found = install_wheel(
        wheel, python_of(wheel), tmp_path / "env", extra="[server-no-mount]", options=["--only-binary=:all:"]
    )
    mounted = run(found, tmp_path, "serve", "--mount=mnt", "--data=data")
    assert mounted.returncode == 2
    assert "a mount needs pyfuse3" in mounted.stderr
    with Installed(found, mode="off", dram="32MiB") as service, service.client() as client:
        client.create_bucket("bucket")
        client.put("bucket/key", b"bytes")
        assert client.get("bucket/key") == b"bytes"
