"""The command line against a running service: what it prints, its exit codes, and how it names things."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from kvfs.cli.lazy import LazyCommand
from kvfs.cli.main import COMMANDS
from kvfs.client import discovery
from kvfs.errors import InvalidRequest
from tests.support.door import need_mount
from tests.support.service import ROOT, Service, run_kvfs


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    need_mount()
    with Service(mode="auto", dram="256MiB") as service:
        yield service


@pytest.fixture
def bucket(service: Service, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A bucket of the test's own with `a` (5 bytes), `dir/b` and `dir/sub/c`."""
    bucket = service.mount / f"b{abs(hash(request.node.name)) % 10**9}"
    (bucket / "dir" / "sub").mkdir(parents=True)
    for name in ("a", "dir/b", "dir/sub/c"):
        (bucket / name).write_bytes(b"bytes")
    yield bucket
    if bucket.exists():
        assert run_kvfs("rm", "-r", str(bucket)).returncode == 0


def good(*arguments: str, **environment: str) -> str:
    done = run_kvfs(*arguments, environment=environment)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def bad(code: int, *arguments: str, **environment: str) -> str:
    """The one line of an error."""
    done = run_kvfs(*arguments, environment=environment)
    assert done.returncode == code, done
    assert done.stderr.startswith("kvfs: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    return done.stderr


# --- without a service -----------------------------------------------------------------------------------
def test_version_and_help() -> None:
    assert good("--version").startswith("kvfs ")
    shown = good("--help")
    for command in (
        "serve",
        "status",
        "ls",
        "stat",
        "pin",
        "unpin",
        "evict",
        "rm",
        "drop",
        "fsck",
        "bench",
        "replay",
        "umount",
    ):
        assert command in shown
    assert "--json" in good("bench", "--help")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: str(command.name))
def test_the_list_of_commands_says_what_each_says_itself(command: LazyCommand) -> None:
    loaded = command.load()
    assert loaded.help is not None
    assert (loaded.name or command.name, loaded.help.partition("\n")[0]) == (command.name, command.help)


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["stat"], ["ls", "--nonsense"], ["evict", "--at", "/tmp"], ["bench", "--only", "x"]],
)
def test_wrong_usage_is_code_2(arguments: list[str]) -> None:
    assert run_kvfs(*arguments).returncode == 2


@pytest.mark.parametrize(
    "arguments", [["status"], ["ls"], ["stat", "bucket/key"], ["evict", "--bytes", "1MiB"]]
)
def test_no_service_is_code_4(tmp_path: Path, arguments: list[str]) -> None:
    assert str(tmp_path) in bad(4, *arguments, "--at", str(tmp_path))
    assert str(tmp_path) in bad(4, *arguments, KVFS_ADDRESS=str(tmp_path))
    assert "none" in bad(4, *arguments, "--at", str(tmp_path / "none"))


def test_a_path_on_no_mount_is_refused_with_what_to_do(tmp_path: Path) -> None:
    assert "--at MOUNT" in bad(1, "stat", str(tmp_path))
    assert "no kvfs mount" in bad(3, "umount", str(tmp_path))


