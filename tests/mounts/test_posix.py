"""What POSIX says of small things, probed on the mount; on a plain directory (`KVFS_TEST_PATH=dir`) it is the same."""

# mypy: disable-error-code="func-returns-value"
from __future__ import annotations

import errno
import mmap
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import pytest

from kvfs.cli import service_commands
from kvfs.errors import AccessDenied, NotPermitted
from tests.support.crash_harness import fast_directory
from tests.support.door import Door
from tests.support.posix import (
    FALLOC_FL_KEEP_SIZE,
    FALLOC_FL_PUNCH_HOLE,
    NOBODY,
    SOMEBODY,
    Directory,
    expect_errno,
    fallocate,
    opened,
    run_as,
    write_all,
)
from tests.support.waits import eventually

pytestmark = pytest.mark.mount

OLD_NS = 1_500_000_000_123_456_789


def sealed(door: Door, path: Path) -> None:
    if door.service is not None:
        eventually(lambda: os.getxattr(path, "user.kvfs.state") == b"sealed", "sealed")


# --- times -------------------------------------------------------------------------------------------------
def test_what_is_written_again_at_once_is_sealed_each_time(door: Door) -> None:
    """Each version is a draft of one node, and may come while the one before still waits for its publication."""
    for number in range(40):
        path = door.path / f"again-{number}"
        path.write_bytes(b"first")
        for _ in range(2):
            with opened(path, os.O_RDWR):
                pass
        sealed(door, path)


def test_opening_for_writing_without_a_write_changes_no_time(door: Door) -> None:
    path = door.path / "file"
    path.write_bytes(b"bytes")
    os.utime(path, ns=(OLD_NS, OLD_NS))
    for flags in (os.O_RDWR, os.O_WRONLY | os.O_APPEND):
        with opened(path, flags) as fd:
            assert os.fstat(fd).st_mtime_ns == OLD_NS
        sealed(door, path)
        assert path.stat().st_mtime_ns == OLD_NS
    with opened(path, os.O_RDWR) as fd:
        os.pwrite(fd, b"B", 0)
    assert path.stat().st_mtime_ns > OLD_NS
    os.utime(path, ns=(OLD_NS, OLD_NS))
    os.truncate(path, 4000)
    assert path.stat().st_mtime_ns > OLD_NS


def test_a_new_file_has_no_time_of_an_earlier_one(door: Door) -> None:
    for i in range(30):
        began_ns = time.time_ns() - 20_000_000
        path = door.path / f"file-{i % 3}"
        with opened(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as fd:
            found = os.fstat(fd)
            assert min(found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns) >= began_ns
            write_all(fd, b"x")
            os.utime(fd, ns=(1, 2))
        path.unlink()


# --- groups and privileges ---------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [1, 40])
def test_a_setgid_directory_gives_its_group(door: Door, count: int) -> None:
    """Also to files that the native loop makes by itself, which takes a few before it."""
    os.chown(door.path, 0, 4242)
    door.path.chmod(0o2777)
    for i in range(count):
        path = door.path / f"file-{i}"
        with opened(path, os.O_WRONLY | os.O_CREAT) as fd:
            assert os.fstat(fd).st_gid == 4242
        assert path.stat().st_gid == 4242
    (door.path / "sub").mkdir(mode=0o750)
    found = (door.path / "sub").stat()
    assert (found.st_gid, stat.S_IMODE(found.st_mode)) == (4242, 0o2750)
    run_as(NOBODY, lambda: os.close(os.open(door.path / "other", os.O_CREAT | os.O_WRONLY, 0o2755)))
    found = (door.path / "other").stat()
    assert (found.st_gid, found.st_mode & stat.S_ISGID) == (4242, 0)


def punch(fd: int) -> None:
    fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096)


def store(fd: int) -> None:
    with mmap.mmap(fd, 4096) as mapped:
        mapped[0] = 80
        mapped.flush()


PRIVILEGES: Final = stat.S_ISUID | stat.S_ISGID
PRIVILEGED_MODES: Final = (0o4777, 0o2777, 0o6777, 0o2666, 0o6666)
CHANGES: Final[dict[str, Callable[[int, Path], object]]] = {
    "write": lambda fd, _: os.pwrite(fd, b"P", 0),
    "fallocate": lambda fd, _: fallocate(fd, 0, 0, 8192),
    "punch": lambda fd, _: punch(fd),
    "ftruncate": lambda fd, _: os.ftruncate(fd, 100),
    "truncate": lambda _, path: os.truncate(path, 7000),
    "open": lambda _, path: os.close(os.open(path, os.O_WRONLY | os.O_TRUNC)),
    "store": lambda fd, _: store(fd),
}


