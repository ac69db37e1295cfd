"""Programs at the path door, as they are: shell, coreutils, tar, rsync, git, numpy, torch, safetensors."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.door import Door
from tests.support.posix import opened, pattern, write_all

pytestmark = pytest.mark.mount

PROGRAM_WAIT_S = 60.0
FILES = {
    "empty": 0,
    "small": 17,
    "page": 4096,
    "a/large": (1 << 20) + 5,
    "a/b/c/deep": 70_000,
    "a/name with spaces": 3,
}


def shell(script: str, cwd: Path, **environment: str) -> str:
    """Standard output of a bash script that must succeed and say nothing on standard error."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=cwd,
        env={**os.environ, "LC_ALL": "C", **environment},
        capture_output=True,
        text=True,
        timeout=PROGRAM_WAIT_S,
    )
    assert (done.returncode, done.stderr) == (0, ""), (done.returncode, done.stderr, done.stdout)
    return done.stdout


def need_program(name: str) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")


def make_tree(root: Path) -> None:
    for i, (name, size) in enumerate(FILES.items()):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pattern(i + 1, size))
        path.chmod(0o640 if i % 2 else 0o604)
        os.utime(path, ns=(1_700_000_000_000_000_001, 1_600_000_000_000_000_000 + i))
    (root / "empty-directory").mkdir()


def tree(root: Path) -> dict[str, tuple[int, str]]:
    """Relative name -> (mode, digest of the content; `/` for directories)."""
    found = {}
    for directory, directories, files in os.walk(root):
        for name in directories + files:
            path = Path(directory, name)
            content = "/" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(path.relative_to(root))] = (path.stat().st_mode, content)
    return found


# --- the shell ---------------------------------------------------------------------------------------------
def test_redirections(door: Door) -> None:
    """`cmd > f` closes a duplicate of the file before the first byte is written."""
    script = """
        echo one > file; cat file
        echo two >> file; cat file
        { echo three; echo four; (echo five); } > file; cat file
        /bin/echo six > file; cat file
        seq 3 | tee file | tail -1
        cat < file | cat > copy; cat copy
        exec 3> kept; echo seven >&3; /bin/echo eight >&3; (echo nine >&3); exec 3>&-; cat kept
        : > empty; cat empty
    """
    expected = "one one two three four five six 3 1 2 3 seven eight nine"
    assert shell(script, door.path).split() == expected.split()
    assert (door.path / "empty").read_bytes() == b""


def test_noclobber_and_here_documents(door: Door) -> None:
    script = """
        set -C; echo first > lock
        if (echo second > lock) 2>/dev/null; then echo clobbered; fi
        cat > here <<< "document"; cat lock here
    """
    assert shell(script, door.path) == "first\ndocument\n"


def test_background_writers_share_a_file(door: Door) -> None:
    script = """
        for i in $(seq 8); do for j in $(seq 50); do echo $i-$j; done >> log & done; wait
        sort -u log | wc -l
    """
    assert int(shell(script, door.path)) == 400
    assert len((door.path / "log").read_text().splitlines()) == 400


def test_edit_in_place(door: Door) -> None:
    script = """
        printf 'b\\na\\n' > file; chmod 640 file
        sort -o file file; sed -i s/a/z/ file; cat file; stat -c %a file
        truncate -s 10 file; stat -c %s file; truncate -s 1 file; cat file; echo
        touch -d @1000000000 file; stat -c %Y file
        install -m 600 file installed; stat -c %a installed; ls
    """
    expected = "z b 640 10 z 1000000000 600 file installed"
    assert shell(script, door.path).split() == expected.split()


def test_dd(door: Door) -> None:
    script = """
        dd if=/dev/zero of=file bs=64K count=20 conv=fsync status=none
        dd if=/dev/zero of=file bs=1M count=2 oflag=direct conv=notrunc status=none
        printf middle | dd of=file bs=1 seek=1000000 conv=notrunc,fdatasync status=none
        stat -c %s file; dd if=file iflag=direct bs=1M status=none | tr -d '\\0'
    """
    assert shell(script, door.path) == f"{2 << 20}\nmiddle"


