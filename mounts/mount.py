"""The mount: which mode this machine allows, from mount(2) to a clean unmount.

Responsibility: open and mount /dev/fuse (or let pyfuse3 do it), run the native loop and pyfuse3 together,
keep room free while files are being written, and leave nothing mounted behind. Order of fallback:
passthrough -> native READ and WRITE -> plain pyfuse3.

Invariants: `serve` reports started only when the kernel's first request, INIT, has gone the whole way round: the mount
answers, or queues, whatever comes after it. After `serve` ends, however it ends, nothing is mounted at the path and the
kernel's requests have all been failed. This process never looks into its own mount, not with stat(2) either: killed
meanwhile, it would wait in the kernel for itself and never end.

Concurrency: one task on the service's trio thread; unmounting runs in a worker thread, since the kernel may
ask this very process before it lets go. One mount per process: libfuse's session is global in pyfuse3.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyfuse3
import trio

from kvfs import limits, linux
from kvfs._native.fuse_loop import FuseLoop
from kvfs.errors import ConfigError, DeviceFailed, DeviceMissing, KvfsError
from mounts.backing import PlainBackings
from mounts.calls import CallServer
from mounts.files import OpenFiles
from mounts.operations import Operations
from mounts.spares import SpareDrafts
from mounts.view import View
from tiers.store import TieredStore

log = logging.getLogger("kvfs.mount")

SOURCE = "kvfs"
KIND = "fuse.kvfs"
MODES = ("auto", "passthrough", "native", "plain")
HEADROOM_INTERVAL_S = 0.005
"""How often room is looked at while files are being written: at 3 GB/s that is 15 MB of writing."""


class Mount:
    """One mount point of a store; see the module's header. `mode` says what really runs."""

    def __init__(
        self,
        store: TieredStore,
        mountpoint: Path,
        *,
        mode: str = "auto",
        socket_path: Path | None = None,
        allow_other: bool = True,
    ) -> None:
        if mode not in MODES:
            raise ConfigError(f"mount mode {mode!r}: one of {', '.join(MODES)}")
        self._store = store
        self._wanted = mode
        self._socket_path = socket_path
        self._allow_other = allow_other
        self.mountpoint = mountpoint.absolute()
        self.mode = "plain" if mode == "plain" else "native"
        self.limits: list[str] = []
        """What is missing on this machine, and what still works without it."""
        self._is_up = False
        self.failure: DeviceFailed | None = None
        """Why `serve` ended, where neither a cancellation nor an unmount from outside ended it."""

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled or unmounted from outside. Raises DeviceMissing, ConfigError."""
        _check_device()
        if self._wanted == "plain":
            await self._serve_plain(task_status)
            return
        try:
            device = self._open_device()
        except DeviceMissing as error:
            if self._wanted != "auto":
                raise
            self.limits.append(f"{error}; pyfuse3 mounts by itself, all reads go through Python")
            await self._serve_plain(task_status)
            return
        try:
            await self._serve_native(device, task_status)
            if not self._is_up:
                raise self.failure or DeviceFailed(f"{self.mountpoint} was unmounted before it answered")
        except BaseException:
            with trio.CancelScope(shield=True):
                await self._unmount()
            raise
        finally:
            os.close(device)

    # --- with the native loop -----------------------------------------------------------------------------

    def _open_device(self) -> int:
        """A mounted /dev/fuse descriptor, by mount(2) or through fusermount3. Raises DeviceMissing."""
        try:
            return _mount_directly(self.mountpoint, allow_other=self._allow_other)
        except PermissionError:
            self.limits.append(
                "no right to mount (CAP_SYS_ADMIN): mounted through fusermount3 for this user alone, "
                "reads are answered natively without passthrough"
            )
            return _mount_by_helper(self.mountpoint, allow_other=False)
        except OSError as error:
            raise DeviceMissing(f"mount at {self.mountpoint}: {error.strerror}") from error

    async def _serve_native(self, device: int, task_status: trio.TaskStatus[None]) -> None:
        os.set_blocking(device, False)
        slots = os.open(self._store.dram.root / "slots", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        loop = FuseLoop(
            device,
            slots,
            self._store.table,
            passthrough=self._wanted in ("auto", "passthrough"),
            threads=limits.MAX_FUSE_THREADS,
            buffer_size=limits.MAX_WRITE_BYTES,
            largest_object=self._store.dram.largest_object_bytes,
            attr_valid_s=limits.KERNEL_CACHE_S,
            doubts=limits.MAX_DOUBTED_NAMES,
        )
        view = View(self._store, loop, self._socket_path)
        files = OpenFiles(view)
        spares = SpareDrafts(loop, view, files)
        calls = CallServer(loop, view, files, spares)
        pyfuse3.init(Operations(view, files), f"/dev/fd/{os.dup(loop.library_fd)}", {"fsname=kvfs"})
        try:
            loop.start()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._end_with_loop, loop, nursery.cancel_scope)
                nursery.start_soon(calls.serve)

                async def come_up() -> None:
                    await trio.lowlevel.wait_readable(loop.up_fd)
                    self._settle_mode(loop)

                await self._run(view, nursery, task_status, come_up)
        finally:
            with trio.CancelScope(shield=True):
                await self._unmount()
                await calls.serve_last()
            loop.stop()
            spares.close()
            pyfuse3.close(unmount=False)
            os.close(slots)

    def _settle_mode(self, loop: FuseLoop) -> None:
        """Learn whether the kernel really passes through, before the first file needs to know."""
        # Not a slot: none may be left, or the service's user be over its quota.
        with tempfile.TemporaryFile(dir=self._store.dram.directory, buffering=0) as probe:
            works = loop.probe(probe.fileno())
        self.mode = "passthrough" if works else "native"
        if not works and self._wanted in ("auto", "passthrough") and not self.limits:
            self.limits.append(
                "no FUSE passthrough (it needs CAP_SYS_ADMIN and Linux 6.9): reads are answered natively"
            )
        if not works and self._wanted == "passthrough":
            log.warning("passthrough was asked for and is not to be had; %s", self.limits[-1])

    async def _end_with_loop(self, loop: FuseLoop, scope: trio.CancelScope) -> None:
        await trio.lowlevel.wait_readable(loop.ended_fd)
        if loop.failure is None:
            log.info("the kernel ended the mount")
        else:
            self._fail(f"{loop.failure.filename}: {loop.failure.strerror}")
        scope.cancel()

    def _fail(self, why: str) -> None:
        if self.failure is None:
            self.failure = DeviceFailed(f"the mount at {self.mountpoint} cannot go on: {why}")
            log.error("%s", self.failure)

    # --- with pyfuse3 alone -------------------------------------------------------------------------------

    async def _serve_plain(self, task_status: trio.TaskStatus[None]) -> None:
        self.mode = "plain"
        backings = PlainBackings()
        view = View(self._store, backings, self._socket_path)
        options = set(pyfuse3.default_options) | {f"fsname={SOURCE}", "subtype=kvfs"}
        if self._allow_other and os.geteuid() == 0:
            options.add("allow_other")
        operations = Operations(view, OpenFiles(view))
        try:
            pyfuse3.init(operations, str(self.mountpoint), options)
        except RuntimeError as error:
            raise DeviceMissing(
                f"mount at {self.mountpoint}: {error}; without root, the package fuse3 (fusermount3) is needed"
            ) from error
        try:
            async with trio.open_nursery() as nursery:
                await self._run(view, nursery, task_status, operations.up.wait)
        finally:
            with trio.CancelScope(shield=True):
                await self._unmount()
            view.drafts.publish_closed()
            pyfuse3.close(unmount=True)
            backings.close()

    # --- in every mode ------------------------------------------------------------------------------------

    async def _run(
        self,
        view: View,
        nursery: trio.Nursery,
        task_status: trio.TaskStatus[None],
        come_up: Callable[[], Awaitable[None]],
    ) -> None:
        view.drafts.run_in(nursery)
        view.promises.run_in(nursery)
        with self._attached(view):
            nursery.start_soon(self._keep_headroom, view)
            async with trio.open_nursery() as answering:
                answering.start_soon(self._answer)
                await come_up()
                self._is_up = True
                task_status.started()
            view.promises.run_in(None)
            nursery.cancel_scope.cancel()

    async def _answer(self) -> None:
        """pyfuse3's loop. Cancelled, it stops taking requests and lets those under way end."""
        try:
            await pyfuse3.main(max_tasks=limits.MAX_FUSE_REQUESTS)
        except OSError as error:
            self._fail(f"the FUSE library: {error.strerror}")
        finally:
            with suppress(Exception):
                pyfuse3.terminate()

    @contextmanager
    def _attached(self, view: View) -> Iterator[None]:
        """While attached, the store tells the mount of changes and asks it for what was opened natively.

        OPENs come to Python, which refuses those of a uid over its quota, while there is such a uid.
        """
        self._store.listeners.append(view.on_change)
        self._store.before_eviction.append(view.drain_opens)
        self._store.publishers.append(view.drafts.publish_now)
        self._store.quota_listeners.append(view.backings.relay_opens)
        view.backings.relay_opens(self._store.over_quota)
        try:
            yield
        finally:
            self._store.listeners.remove(view.on_change)
            self._store.before_eviction.remove(view.drain_opens)
            self._store.publishers.remove(view.drafts.publish_now)
            self._store.quota_listeners.remove(view.backings.relay_opens)

    async def _keep_headroom(self, view: View) -> None:
        """Evict ahead of writers, whose bytes come without a request."""
        drafts = view.drafts
        while True:
            await drafts.writers_changed.wait()
            drafts.writers_changed = trio.Event()
            while drafts.writers > 0:
                try:
                    self._store.maintain()
                except (KvfsError, OSError) as error:
                    log.error("no room is made ahead of writers: %s", error)
                await trio.sleep(HEADROOM_INTERVAL_S)

    async def _unmount(self) -> None:
        await trio.to_thread.run_sync(unmount, self.mountpoint)


