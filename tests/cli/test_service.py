"""The service as a process: start, what it refuses, how it stops, what a kill leaves behind."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from time import sleep

import pytest

from kvfs import limits
from kvfs.client import connect, discovery
from tests.support.door import need_mount
from tests.support.service import ROOT, STOP_WAIT_S, Service, run_kvfs

DRAM = "64MiB"


@pytest.fixture
def service() -> Iterator[Service]:
    """One that runs, in the fastest mode of this machine; a test may end it as it likes."""
    need_mount()
    service = Service(mode="auto", dram=DRAM)
    try:
        yield service.start()
    finally:
        service.close()


@pytest.fixture
def stopped() -> Iterator[Service]:
    """One that was not started."""
    need_mount()
    service = Service(mode="auto", dram=DRAM)
    try:
        yield service
    finally:
        service.close()


def refuse(service: Service, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Start in vain: what it said and its code."""
    refused = run_kvfs(*service.command()[3:], *arguments)
    assert refused.returncode != 0
    assert refused.stderr.startswith("kvfs: ") or "Error" in refused.stderr
    assert "Traceback" not in refused.stderr
    return refused


def test_it_says_what_runs_and_tells_its_manager(service: Service) -> None:
    status = service.wait_told("STATUS=")
    assert "64 MiB" in status
    assert str(service.mount) in status
    shown = service.log()
    for expected in (str(service.data), str(service.mount), str(service.data / "kvfs.sock"), "64 MiB"):
        assert expected in shown
    assert "\nready\n" in shown
    assert "try, in another terminal" not in shown


def test_it_shows_a_watchdog_that_it_lives_where_one_watches(stopped: Service) -> None:
    stopped.environment["WATCHDOG_USEC"] = "30000000"
    stopped.start().wait_told("WATCHDOG=1")


def test_without_a_watchdog_it_says_nothing(service: Service) -> None:
    assert service.signal(signal.SIGTERM) == 0
    service.wait_told("STOPPING=1")
    assert not any(told.startswith("WATCHDOG") for told in service.told)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly(service: Service, number: signal.Signals) -> None:
    assert service.signal(number) == 0
    service.wait_told("STOPPING=1")
    assert service.mount not in discovery.mounts()
    assert json.loads((service.data / "format.json").read_text())["clean"] is True
    assert "ERROR" not in service.log()
    assert not (service.data / "kvfs.sock").exists()


def test_a_session_may_ask_it_to_stop(service: Service) -> None:
    with connect(service.mount) as client:
        client.shutdown()
    assert service.running.wait(STOP_WAIT_S) == 0
    service.wait_told("STOPPING=1")


def test_a_second_service_on_the_same_data_is_told_who_has_it(service: Service, tmp_path: Path) -> None:
    second = refuse(service, "--mount", str(tmp_path / "mnt2"))
    assert second.returncode == 1
    assert str(service.data) in second.stderr
    assert str(service.pid) in second.stderr
    assert service.running.poll() is None
    (service.mount / "still-works").mkdir()


def test_a_second_service_on_the_same_mount_point_is_refused(service: Service, tmp_path: Path) -> None:
    second = refuse(service, "--data", str(tmp_path / "data2"))
    assert str(service.mount) in second.stderr
    (service.mount / "still-works").mkdir()
    assert discovery.mounts().count(service.mount) == 1


def test_the_mount_that_a_kill_left_is_cleared_by_the_next_start(service: Service) -> None:
    service.kill()
    assert service.mount in discovery.mounts()
    with pytest.raises(OSError, match=os.strerror(errno.ENOTCONN)):
        service.mount.stat()
    service.restart()
    assert discovery.mounts().count(service.mount) == 1
    (service.mount / "bucket").mkdir()
    assert service.signal(signal.SIGTERM) == 0


def test_the_mount_that_a_kill_left_is_cleared_by_umount(service: Service) -> None:
    service.kill()
    assert run_kvfs("status", "--at", str(service.mount)).returncode == 4
    assert run_kvfs("umount", str(service.mount)).returncode == 0
    assert service.mount not in discovery.mounts()


def test_unmounting_from_outside_stops_the_service(service: Service) -> None:
    assert run_kvfs("umount", str(service.mount)).returncode == 0
    assert service.running.wait(STOP_WAIT_S) == 0
    service.wait_told("STOPPING=1")