def make_program(path: Path, mode: int) -> int:
    """Make a file of NOBODY's and a group that he is not in; a descriptor of it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    write_all(fd, b"program" * 1000)
    os.fchown(fd, NOBODY, 4242)
    os.fchmod(fd, mode)
    return fd


WHO: Final[dict[str, tuple[int, Sequence[int]]]] = {
    "root": (0, ()),
    "owner": (NOBODY, ()),
    "member": (NOBODY, (7, 4242)),
    "other": (SOMEBODY, ()),
}


def privileges_after(door: Door, mode: int, how: str, who: str) -> int:
    """What is left of setuid and setgid: all where root changes a file, who has CAP_FSETID, or a mapping does."""
    if who == "root" or how == "store":
        return mode & PRIVILEGES
    if who == "member" and not mode & stat.S_IXGRP:
        return mode & stat.S_ISGID
    if door.mode == "plain" and mode == 0o6666 and how != "open":
        return stat.S_ISGID  # no privilege, as the group may not execute: the kernel leaves it
    return 0


@pytest.mark.parametrize("seals", [False, True], ids=["written", "sealed"])
@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("who", WHO)
def test_privileges_end_with_a_write(door: Door, how: str, who: str, seals: bool) -> None:
    """For who has no CAP_FSETID, at once and for good; a tmpfs and ext4 do the same."""
    if how in ("fallocate", "punch") and door.mode == "plain":
        pytest.skip("no fallocate there")
    door.path.chmod(0o777)
    for mode in PRIVILEGED_MODES:
        path = door.path / f"{mode:o}"
        first = make_program(path, mode)
        if seals:
            os.close(first)
            sealed(door, path)
        assert stat.S_IMODE(path.stat().st_mode) == mode, "as install(1) makes it"

        def change(path: Path = path) -> int:
            with opened(path, os.O_RDWR) as fd:
                CHANGES[how](fd, path)
                return os.fstat(fd).st_mode & PRIVILEGES

        kept, (uid, groups) = privileges_after(door, mode, how, who), WHO[who]
        assert run_as(uid, change, groups) == kept, oct(mode)
        if not seals:
            os.close(first)
        sealed(door, path)
        assert path.stat().st_mode & PRIVILEGES == kept, oct(mode)


@pytest.mark.parametrize("owner", [(7, 8), (7, -1), (-1, -1)], ids=["both", "user", "none"])
def test_privileges_end_with_a_change_of_owner(door: Door, owner: tuple[int, int]) -> None:
    """Root's as well, and where it changes nothing; but for setgid where the group may not execute."""
    for mode in PRIVILEGED_MODES:
        path = door.path / f"{mode:o}"
        with opened(path, os.O_RDONLY | os.O_CREAT):
            os.close(make_program(path, mode))
            os.chown(path, *owner)
            kept = 0 if mode & stat.S_IXGRP else mode & stat.S_ISGID
            assert path.stat().st_mode & PRIVILEGES == kept, oct(mode)
        sealed(door, path)
        os.chmod(path, mode)
        os.chown(path, *owner)
        assert path.stat().st_mode & PRIVILEGES == kept, oct(mode)


# --- directories -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [0, 3, 1500])
def test_a_listing_begins_with_the_dots(door: Door, count: int) -> None:
    for i in range(count):
        (door.path / f"d{i}").mkdir() if i < 3 else os.mknod(door.path / f"f{i}")
    stream = Directory(door.path, dots=True)
    found = list(iter(stream.read, None))
    stream.close()
    assert sorted(name for name, _ in found[:2]) == [".", ".."] or door.service is None
    assert len(found) == len({name for name, _ in found}) == count + 2
    assert {name for name, kind in found if kind == 4} == {
        ".",
        "..",
        *(f"d{i}" for i in range(min(count, 3))),
    }
    if count:
        with os.scandir(door.path) as entries:
            assert all(entry.inode() == entry.stat().st_ino for entry in entries)


