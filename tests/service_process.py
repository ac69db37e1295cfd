"""A real `kvfs serve` in a process of its own, for tests: started, watched through NOTIFY_SOCKET, stopped."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self

from kvfs import addresses

START_WAIT_S = 30.0
EXIT_WAIT_S = 30.0
CAN_MOUNT = os.geteuid() == 0 and os.access("/dev/fuse", os.R_OK | os.W_OK)


def run_kvfs(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """One command to its end, with stdout and stderr as text."""
    inherited = {name: value for name, value in os.environ.items() if name != "KVFS_ADDRESS"}
    return subprocess.run(
        [sys.executable, "-m", "kvfs", *arguments],
        capture_output=True,
        text=True,
        timeout=EXIT_WAIT_S,
        env=inherited | {"NO_COLOR": "1", "COLUMNS": "200"} | environment,
        stdin=subprocess.DEVNULL,
    )


class ServiceProcess:
    """`kvfs serve` on `home`/mnt and `home`/data; a context that ends with the process gone and unmounted."""

    def __init__(self, home: Path, *arguments: str, dram: str = "64MiB") -> None:
        self.mount = home / "mnt"
        self.data = home / "data"
        self.errors = home / "stderr"
        self.output = home / "stdout"
        self.arguments = [
            "serve",
            f"--mount={self.mount}",
            f"--data={self.data}",
            f"--dram={dram}",
            *arguments,
        ]
        self.states: list[str] = []
        """What the service told its manager, one assignment each."""
        self._notify_path = home / "notify"

    def __enter__(self) -> Self:
        self._notify_path.unlink(missing_ok=True)
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(self._notify_path))
        with self.output.open("wb") as output, self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvfs", *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=os.environ | {"NOTIFY_SOCKET": str(self._notify_path)},
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(EXIT_WAIT_S)
        self._notify.close()
        for path in reversed(addresses.mounts()):
            if path == self.mount:
                subprocess.run(["umount", "-l", str(path)], check=False)
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            path = Path(line.split(" ")[4])
            if path.is_relative_to(self.data):
                subprocess.run(["umount", "-l", str(path)], check=False)

    def wait_for(self, state: str) -> str:
        """Wait until the service sends an assignment that starts with `state`; the whole assignment."""
        deadline = monotonic() + START_WAIT_S
        exited = os.pidfd_open(self.process.pid)
        try:
            while True:
                found = next((sent for sent in self.states if sent.startswith(state)), None)
                if found is not None:
                    return found
                ready, _, _ = select.select([self._notify, exited], [], [], max(deadline - monotonic(), 0))
                if self._notify in ready:
                    self.states += self._notify.recv(4096).decode().splitlines()
                elif exited in ready:
                    raise AssertionError(
                        f"no {state}: ended with {self.process.wait()}: {self.errors.read_text()}"
                    )
                else:
                    raise AssertionError(f"no {state} in {START_WAIT_S} s: {self.errors.read_text()}")
        finally:
            os.close(exited)

    def ready(self) -> Self:
        self.wait_for("READY=1")
        return self

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(EXIT_WAIT_S)
