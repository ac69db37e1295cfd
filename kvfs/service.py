"""The service: the store, its doors and its upkeep under one nursery, from start to clean stop.

Responsibility: assemble the configured parts, notify the service manager, and stop in order: the mount first (no new
writes), then the sessions, then the store. It owns no bytes and no names itself.

Invariants:
- The data directory is locked before anything stale is cleared or mounted.
- READY=1 is sent once every door answers.
- A stop ends within limits.STOP_WAIT_S; past that, or at a second signal, the mount is detached and the
  process exits as after a crash, which the next start recovers from.

Concurrency: one trio thread, but for the watchdog of a stop (`kvfs.service_stop`).
"""

from __future__ import annotations

import gc
import grp
import logging
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from gateway.app.supervisor import Listening, Workers
from gateway.app.worker_settings import worker_settings
from kvfs import limits
from kvfs.client import discovery
from kvfs.config.capacities import check_dram_bytes, check_numa_nodes
from kvfs.config.disk_room import check_disks, dram_files, segment_files
from kvfs.config.settings import ColdSettings, Settings
from kvfs.config.sizes import format_size
from kvfs.errors import ConfigError, KvfsError, NotFound
from kvfs.service_stop import Watchdog, begin_stop, stop_on_signal, stop_when_asked
from kvfs.system.latencies import Latencies
from kvfs.system.linux import raise_file_limit
from kvfs.system.notify import notify, watchdog_wanted
from mounts.choice import NoMount, Served, load_mount
from mounts.mount_point import abort, recover
from tiers.cluster.door import RunningCluster, make_cluster
from tiers.cold.bucket import ColdOptions, open_bucket
from tiers.data_dir import lock_holder, open_home
from tiers.device.device import Device, open_device
from tiers.dram.layout import remove_kept
from tiers.events.publisher import EventDoor, open_events
from tiers.eviction.policy import policy_named
from tiers.fsck.scrub import Scrub
from tiers.hbm.device_pools import DevicePools
from tiers.hbm.holders.asked_holders import AskedHolders
from tiers.hbm.holders.nvml import Nvml
from tiers.hbm.opened_devices import open_devices
from tiers.model.objects import Change, ChangeKind
from tiers.model.tier import Kind
from tiers.recovery.start import NvmeOptions, StoreOptions, start_store
from tiers.sessions.server import SessionServer
from tiers.store.store import Store

log = logging.getLogger("kvfs.service")

DEFAULT_GROUP = "kvfs"
_KILLED_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Takes:
    """What the tiers are about to take of the machine."""

    dram_bytes: int
    nvme_bytes: int
    """0 without an NVMe tier."""
    nvme_where: str
    """The directory, or the block devices."""


@dataclass(frozen=True, slots=True)
class Running:
    """What runs, for the command that started it."""

    data: Path
    store_id: bytes
    backing: str
    capacity_bytes: int
    max_slots: int
    nvme_bytes: int
    """0 without an NVMe tier."""
    nvme_io: str
    gpus: int
    """GPUs whose memory is shared, each with `gpu_bytes`."""
    gpu_bytes: int
    mountpoint: Path | None
    mode: str
    socket: Path
    s3: str | None
    """Where the S3 endpoint answers; None without one."""
    page: str | None
    """Where the page of the store is; None without an admin port."""
    missing: tuple[str, ...]
    """What this machine or user lacks, and what works without it."""


def group_id(name: str | None) -> int:
    """Return the id of the group whose members read the tier directly. Raises ConfigError for an unknown group."""
    try:
        return grp.getgrnam(name or DEFAULT_GROUP).gr_gid
    except KeyError:
        if name is not None:
            raise ConfigError(f"[session] group = {name!r}: no such group on this machine") from None
        return os.getegid()


def check_places(settings: Settings) -> None:
    """Check the configured paths. Raises ConfigError for one that the mount would hide: the service would wait for
    itself there."""
    path = settings.mountpoint
    if path is None:
        return
    places = {
        "[store] data": settings.store.data,
        "[nvme] path": settings.nvme_path,
        "[session] socket": settings.socket_path,
        "[s3] certificate": settings.s3.certificate,
        "[s3] key": settings.s3.key,
        "[cluster] secret_file": settings.cluster.secret_file,
        "[cluster] certificate": settings.cluster.certificate,
        "[cluster] key": settings.cluster.key,
        "[cluster] authorities": settings.cluster.authorities,
        "the configuration": settings.file,
    }
    for what, inside in places.items():
        if inside is not None and discovery.leads_under(inside, path):
            raise ConfigError(f"{what} = '{inside}': lies under the mount point {path}, which would hide it")


