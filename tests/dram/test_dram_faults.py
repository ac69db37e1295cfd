"""The DRAM tier's holders, limits, leftovers and ends: other processes, a full tmpfs, 100,000 slots."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs import limits
from kvfs._native.shared import slots as native
from kvfs._native.shared.table import Table
from kvfs.errors import ConfigError, DeviceMissing, NoSpace, StoreLocked, Unsupported, WriterActive
from tests.conformance.tier_suite import block_header, put, write
from tests.support.processes import Helper
from tests.support.waits import WAIT_S
from tiers.dram import tmpfs
from tiers.dram.tier import DramTier
from tiers.model.tier import Extent

MIB = 1 << 20
STORE = b"sixteen-byte-id."

needs_mount = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@pytest.fixture
def root() -> Iterator[Path]:
    base = Path(tempfile.mkdtemp(prefix="kvfs-dram-"))
    yield base / "dram"
    while tmpfs.is_mounted(base / "dram"):
        tmpfs.unmount(base / "dram")
    shutil.rmtree(base)


@pytest.fixture(params=[pytest.param("tmpfs", marks=[pytest.mark.mount, needs_mount]), "directory"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def new_tier(
    root: Path, mode: str = "auto", capacity_bytes: int = 32 * MIB, max_slots: int = 1024
) -> DramTier:
    return DramTier.open(root, capacity_bytes, store_id=STORE, max_slots=max_slots, mode=mode)


@pytest.fixture
def tier(root: Path, mode: str) -> Iterator[DramTier]:
    tier = new_tier(root, mode)
    yield tier
    tier.close()


def slot_path(tier: DramTier, extent: Extent) -> Path:
    return tier.directory / native.slot_name(extent.slot)


# --- holders in other processes --------------------------------------------------------------------------
HOLDER = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
if sys.argv[2] == "mapping":
    mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    os.close(fd)
print("held", flush=True)
sys.stdin.readline()
data = mapping[:] if sys.argv[2] == "mapping" else os.pread(fd, 1 << 24, 0)
print(data == sys.argv[3].encode() * (len(data) // len(sys.argv[3])) and len(data), flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("how", ["descriptor", "mapping"])
def test_a_stopped_holder_is_charged_and_its_death_pays(tier: DramTier, how: str) -> None:
    payload = b"held" * (MIB // 4)
    extent = put(tier, payload).extent
    before = tier.usage()
    with Helper(HOLDER, slot_path(tier, extent), how, "held") as holder:
        holder.expect("held")
        holder.stop()
        assert tier.held(extent)
        assert tier.free(extent, charge_uid=4242) == MIB
        assert tier.charged_bytes(4242) == MIB
        assert tier.usage().used_bytes == before.used_bytes
        refilled = [put(tier, b"next" * (MIB // 4), number).extent for number in range(3)]
        assert tier.sweep() == 0
        holder.kill()
    assert tier.sweep() == MIB
    assert tier.charged_bytes(4242) == 0
    assert tier.usage().used_bytes == before.used_bytes + 2 * MIB
    for entry in refilled:
        with tier.lease(entry) as lease:
            assert os.pread(lease.fileno(), 4, MIB - 4) == b"next"


@pytest.mark.parametrize("how", ["descriptor", "mapping"])
def test_a_holder_keeps_its_bytes_while_the_slot_is_refilled(tier: DramTier, how: str) -> None:
    extent = put(tier, b"mine" * 1000).extent
    with Helper(HOLDER, slot_path(tier, extent), how, "mine") as holder:
        holder.expect("held")
        assert tier.free(extent) > 0
        for number in range(3):
            put(tier, b"your" * 1000, number)
        holder.tell("read")
        holder.expect("4000")


WRITER = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
os.ftruncate(fd, 4096)
mapping = mmap.mmap(fd, 4096)
os.close(fd)
print("open", flush=True)
sys.stdin.readline()
mapping[:4] = b"late"
print("wrote", flush=True)
sys.stdin.readline()
"""


def test_another_processs_mapping_blocks_the_seal(tier: DramTier) -> None:
    draft = tier.reserve(4096)
    with Helper(WRITER, slot_path(tier, draft)) as writer:
        writer.expect("open")
        with pytest.raises(WriterActive):
            tier.seal(draft, block_header(1))
        writer.tell("write")
        writer.expect("wrote")
    with tier.lease(tier.seal(draft, block_header(1)).extent) as lease:
        assert os.pread(lease.fileno(), 4, 0) == b"late"