def test_an_executable_and_a_library(door: Door) -> None:
    """Pages of programs are mapped privately and executed; the mount is not noexec."""
    shutil.copy(shutil.which("true") or "/bin/true", door.path / "true")
    (door.path / "module.py").write_text("VALUE = 42\n")
    script = "./true && $PYTHON -c 'import module; print(module.VALUE)' && ls __pycache__ | wc -l"
    environment = {"PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": ""}
    assert shell(script, door.path, **environment).split() == ["42", "1"]


# --- copies ------------------------------------------------------------------------------------------------
NOTHING, SECONDS, NANOSECONDS = 0, 1_000_000_000, 1
"""What a copy keeps of the modification times (and, but for NOTHING, all of the modes)."""

COPIES = {
    "cp -r": ("cp -r $SOURCE $TARGET", NOTHING),
    "cp -a": ("cp -a $SOURCE $TARGET", NANOSECONDS),
    "cp sparse": ("cp -r --sparse=always $SOURCE $TARGET", NOTHING),
    "cp reflink": ("cp -r --reflink=auto $SOURCE $TARGET", NOTHING),
    "cp and mv": ("cp -a $SOURCE copied && mv copied $TARGET", NANOSECONDS),
    "rsync": ("rsync -a $SOURCE/ $TARGET/", NANOSECONDS),
    "rsync inplace": ("rsync -a --inplace $SOURCE/ $TARGET/", NANOSECONDS),
    "rsync checksum": ("rsync -a --checksum --fsync $SOURCE/ $TARGET/", NANOSECONDS),
    "tar pipe": ("mkdir $TARGET && tar -C $SOURCE -c . | tar -C $TARGET -x", SECONDS),
    "tar file": (
        "mkdir $TARGET; tar -C $SOURCE -cf t.tar .; tar -C $TARGET -xf t.tar; rm t.tar",
        SECONDS,
    ),
}


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("direction", ["within", "into", "out of"])
def test_copies_of_a_tree(door: Door, tmp_path: Path, copy: str, direction: str) -> None:
    if "rsync" in copy:
        need_program("rsync")
    script, kept = COPIES[copy]
    source = tmp_path / "tree" if direction == "into" else door.path / "source"
    target = tmp_path / "copy" if direction == "out of" else door.path / "target"
    make_tree(source)
    expected = tree(source)
    shell(script, door.path, SOURCE=str(source), TARGET=str(target))
    found = tree(target)
    if kept == NOTHING:
        assert {name: content for name, (_, content) in found.items()} == {
            name: content for name, (_, content) in expected.items()
        }
        return
    assert found == expected
    for name in FILES:
        assert (target / name).stat().st_mtime_ns // kept == (source / name).stat().st_mtime_ns // kept
    assert sorted(os.listdir(door.path)) == sorted(p.name for p in (source, target) if p.parent == door.path)


def test_a_second_rsync_transfers_nothing(door: Door, tmp_path: Path) -> None:
    need_program("rsync")
    make_tree(tmp_path / "tree")
    rsync = f"rsync -a --itemize-changes {tmp_path}/tree/ target/"
    assert len(shell(rsync, door.path).splitlines()) >= len(FILES)
    assert shell(rsync, door.path) == ""
    assert shell(f"rsync -a --itemize-changes --checksum {tmp_path}/tree/ target/", door.path) == ""
    with (tmp_path / "tree/a/large").open("r+b") as file:
        file.seek(500_000)
        file.write(b"changed")
    assert shell(rsync, door.path).split() == [">f..t......", "a/large"]
    assert tree(door.path / "target") == tree(tmp_path / "tree")
    shutil.rmtree(tmp_path / "tree/a")
    shell(f"rsync -a --delete {tmp_path}/tree/ target/", door.path)
    assert tree(door.path / "target") == tree(tmp_path / "tree")


