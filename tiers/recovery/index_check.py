"""The name index read without changing it, before it is believed.

Responsibility: whether the index of a data directory is there, whole and the one that the last service used; its
rows, with those that do not match their checksum.

Invariants: nothing of it is changed, and no lock file made; a copy is another file. A child process walks every page
that can be reached first: LMDB trusts its pages, and a damaged one ends the process that reads it.

A shortage of memory, descriptors or room says nothing of the index: it is OutOfResources, not damage.

Concurrency: while nobody else has the index open; a process may open it once.
"""

from __future__ import annotations

import errno
import mmap
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

import lmdb

from kvfs import limits
from kvfs.errors import Corrupt, FormatMismatch, KvfsError, OutOfResources, is_shortage
from kvfs.index import draft_snapshots
from kvfs.index.environment import MAX_DATABASES, allocated_bytes, check_format, is_damage
from kvfs.index.rows import BucketRow, NameRow, load_row
from kvfs.index.tree import NameScan, NameTree
from tiers.cold import index
from tiers.data_dir import Home
from tiers.model.tier import Kind
from tiers.recovery.index_pages import check_pages

if TYPE_CHECKING:
    Txn = lmdb.Transaction[bytes]

MARK = b"start"
"""Key of the mark that each start writes to the index and to `format.json`."""
COPY = "data.new"
"""The file beside an index that a start's walk copies it to."""
_DATABASES = (b"names", b"tails", b"buckets", b"meta")
_OPTIONAL = (index.DATABASE, draft_snapshots.DATABASE)
"""Only where there is a tier that keeps them."""


class IndexWalk:
    """Runs a process that reads and finds every row of an index, while the caller does other things.

    `copy`: for an index that will be written to. The process also checks that each row matches its name, changes one,
    and writes what it read to that file, which is removed in the end unless it was taken. It has no free pages: no walk
    reaches those, and damaged ones end the process that one day writes. Without room for all that the copy will grow to
    there is none.
    """

    def __init__(self, path: Path, *, copy: Path | None = None) -> None:
        self._path = path
        self._copy = copy
        self._code: int | None = None
        self._child = os.fork()
        if self._child == 0:
            status = _DAMAGED
            try:
                status = _outcome(path, copy)
            finally:
                os._exit(status)

    def is_whole(self) -> bool:
        """Return whether the process lived and found nothing wrong, waiting for its end. Raises OutOfResources."""
        code = self._wait()
        if code in _INTERRUPTED:
            raise OutOfResources(
                f"name index {self._path}: the process that checks it was killed by {signal.Signals(-code).name}, "
                "as by a kernel that is out of memory"
            )
        if code >= _SHORT:
            why = os.strerror(code - _SHORT) if code > _SHORT else "no memory"
            raise OutOfResources(f"name index {self._path} cannot be checked: {why}")
        return code in (0, _UNCOPIED)

    @property
    def has_copy(self) -> bool:
        """Return whether there is a copy of what was found whole."""
        return self._wait() == 0

    def _wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        return self._code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._code is None:
            os.kill(self._child, signal.SIGKILL)
            self._wait()
        if self._copy is not None:
            self._copy.unlink(missing_ok=True)


_DAMAGED, _UNCOPIED = 1, 2
_SHORT = 64
"""Exit codes of the process that walks: from this one on it ran short of something; what is above it is the errno."""
_INTERRUPTED = frozenset(
    -number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU)
)


def _outcome(path: Path, copy: Path | None) -> int:
    """Return the exit code of a walk."""
    try:
        return 0 if _walk(path, copy) else _UNCOPIED
    except (MemoryError, lmdb.MemoryError):
        return _DAMAGED if _has_memory(path) else _SHORT
    except lmdb.Error as error:
        return _DAMAGED if is_damage(error) else _SHORT
    except Exception as error:
        if not is_shortage(error):
            return _DAMAGED
        return _SHORT + (error.errno or 0 if isinstance(error, OSError) else 0)


def _has_memory(path: Path) -> bool:
    """Return whether there is more memory than a walk ever needs: then a damaged page wanted more."""
    try:
        mmap.mmap(
            -1, _map_bytes(path) + 256 * limits.MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        ).close()
    except (OSError, MemoryError):
        return False
    return True


def _map_bytes(path: Path) -> int:
    """Return the size of a map with room behind the last page for what is changed and undone."""
    return (path / "data.mdb").stat().st_size + limits.MAX_NAME_MAP_STEP_BYTES


