"""Files at the path door against a model: any order of calls on a few names gives what POSIX says.

The model is a dictionary from name to inode, one from link to name, and a list of descriptors. Where a finished file
that only readers have open is opened for writing, or truncated, a disk and a cache differ on purpose: the readers of a
sealed object keep it, those of a file that is not published yet do not. The model asks a reader which of the two it is,
and then holds every byte to that. It runs in each kind of bucket, and reopens files within milliseconds of their close.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.support.door import ON_DIRECTORY, TEST_MODES, Door, need_mount
from tests.support.posix import opened, pattern
from tests.support.seeds import rounds
from tests.support.service import BUCKET_KINDS, Service

pytestmark = pytest.mark.mount

NAMES = ["a", "b", "d/a", "d/b"]
MAX_SIZE = 150_000
EXAMPLES = int(os.environ.get("KVFS_TEST_EXAMPLES", rounds(10, 20)))
"""Runs for each kind of bucket in each mode."""
names = st.sampled_from(NAMES)
offsets = st.one_of(st.sampled_from([0, 1, 4095, 4096, 65_536]), st.integers(0, MAX_SIZE))
lengths = st.one_of(st.sampled_from([0, 1, 4096]), st.integers(0, 40_000))
pauses_s = st.sampled_from([0, 0.0005, 0.001, 0.003])
"""What is closed is published a millisecond later: what follows comes before, in the middle of it, and after."""


@pytest.fixture(scope="module", params=TEST_MODES)
def mode_service(request: pytest.FixtureRequest) -> Iterator[Service | None]:
    """One with a bucket of each kind."""
    if ON_DIRECTORY:
        yield None
        return
    need_mount()
    with Service(mode=request.param, nvme="512MiB") as service:
        for kind, options in {**BUCKET_KINDS, "bucket": {}}.items():
            service.create_bucket(kind, **options)
        yield service


@dataclass(eq=False)
class Inode:
    data: bytearray = field(default_factory=bytearray)
    readers: int = 0
    writers: int = 0

    def write(self, offset: int, data: bytes) -> None:
        if data:
            self.data.extend(bytes(max(0, offset - len(self.data))))
            self.data[offset : offset + len(data)] = data

    def truncate(self, size: int) -> None:
        del self.data[size:]
        self.data.extend(bytes(size - len(self.data)))

    @property
    def held_by_readers_only(self) -> bool:
        return self.writers == 0 and self.readers > 0


@dataclass(eq=False)
class Open:
    fd: int
    inode: Inode
    writable: bool

    def __post_init__(self) -> None:
        self.count(1)

    def count(self, change: int) -> None:
        if self.writable:
            self.inode.writers += change
        else:
            self.inode.readers += change


class Files(RuleBasedStateMachine):
    """Every rule makes the call and changes the model likewise, or expects the errno of the model."""

    opens = Bundle("opens")

    def __init__(self, parent: Path) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(dir=parent))
        (self.root / "d").mkdir()
        self.names: dict[str, Inode] = {}
        self.links: dict[str, str] = {}
        """Symbolic link -> the name that it leads to."""
        self.open_files: list[Open] = []
        self.writes = 0

    def fresh(self, size: int) -> bytes:
        self.writes += 1
        return pattern(self.writes, size)

    def remember(self, fd: int, inode: Inode, writable: bool) -> Open:
        file = Open(fd, inode, writable)
        self.open_files.append(file)
        return file

    def follow(self, name: str) -> str | None:
        """The name that links lead to from here; None for a circle."""
        for _ in NAMES:
            if name not in self.links:
                return name
            name = self.links[name]
        return None if name in self.links else name

    # --- names --------------------------------------------------------------------------------------------
    @rule(name=names, target_name=names)
    def link(self, name: str, target_name: str) -> None:
        if name in self.names or name in self.links:
            with pytest.raises(FileExistsError):
                os.symlink(self.root / target_name, self.root / name)
            return
        os.symlink(self.root / target_name, self.root / name)
        self.links[name] = target_name

    @rule(name=names, target_name=names)
    def link_anew(self, name: str, target_name: str) -> None:
        """As `ln -sfn` does."""
        os.symlink(self.root / target_name, self.root / "d/.tmp")
        os.rename(self.root / "d/.tmp", self.root / name)
        self.names.pop(name, None)
        self.links[name] = target_name

    @rule(target=opens, name=names)
    def create(self, name: str) -> Open | None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        if name in self.names or name in self.links:
            with pytest.raises(FileExistsError):
                os.open(self.root / name, flags)
            return None
        self.names[name] = Inode()
        return self.remember(os.open(self.root / name, flags, 0o644), self.names[name], True)

    @rule(target=opens, name=names, writable=st.booleans(), truncate=st.booleans())
    def open(self, name: str, writable: bool, truncate: bool) -> Open | None:
        flags = (os.O_RDWR if writable else os.O_RDONLY) | (os.O_TRUNC if writable and truncate else 0)
        found = self.follow(name)
        if found not in self.names:
            why = os.strerror(errno.ELOOP if found is None else errno.ENOENT)
            with pytest.raises(OSError, match=why):
                os.open(self.root / name, flags)
            return None
        fd = os.open(self.root / name, flags)
        inode = self.written(found, 0 if flags & os.O_TRUNC else None) if writable else self.names[found]
        return self.remember(fd, inode, writable)

    @rule(target=opens, name=names)
    def create_for_reading(self, name: str) -> Open | None:
        if name in self.names or name in self.links:
            return None
        self.names[name] = Inode()
        fd = os.open(self.root / name, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o644)
        return self.remember(fd, self.names[name], False)

    def written(self, name: str, size: int | None = None) -> Inode:
        """The name's file was opened for writing or (`size`) truncated: what it is from here on."""
        inode = self.names[name]
        reader = next((file for file in self.open_files if file.inode is inode), None)
        if inode.held_by_readers_only and reader is not None and self.is_kept(reader, size):
            inode = self.names[name] = Inode(bytearray(inode.data))
        if size is not None:
            inode.truncate(size)
        return inode

    @staticmethod
    def is_kept(reader: Open, size: int | None) -> bool:
        """Whether a reader has a finished file that another has taken the place of."""
        if ON_DIRECTORY or os.getxattr(reader.fd, "user.kvfs.state") == b"draft":
            return False
        found = os.fstat(reader.fd).st_size
        assert found in (len(reader.inode.data), size)
        return found == len(reader.inode.data)

    @rule(name=names, size=lengths)
    def put(self, name: str, size: int) -> None:
        """Write as connectors do: a temporary name, then rename."""
        data = self.fresh(size)
        (self.root / "d/.tmp").write_bytes(data)
        os.rename(self.root / "d/.tmp", self.root / name)
        self.links.pop(name, None)
        self.names[name] = Inode(bytearray(data))

    @rule(source=names, target_name=names)
    def rename(self, source: str, target_name: str) -> None:
        if source not in self.names and source not in self.links:
            with pytest.raises(FileNotFoundError):
                os.rename(self.root / source, self.root / target_name)
            return
        os.rename(self.root / source, self.root / target_name)
        inode, leads_to = self.names.pop(source, None), self.links.pop(source, None)
        self.forget(target_name)
        if inode is not None:
            self.names[target_name] = inode
        if leads_to is not None:
            self.links[target_name] = leads_to

    def forget(self, name: str) -> bool:
        """Whether there was such a name."""
        had = name in self.names or name in self.links
        self.names.pop(name, None)
        self.links.pop(name, None)
        return had

    @rule(name=names)
    def unlink(self, name: str) -> None:
        if not self.forget(name):
            with pytest.raises(FileNotFoundError):
                os.unlink(self.root / name)
        else:
            os.unlink(self.root / name)

    @rule(name=names, size=offsets)
    def truncate_path(self, name: str, size: int) -> None:
        found = self.follow(name)
        if found in self.names:
            os.truncate(self.root / name, size)
            self.written(found, size)

    @rule(
        name=names,
        offset=offsets,
        length=lengths,
        truncate=st.booleans(),
        sync=st.booleans(),
        pause_s=pauses_s,
    )
    def rewrite(
        self, name: str, offset: int, length: int, truncate: bool, sync: bool, pause_s: float
    ) -> None:
        """Write as programs do that open, change and close a file again and again."""
        found = self.follow(name)
        if found not in self.names:
            return
        time.sleep(pause_s)
        with opened(self.root / name, os.O_RDWR | (os.O_TRUNC if truncate else 0)) as fd:
            inode = self.written(found, 0 if truncate else None)
            data = self.fresh(length)
            assert os.pwrite(fd, data, offset) == length
            inode.write(offset, data)
            if sync:
                os.fsync(fd)

    @rule(pause_s=pauses_s)
    def pause(self, pause_s: float) -> None:
        time.sleep(pause_s)

    # --- descriptors --------------------------------------------------------------------------------------
    def usable(self, file: Open | None, writable: bool = False) -> bool:
        return file is not None and file in self.open_files and (file.writable or not writable)

    @rule(file=opens, offset=offsets, length=lengths)
    def write(self, file: Open | None, offset: int, length: int) -> None:
        if self.usable(file, writable=True):
            assert file is not None
            data = self.fresh(length)
            assert os.pwrite(file.fd, data, offset) == length
            file.inode.write(offset, data)

    @rule(file=opens, length=lengths)
    def append(self, file: Open | None, length: int) -> None:
        if self.usable(file, writable=True):
            assert file is not None
            data = self.fresh(length)
            again = os.open(f"/proc/self/fd/{file.fd}", os.O_WRONLY | os.O_APPEND)
            assert os.write(again, data) == length
            os.close(again)
            file.inode.write(len(file.inode.data), data)

    @rule(file=opens, offset=offsets, length=lengths)
    def read(self, file: Open | None, offset: int, length: int) -> None:
        if self.usable(file):
            assert file is not None
            assert os.pread(file.fd, length, offset) == file.inode.data[offset : offset + length]

    @rule(file=opens)
    def map(self, file: Open | None) -> None:
        if self.usable(file):
            assert file is not None
            if file.inode.data:
                with mmap.mmap(file.fd, len(file.inode.data), prot=mmap.PROT_READ) as mapping:
                    assert mapping[:] == file.inode.data

    @rule(file=opens, size=offsets)
    def truncate(self, file: Open | None, size: int) -> None:
        if self.usable(file, writable=True):
            assert file is not None
            os.ftruncate(file.fd, size)
            file.inode.truncate(size)

    @rule(file=opens, offset=offsets, length=lengths.filter(bool))
    def allocate(self, file: Open | None, offset: int, length: int) -> None:
        if self.usable(file, writable=True):
            assert file is not None
            os.posix_fallocate(file.fd, offset, length)
            file.inode.truncate(max(len(file.inode.data), offset + length))

    @rule(file=opens)
    def sync(self, file: Open | None) -> None:
        if self.usable(file):
            assert file is not None
            os.fsync(file.fd)

    @rule(target=opens, file=opens)
    def duplicate(self, file: Open | None) -> Open | None:
        if not self.usable(file):
            return None
        assert file is not None
        return self.remember(os.dup(file.fd), file.inode, file.writable)

    @rule(file=opens)
    def close(self, file: Open | None) -> None:
        if self.usable(file):
            assert file is not None
            os.close(file.fd)
            file.count(-1)
            self.open_files.remove(file)

    # --- always -------------------------------------------------------------------------------------------
    @invariant()
    def sizes_and_names_agree(self) -> None:
        sizes = {name: (self.root / name).lstat().st_size for name in self.names}
        assert sizes == {name: len(inode.data) for name, inode in self.names.items()}
        listed = [*os.listdir(self.root), *(f"d/{name}" for name in os.listdir(self.root / "d"))]
        assert sorted(listed) == sorted(["d", *self.names, *self.links])
        leads_to = {name: os.readlink(self.root / name) for name in self.links}
        assert leads_to == {name: str(self.root / target) for name, target in self.links.items()}
        for file in self.open_files:
            assert os.fstat(file.fd).st_size == len(file.inode.data)

    def teardown(self) -> None:
        try:
            for file in self.open_files:
                assert os.pread(file.fd, 2 * MAX_SIZE, 0) == file.inode.data
            while self.open_files:
                self.close(self.open_files[-1])
            for name, inode in self.names.items():
                assert (self.root / name).read_bytes() == inode.data
        finally:
            for file in self.open_files:
                os.close(file.fd)
            shutil.rmtree(self.root)


@pytest.mark.seeded
@pytest.mark.parametrize("kind", ["cache"] if ON_DIRECTORY else BUCKET_KINDS)
def test_files_follow_the_model(door: Door, kind: str) -> None:
    parent = door.path if door.service is None else door.service.mount / kind
    run_state_machine_as_test(
        lambda: Files(parent),  # type: ignore[arg-type]
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
