"""The LMDB environment under the name index: transactions, growth, format version, meta rows, object ids.

Responsibility: all of the file but names and buckets.

Invariants:
- One `write` is one transaction: after an error, or a crash in the middle, all of it happened or nothing. A
  full map grows and the change runs again, so a change has no side effect outside its transaction.
- Object ids never repeat: ranges are reserved in `meta` before use, and a new environment starts at the wall
  clock (seconds << 20), so also when the index was lost and built anew. Bucket ids, of 32 bits, start at the
  seconds themselves.
- LMDB's map is never larger than the file that is allocated: it writes through a mapping, and a page without room on
  the filesystem would be a SIGBUS. A full filesystem is NoSpace; removals have a reserve.
- Corrupt means that data was read and is wrong, not that memory, descriptors or room were missing.
- A read leaves no slot of LMDB's table of readers taken, whatever is raised in it and however long that is kept.

Durability: soft state. The file survives the process, `kill -9` included, since LMDB writes no live page in place.
After a power failure it is not believed, and the caller builds a new one.

Concurrency: one process and one thread; no transaction outlives a call.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

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
from kvfs.index.rows import MAX_BUCKET_ID, load_row, store_row
from kvfs.index.tree import Txn
from kvfs.limits import (
    DEFAULT_NAME_MAP_BYTES,
    MAX_META_KEY_BYTES,
    MAX_NAME_MAP_BYTES,
    MAX_NAME_MAP_STEP_BYTES,
    NAME_RESERVE_BYTES,
    OBJECT_ID_RANGE,
)

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
"""A higher id in the data was not given out here, and ids do not go on from it."""
_ID_ROWS: Final = {_IDS_KEY: (_ID_CLOCK_SHIFT, MAX_OBJECT_ID), _BUCKET_IDS_KEY: (0, MAX_BUCKET_ID)}
"""By key, the shift of the clock with which ids start, and the highest id."""

log = logging.getLogger("kvfs.names")

T = TypeVar("T")


class NameEnvironment:
    """Open or create the environment.

    Raises InvalidRequest for a map size, FormatMismatch, Corrupt for a file that LMDB refuses.
    """

    def __init__(self, path: Path, *, map_size_bytes: int) -> None:
        if not 0 < map_size_bytes <= MAX_NAME_MAP_BYTES:
            raise InvalidRequest(
                f"name index {path}: a map of {map_size_bytes} bytes, not 1 to {MAX_NAME_MAP_BYTES}"
            )
        self._path = path
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
                sync=False,
                metasync=False,
                writemap=True,
            )
        except lmdb.Error as error:
            raise failure(self._path, error) from error
        try:
            _allocate(self._data, map_size_bytes)  # a new one: LMDB wants to make it itself
            self._keep_reserve()
            self._env.reader_check()  # a reader that was killed would keep old pages from being used again
            self._meta_db = self.open_db(b"meta")
            self._check_format()
        except BaseException:
            self._env.close()
            raise

    def clear_dead_readers(self) -> None:
        """Clear LMDB's entries of readers whose process was killed: they would keep pages from being used again."""
        self._env.reader_check()

    def open_db(self, name: bytes) -> lmdb._Database:
        """Open a database of the environment, made if need be. Raises what `failure` makes of LMDB's errors."""
        try:
            return self._env.open_db(name)
        except lmdb.Error as error:
            raise failure(self._path, error) from error

    def close(self) -> bool:
        """Flush and close; return whether all of it is on the device. Closing twice is harmless."""
        if self._closed:
            return False
        self._closed = True
        try:
            if self._id_end:
                self._return_ids()
            self._env.sync(True)
            return True
        except (NoSpace, lmdb.Error):
            log.warning(
                "name index %s: could not be flushed; the rest of its range of ids is skipped", self._path
            )
            return False
        finally:
            self._env.close()

    # --- transactions ------------------------------------------------------------------------------------

    def read(self, look: Callable[[Txn], T]) -> T:
        """Call `look` in a read transaction of its own; return its result. Raises Corrupt, OutOfResources."""
        try:
            return read_once(self._env, look)
        except lmdb.Error as error:
            raise failure(self._path, error) from error

    def write(self, change: Callable[[Txn], T], *, removes: bool = False) -> T:
        """Run `change` in a write transaction, and again with a larger map where the map is full. Raises NoSpace.

        `removes`: it frees at least what it takes, and may use the reserve.
        """
        while True:
            try:
                with self._env.begin(write=True) as txn:
                    return change(txn)
            except lmdb.MapFullError:
                self._grow(removes)
            except lmdb.Error as error:
                raise failure(self._path, error) from error

    def _grow(self, removes: bool) -> None:
        size_bytes = self._env.info()["map_size"]
        larger_bytes = min(size_bytes + min(size_bytes, MAX_NAME_MAP_STEP_BYTES), MAX_NAME_MAP_BYTES)
        try:
            if size_bytes >= MAX_NAME_MAP_BYTES:
                raise NoSpace(f"the name index is full at its limit of {MAX_NAME_MAP_BYTES} bytes")
            try:
                _allocate(self._data, larger_bytes)
            except NoSpace:  # a smaller step may fit; with the reserve, a removal finds its room
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
            raise failure(self._path, error) from error
        self._keep_reserve()

    def _keep_reserve(self) -> None:
        """Allocate the reserve behind the map, where there is room."""
        self._reserve_bytes = 0
        with suppress(NoSpace):
            _allocate(self._data, self._env.info()["map_size"] + NAME_RESERVE_BYTES)
            self._reserve_bytes = NAME_RESERVE_BYTES

    def _check_format(self) -> None:
        def change(txn: Txn) -> bytes:
            data = txn.get(_FORMAT_KEY, db=self._meta_db)
            if data is None:
                data = store_row(_FORMAT_KEY, _U64.pack(FORMAT_VERSION))
                txn.put(_FORMAT_KEY, data, db=self._meta_db)
            return data

        check_format(self.write(change), str(self._path))

    # --- meta and ids ------------------------------------------------------------------------------------

    def get_meta(self, key: bytes) -> bytes | None:
        """Return the value of a meta row, or None."""
        return self.read(lambda txn: txn.get(key, db=self._meta_db))

    def put_meta(self, key: bytes, value: bytes) -> None:
        """Store a value of the service's own. Raises InvalidRequest for the keys that the index keeps for itself."""
        if key in _RESERVED_META or not 0 < len(key) <= MAX_META_KEY_BYTES:
            raise InvalidRequest(f"meta key {key!r} is reserved, empty or over {MAX_META_KEY_BYTES} bytes")
        self.write(lambda txn: txn.put(key, value, db=self._meta_db), removes=True)

    def next_ids(self, n: int) -> int:
        """Take `n` consecutive object ids, never given out before; return the first."""
        if n < 1:
            raise InvalidRequest(f"{n} object ids asked for, at least 1")
        if self._next_id + n > self._id_end:
            start = self._take(_IDS_KEY, max(n, OBJECT_ID_RANGE))
            if start != self._id_end:
                self._next_id = start
            self._id_end = start + max(n, OBJECT_ID_RANGE)
        first = self._next_id
        self._next_id += n
        return first

    def skip_ids(self, past: int) -> None:
        """Give out no id at or below `past`, which was found in the data itself (see `highest_id`)."""
        if self._next_id <= past <= MAX_OBJECT_ID:
            self._skip(_IDS_KEY, past)
            self._next_id = self._id_end = 0

    def next_bucket_id(self) -> int:
        """Return an id that no bucket ever had, 1 to MAX_BUCKET_ID. Raises LimitExceeded when all are used up."""
        return self._take(_BUCKET_IDS_KEY, 1)

    def skip_bucket_ids(self, past: int) -> None:
        """Give out no bucket id at or below `past`, which was found in the data itself."""
        self._skip(_BUCKET_IDS_KEY, past)

    def _take(self, key: bytes, n: int) -> int:
        """Take `n` ids of a row; return the first."""

        def change(txn: Txn) -> int:
            start, most = self._stored(txn, key), _ID_ROWS[key][1]
            if start + n > most + 1:
                raise LimitExceeded(f"{self._path}: all {key.decode()} up to {most} were given out")
            txn.put(key, _U64.pack(start + n), db=self._meta_db)
            return start

        return self.write(change)

    def _skip(self, key: bytes, past: int) -> None:
        def change(txn: Txn) -> None:
            txn.put(key, _U64.pack(max(self._stored(txn, key), past + 1)), db=self._meta_db)

        self.write(change, removes=True)

    def _return_ids(self) -> None:
        """Put the unused ids of the range back, at a clean close."""

        def change(txn: Txn) -> None:
            if self._stored(txn, _IDS_KEY) == self._id_end:
                txn.put(_IDS_KEY, _U64.pack(self._next_id), db=self._meta_db)

        self.write(change, removes=True)
        self._next_id = self._id_end = 0

    def _stored(self, txn: Txn, key: bytes) -> int:
        """Return the next id of a row; from the clock where there is none, or none that is possible."""
        shift, most = _ID_ROWS[key]
        data = txn.get(key, db=self._meta_db)
        if data is not None:
            found = int.from_bytes(data, "little")
            if len(data) == _U64.size and found <= most + 1:
                return found
            log.warning("name index %s: the row %s holds no id: %s", self._path, key.decode(), data.hex())
        return int(time.time()) << shift


