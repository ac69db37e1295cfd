"""Salvage of a name index of which single rows are damaged: the others, in an index that takes its place.

Responsibility: the rows of the old index that match their checksums, then those that only the log knows. A start
(`tiers.recovery.startup`) and a repair (`tiers.fsck.repair`) both do this, so that both keep the same.

Invariants: the log adds no second name of an object, and no name that is taken; a row whose bucket neither knows is
dropped. The new file is whole and on the device before it takes the place of the old one, in one step.

Concurrency: before anything else has the index open.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from kvfs import limits
from kvfs.errors import Corrupt
from kvfs.index.environment import highest_id
from kvfs.index.names import NameIndex, is_name
from kvfs.index.rows import SNAPSHOT, BucketRow, NameRow, clear_flags, peek_row
from tiers.cold import index as cold_index
from tiers.data_dir import Home
from tiers.recovery.index_check import COPY, MARK, IndexReader, can_be_walked

if TYPE_CHECKING:
    import lmdb

log = logging.getLogger("kvfs.store")

BESIDE = "index.new"
"""The directory in that of the data in which another index is built."""


def salvage_index(home: Home, logged: Iterable[BucketRow]) -> bool:
    """Keep the rows of the index that are not damaged, with its mark and the buckets that only the log has; return
    False where its pages are damaged, or it is not the one that the last service used."""
    if not can_be_walked(home.index):
        return False
    try:
        with IndexReader(home.index) as old:
            mark = old.meta(MARK)
            if not home.knows_mark(mark.decode(errors="replace")):
                return False
            buckets = [row for _, row in old.buckets() if row is not None]

            def fill(names: NameIndex) -> None:
                keep_rows(names, [*buckets, *logged], old.rows())
                keep_cold(names, old)
                names.put_meta(MARK, mark)

            replace_index(home, fill)
    except Corrupt:
        return False
    log.warning("name index %s: it is damaged: its rows that hold are kept", home.index)
    return True


def replace_index(home: Home, fill: Callable[[NameIndex], None]) -> None:
    """Build another index beside the old one, then have it take its place. Raises what `fill` does, OSError."""
    beside = home.path / BESIDE
    shutil.rmtree(beside, ignore_errors=True)
    names = NameIndex.open(beside, map_size_bytes=limits.DEFAULT_NAME_MAP_BYTES)
    try:
        fill(names)
    finally:
        names.close()
    home.index.mkdir(mode=0o700, exist_ok=True)
    shutil.copyfile(beside / "data.mdb", home.index / COPY)
    with (home.index / COPY).open("rb") as copied:
        os.fsync(copied.fileno())
    clear_index(home.index, but=COPY)
    (home.index / COPY).replace(home.index / "data.mdb")
    shutil.rmtree(beside)


def clear_index(index: Path, *, but: str = "") -> None:
    """Empty the directory, which may be a link to another device."""
    if index.exists():
        for file in index.iterdir():
            if file.name != but:
                file.unlink()


def keep_rows(
    names: NameIndex, buckets: Iterable[BucketRow], rows: Iterable[tuple[bytes, bytes, NameRow | None]]
) -> None:
    """Put buckets, the first of each name and id, and the rows that hold and are in one of them."""
    ids: set[int] = set()
    for bucket in buckets:
        if bucket.bucket_id not in ids and names.get_bucket(bucket.name) is None:
            names.put_bucket(bucket)
            ids.add(bucket.bucket_id)
    names.skip_bucket_ids(max(ids, default=0))
    highest = [0]

    def kept() -> Iterator[tuple[bytes, bytes]]:
        for bucket, key, row in rows:
            if row is not None and key and names.get_bucket(bucket) is not None:
                highest[0] = highest_id((highest[0], row.object_id, row.sequence))
                yield bucket + b"\0" + key, row.encode()

    names.put_many(kept())
    names.skip_ids(highest[0])


def keep_cold(names: NameIndex, old: IndexReader) -> None:
    """Copy the cold tier's rows, which have checksums of their own."""
    db = names.environment.open_db(cold_index.DATABASE)
    pairs = old.pairs(cold_index.DATABASE)
    while page := list(islice(pairs, limits.MAX_LIST_ENTRIES)):
        names.environment.write(partial(_put_all, page, db))
    for key in cold_index.WORDS:
        if word := old.meta(key):
            names.put_meta(key, word)


def _put_all(page: list[tuple[bytes, bytes]], db: lmdb._Database, txn: lmdb.Transaction[bytes]) -> None:
    for key, value in page:
        txn.put(key, value, db=db)


def add_logged(names: NameIndex, logged: Iterable[tuple[int, tuple[bytes, bytes]]]) -> int:
    """Put the names of the log, as (object id, (encoded row, `bucket NUL key`)), that are missing; return how many."""
    kept = {peek_row(data)[0] for _, _, data in names.encoded_rows() if data is not None}
    missing = (
        (name, clear_flags(row, SNAPSHOT))
        for object_id, (row, name) in logged
        if object_id not in kept and _is_free(names, name)
    )
    return names.put_many(missing)


def _is_free(names: NameIndex, name: bytes) -> bool:
    bucket, _, key = name.partition(b"\0")
    return is_name(name) and names.get_bucket(bucket) is not None and names.get(bucket, key) is None
