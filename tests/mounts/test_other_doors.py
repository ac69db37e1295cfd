"""What the kernel and the native loop remember of names and rights, when another door changes them."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvfs.client import Client
from tests.support.block_batches import Block, open_blocks
from tests.support.door import BUCKET, ON_DIRECTORY
from tests.support.posix import NOBODY, SOMEBODY, expect_errno, mapped_pages, opened, run_as, write_all
from tests.support.service import Service
from tests.support.small_store import MIB, state, write_sealed
from tests.support.stores import NAMESPACE
from tests.support.waits import eventually

pytestmark = [pytest.mark.mount, pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")]

HASH_NAME = "0123456789abcdef" * 2
DYING_READER = "import os, sys; os.open(sys.argv[1], os.O_RDONLY); os.kill(os.getpid(), 9)"
"""In a process of its own: a forked one would inherit the mapping."""
DYING_WRITER = (
    "import os, sys; os.write(os.open(sys.argv[1], 1 | os.O_TRUNC), b'no'); os.kill(os.getpid(), 9)"
)


# --- directories -------------------------------------------------------------------------------------------
def test_a_directory_that_another_door_removes_is_gone(service: Service, bucket: Path) -> None:
    path = bucket / "directory"
    path.mkdir()
    assert path.is_dir()
    with service.client() as client:
        client.remove(service.name(path) + "/")
    eventually(lambda: not path.exists(), "the directory is gone")
    assert os.listdir(bucket) == []


DIGEST = b"\x80" + bytes(15)


def test_a_common_prefix_goes_with_its_last_object(service: Service, bucket: Path) -> None:
    path = bucket / "a/b/file"
    with service.client() as client:
        client.put(service.name(path), b"bytes")
        assert path.read_bytes() == b"bytes"
        client.remove(service.name(path))
        eventually(lambda: not (bucket / "a/b").exists(), "the inner prefix is gone")
        eventually(lambda: not (bucket / "a").exists(), "the outer prefix is gone")
        client.put(service.name(path), b"again")
        assert path.read_bytes() == b"again"


def test_a_unit_that_is_evicted_is_no_hit(service: Service, bucket: Path) -> None:
    unit = bucket / HASH_NAME
    unit.mkdir()
    write_sealed(unit / "layer", b"bytes")
    assert unit.is_dir()
    service.evict(unit / "layer")
    eventually(lambda: not unit.exists(), "the directory, which reads as a hit, is gone")


def test_a_directory_that_another_door_renames_has_its_new_name_alone(service: Service, bucket: Path) -> None:
    old, new = bucket / "old", bucket / "new"
    (old / "below").mkdir(parents=True)
    (old / "below/file").write_bytes(b"bytes")
    assert (old / "below/file").read_bytes() == b"bytes"
    with service.client() as client:
        client.rename(service.name(old) + "/", service.name(new) + "/")
    eventually(lambda: not old.exists(), "the old name is gone")
    assert (new / "below/file").read_bytes() == b"bytes"


def test_a_bucket_made_anew_has_its_new_rights(service: Service) -> None:
    path = service.mount / "short-lived"
    with service.client() as client:
        client.create_bucket(path.name, mode=0o755)
        assert path.stat().st_mode & 0o777 == 0o755
        client.remove_bucket(path.name)
        eventually(lambda: not path.exists(), "the bucket is gone")
        client.create_bucket(path.name, mode=0o700)
        assert path.stat().st_mode & 0o777 == 0o700
        client.remove_bucket(path.name)


def test_where_a_file_becomes_a_directory_the_path_shows_the_directory(
    service: Service, bucket: Path
) -> None:
    path = bucket / "both"
    with service.client() as client:
        client.put(service.name(path), b"file")
        assert path.read_bytes() == b"file"
        client.put(service.name(path) + "/below", b"below")
        eventually(path.is_dir, "the directory")
        client.remove(service.name(path) + "/below")
        eventually(path.is_file, "the file again")
        assert path.read_bytes() == b"file"


def test_a_directory_stays_as_it_is_when_a_file_changes_that_it_hides(service: Service, bucket: Path) -> None:
    path = bucket / "both"
    hidden, elsewhere = service.name(path), service.name(bucket / "elsewhere")
    (path / "inner").mkdir(parents=True)
    with service.client() as client, opened(path, os.O_RDONLY | os.O_DIRECTORY) as directory:
        client.put(hidden + "/below", b"below")
        changes: list[Callable[[], object]] = [
            lambda: client.put(hidden, b"file"),
            lambda: client.put(hidden, b"another"),
            lambda: client.set_attributes(hidden, mode=0o600),
            lambda: client.rename(hidden, elsewhere),
            lambda: client.put(hidden, b"a third"),
            lambda: client.evict(hidden),
            lambda: client.symlink("elsewhere", hidden),
            lambda: client.remove(hidden),
        ]
        for change in changes:
            change()
            assert sorted(os.listdir(directory)) == ["below", "inner"]
            os.close(os.open("below", os.O_RDONLY, dir_fd=directory))
            assert os.stat("inner", dir_fd=directory).st_ino == (path / "inner").stat().st_ino
            assert os.fstat(directory).st_ino == path.stat().st_ino


@pytest.mark.parametrize("taken_away", ["removed", "renamed"])
def test_a_file_behind_a_directory_that_is_taken_away_by_path_is_there(
    service: Service, bucket: Path, taken_away: str
) -> None:
    path = bucket / "both"
    with service.client() as client:
        path.mkdir()
        client.put(service.name(path), b"file")
        assert path.is_dir()
        if taken_away == "removed":
            path.rmdir()
        else:
            path.rename(bucket / "directory")
        assert path.read_bytes() == b"file"


def test_what_a_killed_writer_would_have_replaced_is_there(service: Service, bucket: Path) -> None:
    path = bucket / "file"
    with service.client() as client:
        client.put(service.name(path), b"bytes")
        write = [sys.executable, "-c", DYING_WRITER, os.fspath(path)]
        assert os.spawnv(os.P_WAIT, sys.executable, write) == -signal.SIGKILL
        eventually(lambda: reads(path, b"bytes"), "the object that stood before")
        assert client.get(service.name(path)) == b"bytes"


def test_a_directory_with_another_name_takes_no_longer_names_than_fit(service: Service, bucket: Path) -> None:
    (bucket / "short/below").mkdir(parents=True)
    (bucket / "short/below/file").write_bytes(b"bytes")
    long = bucket
    for _ in range(4):
        long /= "n" * 200
        long.mkdir()
    (bucket / "short").rename(long / "moved")
    with expect_errno(errno.ENAMETOOLONG):
        (long / "moved/below" / ("m" * 250)).write_bytes(b"")
    (long / "moved/below/other").write_bytes(b"others")
    assert sorted(os.listdir(long / "moved/below")) == ["file", "other"]


def test_a_tree_that_another_door_made_is_taken_apart_by_path(service: Service, bucket: Path) -> None:
    with service.client() as client:
        for name in ("a/b/c/file", "a/b/d/file"):
            client.put(service.name(bucket / name), b"bytes")
    (bucket / "a/b/c/file").rename(bucket / "moved")
    assert os.listdir(bucket / "a/b/c") == []
    (bucket / "a/b/d/file").unlink()
    (bucket / "a/b/d/new").write_bytes(b"bytes")
    (bucket / "a/b/d").rename(bucket / "d")
    os.rmdir(bucket / "a/b/c")
    shutil.rmtree(bucket / "a")
    assert sorted(os.listdir(bucket)) == ["d", "moved"]


# --- names of both doors -----------------------------------------------------------------------------------
NAMES = ["a", "b", "d", "d/a", "d/b", "d/e/a"]
STEPS = st.tuples(
    st.sampled_from(
        ["write", "write", "unlink", "move", "put", "put", "remove", "rename", "evict", "mkdir", "clear"]
    ),
    st.sampled_from(NAMES),
    st.sampled_from(NAMES),
)


class BothDoors:
    """Steps of either door on a few names, and what there must be afterwards: files by their key, and directories."""

    def __init__(self, service: Service, root: Path, client: Client) -> None:
        self.service, self.root, self.client = service, root, client
        self.files: dict[str, bytes] = {}
        self.directories: set[str] = set()

    def key(self, name: str) -> str:
        return self.service.name(self.root / name)

    def shows_directory(self, name: str) -> bool:
        below = name + "/"
        return name in self.directories or any(
            other.startswith(below) for other in (*self.files, *self.directories)
        )

    def file(self, name: str) -> bytes | None:
        """What the path shows as a file: where both `a` and `a/b` exist, it shows the directory."""
        return None if self.shows_directory(name) else self.files.get(name)

    def free(self, name: str) -> bool:
        """Whether a file of this name can be put by path: its directory is there, and it is none."""
        above = name.rpartition("/")[0]
        return not self.shows_directory(name) and (not above or self.shows_directory(above))

    def take(self, number: int, step: str, name: str, other: str) -> None:
        data, path = b"%d" % number, self.root / name
        shown = self.file(name) is not None
        if shown:
            assert self.client.get(self.key(name)) == self.files[name]  # sealed, whoever wrote it
        if step == "write" and self.free(name):
            (self.root / "draft").write_bytes(data)
            (self.root / "draft").rename(path)
            self.files[name] = data
        elif step == "unlink" and shown:
            path.unlink()
            del self.files[name]
            self.keep_above(name)
        elif step == "move" and shown and self.free(other) and name != other:
            path.rename(self.root / other)
            self.files[other] = self.files.pop(name)
            self.keep_above(name)
        elif step == "put":
            self.client.put(self.key(name), data)
            self.files[name] = data
        elif step == "remove" and shown:
            self.client.remove(self.key(name))
            del self.files[name]
        elif step == "rename" and shown and not self.shows_directory(other) and name != other:
            self.client.rename(self.key(name), self.key(other))
            self.files[other] = self.files.pop(name)
        elif step == "evict" and shown:
            self.client.evict(self.key(name))
            del self.files[name]
        elif step == "mkdir" and self.free(name) and not shown and number % 2:
            path.mkdir()
            self.directories.add(name)
        elif step == "mkdir" and self.free(name) and not shown:
            self.client.make_directory(self.key(name) + "/")
            self.directories.add(name)
        elif step == "clear" and self.shows_directory(name):
            shutil.rmtree(path)
            below = name + "/"
            self.files = {key: data for key, data in self.files.items() if not key.startswith(below)}
            self.directories = {key for key in self.directories if key != name and not key.startswith(below)}
            self.keep_above(name)

    def keep_above(self, name: str) -> None:
        """On a path a directory outlives its last name; one whose last name went at another door does not."""
        above = name.rpartition("/")[0]
        if above and not any(key.startswith(above + "/") for key in [*self.files, *self.directories]):
            self.directories.add(above)

    def check(self) -> None:
        for name in NAMES:
            path, data = self.root / name, self.file(name)
            if self.shows_directory(name):
                eventually(path.is_dir, f"{name} is a directory")
            elif data is None:
                eventually(lambda path=path: not path.exists(), f"{name} is gone")
            else:
                assert path.exists(), f"{name} is gone"  # at once: what there is, is no miss
                eventually(lambda path=path, data=data: reads(path, data), f"{name} is the new one")


def reads(path: Path, data: bytes) -> bool:
    """Whether a file holds this; the kernel may open what it was a moment ago."""
    try:
        return path.read_bytes() == data
    except OSError as error:
        if error.errno not in (errno.ESTALE, errno.ENOENT, errno.EISDIR):
            raise
        return False


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(STEPS, max_size=14))
@example(
    steps=[("put", "d/b", "a"), ("write", "d/a", "a"), ("unlink", "d/a", "a"), ("remove", "d/b", "a")]
).via("the last name of a directory goes at another door than on the path")
def test_names_are_those_that_both_doors_made(service: Service, steps: list[tuple[str, str, str]]) -> None:
    root = Path(tempfile.mkdtemp(dir=service.mount / BUCKET))
    with service.client() as client:
        doors = BothDoors(service, root, client)
        for number, step in enumerate(steps):
            doors.take(number, *step)
            doors.check()
        for name in doors.files:  # a directory taken away by path may uncover a file
            client.remove(doors.key(name))
    shutil.rmtree(root)


# --- rights ------------------------------------------------------------------------------------------------
def test_what_another_door_does_to_rights_is_on_the_path(service: Service, bucket: Path) -> None:
    place = service.mount / "another"
    place.mkdir(mode=0o755)
    with service.client() as client:
        client.put("another/prefix/file", b"bytes", mode=0o644)
        for path in (place, place / "prefix", place / "prefix/file"):
            assert path.stat().st_mode & 0o044 == 0o044
        client.set_attributes("another/prefix/file", mode=0o600)
        eventually(lambda: (place / "prefix/file").stat().st_mode & 0o777 == 0o600, "the file's mode")
        client.set_attributes("another", mode=0o700)
        eventually(lambda: place.stat().st_mode & 0o777 == 0o700, "the bucket's mode")
        eventually(
            lambda: (place / "prefix").stat().st_mode & 0o777 == 0o700, "the mode of what has the bucket's"
        )
    shutil.rmtree(place)


def test_only_the_owner_pins_and_binds_by_path(service: Service, bucket: Path) -> None:
    place = service.mount / "shared"
    place.mkdir()
    place.chmod(0o777)
    bucket.chmod(0o777)
    path = bucket / "file"
    write_sealed(path, b"bytes")
    path.chmod(0o666)
    with expect_errno(errno.EPERM):
        run_as(NOBODY, lambda: os.setxattr(path, "user.kvfs.pin", b"1"))
    with expect_errno(errno.EPERM):
        run_as(NOBODY, lambda: os.setxattr(place, "user.kvfs.namespace", NAMESPACE.canonical))
    os.chown(path, NOBODY, NOBODY)
    run_as(NOBODY, lambda: os.setxattr(path, "user.kvfs.pin", b"1"))
    shutil.rmtree(place)


# --- quotas ------------------------------------------------------------------------------------------------
def open_as(uid: int, path: Path) -> int:
    os.seteuid(uid)
    try:
        return os.open(path, os.O_RDONLY)
    finally:
        os.seteuid(0)


def test_who_holds_more_than_the_quota_opens_nothing(service: Service, bucket: Path) -> None:
    bucket.chmod(0o755)
    small_file = bucket / "small"
    write_sealed(small_file, b"small")
    held = []
    os.setxattr(small_file, "user.kvfs.pin", b"1")
    for i in range(17):  # 17 MiB; the quota is half of 32
        path = bucket / f"held-{i}"
        write_sealed(path, bytes(MIB))
        held.append(open_as(NOBODY, path))
        path.unlink()
    with service.client() as client:  # whose call comes after what unlink(2) does once it is answered
        assert client.status()["tiers"][0]["held_bytes"] >= 17 * MIB
    with expect_errno(errno.EDQUOT):
        os.close(open_as(NOBODY, small_file))
    assert small_file.read_bytes() == b"small"
    os.close(open_as(SOMEBODY, small_file))
    for fd in held:
        os.close(fd)

    def opens() -> bool:
        try:
            os.close(open_as(NOBODY, small_file))
        except OSError as error:
            if error.errno != errno.EDQUOT:
                raise
            return False
        return True

    eventually(opens, "what was held is released")


def test_a_block_is_removed_by_its_path(service: Service) -> None:
    place = service.mount / "bound"
    with service.client() as client:
        namespace = open_blocks(client, NAMESPACE, bucket=place.name)
        namespace.put([Block(DIGEST, b"block")])
        path = place / "kv/80" / DIGEST.hex()
        with opened(path, os.O_RDONLY) as fd:
            path.unlink()
            assert not path.exists()
            assert namespace.match([DIGEST]) == 0
            assert os.read(fd, 6) == b"block"
        with expect_errno(errno.ENOENT):
            path.unlink()
    shutil.rmtree(place)


# --- drafts ------------------------------------------------------------------------------------------------
def test_a_file_being_written_does_not_become_a_block_by_rename(service: Service) -> None:
    place = service.mount / "bound"
    with service.client() as client:
        namespace = open_blocks(client, NAMESPACE, bucket=place.name)
        namespace.put([Block(DIGEST, b"block")])
        assert (place / "kv/80" / DIGEST.hex()).read_bytes() == b"block"
    with opened(place / "draft", os.O_WRONLY | os.O_CREAT) as fd:
        write_all(fd, b"bytes")
        with expect_errno(errno.EPERM):
            os.rename(place / "draft", place / "kv/80/name")
    assert (place / "draft").read_bytes() == b"bytes"
    with service.client() as client:
        namespace = open_blocks(client, NAMESPACE, bucket=place.name)
        namespace.remove([DIGEST])
    eventually(lambda: not (place / "kv").exists(), "the directories above the block are gone")
    shutil.rmtree(place)


def test_a_killed_reader_takes_nothing_from_the_writer(service: Service, bucket: Path) -> None:
    path = bucket / "file"
    with ExitStack() as mapped:  # the last reference to the writer's file, which ends without another FLUSH
        with opened(path, os.O_RDWR | os.O_CREAT) as fd:
            write_all(fd, b"bytes")
            mapped.enter_context(mapped_pages(fd, 5))
        assert (
            os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", DYING_READER, str(path)])
            == -signal.SIGKILL
        )
    eventually(lambda: state(path) == b"sealed", "the file is sealed")
    assert path.read_bytes() == b"bytes"
