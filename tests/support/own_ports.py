"""TCP ports that nobody else is given: for servers that take theirs a while after it was chosen, as engines do.

A port that the kernel picked and that was closed again may be somebody's before its server binds it: another server's
that asks for any, or of an outgoing connection. So these are below the range that the kernel picks from, and each
process of tests has a part of them to itself, kept by the name of a socket. The next few behind each are nobody's
either: each data-parallel rank of an engine takes one more.
"""

from __future__ import annotations

import errno
import itertools
import socket
from pathlib import Path
from typing import Final

_PARTS, _PART, _STEP = 32, 512, 4
_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


def _claim() -> tuple[socket.socket, int]:
    """Take a part; return what keeps it, and its first port."""
    first = int(_RANGE.read_text().split()[0]) - _PARTS * _PART
    assert first >= 1024, f"{_RANGE} leaves no room below it"
    kept = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    for part in range(_PARTS):
        try:
            kept.bind(f"\0kvfs-tests-ports-{part}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        return kept, first + part * _PART
    raise AssertionError(f"{_PARTS} processes of tests have ports, which is the limit")


_kept, _first = _claim()
_numbers: Final = itertools.cycle(range(_first, _first + _PART, _STEP))


def own_port() -> int:
    """Return a port that is free on every address now; the same one comes again after a hundred others."""
    for number in itertools.islice(_numbers, _PART // _STEP):
        with socket.socket() as probe:
            try:
                probe.bind(("", number))
            except OSError:
                continue
            return number
    raise AssertionError(f"none of the ports from {_first} to {_first + _PART - 1} is free")
