"""The name index that a start begins with: believed, salvaged, or empty.

Responsibility: whether the index of the last service may be believed, and the mark of this start in it.

Invariants: of an index with damaged rows the others are kept (`tiers.recovery.index_salvage`); one whose pages are
damaged, or that is old, is dropped whole; a newer version's is left alone, and the start refused.

Concurrency: before the store serves anybody. A child process walks the index first: LMDB trusts its pages,
and a damaged one ends the process that reads it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

from kvfs import limits
from kvfs.errors import Corrupt, KvfsError
from kvfs.index.names import NameIndex
from kvfs.index.rows import BucketRow
from tiers.data_dir import Home
from tiers.recovery.index_check import COPY, MARK, IndexWalk
from tiers.recovery.index_salvage import clear_index, salvage_index

log = logging.getLogger("kvfs.store")


@contextmanager
def walking(home: Home) -> Iterator[IndexWalk | None]:
    """Walk the index within the block; yield None where there is none to believe."""
    if (home.index / "data.mdb").exists() and home.index_is_durable:
        with IndexWalk(home.index, copy=home.index / COPY) as walk:
            yield walk
    else:
        yield None


class IndexState(Enum):
    """Says what an index was opened with."""

    WHOLE = "all that the last service left"
    SALVAGED = "what holds of it, and with a log the log's buckets"
    EMPTY = "nothing"


def open_index(
    home: Home, believe: bool, walk: IndexWalk | None, logged_buckets: Callable[[], list[BucketRow]]
) -> tuple[NameIndex, IndexState]:
    """Open the index of the last service as far as it is believed, with the mark of this start.

    `logged_buckets`: those that the log has, for a salvaged index.
    """
    if believe and (home.index / "data.mdb").exists():
        names, state = _believed_index(home, walk), IndexState.WHOLE
        if names is None and home.index_is_durable and salvage_index(home, logged_buckets()):
            names, state = NameIndex.open(home.index), IndexState.SALVAGED
        try:
            if names is not None:
                return _marked(home, names, is_believed=state is IndexState.WHOLE), state
        except Corrupt as error:  # its free pages, which nobody can walk through
            log.warning("name index %s: %s", home.index, error)
        log.warning("name index %s: starting with an empty one", home.index)
    clear_index(home.index)
    names = NameIndex.open(home.index, map_size_bytes=limits.DEFAULT_NAME_MAP_BYTES)
    return _marked(home, names), IndexState.EMPTY


def _marked(home: Home, names: NameIndex, *, is_believed: bool = False) -> NameIndex:
    """Put the mark of this start into the index. Raises Corrupt, and then it is closed."""
    try:
        home.begin((names.get_meta(MARK) or b"").decode(errors="replace"))
        names.put_meta(MARK, home.start.encode())
        home.begun()
    except BaseException:
        close_unstarted(home, names, is_believed=is_believed)
        raise
    return names


def close_unstarted(home: Home, names: NameIndex, *, is_believed: bool) -> None:
    """Close the index with the mark that it had, and have the directory say what it said."""
    mark = home.found_mark

    def restore_mark() -> bool:
        names.put_meta(MARK, mark.encode())
        return names.close()

    try:
        if mark and is_believed:
            home.undo_begin(mark, restore_mark)
    except (KvfsError, OSError) as error:
        log.warning("%s: not as clean as it was found: %s", home.path, error)
    finally:
        names.close()


def _renewed(index: Path, walk: IndexWalk) -> bool:
    """Return whether the index is whole; then its copy without free pages has taken its place, where there was room."""
    with walk:
        if not walk.is_whole():
            return False
        if walk.has_copy:
            (index / COPY).replace(index / "data.mdb")
        else:
            log.warning("name index %s: no room for a copy of it: it is used as it is", index)
    return True


def _believed_index(home: Home, walk: IndexWalk | None) -> NameIndex | None:
    if walk is None:
        why = "the machine went down while a service ran"
    elif not _renewed(home.index, walk):
        why = "it is damaged"
    else:
        try:
            names = NameIndex.open(home.index, map_size_bytes=limits.DEFAULT_NAME_MAP_BYTES)
        except Corrupt as error:
            why = str(error)
        else:
            if home.knows_mark((names.get_meta(MARK) or b"").decode(errors="replace")):
                return names
            names.close()
            why = "it is not the one that the last service used"
    log.warning("name index %s: %s", home.index, why)
    return None
