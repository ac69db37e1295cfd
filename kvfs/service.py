"""The service: the store, its doors and its upkeep under one nursery, from start to clean stop.

Responsibility: assemble what settings ask for, tell the service manager, and stop in order: the mount first
(no new writes), then the sessions, then the store. It owns no bytes and no names itself.

Invariants:
- The data directory is locked before anything stale is cleared or mounted.
- READY=1 is sent once every door answers.
- A stop ends within limits.STOP_WAIT_S; past that, or at a second signal, the mount is detached and the
  process exits as after a crash, which the next start recovers from.

Concurrency: everything runs on one trio thread, the watchdog of a stop alone on a thread of its own, so that
it works when the loop does not.
"""

from __future__ import annotations

import gc
import grp
import logging
import math
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import trio

from gateway.supervisor import Listening, Workers, worker_settings
from gateway.worker import WorkerSettings
from kvfs import addresses, limits
from kvfs.config import ColdSettings, Settings
from kvfs.errors import ConfigError, KvfsError, NotFound
from kvfs.linux import raise_file_limit
from kvfs.notify import notify, watchdog_wanted
from kvfs.sizes import format_size
from mounts.mount import Mount, abort, recover
from tiers.cold_bucket import ColdOptions, open_bucket
from tiers.device import Device, open_device
from tiers.dram_layout import discard
from tiers.event_door import EventDoor, open_events
from tiers.home import lock_holder, open_home
from tiers.scrub import Scrub
from tiers.sessions import SessionServer
from tiers.store import TieredStore

log = logging.getLogger("kvfs.service")

DEFAULT_GROUP = "kvfs"
_KILLED_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Running:
    """What really runs, for whoever started it."""

    data: Path
    store_id: bytes
    backing: str
    capacity_bytes: int
    max_slots: int
    nvme_bytes: int
    """0 without an NVMe tier."""
    nvme_io: str
    mountpoint: Path
    mode: str
    socket: Path
    s3: str | None
    """Where the S3 endpoint answers, for people."""
    missing: tuple[str, ...]
    """What this machine or user lacks, and what still works without it."""


def group_id(name: str | None) -> int:
    """The group whose members read the tier directly. Raises ConfigError for a group that does not exist."""
    try:
        return grp.getgrnam(name or DEFAULT_GROUP).gr_gid
    except KeyError:
        if name is not None:
            raise ConfigError(f"[session] group = {name!r}: no such group on this machine") from None
        return os.getegid()


def check_places(settings: Settings) -> None:
    """Raises ConfigError where the mount would hide what the service needs: it would wait for itself."""
    path = settings.mount.path
    places = {
        "[store] data": settings.store.data,
        "[nvme] path": settings.nvme_path,
        "[session] socket": settings.socket_path,
        "[s3] certificate": settings.s3.certificate,
        "[s3] key": settings.s3.key,
        "the configuration": settings.file,
    }
    for what, inside in places.items():
        if inside is not None and addresses.leads_under(inside, path):
            raise ConfigError(f"{what} = '{inside}': lies under the mount point {path}, which would hide it")


def prepare_mountpoint(path: Path) -> Path:
    """Make the mount point, and clear what a killed service left on it. Raises ConfigError."""
    recover(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"[mount] path = '{path}': {error.strerror}") from None
    return path


def release_killed(settings: Settings) -> None:
    """Make a service that was killed, and that the kernel does not let go, give up the data directory.

    Its main thread is a zombie then, while another one waits in the kernel for a caller of its own mount.
    """
    deadline = time.monotonic() + limits.KILLED_WAIT_S
    while (holder := lock_holder(settings.store.data)) is not None and _is_zombie(holder):
        if time.monotonic() > deadline:
            return
        if settings.mount.path in addresses.mounts():
            log.warning(
                "process %d was killed and cannot end: aborting its mount %s", holder, settings.mount.path
            )
            abort(settings.mount.path)
        time.sleep(_KILLED_POLL_S)


def _is_zombie(pid: int) -> bool:
    try:
        # The name, in parentheses, may hold anything; the state is the first field after it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return False


@asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[TieredStore]:
    """The store. When the service stops, its objects stay in DRAM for the next start if [dram] keep says so.

    Raises StoreLocked, FormatMismatch, DeviceMissing, ConfigError, NoSpace.
    """
    release_killed(settings)
    nvme_bytes = settings.nvme_bytes
    device = open_device(settings.nvme.io) if nvme_bytes else None
    try:
        store = await _start_store(settings, device, nvme_bytes)
        gc.freeze()  # what was taken over is no garbage: a full collection over a million objects stops all doors
        try:
            yield store
        finally:
            with trio.CancelScope(shield=True):
                await _finish(store)
            _close_store(store, settings)
    finally:
        if device is not None:
            with trio.CancelScope(shield=True):
                await device.aclose()


