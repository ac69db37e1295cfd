"""A kvfs service in a process of its own, for tests.

Responsibility: start `kvfs serve` on fresh directories, wait until it says READY=1 on a real NOTIFY_SOCKET,
stop or kill it, and leave neither a process nor a mount behind, whatever the test did.

Invariants: the service runs in its own session, so that a signal for it never meets the tests. No method
touches a path on the mount: a service that hangs would hang its test's clean-up too; what is mounted is
read from `/proc/self/mountinfo`.

Concurrency: one thread, but `kill` may be called from any (the watchdog of the `door` fixture does).
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from kvfs.client import Client

from kvfs.system import linux
from tests.support.forked import Forked, Imported, imported
from tests.support.processes import task_state
from tests.support.waits import WAIT_S, eventually

ROOT: Final = Path(__file__).resolve().parents[2]
READY_WAIT_S: Final = 120.0
STOP_WAIT_S: Final = 20.0
KILL_WAIT_S: Final = 10.0
KILL_LOOK_S: Final = 0.25
"""A killed process is gone in milliseconds."""
MODES: Final = ("passthrough", "native", "plain")
BUCKET_KINDS: Final = {
    "cache": {},
    "durable": {"durable": True},
    "large": {"large": True},
    "durable-large": {"durable": True, "large": True},
}
"""Each kind of bucket, with what `Service.create_bucket` makes it of."""
_IMPORTED: Final = (
    "kvfs.cli.main",
    "kvfs.cli.conductor_command",
    "kvfs.cli.measure_commands",
    "kvfs.cli.proxy_command",
    "kvfs.cli.service_commands",
    "kvfs.service",
    "mounts.mount",
    "tiers.cluster.directory",
    "tiers.remote.cluster",
)
_PLAIN: Final = {"PYTHONPATH": str(ROOT), "COLUMNS": "160", "NO_COLOR": "1"}
_READ_WHEN_CALLED: Final = {
    "COLUMNS",
    "KVFS_CONDUCTOR_TOKEN",
    "KVFS_LIBCUDA",
    "KVFS_STANDIN_FAULTS",
    "KVFS_STANDIN_NAME",
}
"""Variables that no import reads."""
DEFAULT_DRAM: Final = "256MiB"
DEFAULT_NVME: Final = "0"


class ServiceFailed(Exception):
    """The service did not start, or did not stop as it should; the message ends with its log."""


def mounts_under(directory: Path) -> list[str]:
    """Mount points at or under `directory`, innermost last."""
    prefix = os.fspath(directory)
    points = [entry.point for entry in linux.mounts()]
    return [point for point in points if point == prefix or point.startswith(prefix + "/")]


def detach_mounts(directory: Path) -> list[str]:
    """Lazily unmount all that is mounted under `directory`; what was."""
    found = mounts_under(directory)
    for point in reversed(found):
        linux.unmount(Path(point), linux.MNT_DETACH)
    return found


def has_written(client: Client, count: int) -> bool:
    """Whether so many objects are on NVMe, and nothing waits to be written there."""
    nvme = client.status()["tiers"][1]
    return bool(nvme["objects_written"] >= count and nvme["write_behind"] + nvme["backlog"] == 0)


def sink(client: Client, names: Sequence[str]) -> None:
    """Leave objects on NVMe alone, once they are there: what is evicted before that is gone."""
    eventually(lambda: has_written(client, len(names)), "the objects are on NVMe")
    client.evict(*names)
    assert {client.stat(name).tier for name in names} == {"nvme"}


def run_kvfs(
    *arguments: str,
    timeout_s: float = WAIT_S,
    environment: Mapping[str, str] | None = None,
    directory: Path = ROOT,
    module: str = "kvfs",
) -> subprocess.CompletedProcess[str]:
    """Run `kvfs ARGUMENTS` to its end, without a terminal; the caller looks at its return code.

    It is forked from a process that has imported it, unless it has variables of its own that its imports may read.
    """
    called = {**os.environ, **_PLAIN, **(environment or {})}
    if set(environment or ()) <= _READ_WHEN_CALLED:
        return _ready().run(
            ("-m", module, *arguments), environment=called, work=directory, timeout_s=timeout_s
        )
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=directory,
        env=called,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@contextmanager
def running_kvfs(*arguments: str, errors: int = 2, module: str = "kvfs") -> Iterator[tuple[Forked, IO[str]]]:
    """Run `kvfs ARGUMENTS` until the end; yield it and what it prints. `errors`: where its errors go, as here."""
    reading, writing = os.pipe()
    with open(reading) as said:
        with open(writing, "wb") as output:
            process = fork_python(["-m", module, *arguments], output, errors=errors, environment=_PLAIN)
        try:
            yield process, said
        finally:
            process.kill()
            process.wait()


def fork_python(
    arguments: Sequence[str],
    output: IO[bytes],
    *,
    errors: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Forked:
    """Run `python ARGUMENTS`, forked from a process with kvfs's imports; `errors`: a descriptor for them alone."""
    return _ready().fork(
        arguments,
        path=[str(ROOT)],
        environment={**os.environ, "PYTHONPATH": _python_path(), **(environment or {})},
        work=ROOT,
        output=output,
        pass_fds=None if errors is None else {2: errors},
    )