def can_be_walked(path: Path) -> bool:
    """Return whether an IndexWalk finds it whole but for single rows. Raises OutOfResources."""
    with IndexWalk(path) as walk:
        return walk.is_whole()


def _walk(path: Path, copy: Path | None) -> bool:
    """Read everything; return whether there was room for the copy that is wanted. Raises Corrupt."""
    # Without writemap, so that nothing of what is changed and not committed reaches the file.
    env = lmdb.open(
        str(path), map_size=_map_bytes(path), lock=False, create=False, max_dbs=MAX_DATABASES, writemap=False
    )
    with env.begin(write=True) as txn:
        pages = env.info()["last_pgno"] + 1
        if (path / "data.mdb").stat().st_size < pages * env.stat()["psize"]:
            raise Corrupt(f"{path}: the file has fewer than its {pages} pages")
        dbs = {name: env.open_db(name, txn=txn, create=False) for name in _DATABASES}
        for name in _OPTIONAL:
            with suppress(lmdb.NotFoundError):
                dbs[name] = env.open_db(name, txn=txn, create=False)
        for name, db in dbs.items():
            left = txn.stat(db)["entries"]
            last = b""
            for key, value in txn.cursor(db=db):
                left -= 1
                if left < 0 or key <= last or txn.get(key, db=db) != value:
                    raise Corrupt(f"{path}: {name.decode()} is in disorder at {key[:80]!r}")
                last = key
            if left:
                raise Corrupt(f"{path}: {name.decode()} does not have as many rows as it says")
        if copy is not None:
            _decode_rows(txn, dbs)
            txn.put(MARK, b"", db=dbs[b"meta"])
        txn.abort()
    return copy is None or _copy(env, copy)


