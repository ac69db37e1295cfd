"""What the service tells its manager and its log."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest

from kvfs.system.notify import JournalFormatter, notify, set_up_logging
from tests.support.waits import WAIT_S


@pytest.fixture
def receiver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listening.settimeout(WAIT_S)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    return listening


def test_assignments_arrive_in_one_datagram(receiver: socket.socket, tmp_path: Path) -> None:
    with receiver:
        receiver.bind(str(tmp_path / "notify"))
        notify("READY=1", "STATUS=up")
        assert receiver.recv(100) == b"READY=1\nSTATUS=up"


def test_an_abstract_socket_is_written_with_an_at_sign(
    receiver: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiver:
        receiver.bind(f"\0{tmp_path}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{tmp_path}")
        notify("STOPPING=1")
        assert receiver.recv(100) == b"STOPPING=1"


def test_a_manager_that_is_gone_is_a_warning(
    receiver: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.close()
    notify("READY=1")
    assert "was not notified of READY=1" in caplog.text


def test_without_a_manager_nothing_happens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
    assert not caplog.records


@pytest.mark.parametrize(
    ("level", "priority"),
    [(logging.DEBUG, 7), (logging.INFO, 6), (logging.WARNING, 4), (logging.ERROR, 3), (logging.CRITICAL, 3)],
)
def test_every_line_of_a_record_carries_its_priority(level: int, priority: int) -> None:
    record = logging.LogRecord("kvfs.x", level, "file", 1, "one\ntwo", None, None)
    assert (
        JournalFormatter("%(name)s: %(message)s").format(record)
        == f"<{priority}>kvfs.x: one\n<{priority}>two"
    )


def test_the_level_is_kept_to_and_other_libraries_stay_quiet(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    root = logging.getLogger("kvfs")
    before = root.handlers, root.level, root.propagate
    try:
        set_up_logging("warning")
        logging.getLogger("kvfs.store").info("not this")
        logging.getLogger("kvfs.store").warning("but this")
    finally:
        root.handlers, root.propagate = before[0], before[2]
        root.setLevel(before[1])
    err = capsys.readouterr().err
    assert "not this" not in err
    assert "WARNING kvfs.store: but this" in err