def test_a_sparse_file_is_copied_with_its_zeros(door: Door) -> None:
    with opened(door.path / "sparse", os.O_RDWR | os.O_CREAT) as fd:
        os.pwrite(fd, b"middle", 1 << 20)
        os.ftruncate(fd, 3 << 20)
    script = """
        cp --sparse=always sparse one; cp --sparse=never sparse two
        cmp sparse one; cmp one two; sha256sum < two
    """
    expected = hashlib.sha256(bytes(1 << 20) + b"middle" + bytes((2 << 20) - 6)).hexdigest()
    assert shell(script, door.path).split()[0] == expected


def test_looking_around(door: Door) -> None:
    make_tree(door.path)
    assert int(shell("find . -type f | wc -l", door.path)) == len(FILES)
    assert int(shell("find . -type d | wc -l", door.path)) == 5
    found = shell("find . -name deep -size +60k -newermt 2020-01-01 -o -empty -type f", door.path)
    assert set(found.split()) == {"./empty", "./a/b/c/deep"}
    assert int(shell("du -s --apparent-size -B1 a", door.path).split()[0]) >= (1 << 20) + 5 + 70_000
    assert int(shell("du -s -B1 a", door.path).split()[0]) >= (1 << 20) + 70_000
    assert (
        shell("sha256sum a/large", door.path).split()[0]
        == hashlib.sha256((door.path / "a/large").read_bytes()).hexdigest()
    )
    assert shell("grep -rlc x . | wc -l; ls -laR > /dev/null; df . > /dev/null", door.path)


def test_remove_and_move_trees(door: Door, tmp_path: Path) -> None:
    make_tree(door.path / "tree")
    expected = tree(door.path / "tree")
    shell(f"mv tree moved; mv moved {tmp_path}/out; mv {tmp_path}/out back; mv -T back/a again", door.path)
    assert {f"a/{name}": value for name, value in tree(door.path / "again").items()} == {
        name: value for name, value in expected.items() if name.startswith("a/")
    }
    shell("rm -r again; rm -rf back", door.path)
    assert os.listdir(door.path) == []


def test_remove_a_tree_of_thousands(door: Door) -> None:
    for i in range(20):
        directory = door.path / f"many/{i}"
        directory.mkdir(parents=True)
        for j in range(100):
            os.close(os.open(directory / f"{j}", os.O_WRONLY | os.O_CREAT))
    shell("rm -rf many", door.path)
    assert os.listdir(door.path) == []


def test_git(door: Door) -> None:
    """Lock files made with O_EXCL and renamed, objects written once, packs read by mmap."""
    need_program("git")
    make_tree(door.path / "tree")
    script = """
        export HOME=$PWD GIT_CONFIG_NOSYSTEM=1
        git init -q repository; cd repository
        git config user.email test@example.org; git config user.name test
        cp -r ../tree .; git add .; git commit -qm first
        echo more >> tree/small; git commit -qam second
        git gc -q; git fsck --no-progress; git status --porcelain; git log --oneline | wc -l
        git clone -q . ../clone; cd ../clone; git log --oneline | wc -l
    """
    assert shell(script, door.path).split() == ["2", "2"]
    assert (door.path / "clone/tree/a/large").read_bytes() == pattern(4, FILES["a/large"])


def test_a_lock_file_as_git_makes_it(door: Door) -> None:
    target, lock = door.path / "index", door.path / "index.lock"
    for i in range(3):
        with opened(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666) as fd:
            write_all(fd, pattern(i, 10_000))
            with pytest.raises(FileExistsError):
                os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.rename(lock, target)
        assert target.read_bytes() == pattern(i, 10_000)