def check_room(settings: Settings) -> None:
    """Check that the machine has what the tiers are to take. Raises ConfigError."""
    on_disk = []
    if settings.dram.backing != "directory":
        check_dram_bytes(settings.dram.capacity)
    if nodes := settings.dram.numa_nodes:
        if settings.dram.backing == "directory":
            raise ConfigError(
                f"[dram] numa_nodes = {list(nodes)}: a directory has none; take backing = 'tmpfs'"
            )
        check_numa_nodes(nodes, settings.dram.capacity)
    if settings.dram.on_disk:
        on_disk.append(dram_files(settings.dram.capacity, settings.store.data))
    if not settings.nvme.device:
        on_disk.append(segment_files(settings.nvme_bytes, settings.nvme_path))
    elif settings.nvme.capacity is not None:
        raise ConfigError("[nvme] device: devices are used whole, so capacity cannot be given")
    check_disks(on_disk)


def prepare_mountpoint(path: Path) -> Path:
    """Make the mount point; clear a mount that a killed service left there. Raises ConfigError."""
    recover(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"[mount] path = '{path}': {error.strerror}") from None
    return path


def release_killed(settings: Settings) -> None:
    """Free the data directory of a service that was killed but does not end.

    Its main thread is a zombie then, while another thread waits in the kernel for a caller of its own mount.
    """
    deadline = time.monotonic() + limits.KILLED_WAIT_S
    while (holder := lock_holder(settings.store.data)) is not None and _is_zombie(holder):
        if time.monotonic() > deadline:
            return
        if settings.mountpoint in discovery.mounts():
            log.warning(
                "process %d was killed and cannot end: aborting its mount %s", holder, settings.mountpoint
            )
            abort(settings.mountpoint)
        time.sleep(_KILLED_POLL_S)


def _is_zombie(pid: int) -> bool:
    try:
        # The name, in parentheses, may hold anything; the state is the first field after it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return False


@asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[Store]:
    """Open the store; close it at the end, where [dram] keep leaves its objects in DRAM for the next start.

    Raises StoreLocked, FormatMismatch, DeviceMissing, ConfigError, NoSpace.
    """
    release_killed(settings)
    nvme_bytes = settings.nvme_bytes
    device = open_device(settings.nvme.io) if nvme_bytes else None
    try:
        store = await _start_store(settings, device, nvme_bytes)
        gc.freeze()  # a full collection over a million objects that were taken over would stop all doors
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


async def _start_store(settings: Settings, device: Device | None, nvme_bytes: int) -> Store:
    nvme = None
    if device is not None:
        nvme = NvmeOptions(
            device,
            nvme_bytes,
            directory=settings.nvme_path,
            devices=settings.nvme.device,
            segment_bytes=settings.nvme.segment,
            trim=settings.nvme.trim,
        )
    try:
        return await start_store(
            StoreOptions(
                settings.store.data,
                settings.dram.capacity,
                max_slots=settings.dram.max_slots,
                gid=group_id(settings.session.group),
                backing="tmpfs" if settings.dram.numa_nodes else settings.dram.backing,
                numa_nodes=settings.dram.numa_nodes,
                quota_bytes=settings.session.quota,
                policy=settings.store.policy,
                cold=cold_options(settings.cold),
                nvme=nvme,
            )
        )
    except OSError as error:
        raise ConfigError(f"[store] data = '{settings.store.data}': {error.strerror or error}") from error


def cold_options(settings: ColdSettings) -> ColdOptions | None:
    """Return the options of the configured cold tier; None without one. Raises ConfigError without boto3."""
    if settings.bucket is None:
        return None
    return ColdOptions(
        open_bucket(settings),
        settings.capacity,
        admits_all=settings.admit == "all",
        take_over=settings.take_over,
    )


async def _finish(store: Store) -> None:
    """Write what is queued within limits.FINISH_WAIT_S; the rest is a cache's, and stays in DRAM."""
    with trio.move_on_after(limits.FINISH_WAIT_S) as scope:
        try:
            await store.finish()
        except KvfsError as error:
            log.error("not everything was written: %s", error)
    if scope.cancelled_caught:
        log.warning("not everything was written before the service had to stop")


