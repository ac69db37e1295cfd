"""Starts of a store: the only maker of one.

Responsibility: open the data directory, the lower tiers, the index and DRAM, in that order, and make a store of what
they hold (`tiers.recovery.startup`).

Invariants: after a start that fails the data directory is as it was; an index that turns out damaged on the way is
built anew, once. Concurrency: before the store serves anybody.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from kvfs import limits
from kvfs.errors import ConfigError, Corrupt, InvalidRequest
from kvfs.system import crashpoints
from tiers.cold.bucket import ColdOptions
from tiers.data_dir import Home, open_home
from tiers.device.device import Device
from tiers.dram.tier import DramTier
from tiers.eviction.policy import policy_named
from tiers.recovery.index_check import IndexWalk
from tiers.recovery.open_nvme import open_nvme
from tiers.recovery.opened_index import walking
from tiers.recovery.startup import Lower, Startup
from tiers.store.store import Store

log = logging.getLogger("kvfs.store")


@dataclass(frozen=True, slots=True)
class NvmeOptions:
    """Holds the settings of a store's NVMe tier."""

    device: Device
    capacity_bytes: int
    directory: Path | None = None
    """Of the segment files and what is written beside segments. None: in the data directory."""
    devices: tuple[Path, ...] = ()
    """Block devices in place of segment files."""
    segment_bytes: int | None = None
    trim: bool = False
    """Whether freed segments are trimmed on the device."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Holds what a store is started with."""

    data_dir: Path
    dram_bytes: int
    max_slots: int = limits.DEFAULT_SLOTS
    gid: int | None = None
    """The group whose members read DRAM slots directly."""
    backing: str = "auto"
    numa_nodes: Sequence[int] = ()
    """On which a tmpfs of DRAM is to lie; none: anywhere."""
    quota_bytes: int | None = None
    """Of one uid; None: half of DRAM."""
    policy: str = "default"
    """One of `tiers.eviction.policy.POLICY_NAMES`."""
    cold: ColdOptions | None = None
    nvme: NvmeOptions | None = None


def open_store(options: StoreOptions) -> Store:
    """Start a store without NVMe; it owns the data directory until `close`.

    All that an earlier service kept there, killed or not, is there again as far as it is whole. Raises ConfigError
    where that had an NVMe tier; StoreLocked, FormatMismatch, InvalidRequest, DeviceMissing (backing "tmpfs" without the
    right to mount).
    """
    with _home(options) as home:
        directory = home.known_segments()
        if directory is not None:
            raise ConfigError(
                f"{home.path} has an NVMe tier in {directory}: start with it, or remove that directory and what it "
                "holds"
            )
        with walking(home) as walk:
            try:
                return _build(options, home, Startup(home, cold=options.cold, walk=walk))[0]
            except Corrupt as error:
                log.error("starting with an empty index: %s", error)
                return _build(options, home, Startup(home, cold=options.cold, believe=False))[0]


async def start_store(options: StoreOptions) -> Store:
    """Start a store, with the NVMe tier that `options` has, if it has one. `Store.run` writes to that.

    Raises what `open_store` and `tiers.log.pool_files.open_pool` do.
    """
    nvme = options.nvme
    if nvme is None:
        return open_store(options)
    with _home(options) as home, walking(home) as walk:
        home.note_segments(nvme.directory or home.segments)
        try:
            lower = await _open_lower(home, nvme)
            return await _build_over(options, home, lower, believe=True, walk=walk)
        except Corrupt as error:
            log.error("the index is built anew: %s", error)
            lower = await _open_lower(home, nvme)
            return await _build_over(options, home, lower, believe=False)


async def _open_lower(home: Home, nvme: NvmeOptions) -> Lower:
    return Lower(
        *await open_nvme(
            nvme.device,
            nvme.directory or home.segments,
            store_id=home.store_id,
            capacity_bytes=nvme.capacity_bytes,
            devices=nvme.devices,
            segment_bytes=nvme.segment_bytes,
            trim=nvme.trim,
        )
    )


async def _build_over(
    options: StoreOptions, home: Home, lower: Lower, *, believe: bool, walk: IndexWalk | None = None
) -> Store:
    """Build a store over an open lower tier, and have its decisions on the device; where that fails both are closed."""
    crashpoints.reach("start.after_log")
    try:
        startup = Startup(home, lower, cold=options.cold, believe=believe, walk=walk)
        store, on_failure = _build(options, home, startup)
        with on_failure:
            await store.journal.settle_start()
            on_failure.pop_all()
    except BaseException:
        lower.nvme.pool.close_files()
        raise
    return store


def _build(options: StoreOptions, home: Home, startup: Startup) -> tuple[Store, ExitStack]:
    """Build the store; return it with what undoes that."""
    crashpoints.reach("start.after_names")
    with ExitStack() as on_failure:
        on_failure.callback(startup.abort)
        dram = DramTier.open(
            home.dram,
            options.dram_bytes,
            store_id=home.store_id,
            max_slots=options.max_slots,
            gid=options.gid,
            mode=options.backing,
            numa_nodes=options.numa_nodes,
            choose=startup.choose,
            below=startup.below,
        )
        on_failure.callback(dram.close, keep=True)
        quota_bytes = options.dram_bytes // 2 if options.quota_bytes is None else options.quota_bytes
        parts, recovery = startup.build(dram, quota_bytes=quota_bytes, policy=policy_named(options.policy))
        return Store(home, parts, asdict(recovery)), on_failure.pop_all()


@contextmanager
def _home(options: StoreOptions) -> Iterator[Home]:
    """Open the data directory once what can be checked without it is right; close it where the start fails.

    Without garbage collection meanwhile: a start makes millions of objects, none of them garbage, and looking for some
    was half of its time. Raises InvalidRequest, StoreLocked, FormatMismatch.
    """
    if options.dram_bytes < limits.MIN_DRAM_BYTES:
        raise InvalidRequest(f"DRAM capacity of {options.dram_bytes} bytes: at least {limits.MIN_DRAM_BYTES}")
    policy_named(options.policy)
    home = open_home(options.data_dir)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield home
    except BaseException:
        home.close(clean=False)
        raise
    finally:
        if was_enabled:
            gc.enable()