# --- mounting --------------------------------------------------------------------------------------------


def _check_device() -> None:
    if not os.path.exists("/dev/fuse"):
        raise DeviceMissing("/dev/fuse is missing: load the fuse module, or give the container the device")


def _mount_directly(point: Path, *, allow_other: bool) -> int:
    """mount(2) as root does it. Raises PermissionError, OSError."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()},default_permissions"
    if allow_other:
        options += ",allow_other"
    try:
        linux.mount(SOURCE, point, KIND, linux.MS_NOSUID | linux.MS_NODEV, options)
    except BaseException:
        os.close(device)
        raise
    return device


def _mount_by_helper(point: Path, *, allow_other: bool) -> int:
    """fusermount3's protocol: it mounts and sends the descriptor over `_FUSE_COMMFD`. Raises DeviceMissing."""
    helper = shutil.which("fusermount3")
    if helper is None:
        raise DeviceMissing("fusermount3 is missing (package fuse3), and mounting without it needs root")
    ours, theirs = socket.socketpair()
    options = f"default_permissions,fsname={SOURCE},subtype=kvfs" + (",allow_other" if allow_other else "")
    with ours, theirs:
        done = subprocess.run(
            [helper, "-o", options, "--", str(point)],
            env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=limits.STOP_WAIT_S,
            check=False,
        )
        theirs.close()
        if done.returncode != 0:
            raise DeviceMissing(f"fusermount3: {done.stderr.decode(errors='replace').strip()}")
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    if not descriptors:
        raise DeviceMissing("fusermount3 sent no descriptor")
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]


