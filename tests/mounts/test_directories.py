"""Directories at the path door: make, list, move, remove; and listings of 100,000 names."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.door import BUCKET, ON_DIRECTORY, TEST_MODES, TEST_PATH, Door, need_mount
from tests.support.posix import Directory, expect_errno, opened, pattern, write_all
from tests.support.service import Service
from tiers.recovery.start import StoreOptions, open_store

pytestmark = pytest.mark.mount

DT_DIR, DT_REG = 4, 8
CAPACITY_BYTES = 256 << 20
"""What `tests.support.service.DEFAULT_DRAM`."""


def touch(path: Path) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))


# --- making and removing -----------------------------------------------------------------------------------
def test_make_and_remove(door: Door) -> None:
    directory = door.path / "directory"
    directory.mkdir(mode=0o750)
    assert stat.S_ISDIR(directory.stat().st_mode)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o750
    with expect_errno(errno.EEXIST):
        directory.mkdir()
    with expect_errno(errno.ENOENT):
        (door.path / "missing" / "child").mkdir()
    touch(directory / "file")
    with expect_errno(errno.ENOTEMPTY):
        directory.rmdir()
    (directory / "file").unlink()
    directory.rmdir()
    assert not directory.exists()


def test_an_open_file_keeps_its_directory(door: Door) -> None:
    directory = door.path / "directory"
    directory.mkdir()
    with opened(directory / "draft", os.O_WRONLY | os.O_CREAT) as fd:
        with expect_errno(errno.ENOTEMPTY):
            directory.rmdir()
        write_all(fd, b"x")
    assert (directory / "draft").read_bytes() == b"x"


def test_an_empty_directory_stays_when_its_last_name_goes(door: Door) -> None:
    """Not so in S3, whose directories are prefixes."""
    nested = door.path / "a/b/c"
    nested.mkdir(parents=True)
    touch(nested / "file")
    os.rename(nested / "file", door.path / "elsewhere")
    assert os.listdir(nested) == []
    nested.rmdir()
    assert os.listdir(door.path / "a/b") == []
    shutil.rmtree(door.path / "a")
    assert os.listdir(door.path) == ["elsewhere"]


def test_files_and_directories_are_distinguished(door: Door) -> None:
    directory, file = door.path / "directory", door.path / "file"
    directory.mkdir()
    touch(file)
    expected: dict[tuple[Callable[[Path], object], Path], int] = {
        (os.rmdir, file): errno.ENOTDIR,
        (os.unlink, directory): errno.EISDIR,
        (os.listdir, file): errno.ENOTDIR,
        (os.stat, file / "child"): errno.ENOTDIR,
        (os.mkdir, file): errno.EEXIST,
        (os.mkdir, file / "child"): errno.ENOTDIR,
    }
    for (call, path), number in expected.items():
        with expect_errno(number):
            call(path)
    for flags, path, number in [
        (os.O_WRONLY, directory, errno.EISDIR),
        (os.O_RDONLY | os.O_CREAT, directory, errno.EISDIR),
        (os.O_RDONLY | os.O_DIRECTORY, file, errno.ENOTDIR),
        (os.O_WRONLY | os.O_CREAT, file / "child", errno.ENOTDIR),
    ]:
        with expect_errno(number):
            os.open(path, flags)
    with opened(directory, os.O_RDONLY) as fd, expect_errno(errno.EISDIR):
        os.read(fd, 1)


def test_links_count_so_that_find_descends(door: Door) -> None:
    """find takes a directory with exactly two links for one without subdirectories; 1 means unknown."""
    for name in ("one", "two"):
        (door.path / name).mkdir()
    assert door.path.stat().st_nlink in (1, 4)
    assert (door.path / "one").stat().st_nlink in (1, 2)


# --- moving ------------------------------------------------------------------------------------------------
def test_rename_of_a_directory_moves_all_below(door: Door) -> None:
    tree = door.path / "tree"
    (tree / "x/y").mkdir(parents=True)
    (tree / "empty").mkdir()
    for i, name in enumerate(["top", "x/middle", "x/y/deep"]):
        (tree / name).write_bytes(pattern(i, 1000 * i))
    # A name that sorts between the directory and its children.
    touch(door.path / "tree-and-more")
    os.rename(tree, door.path / "moved")
    assert not tree.exists()
    assert sorted(os.listdir(door.path)) == ["moved", "tree-and-more"]
    assert sorted(os.listdir(door.path / "moved")) == ["empty", "top", "x"]
    assert (door.path / "moved/x/y/deep").read_bytes() == pattern(2, 2000)


def test_rename_of_a_directory_with_open_files(door: Door) -> None:
    tree = door.path / "tree"
    tree.mkdir()
    (tree / "finished").write_bytes(b"finished")
    with (
        opened(tree / "draft", os.O_RDWR | os.O_CREAT) as fd,
        opened(tree / "finished", os.O_RDONLY) as reader,
    ):
        write_all(fd, b"before ")
        os.rename(tree, door.path / "moved")
        write_all(fd, b"after")
        assert os.pread(reader, 100, 0) == b"finished"
        assert (door.path / "moved/draft").read_bytes() == b"before after"
    assert (door.path / "moved/draft").read_bytes() == b"before after"
    assert not tree.exists()


def test_rename_onto_directories_and_files(door: Door) -> None:
    for name in ("source", "empty", "full"):
        (door.path / name).mkdir()
    touch(door.path / "source/child")
    touch(door.path / "full/child")
    touch(door.path / "file")
    for source, target, number in [
        ("source", "full", errno.ENOTEMPTY),
        ("source", "file", errno.ENOTDIR),
        ("file", "source", errno.EISDIR),
        ("source", "source/child-of-itself", errno.EINVAL),
        ("missing", "file", errno.ENOENT),
        ("file", "missing/child", errno.ENOENT),
    ]:
        with expect_errno(number):
            os.rename(door.path / source, door.path / target)
    os.rename(door.path / "source", door.path / "empty")
    assert sorted(os.listdir(door.path)) == ["empty", "file", "full"]
    assert os.listdir(door.path / "empty") == ["child"]


def test_a_working_directory_that_is_renamed(door: Door) -> None:
    (door.path / "here").mkdir()
    before = os.getcwd()
    os.chdir(door.path / "here")
    try:
        Path("file").write_bytes(b"x")
        os.rename(door.path / "here", door.path / "there")
        assert Path("file").read_bytes() == b"x"
        Path("second").write_bytes(b"y")
    finally:
        os.chdir(before)
    assert sorted(os.listdir(door.path / "there")) == ["file", "second"]


# --- listing -----------------------------------------------------------------------------------------------
def test_types_in_a_listing(door: Door) -> None:
    (door.path / "directory").mkdir()
    touch(door.path / "file")
    with opened(door.path / "draft", os.O_WRONLY | os.O_CREAT):
        stream = Directory(door.path)
        found = dict(iter(stream.read, None))
        stream.close()
    assert found == {"directory": DT_DIR, "file": DT_REG, "draft": DT_REG}
    assert sorted(os.listdir(door.path)) == ["directory", "draft", "file"]


def test_names_of_any_characters(door: Door) -> None:
    names = [
        "ä",
        "名前",
        "a b",
        "a\nb",
        "-rf",
        "#",
        "%2e",
        "\\",
        "'\"",
        ".hidden",
        "...",
        "\x01",
        "~",
        "a@b@0",
    ]
    for name in names:
        (door.path / name).write_bytes(name.encode())
    assert sorted(os.listdir(door.path)) == sorted(names)
    for name in names:
        assert (door.path / name).read_bytes() == name.encode()


def test_removing_while_listing_removes_all(door: Door) -> None:
    for i in range(500):
        touch(door.path / f"{i:03}")
    with os.scandir(door.path) as entries:
        for entry in entries:
            os.unlink(entry.path)
    assert os.listdir(door.path) == []


# --- many names --------------------------------------------------------------------------------------------
MANY = 100_000
MANY_ELSEWHERE = 12_000
"""In the modes after the first: still above what a rename takes."""


@pytest.fixture(scope="module", params=TEST_MODES)
def many(request: pytest.FixtureRequest) -> Iterator[tuple[Path, set[str]]]:
    """A directory of very many directories, and their names.

    They are put into the store before the service starts: through the mount they would take a minute.
    """
    count = MANY if request.param == TEST_MODES[0] else MANY_ELSEWHERE
    names = {f"block-{i:06x}" for i in range(count)}
    if ON_DIRECTORY:
        directory = Path(
            tempfile.mkdtemp(prefix="many-", dir="/dev/shm" if TEST_PATH == "dir" else TEST_PATH)
        )
        for name in names:
            (directory / name).mkdir()
        yield directory, names
        shutil.rmtree(directory)
        return
    need_mount()
    service = Service(mode=request.param)
    seed_directories(service.data, names)
    with service:
        yield service.mount / BUCKET / "many", names


def seed_directories(data: Path, names: set[str]) -> None:
    from tiers.model.objects import Attributes, Name

    attributes = Attributes(mode=0o755)
    with open_store(StoreOptions(data, dram_bytes=CAPACITY_BYTES)) as store:
        store.create_bucket(BUCKET.encode(), uid=0, gid=0)
        store.make_directory(Name(BUCKET.encode(), b"many/"), attributes)
        for name in names:
            store.make_directory(Name(BUCKET.encode(), b"many/%s/" % name.encode()), attributes)


def test_each_of_many_names_is_listed_once(many: tuple[Path, set[str]]) -> None:
    directory, names = many
    listed = os.listdir(directory)
    assert len(listed) == len(names)
    assert set(listed) == names


def test_seekdir_and_rewinddir_in_many_names(many: tuple[Path, set[str]]) -> None:
    directory, names = many
    stream = Directory(directory)
    entries = stream.names()
    head = [next(entries) for _ in range(777)]
    position = stream.tell()
    tail = list(entries)
    assert Counter(head + tail) == Counter(names)
    stream.seek(position)
    assert [next(stream.names()) for _ in range(100)] == tail[:100]
    stream.rewind()
    assert Counter(stream.names()) == Counter(names)
    stream.close()


def test_names_added_and_removed_while_listing(many: tuple[Path, set[str]]) -> None:
    """What is there from beginning to end is seen exactly once, whatever comes and goes beside it."""
    directory, names = many
    added = [directory / f"{prefix}-{i}" for prefix in ("a", "block-00", "block-zz") for i in range(20)]
    stream = Directory(directory)
    entries = stream.names()
    seen = [next(entries) for _ in range(len(names) // 2)]
    for path in added:
        touch(path)
    seen += [next(entries) for _ in range(10)]
    for path in added[::2]:
        path.unlink()
    seen += list(entries)
    stream.close()
    counted = Counter(name for name in seen if name in names)
    assert counted == Counter(names)
    assert max(Counter(seen).values()) == 1
    for path in added[1::2]:
        path.unlink()


def test_a_rename_of_too_many_names_is_refused(many: tuple[Path, set[str]]) -> None:
    """Above 10,000 keys the service answers EXDEV, so that mv copies; a disk just does it."""
    directory, names = many
    moved = directory.with_name(directory.name + "-moved")
    if ON_DIRECTORY:
        os.rename(directory, moved)
        os.rename(moved, directory)
    else:
        with expect_errno(errno.EXDEV):
            os.rename(directory, moved)
        assert not moved.exists()
    assert len(os.listdir(directory)) == len(names)


@pytest.mark.parametrize("key", ["directory//below", "directory/..", "directory/./x"])
def test_what_keeps_a_directory_whose_listing_is_empty(door: Door, key: str) -> None:
    """Keys of S3 that are no path: the answer is an errno, so that the log and the command line have to say more."""
    service = door.need_service()
    directory = door.path / "directory"
    with service.client() as client:
        client.put(f"{BUCKET}/{door.path.name}/{key}", b"hidden")
    assert os.listdir(directory) == []
    before = len(service.log())
    with expect_errno(errno.ENOTEMPTY):
        directory.rmdir()
    assert "`kvfs rm -r` removes them" in service.log()[before:]
    listed = service.cli("ls", "-r", str(directory))
    assert (listed.returncode, listed.stdout.splitlines()) == (0, [key.removeprefix("directory/")])
    assert f"`kvfs rm -r {directory}`" in listed.stderr
    assert service.cli("rm", "-r", str(directory)).returncode == 0
    assert not directory.exists()
