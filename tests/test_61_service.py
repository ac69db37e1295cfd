"""The service as a process: start, what it refuses, how it stops, what a kill leaves behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from service_process import CAN_MOUNT, EXIT_WAIT_S, ServiceProcess, run_kvfs

from kvfs import addresses, limits

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(not CAN_MOUNT, reason="needs root and /dev/fuse"),
]


def test_it_says_what_runs_and_tells_its_manager(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service:
        status = service.ready().wait_for("STATUS=")
        assert "64 MiB" in status
        assert str(service.mount) in status
        shown = service.output.read_text()
        for expected in (str(service.data), str(service.mount), str(service.data / "kvfs.sock"), "64 MiB"):
            assert expected in shown
        assert shown.endswith("ready\n")
        assert service.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    with ServiceProcess(tmp_path) as service:
        service.ready()
        assert service.stop(number) == 0
        service.wait_for("STOPPING=1")
        assert service.mount not in addresses.mounts()
        assert json.loads((service.data / "format.json").read_text())["clean"] is True
        assert "ERROR" not in service.errors.read_text()


def test_objects_survive_a_clean_restart_or_are_gone_but_never_wrong(tmp_path: Path) -> None:
    payload = bytes(range(256)) * 4096
    with ServiceProcess(tmp_path) as service:
        service.ready()
        (service.mount / "bucket").mkdir()
        (service.mount / "bucket" / "object").write_bytes(payload)
        assert service.stop() == 0
    with ServiceProcess(tmp_path) as service:
        service.ready()
        again = service.mount / "bucket" / "object"
        assert not again.exists() or again.read_bytes() == payload


def test_a_second_service_on_the_same_data_is_told_who_has_it(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service:
        service.ready()
        second = run_kvfs("serve", f"--data={service.data}", f"--mount={tmp_path / 'mnt2'}", "--dram=64MiB")
        assert second.returncode == 1
        assert second.stderr.startswith("kvfs: ")
        assert str(service.data) in second.stderr
        assert str(service.process.pid) in second.stderr
        assert service.process.poll() is None
        (service.mount / "still-works").mkdir()


def test_the_mount_that_a_kill_left_is_cleared_by_the_next_start(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service:
        service.ready()
        service.process.kill()
        service.process.wait(EXIT_WAIT_S)
        assert service.mount in addresses.mounts()
        with pytest.raises(OSError, match=os.strerror(errno.ENOTCONN)):
            service.mount.stat()
        with ServiceProcess(tmp_path) as again:
            again.ready()
            assert addresses.mounts().count(again.mount) == 1
            (again.mount / "bucket").mkdir()
            assert again.stop() == 0


def test_the_mount_that_a_kill_left_is_cleared_by_umount(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service:
        service.ready()
        service.process.kill()
        service.process.wait(EXIT_WAIT_S)
        assert run_kvfs("status", "--at", str(service.mount)).returncode == 4
        assert run_kvfs("umount", str(service.mount)).returncode == 0
        assert service.mount not in addresses.mounts()


def test_unmounting_from_outside_stops_the_service(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service:
        service.ready()
        assert run_kvfs("umount", str(service.mount)).returncode == 0
        assert service.process.wait(EXIT_WAIT_S) == 0
        service.wait_for("STOPPING=1")


@pytest.mark.parametrize("mode", ["plain", "native"])
def test_a_slower_mode_can_be_asked_for(tmp_path: Path, mode: str) -> None:
    with ServiceProcess(tmp_path, f"--mode={mode}") as service:
        assert f"{mode} mount" in service.ready().wait_for("STATUS=")
        (service.mount / "bucket").mkdir()
        (service.mount / "bucket" / "object").write_bytes(b"x" * 5000)
        assert (service.mount / "bucket" / "object").read_bytes() == b"x" * 5000
        assert service.stop() == 0


def test_a_newer_data_directory_is_left_alone(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    text = json.dumps({"format": 99, "store_id": "00" * 16, "clean": True})
    (data / "format.json").write_text(text)
    refused = run_kvfs("serve", f"--data={data}", f"--mount={tmp_path / 'mnt'}", "--dram=64MiB")
    assert refused.returncode == 1
    assert "99" in refused.stderr
    assert str(data) in refused.stderr
    assert (data / "format.json").read_text() == text
    assert (tmp_path / "mnt") not in addresses.mounts()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dram=1MiB"], "[dram] capacity = '1MiB': at least 16 MiB"),
        (["--slots=1"], "[dram] slots = 1: at least"),
        (["--mode=fast"], "[mount] mode = 'fast'"),
        (["--mode=plain", "--no-passthrough"], "--no-passthrough contradicts --mode plain"),
        (["--config=none.toml"], "none.toml: No such file"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_made(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    refused = run_kvfs("serve", f"--data={tmp_path / 'data'}", f"--mount={tmp_path / 'mnt'}", *arguments)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert not (tmp_path / "data").exists()


def test_data_under_the_mount_point_is_refused(tmp_path: Path) -> None:
    refused = run_kvfs(
        "serve", f"--data={tmp_path / 'mnt' / 'data'}", f"--mount={tmp_path / 'mnt'}", "--dram=64MiB"
    )
    assert refused.returncode == 2
    assert "lies under the mount point" in refused.stderr


def test_an_unknown_group_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "kvfs.toml"
    config.write_text('[session]\ngroup = "no-such-group-here"\n')
    refused = run_kvfs(
        "serve",
        f"--config={config}",
        f"--data={tmp_path / 'data'}",
        f"--mount={tmp_path / 'mnt'}",
        "--dram=64MiB",
    )
    assert refused.returncode == 2
    assert "[session] group = 'no-such-group-here'" in refused.stderr


def test_names_over_their_limits_are_refused_by_the_mount(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service:
        service.ready()
        (service.mount / ("b" * limits.MAX_BUCKET_NAME_BYTES)).mkdir()
        bucket = service.mount / "bucket"
        bucket.mkdir()
        (bucket / ("c" * limits.MAX_COMPONENT_BYTES)).write_bytes(b"1")
        deep = bucket.joinpath(*["d" * 200] * 5)
        deep.mkdir(parents=True)
        (deep / ("e" * (limits.MAX_KEY_BYTES - 5 * 201))).write_bytes(b"1")
        for path in (
            service.mount / ("b" * (limits.MAX_BUCKET_NAME_BYTES + 1)) / "object",
            bucket / ("c" * (limits.MAX_COMPONENT_BYTES + 1)),
            deep / ("e" * (limits.MAX_KEY_BYTES - 5 * 201 + 1)),
        ):
            with pytest.raises(OSError, match=os.strerror(errno.ENAMETOOLONG)):
                _write_with_parent(path)
        assert service.stop() == 0


def test_it_takes_the_descriptors_that_the_hard_limit_allows(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service:
        service.ready()
        lines = Path(f"/proc/{service.process.pid}/limits").read_text().splitlines()
        soft, hard = next(line.split()[3:5] for line in lines if line.startswith("Max open files"))
        assert soft == hard


def _write_with_parent(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"1")


STUCK = """
import os, signal, sys, threading, time
from pathlib import Path
import trio
from kvfs import limits, service

