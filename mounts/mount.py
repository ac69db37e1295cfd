"""The mount: which mode this machine allows, from mount(2) to a clean unmount.

Responsibility: open and mount /dev/fuse (or let pyfuse3 do it), run the native loop and pyfuse3 together,
keep room free while files are being written, and keep nothing mounted after. Order of fallback:
passthrough -> native READ and WRITE -> plain pyfuse3.

Invariants: `serve` reports started only when the kernel's first request, INIT, has been answered: from then on the
mount answers, or queues, every request. After `serve` ends, however it ends, nothing is mounted at the path and the
kernel's requests have all been failed. This process never looks into its own mount, not with stat(2) either: killed
meanwhile, it would wait in the kernel for itself and never end.

Concurrency: one task on the service's trio thread; unmounting runs in a worker thread, since the kernel may
ask this very process before it ends the mount. One mount per process: libfuse's session is global in pyfuse3.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyfuse3
import trio

from kvfs import limits
from kvfs._native.fuse.loop import FuseLoop
from kvfs.errors import ConfigError, DeviceFailed, DeviceMissing, KvfsError
from kvfs.system.latencies import Latencies
from mounts.handlers import Operations
from mounts.kernel.backing import PlainBackings
from mounts.kernel.call_queue import LoopCalls, NoCalls
from mounts.mount_point import SOURCE, check_device, mount_by_helper, mount_directly, unmount
from mounts.tree.fetches import BlockSource
from mounts.tree.handles import OpenFiles
from mounts.tree.opener import FileOpener
from mounts.tree.spare_drafts import SpareDrafts
from mounts.tree.store_changes import StoreChanges
from mounts.tree.view import View
from mounts.upcalls import CallServer
from tiers.store.store import Store

log = logging.getLogger("kvfs.mount")

MODES = ("auto", "passthrough", "native", "plain")
HEADROOM_INTERVAL_S = 0.005
"""How often room is made while files are being written: at 3 GB/s that is 15 MB of writing."""


class Mount:
    """One mount point of a store; see the module's header. `mode` is the mode that runs."""

    def __init__(
        self,
        store: Store,
        mountpoint: Path,
        *,
        mode: str = "auto",
        socket_path: Path | None = None,
        allow_other: bool = True,
        others: BlockSource | None = None,
    ) -> None:
        """Prepare a mount; `others` are asked for blocks that are not here, None: nobody is."""
        if mode not in MODES:
            raise ConfigError(f"mount mode {mode!r}: one of {', '.join(MODES)}")
        self._store = store
        self._wanted = mode
        self._socket_path = socket_path
        self._allow_other = allow_other
        self._others = others
        self.mountpoint = mountpoint.absolute()
        self.mode = "plain" if mode == "plain" else "native"
        self.limits: list[str] = []
        """Sentences on what is missing on this machine, and what works without it."""
        self.latencies = Latencies()
        """Latencies of the requests that Python answers."""
        self._is_up = False
        self.failure: DeviceFailed | None = None
        """Why `serve` ended, where neither a cancellation nor an unmount from outside ended it."""

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled or unmounted from outside. Raises DeviceMissing, ConfigError."""
        check_device()
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
        """Open a mounted /dev/fuse, by mount(2) or through fusermount3. Raises DeviceMissing."""
        try:
            return mount_directly(self.mountpoint, allow_other=self._allow_other)
        except PermissionError:
            self.limits.append(
                "no right to mount (CAP_SYS_ADMIN): mounted through fusermount3 for this user alone, "
                "reads are answered natively without passthrough"
            )
            return mount_by_helper(self.mountpoint, allow_other=False)
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
            unresolved_names=limits.MAX_UNRESOLVED_NAMES,
        )
        calls = LoopCalls(loop)
        view = View(self._store, loop, calls, self._socket_path, self._others)
        changes, files = StoreChanges(view), OpenFiles(view)
        opener, spares = FileOpener(view, files), SpareDrafts(loop, view, files)
        server = CallServer(loop, calls, changes, files, opener, spares, view, self.latencies)
        operations = Operations(view, files, opener, self.latencies)
        pyfuse3.init(operations, f"/dev/fd/{os.dup(loop.library_fd)}", {"fsname=kvfs"})
        try:
            loop.start()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._end_with_loop, loop, nursery.cancel_scope)
                nursery.start_soon(server.serve)

                async def come_up() -> None:
                    await trio.lowlevel.wait_readable(loop.up_fd)
                    self._settle_mode(loop)

                await self._run(view, changes, nursery, task_status, come_up)
        finally:
            with trio.CancelScope(shield=True):
                if is_unused := await self._unmount():
                    loop.stop()  # what its threads had read by then is queued
                await server.serve_last(is_unused=is_unused)
            loop.stop()
            spares.close()
            pyfuse3.close(unmount=False)
            os.close(slots)

    def _settle_mode(self, loop: FuseLoop) -> None:
        """Find out whether the kernel passes through, before the first file is opened."""
        # The probe is not a slot: there may be none free, or the service's user may be over its quota.
        with tempfile.TemporaryFile(dir=self._store.dram.directory, buffering=0) as probe:
            works = loop.probe(probe.fileno())
        self.mode = "passthrough" if works else "native"
        if not works and self._wanted in ("auto", "passthrough") and not self.limits:
            self.limits.append(
                "no FUSE passthrough (it needs CAP_SYS_ADMIN and Linux 6.9): reads are answered natively"
            )
        if not works and self._wanted == "passthrough":
            log.warning("passthrough was asked for and is not available; %s", self.limits[-1])

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
        view = View(self._store, backings, NoCalls(), self._socket_path, self._others)
        options = set(pyfuse3.default_options) | {f"fsname={SOURCE}", "subtype=kvfs"}
        if self._allow_other and os.geteuid() == 0:
            options.add("allow_other")
        files = OpenFiles(view)
        operations = Operations(view, files, FileOpener(view, files), self.latencies)
        try:
            pyfuse3.init(operations, str(self.mountpoint), options)
        except RuntimeError as error:
            raise DeviceMissing(
                f"mount at {self.mountpoint}: {error}; without root, the package fuse3 (fusermount3) is needed"
            ) from error
        try:
            async with trio.open_nursery() as nursery:
                await self._run(view, StoreChanges(view), nursery, task_status, operations.up.wait)
        finally:
            with trio.CancelScope(shield=True):
                if await self._unmount():
                    files.release_flushed()
                with trio.move_on_after(limits.LAST_CALLS_WAIT_S):
                    await view.drafts.publisher.publish_last()
            pyfuse3.close(unmount=True)
            backings.close()

    # --- in every mode ------------------------------------------------------------------------------------

    async def _run(
        self,
        view: View,
        changes: StoreChanges,
        nursery: trio.Nursery,
        task_status: trio.TaskStatus[None],
        come_up: Callable[[], Awaitable[None]],
    ) -> None:
        view.drafts.publisher.run_in(nursery)
        view.retries.run_in(nursery)
        with self._attached(view, changes), view.fetches.running_in(nursery):
            nursery.start_soon(self._keep_headroom, view)
            async with trio.open_nursery() as answering:
                answering.start_soon(self._answer)
                await come_up()
                self._is_up = True
                task_status.started()
            view.retries.run_in(None)
            nursery.cancel_scope.cancel()

    async def _answer(self) -> None:
        """Run pyfuse3's loop; when cancelled, it takes no more requests and ends those under way."""
        try:
            await pyfuse3.main(max_tasks=limits.MAX_FUSE_REQUESTS)
        except OSError as error:
            self._fail(f"the FUSE library: {error.strerror}")
        finally:
            with suppress(Exception):
                pyfuse3.terminate()

    @contextmanager
    def _attached(self, view: View, changes: StoreChanges) -> Iterator[None]:
        """Attach the mount to the store, which notifies it of changes and asks it for opens answered natively.

        While a uid is over its quota, OPENs come to Python, which refuses that uid's.
        """
        self._store.listeners.append(changes.on_change)
        self._store.before_eviction.append(view.drain_opens)
        self._store.publishers.append(view.drafts.publisher.publish_now)
        self._store.quota_listeners.append(view.backings.relay_opens)
        view.backings.relay_opens(self._store.over_quota)
        try:
            yield
        finally:
            self._store.listeners.remove(changes.on_change)
            self._store.before_eviction.remove(view.drain_opens)
            self._store.publishers.remove(view.drafts.publisher.publish_now)
            self._store.quota_listeners.remove(view.backings.relay_opens)

    async def _keep_headroom(self, view: View) -> None:
        """Evict ahead of writers, since their bytes come without a request."""
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

    async def _unmount(self) -> bool:
        return await trio.to_thread.run_sync(unmount, self.mountpoint)