def test_places_in_a_listing_lead_back(door: Door) -> None:
    """telldir and seekdir, by small and large steps, with small reads between that use half of the kernel's buffer."""
    for i in range(900):
        os.mknod(door.path / f"{i:04}")
    stream = Directory(door.path)
    places = []
    while True:
        places.append(stream.tell())
        if stream.read() is None:
            break
    names = sorted(os.listdir(door.path))
    for at in (0, 1, 5, 255, 256, 257, 500, 899, 3, 640):
        stream.seek(places[at])
        rest = list(stream.names())
        assert len(rest) == 900 - at
        if door.service is not None:
            assert rest == names[at:]
    stream.close()


def test_links_of_a_directory(door: Door) -> None:
    """1, as on btrfs: subdirectories are not counted, which find(1) knows. A removed one has none."""
    (door.path / "sub").mkdir()
    with opened(door.path / "sub", os.O_RDONLY) as fd:
        assert os.fstat(fd).st_nlink == (2 if door.service is None else 1)
        (door.path / "sub").rmdir()
        assert os.fstat(fd).st_nlink == 0


# --- sizes -------------------------------------------------------------------------------------------------
def test_too_large_is_said_at_the_write_where_it_is_seen(door: Door) -> None:
    service = door.need_service()
    limit = 64 << 20  # a quarter of the test service's DRAM
    fd = os.open(door.path / "file", os.O_RDWR | os.O_CREAT)
    with expect_errno(errno.EFBIG):
        os.ftruncate(fd, limit + 1)
    if service.mode == "passthrough":  # writes are not seen
        os.pwrite(fd, b"x", limit)
        with expect_errno(errno.EFBIG):
            os.close(fd)
        eventually(lambda: not (door.path / "file").exists(), "the file is dropped")
    else:
        with expect_errno(errno.EFBIG):
            os.pwrite(fd, b"x", limit)
        os.pwrite(fd, b"x", limit - 1)
        os.close(fd)


def test_fallocate_where_the_mode_has_it(door: Door) -> None:
    with opened(door.path / "file", os.O_RDWR | os.O_CREAT) as fd:
        os.posix_fallocate(fd, 0, 10_000)  # the library writes zeros where the mode has no fallocate
        assert os.fstat(fd).st_size == 10_000
        assert os.pread(fd, 10_000, 0) == bytes(10_000)
        for offset, length in ((-1, 1), (0, 0), (0, -1)):
            with expect_errno(errno.EINVAL):
                os.posix_fallocate(fd, offset, length)


# --- the same answers as a disk ----------------------------------------------------------------------------
def outcome(call: Callable[[Path], object], where: Path) -> object:
    try:
        return call(where)
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def with_file(call: Callable[[Path], object]) -> Callable[[Path], object]:
    def run(where: Path) -> object:
        (where / "file").write_bytes(b"0123456789")
        (where / "dir").mkdir()
        (where / "full" / "sub").mkdir(parents=True)
        return call(where)

    return run


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


