"""Ports of loopback that are free now, for programs that cannot be asked which one they took.

Concurrency: any thread. Another process may take one before it is used.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """Find so many ports, each another."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]