def _close_store(store: Store, settings: Settings) -> None:
    keep, usage = settings.dram.keep and store.object_count > 0, store.dram.usage()
    store.close(keep=keep)
    if keep:
        log.info(
            "%s of DRAM stay in use for the next start; `kvfs drop %s` frees them",
            format_size(usage.used_bytes),
            settings.store.data,
        )


def drop_kept(data: Path) -> int:
    """Free the memory that a stopped service keeps for the next; return its bytes. Raises StoreLocked, NotFound."""
    if not (data / "lock").exists():
        raise NotFound(f"{data}: not a data directory of kvfs")
    home = open_home(data)
    try:
        return remove_kept(home.dram)
    finally:
        home.close(clean=False)


def open_pools(settings: Settings, store: Store) -> DevicePools | None:
    """Return the pools of GPU memory, which drop what is removed from the store; None where none are configured."""
    if settings.hbm.capacity is None:
        return None
    devices, missing = open_devices(settings.hbm.capacity, settings.hbm.device)
    pools = DevicePools(
        devices,
        policy=partial(policy_named, settings.store.policy),
        expected=store.checksum,
        missing=missing,
        token_key=store.home.hbm_key(),
        holders=AskedHolders(Nvml()),
    )

    def drop(change: Change) -> None:
        if change.kind is not ChangeKind.REMOVED or change.evicted or not pools.has_pools:
            return
        if change.key is not None and change.key.kind is Kind.BLOCK:
            pools.remove(change.key.digest)
        elif change.name is not None and not change.name.key:
            pools.remove_other_buckets({bucket.bucket_id for bucket in store.buckets()})

    store.listeners.append(drop)
    return pools


async def run(
    settings: Settings, started: Callable[[Running], None], takes: Callable[[Takes], None] = lambda _: None
) -> None:
    """Serve until SIGTERM, SIGINT, a session's SHUTDOWN, or until the mount is unmounted from outside.

    Calls `takes` before anything is made, and `started` once, when every door answers. Raises ConfigError, StoreLocked,
    FormatMismatch, DeviceMissing; and DeviceFailed, after a clean stop, where the mount failed.
    """
    check_places(settings)
    check_room(settings)
    if settings.mountpoint is not None:
        load_mount()
    workers = _workers(settings)
    where = ", ".join(map(str, settings.nvme.device)) or str(settings.nvme_path)
    takes(Takes(settings.dram.capacity, settings.nvme_bytes, where))
    raise_file_limit()
    stop = trio.CancelScope()
    with Watchdog(settings.mountpoint) as watchdog:
        async with open_store(settings) as store:
            with open_events(settings.events, store) as events:
                await _serve(settings, store, workers, watchdog, events, stop, started)


async def _serve(
    settings: Settings,
    store: Store,
    workers: Workers | None,
    watchdog: Watchdog,
    events: EventDoor,
    stop: trio.CancelScope,
    started: Callable[[Running], None],
) -> None:
    """Serve all doors over the store, until the stop."""
    cluster = make_cluster(settings.cluster, store, settings.dram.numa_nodes)
    mount = _make_mount(settings, store, cluster)
    scrub = Scrub(store, settings.nvme.scrub_rate)
    pools = open_pools(settings, store)
    sessions = _session_server(settings, store, mount, scrub, events, cluster, pools)
    async with trio.open_nursery() as upkeep:
        upkeep.start_soon(_maintain, store, pools)
        upkeep.start_soon(store.run)
        upkeep.start_soon(scrub.run)
        upkeep.start_soon(events.run)
        await upkeep.start(stop_on_signal, stop, watchdog)
        await upkeep.start(_reload_on_hangup, workers, cluster)
        if cluster is not None:
            await upkeep.start(cluster.run)
        async with trio.open_nursery() as doors:
            await doors.start(sessions.serve)
            upkeep.start_soon(stop_when_asked, sessions.stop_asked, stop, watchdog)
            with stop:
                async with trio.open_nursery() as network:
                    listening = await _start_gateway(workers, network)
                    await _serve_mount(
                        mount, partial(_describe, settings, store, mount, pools, listening), started
                    )
                    network.cancel_scope.cancel()
            if not stop.cancel_called:
                begin_stop(stop, watchdog, str(mount.failure or f"{settings.mount.path} was unmounted"))
            sessions.stop()
            doors.cancel_scope.deadline = trio.current_time() + limits.STOP_WAIT_S / 2
        upkeep.cancel_scope.cancel()
    if pools is not None:
        pools.close()
    if mount.failure is not None:
        raise mount.failure