PROBES: dict[str, Callable[[Path], object]] = {
    "chmod": lambda d: (os.chmod(d / "file", 0o7777 & ~0o6000), mode_of(d / "file")),
    "chmod missing": lambda d: os.chmod(d / "missing", 0o600),
    "chmod below a file": lambda d: os.chmod(d / "file/x", 0o600),
    "chmod a directory": lambda d: (os.chmod(d / "dir", 0o1711), mode_of(d / "dir")),
    "chown": lambda d: (os.chown(d / "file", 12, 34), (d / "file").stat().st_uid, (d / "file").stat().st_gid),
    "chown nothing": lambda d: (os.chown(d / "file", -1, -1), (d / "file").stat().st_uid),
    "chown by nobody": lambda d: run_as(NOBODY, lambda: outcome(lambda p: os.chown(p / "file", 1, 1), d)),
    "chmod by nobody": lambda d: run_as(NOBODY, lambda: outcome(lambda p: os.chmod(p / "file", 0), d)),
    "truncate down": lambda d: (os.truncate(d / "file", 3), (d / "file").read_bytes()),
    "truncate up": lambda d: (os.truncate(d / "file", 12), (d / "file").read_bytes()),
    "truncate negative": lambda d: os.truncate(d / "file", -1),
    "truncate a directory": lambda d: os.truncate(d / "dir", 0),
    "truncate missing": lambda d: os.truncate(d / "missing", 0),
    "ftruncate read-only": lambda d: os.ftruncate(os.open(d / "file", os.O_RDONLY), 0),
    "mkdir exists": lambda d: os.mkdir(d / "dir"),
    "mkdir over a file": lambda d: os.mkdir(d / "file"),
    "mkdir in missing": lambda d: os.mkdir(d / "missing/x"),
    "mkdir long": lambda d: os.mkdir(d / ("x" * 256)),
    "mkdir dot": lambda d: os.mkdir(d / "dir/."),
    "mkdir dotdot": lambda d: os.mkdir(f"{d}/dir/.."),
    "rmdir": lambda d: (os.rmdir(d / "dir"), (d / "dir").exists()),
    "rmdir full": lambda d: os.rmdir(d / "full"),
    "rmdir file": lambda d: os.rmdir(d / "file"),
    "rmdir dot": lambda d: os.rmdir(f"{d}/dir/."),
    "rmdir dotdot": lambda d: os.rmdir(f"{d}/dir/.."),
    "rmdir missing": lambda d: os.rmdir(d / "missing"),
    "unlink": lambda d: (os.unlink(d / "file"), (d / "file").exists()),
    "unlink directory": lambda d: os.unlink(d / "dir"),
    "unlink slash": lambda d: os.unlink(f"{d}/file/"),
    "unlink missing": lambda d: os.unlink(d / "missing"),
    "rename": lambda d: (os.rename(d / "file", d / "new"), (d / "new").read_bytes(), (d / "file").exists()),
    "rename file over directory": lambda d: os.rename(d / "file", d / "dir"),
    "rename directory over file": lambda d: os.rename(d / "dir", d / "file"),
    "rename over full": lambda d: os.rename(d / "dir", d / "full"),
    "rename over empty": lambda d: (os.rename(d / "full", d / "dir"), os.listdir(d / "dir")),
    "rename into itself": lambda d: os.rename(d / "full", d / "full/sub/x"),
    "rename missing": lambda d: os.rename(d / "missing", d / "x"),
    "rename to itself": lambda d: (os.rename(d / "file", d / "file"), (d / "file").read_bytes()),
    "rename dot": lambda d: os.rename(f"{d}/dir/.", d / "x"),
    "open directory for writing": lambda d: os.open(d / "dir", os.O_WRONLY),
    "open excl": lambda d: os.open(d / "file", os.O_CREAT | os.O_EXCL),
    "open file as directory": lambda d: os.open(d / "file", os.O_RDONLY | os.O_DIRECTORY),
    "open creat slash": lambda d: os.open(f"{d}/new/", os.O_CREAT | os.O_WRONLY),
    "open creat on directory": lambda d: os.open(d / "dir", os.O_CREAT | os.O_RDWR),
    "open trunc": lambda d: (
        os.close(os.open(d / "file", os.O_WRONLY | os.O_TRUNC)),
        (d / "file").read_bytes(),
    ),
    "open nofollow": lambda d: os.close(os.open(d / "file", os.O_RDONLY | os.O_NOFOLLOW)),
    "open by nobody": lambda d: run_as(NOBODY, lambda: outcome(lambda p: os.open(p / "file", os.O_RDWR), d)),
    "read a write-only": lambda d: os.read(os.open(d / "file", os.O_WRONLY), 1),
    "write a read-only": lambda d: os.write(os.open(d / "file", os.O_RDONLY), b"x"),
    "seek": lambda d: os.lseek(os.open(d / "file", os.O_RDONLY), -1, os.SEEK_SET),
    "read past the end": lambda d: os.pread(os.open(d / "file", os.O_RDONLY), 9, 99),
    "utimensat": lambda d: (os.utime(d / "file", ns=(7, 8)), (d / "file").stat().st_mtime_ns),
    "utimensat missing": lambda d: os.utime(d / "missing"),
    "utimensat by nobody": lambda d: run_as(
        NOBODY, lambda: outcome(lambda p: os.utime(p / "file", (1, 1)), d)
    ),
    "mknod": lambda d: (os.mknod(d / "new", 0o640), mode_of(d / "new"), (d / "new").stat().st_size),
    "mknod exists": lambda d: os.mknod(d / "file"),
    "access": lambda d: [os.access(d / "file", mode) for mode in (os.F_OK, os.R_OK, os.W_OK, os.X_OK)],
    "listdir a file": lambda d: os.listdir(d / "file"),
    "readlink": lambda d: os.readlink(d / "file"),
    "symlink": lambda d: (os.symlink("file", d / "new"), os.readlink(d / "new"), os.lstat(d / "new").st_size),
    "symlink exists": lambda d: os.symlink("x", d / "file"),
    "symlink onto directory": lambda d: os.symlink("x", d / "dir"),
    "symlink empty": lambda d: os.symlink("", d / "new"),
    "symlink too long": lambda d: os.symlink("x" * 4096, d / "new"),
    "symlink by nobody": lambda d: run_as(NOBODY, lambda: outcome(lambda p: os.symlink("x", p / "new"), d)),
    "symlink through file": lambda d: os.symlink("x", d / "file" / "new"),
    "open link nofollow": lambda d: (os.symlink("file", d / "new"), os.open(d / "new", os.O_NOFOLLOW)),
    "open link creat": lambda d: (
        os.symlink("made", d / "new"),
        os.close(os.open(d / "new", os.O_CREAT | os.O_WRONLY)),
        sorted(os.listdir(d)),
    ),
    "link to itself": lambda d: (os.symlink("new", d / "new"), os.stat(d / "new")),
    "chmod of a link": lambda d: (
        os.symlink("file", d / "new"),
        os.chmod(d / "new", 0o600),
        mode_of(d / "file"),
    ),
    "truncate through a link": lambda d: (
        os.symlink("file", d / "new"),
        os.truncate(d / "new", 3),
        (d / "file").read_bytes(),
    ),
    "rename link onto itself": lambda d: (
        os.symlink("x", d / "new"),
        os.rename(d / "new", d / "new"),
        sorted(os.listdir(d)),
    ),
    "rename link onto file": lambda d: (
        os.symlink("x", d / "new"),
        os.rename(d / "new", d / "file"),
        os.readlink(d / "file"),
    ),
}
REFUSED = {
    "link": (lambda d: os.link(d / "file", d / "new"), "EPERM"),
    "mkfifo": (lambda d: os.mkfifo(d / "new"), "EPERM"),
    "mknod device": (lambda d: os.mknod(d / "new", stat.S_IFCHR, 0x103), "EPERM"),
    "O_TMPFILE": (lambda d: os.open(d, os.O_TMPFILE | os.O_RDWR), "ENOTSUP"),
    "setxattr": (lambda d: os.setxattr(d / "file", "user.other", b"x"), "ENOTSUP"),
}
"""What docs/mount.md says a cache does not do, and its answer."""


