"""What a store begins with: the names, and the objects in DRAM, that an earlier service left.

Responsibility: say whether the name index may be believed, which of the surviving slots its names and buckets
still want, and rebuild from both what the store keeps in memory. Which slots are whole is `tiers.adoption`'s to
say.

Invariants:
- An object is there again with exactly the bytes, name and attributes that it had, or it is a miss: what was
  removed or never sealed does not come back, since a removal takes the row (of a block: the slot's header)
  away first.
- Afterwards no name row is without bytes, and no unit (`paths.unit_prefix`) without one of its files.
- An index that is not believed is dropped whole; a newer version's is left alone, and the start refused.

Concurrency: before the store serves anybody. A child process walks the index first: LMDB trusts its pages,
and a damaged one ends the process that reads it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb

from kvfs import limits, paths
from kvfs.errors import Corrupt
from kvfs.name_rows import load_row
from kvfs.name_tree import NameScan, NameTree
from kvfs.names import DIRECTORY, PINNED, NameIndex, NameRow
from kvfs.sizes import format_size
from tiers.adoption import ENTRY_PINNED, Survivor
from tiers.base import Kind
from tiers.blocks import Block
from tiers.home import Home
from tiers.model import Name
from tiers.nvme import NvmeTier
from tiers.rebuild import rebuild_index, restore_copies, restore_replaced, skip_ids
from tiers.replay import Replayed

if TYPE_CHECKING:
    from tiers.store import TieredStore

_MARK = b"start"
_DATABASES = (b"names", b"tails", b"buckets", b"meta")

log = logging.getLogger("kvfs.store")


@dataclass(frozen=True, slots=True)
class Lower:
    """The NVMe tier, and what a replay of its log found."""

    nvme: NvmeTier
    found: Replayed


class Heritage:
    """Opens the index of `home`; then `choose` is for `DramTier.open`, and `restore` for the store made of both.

    With a lower tier, an index that is not believed is built anew from its log.
    """

    def __init__(self, home: Home, lower: Lower | None = None, *, believe: bool = True) -> None:
        """Raises FormatMismatch for an index of a newer version, Corrupt: then again, without `believe`. Any other
        method may raise Corrupt too: not all of a damaged index shows at once."""
        began = time.monotonic()
        self._lower = lower
        self._rebuilt: int | None = None
        self._killed = not home.clean
        self._is_first = not home.index.exists() and (lower is None or not lower.found.records)
        self.names, believed = _open_index(home, believe, strict=lower is not None)
        if lower is not None:
            if not believed:
                self._rebuilt = rebuild_index(self.names, lower.found)
            skip_ids(self.names, lower.found)
        self._buckets = {row.bucket_id: row for row in self.names.buckets()}
        self._named: dict[int, tuple[Name, NameRow]] = {}
        """Object id -> the name and row of a survivor."""
        self._index_s = time.monotonic() - began
        self._began = time.monotonic()

    @property
    def below(self) -> tuple[int, int]:
        """(objects, capacity in bytes) of the lower tier, for the size of the table."""
        lower = self._lower
        return (0, 0) if lower is None else (len(lower.nvme.objects), lower.nvme.capacity_bytes)

    def choose(self, survivors: list[Survivor]) -> list[Survivor]:
        """Those that have a name or a bucket, the dearest first."""
        objects = {
            each.sealed.header.object_id: each
            for each in survivors
            if each.sealed.header.key.kind is Kind.OBJECT
        }
        known = {row.name for row in self._buckets.values()}
        for bucket, key, row in self.names.rows() if objects else ():
            survivor = None if row is None or row.flags & DIRECTORY else objects.get(row.object_id)
            if row is not None and survivor is not None and bucket in known and _agree(row, survivor):
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
        lost: list[Name] = []

        def keep(bucket: bytes, key: bytes, row: NameRow | None) -> bool:
            if row is None and self._lower is not None:  # the log knows what it said
                raise Corrupt(f"name index: the row of {Name(bucket, key)} is damaged")
            if row is not None and row.flags & DIRECTORY:
                return self.names.get_bucket(bucket) is not None
            name = Name(bucket, key)
            if row is not None and self._is_below(row):
                return True
            if row is not None and row.object_id in there and self._named[row.object_id][0] == name:
                return True
            lost.append(name)
            return False

        dropped = self.names.prune(keep)
        for survivor in reversed(adopted):  # the order of the calls is what the policy goes by
            self._restore_one(store, survivor)
        if adopted:
            self.names.skip_ids(max(each.sealed.header.sequence for each in adopted))
        if self._lower is not None:
            nvme, found = self._lower.nvme, self._lower.found
            lost = restore_replaced(self.names, nvme, found, lost)
            store.journal = restore_copies(store, nvme, found, compare=self._killed)
        for name in {Name(name.bucket, key) for name in lost if (key := paths.unit_prefix(name.key))}:
            _drop_unit(store, name)
        if not self._is_first:
            self._report(adopted, dropped, store.dram.verify_s)
        self._named.clear()

    def _is_below(self, row: NameRow) -> bool:
        return self._lower is not None and row.object_id in self._lower.nvme.objects

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

    def _report(self, adopted: list[Survivor], dropped: int, verify_s: float) -> None:
        adoption_s = time.monotonic() - self._began - verify_s
        total_bytes = sum(each.sealed.size_bytes for each in adopted)
        log.info(
            "taken over: %d objects, %s; %d names without bytes dropped; index %.3f s, adoption %.3f s, "
            "verify %.3f s (%.2f GB/s)",
            len(adopted),
            format_size(total_bytes),
            dropped,
            self._index_s,
            adoption_s,
            verify_s,
            total_bytes / max(verify_s, 1e-9) / 1e9,
        )
        if self._lower is not None:
            found = self._lower.found
            log.info(
                "read back: %d objects in %d segments, %d records; %s. log %.3f s",
                len(self._lower.nvme.objects),
                found.segments,
                found.records,
                "names from the index" if self._rebuilt is None else f"{self._rebuilt} names rebuilt",
                found.seconds,
            )


def unit_of(name: Name) -> bytes | None:
    """The eviction group of a name: the directory whose files are useful only together."""
    unit = paths.unit_prefix(name.key)
    return name.bucket + b"\0" + unit if unit else None


def _agree(row: NameRow, survivor: Survivor) -> bool:
    header = survivor.sealed.header
    return row.sequence == header.sequence and row.size_bytes == survivor.sealed.size_bytes


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
def _open_index(home: Home, believe: bool, *, strict: bool) -> tuple[NameIndex, bool]:
    """The index of the last service if it may be believed, else an empty one; with the mark of this start.

    `strict`: one damaged row is enough to disbelieve it, since a log has the same names, and what the index does
    not know is deleted there. Otherwise the damaged rows alone are lost.
    """
    names = _believed_index(home, strict) if believe else None
    believed = names is not None
    if names is None:
        _clear(home.index)
        names = NameIndex.open(home.index, map_size_bytes=limits.DEFAULT_NAME_MAP_BYTES)
    try:
        home.begin((names.get_meta(_MARK) or b"").decode(errors="replace"))
        names.put_meta(_MARK, home.start.encode())
        home.begun()
    except BaseException:
        names.close()
        raise
    return names, believed


def _believed_index(home: Home, strict: bool) -> NameIndex | None:
    if not (home.index / "data.mdb").exists():
        return None
    if not home.index_is_durable:
        why = "the machine went down while a service ran"
    elif not _can_be_walked(home.index, strict):
        why = "it is damaged"
    else:
        try:
            names = NameIndex.open(home.index, map_size_bytes=limits.DEFAULT_NAME_MAP_BYTES)
        except Corrupt as error:
            why = str(error)
        else:
            if home.knows_mark((names.get_meta(_MARK) or b"").decode(errors="replace")):
                return names
            names.close()
            why = "it is not the one that the last service used"
    log.warning("name index %s: %s: starting with an empty one", home.index, why)
    return None


def _clear(index: Path) -> None:
    """Empty the directory, which may be a link to another device."""
    if index.exists():
        for file in index.iterdir():
            file.unlink()


def _can_be_walked(path: Path, strict: bool) -> bool:
    """Whether a process can read and find every row of the index, change one, and live."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _walk(path, strict)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _walk(path: Path, strict: bool) -> None:
    # Without writemap, so that nothing of what is changed and not committed reaches the file.
    size_bytes = max((path / "data.mdb").stat().st_size, limits.DEFAULT_NAME_MAP_BYTES)
    env = lmdb.open(str(path), map_size=size_bytes, lock=False, create=False, max_dbs=8, writemap=False)
    with env.begin(write=True) as txn:
        dbs = {name: env.open_db(name, txn=txn, create=False) for name in _DATABASES}
        for name, db in dbs.items():
            left = txn.stat(db)["entries"]
            last = b""
            for key, value in txn.cursor(db=db):
                left -= 1
                if left < 0 or key <= last or txn.get(key, db=db) != value:
                    raise Corrupt(f"{path}: {name.decode()} is in disorder at {key[:80]!r}")
                last = key
            if strict and left:
                raise Corrupt(f"{path}: {name.decode()} does not have as many rows as it says")
        if strict:
            _decode_rows(txn, dbs)
        txn.put(_MARK, b"", db=dbs[b"meta"])
        txn.abort()


def _decode_rows(txn: lmdb.Transaction[bytes], dbs: dict[bytes, lmdb._Database]) -> None:
    """Raises Corrupt for a row that does not match its name."""
    for key, stored in txn.cursor(db=dbs[b"buckets"]):
        load_row(key, stored)
    scan = NameScan(NameTree(dbs[b"names"], dbs[b"tails"]), txn)
    found = scan.seek(b"\0")
    while found:
        load_row(scan.name, scan.value())
        found = scan.step()