def unmount(point: Path) -> None:
    """Unmount kvfs from `point`, lazily where it is in use; nothing where nothing is mounted."""
    top = linux.top_mount(point)
    if top is None or not top.kind.startswith("fuse"):
        return
    try:
        linux.unmount(point)
    except PermissionError:
        _unmount_by_helper(point)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        linux.unmount(point, linux.MNT_DETACH)


def recover(point: Path) -> bool:
    """Clear mounts that a killed service left at `point`; whether there were any.

    Raises ConfigError when a file system is mounted there that answers, or that may only be slow.
    """
    found = False
    while (top := linux.top_mount(point)) is not None and top.kind.startswith("fuse"):
        alive = answers(point)
        if alive is None:
            raise ConfigError(
                f"{point} is in use: {top.source} ({top.kind}) is mounted there and has not answered in "
                f"{limits.ANSWER_WAIT_S:g} s; `kvfs umount {point}` clears it"
            )
        if alive:
            raise ConfigError(f"{point} is in use: {top.source} ({top.kind}) is mounted there and answers")
        log.warning("%s: clearing the mount that a killed service left behind", point)
        abort(point)
        found = True
    return found


def answers(point: Path) -> bool | None:
    """Whether a service answers for the mount; None when nothing comes within limits.ANSWER_WAIT_S.

    Raises OSError where statfs says anything but that the service is gone.
    """
    said: list[OSError | None] = []

    def ask() -> None:
        try:
            os.statvfs(point)
            said.append(None)
        except OSError as error:
            said.append(error)

    # Nothing interrupts a call that waits for FUSE, so it waits in a thread that may be left behind.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(limits.ANSWER_WAIT_S)
    if not said:
        return None
    if said[0] is None:
        return True
    if said[0].errno in (errno.ENOTCONN, errno.ECONNABORTED):
        return False
    raise said[0]


def abort(point: Path) -> None:
    """Fail every request of the mount at `point`, whoever waits for it, and take the mount away.

    A service that is killed while one of its threads notifies the kernel of a name cannot end: that thread
    waits for a directory's lock, which a caller holds who waits for the service. Only this breaks the circle.
    """
    try:
        linux.unmount(point, linux.MNT_FORCE | linux.MNT_DETACH)
    except PermissionError:
        _unmount_by_helper(point)


def _unmount_by_helper(point: Path) -> None:
    """What the helper does not allow stays mounted, which the caller sees."""
    with suppress(FileNotFoundError):
        subprocess.run(["fusermount3", "-u", "-z", "--", str(point)], check=False, stderr=subprocess.DEVNULL)
