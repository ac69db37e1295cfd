"""What a store begins with: the names, and the objects in DRAM, that an earlier service left.

Responsibility: say whether the name index may be believed, which of the surviving slots its names and buckets
still want, and rebuild from both what the store keeps in memory. Which slots are whole is `tiers.adoption`'s to
say.

Invariants:
- An object is there again with exactly the bytes, name and attributes that it had, or it is a miss: what was
  removed or never sealed does not come back, since a removal takes the row (of a block: the slot's header)
  away first.
- Afterwards no name row is without bytes, and no unit (`paths.unit_prefix`) without one of its files.
- Of an index with damaged rows the others are kept (`tiers.salvage`); one whose pages are damaged, or that is old, is
  dropped whole; a newer version's is left alone, and the start refused.

Concurrency: before the store serves anybody. A child process walks the index first: LMDB trusts its pages,
and a damaged one ends the process that reads it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from kvfs import limits, paths
from kvfs.errors import Corrupt, KvfsError
from kvfs.name_env import highest_id
from kvfs.name_rows import RETIRED, peek_row
from kvfs.names import DIRECTORY, PINNED, NameIndex, NameRow
from kvfs.sizes import format_size
from tiers.adoption import ENTRY_PINNED, Survivor
from tiers.base import Kind
from tiers.blocks import Block
from tiers.bucket_files import BucketFiles
from tiers.cold_bucket import ColdOptions
from tiers.cold_restore import ColdHeritage
from tiers.home import Home
from tiers.index_check import COPY, MARK, IndexWalk
from tiers.model import Name
from tiers.nvme import NvmeTier
from tiers.rebuild import (
    Replaced,
    adopt_nameless,
    adopt_orphans,
    agree,
    known_buckets,
    name_survivors,
    rebuild_index,
    restore_copies,
    settle_snapshots,
    skip_ids,
)
from tiers.replay import Replayed
from tiers.salvage import add_logged, clear_index, salvage_index

if TYPE_CHECKING:
    from tiers.store import TieredStore

log = logging.getLogger("kvfs.store")


@dataclass(frozen=True, slots=True)
class Lower:
    """The NVMe tier, and what a replay of its log found."""

    nvme: NvmeTier
    found: Replayed


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a start found, and how long each of its phases took, in seconds."""

    was_clean: bool
    taken_over_objects: int
    """From DRAM."""
    taken_over_bytes: int
    dropped_names: int
    """Without bytes."""
    rebuilt_names: int | None
    """From the log; None where the name index was believed, or there is no log."""
    log_objects: int
    log_segments: int
    log_records: int
    log_s: float
    index_s: float
    adoption_s: float
    verify_s: float