def test_an_aborted_drafts_writer_is_charged_for_what_it_goes_on_writing(tier: DramTier) -> None:
    draft = tier.reserve()
    fd = tier.open_draft(draft)
    tier.abort(draft, charge_uid=7)
    os.pwrite(fd, b"x" * MIB, 0)
    tier.sweep()
    assert tier.charged_bytes(7) == MIB
    os.close(fd)
    assert tier.sweep() == MIB
    assert tier.charged_bytes(7) == 0


def test_held_slots_are_bounded_and_the_rest_waits(tier: DramTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_HELD_SLOTS", 3)
    extents = [put(tier, b"x" * 4096, number).extent for number in range(8)]
    leases = [tier.lease(extent) for extent in extents]
    slots_before = tier.usage().slots
    assert [tier.free(extent, charge_uid=9) for extent in extents] == [4096] * 8
    usage = tier.usage()
    assert usage.slots == slots_before - 3, "held files leave their slots, the others keep them"
    assert usage.held_bytes == tier.charged_bytes(9) == 8 * 4096
    for extent, lease in zip(extents, leases, strict=True):
        assert os.pread(lease.fileno(), 1, 0) == b"x", extent
    for lease in leases[3:]:
        lease.close()
    assert tier.sweep() == 5 * 4096
    for lease in leases[:3]:
        lease.close()
    assert tier.sweep() == 3 * 4096
    assert tier.usage().slots == slots_before - 8
    assert tier.charged_bytes(9) == 0


def test_without_leases_nothing_is_reused(tier: DramTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel stops granting leases, every freed slot counts as read by somebody."""
    extent = put(tier, b"old" * 1000).extent

    def refuse(folder: int, slot: int, keep_bytes: int) -> int:
        raise Unsupported("no leases")

    with tier.lease(extent) as lease:
        monkeypatch.setattr(native, "recycle", refuse)
        assert tier.free(extent) > 0
        put(tier, b"new" * 1000)
        assert os.pread(lease.fileno(), 3, 0) == b"old"


def test_a_filesystem_without_leases_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: int, slot: int) -> tuple[int, int]:
        raise Unsupported("probe slot 0")

    monkeypatch.setattr(native, "check_no_writer", refuse)
    with pytest.raises(Unsupported, match="F_SETLEASE"):
        new_tier(root, "directory")
    assert not list(root.iterdir())


# --- many slots, little room -----------------------------------------------------------------------------
def test_100_000_slots(root: Path, mode: str) -> None:
    """More slots than descriptors (RLIMIT_NOFILE) and than mappings (vm.max_map_count) of one process.

    Fewer in a directory, where a disk's filesystem takes 100 us to create a file.
    """
    count = 100_000 if mode == "tmpfs" else 10_000
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count // 5, before[1]))
    tier = new_tier(root, mode, 512 * MIB, limits.DEFAULT_SLOTS)
    try:
        extents = [
            tier.seal(tier.reserve(), block_header(number), checksum=1).extent for number in range(count)
        ]
        for number in range(0, count, 997):
            tier.table.put(
                number.to_bytes(16, "little"), 2, extents[number].slot, extents[number].generation, 0
            )
        assert tier.usage().slots == count
        descriptors = len(os.listdir("/proc/self/fd"))
        assert descriptors < 200
        with tier.lease(extents[-1]) as lease:
            assert lease.size_bytes == 0
        assert sum(1 for _ in tier.sealed()) == count
        for extent in extents:
            assert tier.free(extent) == 0
        assert tier.usage().slots == 0
    finally:
        tier.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def overfill(descriptors: list[int], each_bytes: int = 2 * MIB) -> None:
    """Write to each descriptor up to the error that is expected, and close them."""
    try:
        for fd in descriptors:
            for _ in range(each_bytes // 4096):
                os.write(fd, b"x" * 4096)
    finally:
        for fd in descriptors:
            os.close(fd)


@needs_mount
@pytest.mark.mount
def test_the_kernel_stops_a_writer_that_overfills(root: Path) -> None:
    """Writers that do not ask (passthrough, mappings of drafts) meet ENOSPC; the service itself goes on."""
    tier = new_tier(root, "tmpfs", 16 * MIB, 4096)
    try:
        sealed = put(tier, b"kept" * 1000).extent
        drafts = [tier.reserve() for _ in range(20)]
        with pytest.raises(OSError, match="No space left"):
            overfill([tier.open_draft(draft) for draft in drafts])
        usage = tier.usage()
        assert usage.used_bytes <= usage.capacity_bytes == 16 * MIB
        with pytest.raises(NoSpace):
            tier.reserve(MIB)
        tier.table.put(b"k" * 16, 2, sealed.slot, sealed.generation, 4000)
        assert tier.table.match(b"k" * 16) == 1
        reader = Table.attach(tier.root / "table", STORE)
        for _ in range(2000):
            assert reader.get(os.urandom(16)) is None, (
                "a miss in untouched pages must not need memory: SIGBUS"
            )
        with tier.lease(sealed) as lease:
            assert os.pread(lease.fileno(), 4, 0) == b"kept"
        for draft in drafts:
            tier.abort(draft)
        assert tier.usage().used_bytes < 3 * MIB
    finally:
        tier.close()


@needs_mount
@pytest.mark.mount
def test_a_full_tmpfs_refuses_new_slot_headers_instead_of_killing(root: Path) -> None:
    """A store to a page that a full tmpfs cannot give is SIGBUS, so headers are backed before their use."""
    tier = new_tier(root, "tmpfs", 16 * MIB, 4096)
    try:
        filler = tier.root / "filler"
        with pytest.raises(OSError, match="No space left"):
            overfill([os.open(filler, os.O_CREAT | os.O_WRONLY)], 32 * MIB)
        with pytest.raises(NoSpace, match="header of slot"):
            list(iter(tier.reserve, None))  # the pages that are there already serve some
        filler.unlink()
        tier.reserve()
    finally:
        tier.close()


def test_a_directory_refuses_the_seal_of_what_went_over(root: Path) -> None:
    tier = new_tier(root, "directory", 16 * MIB)
    try:
        extents = [put(tier, b"x" * 4 * MIB, number).extent for number in range(3)]
        drafts = [tier.reserve() for _ in range(2)]
        for draft in drafts:
            write(tier, draft, b"y" * 3 * MIB)
        with pytest.raises(NoSpace):
            tier.reserve()
        tier.seal(drafts[0], block_header(1))
        with pytest.raises(NoSpace, match="over its"):
            tier.seal(drafts[1], block_header(2))
        tier.free(extents[0])
        tier.seal(drafts[1], block_header(2))
    finally:
        tier.close()


def test_small_tiers_have_no_more_slots_than_pages(root: Path) -> None:
    tier = new_tier(root, "directory", limits.MIN_DRAM_BYTES, limits.MAX_SLOTS)
    assert tier.usage().max_slots == limits.MIN_DRAM_BYTES // 4096
    assert (tier.root / "table").stat().st_size < limits.MIN_DRAM_BYTES // 8
    tier.close()


# --- coming and going ------------------------------------------------------------------------------------
@needs_mount
@pytest.mark.mount
def test_the_tmpfs_is_private_sized_and_huge(root: Path) -> None:
    os.makedirs(root)
    tier = DramTier.open(root, 64 * MIB, store_id=STORE, max_slots=64, gid=777, mode="tmpfs")
    options = subprocess.run(
        ["findmnt", "-nro", "SOURCE,FSTYPE,OPTIONS", str(root)], capture_output=True, text=True, check=True
    ).stdout
    assert options.startswith("kvfs-dram tmpfs rw,nosuid,nodev,noexec,relatime")
    assert "size=65536k" in options
    assert os.stat(root).st_mode & 0o7777 == 0o750
    for path in (root, tier.directory, tier.root / "table"):
        assert path.stat().st_gid == 777
    draft = tier.reserve()
    assert slot_path(tier, draft).stat().st_gid == 777
    assert (tier.root / "table").stat().st_mode & 0o7777 == 0o640
    tier.close()
    assert not tmpfs.is_mounted(root)


def test_auto_falls_back_and_says_what_is_missing(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(root: Path, flags: int, options: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(tmpfs, "_mount", refuse)
    with pytest.raises(DeviceMissing, match="CAP_SYS_ADMIN"):
        new_tier(root, "tmpfs")
    with caplog.at_level(logging.WARNING):
        tier = new_tier(root, "auto")
    assert tier.backing == "directory"
    assert "CAP_SYS_ADMIN" in caplog.text
    put(tier, b"works")
    tier.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_an_ordinary_user_gets_a_directory(root: Path) -> None:
    root.parent.chmod(0o777)
    code = (
        "import os, sys; from pathlib import Path; from tiers.dram.tier import DramTier\n"
        "from tests.conformance.tier_suite import put; os.setgid(65534); os.setuid(65534)\n"
        "tier = DramTier.open(Path(sys.argv[1]), 1 << 24, store_id=bytes(16))\n"
        "extent = put(tier, b'x' * 5000).extent; lease = tier.lease(extent)\n"
        "assert tier.free(extent) == 8192; lease.close(); assert tier.sweep() == 8192\n"
        "print(tier.backing, flush=True); tier.close()"
    )
    with Helper(code, root) as other:
        other.expect("directory")
        assert other.process.wait(WAIT_S) == 0


def test_two_services_do_not_share_a_root(root: Path, tier: DramTier) -> None:
    with pytest.raises(StoreLocked, match=str(root)):
        new_tier(root, tier.backing)
    put(tier, b"still mine")


def test_close_leaves_nothing(root: Path, mode: str) -> None:
    tier = new_tier(root, mode)
    before = len(os.listdir("/proc/self/fd"))
    lease = tier.lease(put(tier, b"x" * MIB).extent)
    mapping = mmap.mmap(lease.fileno(), MIB, prot=mmap.PROT_READ)
    extent = put(tier, b"held").extent
    second = tier.lease(extent)
    tier.free(extent)
    tier.close()
    tier.close()
    assert not tmpfs.is_mounted(root)
    assert list(root.iterdir()) == []
    assert mapping[:4] == b"xxxx", "holders keep their bytes after the service"
    mapping.close()
    lease.close()
    second.close()
    assert len(os.listdir("/proc/self/fd")) < before


SERVICE = """
import sys, os
from pathlib import Path
from tiers.dram.tier import DramTier
from tests.conformance.tier_suite import put
tier = DramTier.open(Path(sys.argv[1]), 32 << 20, store_id=b"sixteen-byte-id.", mode=sys.argv[2])
extent = put(tier, b"from the first service").extent
tier.table.put(b"k" * 16, 2, extent.slot, extent.generation, 22)
print(extent.slot, flush=True)
sys.stdin.readline()
"""


def test_a_killed_service_is_followed_by_an_empty_tier(root: Path, mode: str) -> None:
    with Helper(SERVICE, root, mode) as service:
        service.expect("0")
        reader = Table.attach(root / "table", STORE)
        held = os.open(root / "slots" / native.slot_name(0), os.O_RDONLY)
        service.kill()
    assert reader.alive
    assert (mode == "tmpfs") == tmpfs.is_mounted(root)
    tier = new_tier(root, mode, 48 * MIB)
    assert not reader.alive
    assert reader.get(b"k" * 16) is not None, "attached readers keep a consistent old view"
    assert os.pread(held, 100, 0) == b"from the first service"
    assert tier.table.get(b"k" * 16) is None
    assert list(tier.sealed()) == []
    assert tier.usage().capacity_bytes == 48 * MIB
    if mode == "tmpfs":
        assert os.statvfs(root).f_blocks * os.statvfs(root).f_bsize == 48 * MIB
    put(tier, b"from the second")
    assert os.pread(held, 100, 0) == b"from the first service"
    os.close(held)
    tier.close()


@needs_mount
@pytest.mark.mount
def test_a_smaller_restart_does_not_forget_what_holders_hold(root: Path) -> None:
    with Helper(SERVICE, root, "tmpfs") as service:
        service.expect("0")
        held = os.open(root / "slots" / native.slot_name(0), os.O_RDWR)
        service.kill()
    os.pwrite(held, b"x" * 20 * MIB, 0)
    with pytest.raises(ConfigError, match="still hold"):
        new_tier(root, "tmpfs", 16 * MIB)
    tier = new_tier(root, "tmpfs", 32 * MIB)
    assert tier.usage().used_bytes > 20 * MIB
    os.close(held)
    assert tier.usage().used_bytes < 4 * MIB
    tier.close()


def test_a_kept_tier_is_clean_and_its_table_lives(root: Path, mode: str) -> None:
    tier = new_tier(root, mode)
    extent = put(tier, b"kept").extent
    tier.close(keep=True)
    table = Table.attach(root / "table", STORE)
    assert table.clean
    assert table.alive
    assert table.read_header(extent.slot).generation == extent.generation
    assert (root / "slots" / native.slot_name(extent.slot)).read_bytes() == b"kept"


@pytest.mark.parametrize(
    ("capacity_bytes", "max_slots", "mode", "message"),
    [
        (1 << 20, 10, "auto", "below the least"),
        (1 << 30, 0, "auto", "0 slots"),
        (1 << 30, limits.MAX_SLOTS + 1, "auto", "slots"),
        (1 << 30, 10, "ramdisk", "'ramdisk' is none of"),
    ],
)
def test_sizes_and_modes_are_checked(
    root: Path, capacity_bytes: int, max_slots: int, mode: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        new_tier(root, mode, capacity_bytes, max_slots)
    assert not root.exists()
