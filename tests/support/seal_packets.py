"""The packets of a seal channel, by hand."""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

SEAL: Final = struct.Struct("<II16s16sIIQ")
RESULT: Final = struct.Struct("<iIQ")


def keys_of(count: int) -> list[bytes]:
    return [b"\1" + os.urandom(15) for _ in range(count)]


def answer_of(channel: socket.socket, *seals: bytes) -> list[int]:
    """Return the statuses that a packet of seals is answered with."""
    channel.send(b"".join(seals))
    return [status for status, _, _ in RESULT.iter_unpack(channel.recv(4096))]
