"""Processes that share a device's memory: tests.gpu.peer, seen from the test."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any, Self

from tests.support.waits import WAIT_S


class PeerFailed(Exception):
    """Has the name of the peer's error, and its text."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


class Peer:
    """A process on the same device."""

    def __init__(self, library: str) -> None:
        self._door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door.settimeout(WAIT_S)
        command = [sys.executable, "-m", "tests.gpu.peer", str(theirs.fileno()), library]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self.pid = self.process.pid

    def order(self, order: str, fd: int | None = None, **arguments: Any) -> Any:
        """Have it do something; return the result. Raises PeerFailed."""
        return self.ask(order, fd, **arguments)[0]

    def receive(self, order: str, **arguments: Any) -> int:
        """Have it send a descriptor, which is the caller's then."""
        _, fds = self.ask(order, None, **arguments)
        return fds[0]

    def ask(self, order: str, fd: int | None, **arguments: Any) -> tuple[Any, list[int]]:
        message = json.dumps({"order": order, **arguments}).encode()
        socket.send_fds(self._door, [message], [] if fd is None else [fd])
        answer, fds, _, _ = socket.recv_fds(self._door, 64 << 10, 1)
        if not answer:
            raise PeerFailed("Ended", f"with {self.process.wait(timeout=WAIT_S)}")
        taken = json.loads(answer)
        if "error" in taken:
            for each in fds:
                os.close(each)
            raise PeerFailed(taken["error"], taken["text"])
        return taken["result"], fds

    def kill(self) -> None:
        """End it at once, whatever it does."""
        self.process.kill()
        self.process.wait(timeout=WAIT_S)

    def close(self) -> None:
        self._door.close()
        self.process.wait(timeout=WAIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