@pytest.mark.parametrize("mode", ["plain", "native"])
def test_a_slower_mode_can_be_asked_for(stopped: Service, mode: str) -> None:
    stopped.mode = mode
    service = stopped.start()
    assert f"{mode} mount" in service.wait_told("STATUS=")
    assert f"{service.mount}, {mode}\n" in service.log()
    (service.mount / "bucket").mkdir()
    (service.mount / "bucket" / "object").write_bytes(b"x" * 5000)
    assert (service.mount / "bucket" / "object").read_bytes() == b"x" * 5000
    assert service.signal(signal.SIGTERM) == 0


def test_the_mode_that_was_got_is_named_at_the_start(stopped: Service) -> None:
    stopped.mode = "auto"
    service = stopped.start()
    with service.client() as client:
        mode = client.status()["mount"]["mode"]
    assert f"{mode} mount" in service.wait_told("STATUS=")
    assert f"{service.mount}, {mode}\n" in service.log()


def test_a_newer_data_directory_is_left_alone(stopped: Service) -> None:
    text = json.dumps({"format": 99, "store_id": "00" * 16, "clean": True})
    (stopped.data / "format.json").write_text(text)
    refused = refuse(stopped)
    assert refused.returncode == 1
    assert "99" in refused.stderr
    assert str(stopped.data) in refused.stderr
    assert (stopped.data / "format.json").read_text() == text
    assert stopped.mount not in discovery.mounts()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dram=1MiB"], "[dram] capacity = '1MiB': at least 16 MiB"),
        (["--dram=900TiB"], "[dram] capacity = '900 TiB': there are "),
        (["--nvme=900TiB"], "[nvme] capacity = '900 TiB': the filesystem of "),
        (["--dram=16MiB", "--s3=127.0.0.1:0"], "[s3] has no credentials"),
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


def test_what_it_takes_is_said_before_it_is_taken(tmp_path: Path) -> None:
    """Of a start that fails where it makes the segment files."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "nvme").write_text("a file, where a directory is wanted")
    failed = run_kvfs("serve", "--no-mount", f"--data={data}", "--dram", DRAM, timeout_s=60)
    assert failed.returncode != 0
    assert re.match(
        rf"takes +up to 64 MiB of DRAM, [1-4](\.\d)? [GM]iB of disk in {data}/nvme; "
        r"other sizes: --dram SIZE, --nvme SIZE\n",
        failed.stdout,
    )
    without = ["--no-mount", f"--data={data}/nvme/under-a-file", "--dram", DRAM, "--nvme", "0"]
    failed = run_kvfs("serve", *without, timeout_s=60)
    assert failed.returncode != 0
    assert failed.stdout.startswith("takes    up to 64 MiB of DRAM, no NVMe tier; other sizes: ")


def test_data_under_the_mount_point_is_refused(tmp_path: Path) -> None:
    refused = run_kvfs(
        "serve", f"--data={tmp_path / 'mnt' / 'data'}", f"--mount={tmp_path / 'mnt'}", "--dram", DRAM
    )
    assert refused.returncode == 2
    assert "lies under the mount point" in refused.stderr
    assert not (tmp_path / "mnt").exists()


def test_an_unknown_group_is_refused(stopped: Service) -> None:
    config = stopped.base / "kvfs.toml"
    config.write_text('[session]\ngroup = "no-such-group-here"\n')
    refused = refuse(stopped, "--config", str(config))
    assert refused.returncode == 2
    assert "[session] group = 'no-such-group-here'" in refused.stderr


def test_a_mount_point_that_is_a_file_is_refused(stopped: Service) -> None:
    stopped.mount.rmdir()
    stopped.mount.write_text("")
    refused = refuse(stopped)
    assert refused.returncode == 2
    assert str(stopped.mount) in refused.stderr


def test_names_over_their_limits_are_refused_by_the_mount(service: Service) -> None:
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
    assert service.signal(signal.SIGTERM) == 0


def test_it_takes_the_descriptors_that_the_hard_limit_allows(stopped: Service) -> None:
    own = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, own[1]))
    try:
        service = stopped.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, own)
    lines = Path(f"/proc/{service.pid}/limits").read_text().splitlines()
    soft, hard = next(line.split()[3:5] for line in lines if line.startswith("Max open files"))
    assert soft == hard


CREATOR = """
import os, sys
from itertools import count

