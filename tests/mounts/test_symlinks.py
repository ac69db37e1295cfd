"""Symbolic links on the path, in every mode and on a plain directory: the kernel follows them, never the service."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.mounts.test_programs import need_program, shell
from tests.support.door import Door
from tests.support.waits import eventually

pytestmark = pytest.mark.mount

MOST = 4095
"""The longest target that Linux takes."""


def error_of(call: object, *arguments: object) -> int | None:
    """The errno with which a call fails; None where it does not."""
    try:
        call(*arguments)  # type: ignore[operator]
    except OSError as error:
        return error.errno
    return None


@pytest.mark.parametrize(
    "target", [b"x", b"../a/../b", b"/etc/hostname", b"\xff\xfe \n", b"n" * MOST, b"a/" * 2047]
)
def test_a_link_is_what_was_written(door: Door, target: bytes) -> None:
    link = os.fsencode(door.path / "link")
    os.symlink(target, link)
    assert os.readlink(link) == target
    found = os.lstat(link)
    assert stat.S_IFMT(found.st_mode) == stat.S_IFLNK
    assert (stat.S_IMODE(found.st_mode), found.st_size, found.st_nlink) == (0o777, len(target), 1)
    assert (found.st_uid, found.st_gid) == (os.getuid(), os.getgid())


def test_targets_over_the_limit_and_empty_ones_are_refused(door: Door) -> None:
    assert error_of(os.symlink, "n" * (MOST + 1), door.path / "link") == errno.ENAMETOOLONG
    assert error_of(os.symlink, "", door.path / "link") == errno.ENOENT
    assert os.listdir(door.path) == []


def test_links_are_made_only_where_nothing_is(door: Door) -> None:
    (door.path / "file").write_bytes(b"x")
    (door.path / "directory").mkdir()
    os.symlink("nowhere", door.path / "link")
    with open(door.path / "draft", "wb") as draft:
        draft.write(b"y")
        for name in ("file", "directory", "link", "draft"):
            assert error_of(os.symlink, "file", door.path / name) == errno.EEXIST, name
    assert error_of(os.symlink, "x", door.path / "missing" / "link") == errno.ENOENT
    assert error_of(os.symlink, "x", door.path / "file" / "link") == errno.ENOTDIR
    assert os.readlink(door.path / "link") == "nowhere"


def test_the_kernel_follows(door: Door) -> None:
    (door.path / "a").mkdir()
    (door.path / "a" / "file").write_bytes(b"one")
    os.symlink("a", door.path / "directory")
    os.symlink("directory/file", door.path / "through")
    os.symlink("../a/../directory/file", door.path / "a" / "back")
    for name in ("through", "directory/file", "a/back", "directory/back"):
        assert (door.path / name).read_bytes() == b"one"
        assert (door.path / name).stat().st_ino == (door.path / "a" / "file").stat().st_ino
    (door.path / "through").write_bytes(b"two")
    assert (door.path / "a" / "file").read_bytes() == b"two"
    (door.path / "directory" / "made").write_bytes(b"three")
    assert (
        sorted(os.listdir(door.path / "a"))
        == sorted(os.listdir(door.path / "directory"))
        == ["back", "file", "made"]
    )
    assert os.path.islink(door.path / "through")


def test_links_that_lead_nowhere_and_in_circles(door: Door) -> None:
    os.symlink("missing", door.path / "dangling")
    os.symlink("b", door.path / "a")
    os.symlink("a", door.path / "b")
    os.symlink("self/x", door.path / "self")
    assert error_of(os.stat, door.path / "dangling") == errno.ENOENT
    for name in ("a", "b", "self"):
        assert error_of(os.stat, door.path / name) == errno.ELOOP
        assert error_of(os.open, door.path / name, os.O_RDONLY) == errno.ELOOP
        assert os.path.islink(door.path / name)
    (door.path / "dangling").write_bytes(b"made")
    assert (door.path / "missing").read_bytes() == b"made"
    assert os.readlink(door.path / "dangling") == "missing"


def test_opens_that_do_not_follow(door: Door) -> None:
    (door.path / "file").write_bytes(b"x")
    os.symlink("file", door.path / "link")
    assert error_of(os.open, door.path / "link", os.O_RDONLY | os.O_NOFOLLOW) == errno.ELOOP
    assert error_of(os.open, door.path / "link", os.O_WRONLY | os.O_CREAT | os.O_EXCL) == errno.EEXIST
    held = os.open(door.path / "link", os.O_PATH | os.O_NOFOLLOW)
    try:
        assert os.readlink("", dir_fd=held) == "file"
        os.unlink(door.path / "link")
        assert os.readlink("", dir_fd=held) == "file"
        assert os.fstat(held).st_nlink == 0
    finally:
        os.close(held)


def test_unlink_removes_the_link(door: Door) -> None:
    (door.path / "file").write_bytes(b"x")
    (door.path / "directory").mkdir()
    for target in ("file", "directory", "missing"):
        os.symlink(target, door.path / "link")
        assert error_of(os.rmdir, door.path / "link") == errno.ENOTDIR
        os.unlink(door.path / "link")
        assert not os.path.lexists(door.path / "link")
    assert sorted(os.listdir(door.path)) == ["directory", "file"]


@pytest.mark.parametrize("source", ["file", "draft", "link"])
@pytest.mark.parametrize("target", ["missing", "file", "link"])
def test_rename_moves_links_and_takes_their_place(door: Door, source: str, target: str) -> None:
    with ExitStack() as drafts:

        def make(name: str, kind: str) -> None:
            if kind == "link":
                os.symlink(f"to-{name}", door.path / name)
            elif kind == "file":
                (door.path / name).write_text(name)
            elif kind == "draft":
                drafts.enter_context(open(door.path / name, "w", buffering=1)).write(f"{name}\n")

        make("source", source)
        make("target", target)
        os.rename(door.path / "source", door.path / "target")
        assert os.listdir(door.path) == ["target"]
        if source == "link":
            assert os.readlink(door.path / "target") == "to-source"
        else:
            assert not os.path.islink(door.path / "target")
            assert (door.path / "target").read_text().strip() == "source"


def test_rename_between_links_and_directories(door: Door) -> None:
    (door.path / "directory").mkdir()
    os.symlink("directory", door.path / "link")
    assert error_of(os.rename, door.path / "link", door.path / "directory") == errno.EISDIR
    assert error_of(os.rename, door.path / "directory", door.path / "link") == errno.ENOTDIR
    (door.path / "directory" / "deep").mkdir()
    os.symlink("../..", door.path / "directory" / "deep" / "up")
    os.rename(door.path / "directory", door.path / "moved")
    assert os.readlink(door.path / "moved" / "deep" / "up") == "../.."
    assert error_of(os.stat, door.path / "link") == errno.ENOENT
    assert os.path.samefile(door.path / "moved" / "deep" / "up", door.path)


def test_listings_say_what_is_a_link(door: Door) -> None:
    """Also of names that come without attributes, which are those behind the first 256."""
    for number in range(400):
        if number % 3:
            os.symlink(f"to-{number}", door.path / f"{number:03}")
        else:
            (door.path / f"{number:03}").write_bytes(b"")
    with os.scandir(door.path) as entries:
        found = {
            entry.name: (entry.is_symlink(), entry.is_file(follow_symlinks=False), entry.inode())
            for entry in entries
        }
    assert len(found) == 400
    for name, (is_link, is_file, ino) in found.items():
        assert is_link == (int(name) % 3 != 0) != is_file, name
        if door.mode != "plain":
            assert os.lstat(door.path / name).st_ino == ino


def test_times_and_owners_of_a_link(door: Door) -> None:
    (door.path / "file").write_bytes(b"")
    before = os.stat(door.path / "file").st_mtime_ns
    os.symlink("file", door.path / "link")
    os.utime(door.path / "link", ns=(5, 1_600_000_000_000_000_001), follow_symlinks=False)
    os.chown(door.path / "link", 12, 34, follow_symlinks=False)
    found = os.lstat(door.path / "link")
    assert (found.st_mtime_ns, found.st_uid, found.st_gid) == (1_600_000_000_000_000_001, 12, 34)
    assert os.readlink(door.path / "link") == "file"
    assert os.stat(door.path / "file").st_mtime_ns == before
    assert (os.stat(door.path / "file").st_uid, os.stat(door.path / "link").st_uid) == (
        os.getuid(),
        os.getuid(),
    )


def test_a_link_in_a_directory_of_a_group(door: Door) -> None:
    (door.path / "shared").mkdir()
    os.chown(door.path / "shared", -1, 1234)
    (door.path / "shared").chmod(0o2775)
    os.symlink("x", door.path / "shared" / "link")
    assert os.lstat(door.path / "shared" / "link").st_gid == 1234


def test_links_change_the_times_of_their_directory(door: Door) -> None:
    os.utime(door.path, ns=(0, 0))
    os.symlink("x", door.path / "link")
    made = door.path.stat().st_mtime_ns
    assert made > 0
    os.utime(door.path, ns=(0, 0))
    os.unlink(door.path / "link")
    assert door.path.stat().st_mtime_ns >= made


def test_no_attributes_on_links(door: Door) -> None:
    os.symlink("x", door.path / "link")
    assert os.listxattr(door.path / "link", follow_symlinks=False) == []
    assert (
        error_of(lambda: os.setxattr(door.path / "link", "user.kvfs.pin", b"1", follow_symlinks=False))
        == errno.EPERM
    )


# --- programs ----------------------------------------------------------------------------------------------
def test_ln_and_readlink(door: Door) -> None:
    script = """
        mkdir a b; echo one > a/file; echo two > b/file
        ln -s a current; cat current/file
        ln -sfn b current; cat current/file; readlink current
        ln -s missing dangling; ls -l dangling | grep -c -- '-> missing'
        test -L dangling; test ! -e dangling; readlink -f current/file | grep -c b/file
        find . -type l | sort | tr '\\n' ' '; rm current dangling; ls
    """
    assert shell(script, door.path).split() == [
        "one",
        "two",
        "b",
        "1",
        "1",
        "./current",
        "./dangling",
        "a",
        "b",
    ]


def test_a_link_is_replaced_at_once(door: Door) -> None:
    """Who reads through a link that is replaced again and again always finds one of both."""
    for name in ("a", "b"):
        (door.path / name).write_text(name)
    os.symlink("a", door.path / "current")
    script = """
        for i in $(seq 100); do ln -sfn b current; ln -sfn a current; done &
        for i in $(seq 300); do cat current; done; wait
    """
    assert set(shell(script, door.path)) == {"a", "b"}


def make_tree(root: Path) -> None:
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "file").write_bytes(b"bytes")
    for link, target in (
        ("a/b/up", "../file"),
        ("link-to-directory", "a/b"),
        ("dangling", "no/where"),
        ("absolute", "/etc/hostname"),
        ("a/loop", "loop"),
    ):
        os.symlink(target, root / link)
    os.utime(root / "dangling", ns=(0, 1_500_000_000_000_000_000), follow_symlinks=False)


def tree(root: Path) -> dict[str, str]:
    """Relative name -> target, `/` or content."""
    found = {}
    for directory, directories, files in os.walk(root):
        for name in directories + files:
            path = Path(directory, name)
            what = os.readlink(path) if path.is_symlink() else "/" if path.is_dir() else path.read_text()
            found[str(path.relative_to(root))] = what
    return found


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("cp", "cp -a source copy"),
        ("rsync", "rsync -a source/ copy; rsync -a source/ copy"),
        ("tar", "tar cf links.tar -C source .; mkdir copy; tar xf links.tar -C copy; rm links.tar"),
        ("mv", "cp -a source moved; mv moved copy"),
    ],
)
def test_copies_keep_links(door: Door, program: str, command: str, tmp_path: Path) -> None:
    need_program(program)
    make_tree(door.path / "source")
    shell(command, door.path)
    assert tree(door.path / "copy") == tree(door.path / "source")
    assert os.lstat(door.path / "copy" / "dangling").st_mtime_ns == 1_500_000_000_000_000_000
    shutil.copytree(door.path / "copy", tmp_path / "outside", symlinks=True)
    shutil.copytree(tmp_path / "outside", door.path / "back", symlinks=True)
    assert tree(door.path / "back") == tree(door.path / "source")


def test_a_git_repository_with_links(door: Door) -> None:
    need_program("git")
    script = """
        export HOME=$PWD GIT_CONFIG_NOSYSTEM=1
        git config --global user.email a@b.c; git config --global user.name n
        git config --global init.defaultBranch main
        mkdir one; cd one; git init -q .
        echo text > file; ln -s file link; mkdir d; ln -s ../file d/up; ln -s d to-d
        git add .; git commit -qm first; git config core.symlinks || echo default
        rm link; ln -s d/up link; git status --porcelain; git commit -qam second
        cd ..; git clone -q one two; cd two; readlink link d/up to-d; cat link
        git checkout -q HEAD~1; readlink link; git status --porcelain; git fsck --no-progress
    """
    expected = "default M link d/up ../file d text file"
    assert shell(script, door.path).split() == expected.split()


def test_a_virtual_environment(door: Door) -> None:
    script = f"""
        {sys.executable} -m venv --without-pip --symlinks env
        env/bin/python -c 'import sys; print(sys.prefix != sys.base_prefix)'
        test -L env/bin/python; env/bin/python3 -c 'import os; print(os.path.islink(os.environ["ENV"]))'
        mv env moved; test -L moved/bin/python3
    """
    assert shell(script, door.path, ENV=str(door.path / "env/bin/python")).split() == ["True", "True"]


def test_the_layout_of_hugging_face(door: Door) -> None:
    """Blobs by hash; snapshots of relative links, made beside and renamed; a second snapshot shares a blob."""
    root = door.path / "models--org--name"
    blobs, refs = root / "blobs", root / "refs"
    for each in (blobs, refs):
        each.mkdir(parents=True)
    contents = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 4096}
    for revision in ("1" * 40, "2" * 40):
        for name, content in contents.items():
            blob = blobs / f"{hash(content) & (1 << 255) - 1:064x}"
            if not blob.exists():
                incomplete = blobs / f"{blob.name}.incomplete"
                incomplete.write_bytes(content)
                os.replace(incomplete, blob)
            pointer = root / "snapshots" / revision / "sub" / name
            pointer.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(os.path.relpath(blob, pointer.parent), pointer)
        (refs / "main").write_text(revision)
    snapshot = root / "snapshots" / (refs / "main").read_text() / "sub"
    for name, content in contents.items():
        assert (snapshot / name).read_bytes() == content
        assert os.path.realpath(snapshot / name).startswith(os.path.realpath(blobs))
        assert (snapshot / name).stat().st_size == len(content)
    shutil.rmtree(root / "snapshots" / ("1" * 40))
    assert sorted(path.name for path in snapshot.iterdir()) == sorted(contents)


def test_what_is_forgotten_is_found_again(door: Door) -> None:
    """Nodes that the kernel drops, and names that it asks for again."""
    for number in range(50):
        os.symlink(f"to-{number}", door.path / f"link{number}")
    Path("/proc/sys/vm/drop_caches").write_text("2")
    for number in range(50):
        assert os.readlink(door.path / f"link{number}") == f"to-{number}"
    if door.service is not None:
        with door.service.client() as client:
            client.remove(door.service.name(door.path / "link7"))
        eventually(lambda: not os.path.lexists(door.path / "link7"), "the link is gone")
    else:
        os.unlink(door.path / "link7")
    os.symlink("other", door.path / "link7")
    assert os.readlink(door.path / "link7") == "other"