def _make_mount(settings: Settings, store: Store, cluster: RunningCluster | None) -> Served:
    if settings.mountpoint is None:
        return NoMount()
    return load_mount()(
        store,
        prepare_mountpoint(settings.mountpoint),
        mode=settings.mount.mode,
        socket_path=settings.socket_path,
        allow_other=settings.mount.allow_other,
        others=cluster if settings.cluster.mount_fetches else None,
    )


def _session_server(
    settings: Settings,
    store: Store,
    mount: Served,
    scrub: Scrub,
    events: EventDoor,
    cluster: RunningCluster | None,
    pools: DevicePools | None,
) -> SessionServer:
    latencies = Latencies()
    return SessionServer(
        store,
        settings.socket_path,
        group_gid=group_id(settings.session.group),
        describe=lambda: {
            "mount": {
                "path": settings.mountpoint and str(settings.mountpoint),
                "mode": mount.mode,
                "missing": _missing(store, mount),
            },
            "scrub": scrub.status(),
            "events": events.status(),
            **({} if cluster is None else {"cluster": cluster.status()}),
            **({} if pools is None else {"hbm": pools.status()}),
            "latencies": {"session": latencies.status(), "mount": mount.latencies.status()},
        },
        latencies=latencies,
        cluster=cluster,
        pools=pools,
    )


def _workers(settings: Settings) -> Workers | None:
    """Return the S3 endpoint's workers, not yet started, where one is configured. Raises ConfigError."""
    if settings.s3.listen is None:
        return None
    shared = worker_settings(settings.s3, settings.socket_path, settings.log.level, settings.file)
    return Workers(shared, settings.s3.workers)


async def _start_gateway(workers: Workers | None, nursery: trio.Nursery) -> Listening | None:
    """Start the S3 endpoint's workers, where there are any. Raises ConfigError."""
    if workers is None:
        return None
    found: Listening = await nursery.start(workers.supervise)
    return found


async def _reload_on_hangup(
    workers: Workers | None,
    cluster: RunningCluster | None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Have certificates and credentials read again at SIGHUP; where there are none it ends the service, as ever."""
    if workers is None and cluster is None:
        task_status.started()
        return
    with trio.open_signal_receiver(signal.SIGHUP) as signals:
        task_status.started()
        async for _ in signals:
            if workers is not None:
                workers.reload()
            if cluster is not None:
                cluster.renew_certificates()


async def _serve_mount(
    mount: Served, describe: Callable[[], Running], started: Callable[[Running], None]
) -> None:
    """Serve the mount to its end; report the start once it answers, in the mode that was got."""
    async with trio.open_nursery() as nursery:
        await nursery.start(mount.serve)
        running = describe()
        started(running)
        capacity = format_size(running.capacity_bytes)
        where = f"{running.mode} mount on {running.mountpoint}" if running.mountpoint else "no mount"
        notify("READY=1", f"STATUS={capacity} of DRAM, {where}")


async def _maintain(store: Store, pools: DevicePools | None) -> None:
    """Do the upkeep every MAINTAIN_INTERVAL_S and soon after a change; notify the manager's watchdog."""
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
            if pools is not None:
                pools.sweep()
        except KvfsError as error:
            log.log(error.log_level, "upkeep: %s", error)
        await trio.sleep(limits.MAINTAIN_PAUSE_S)


def _missing(store: Store, mount: Served) -> list[str]:
    """Return what this machine or user lacks, and what works without it."""
    if store.dram.backing == "tmpfs":
        return mount.limits
    return [
        "no private tmpfs: the DRAM tier lies in a plain directory, its capacity is kept without the kernel's help",
        *mount.limits,
    ]


def _describe(
    settings: Settings, store: Store, mount: Served, pools: DevicePools | None, listening: Listening | None
) -> Running:
    usage, lower = store.dram.usage(), store.journal.usage()
    devices = [] if pools is None else pools.devices
    return Running(
        data=store.data_dir,
        store_id=store.store_id,
        backing=store.dram.backing,
        capacity_bytes=usage.capacity_bytes,
        max_slots=usage.max_slots,
        nvme_bytes=sum(tier["capacity_bytes"] for tier in lower),
        nvme_io=", ".join(tier["backing"] for tier in lower),
        gpus=len(devices),
        gpu_bytes=settings.hbm.capacity or 0,
        mountpoint=settings.mountpoint,
        mode=mount.mode,
        socket=settings.socket_path,
        s3=None if listening is None else str(listening),
        page=None if listening is None else listening.page,
        missing=(*_missing(store, mount), *(pools.missing if pools is not None else [])),
    )