try:
    for n in count():
        open(f"{sys.argv[1]}/created-{os.getpid()}-{n}", "wb").close()
        if n == 0:
            print("ready", flush=True)
except OSError:
    pass  # the service was killed
"""
EVICTOR = """
import sys
from kvfs.client import connect

with connect(sys.argv[1]) as client:
    names = [entry.name for entry in client.list("bucket/")]
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        client.evict(*names)
    except Exception:
        pass  # the service was killed
"""


def _python(code: str, argument: Path) -> subprocess.Popen[str]:
    """Start Python code, and wait until it says that it is ready."""
    started = subprocess.Popen(
        [sys.executable, "-c", code, str(argument)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert started.stdout is not None
    started.stdout.readline()
    return started


def test_a_kill_amid_notifications_holds_nobody_up(service: Service) -> None:
    """While the service evicts many names of a directory, callers who create in it wait for the service, and its
    notifying thread waits for them. A kill at that moment leaves both waiting, with the data still locked."""
    bucket = service.mount / "bucket"
    for round_number in range(3):
        bucket.mkdir(exist_ok=True)
        for n in range(500):
            (bucket / f"evicted-{n}").write_bytes(b"x")
        # The creators last: they create for as long as another start takes, which the next start has to go through.
        with (
            _python(EVICTOR, service.mount) as evictor,
            _python(CREATOR, bucket) as one,
            _python(CREATOR, bucket) as two,
        ):
            assert evictor.stdin is not None
            evictor.stdin.write("begin\n")
            # Not synchronisation: each round meets another moment of the eviction.
            sleep(0.02 + 0.01 * round_number)
            killed = service.running
            killed.kill()
            service.start()
            assert killed.wait(STOP_WAIT_S) == -signal.SIGKILL
            for caller in (one, two, evictor):
                caller.wait(STOP_WAIT_S)
    assert service.signal(signal.SIGTERM) == 0


def _write_with_parent(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"1")


GONE = (errno.ENOTCONN, errno.ECONNABORTED, errno.ENOENT)
"""What a program is told whose mount ends: without a mount there is the empty directory, and no right name in it."""
RENAMING = 6


def test_a_stop_beside_renames_answers_them_or_ends_them(stopped: Service) -> None:
    stopped.nvme, stopped.arguments = "64MiB", ["--config", str(stopped.base / "kvfs.toml")]
    (stopped.base / "kvfs.toml").write_text('[nvme]\nsegment = "1MiB"\n')
    for life in range(4):
        stopped.start()
        with connect(stopped.mount) as client:
            client.create_bucket(f"kept{life}", durable=True)
        directory = stopped.mount / f"kept{life}"
        wrong: list[OSError] = []
        made = threading.Barrier(RENAMING + 1)

        def change(old: Path, wrong: list[OSError] = wrong, made: threading.Barrier = made) -> None:
            new = old.with_suffix(".new")
            try:
                old.write_bytes(b"x" * 10_000)
                for round_ in range(100_000):
                    old.rename(new)
                    old, new = new, old
                    if round_ == 20:
                        made.wait()
            except OSError as error:
                if error.errno not in GONE:
                    wrong.append(error)

        threads = [threading.Thread(target=change, args=(directory / f"{n}",)) for n in range(RENAMING)]
        for thread in threads:
            thread.start()
        made.wait()
        stopped.stop()
        for thread in threads:
            thread.join(STOP_WAIT_S)
        assert not any(thread.is_alive() for thread in threads), "callers wait for a mount that is gone"
        assert not wrong
        assert "Traceback" not in stopped.log()


STUCK = """
import os, signal, sys, threading, time
from pathlib import Path
from time import sleep
import trio
from kvfs import limits, service_stop

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
    with service_stop.Watchdog(Path(sys.argv[3])) as watchdog:
        async with trio.open_nursery() as nursery:
            await nursery.start(service_stop.stop_on_signal, stop, watchdog)
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
        timeout=STOP_WAIT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 1
    assert why in ended.stderr