class Heritage:
    """Opens the index of `home`; then `choose` is for `DramTier.open`, and `restore` for the store made of both.

    With a lower tier, what an index lacks that is not believed comes from its log.
    """

    def __init__(
        self,
        home: Home,
        lower: Lower | None = None,
        *,
        cold: ColdOptions | None = None,
        believe: bool = True,
        walk: IndexWalk | None = None,
    ) -> None:
        """`walk` is of `walking`, begun before the log was read. Raises FormatMismatch for an index of a newer
        version, Corrupt: then again, without `believe`. Any other method may raise Corrupt too: not all of a damaged
        index shows at once."""
        began = time.monotonic()
        self._home = home
        self._lower = lower
        self._killed = not home.clean
        self._is_first = not home.index.exists() and (lower is None or not lower.found.records)
        self.names, state = _open_index(home, believe, walk, lower)
        self._is_believed, self._is_salvaged = state is _State.WHOLE, state is _State.SALVAGED
        try:
            self._rebuilt = None if lower is None else self._agree_with_log(lower)
            self._cold = None if cold is None else ColdHeritage(self.names, cold)
            self._buckets = {row.bucket_id: row for row in self.names.buckets()}
        except BaseException:
            self.give_up()
            raise
        self._cold_names: dict[int, Name] = {}
        self._named: dict[int, tuple[Name, NameRow]] = {}
        """Object id -> the name and row of a survivor."""
        self._index_s = time.monotonic() - began
        self._began = time.monotonic()

    def _agree_with_log(self, lower: Lower) -> int | None:
        """How many names were taken from the log; None where the index is believed."""
        nvme, found, rebuilt = lower.nvme, lower.found, None
        if self._is_believed:
            settle_snapshots(self.names, found)
        elif self._is_salvaged:
            rebuilt = add_logged(self.names, found.names.items())
        else:
            rebuilt = rebuild_index(self.names, found, BucketFiles(self._home.path).load())
        adopt_orphans(self.names, nvme, found)
        adopt_nameless(self.names, nvme, found, killed=self._killed)
        skip_ids(self.names, found)
        return rebuilt

    @property
    def below(self) -> tuple[int, int]:
        """(objects, capacity in bytes) of the lower tiers, for the size of the table."""
        lower, cold = self._lower, self._cold
        objects, capacity_bytes = (
            (0, 0) if lower is None else (len(lower.nvme.objects), lower.nvme.capacity_bytes)
        )
        if cold is not None:
            return objects + len(cold), capacity_bytes + cold.options.capacity_bytes
        return objects, capacity_bytes

    def give_up(self) -> None:
        """The start has failed: close the index, and leave the data directory as clean as it was found."""
        _give_up(self._home, self.names, is_believed=self._is_believed)

    def choose(self, survivors: list[Survivor]) -> list[Survivor]:
        """Those that have a name or a bucket, the dearest first."""
        objects = {
            each.sealed.header.object_id: each
            for each in survivors
            if each.sealed.header.key.kind is Kind.OBJECT
        }
        if self._lower is not None and self._rebuilt is not None:
            name_survivors(self.names, self._lower.found, objects, replace=not self._is_salvaged)
        known = {row.name for row in self._buckets.values()}
        for bucket, key, data in self.names.encoded_rows() if objects else ():
            survivor = None if data is None else objects.get(peek_row(data)[0])
            if data is None or survivor is None or bucket not in known:
                continue
            row = NameRow.decode(data)
            if not row.flags & (DIRECTORY | RETIRED) and agree(row, survivor):
                self._named.setdefault(row.object_id, (Name(bucket, key), row))
        wanted = [found for each in survivors if (found := self._wanted(each)) is not None]
        return dearest_first(wanted, self._unit)

    def _wanted(self, survivor: Survivor) -> Survivor | None:
        header = survivor.sealed.header
        if header.key.kind is Kind.BLOCK:
            bucket = self._buckets.get(header.bucket_id)
            return survivor if bucket is not None and bucket.namespace is not None else None
        found = self._named.get(header.object_id)
        if found is None:
            return None
        survivor.pinned = bool(found[1].flags & PINNED)
        return survivor

    def _unit(self, survivor: Survivor) -> bytes | None:
        found = self._named.get(survivor.sealed.header.object_id)
        return None if found is None else unit_of(found[0])

    def restore(self, store: TieredStore) -> None:
        """Have the store know what its tier has taken over; rows whose objects have no bytes go."""
        adopted, store.dram.adopted = store.dram.adopted, []
        there = {
            each.sealed.header.object_id for each in adopted if each.sealed.header.key.kind is Kind.OBJECT
        }
        below = {} if self._lower is None else self._lower.nvme.objects
        lost: list[Name] = []
        replaced = None
        if self._lower is not None:
            replaced = Replaced(self.names, self._lower.nvme, self._lower.found)

        def durable(bucket: bytes) -> bool:  # a name on its way there, whose bytes never arrived
            row = self.names.get_bucket(bucket)
            return row is not None and row.class_ == "durable"

        def keep(bucket: bytes, key: bytes, data: bytes | None) -> bool:
            if data is None:  # the walk found it whole
                raise Corrupt(f"name index: the row of {Name(bucket, key)} is damaged")
            object_id, flags = peek_row(data)
            if flags & DIRECTORY:
                return self.names.get_bucket(bucket) is not None
            if flags & RETIRED:
                lost.append(Name(bucket, key))
                return False
            if self._cold is not None and self._cold.has(object_id) and not durable(bucket):
                self._cold_names[object_id] = Name(bucket, key)
                return True
            if object_id in below:
                return True
            if object_id in there and self._named[object_id][0] == Name(bucket, key):
                return True
            if replaced is not None and replaced.has_other(Name(bucket, key), object_id):
                return True
            lost.append(Name(bucket, key))
            return False

        dropped = self.names.prune(keep)
        for survivor in reversed(adopted):  # the order of the calls is what the policy goes by
            self._restore_one(store, survivor)
        if adopted:
            self.names.skip_ids(highest_id(each.sealed.header.sequence for each in adopted))
        if self._lower is not None:
            nvme, found = self._lower.nvme, self._lower.found
            assert replaced is not None
            replaced.put()
            store.journal = restore_copies(store, nvme, found, compare=self._killed or not self._is_believed)
        for name in lost:
            if durable(name.bucket) and self.names.get(name.bucket, name.key) is None:
                why = "it is damaged" if not self._killed else "it is damaged, or was never answered for"
                log.error("%s of a durable bucket is lost: %s", name, why)
        if self._cold is not None:
            store.cold = self._cold.restore(store, self._cold_names)
        units = {(name.bucket, unit) for name in lost if (unit := paths.unit_prefix(name.key)) is not None}
        for bucket, unit in units:
            _drop_unit(store, Name(bucket, unit))
        recovery = self._recovery(adopted, dropped, store.dram.verify_s)
        store.recovery = asdict(recovery)
        if not self._is_first:
            self._report(recovery)
        self._named.clear()

    def _restore_one(self, store: TieredStore, survivor: Survivor) -> None:
        sealed, key = survivor.sealed, survivor.sealed.header.key
        flags = ENTRY_PINNED if survivor.pinned and key.kind is Kind.BLOCK else 0
        store.table.put(
            key.digest,
            int(key.kind),
            sealed.extent.slot,
            sealed.extent.generation,
            sealed.size_bytes,
            flags=flags,
        )
        store.table.set_access(key.digest, survivor.hits, survivor.last_access_s)
        if key.kind is Kind.OBJECT:
            store.enter(key.digest, *self._named[sealed.header.object_id])
        else:
            store.enter_block(key.digest, self._block(survivor))

    def _block(self, survivor: Survivor) -> Block:
        header = survivor.sealed.header
        return Block(
            self._buckets[header.bucket_id].name,
            header.uid,
            survivor.sealed.size_bytes,
            header.sequence,
            survivor.sealed.sealed_at_ns,
            survivor.pinned,
            header.parent if any(header.parent) else None,
        )

    def _recovery(self, adopted: list[Survivor], dropped: int, verify_s: float) -> Recovery:
        lower = self._lower
        return Recovery(
            was_clean=not self._killed,
            taken_over_objects=len(adopted),
            taken_over_bytes=sum(each.sealed.size_bytes for each in adopted),
            dropped_names=dropped,
            rebuilt_names=self._rebuilt,
            log_objects=0 if lower is None else len(lower.nvme.objects),
            log_segments=0 if lower is None else lower.found.segments,
            log_records=0 if lower is None else lower.found.records,
            log_s=0.0 if lower is None else lower.found.seconds,
            index_s=self._index_s,
            adoption_s=time.monotonic() - self._began - verify_s,
            verify_s=verify_s,
        )

    def _report(self, recovery: Recovery) -> None:
        log.info(
            "taken over: %d objects, %s; %d names without bytes dropped; index %.3f s, adoption %.3f s, "
            "verify %.3f s (%.2f GB/s)",
            recovery.taken_over_objects,
            format_size(recovery.taken_over_bytes),
            recovery.dropped_names,
            recovery.index_s,
            recovery.adoption_s,
            recovery.verify_s,
            recovery.taken_over_bytes / max(recovery.verify_s, 1e-9) / 1e9,
        )
        if self._lower is not None:
            rebuilt = recovery.rebuilt_names
            log.info(
                "read back: %d objects in %d segments, %d records; %s. log %.3f s",
                recovery.log_objects,
                recovery.log_segments,
                recovery.log_records,
                "names from the index" if rebuilt is None else f"{rebuilt} names rebuilt",
                recovery.log_s,
            )