# --- numpy -------------------------------------------------------------------------------------------------
ARRAY = np.arange(300_000, dtype=np.float32).reshape(1000, 300)


def test_numpy_save_load_and_memmap(door: Door) -> None:
    path = door.path / "array.npy"
    np.save(path, ARRAY)
    assert np.array_equal(np.load(path), ARRAY)
    mapped = np.load(path, mmap_mode="r")
    assert np.array_equal(mapped[500], ARRAY[500])
    del mapped
    changed = np.load(path, mmap_mode="r+")
    changed[7] = -1
    changed.flush()
    del changed
    assert (np.load(path)[7] == -1).all()
    assert np.array_equal(np.load(path)[8:], ARRAY[8:])


def test_numpy_memmap_of_a_new_file(door: Door) -> None:
    path = door.path / "raw"
    array = np.memmap(path, dtype=np.float32, mode="w+", shape=ARRAY.shape)
    array[:] = ARRAY
    array.flush()
    assert np.array_equal(np.fromfile(path, dtype=np.float32).reshape(ARRAY.shape), ARRAY)
    array[0] = 5
    del array
    assert (np.memmap(path, dtype=np.float32, mode="r", shape=ARRAY.shape)[0] == 5).all()


def test_numpy_archives_and_raw_files(door: Door) -> None:
    np.savez(door.path / "many.npz", one=ARRAY, two=ARRAY[::-1])
    with np.load(door.path / "many.npz") as archive:
        assert np.array_equal(archive["two"], ARRAY[::-1])
    ARRAY.tofile(door.path / "raw")
    assert np.array_equal(np.fromfile(door.path / "raw", np.float32), ARRAY.ravel())
    with open(door.path / "raw", "rb", buffering=0) as file:
        buffer = np.empty_like(ARRAY)
        assert file.readinto(buffer.data.cast("B")) == ARRAY.nbytes
        assert np.array_equal(buffer, ARRAY)


# --- safetensors and torch ---------------------------------------------------------------------------------
def test_safetensors(door: Door) -> None:
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    path = door.path / "layer.safetensors"
    for factor in (1, 2):
        save_file({"k": ARRAY * factor, "v": ARRAY + factor}, path)
        assert np.array_equal(load_file(path)["k"], ARRAY * factor)
        with safe_open(path, framework="numpy") as file:
            assert sorted(file.keys()) == ["k", "v"]
            assert np.array_equal(file.get_tensor("v"), ARRAY + factor)
            assert np.array_equal(file.get_slice("k")[10:20], ARRAY[10:20] * factor)
    assert os.listdir(door.path) == ["layer.safetensors"]


def save_to_buffer(torch: Any, value: Any, path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    path.write_bytes(buffer.getvalue())


def save_old_format(torch: Any, value: Any, path: Path) -> None:
    torch.save(value, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("save", [None, save_to_buffer, save_old_format])
def test_torch_save_and_load(door: Door, save: Callable[[Any, Any, Path], None] | None) -> None:
    torch = pytest.importorskip("torch")
    path = door.path / "model.pt"
    value = {"weight": torch.arange(300_000.0).reshape(1000, 300), "step": 7}
    if save is None:
        torch.save(value, path)
    else:
        save(torch, value, path)
    loaded = torch.load(path)
    assert torch.equal(loaded["weight"], value["weight"])
    assert loaded["step"] == 7
    if save is not save_old_format:
        mapped = torch.load(path, mmap=True)
        path.unlink()
        assert torch.equal(mapped["weight"], value["weight"])


def test_torch_shared_storage_from_a_file(door: Door) -> None:
    torch = pytest.importorskip("torch")
    path = door.path / "storage"
    shared = torch.from_file(str(path), shared=True, size=10_000, dtype=torch.float32)
    shared.copy_(torch.arange(10_000.0))
    del shared
    assert np.array_equal(np.fromfile(path, np.float32), np.arange(10_000, dtype=np.float32))
