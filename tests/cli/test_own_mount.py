"""The service and its own mount: it never looks into it, and does not go on without one."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from pathlib import Path

import pytest

from kvfs.client import connect, discovery
from kvfs.config.load import load
from kvfs.errors import ConfigError
from kvfs.service import check_places
from tests.support.door import BUCKET, need_mount
from tests.support.service import MODES, ROOT, Service, mounts_under
from tests.support.waits import WAIT_S

DRAM = "64MiB"
_PIDFD_GETFD = 438


def looks(service: Service) -> list[str]:
    notes = service.base / "looks"
    return notes.read_text().splitlines() if notes.exists() else []


@pytest.mark.mount
@pytest.mark.parametrize("mode", MODES)
def test_the_service_never_looks_into_its_own_mount(mode: str) -> None:
    """Killed while one of its threads does, it would wait in the kernel for itself, and never end."""
    need_mount()
    service = Service(mode=mode, dram=DRAM, nvme="64MiB")
    service.environment = {
        "KVFS_TEST_UNDER": str(service.mount),
        "KVFS_TEST_LOOKS": str(service.base / "looks"),
        "PYTHONPATH": f"{ROOT / 'tests/support/looks'}{os.pathsep}{ROOT}",
    }
    try:
        # What it does before it mounts and after it has unmounted is no look into its mount: the mount is what counts.
        service.start()
        before = looks(service)
        (service.mount / BUCKET).mkdir()
        (service.mount / BUCKET / "file").write_bytes(b"bytes")
        with connect(service.mount) as client:
            client.status()
        service.stop()
        assert looks(service) == before, "once it has started"
        made_at = max(i for i, look in enumerate(before) if "mkdir" in look)
        assert all(look.split()[1] in ("stat", "os.mkdir") for look in before[: made_at + 2]), before
        assert before[made_at + 2 :] == [], "while it starts"
    finally:
        service.close()


@pytest.mark.parametrize(
    ("path", "under"),
    [
        ("mount", True),
        ("mount/data", True),
        ("link/data", True),
        ("chain/deep", True),
        ("beside/../mount/data", True),
        ("beside/data", False),
        ("mounted", False),
        ("away", False),
        ("circle/data", False),
        ("relative/data", True),
    ],
)
def test_what_a_mount_point_would_hide_is_found_through_links(tmp_path: Path, path: str, under: bool) -> None:
    mount = tmp_path / "mount"
    (tmp_path / "beside").mkdir()
    (tmp_path / "link").symlink_to(mount)
    (tmp_path / "chain").symlink_to(tmp_path / "beside" / "inner")
    (tmp_path / "beside" / "inner").symlink_to(mount / "deeper")
    (tmp_path / "relative").symlink_to("beside/../link")
    (tmp_path / "away").symlink_to("/usr")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert discovery.leads_under(tmp_path / path, mount) is under
    through = tmp_path / "through"
    through.symlink_to(tmp_path)
    assert discovery.leads_under(tmp_path / path, through / "mount") is under


@pytest.mark.parametrize("key", ["store.data", "nvme.path", "session.socket", "s3.certificate", "s3.key", ""])
def test_settings_that_lead_into_the_mount_are_refused(tmp_path: Path, key: str) -> None:
    mount, link = tmp_path / "mount", tmp_path / "link"
    mount.mkdir()
    link.symlink_to(mount)
    table, _, name = key.partition(".")
    places = {"mount": {"path": mount}, "store": {"data": tmp_path / "data"}, "s3": {}}
    places.setdefault(table, {})[name] = link / "inside"
    if table == "s3":
        places["s3"] |= dict.fromkeys({"certificate", "key"} - {name}, tmp_path / "other")
    file = (link if not key else tmp_path) / "kvfs.toml"
    file.write_text(
        "".join(
            f"[{table}]\n" + "".join(f'{name} = "{path}"\n' for name, path in within.items())
            for table, within in places.items()
            if table
        )
    )
    with pytest.raises(ConfigError, match="lies under the mount point"):
        check_places(load(file))


def end_the_relay(service: Service) -> None:
    """Cut, from outside, the connection on which the native loop hears from the FUSE library."""
    pidfd = os.pidfd_open(service.pid)
    numbers = sorted(int(name) for name in os.listdir(f"/proc/{service.pid}/fd"))
    for number in numbers:
        try:
            name = os.readlink(f"/proc/{service.pid}/fd/{number}")
        except FileNotFoundError:  # closed since
            continue
        if not name.startswith("socket:"):
            continue
        taken = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, number, 0)
        assert taken >= 0, os.strerror(ctypes.get_errno())
        with socket.socket(fileno=taken) as found:
            if (found.family, found.type) == (socket.AF_UNIX, socket.SOCK_SEQPACKET):
                found.shutdown(socket.SHUT_RD)  # the loop's end: it was made first
                break
    os.close(pidfd)


@pytest.mark.mount
def test_a_mount_that_cannot_go_on_ends_with_the_service() -> None:
    need_mount()
    service = Service(mode="auto", dram=DRAM)
    try:
        service.start()
        end_the_relay(service)
        assert service.running.wait(WAIT_S) not in (0, -signal.SIGKILL)
        assert mounts_under(service.base) == []
        assert "cannot go on: replies of the FUSE library: Broken pipe" in service.log()
        assert "stopping:" in service.log()
        assert "Traceback" not in service.log()
        service.start()
        service.stop()
    finally:
        service.close()