def unit_of(name: Name) -> bytes | None:
    """The eviction group of a name: the directory whose files are useful only together."""
    unit = paths.unit_prefix(name.key)
    return name.bucket + b"\0" + unit if unit else None


def _drop_unit(store: TieredStore, unit: Name) -> None:
    """What is left of a cache's unit that lost a file, and its marker: the directory alone would read as a hit."""
    row = store.names.get_bucket(unit.bucket)
    if row is None or row.class_ == "durable":
        return
    for name, found in list(_under(store.names, unit)):
        if not found.flags & DIRECTORY:
            store.remove(name)
    store.drop_empty_unit(Name(unit.bucket, unit.key + b"-"))


def _under(names: NameIndex, unit: Name) -> Iterable[tuple[Name, NameRow]]:
    """The files directly in a unit."""
    after = b""
    while True:
        page = names.list(unit.bucket, prefix=unit.key, after=after, delimiter=b"/")
        for entry in page.entries:
            if entry.row is not None:
                yield Name(unit.bucket, entry.name), entry.row
        if not page.truncated:
            return
        after = page.entries[-1].name


# --- what is dear ------------------------------------------------------------------------------------------
def dearest_first(
    survivors: list[Survivor], unit_of_survivor: Callable[[Survivor], bytes | None]
) -> list[Survivor]:
    """Pinned ones first, then by last use, the latest first; a block behind its ancestors, a unit's files together.

    So any first part of it is worth keeping, and the policy that is told in the reverse order evicts as before.
    """
    blocks = {
        each.sealed.header.key.digest: each for each in survivors if each.sealed.header.key.kind is Kind.BLOCK
    }
    units: dict[bytes, list[Survivor]] = {}
    for each in survivors:
        if unit := unit_of_survivor(each):
            units.setdefault(unit, []).append(each)
    order: dict[bytes, Survivor] = {}
    recency = sorted(
        survivors,
        key=lambda each: (each.pinned, each.last_access_s, each.sealed.header.sequence),
        reverse=True,
    )
    for each in recency:
        unit = unit_of_survivor(each)
        group = units[unit] if unit else _chain(each, blocks, order)
        for member in group:
            order.setdefault(member.sealed.header.key.digest, member)
    return list(order.values())


