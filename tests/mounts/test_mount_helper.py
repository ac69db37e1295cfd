"""A fusermount3 that does not end, as one that waits for a mount that is stuck: kvfs goes on without it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvfs import limits
from kvfs.errors import DeviceMissing
from kvfs.system import linux
from mounts.mount_point import abort, mount_by_helper


@pytest.fixture(autouse=True)
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put one that never ends before all others."""
    program = tmp_path / "fusermount3"
    program.write_text("#!/bin/sh\nexec sleep 4242\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(limits, "STOP_WAIT_S", 0.5)


def test_an_unmount_that_does_not_end_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(point: Path, flags: int = 0) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(point))

    monkeypatch.setattr(linux, "unmount", refuse)
    abort(tmp_path)
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}: fusermount3 has not unmounted it in 0.5 s"
    ]


def test_a_mount_that_does_not_come_is_said(tmp_path: Path) -> None:
    with pytest.raises(DeviceMissing, match=r"^fusermount3 has not mounted in 0\.5 s$"):
        mount_by_helper(tmp_path, allow_other=False)