def test_without_its_packages_the_command_line_says_which() -> None:
    code = (
        "import runpy, sys; from importlib.machinery import PathFinder; found = PathFinder.find_spec; "
        "PathFinder.find_spec = lambda name, *rest: None if name == 'typer' else found(name, *rest); "
        "runpy.run_module('kvfs', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code, "status"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "kvfs: the command line needs typer: pip install 'kvfs[cli]'\n"


def test_bench_is_for_checkouts_and_says_so(tmp_path: Path) -> None:
    """An installed kvfs has no bench/ beside it."""
    (tmp_path / "kvfs").symlink_to(ROOT / "kvfs")
    code = (
        "import kvfs.cli.measure_commands as measure; measure.__file__ = '/nowhere/kvfs/cli/measure_commands.py'; "
        "from kvfs.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "bench"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1
    assert "source checkout" in done.stderr


SHORT = """
import sys
from kvfs.cli.main import main

sys.argv = ["kvfs", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert end.code == 0
service = {"trio", "pyfuse3", "lmdb", "prometheus_client", "numpy", "torch", "kvfs.service", "kvfs.config.settings"}
loaded = service & set(sys.modules)
assert not loaded, loaded
"""


@pytest.mark.parametrize("arguments", [["--help"], ["status"], ["status", "--json"], ["ls"]])
def test_short_commands_load_nothing_of_the_service(service: Service, arguments: list[str]) -> None:
    """They answer in 0.2 s on an idle machine, half of it Python and typer; the service's modules would double it."""
    at = [] if arguments == ["--help"] else ["--at", str(service.mount)]
    done = subprocess.run(
        [sys.executable, "-c", SHORT, *arguments, *at], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


# --- status ----------------------------------------------------------------------------------------------
def test_status_shows_what_runs(service: Service) -> None:
    shown = good("status", "--at", str(service.mount))
    for expected in (str(service.data), str(service.mount), "256 MiB", "dram", "sessions"):
        assert expected in shown
    found = json.loads(good("status", "--json", "--at", str(service.mount)))
    assert found["tiers"][0]["capacity_bytes"] == 256 << 20
    assert found["mount"]["path"] == str(service.mount)
    assert found["mount"]["mode"] in ("passthrough", "native", "plain")


@pytest.mark.parametrize("address", ["mount", "data", "socket"])
def test_a_service_has_three_addresses(service: Service, address: str) -> None:
    where = {"mount": service.mount, "data": service.data, "socket": service.data / "kvfs.sock"}[address]
    found = json.loads(good("status", "--json", KVFS_ADDRESS=str(where)))
    assert found["data_dir"] == str(service.data)


def test_the_only_mount_is_meant_when_none_is_named(service: Service) -> None:
    """Tests beside these may have mounts of their own at any moment."""
    done = run_kvfs("status")
    assert str(service.data) in done.stdout or "choose one with --at" in done.stderr


def test_the_mount_of_the_working_directory_is_meant_before_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    (one / "bucket").mkdir(parents=True)
    with monkeypatch.context() as patched:
        patched.setattr(discovery, "mounts", lambda table=None: [one, other])
        patched.chdir(one / "bucket")
        assert discovery.default_mount() == one
        patched.chdir(tmp_path)
        with pytest.raises(InvalidRequest, match="choose one with --at"):
            discovery.default_mount()
        patched.setattr(discovery, "mounts", lambda table=None: [other])
        assert discovery.default_mount() == other


def test_status_and_ls_know_where_they_stand(service: Service, bucket: Path) -> None:
    def here(command: str, directory: Path) -> str:
        done = run_kvfs(command, directory=directory)
        assert done.returncode == 0, done
        return done.stdout

    assert str(service.data) in here("status", bucket)
    assert here("ls", bucket).splitlines() == ["a", "dir/"]
    assert bucket.name in here("ls", service.mount).splitlines()


# --- names -----------------------------------------------------------------------------------------------
def test_ls_shows_one_level_or_all(service: Service, bucket: Path) -> None:
    assert bucket.name in good("ls", str(service.mount)).splitlines()
    assert bucket.name in good("ls", "--at", str(service.mount)).splitlines()
    assert good("ls", str(bucket)).splitlines() == ["a", "dir/"]
    assert good("ls", str(bucket / "dir")).splitlines() == ["b", "sub/"]
    every = good("ls", "-r", str(bucket)).splitlines()
    assert [name for name in every if not name.endswith("/")] == ["a", "dir/b", "dir/sub/c"]
    assert good("ls", str(bucket / "a")).splitlines() == [f"{bucket.name}/a"]
    assert good("ls", "--at", str(service.mount), f"{bucket.name}/dir").splitlines() == ["b", "sub/"]


def test_ls_long_and_json_tell_size_and_kind(bucket: Path) -> None:
    line = next(line for line in good("ls", "-l", str(bucket)).splitlines() if line.endswith(" a"))
    assert line.startswith("-rw")
    assert line.split()[3] == "5"
    found = json.loads(good("ls", "--json", str(bucket)))
    assert [(entry["key"], entry["is_directory"], entry["size_bytes"]) for entry in found] == [
        ("a", False, 5),
        ("dir/", True, 0),
    ]


def test_ls_and_stat_show_where_a_link_leads(service: Service, bucket: Path) -> None:
    (bucket / "link").symlink_to("a/there")
    assert "link -> a/there" in good("ls", str(bucket)).splitlines()
    long = next(line for line in good("ls", "-l", str(bucket)).splitlines() if "link" in line)
    assert long.startswith("lrwxrwxrwx")
    assert long.endswith("link -> a/there")
    assert "link -> a/there" in good("stat", service.name(bucket / "link"), "--at", str(service.mount))
    [found] = [each for each in json.loads(good("ls", "--json", str(bucket))) if each["key"].endswith("link")]
    assert (found["target"], found["size_bytes"]) == ("a/there", 7)
    good("rm", str(bucket / "link"))
    assert not os.path.lexists(bucket / "link")


def test_stat_tells_what_the_kernel_tells(bucket: Path) -> None:
    kernel = (bucket / "a").stat()
    [found] = json.loads(good("stat", "--json", str(bucket / "a")))
    assert found["name"] == f"{bucket.name}/a"
    assert (found["size_bytes"], found["ino"], found["mtime_ns"]) == (5, kernel.st_ino, kernel.st_mtime_ns)
    assert found["mode"] == kernel.st_mode & 0o7777
    assert "5 bytes" in good("stat", str(bucket / "a"))
    assert "drw" in good("stat", str(bucket / "dir"))


@pytest.mark.parametrize("command", ["stat", "pin", "unpin", "evict", "rm", "ls"])
def test_a_name_that_is_not_there_is_code_3(bucket: Path, command: str) -> None:
    assert f"{bucket.name}/none" in bad(3, command, str(bucket / "none"))
    assert "no-such-bucket" in bad(3, command, str(bucket.parent / "no-such-bucket"))


def test_pins_hold_until_unpinned(bucket: Path) -> None:
    good("pin", str(bucket / "a"))
    assert json.loads(good("stat", "--json", str(bucket / "a")))[0]["pinned"] is True
    good("unpin", str(bucket / "a"))
    assert json.loads(good("stat", "--json", str(bucket / "a")))[0]["pinned"] is False


def test_evict_by_name_takes_exactly_that(bucket: Path) -> None:
    assert good("evict", str(bucket / "a")).endswith("freed\n")
    assert not (bucket / "a").exists()
    assert (bucket / "dir" / "b").read_bytes() == b"bytes"


def test_evict_by_size_frees_room(service: Service, bucket: Path) -> None:
    for n in range(8):
        (bucket / f"big{n}").write_bytes(os.urandom(1 << 20))
    good("pin", str(bucket / "big0"))
    good("evict", "--bytes", "256MiB", "--at", str(service.mount))
    assert (bucket / "big0").exists()
    assert not (bucket / "big1").exists()
    assert "a size is" in run_kvfs("evict", "--bytes", "x", "--at", str(service.mount)).stderr
    assert run_kvfs("evict", "--bytes", "1", str(bucket / "big0")).returncode == 2


def test_rm_removes_objects_directories_and_buckets(service: Service, bucket: Path) -> None:
    good("rm", str(bucket / "a"))
    assert not (bucket / "a").exists()
    assert "not empty" in bad(1, "rm", str(bucket / "dir"))
    good("rm", "-r", str(bucket / "dir"))
    assert list(bucket.iterdir()) == []
    good("rm", str(bucket))
    assert not bucket.exists()
    bad(3, "rm", str(bucket))


def test_paths_on_the_mount_itself_and_bad_names_are_refused(service: Service) -> None:
    assert "mount itself" in bad(1, "stat", str(service.mount))
    assert "1024" in bad(1, "stat", "--at", str(service.mount), "bucket/" + "k" * 1025)


def test_the_readme_names_every_command() -> None:
    [row] = [
        line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| command line |")
    ]
    assert sorted(re.findall(r"`(?:kvfs )?([a-z]+)`", row)) == sorted(
        command.name or "" for command in COMMANDS
    )


# --- bench -----------------------------------------------------------------------------------------------
def test_a_figure_that_fails_costs_no_other() -> None:
    """Without fio, and without mount(8) for the tmpfs that two figures measure in."""
    figures = ["mount.pread_4k", "nvme.read_1m_qd8", "memcpy.1m", "mount.pread_1m"]
    wanted = ["--only", ",".join(figures), "--seconds", "0.05"]
    done = run_kvfs("bench", "--json", *wanted, timeout_s=120, environment={"PATH": "/nowhere"})
    assert done.returncode == 1
    assert [figure["name"] for figure in json.loads(done.stdout)] == ["memcpy.1m"]
    failed = done.stderr.splitlines()[-1]
    assert failed.startswith("kvfs: bench: 3 of 4 figures failed: mount.pread_4k: FileNotFoundError: ")
    assert "; nvme.read_1m_qd8: fio, which the device is measured against, is missing" in failed
    assert "; mount.pread_1m: FileNotFoundError: " in failed
    assert "Traceback" not in done.stderr


def test_make_bench_installs_what_figures_need() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    recipe = (ROOT / "Makefile").read_text().partition("$(STAMPS)/bench:")[2].partition("\n\n")[0]
    installed = re.search(r"'\.\[([a-z,]+)\]'", recipe)
    assert installed is not None
    assert set(installed[1].split(",")) == set(extras) - {"cli", "server-no-mount", "torch", "plot", "dev"}


def test_bench_measures_in_a_running_service_and_cleans_up(service: Service) -> None:
    wanted = ["--only", "memcpy.1m,mount.pread_4k", "--seconds", "0.05"]
    done = run_kvfs("bench", "--json", *wanted, "--at", str(service.mount), timeout_s=60)
    if "tmpfs of its own" in done.stderr:
        pytest.skip("no right to mount a tmpfs")
    copied, read = json.loads(done.stdout)
    assert set(read) == {"name", "value", "unit", "baseline", "ratio", "p99", "baseline_p99"}
    assert (copied["name"], copied["ratio"]) == ("memcpy.1m", None)
    assert read["ratio"] == pytest.approx(read["baseline"] / read["value"])
    assert not any("bench" in name for name in os.listdir(service.mount))
    assert "kvfs-bench" not in Path("/proc/self/mounts").read_text()
    assert median([read["value"], read["baseline"]]) > 0