async def _start_store(settings: Settings, device: Device | None, nvme_bytes: int) -> TieredStore:
    try:
        if device is None:
            return TieredStore.open(
                settings.store.data,
                dram_bytes=settings.dram.capacity,
                max_slots=settings.dram.slots,
                gid=group_id(settings.session.group),
                backing=settings.dram.backing,
                quota_bytes=settings.session.quota,
                policy=settings.store.policy,
                cold=cold_options(settings.cold),
            )
        return await TieredStore.start(
            settings.store.data,
            device,
            nvme_bytes=nvme_bytes,
            nvme_dir=settings.nvme_path,
            segment_bytes=settings.nvme.segment,
            trim=settings.nvme.trim,
            dram_bytes=settings.dram.capacity,
            max_slots=settings.dram.slots,
            gid=group_id(settings.session.group),
            backing=settings.dram.backing,
            quota_bytes=settings.session.quota,
            policy=settings.store.policy,
            cold=cold_options(settings.cold),
        )
    except OSError as error:
        raise ConfigError(f"[store] data = '{settings.store.data}': {error.strerror or error}") from error


def cold_options(settings: ColdSettings) -> ColdOptions | None:
    """The cold tier that is configured, if one is. Raises ConfigError without boto3."""
    if settings.bucket is None:
        return None
    return ColdOptions(
        open_bucket(settings),
        settings.capacity,
        admits_all=settings.admit == "all",
        take_over=settings.take_over,
    )


async def _finish(store: TieredStore) -> None:
    """Write what is queued, as far as there is time: the rest is a cache's, and stays in DRAM."""
    with trio.move_on_after(limits.FINISH_WAIT_S) as scope:
        try:
            await store.finish()
        except KvfsError as error:
            log.error("not everything was written: %s", error)
    if scope.cancelled_caught:
        log.warning("not everything was written before the service had to stop")


def _close_store(store: TieredStore, settings: Settings) -> None:
    keep, usage = settings.dram.keep and store.object_count > 0, store.dram.usage()
    store.close(keep=keep)
    if keep:
        log.info(
            "%s of DRAM stay in use for the next start; `kvfs drop %s` gives them back",
            format_size(usage.used_bytes),
            settings.store.data,
        )


def drop_kept(data: Path) -> int:
    """Give back the memory that a stopped service left to the next; the bytes. Raises StoreLocked, NotFound."""
    if not (data / "lock").exists():
        raise NotFound(f"{data}: not a data directory of kvfs")
    home = open_home(data)
    try:
        return discard(home.dram)
    finally:
        home.close(clean=False)


async def run(settings: Settings, started: Callable[[Running], None]) -> None:
    """Serve until SIGTERM, SIGINT, a session's SHUTDOWN, or until the mount is unmounted from outside.

    `started` is called once, when every door answers. Raises ConfigError, StoreLocked, FormatMismatch,
    DeviceMissing; and DeviceFailed, after a clean stop, where the mount could not go on.
    """
    check_places(settings)
    raise_file_limit()
    stop = trio.CancelScope()
    with _Watchdog(settings.mount.path) as watchdog:
        async with open_store(settings) as store:
            with open_events(settings.events, store) as events:
                await _serve(settings, store, watchdog, events, stop, started)


async def _serve(
    settings: Settings,
    store: TieredStore,
    watchdog: _Watchdog,
    events: EventDoor,
    stop: trio.CancelScope,
    started: Callable[[Running], None],
) -> None:
    """All doors over the store, until the stop."""
    mount = Mount(
        store,
        prepare_mountpoint(settings.mount.path),
        mode=settings.mount.mode,
        socket_path=settings.socket_path,
        allow_other=settings.mount.allow_other,
    )
    scrub = Scrub(store, settings.nvme.scrub_rate)
    sessions = SessionServer(
        store,
        settings.socket_path,
        group_gid=group_id(settings.session.group),
        describe=lambda: {
            "mount": _describe_mount(store, mount),
            "scrub": scrub.status(),
            "events": events.status(),
        },
    )
    async with trio.open_nursery() as upkeep:
        upkeep.start_soon(_maintain, store)
        upkeep.start_soon(store.run)
        upkeep.start_soon(scrub.run)
        upkeep.start_soon(events.run)
        await upkeep.start(_stop_on_signal, stop, watchdog)
        async with trio.open_nursery() as doors:
            await doors.start(sessions.serve)
            upkeep.start_soon(_stop_when_asked, sessions, stop, watchdog)
            with stop:
                async with trio.open_nursery() as network:
                    listening = await _start_gateway(settings, network)
                    running = _describe(settings, store, mount, listening)
                    await _serve_mount(mount, lambda: _tell_started(running, started))
                    network.cancel_scope.cancel()
            if not stop.cancel_called:
                _begin_stop(stop, watchdog, str(mount.failure or f"{settings.mount.path} was unmounted"))
            sessions.stop()
            doors.cancel_scope.deadline = trio.current_time() + limits.STOP_WAIT_S / 2
        upkeep.cancel_scope.cancel()
    if mount.failure is not None:
        raise mount.failure


