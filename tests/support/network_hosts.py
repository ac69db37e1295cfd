"""Hosts of a network of their own: namespaces of the kernel's network stack, whose cables can be pulled.

Responsibility: hosts with an address each at one bridge, in namespaces that go when the last user of them does; threads
and processes within them; cables that are pulled, slow, or lead to some of the others only. What a host is sent while
its cable is pulled is lost without a word, as on a wire: nobody's socket hears of it.

Concurrency: `within` is of the calling thread; what it starts stays there.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

_CLONE_NEWNET: Final = 0x40000000
_libc: Final = ctypes.CDLL(None, use_errno=True)


class Network:
    """See the module's header. Use it as a context manager; hosts count from 1."""

    def __init__(self, hosts: int) -> None:
        self.hosts = range(1, hosts + 1)
        self._stack = ExitStack()
        self._spaces: list[int] = []
        """Of the bridge, and of each host."""

    def __enter__(self) -> Network:
        try:
            self._spaces = [self._space() for _ in (0, *self.hosts)]
            with self.within(0):
                _run("ip", "link", "add", "bridge", "type", "bridge")
                _run("ip", "link", "set", "bridge", "up")
            for host in self.hosts:
                self._connect(host)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _space(self) -> int:
        """Make a namespace; return what keeps it."""
        made: list[int | OSError] = []

        def make() -> None:
            try:
                _check(_libc.unshare(_CLONE_NEWNET))
                made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                made.append(error)

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        [found] = made
        if isinstance(found, OSError):
            raise found
        self._stack.callback(os.close, found)
        return found

    def _connect(self, host: int) -> None:
        other = f"/proc/{os.getpid()}/fd/{self._spaces[host]}"
        with self.within(0):
            _run("ip", "link", "add", f"h{host}", "type", "veth", "peer", "name", "eth0", "netns", other)
            _run("ip", "link", "set", f"h{host}", "master", "bridge", "up")
        with self.within(host):
            _run("ip", "link", "set", "lo", "up")
            _run("ip", "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            _run("ip", "link", "set", "eth0", "up")

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.0.{host}"

    @contextmanager
    def within(self, host: int) -> Iterator[None]:
        """Have this thread, and what it starts, on a host; 0 is the bridge."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(_libc.setns(self._spaces[host], _CLONE_NEWNET))
            try:
                yield
            finally:
                _check(_libc.setns(before, _CLONE_NEWNET))
        finally:
            os.close(before)

    # --- what happens to cables --------------------------------------------------------------------------------
    @contextmanager
    def pulled(self, host: int) -> Iterator[None]:
        """Lose all that a host sends and is sent."""
        with self.within(0):
            _run("ip", "link", "set", f"h{host}", "nomaster")
        try:
            yield
        finally:
            with self.within(0):
                _run("ip", "link", "set", f"h{host}", "master", "bridge")

    @contextmanager
    def parted(self, first: int, second: int) -> Iterator[None]:
        """Lose what two hosts send each other; all others reach both."""
        self._set_isolated(first, second, state="on")
        try:
            yield
        finally:
            self._set_isolated(first, second, state="off")

    def _set_isolated(self, *hosts: int, state: str) -> None:
        with self.within(0):
            for host in hosts:
                _run("bridge", "link", "set", "dev", f"h{host}", "isolated", state)

    @contextmanager
    def slowed(self, host: int, rate: str) -> Iterator[None]:
        """Have a host be sent so much a second, such as `20mbit`."""
        root = ("dev", f"h{host}", "root")
        with self.within(0):
            _run("tc", "qdisc", "add", *root, "tbf", *("rate", rate), *("burst", "64k"), *("limit", "256k"))
        try:
            yield
        finally:
            with self.within(0):
                _run("tc", "qdisc", "delete", *root)


@contextmanager
def network_or_skip(hosts: int) -> Iterator[Network]:
    """Make a network, or skip the test where the machine allows none."""
    with network_if_allowed(hosts) as found:
        if isinstance(found, str):
            pytest.skip(f"no hosts in namespaces: {found}")
        yield found


@contextmanager
def network_if_allowed(hosts: int) -> Iterator[Network | str]:
    """Make a network, or say why the machine allows none."""
    with ExitStack() as stack:
        found: Network | str
        try:
            found = stack.enter_context(Network(hosts))
        except OSError as error:
            found = str(error)
        except subprocess.CalledProcessError as error:
            found = error.stderr.strip()
        yield found


def sockets_to(pid: int, address: str) -> int:
    """How many connections of a process' namespace are established with an address."""
    wanted = "".join(f"{int(part):02X}" for part in reversed(address.split(".")))
    rows = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    return sum(row.split()[2].partition(":")[0] == wanted and row.split()[3] == "01" for row in rows)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)


def _check(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