limits.STOP_WAIT_S = float(sys.argv[1])
signals = int(sys.argv[2])

async def stop_that_hangs(task_status=trio.TASK_STATUS_IGNORED):
    try:
        task_status.started()
        await trio.sleep_forever()
    finally:
        if signals == 1:
            time.sleep(60)  # the event loop itself is stuck
        os.kill(os.getpid(), signal.SIGTERM)
        with trio.CancelScope(shield=True):
            await trio.sleep_forever()

async def main():
    stop = trio.CancelScope()
    with service._Watchdog(Path(sys.argv[3])) as watchdog:
        async with trio.open_nursery() as nursery:
            await nursery.start(service._stop_on_signal, stop, watchdog)
            with stop:
                os.kill(os.getpid(), signal.SIGTERM)
                await stop_that_hangs()

trio.run(main)
"""


@pytest.mark.parametrize(
    ("stop_wait_s", "signals", "why"), [("0.2", "1", "took too long"), ("60", "2", "second")]
)
def test_a_stop_that_hangs_ends_by_the_clock_or_by_a_second_signal(
    tmp_path: Path, stop_wait_s: str, signals: str, why: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STUCK, stop_wait_s, signals, str(tmp_path / "mnt")],
        capture_output=True,
        text=True,
        timeout=EXIT_WAIT_S,
    )
    assert ended.returncode == 1
    assert why in ended.stderr