def _ready() -> Imported:
    return imported(sys.executable, _IMPORTED, {**_PLAIN, "PYTHONPATH": _python_path()})


def _python_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


class Service:
    """`kvfs serve` on `base/mnt` and `base/data`, for as long as the `with` block."""

    def __init__(
        self,
        *,
        mode: str = MODES[0],
        dram: str = DEFAULT_DRAM,
        nvme: str | None = DEFAULT_NVME,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        base: Path | None = None,
        module: str = "kvfs",
    ) -> None:
        self.mode = mode
        self.dram = dram
        self.nvme = nvme
        self.module = module
        self.arguments = list(arguments)
        self.environment = dict(environment or {})
        # Not under pytest's tmp_path: a Unix socket's path has 107 bytes.
        self.base = base or Path(tempfile.mkdtemp(prefix="kvfs-test-"))
        self.mount = self.base / "mnt"
        self.data = self.base / "data"
        self.log_path = self.base / "service.log"
        self.process: subprocess.Popen[bytes] | Forked | None = None
        self.told: list[str] = []
        """What the service told its manager since its last start, one assignment each."""
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        for directory in (self.mount, self.data):
            directory.mkdir(exist_ok=True)
        # Tests that change their uid walk through here.
        self.base.chmod(0o755)

    # --- life ---------------------------------------------------------------------------------------------
    def command(self) -> list[str]:
        serve = [sys.executable, "-m", self.module, "serve", "--data", str(self.data)]
        mount = ["--mount", str(self.mount), "--mode", self.mode]
        sizes = ["--dram", self.dram, *(["--nvme", self.nvme] if self.nvme is not None else [])]
        return [*serve, *(["--no-mount"] if self.mode == "off" else mount), *sizes, *self.arguments]

    def start(self) -> Self:
        """Raises ServiceFailed when it exits or is not ready in READY_WAIT_S."""
        path = self.base / "notify"
        path.unlink(missing_ok=True)
        self._notify.close()
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.told.clear()
        with self.log_path.open("ab") as log:
            self._notify.bind(str(path))
            self.process = self._begin(log, path)
            self.wait_told("READY=1")
        return self

    def _begin(self, log: IO[bytes], notify: Path) -> subprocess.Popen[bytes] | Forked:
        """Fork it from a process with its imports, or start Python: for what runs no module, or has variables of its
        own that its imports may read."""
        own = {"NOTIFY_SOCKET": str(notify), **self.environment}
        command = self.command()
        if command[1] == "-m" and set(self.environment) <= _READ_WHEN_CALLED:
            return fork_python(command[1:], log, environment=own)
        return subprocess.Popen(
            command,
            cwd=ROOT,  # `python -m` looks there first
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": _python_path(), **own},
            start_new_session=True,
        )

    def wait_told(self, state: str) -> str:
        """The assignment starting with `state` that the service tells its manager, waiting for it.

        Raises ServiceFailed when it ends without, or READY_WAIT_S pass.
        """
        process = self.running
        found = self._find_told(state, exited=process.returncode is not None)
        if found:
            return found
        pidfd = os.pidfd_open(process.pid)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._notify, selectors.EVENT_READ)
                selector.register(pidfd, selectors.EVENT_READ)
                while selector.select(READY_WAIT_S):
                    if found := self._find_told(state, exited=process.poll() is not None):
                        return found
        finally:
            os.close(pidfd)
        self.kill()
        raise ServiceFailed(f"no {state} in {READY_WAIT_S} s\n{self.log()}")

    def _find_told(self, state: str, *, exited: bool) -> str:
        """The assignment, or "" while it may still come. Raises ServiceFailed when it cannot."""
        with suppress(BlockingIOError):
            while True:
                self.told += self._notify.recv(4096, socket.MSG_DONTWAIT).decode().splitlines()
        found = next((told for told in self.told if told.startswith(state)), "")
        if exited and not found:
            raise ServiceFailed(f"exited with {self.running.returncode}, no {state}\n{self.log()}")
        return found

    @property
    def running(self) -> subprocess.Popen[bytes] | Forked:
        assert self.process is not None, "the service was not started"
        return self.process

    @property
    def pid(self) -> int:
        return self.running.pid

    def stop(self) -> None:
        """SIGTERM and wait. Raises ServiceFailed unless it exits with 0 and unmounts in STOP_WAIT_S."""
        process = self.running
        process.terminate()
        try:
            code = process.wait(STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServiceFailed(f"still running {STOP_WAIT_S} s after SIGTERM\n{self.log()}") from None
        if code != 0:
            raise ServiceFailed(f"exited with {code} after SIGTERM\n{self.log()}")
        left = linux.top_mount(self.mount)
        if left is not None and left.kind.startswith("fuse"):
            raise ServiceFailed(f"stopped but left its mount\n{self.log()}")

    def signal(self, number: signal.Signals) -> int:
        """Send a signal and wait for the end, up to STOP_WAIT_S; the exit code."""
        self.running.send_signal(number)
        return self.running.wait(STOP_WAIT_S)

    def kill(self) -> None:
        """SIGKILL to its process group: the connection ends, and with it every call that hangs on it."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            deadline = time.monotonic() + KILL_WAIT_S
            while not self._has_ended(KILL_LOOK_S):
                if self._waits_for_its_mount() or time.monotonic() > deadline:
                    with suppress(OSError):
                        linux.unmount(self.mount, linux.MNT_FORCE)
                    self.process.wait()

    def _has_ended(self, timeout_s: float) -> bool:
        try:
            self.running.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _waits_for_its_mount(self) -> bool:
        """Whether a thread keeps a killed process from its end, since it waits in the kernel for a caller of its mount:
        see mounts.mount_point.abort."""
        tasks = Path(f"/proc/{self.pid}/task")
        with suppress(OSError):  # it ends
            return task_state(tasks / str(self.pid)) == "Z" and "D" in {*map(task_state, tasks.iterdir())}
        return False

    def restart(self) -> Self:
        """Start again on the same directories, over whatever the last run left mounted."""
        assert self.process is None or self.process.poll() is not None, "still running"
        return self.start()

    def close(self) -> None:
        """End the process and every mount, and remove the directories."""
        self.kill()
        self._notify.close()
        detach_mounts(self.base)
        assert not mounts_under(self.base)
        shutil.rmtree(self.base)

    # --- what it says --------------------------------------------------------------------------------------
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def complaints(self) -> str:
        """The log where it holds an error or an exception that nobody handled, else nothing."""
        log = self.log()
        return log if "Traceback (most recent call last)" in log or " ERROR " in log else ""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop each of its threads: one that is still in read() would take a request along."""
        pid = self.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            tasks = Path(f"/proc/{pid}/task")
            eventually(
                lambda: {task_state(task) for task in tasks.iterdir()} == {"T"}, "all threads are stopped"
            )
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def cli(self, *arguments: str, timeout_s: float = WAIT_S) -> subprocess.CompletedProcess[str]:
        """Run `kvfs ARGUMENTS`; the caller looks at its return code."""
        return run_kvfs(*arguments, timeout_s=timeout_s)

    def client(self) -> Client:
        """A session of the native client; the caller closes it."""
        from kvfs.client import connect

        return connect(self.data if self.mode == "off" else self.mount)

    def create_bucket(self, name: str, *, durable: bool = False, large: bool = False) -> Path:
        """Make a bucket; its path on the mount."""
        with self.client() as client:
            client.create_bucket(name, durable=durable, large=large)
        return self.mount / name

    def name(self, path: Path) -> str:
        """`bucket/key` of a path on the mount."""
        return os.fspath(path.relative_to(self.mount))

    def evict(self, path: Path) -> int:
        """Evict one sealed object, held or not; the bytes that became free."""
        with self.client() as client:
            return client.evict(self.name(path))

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.running.poll() is None:
                self.stop()
        finally:
            self.close()