def _chain(
    survivor: Survivor, blocks: dict[bytes, Survivor], placed: dict[bytes, Survivor]
) -> list[Survivor]:
    """A block after those of its ancestors that have no place yet, the first ancestor first."""
    chain = {survivor.sealed.header.key.digest: survivor}
    parent = survivor.sealed.header.parent
    while parent in blocks and parent not in placed and parent not in chain:
        chain[parent] = blocks[parent]
        parent = blocks[parent].sealed.header.parent
    return list(reversed(chain.values()))


# --- the index ---------------------------------------------------------------------------------------------
@contextmanager
def walking(home: Home) -> Iterator[IndexWalk | None]:
    """Walk the index meanwhile; None where there is none to believe."""
    if (home.index / "data.mdb").exists() and home.index_is_durable:
        with IndexWalk(home.index, rows=True, copy=home.index / COPY) as walk:
            yield walk
    else:
        yield None


class _State(Enum):
    """What an index was opened with."""

    WHOLE = "all that the last service left"
    SALVAGED = "what holds of it, and with a log the log's buckets"
    EMPTY = "nothing"


def _open_index(
    home: Home, believe: bool, walk: IndexWalk | None, lower: Lower | None
) -> tuple[NameIndex, _State]:
    """The index of the last service as far as it may be believed; with the mark of this start."""
    if believe and (home.index / "data.mdb").exists():
        names, state = _believed_index(home, walk), _State.WHOLE
        if names is None and home.index_is_durable:
            buckets = [] if lower is None else known_buckets(lower.found, BucketFiles(home.path).load())
            if salvage_index(home, buckets):
                names, state = NameIndex.open(home.index), _State.SALVAGED
        try:
            if names is not None:
                return _marked(home, names, is_believed=state is _State.WHOLE), state
        except Corrupt as error:  # its free pages, which nobody can walk through
            log.warning("name index %s: %s", home.index, error)
        log.warning("name index %s: starting with an empty one", home.index)
    clear_index(home.index)
    names = NameIndex.open(home.index, map_size_bytes=limits.DEFAULT_NAME_MAP_BYTES)
    return _marked(home, names), _State.EMPTY


def _marked(home: Home, names: NameIndex, *, is_believed: bool = False) -> NameIndex:
    """The index, with the mark of this start. Raises Corrupt, and then it is closed."""
    try:
        home.begin((names.get_meta(MARK) or b"").decode(errors="replace"))
        names.put_meta(MARK, home.start.encode())
        home.begun()
    except BaseException:
        _give_up(home, names, is_believed=is_believed)
        raise
    return names


def _give_up(home: Home, names: NameIndex, *, is_believed: bool) -> None:
    """Close the index with the mark that it had, and have the directory say what it said."""
    mark = home.found_mark

    def give_back() -> bool:
        names.put_meta(MARK, mark.encode())
        return names.close()

    try:
        if mark and is_believed:
            home.undo_begin(mark, give_back)
    except (KvfsError, OSError) as error:
        log.warning("%s: not as clean as it was found: %s", home.path, error)
    finally:
        names.close()


def _renewed(index: Path, walk: IndexWalk) -> bool:
    """Whether the index is whole; then its copy without free pages has taken its place, where there was room."""
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