async def _start_gateway(settings: Settings, nursery: trio.Nursery) -> Listening | None:
    """The S3 endpoint's workers, where one is configured. Raises ConfigError."""
    if settings.s3.listen is None:
        return None
    workers = Workers(_worker_settings(settings), settings.s3.workers)
    nursery.start_soon(_reload_on_hangup, workers)
    found: Listening = await nursery.start(workers.supervise)
    return found


def _worker_settings(settings: Settings) -> WorkerSettings:
    return worker_settings(settings.s3, settings.socket_path, settings.log.level, settings.file)


async def _reload_on_hangup(workers: Workers) -> None:
    with trio.open_signal_receiver(signal.SIGHUP) as signals:
        async for _ in signals:
            workers.reload()


async def _serve_mount(mount: Mount, mounted: Callable[[], None]) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(mount.serve)
        mounted()


def _tell_started(running: Running, started: Callable[[Running], None]) -> None:
    started(running)
    capacity = format_size(running.capacity_bytes)
    notify("READY=1", f"STATUS={capacity} of DRAM, {running.mode} mount on {running.mountpoint}")


def _abort_mount(mountpoint: Path) -> None:
    if mountpoint in addresses.mounts():
        abort(mountpoint)


class _Watchdog:
    """Bounds a clean stop. Its timer has a thread of its own: it fires even when the event loop is stuck."""

    def __init__(self, mountpoint: Path) -> None:
        self._mountpoint = mountpoint
        self._timer = threading.Timer(limits.STOP_WAIT_S, self.stop_hard, ["the clean stop took too long"])
        self._timer.daemon = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def start(self) -> None:
        self._timer.start()

    def stop_hard(self, why: str) -> None:
        """Leave as after a crash; the next start clears what is left."""
        log.error("%s: leaving at once", why)
        aborting = threading.Thread(target=_abort_mount, args=[self._mountpoint], daemon=True)
        aborting.start()
        aborting.join(limits.DETACH_WAIT_S)
        os._exit(1)


async def _stop_on_signal(
    stop: trio.CancelScope,
    watchdog: _Watchdog,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """The first signal stops cleanly, a second one hard."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for number in signals:
            if stop.cancel_called:
                watchdog.stop_hard("second signal")
            _begin_stop(stop, watchdog, signal.Signals(number).name)


async def _stop_when_asked(sessions: SessionServer, stop: trio.CancelScope, watchdog: _Watchdog) -> None:
    await sessions.stop_asked.wait()
    if not stop.cancel_called:
        _begin_stop(stop, watchdog, "a session asked for it")


def _begin_stop(stop: trio.CancelScope, watchdog: _Watchdog, why: str) -> None:
    log.info("stopping: %s", why)
    notify("STOPPING=1")
    watchdog.start()
    stop.cancel()


async def _maintain(store: TieredStore) -> None:
    """Upkeep, MAINTAIN_INTERVAL_S apart, and soon after a change; shows the manager that the loop turns."""
    changed = trio.Event()

    def wake(_: object) -> None:
        changed.set()

    store.listeners.append(wake)
    watched, said = watchdog_wanted(), -math.inf
    while True:
        if watched and trio.current_time() - said >= limits.MAINTAIN_INTERVAL_S:
            notify("WATCHDOG=1")
            said = trio.current_time()
        with trio.move_on_after(limits.MAINTAIN_INTERVAL_S):
            await changed.wait()
        changed = trio.Event()
        try:
            store.maintain()
        except KvfsError as error:
            log.log(error.log_level, "upkeep: %s", error)
        await trio.sleep(limits.MAINTAIN_PAUSE_S)


def _describe_mount(store: TieredStore, mount: Mount) -> dict[str, Any]:
    return {"path": str(mount.mountpoint), "mode": mount.mode, "missing": _missing(store, mount)}


def _missing(store: TieredStore, mount: Mount) -> list[str]:
    """What this machine or user lacks, and what still works."""
    if store.dram.backing == "tmpfs":
        return mount.limits
    return [
        "no private tmpfs: the DRAM tier lies in a plain directory, its capacity is kept without the kernel's help",
        *mount.limits,
    ]


def _describe(settings: Settings, store: TieredStore, mount: Mount, listening: Listening | None) -> Running:
    usage, lower = store.dram.usage(), store.journal.usage()
    return Running(
        data=store.data_dir,
        store_id=store.store_id,
        backing=store.dram.backing,
        capacity_bytes=usage.capacity_bytes,
        max_slots=usage.max_slots,
        nvme_bytes=sum(tier["capacity_bytes"] for tier in lower),
        nvme_io=", ".join(tier["backing"] for tier in lower),
        mountpoint=settings.mount.path,
        mode=mount.mode,
        socket=settings.socket_path,
        s3=None if listening is None else str(listening),
        missing=tuple(_missing(store, mount)),
    )
