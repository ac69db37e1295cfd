"""The LMDB environment under the name index: transactions, growth, format version, meta rows, object ids.

Responsibility: everything about the file that is not a name or a bucket.

Invariants:
- One `write` is one transaction: after an error, or a crash in the middle, all of it happened or nothing. A
  full map grows and the change runs again, so a change has no side effect outside its transaction.
- Object ids never repeat: ranges are reserved in `meta` before use, and a new environment starts at the wall
  clock (seconds << 20), so also when the index was lost and built anew. Bucket ids, of 32 bits, start at the
  seconds themselves.

- LMDB is never told of more room than the file has been allocated: it writes through a mapping, and a page of it
  that the filesystem had no room for would be a SIGBUS. A full filesystem is NoSpace, for what adds first: removals
  have a reserve.
- Only what was read and found wrong is Corrupt. What the machine had no memory, descriptor or room for is not.

Durability: soft state by default (`sync=False`): the file survives the process, `kill -9` included, since
LMDB writes no live page in place; after a power failure it is doubtful, and the caller builds a new one.

Concurrency: one process and one thread; no transaction outlives a call.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import lmdb

from kvfs.errors import (
    SHORTAGES,
    Corrupt,
    FormatMismatch,
    InvalidRequest,
    KvfsError,
    LimitExceeded,
    NoSpace,
    OutOfResources,
)
from kvfs.limits import (
    DEFAULT_NAME_MAP_BYTES,
    MAX_META_KEY_BYTES,
    MAX_NAME_MAP_BYTES,
    MAX_NAME_MAP_STEP_BYTES,
    NAME_RESERVE_BYTES,
    OBJECT_ID_RANGE,
)
from kvfs.name_rows import MAX_BUCKET_ID

if TYPE_CHECKING:
    Txn = lmdb.Transaction[bytes]

FORMAT_VERSION: Final = 1
MAX_DATABASES: Final = 8
"""Names, tails, buckets, meta, and those of `NameIndex.environment`."""
_FORMAT_KEY: Final = b"format"
_IDS_KEY: Final = b"ids"
_BUCKET_IDS_KEY: Final = b"bucket_ids"
_RESERVED_META: Final = frozenset((_FORMAT_KEY, _IDS_KEY, _BUCKET_IDS_KEY))
_U64 = struct.Struct("<Q")
_ID_CLOCK_SHIFT: Final = 20
"""A new index starts its ids at seconds << 20: a million ids a second before it could meet a lost index's
ids, and below 2**53 for another 200 years, so that every tool shows an inode number exactly."""

MAX_OBJECT_ID: Final = (1 << 53) - 1
"""What says that it has a higher one was not given it here; ids do not go on from there."""

log = logging.getLogger("kvfs.names")

T = TypeVar("T")


class NameEnvironment:
    """Raises, when built: InvalidRequest for map sizes, FormatMismatch, Corrupt for what LMDB refuses."""

    def __init__(self, path: Path, *, map_size_bytes: int, max_map_bytes: int, sync: bool) -> None:
        if not 0 < map_size_bytes <= max_map_bytes <= MAX_NAME_MAP_BYTES:
            raise InvalidRequest(
                f"name index {path}: map sizes of {map_size_bytes} and {max_map_bytes} bytes "
                f"are not between 1 and {MAX_NAME_MAP_BYTES}"
            )
        self._path = path
        self._max_map_bytes = max_map_bytes
        self._next_id = 0
        self._id_end = 0
        self._closed = False
        self._reserve_bytes = 0
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _allocate(path / "lock.mdb", _LOCK_BYTES)
        self._data = path / "data.mdb"
        if self._data.exists() and self._data.stat().st_size:
            map_size_bytes = max(map_size_bytes, self._data.stat().st_size - NAME_RESERVE_BYTES)
            _allocate(self._data, map_size_bytes)
        try:
            self._env = lmdb.open(
                str(path),
                map_size=map_size_bytes,
                max_dbs=MAX_DATABASES,
                max_spare_txns=1,
                mode=0o600,
                readahead=False,
                sync=sync,
                metasync=sync,
                writemap=not sync,
            )
        except lmdb.Error as error:
            raise self._failure(error) from error
        try:
            _allocate(self._data, map_size_bytes)  # a new one: LMDB wants to make it itself
            self._keep_reserve()
            self._env.reader_check()  # a reader that was killed would keep old pages from being used again
            self._meta_db = self.open_db(b"meta")
            self._check_format()
        except BaseException:
            self._env.close()
            raise

    def forget_dead_readers(self) -> None:
        """A reader in another process that was killed in mid-look would keep pages from being used again."""
        self._env.reader_check()

    def open_db(self, name: bytes) -> lmdb._Database:
        try:
            return self._env.open_db(name)
        except lmdb.Error as error:
            raise self._failure(error) from error

    def close(self) -> bool:
        """Flush and close; whether all of it is on the device. Closing twice is harmless."""
        if self._closed:
            return False
        self._closed = True
        try:
            if self._id_end:
                self._give_back_ids()
            self._env.sync(True)
            return True
        except (NoSpace, lmdb.Error):
            log.warning("name index %s: could not be flushed; what is left of its ids is skipped", self._path)
            return False
        finally:
            self._env.close()

    # --- transactions ------------------------------------------------------------------------------------

    def read(self, look: Callable[[Txn], T]) -> T:
        try:
            with self._env.begin() as txn:
                return look(txn)
        except lmdb.Error as error:
            raise self._failure(error) from error

    def write(self, change: Callable[[Txn], T], *, removes: bool = False) -> T:
        """Run `change` in a write transaction; and again with a larger map when that is full.

        `removes`: it gives back what it takes, or more, and may use the reserve. Raises NoSpace.
        """
        while True:
            try:
                with self._env.begin(write=True) as txn:
                    return change(txn)
            except lmdb.MapFullError:
                self._grow(removes)
            except lmdb.Error as error:
                raise self._failure(error) from error

    def _grow(self, removes: bool) -> None:
        size_bytes = self._env.info()["map_size"]
        larger_bytes = min(size_bytes + min(size_bytes, MAX_NAME_MAP_STEP_BYTES), self._max_map_bytes)
        try:
            if size_bytes >= self._max_map_bytes:
                raise NoSpace(f"the name index is full at its limit of {self._max_map_bytes} bytes")
            try:
                _allocate(self._data, larger_bytes)
            except NoSpace:  # less may be had; and with the reserve, which is there, a removal finds its room
                larger_bytes = min(size_bytes + NAME_RESERVE_BYTES, larger_bytes)
                _allocate(self._data, larger_bytes + self._reserve_bytes)
        except NoSpace:
            if not removes or not self._reserve_bytes:
                raise
            larger_bytes = size_bytes + self._reserve_bytes
        self._set_map(larger_bytes)

    def _set_map(self, size_bytes: int) -> None:
        try:
            self._env.set_mapsize(size_bytes)
        except lmdb.Error as error:
            raise self._failure(error) from error
        self._keep_reserve()

    def _keep_reserve(self) -> None:
        """Allocate the reserve behind the map, where there is room."""
        self._reserve_bytes = 0
        with suppress(NoSpace):
            _allocate(self._data, self._env.info()["map_size"] + NAME_RESERVE_BYTES)
            self._reserve_bytes = NAME_RESERVE_BYTES

    def _failure(self, error: lmdb.Error) -> KvfsError:
        kind: type[KvfsError] = Corrupt if is_damage(error) else OutOfResources
        return (NoSpace if isinstance(error, lmdb.DiskError) else kind)(f"name index {self._path}: {error}")

    def _check_format(self) -> None:
        def change(txn: Txn) -> bytes:
            data = txn.get(_FORMAT_KEY, db=self._meta_db)
            if data is None:
                data = _U64.pack(FORMAT_VERSION)
                txn.put(_FORMAT_KEY, data, db=self._meta_db)
            return data

        check_format(self.write(change), str(self._path))

    # --- meta and ids ------------------------------------------------------------------------------------

    def get_meta(self, key: bytes) -> bytes | None:
        return self.read(lambda txn: txn.get(key, db=self._meta_db))

    def put_meta(self, key: bytes, value: bytes) -> None:
        """Raises InvalidRequest for the keys that the index keeps for itself."""
        if key in _RESERVED_META or not 0 < len(key) <= MAX_META_KEY_BYTES:
            raise InvalidRequest(f"meta key {key!r} is reserved, empty or over {MAX_META_KEY_BYTES} bytes")
        self.write(lambda txn: txn.put(key, value, db=self._meta_db), removes=True)

    def next_ids(self, n: int) -> int:
        """Take `n` consecutive object ids; the first. They were never given out before."""
        if n < 1:
            raise InvalidRequest(f"{n} object ids asked for, at least 1")
        if self._next_id + n > self._id_end:
            start = self._reserve_ids(max(n, OBJECT_ID_RANGE))
            if start != self._id_end:
                self._next_id = start
            self._id_end = start + max(n, OBJECT_ID_RANGE)
        first = self._next_id
        self._next_id += n
        return first

    def skip_ids(self, past: int) -> None:
        """Give out no id at or below `past`: for ids that were found in the data itself (see `highest_id`)."""

        def change(txn: Txn) -> None:
            end = max(self._stored_ids(txn), past + 1)
            txn.put(_IDS_KEY, _U64.pack(end), db=self._meta_db)

        if self._next_id <= past <= MAX_OBJECT_ID:
            self.write(change, removes=True)
            self._next_id = self._id_end = 0

    def next_bucket_id(self) -> int:
        """An id that no bucket ever had, 1 to MAX_BUCKET_ID. Raises LimitExceeded when all are used up."""

        def change(txn: Txn) -> int:
            given = self._stored_bucket_ids(txn)
            if given > MAX_BUCKET_ID:
                raise LimitExceeded(f"{self._path}: all bucket ids up to {MAX_BUCKET_ID} were given out")
            txn.put(_BUCKET_IDS_KEY, _U64.pack(given + 1), db=self._meta_db)
            return given

        return self.write(change)

    def skip_bucket_ids(self, past: int) -> None:
        """Give out no bucket id at or below `past`: for ids that were found in the data itself."""

        def change(txn: Txn) -> None:
            end = max(self._stored_bucket_ids(txn), past + 1)
            txn.put(_BUCKET_IDS_KEY, _U64.pack(end), db=self._meta_db)

        self.write(change, removes=True)

    def _reserve_ids(self, n: int) -> int:
        def change(txn: Txn) -> int:
            start = self._stored_ids(txn)
            if start + n > MAX_OBJECT_ID:
                raise LimitExceeded(f"{self._path}: all object ids up to {MAX_OBJECT_ID} were given out")
            txn.put(_IDS_KEY, _U64.pack(start + n), db=self._meta_db)
            return start

        return self.write(change)

    def _give_back_ids(self) -> None:
        """A clean close returns what is left of the range."""

        def change(txn: Txn) -> None:
            if self._stored_ids(txn) == self._id_end:
                txn.put(_IDS_KEY, _U64.pack(self._next_id), db=self._meta_db)

        self.write(change, removes=True)
        self._next_id = self._id_end = 0

    def _stored_bucket_ids(self, txn: Txn) -> int:
        return self._stored(txn, _BUCKET_IDS_KEY, int(time.time()), MAX_BUCKET_ID)

    def _stored_ids(self, txn: Txn) -> int:
        return self._stored(txn, _IDS_KEY, int(time.time()) << _ID_CLOCK_SHIFT, MAX_OBJECT_ID)

    def _stored(self, txn: Txn, key: bytes, default: int, most: int) -> int:
        """A row that says no possible id is as good as none."""
        data = txn.get(key, db=self._meta_db)
        if data is None:
            return default
        found = int.from_bytes(data, "little")
        if len(data) != _U64.size or found > most + 1:
            log.warning("name index %s: the row %s makes no sense: %s", self._path, key.decode(), data.hex())
            return default
        return found


def is_damage(error: lmdb.Error) -> bool:
    """Whether it says what was found in the file; else what the machine had too little of, or the device refused."""
    if (
        type(error) is lmdb.Error
    ):  # an errno without a class of its own, as text, or what is wrong with the file
        return not str(error).endswith(_SYSTEM_ERRORS)
    return not isinstance(error, _NOT_THE_FILE)


_NOT_THE_FILE: Final = (
    lmdb.MemoryError,
    lmdb.DiskError,
    lmdb.LockError,
    lmdb.ReadonlyError,
    lmdb.ReadersFullError,
    lmdb.TlsFullError,
    lmdb.PanicError,
)
_SYSTEM_ERRORS: Final = tuple(os.strerror(number) for number in (*SHORTAGES, errno.EIO, errno.EINTR))
_LOCK_BYTES: Final = 16 << 10
"""More than LMDB's file of readers has: they are 126, of 64 bytes each."""


def _allocate(file: Path, size_bytes: int) -> None:
    """Back what LMDB maps writable with room on the device. Raises NoSpace."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    before_bytes = os.fstat(descriptor).st_size
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        os.ftruncate(descriptor, before_bytes)  # what was had of it is of no use
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise NoSpace(f"name index {file}: {error.strerror}: {size_bytes} bytes are wanted") from None
    finally:
        os.close(descriptor)


def allocated_bytes(used_bytes: int) -> int:
    """The size of the file of an environment that is opened with so much in it."""
    return max(used_bytes, DEFAULT_NAME_MAP_BYTES) + NAME_RESERVE_BYTES


def highest_id(ids: Iterable[int]) -> int:
    """Of those that can have been given out; 0 for none."""
    return max((each for each in ids if each <= MAX_OBJECT_ID), default=0)


def check_format(data: bytes | None, path: str) -> None:
    """Raises Corrupt, FormatMismatch unless `data` is the row of this format's version."""
    found = int.from_bytes(data or b"", "little")
    if found < FORMAT_VERSION:  # there was none
        raise Corrupt(f"name index {path} has format {found}")
    if found > FORMAT_VERSION:
        raise FormatMismatch(f"name index {path} has format {found}, this is format {FORMAT_VERSION}")
