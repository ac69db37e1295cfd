"""Configuration: sizes, bounds, unknown keys, who wins, and what the messages say."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs import limits
from kvfs.config import sizes
from kvfs.config.capacities import default_dram_bytes
from kvfs.config.disk_room import check_disks, segment_files
from kvfs.config.load import load
from kvfs.config.settings import Settings
from kvfs.errors import ConfigError
from tests.support.service import ROOT


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("10GiB", 10 << 30),
        (" 10 GiB ", 10 << 30),
        ("1.5 MiB", 3 << 19),
        ("500MB", 500_000_000),
        ("2TiB", 2 << 40),
        ("18446744073709551617", (1 << 64) + 1),
    ],
)
def test_sizes_that_are_meant(text: str | int, size_bytes: int) -> None:
    assert sizes.parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "10 gib", "-1", "1e9", "10GiB/s", "1..5MiB", "ten", "10 G"])
def test_sizes_that_are_not(text: str) -> None:
    with pytest.raises(ValueError, match="a size is"):
        sizes.parse_size(text)


@given(st.integers(min_value=0, max_value=1 << 60))
def test_a_shown_size_reads_back_within_its_rounding(size_bytes: int) -> None:
    shown = sizes.parse_size(sizes.format_size(size_bytes))
    assert abs(shown - size_bytes) <= max(size_bytes // 20, 0)


def test_defaults_are_valid_and_frozen() -> None:
    settings = load()
    assert settings.dram.capacity >= limits.MIN_DRAM_BYTES
    assert settings.mount.mode == "auto"
    with pytest.raises(ValueError, match="frozen"):
        settings.dram.slots = 1


def test_the_default_capacity_leaves_memory_to_others() -> None:
    free_kib = next(
        int(line.split()[1])
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    size_bytes = default_dram_bytes()
    assert limits.MIN_DRAM_BYTES <= size_bytes <= max(free_kib * 1024 // 2, limits.MIN_DRAM_BYTES)
    assert size_bytes % limits.MIB == 0


@pytest.mark.parametrize("text", ["", "[nvme]\n", '[nvme]\nio = "threads"\npath = "nvme"\n'])
@pytest.mark.parametrize(
    ("free_bytes", "taken_bytes"),
    [
        (1 << 50, 4 * limits.GIB),
        (8 * limits.GIB, 2 * limits.GIB),
        (4 * limits.MIN_NVME_BYTES, limits.MIN_NVME_BYTES),
        (4 * limits.MIN_NVME_BYTES - 4, 0),
    ],
)
def test_where_nobody_says_how_much_nvme_takes_a_few_gigabytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, free_bytes: int, taken_bytes: int
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvfs.config.disk_room._free_bytes", lambda directory: free_bytes)
    (tmp_path / "kvfs.toml").write_text(text)
    assert load(tmp_path / "kvfs.toml", {("store", "data"): "data"}).nvme_bytes == taken_bytes


@pytest.mark.parametrize(
    ("capacity", "slots"),
    [("64MiB", 1 << 17), ("8GiB", 1 << 17), ("64GiB", 1 << 20), ("1TiB", 1 << 24), ("4TiB", 1 << 24)],
)
def test_small_blocks_fill_a_tier_of_any_capacity(capacity: str, slots: int) -> None:
    assert load(None, {("dram", "capacity"): capacity}).dram.max_slots == slots
    assert load(None, {("dram", "capacity"): capacity, ("dram", "slots"): 70}).dram.max_slots == 70


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    file = tmp_path / "kvfs.toml"
    file.write_text('[dram]\ncapacity = "64MiB"\nslots = 1000\n[log]\nlevel = "debug"\n')
    settings = load(file, {("dram", "capacity"): "32MiB", ("log", "level"): None})
    assert settings.dram.capacity == 32 << 20
    assert settings.dram.slots == 1000
    assert settings.log.level == "debug"


def test_the_example_file_is_valid() -> None:
    example = Path(__file__).parents[2] / "packaging" / "kvfs.toml"
    settings = load(example)
    assert settings.store.data == Path("/var/lib/kvfs")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[dram]\ncapacity = "12MiB"', "[dram] capacity = '12MiB': at least 16 MiB"),
        ("[dram]\ncapacity = 1024", "[dram] capacity = 1024: at least 16 MiB"),
        ("[dram]\ncapacity = true", "[dram] capacity = True: a size is a number of bytes or text"),
        ('[dram]\ncapacity = "12 XB"', "units: B, KiB, MiB, GiB, TiB, kB, MB, GB, TB"),
        ("[dram]\nslots = 1", f"[dram] slots = 1: at least {limits.MIN_SLOTS}"),
        ("[dram]\nslots = 20000000", f"[dram] slots = 20000000: at most {limits.MAX_SLOTS}"),
        ('[dram]\nslots = "many"', "[dram] slots = 'many': input should be a valid integer"),
        ('[store]\npolicy = "fifo"', "[store] policy = 'fifo': must be 'default' or 'lru-leaf'"),
        ('[dram]\nbacking = "tape"', "[dram] backing = 'tape': must be 'auto', 'tmpfs' or 'directory'"),
        (
            '[mount]\nmode = "fast"',
            "[mount] mode = 'fast': must be 'auto', 'passthrough', 'native', 'plain' or 'off'",
        ),
        ("[mount]\npath = 5", "[mount] path = 5: must be a path"),
        ('[mount]\npath = ""', "[mount] path = '': a path cannot be empty"),
        ('[session]\nquota = "-5"', "[session] quota = '-5': a size is"),
        ("[session]\nquota = -5", "[session] quota = -5: at least 0 B"),
        ('[log]\nlevel = "chatty"', "[log] level = 'chatty': must be 'debug', 'info', 'warning' or 'error'"),
        ('[hbm]\ncapacity = "1MiB"', "[hbm] capacity = '1MiB': at least 128 MiB"),
        (
            '[hbm]\ndevice = "cuda:0"',
            "[hbm] device = 'cuda:0': must be \"auto\" or UUIDs of GPUs, as nvidia-smi -L",
        ),
        ("[dram]\ncapasity = 5", "[dram] capasity: no such key; there are capacity, slots, keep, backing"),
        (
            "[drum]\ncapacity = 5",
            "[drum]: no such section; there are store, hbm, dram, nvme, cold, mount, session, s3, events, conductor, "
            "proxy, cluster, log",
        ),
        ("capacity = 5", "capacity = 5: must stand in a section such as [store]"),
        ("[dram\n", "not TOML"),
        ('[session]\nsocket = "/' + "x" * 107 + '"', "108 bytes long: at most 107"),
    ],
)
def test_a_wrong_setting_is_named_with_its_limit(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "kvfs.toml"
    file.write_text(text + "\n")
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{file}: ")


def test_every_wrong_setting_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {("dram", "capacity"): "1B", ("log", "level"): "x"})
    assert "[dram] capacity" in str(caught.value)
    assert "[log] level" in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        load(tmp_path / "none.toml")


def test_the_socket_lies_with_the_data_while_its_path_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = load(None, {("store", "data"): "/srv/kvfs"})
    assert short.socket_path == Path("/srv/kvfs/kvfs.sock")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    deep = load(None, {("store", "data"): "/srv/" + "d" * 100})
    other = load(None, {("store", "data"): "/srv/" + "e" * 100})
    assert deep.socket_path.parent == Path("/run/user/7")
    assert deep.socket_path != other.socket_path
    chosen = load(None, {("session", "socket"): str(tmp_path / "s")})
    assert chosen.socket_path == tmp_path / "s"


def test_relative_paths_and_the_home_directory_become_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    settings = load(None, {("store", "data"): "~/data", ("mount", "path"): "mnt"})
    assert settings.store.data == Path("/home/someone/data")
    assert settings.mount.path == Path.cwd() / "mnt"


def test_the_example_has_every_key(tmp_path: Path) -> None:
    """As a comment where the default depends on the machine or the section is optional; with a value that holds."""
    example = ROOT / "packaging/kvfs.toml"
    keys, section = set(), ""
    for line in example.read_text().splitlines():
        if match := re.match(r"(?:# )?(?:\[(\w+)\]|(\w+) = )", line):
            section = match[1] or section
            keys.add((section, match[2]))
    sections = {name: type(getattr(Settings(), name)) for name in Settings.model_fields}
    assert keys == {(name, key) for name, kind in sections.items() for key in (None, *kind.model_fields)}
    everything = tmp_path / "kvfs.toml"
    everything.write_text(re.sub(r"(?m)^# (\[\w+\]|\w+ = )", r"\1", example.read_text()))
    load(everything)


def test_what_the_example_sets_are_the_defaults() -> None:
    without_capacity = {"dram": {"capacity"}}
    set_there, default = (load(file) for file in (ROOT / "packaging/kvfs.toml", None))
    assert set_there.model_dump(exclude=without_capacity) == default.model_dump(exclude=without_capacity)


def test_only_segment_files_that_are_missing_need_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full filesystem a start with all its files goes on."""
    monkeypatch.setattr("kvfs.config.disk_room._free_bytes", lambda directory: 0)
    with pytest.raises(ConfigError, match=r"\[nvme\] capacity = '8 MiB'"):
        check_disks([segment_files(8 * limits.MIB, tmp_path)])
    for number in range(8):
        (tmp_path / f"{number:08x}.seg").write_bytes(b"")
        os.truncate(tmp_path / f"{number:08x}.seg", limits.MIB)
    check_disks([segment_files(9 * limits.MIB - 1, tmp_path)])
    os.truncate(tmp_path / "00000003.seg", 5)
    check_disks([segment_files(9 * limits.MIB - 1, tmp_path)])
    with pytest.raises(ConfigError, match=r"\[nvme\] capacity = '9 MiB'"):
        check_disks([segment_files(9 * limits.MIB, tmp_path)])
