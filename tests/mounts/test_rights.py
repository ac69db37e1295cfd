"""Who may do what at the path door, what a cache refuses, names at their limits, capacity, attributes."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfs import limits
from tests.support.door import Door
from tests.support.posix import NOBODY, SOMEBODY, expect_errno, in_child, opened, run_as, write_all
from tests.support.waits import eventually

pytestmark = pytest.mark.mount

CAPACITY_BYTES = 256 << 20
"""What `tests.support.service.DEFAULT_DRAM`."""


def state(path: Path) -> bytes:
    return os.getxattr(path, "user.kvfs.state")


# --- two users ---------------------------------------------------------------------------------------------
def test_a_file_belongs_to_who_made_it(door: Door) -> None:
    door.path.chmod(0o777)
    path = door.path / "file"
    run_as(NOBODY, lambda: path.write_bytes(b"mine"))
    run_as(NOBODY, lambda: (door.path / "directory").mkdir())
    for made in (path, door.path / "directory"):
        found = made.stat()
        assert (found.st_uid, found.st_gid) == (NOBODY, NOBODY)
    assert run_as(NOBODY, path.read_bytes) == b"mine"


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "being written"])
def test_modes_are_enforced_between_users(door: Door, finished: bool) -> None:
    path = door.path / "file"
    with opened(path, os.O_WRONLY | os.O_CREAT, 0o600) as fd:
        write_all(fd, b"content")
        os.fchown(fd, NOBODY, NOBODY)
        if not finished:
            check_modes(path)
    if finished:
        check_modes(path)


def check_modes(path: Path) -> None:
    both = os.R_OK | os.W_OK
    readable: list[tuple[int, bool, bool]] = [
        (0o600, False, False),
        (0o644, True, False),
        (0o666, True, True),
    ]
    for mode, may_read, may_write in readable:
        path.chmod(mode)
        assert run_as(NOBODY, path.read_bytes) == b"content"
        for flags, allowed in [(os.O_RDONLY, may_read), (os.O_WRONLY, may_write), (os.O_RDWR, may_write)]:
            assert run_as(SOMEBODY, lambda flags=flags: may_open(path, flags)) is allowed, (oct(mode), flags)
        assert run_as(SOMEBODY, lambda: os.access(path, both)) is (may_read and may_write)
    path.chmod(0o200)
    assert run_as(NOBODY, lambda: may_open(path, os.O_RDONLY)) is False
    path.chmod(0o644)


def may_open(path: Path, flags: int) -> bool:
    try:
        os.close(os.open(path, flags))
    except PermissionError as error:
        assert error.errno == errno.EACCES  # noqa: PT017 - in a child: this is the answer
        return False
    return True


def test_a_read_only_user_may_not_write_by_any_call(door: Door) -> None:
    path = door.path / "file"
    path.write_bytes(b"content")
    refused: dict[str, tuple[Callable[[], object], int]] = {
        "truncate": (lambda: os.truncate(path, 0), errno.EACCES),
        "O_TRUNC": (lambda: os.open(path, os.O_RDONLY | os.O_TRUNC), errno.EACCES),
        "unlink": (path.unlink, errno.EACCES),
        "rename": (lambda: os.rename(path, door.path / "other"), errno.EACCES),
        "create": (lambda: os.open(door.path / "new", os.O_WRONLY | os.O_CREAT), errno.EACCES),
        "mkdir": (lambda: os.mkdir(door.path / "new"), errno.EACCES),
        "chmod": (lambda: path.chmod(0o777), errno.EPERM),
        "chown": (lambda: os.chown(path, NOBODY, NOBODY), errno.EPERM),
        "utime": (lambda: os.utime(path, (0, 0)), errno.EPERM),
        "setxattr": (lambda: os.setxattr(path, "user.kvfs.pin", b"1"), errno.EACCES),
    }
    if door.service is None:
        del refused["setxattr"]
    for call, number in refused.values():
        with expect_errno(number):
            run_as(NOBODY, call)
    assert path.read_bytes() == b"content"
    assert stat.S_IMODE(path.stat().st_mode) & 0o777 == path.stat().st_mode & 0o777
    assert os.listdir(door.path) == ["file"]


def test_a_file_made_read_only_is_writable_by_its_maker(door: Door) -> None:
    """git makes its objects with mode 0444 and writes them through the descriptor that made them."""
    door.path.chmod(0o777)
    path = door.path / "object"

    def make() -> None:
        with opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o444) as fd:
            write_all(fd, b"con")
            os.fchmod(fd, 0o400)
            write_all(fd, b"tent")

    run_as(NOBODY, make)
    assert run_as(NOBODY, path.read_bytes) == b"content"
    assert run_as(NOBODY, lambda: may_open(path, os.O_WRONLY)) is False
    assert run_as(SOMEBODY, lambda: may_open(path, os.O_RDONLY)) is False


def test_a_closed_directory_hides_what_is_below(door: Door) -> None:
    directory = door.path / "private"
    directory.mkdir(mode=0o700)
    (directory / "file").write_bytes(b"x")
    (directory / "file").chmod(0o666)
    for call in (lambda: os.listdir(directory), (directory / "file").read_bytes, (directory / "file").stat):
        with expect_errno(errno.EACCES):
            run_as(NOBODY, call)
    directory.chmod(0o711)
    assert run_as(NOBODY, (directory / "file").read_bytes) == b"x"
    with expect_errno(errno.EACCES):
        run_as(NOBODY, lambda: os.listdir(directory))


def test_a_descriptor_outlives_the_right_to_open(door: Door) -> None:
    """Rights are checked at open(), so an inherited descriptor works for whoever holds it."""
    path = door.path / "file"
    path.write_bytes(b"content")
    path.chmod(0o600)
    with opened(path, os.O_RDONLY) as fd:
        assert run_as(NOBODY, lambda: os.pread(fd, 100, 0)) == b"content"


def test_the_sticky_bit(door: Door) -> None:
    door.path.chmod(0o1777)
    path = door.path / "file"
    run_as(NOBODY, lambda: path.write_bytes(b"mine"))
    with expect_errno(errno.EPERM):
        run_as(SOMEBODY, path.unlink)
    run_as(NOBODY, path.unlink)


# --- names at their limits ---------------------------------------------------------------------------------
def test_a_component_of_255_bytes(door: Door) -> None:
    for name in ("n" * 255, "ä" * 127 + "n"):
        (door.path / name).write_bytes(b"x")
        (door.path / (name[:-1] + "d")).mkdir()
        os.rename(door.path / name, door.path / name[::-1])
        assert (door.path / name[::-1]).read_bytes() == b"x"
    assert len(os.listdir(door.path)) == 4


@pytest.mark.parametrize("call", ["create", "mkdir", "stat", "rename"])
def test_a_component_of_256_bytes_is_too_long(door: Door, call: str) -> None:
    long = door.path / ("n" * 256)
    (door.path / "file").write_bytes(b"x")
    calls: dict[str, Callable[[], object]] = {
        "create": lambda: os.open(long, os.O_WRONLY | os.O_CREAT),
        "mkdir": long.mkdir,
        "stat": long.stat,
        "rename": lambda: os.rename(door.path / "file", long),
    }
    with expect_errno(errno.ENAMETOOLONG):
        calls[call]()


def test_a_key_over_1024_bytes_is_too_long(door: Door) -> None:
    """The key is the path below the bucket."""
    service = door.need_service()
    bucket = service.mount / door.path.relative_to(service.mount).parts[0]
    directory = door.path
    while len(bytes(directory.relative_to(bucket))) + 202 < limits.MAX_KEY_BYTES:
        directory /= "d" * 200
        directory.mkdir()
    room = limits.MAX_KEY_BYTES - len(bytes(directory.relative_to(bucket))) - 1
    assert 0 < room <= 255
    fits, over = directory / ("f" * room), directory / ("f" * (room + 1))
    fits.write_bytes(b"x")
    assert fits.read_bytes() == b"x"
    calls: list[Callable[[], object]] = [
        lambda: os.open(over, os.O_WRONLY | os.O_CREAT),
        over.mkdir,
        lambda: os.rename(fits, over),
        # A directory's own key fits, but its child's does not.
        lambda: os.rename(door.path / ("d" * 200), door.path / ("d" * 255)),
    ]
    for call in calls:
        with expect_errno(errno.ENAMETOOLONG):
            call()
    assert os.listdir(directory) == [fits.name]


# --- what a cache refuses ----------------------------------------------------------------------------------
def test_refusals(door: Door) -> None:
    """One table of what a disk does and this door does not, each with its errno."""
    service = door.need_service()
    path = door.path / "file"
    path.write_bytes(b"content")
    other = service.mount / "another-bucket"
    other.mkdir(exist_ok=True)
    refused: dict[str, tuple[Callable[[], object], int]] = {
        "hard link": (lambda: os.link(path, door.path / "link"), errno.EPERM),
        "symbolic link beside the buckets": (lambda: os.symlink("file", service.mount / "link"), errno.EPERM),
        "fifo": (lambda: os.mkfifo(door.path / "fifo"), errno.EPERM),
        "socket": (lambda: os.mknod(door.path / "socket", stat.S_IFSOCK | 0o600), errno.EPERM),
        "device": (lambda: os.mknod(door.path / "null", stat.S_IFCHR | 0o600, os.makedev(1, 3)), errno.EPERM),
        "O_TMPFILE": (lambda: os.open(door.path, os.O_TMPFILE | os.O_RDWR), errno.EOPNOTSUPP),
        "readlink": (lambda: os.readlink(path), errno.EINVAL),
        "file beside the buckets": (
            lambda: os.open(service.mount / "file", os.O_WRONLY | os.O_CREAT),
            errno.EPERM,
        ),
        "file moved beside the buckets": (lambda: os.rename(path, service.mount / "file"), errno.EPERM),
        "removal of a bucket that is not empty": (lambda: os.rmdir(door.path.parent), errno.ENOTEMPTY),
        "removal of the root": (lambda: os.rmdir(service.mount), errno.EBUSY),
        "bucket name over 63 bytes": (lambda: os.mkdir(service.mount / ("b" * 64)), errno.ENAMETOOLONG),
        "attribute that is not there": (lambda: os.getxattr(path, "user.kvfs.nothing"), errno.ENODATA),
        "attribute that is read-only": (lambda: os.setxattr(path, "user.kvfs.tier", b"dram"), errno.EPERM),
    }
    wrong = {
        name: number for name, (call, expected) in refused.items() if (number := errno_of(call)) != expected
    }
    assert {name: errno.errorcode.get(number) for name, number in wrong.items()} == {}
    assert path.read_bytes() == b"content"
    assert os.listdir(door.path) == ["file"]
    other.rmdir()


def errno_of(call: Callable[[], object]) -> int:
    try:
        call()
    except OSError as error:
        return error.errno or 0
    return 0


def test_a_regular_file_by_mknod(door: Door) -> None:
    """mknod of a regular file is a create (tar and some locks use it)."""
    path = door.path / "file"
    os.mknod(path, stat.S_IFREG | 0o640)
    assert path.read_bytes() == b""
    path.write_bytes(b"x")
    assert path.read_bytes() == b"x"


def test_a_file_moves_to_another_bucket_or_is_copied_there(door: Door) -> None:
    service = door.need_service()
    target = service.mount / "moved-to"
    target.mkdir()
    (door.path / "file").write_bytes(b"content")
    number = errno_of(lambda: os.rename(door.path / "file", target / "file"))
    assert number in (0, errno.EXDEV)
    if number == 0:
        assert (target / "file").read_bytes() == b"content"
        (target / "file").unlink()
    else:
        assert (door.path / "file").read_bytes() == b"content"
    target.rmdir()


def test_a_directory_on_the_root_is_a_bucket(door: Door) -> None:
    service = door.need_service()
    bucket = service.mount / "made-by-mkdir"
    bucket.mkdir()
    assert "made-by-mkdir" in os.listdir(service.mount)
    with expect_errno(errno.EEXIST):
        bucket.mkdir()
    (bucket / "file").write_bytes(b"x")
    with expect_errno(errno.ENOTEMPTY):
        bucket.rmdir()
    (bucket / "file").unlink()
    bucket.rmdir()
    assert "made-by-mkdir" not in os.listdir(service.mount)


# --- capacity and attributes -------------------------------------------------------------------------------
def test_statfs(door: Door) -> None:
    found = os.statvfs(door.path)
    assert found.f_namemax == 255
    assert 0 < found.f_bavail <= found.f_bfree <= found.f_blocks
    assert found.f_files >= found.f_ffree > 0


def test_statfs_shows_the_configured_capacity_and_what_is_used(door: Door) -> None:
    door.need_service()
    before = os.statvfs(door.path)
    assert before.f_blocks * before.f_frsize == CAPACITY_BYTES
    path = door.path / "file"
    path.write_bytes(bytes(8 << 20))
    eventually(lambda: state(path) == b"sealed", "sealed")
    after = os.statvfs(door.path)
    assert (before.f_bfree - after.f_bfree) * before.f_frsize >= 8 << 20
    assert after.f_blocks == before.f_blocks


def test_extended_attributes_of_a_file(door: Door) -> None:
    door.need_service()
    path = door.path / "file"
    with opened(path, os.O_WRONLY | os.O_CREAT) as fd:
        write_all(fd, b"x")
        assert state(path) == b"draft"
        assert os.getxattr(fd, "user.kvfs.state") == b"draft"
    eventually(lambda: state(path) == b"sealed", "sealed")
    assert os.getxattr(path, "user.kvfs.tier") == b"dram"
    # Not listed: mv and rsync -X would carry them to other filesystems, and fail to bring them back.
    assert os.listxattr(path) == []
    for wrong in (b"", b"2", b"yes\n\n", b"x" * 1000):
        with expect_errno(errno.EINVAL):
            os.setxattr(path, "user.kvfs.pin", wrong)
    assert os.getxattr(path, "user.kvfs.pin") == b"0"
    os.setxattr(path, "user.kvfs.pin", b"1")
    assert os.getxattr(path, "user.kvfs.pin") == b"1"
    os.setxattr(path, "user.kvfs.pin", b"0")


def test_each_open_is_a_hit(door: Door) -> None:
    """Reads through passthrough never reach the service: hits are opens."""
    door.need_service()
    path = door.path / "file"
    path.write_bytes(b"x")
    eventually(lambda: state(path) == b"sealed", "sealed")
    before = int(os.getxattr(path, "user.kvfs.hits"))
    for _ in range(5):
        assert path.read_bytes() == b"x"
    assert int(os.getxattr(path, "user.kvfs.hits")) == before + 5


def test_attributes_need_no_right_to_read_but_pinning_does(door: Door) -> None:
    door.need_service()
    path = door.path / "file"
    path.write_bytes(b"x")
    eventually(lambda: state(path) == b"sealed", "sealed")
    path.chmod(0o644)
    assert run_as(NOBODY, lambda: os.getxattr(path, "user.kvfs.tier")) == b"dram"
    path.chmod(0o600)
    with expect_errno(errno.EACCES):
        run_as(NOBODY, lambda: os.getxattr(path, "user.kvfs.tier"))


def test_the_root_names_the_socket(door: Door) -> None:
    service = door.need_service()
    address = os.getxattr(service.mount, "user.kvfs.socket")
    assert stat.S_ISSOCK(os.stat(address).st_mode)


def test_programs_that_copy_attributes_meet_no_error(door: Door) -> None:
    """`cp -a` and `rsync -X` ask for ACLs and security labels: none is not an error."""
    path = door.path / "file"
    path.write_bytes(b"x")
    for name in ("security.capability", "system.posix_acl_access", "security.selinux"):
        assert errno_of(lambda name=name: os.getxattr(path, name)) in (errno.ENODATA, errno.EOPNOTSUPP), name
    assert in_child(lambda: os.listxattr(door.path)) == 0