@pytest.mark.parametrize("finished", [True, False], ids=["sealed", "draft"])
def test_answers_are_those_of_a_disk(door: Door, finished: bool) -> None:
    door.path.chmod(0o777)
    differences = {}
    base = Path(tempfile.mkdtemp(prefix="disk-", dir=fast_directory()))
    base.chmod(0o755)
    for number, (name, probe) in enumerate(PROBES.items()):
        disk, here = base / f"{number}", door.path / f"{number}"
        disk.mkdir()
        here.mkdir()
        for where in (disk, here):
            where.chmod(0o755)
        made = with_file(lambda where: None)
        made(disk), made(here)
        if finished:
            sealed(door, here / "file")
        found = outcome(probe, here)
        if found != (expected := outcome(probe, disk)):
            differences[name] = (found, expected)
    shutil.rmtree(base)
    assert differences == {}


def test_what_is_refused_is_refused_as_documented(door: Door) -> None:
    door.need_service()
    with_file(lambda where: None)(door.path)
    found = {name: outcome(call, door.path) for name, (call, _) in REFUSED.items()}
    assert found == {name: answer for name, (_, answer) in REFUSED.items()}


# --- commands ----------------------------------------------------------------------------------------------
def test_another_user_who_unmounts_gets_an_error(door: Door) -> None:
    service = door.need_service()

    with pytest.raises(NotPermitted, match="still mounted"):
        run_as(NOBODY, lambda: service_commands.umount(str(service.mount)))
    assert os.path.ismount(service.mount)


def test_a_closed_directory_is_not_listed_and_not_empty(door: Door) -> None:
    service = door.need_service()
    closed, open_below = door.path / "closed", door.path / "searched" / "open"
    closed.mkdir()
    open_below.mkdir(parents=True)
    for path in (closed, open_below):
        (path / "file").write_bytes(b"x")
        sealed(door, path / "file")
    closed.chmod(0o711)
    (door.path / "searched").chmod(0o711)

    def list_all(path: Path) -> list[str]:
        with service.client() as client:
            return [entry.name for entry in client.list(service.name(path) + "/", delimiter="/")]

    with pytest.raises(AccessDenied):
        run_as(NOBODY, lambda: list_all(closed))
    assert [name for name in run_as(NOBODY, lambda: list_all(open_below)) if name.endswith("/file")]
