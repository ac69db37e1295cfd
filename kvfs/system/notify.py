"""Notifications of the service manager: systemd's notification datagrams and the journal's log levels.

Responsibility: READY=1, STATUS= and STOPPING=1 over $NOTIFY_SOCKET, and log lines for journald or a terminal, bounded
per cause (`kvfs.system.bounded_log`). Without a manager notifications do nothing. Concurrency: any thread.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys

from kvfs.system.bounded_log import BoundedLines

log = logging.getLogger("kvfs.notify")


def notify(*states: str) -> None:
    """Send assignments such as "READY=1" to the service manager, if there is one."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.connect(address)
            sender.sendall("\n".join(states).encode())
    except OSError as error:
        log.warning(
            "the service manager at %s was not notified of %s: %s", address, states[0], error.strerror
        )


def watchdog_wanted() -> bool:
    """Return whether the service manager restarts a service that stops sending WATCHDOG=1 (sd_watchdog_enabled(3))."""
    return bool(os.environ.get("WATCHDOG_USEC")) and os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(
        os.getpid()
    )


class JournalFormatter(logging.Formatter):
    """Format lines as `<priority>name: message`: journald removes the priority and adds the time."""

    _PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))

    def format(self, record: logging.LogRecord) -> str:
        priority = next((number for level, number in self._PRIORITIES if record.levelno >= level), 7)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines())


def set_up_logging(level: str) -> None:
    """Log to stderr at `level`. REQUIRES one call, at the start of the process."""
    handler = logging.StreamHandler(sys.stderr)
    if os.environ.get("JOURNAL_STREAM"):
        handler.setFormatter(JournalFormatter("%(name)s: %(message)s"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    bounds = BoundedLines(handler)
    handler.addFilter(bounds)
    atexit.register(bounds.report, everything=True)
    root = logging.getLogger("kvfs")
    root.handlers = [handler]
    root.setLevel(level.upper())
    root.propagate = False