def _copy(env: lmdb.Environment, copy: Path) -> bool:
    """Write a copy and reserve the room that it has in use; return False, without a copy, where that is not there.

    Raises Corrupt for a page that can be read, and not be written to.
    """
    try:
        descriptor = os.open(copy, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        env.copyfd(descriptor, compact=True)
        used_bytes = os.fstat(descriptor).st_size
        check_pages(descriptor, used_bytes, env.stat()["psize"])
        os.posix_fallocate(descriptor, 0, allocated_bytes(used_bytes))
        os.close(descriptor)
    except (OSError, lmdb.DiskError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        copy.unlink(missing_ok=True)
        return False
    return True


def _decode_rows(txn: Txn, dbs: dict[bytes, lmdb._Database]) -> None:
    """Check that each row matches its name. Raises Corrupt."""
    for key, stored in txn.cursor(db=dbs[b"buckets"]):
        load_row(key, stored)
    scan = NameScan(NameTree(dbs[b"names"], dbs[b"tails"]), txn)
    start = b"\0"
    while page := scan.page(start, limits.MAX_LIST_ENTRIES):
        for name, stored in page:
            load_row(name, stored)
        start = page[-1][0] + b"\0"


def _failure(path: Path, error: lmdb.Error) -> KvfsError:
    return (Corrupt if is_damage(error) else OutOfResources)(f"name index {path}: {error}")


class IndexReader:
    """Reads an index and changes nothing. Raises, when built: Corrupt, OutOfResources, FormatMismatch for a newer
    version."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._env = lmdb.open(
                str(path), readonly=True, lock=False, create=False, max_dbs=MAX_DATABASES, readahead=False
            )
        except lmdb.Error as error:
            raise _failure(path, error) from error
        try:
            self._txn = self._env.begin()
            names, tails, self._buckets, self._meta = (
                self._env.open_db(name, txn=self._txn, create=False) for name in _DATABASES
            )
            self._tree = NameTree(names, tails)
            self.bad_format = self._check_format()
        except lmdb.Error as error:
            self._env.close()
            raise _failure(path, error) from error
        except FormatMismatch:
            self._env.close()
            raise

    def _check_format(self) -> str:
        """Return what is wrong with the row of the format; "" where it says this one. Raises FormatMismatch."""
        try:
            check_format(self.meta(b"format"), str(self._path))
        except Corrupt as error:
            return str(error)
        return ""

    def meta(self, key: bytes) -> bytes:
        """Return the value of a key of the index's own table; empty where there is none."""
        return self._txn.get(key, db=self._meta) or b""

    def rows(self) -> Iterator[tuple[bytes, bytes, NameRow | None]]:
        """Yield every (bucket, key, row), None for a row that is damaged, or cannot be found by its name."""
        scan = NameScan(self._tree, self._txn)
        found = scan.seek(b"\0")
        last = b""
        while found:
            name, value = scan.name, scan.value()
            row = None
            if name > last and self._tree.get(self._txn, name) == value:
                try:
                    row = NameRow.decode(load_row(name, value))
                except Corrupt:
                    row = None
            last = max(last, name)
            bucket, _, key = name.partition(b"\0")
            yield bucket, key, row
            found = scan.step()

    def buckets(self) -> Iterator[tuple[bytes, BucketRow | None]]:
        """Yield every (name, row), None for a damaged row."""
        for name, data in self._txn.cursor(db=self._buckets):
            try:
                yield name, BucketRow.decode(name, load_row(name, data))
            except Corrupt:
                yield name, None

    def pairs(self, database: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield every key and value of another database beside the names; nothing where there is no such database."""
        try:
            db = self._env.open_db(database, txn=self._txn, create=False)
        except lmdb.NotFoundError:
            return
        yield from self._txn.cursor(db=db)

    def close(self) -> None:
        """End the transaction and close the environment."""
        self._txn.abort()
        self._env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(slots=True)
class IndexCheck:
    """Describes the index as a whole."""

    path: Path
    exists: bool = True
    fault: str = ""
    """Why a start would not believe it."""
    is_old: bool = False
    """It may not be the last one; whether it is whole does not matter then."""
    readable: bool = True
    """Whether its rows can be read, be they damaged or not."""
    buckets: dict[bytes, BucketRow] = field(default_factory=dict)
    bad_format: str = ""
    """What is wrong with the row of its format."""
    bad_buckets: list[bytes] = field(default_factory=list)
    bad_names: list[tuple[bytes, bytes]] = field(default_factory=list)
    names: int = 0
    sealed_as: dict[int, int] = field(default_factory=dict)
    """Object id -> id of the copy in the log that was durable before the object was sealed."""
    cold: set[int] = field(default_factory=set)
    """Ids of named objects that the cold tier has."""

    @property
    def is_damaged(self) -> bool:
        """Return whether there is an index and something is wrong with it."""
        return self.exists and bool(self.fault or self.bad_format or self.bad_buckets or self.bad_names)

    @property
    def rows_count(self) -> bool:
        """Return whether the rows that hold are what the last service left."""
        return self.exists and self.readable and not self.is_old

    def rows(self) -> Iterator[tuple[bytes, bytes, NameRow | None]]:
        """Yield rows as `IndexReader.rows`; nothing where they do not count."""
        if self.rows_count:
            with IndexReader(self.path) as reader:
                yield from reader.rows()


def check_index(home: Home) -> IndexCheck:
    """Check the index of a data directory. Raises FormatMismatch for one of a newer version."""
    check = IndexCheck(home.index)
    if not (home.index / "data.mdb").exists():
        check.exists = check.readable = False
        return check
    if not can_be_walked(home.index):
        check.fault, check.readable = "its pages are damaged", False
        return check
    try:
        with IndexReader(home.index) as reader:
            _read(check, reader, home)
    except Corrupt as error:
        check.fault, check.readable = str(error), False
    return check


def _read(check: IndexCheck, reader: IndexReader, home: Home) -> None:
    check.bad_format = reader.bad_format
    if not home.index_is_durable:
        check.fault, check.is_old = "the machine went down while a service ran", True
    elif not home.knows_mark(reader.meta(MARK).decode(errors="replace")):
        check.fault, check.is_old = "it is not the one that the last service used", True
    for name, found in reader.buckets():
        if found is None:
            check.bad_buckets.append(name)
        else:
            check.buckets[name] = found
    for bucket, key, row in reader.rows():
        check.names += 1
        if row is None or not key:
            check.bad_names.append((bucket, key))
    if check.rows_count:
        check.cold = set(_cold_ids(reader))
    if check.rows_count and not check.is_damaged:  # with damage it is built anew, without these
        check.sealed_as = draft_snapshots.sealed_as(reader.pairs(draft_snapshots.DATABASE))


def _cold_ids(reader: IndexReader) -> Iterator[int]:
    for text, stored in reader.pairs(index.DATABASE):
        name = index.name_of(text, stored)
        if name is not None and name.key.kind is Kind.OBJECT:
            yield name.object_id