def read_once(env: lmdb.Environment, look: Callable[[Txn], T]) -> T:
    """Run `look` in a read transaction, and free that, whatever `look` raises.

    LMDB's slot is free again when the transaction's object is freed, not when it ends; a kept exception keeps the
    frames of its traceback, and they what they knew: so those that ended in here lose their variables.
    """
    handled = sys.exception()
    txn = env.begin()
    try:
        return look(txn)
    except BaseException as error:
        raised: BaseException | None = error
        while raised is not None and raised is not handled:
            traceback.clear_frames(raised.__traceback__)
            raised = raised.__context__
        raise
    finally:
        txn.abort()
        del txn


def failure(path: Path, error: lmdb.Error) -> KvfsError:
    """Return what an error of LMDB is here: NoSpace, Corrupt or OutOfResources."""
    if isinstance(error, lmdb.DiskError):
        return NoSpace(f"name index {path}: {error}")
    return (Corrupt if is_damage(error) else OutOfResources)(f"name index {path}: {error}")


def is_damage(error: lmdb.Error) -> bool:
    """Return whether an error is about the file's data, not about what the machine lacked or refused."""
    if type(error) is lmdb.Error:  # an errno without a class of its own, as text; or damage
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
"""More than LMDB's file of 126 readers takes, 64 bytes each."""


def _allocate(file: Path, size_bytes: int) -> None:
    """Allocate a file that LMDB maps writable. Raises NoSpace."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    before_bytes = os.fstat(descriptor).st_size
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        os.ftruncate(descriptor, before_bytes)  # a part of the room is of no use
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise NoSpace(f"name index {file}: {error.strerror}: {size_bytes} bytes are needed") from None
    finally:
        os.close(descriptor)


def allocated_bytes(used_bytes: int) -> int:
    """Return the size of the file of an environment that is opened with `used_bytes` in it."""
    return max(used_bytes, DEFAULT_NAME_MAP_BYTES) + NAME_RESERVE_BYTES


def highest_id(ids: Iterable[int]) -> int:
    """Return the highest of these ids that can have been given out here; 0 for none."""
    return max((each for each in ids if each <= MAX_OBJECT_ID), default=0)


def check_format(data: bytes | None, path: str) -> None:
    """Check the row of the format's version. Raises Corrupt for a damaged one or none, FormatMismatch for another."""
    found = int.from_bytes(load_row(_FORMAT_KEY, data or b""), "little")
    if found != FORMAT_VERSION:
        raise FormatMismatch(f"name index {path} has format {found}, this is format {FORMAT_VERSION}")
